"""Is a small model that asks its teacher as right as the teacher, and does a promised
share of wrong answers hold?

For each run folder: the student's calibrated confidence and both models' answers on the
whole validation split, or with `--test` on the test split, whose halves are larger.
Parts:

- `pair`: the threshold with which the pair is as right as the teacher, chosen on every
  second image and judged on the others, and the pair at 15 % passed on.
- `promise`: 20 times the images are shuffled; `kd-export`'s own rule chooses on a half,
  for each promised share.
- `cost`: what the answer `sure` costs the endpoint, in CPU time beside the answer
  without it (with `--export FOLDER`).

Rows that a CSV of today has already are not measured again: a killed command goes on.

    python benchmarks/defer.py RUN [RUN ...] [--test] [--wrong 0.05 0.1] [--export FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _record import HERE, folder_of, hardware, write
from kd.core.intervals import paired_interval, wilson_interval
from kd.deploy.export.defer import Rule
from kd.files.run_dir import RunDir
from kd.models.live_teacher import LiveTeacher
from kd.setup.build import distributed
from kd.setup.build_teacher import load_fitted
from kd.setup.data import open_data
from kd.setup.finished import opened_run
from kd.setup.recipe import resolve
from kd.setup.student import best_student
from kd.study.report.confusion import Half
from kd.study.report.predictions import predict_all
from kd.study.report.record import Predictions

RESAMPLES = 20
MOST_PASSED = 0.15
FIELDS = (
    "part",
    "run",
    "seed",
    "asked",
    "images",
    "passed_on",
    "value",
    "low",
    "high",
    "beside",
    "cpu",
    "held",
)


def answers_of(path: Path, test: bool) -> Predictions:
    """Return what the best student of a run and its teacher answer on all images of a
    split.
    """
    folder, settings = opened_run(path)
    assert isinstance(folder, RunDir)
    recipe = resolve(settings)
    student, _ = best_student(folder, recipe, folder.manifest()["classes"])
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend, fill=False)
        if test:
            assert data.test is not None, "no test split"
            data = replace(data, val=data.test, stored=None)
        teacher = load_fitted(recipe, data).model
        assert teacher is not None
        device = torch.device("cpu")
        models: dict[str, Any] = {
            "student": student.eval(),
            "teacher": LiveTeacher(teacher, device).validation(),
        }
        predicted = predict_all(models, data.views()[1], 0, device)
    lists = (predicted["label"], predicted["student"], predicted["teacher"])
    extra = {"student_sure": predicted["student_sure"], "cpu_ms": predicted["cpu_ms"]}
    return Predictions(tuple(data.classes), *lists, of=predicted["of"], **extra)


def pairs(run: str, predictions: Predictions) -> list[dict[str, Any]]:
    """Return the pair at the threshold that equals the teacher on the other half, and
    at `MOST_PASSED`.
    """
    chosen = Half.of(predictions, 0)
    judged = Half.of(predictions, 1)
    cuts, _ = chosen.curve()
    passed_index = int(
        cuts[np.searchsorted(cuts, MOST_PASSED * len(chosen.sure), side="right") - 1]
    )
    rows = []
    for name, threshold in (
        ("equal", chosen.threshold()),
        ("most", float(chosen.sure[passed_index])),
    ):
        passed = judged.sure < threshold
        both = np.where(passed, judged.teacher, judged.student)
        share = float(passed.mean())
        low, high = paired_interval(
            int((both & ~judged.teacher).sum()),
            int((judged.teacher & ~both).sum()),
            len(both),
        )
        cost = predictions.cpu_ms["student"] / predictions.cpu_ms["teacher"] + share
        difference = float(both.mean() - judged.teacher.mean())
        rows.append(
            {
                "part": "pair",
                "run": run,
                "asked": name,
                "images": len(both),
                "passed_on": share,
                "value": difference,
            }
            | {
                "low": low,
                "high": high,
                "beside": float(judged.student.mean() - judged.teacher.mean()),
                "cpu": cost,
            }
            | {"held": difference >= -0.002 and share <= MOST_PASSED and cost <= 0.35}
        )
    return rows


def promises(run: str, predictions: Predictions, wrong: float) -> list[dict[str, Any]]:
    """Choose `RESAMPLES` times on a random half; held: the promise is not below the
    interval of the other half.
    """
    sure = np.array(predictions.student_sure)
    right = np.array(predictions.student) == np.array(predictions.label)
    rows = []
    for seed in range(RESAMPLES):
        order = np.random.default_rng(seed).permutation(len(sure))
        half = order[::2]
        judged = order[1::2]
        threshold, least = Rule(wrong=wrong).lowest(sure[half], right[half])
        row = {
            "part": "promise",
            "run": run,
            "seed": seed,
            "asked": wrong,
            "images": len(judged),
        }
        if math.isnan(threshold):
            rows.append({**row, "beside": least, "held": "not reached"})
            continue
        answered = sure[judged] >= threshold
        share = float((~right[judged][answered]).mean()) if answered.any() else 0.0
        count = int(answered.sum())
        low, high = wilson_interval(share, count)
        row |= {
            "passed_on": 1 - float(answered.mean()),
            "value": share,
            "low": low,
            "high": high,
            "held": low <= wrong,
        }
        rows.append(row)
    return rows


def cost(export: Path, rounds: int = 300) -> dict[str, Any]:
    """Measure an answer of the endpoint's own code with and without `sure`, in turns,
    in CPU time of one thread.
    """
    from kd.deploy.serve.decoding import prepare
    from kd.deploy.serve.limits import Limits
    from kd.deploy.serve.model import describe, load
    from kd.deploy.serve.responses import JSON, predictions
    from kd.deploy.serve.responses import write as written

    model = load(describe(export), 1, 1)
    picture = (HERE / "../docs/food_mini.jpg").read_bytes()
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * rounds + 20):
        marked = turn % 2 == 0
        start = time.process_time()
        logits = model.engine(
            prepare(picture, model.size, model.crop, Limits()).pixels[None]
        )
        between = time.process_time()
        output = model.output
        rows = predictions(
            logits, model.labels, 5, output.thresholds, output.unsure if marked else ()
        )
        written(JSON, rows, model.name, model.version)
        if turn >= 20:
            times[marked].append(time.process_time() - between)
            times.setdefault(None, []).append(between - start)  # type: ignore[call-overload]
    both_models = statistics.median(times[None]) + statistics.median(times[False])  # type: ignore[index]
    extra = statistics.median(times[True]) - statistics.median(times[False])
    fields = {
        "value": extra / both_models,
        "beside": both_models,
        "cpu": extra,
        "held": extra / both_models <= 0.01,
    }
    return {"part": "cost", "run": export.parent.name, "images": rounds, **fields}


def main() -> None:
    """Measure what is not in today's CSV, and write it after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--wrong", nargs="+", type=float, default=[0.05, 0.1])
    parser.add_argument("--export", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = f"defer_{hardware()}_{datetime.date.today().isoformat()}.csv"
    path = Path(os.environ.get("OUT") or folder_of("defer")) / name
    rows: list[dict[str, Any]] = []
    if path.is_file():
        with path.open() as file:
            rows = list(
                csv.DictReader(line for line in file if not line.startswith("#"))
            )
    command = (
        f"python benchmarks/defer.py RUN [RUN ...] {'--test ' * options.test}--wrong "
    )
    command += " ".join(map(str, options.wrong))
    command += " --export EXPORT" if options.export else ""

    def add(new_rows: list[dict[str, Any]]) -> None:
        rows.extend({field: row.get(field, "") for field in FIELDS} for row in new_rows)
        write("defer", command, rows)
        for row in new_rows:
            print(row, flush=True)

    for run in options.runs:
        missing = {
            ("pair", "equal"),
            *(("promise", str(wrong)) for wrong in options.wrong),
        }
        name = run.name + ", test" * options.test
        missing -= {
            (row["part"], str(row["asked"])) for row in rows if row["run"] == name
        }
        if missing:
            predictions = answers_of(run, options.test)
            new_rows = pairs(name, predictions) if ("pair", "equal") in missing else []
            for wrong in options.wrong:
                new_rows += (
                    promises(name, predictions, wrong)
                    if ("promise", str(wrong)) in missing
                    else []
                )
            add(new_rows)
    if options.export and not any(row["part"] == "cost" for row in rows):
        add([cost(options.export)])


if __name__ == "__main__":
    main()
