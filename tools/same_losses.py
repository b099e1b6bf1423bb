"""Print a hash of the losses of short runs with fixed modes: a refactor leaves every
line as it was.

    python tools/same_losses.py                      all runs, one line each
    python tools/same_losses.py live embedding       some of them

Every training row and every validation row counts, without what a clock told. Compare
with another commit by running this file there (`PYTHONPATH=CHECKOUT`): it uses
configuration keys alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kd

RENDERED = {
    "kind": "food_mini",
    "image_size": 64,
    "batch_size": 32,
    "micro_batch": 16,
    "eval_batch": 200,
    "workers": 0,
}
TEACHER = {"embed_dim": 128, "depth": 3, "num_heads": 4, "cls_attn_layers": 1}
STUDENT = {"embed_dim": 64, "depth": 2, "num_heads": 4, "cls_attn_layers": 1}
XCIT = "xcit_nano_12_p16_224"
RUNS: dict[str, dict[str, Any]] = {
    "live": {"run": {"steps": 60}},
    "cached": {"run": {"steps": 120}, "teacher": {"cache": {"views": 1}}},
    "sifted": {"run": {"steps": 200}, "sifter": {"kind": "history", "keep": 0.6}},
    "ranks": {"run": {"steps": 60}, "optimizer": {"zero": True}},
    "multilabel": {
        "run": {"steps": 60},
        "data": {"dishes": 3},
        "losses": [{"kind": "binary_kl"}, {"kind": "bce", "weight": 0.5}],
    },
    "embedding": {"run": {"steps": 60}, "losses": [{"kind": "cosine"}]},
    "label_free": {"run": {"steps": 60}, "data": {"labels": "none"}},
}


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of a run, whose teacher is fitted in `folder`, briefly."""
    teachers = folder / ("set_teachers" if name == "multilabel" else "teachers")
    fit = {"epochs": 1, "steps": 30, "lr": 1.5e-3, "folder": str(teachers)}
    result: dict[str, Any] = {
        "run": {
            "name": name,
            "folder": str(folder),
            "epochs": 10,
            "every": {"log": 1, "evaluate": 30},
        },
        "data": {**RENDERED, "root": os.environ.get("FOOD_MINI", str(folder / "food"))},
        "teacher": {
            "model": XCIT,
            "args": TEACHER,
            "precision": "fp32",
            "attention": "unfused",
            "compile": "off",
            "runtime": "torch",
            "min_accuracy": 0.0,
            "fit": fit,
        },
        "student": {
            "model": XCIT,
            "args": STUDENT,
            "attention": "unfused",
            "compile": "off",
        },
        "losses": [{"kind": "kl", "temperature": 2.0}],
        "optimizer": {"lr": 3e-3},
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }
    for section, keys in RUNS[name].items():
        if isinstance(keys, dict) and section in result:
            result[section] = {**result[section], **keys}
        else:
            result[section] = keys
    if name == "label_free":  # a teacher that brings its classes
        teacher = sorted((folder / "teachers").glob("*/export"))[0]
        result["teacher"].update(model=str(teacher), args={}, fit={"epochs": 0})
    return result


def digest(folder: Path) -> tuple[str, float]:
    """Return the hash of a run's rows and its last loss."""
    clocks = (
        "seconds",
        "cpu_seconds",
        "images_per_second",
        "step_ms",
        "data_wait",
        "optimizer_mib",
        "loading",
    )
    rows = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = {
            k: v
            for k, v in json.loads(line).items()
            if not k.startswith(("ms_", *clocks))
        }
        rows.append({key: row[key] for key in sorted(row)})
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16], losses[-1]


def main(names: list[str]) -> None:
    """Run the named configurations, or all."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in names or RUNS:
            if name == "label_free" and not list(folder.glob("teachers/*/export")):
                kd.train(settings("live", folder))
            file = folder / f"{name}.json"
            file.write_text(json.dumps(settings(name, folder)))
            ranks = (
                ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
                if name == "ranks"
                else []
            )
            command = [sys.executable, *ranks, __file__, "--one", str(file)]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode:
                raise SystemExit(f"{name}: {ended.stdout[-500:]}{ended.stderr[-2000:]}")
            print(name, *digest(folder / name), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        kd.train(json.loads(Path(sys.argv[2]).read_text()))
    else:
        main(sys.argv[1:])
