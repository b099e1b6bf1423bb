"""What int8 costs trained students, rung by rung, how fast it is beside onnxruntime's float32.

    python benchmarks/int8.py RUN [RUN ...] [--images N]
    python benchmarks/int8.py RUN --plant 64

With --plant, outliers are put into every block first: some channels of each norm times so much, and the columns of the
layer behind it divided by as much. The float32 student answers as before; MinMax ranges (no SmoothQuant) are ruined.
Times: CPU milliseconds of one image with one thread, all graphs in turns, medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _record import write
from kd.deploy.export import int8
from kd.deploy.export.parity import shown_images
from kd.deploy.export.variants import Variant
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.setup.build import distributed
from kd.setup.data import open_data
from kd.setup.recipe import resolve
from kd.study.finished import best_student, opened_run

ROUNDS = 60
FLOAT = "openvino.xml"


def plant(student: Classifier, scale: float, channels: int = 2) -> Classifier:
    """Return a student with the same answers and outliers behind every norm before a linear layer."""
    planted = copy.deepcopy(student)
    with torch.no_grad():
        for block in planted.network.blocks:  # type: ignore[union-attr]
            pairs = [(block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)]
            for norm, linear in pairs:
                norm.weight[:channels] *= scale
                norm.bias[:channels] *= scale
                linear.weight[:, :channels] /= scale
    return planted


def times(folder: Path, image: np.ndarray) -> dict[str, float]:
    names = [name for name in (int8.ONNX, int8.DYNAMIC, FLOAT, int8.STATIC) if (folder / name).is_file()]
    runners = {name: Variant.at(folder / name).runner() for name in names}
    took: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS + 3):
        for name, run in runners.items():
            start = time.process_time()
            run(image)
            if turn > 2:
                took[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(each) for name, each in took.items()}


def measure(path: Path, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    run, settings = opened_run(path)
    recipe, manifest = resolve(settings), run.manifest()
    student, _ = best_student(run, recipe.student, recipe.data.section, manifest["classes"])
    student.eval()
    student = plant(student, options.plant) if options.plant else student
    size, rungs = recipe.data.section.image_size, []
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend, fill=False)
        views = partial(shown_images, data, training=True)
        exam = int8.Exam.of(recipe.student.task, student, partial(shown_images, data, options.images))
        onnx, static = folder / int8.ONNX, folder / int8.STATIC
        runtimes.write_onnx(runtimes.export_program(runtimes.reparameterized(student), size), onnx)
        runtimes.write_openvino(onnx, folder / FLOAT)
        rungs.append(exam("float32, onnxruntime", onnx))
        rungs.append(exam("float32, OpenVINO", folder / FLOAT))
        runtimes.write_int8(onnx, folder / int8.DYNAMIC)
        rungs.append(exam("dynamic", folder / int8.DYNAMIC))
        if options.plant:
            int8.post_training(onnx, static, views, smooth=False)
            rungs.append(exam("MinMax", static))
        int8.post_training(onnx, static, views)
        rungs.append(exam("post-training", static))
        image = next(iter(exam.images()))[0][:1]
        spent = times(folder, image)
    rows = []
    for rung in rungs:
        print(f"{path.name}: {rung.line()}", flush=True)
        ms = 0.0 if rung.name == "MinMax" else spent[rung.file]
        rows.append(
            {
                "run": path.name,
                "planted": options.plant,
                "rung": rung.name,
                "images": len(exam.labels),
                "accuracy": round(rung.score, 5),
                "drop_points": round(100 * rung.drop, 3),
                "drop_low": round(100 * rung.interval[0], 3),
                "drop_high": round(100 * rung.interval[1], 3),
                "as_trained": round(rung.agreement, 5),
                "mb": round(rung.bytes / 1e6, 3),
                "cpu_ms": round(ms, 4) or "",
                "times_as_fast": round(spent[int8.ONNX] / ms, 3) if ms else "",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--images", type=int, default=0, help="validation images; 0: all")
    parser.add_argument("--plant", type=float, default=0.0)
    parser.add_argument("--theme", default="int8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shown = " ".join(f"--{name} {getattr(options, name):g}" for name in ("images", "plant"))
    rows = []
    for run in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(run, options, Path(folder))
        write(options.theme, f"python benchmarks/int8.py RUN ... {shown}", rows)  # what follows may fail


if __name__ == "__main__":
    main()
