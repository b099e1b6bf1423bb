"""Measure what students cost: CPU time per image, size of the graph, parameters.

Each model is exported to ONNX as by `kd-export`, and the exporter's clock times several
in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import KdError
from kd.files.run_dir import RunDir
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.models.live_teacher import count_parameters
from kd.models.runtimes import median_cpu_ms
from kd.setup.recipe import resolve
from kd.setup.student import best_student
from kd.study.sweeps.space import Trial

COSTS = ("ms", "mb")  # objectives of a sweep that are no scores; smaller is better
SECONDS = 2.0  # most seconds of timing per model


def measure_costs(
    loads: Mapping[str, Callable[[], Classifier]], sides: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Return the costs of models, given functions that load them.

    `sides`: image sizes in pixels.
    """
    costs: dict[str, dict[str, Any]] = {}
    calls = {}
    rng = np.random.default_rng(0)
    for name, load in loads.items():
        try:
            model = load().eval()
            graph = runtimes.exported(runtimes.reparameterized(model), sides[name])
        except KdError as error:
            costs[name] = {"untimed": str(error)}
            continue
        costs[name] = {"mb": len(graph) / 1e6, "parameters": count_parameters(model)}
        image = rng.integers(0, 256, (1, 3, sides[name], sides[name]), np.uint8)
        calls[name] = partial(runtimes.onnx_runner(graph), image)
    for name, ms in median_cpu_ms(calls, SECONDS * len(calls)).items():
        costs[name]["ms"] = ms
    return costs


def student_of(folder: Path, trial: Trial) -> Classifier:
    """Return the chosen student of a trial's run, in the sweep's folder."""
    run = RunDir(folder / trial.name)
    return best_student(run, resolve(trial.config), run.manifest()["classes"])[0]
