"""How far one temperature repairs the confidences of finished runs, on images that it was not fitted on.

Run: python benchmarks/calibration.py RUN [RUN ...]          (run folders, for example those of benchmarks/losses.py)

The temperature of `kd-export` is fitted on every second validation image. The errors are those of the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _record import write
from kd.core.text import table
from kd.deploy.export import parity as _parity
from kd.parts.tasks.single_label import calibration_error, temperature
from kd.setup.build import distributed
from kd.setup.data import open_data
from kd.setup.recipe import resolve
from kd.study.finished import best_student, opened_run


def one(path: Path) -> dict[str, Any]:
    """Return temperature and errors of a run's best student."""
    folder, settings = opened_run(path)
    recipe = resolve(settings)
    student, _ = best_student(folder, recipe.student, recipe.data.section, folder.manifest()["classes"])
    answer = _parity.eager_runner(student)
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend, fill=False)
        seen = [(answer(pixels), labels) for pixels, labels in _parity.shown_images(data, 0)]
    logits_NC, label_N = (torch.from_numpy(np.concatenate(each)) for each in zip(*seen, strict=True))
    found = temperature(logits_NC[::2], label_N[::2])
    rest_NC, rest_N = logits_NC[1::2], label_N[1::2]
    return {
        "run": recipe.record.name,
        "data": recipe.data.section.kind,
        "losses": " ".join(section.kind for section in recipe.student.losses),
        "images_fitted": len(logits_NC) - len(rest_N),
        "images": len(rest_N),
        "temperature": round(found, 4),
        "accuracy": round(100 * (rest_NC.argmax(1) == rest_N).double().mean().item(), 2),
        "calibration_error": round(100 * calibration_error(rest_NC, rest_N), 2),
        "calibrated": round(100 * calibration_error(rest_NC / found, rest_N), 2),
    }


def main() -> None:
    """Write the CSV and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    rows = [one(path) for path in parser.parse_args().runs]
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))
    write("calibration", "python benchmarks/calibration.py RUN [RUN ...]", rows)


if __name__ == "__main__":
    main()
