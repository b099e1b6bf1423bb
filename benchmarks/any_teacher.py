"""Every kind of teacher, on photographs: vit_food's student distilled live, from the cache, and resumed.

The teachers are small models made here (examples/any_teacher.py), fitted on the labels for a few epochs. The resumed
run is the live one, from its first checkpoint on; its last weights are compared bit for bit.

Run: python benchmarks/any_teacher.py --data PATH/grocery-fruit [--epochs 3] [--images 10]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

import kd
from _record import write

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))


def subset(root: Path, target: Path, images: int) -> Path:
    """Link the first images of each class of `train` and `val`."""
    for split in ("train", "val"):
        for folder in sorted((root / split).iterdir()):
            (target / split / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[: images or None]:
                (target / split / folder.name / file.name).symlink_to(file.resolve())
    return target


def weights(run: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's newest checkpoint."""
    return load_file(max((run.folder / "checkpoints").iterdir()) / "tensors.safetensors")


def measure(kind: str, teacher: dict[str, Any], given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Distil from one teacher in three ways."""
    shipped = yaml.safe_load((ROOT / "configs" / "vit_food.yaml").read_text())
    data = {"kind": "imagefolder", "root": given.data, "image_size": 64, "batch_size": 32, "workers": 0}

    def train(name: str, **changes: Any) -> Any:
        return kd.train(
            {
                "run": {"name": f"{kind}_{name}", "folder": str(work / "runs"), "epochs": given.epochs, "keep": 9},
                "data": {**data, "views": given.epochs},
                "teacher": {**teacher, **changes, "precision": "fp32"},
                "student": {**shipped["student"], "compile": "off"},
                "losses": shipped["losses"],
                "optimizer": shipped["optimizer"],
                "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
            }
        )

    live = train("live")
    cached = train("cached", cache={"views": given.epochs})
    expected = weights(live)
    shutil.copytree(live.folder, work / "runs" / f"{kind}_resumed", ignore=shutil.ignore_patterns(".lock"))
    for folder in sorted((work / "runs" / f"{kind}_resumed" / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(folder)
    resumed = weights(train("resumed"))
    same = all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())
    return {
        "kind": kind,
        "teacher": round(live.metrics["teacher_accuracy"], 4),
        "student_live": round(live.metrics["accuracy"], 4),
        "student_cached": round(cached.metrics["accuracy"], 4),
        "agreement": round(live.metrics["agreement"], 4),
        "resumed_bitwise": same,
        "images_per_second_live": round(live.images_per_second, 1),
        "images_per_second_cached": round(cached.images_per_second, 1),
    }


def main() -> None:
    """Make the teachers, distil from each, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=0, help="of each class and split; 0: all")
    given = parser.parse_args()
    from any_teacher import make  # type: ignore[attr-defined]  # that of examples/

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        given.data = str(subset(Path(given.data), Path(folder, "photographs"), given.images))
        for kind, teacher in make(Path(given.data), Path(folder, "teachers")).items():
            rows.append(measure(kind, teacher, given, Path(folder)))
            print(rows[-1], flush=True)
    write(
        "any_teacher",
        f"python benchmarks/any_teacher.py --data FOLDER --epochs {given.epochs} --images {given.images}",
        rows,
    )


if __name__ == "__main__":
    main()
