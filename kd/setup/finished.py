"""A finished or interrupted run, read: its configuration, its best student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kd import config
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.config.interpolate import resolve as interpolated
from kd.config.load import read_yaml
from kd.config.schema import DataSection
from kd.engine.criterion import Distillation
from kd.errors import KdError, RunError
from kd.host import environment
from kd.models.classifier import Classifier, digest
from kd.setup.recipe import StudentPlan
from kd.setup.student import build_student
from kd.setup.trust import named_module, untrusted

MAP_DATASET = "kd.data.map_dataset"
"""`data.kind` of a run of `kd.distill`."""


def opened_run(path: Path, trust: bool = False) -> tuple[RunDir, Config]:
    """Open a finished or interrupted run folder for reading."""
    folder = RunDir(path)
    stored = folder.stored_config()
    if stored is None:
        remedy = "Point at runs/NAME, the folder that `kd-train` wrote"
        raise RunError("run", f"'{path}' is not a run folder: it has no config.yaml", "", remedy)
    return folder, parse(folder.config_file, stored, trust)


def require_files(path: Path, settings: Config) -> None:
    """Refuse a run of `kd.distill` where its models and images must be built again from files.

    Raises:
        RunError: it is one.
    """
    if settings.data.kind == MAP_DATASET:
        raise RunError(
            "run",
            f"'{path}' was written by kd.distill: its models and images are Python objects",
            "kd-report reads it; the other commands read what kd-train wrote, with your network as student.kind=torch",
            "Call kd.distill again with the same arguments and this folder, then result.metrics or result.export",
        )


def parse(file: Path | str, text: str, trust: bool) -> Config:
    """Load a stored configuration."""
    key = module = ""
    try:
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
        content = content if isinstance(content, dict) else {}
        if not trust:
            key, module = named_module(interpolated(read_yaml(content), [], here=False))
        if not module:
            return config.load(content, here=False)
    except (YAMLError, OmegaConfBaseException, KdError, RecursionError, ValueError) as error:
        reason = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
        remedy = "Restore it, or choose another run.name"
        raise RunError("run.name", f"'{file}' is not the config of a run: {reason}", "", remedy) from error
    raise untrusted(key, f"names the module '{module}', which '{file}' would import")


def best_student(
    folder: RunDir, plan: StudentPlan, data: DataSection, classes: Sequence[str]
) -> tuple[Classifier, dict[str, Any]]:
    """Return the best checkpoint's student and where it came from; what its losses learned beside it is left out."""
    state, tensors, _ = folder.best()
    section = replace(plan.section, init="scratch", checkpoint="")  # the weights are loaded right afterwards
    student = build_student(replace(plan, section=section, features=()), classes, data.image_size)
    load_student(student, tensors)
    rows = [row for row in folder.metrics("val") if row["step"] == state.step]
    provenance = {
        "kd": environment()["packages"]["kd"],
        "step": state.step,
        "metrics": rows[-1] if rows else {},
        "run": folder.path.name,
        "digest": digest(student.network),
        "eval_crop": data.eval_crop,
    }
    return student, provenance


def load_distillation(distillation: Distillation, tensors: dict[str, torch.Tensor]) -> None:
    """Load the weights of a checkpoint: those of the losses' projectors, and the student's, averaged ones first."""
    prefix = "model."
    distillation.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    load_student(distillation.student, tensors)


def load_student(student: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load the student's weights of a checkpoint, averaged ones first."""
    prefix = "average." if any(name.startswith("average.") for name in tensors) else "model.student."
    student.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
