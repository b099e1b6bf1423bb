"""The README's "Your own images": from a folder and two files of weights to a verified
export, in five commands.

Run: python benchmarks/from_folder.py FOLDER TEACHER STUDENT [--work FOLDER] [--sentence SENTENCE] [key=value ...]

FOLDER has train/, val/ and test/ with class folders; TEACHER and STUDENT are files of
weights for `kd init`. One row: the scores of teacher and student on the test images,
the accepted file and its share of right answers there, CPU minutes of training, and
what `kd verify` found. A run that was interrupted goes on. The keys are overrides of
`kd train`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from _record import commit, write
from kd.core.intervals import wilson_interval
from kd.deploy.export.variants import size
from kd.files.run_dir import RunDir


def call(work: Path, *words: str, ends: tuple[int, ...] = (0,)) -> str:
    """Run a command of kd in `work`; return what it printed."""
    path = os.pathsep.join(
        [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kd", *words],
        stdout=subprocess.PIPE,
        cwd=work,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    text = process.stdout.read()
    if (code := process.wait()) not in ends:
        raise SystemExit(f"kd {' '.join(words)} ended with {code}")
    return text


def trained_minutes(runs: Path) -> float:
    """Return the CPU minutes of the teacher's fit, its predictions and the student, of
    all starts.
    """
    folders = [
        runs / "own",
        *(path for path in (runs / "teachers").glob("*") if path.is_dir()),
    ]
    return (
        sum(RunDir(folder).metrics("train")[-1]["cpu_seconds"] for folder in folders)
        / 60
    )


def main() -> None:
    """Run the commands and write the row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("student", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs", "from_folder"))
    parser.add_argument("--sentence", default="drop<=2 mb<=4")
    parser.add_argument("overrides", nargs="*", help="key=value of kd train")
    options = parser.parse_intermixed_args()
    folder, teacher, student = (
        str(path.resolve())
        for path in (options.folder, options.teacher, options.student)
    )
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "own.yaml").is_file():
        call(
            options.work,
            "init",
            folder,
            "--teacher",
            teacher,
            "--student",
            student,
            "-o",
            "own.yaml",
        )
    call(options.work, "train", "own.yaml", *options.overrides)
    call(options.work, "export", "runs/own", "--accept", options.sentence)
    test = options.folder / "test"
    answers = options.work / "answers.csv"
    answers.unlink(missing_ok=True)
    call(
        options.work,
        "predict",
        "runs/own/export",
        str(test.resolve()),
        "--to",
        answers.name,
    )
    verified = json.loads(
        call(
            options.work,
            "verify",
            "runs/own/export",
            "--data",
            folder,
            "--json",
            ends=(0, 1),
        )
    )
    wrong = [row["what"] for row in verified["rows"] if row["verdict"] == "WRONG"]
    with answers.open(newline="") as file:
        answered = list(csv.DictReader(file))
    right = sum(Path(row["image"]).parent.name == row["label"] for row in answered)
    export = options.work / "runs/own/export"
    manifest = json.loads((export / "manifest.json").read_text())
    scored = json.loads((options.work / "runs/own/scored.json").read_text())
    row = scored["row"]
    images = scored["images"]
    low, high = wilson_interval(row["accuracy"], images)
    accepted = manifest["accepted"]
    measured = {
        "folder": options.folder.resolve().name,
        "teacher": round(100 * row["teacher_accuracy"], 2),
        "student": round(100 * row["accuracy"], 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "images": images,
        "file": accepted["file"],
        "mb": round(size(export / accepted["file"]) / 1e6, 2),
        "file_right": round(100 * right / len(answered), 2),
        "cpu_ms": manifest["parity"][accepted["file"]]["cpu_ms"],
        "train_cpu_minutes": round(trained_minutes(options.work / "runs"), 1),
        "claims": len(verified["rows"]),
        "wrong": len(wrong),
        "commit": commit(),
    }
    print(measured)
    words = [f'--sentence "{options.sentence}"', *options.overrides]
    write(
        "from_folder",
        f"python benchmarks/from_folder.py FOLDER TEACHER STUDENT {' '.join(words)}",
        [measured],
    )


if __name__ == "__main__":
    main()
