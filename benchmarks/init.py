"""Is the file that `kd init` writes near the best of a nine-run `kd-sweep` around it, on three folders?

The sweep varies the rate by 0.5, 1 and 2 and the temperature over 1, 2 and 4, all shortened to `--share` of the file's
epochs, with one teacher and its answers to at most four views. The best of nine is chosen on validation images, as a
user would. It, two runs of it with other seeds and the run of init's own values are then scored on test images.

Run: python benchmarks/init.py --data FOLDER --weights FILE --work FOLDER [--only fruit cifar10 tiny] [--share 0.125]

FOLDER of data: grocery-fruit/, cifar10/ and tiny-imagenet/, splits of class folders. FILE: efficientnet-lite0.pth. Of
CIFAR-10 200 pictures a class are taken, of Tiny ImageNet 20 classes of 100. The same command goes on after a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import kd
from _record import write
from kd.core.intervals import wilson
from kd.jobs.init.init import init

TAKEN = {"cifar10": ("cifar10", "test", 10, 200), "tiny": ("tiny-imagenet", "val", 20, 100)}
"""Where the images of a folder lie, its test split, how many classes of it, and images a class of each split."""


def folder(data: Path, name: str, work: Path) -> Path:
    """Return the folder of images: links to a part of it, or grocery-fruit as it is."""
    if name not in TAKEN:
        return data / "grocery-fruit"
    source, test, classes, images = TAKEN[name]
    for split, to in {"train": "train", test: "test"}.items():
        for one in sorted(path for path in (data / source / split).iterdir() if path.is_dir())[:classes]:
            place = work / name / to / one.name
            place.mkdir(parents=True, exist_ok=True)
            for path in sorted(path for path in one.rglob("*") if path.is_file())[:images]:
                if not (place / path.name).exists():
                    os.symlink(path, place / path.name)
    return work / name


def measure(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Write init's file and sweep around it; return a row a run."""
    file, work = options.work / f"{name}.yaml", options.work
    if not file.exists():
        init(folder(options.data.resolve(), name, work), file, str(options.weights.resolve()), None, None)
    written = yaml.safe_load(file.read_text())
    rate, epochs = written["optimizer"]["lr"], max(2, round(options.share * written["run"]["epochs"]))
    common = [f"run.epochs={epochs}", f"run.folder={work}", "run.every.evaluate=100000", "backend.threads=1"]
    common += [f"teacher.fit.folder={work / 'teachers'}", f"teacher.cache.views={min(4, epochs)}"]
    axes = [f"optimizer.lr={rate / 2:g},{rate:g},{2 * rate:g}", "losses.0.temperature=1.0,2.0,4.0"]
    swept = kd.sweep(str(file), *common, *axes)
    own = next(row for row in swept.rows if [*map(float, row["values"].values())] == [rate, 2.0])
    subprocess.run([sys.executable, "-m", "kd", "train", str(swept.folder / f"{own['trial']}.yaml")], check=True)
    scored = json.loads((swept.folder / own["trial"] / "scored.json").read_text())
    accuracy = scored["row"]["accuracy"]
    own["test"] = {"score": accuracy, "interval": wilson(accuracy, scored["images"])}
    swept.rows[0]["test"] = swept.tested
    rows = []
    for row in [*swept.rows, *swept.fresh]:
        run = [who for who, one in (("init", own), ("best of nine", swept.rows[0])) if row is one]
        run += ["best, another seed"] * any(row is one for one in swept.fresh)
        numbers = [row["score"], *([row["test"]["score"], *row["test"]["interval"]] if "test" in row else [""] * 3)]
        shown = [round(100 * one, 2) if one != "" else "" for one in numbers]
        values = {"lr": row["values"]["optimizer.lr"], "temperature": row["values"]["losses.0.temperature"]}
        scores = dict(zip(("validation", "test", "low", "high"), shown, strict=True))
        rows.append({"folder": name, "run": " and ".join(run) or "other", "epochs": epochs, **values, **scores})
        rows[-1]["teacher"] = round(100 * scored["row"]["teacher_accuracy"], 2)
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure the folders and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "weights", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=["fruit", *TAKEN])
    parser.add_argument("--share", type=float, default=0.125)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = [row for name in options.only for row in measure(options, name)]
    write("init", "python benchmarks/init.py --data FOLDER --weights FILE --work FOLDER", rows)


if __name__ == "__main__":
    main()
