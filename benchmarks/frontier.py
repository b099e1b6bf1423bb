"""How small may a student be? kd-sweep over students of CIFAR-10 at 64 px, and its
table as a CSV beside the picture.

The networks of `STUDENTS` learn from the answers of one teacher to the same two views
of 45,000 images, with one thread each; then kd-sweep times all of them in turns. The
teacher is that of configs/cifar10.yaml, which looks at 32 px: it is fitted first,
unless `teacher.checkpoint` names its weights; `teacher.kind=...` begins another
teacher. A run that was stopped goes on by the same command. All scores are of the test
images: weights of a teacher that was fitted elsewhere may have seen the validation
images. Those choose a student's checkpoint, and the best student.

Run, in a checkout: python benchmarks/frontier.py data.root=PATH/cifar10 [key=value ...] [--jobs N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from optuna.study import StudyDirection

import kd
from _record import write
from kd.config.flat import plain
from kd.core.intervals import wilson_interval
from kd.jobs.evaluate import evaluate
from kd.parts.tasks.single_label import SCORES
from kd.study.sweeps.frontier import frontier_svg
from kd.study.sweeps.search import on_pareto_front

PIXELS = {"mean": [0.491, 0.482, 0.447], "std": [0.247, 0.243, 0.262]}
OWN = {
    "kind": "torch",
    "model": "examples.residual:network",
    **PIXELS,
    "input_size": 32,
}
VIT = {"model": "vit_tiny_patch16_224"}
STUDENTS: dict[str, dict[str, Any]] = {
    "residual_8": {**OWN, "args": {"width": 8}},
    "residual_16": {**OWN, "args": {"width": 16}},
    "lcnet": {"model": "lcnet_050"},
    "mobilenetv4": {"model": "mobilenetv4_conv_small_050"},
    "convnext": {"model": "test_convnext"},
    "vit_16": {
        **VIT,
        "args": {"patch_size": 16, "embed_dim": 96, "depth": 6, "num_heads": 3},
    },
    "vit_8": {
        **VIT,
        "args": {"patch_size": 8, "embed_dim": 96, "depth": 6, "num_heads": 3},
    },
    "xcit": {
        "model": "xcit_nano_12_p8_224",
        "args": {"embed_dim": 64, "depth": 6, "num_heads": 4},
    },
    "repvit": {
        "model": "repvit_m0_9",
        "args": {"embed_dim": [24, 48, 96, 192], "depth": [1, 1, 4, 1]},
    },
    "efficientvit": {"model": "efficientvit_b0"},
    "mobilevit": {"model": "mobilevit_xxs"},
    "tinyvit": {
        "model": "tiny_vit_5m_224",
        "args": {
            "embed_dims": [24, 48, 72, 96],
            "depths": [1, 1, 2, 1],
            "num_heads": [1, 2, 3, 4],
        },
    },
}
LESS_TIME = (StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE)  # milliseconds, accuracy
TEACHER_SIZE = "teacher.input_size=32"
KEYS = (
    "run.name=frontier_cifar10",
    "run.epochs=2",
    "run.baseline=false",
    "data.image_size=64",
    "data.batch_size=64",
    "data.val_fraction=0.1",
    TEACHER_SIZE,
    "optimizer.lr=2e-3",
    "backend.kind=cpu",
    "backend.precision=fp32",
    "backend.threads=1",
)


def on_test(sweep: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a trial with its scores of the test images."""
    scored = evaluate(sweep.folder / row["trial"], trust=True, split="test")
    accuracy = scored.row["accuracy"]
    teacher = scored.row["teacher_accuracy"]
    low, high = wilson_interval(accuracy, scored.images)
    scores = {
        "val": row["score"],
        "score": accuracy,
        "interval": [low, high],
        "teacher": teacher,
    }
    return {
        **row,
        **{key: round(value, 4) for key, value in scores.items() if key != "interval"},
        "interval": [low, high],
    }


def rows_of(
    rows: list[dict[str, Any]], fresh: list[dict[str, Any]], teacher: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows of a CSV: each student, the best with other seeds, the
    teacher.
    """
    names = {
        json.dumps(student, sort_keys=True): name for name, student in STUDENTS.items()
    }
    costs = ("ms", "mb", "parameters", "frontier", "untimed")
    lines: list[dict[str, Any]] = [
        {"what": "teacher", "test": teacher["score"], **teacher}
    ]
    for kind, trial in [
        *(("student", row) for row in rows),
        *(("best again", row) for row in fresh),
    ]:
        low, high = trial["interval"]
        csv_row = {
            "what": kind,
            "student": names[
                json.dumps(json.loads(trial["values"]["student"]), sort_keys=True)
            ],
        }
        csv_row |= {
            "seed": trial["values"].get("run.seed", ""),
            "test": trial["score"],
            "val": trial["val"],
        }
        csv_row |= {
            "low": round(low, 4),
            "high": round(high, 4),
            **{key: trial.get(key, "") for key in costs},
        }
        lines.append(csv_row)
    columns = ("what", "student", "seed", "test", "low", "high", "val", *costs)
    lines = [
        {**line, **{key: round(line[key], 3) for key in ("ms", "mb") if line.get(key)}}
        for line in lines
    ]
    return [{key: line.get(key, "") for key in columns} for line in lines]


def printable(argv: list[str]) -> str:
    """Return a command without the paths of this machine."""
    pairs = [text.partition("=") for text in argv]
    hidden = {"data.root": "PATH/cifar10", "teacher.checkpoint": "FILE"}
    absolute = [value.startswith(("/", "~")) for _, _, value in pairs]
    return " ".join(
        f"{key}={hidden.get(key, 'FOLDER')}" if is_path else text
        for text, (key, _, _), is_path in zip(argv, pairs, absolute, strict=True)
    )


def main() -> None:
    """Sweep over the students and write the CSV and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="students at a time, each on one core"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(STUDENTS),
        default=list(STUDENTS),
        help="some students",
    )
    parser.add_argument("overrides", nargs="*", help="key=value for all")
    options = parser.parse_args()
    settings = plain("cifar10")
    keys = [*KEYS, *options.overrides]
    if any(
        text.startswith(("teacher=", "teacher.kind=")) for text in options.overrides
    ):
        settings.pop("teacher")
        keys.remove(TEACHER_SIZE)
    axis = "student=" + ",".join(json.dumps(STUDENTS[name]) for name in options.only)
    sweep = kd.sweep(settings, *keys, axis, jobs=options.jobs)
    rows, fresh = (
        [on_test(sweep, row) for row in each] for each in (sweep.rows, sweep.fresh)
    )
    timed = sorted((row for row in rows if "ms" in row), key=lambda row: row["ms"])
    for row, holds in zip(
        timed,
        on_pareto_front([(row["ms"], row["score"]) for row in timed], LESS_TIME),
        strict=True,
    ):
        row["frontier"] = holds
    costs = sweep.study.user_attrs["costs"]["costs"]
    teacher = {"score": rows[0]["teacher"], **costs["teacher"]}
    command = printable(["python benchmarks/frontier.py", *sys.argv[1:]])
    file = write("frontier_cifar10", command, rows_of(rows, fresh, teacher))
    file.with_suffix(".svg").write_text(frontier_svg(rows, teacher, SCORES.own[0]))
    print(sweep.text)


if __name__ == "__main__":
    main()
