"""Is the rule of kd/study/learning.py right? Runs of the study of curves, and runs of
at least twice their length.

Run: python benchmarks/still_learning.py [--curves FILE]

FILE is a CSV or the .jsonl of benchmarks/curves.py; without it, the newest CSV of that
study. Two runs make a pair if they differ in nothing but their length. The rule reads
the validation scores of the short one; right or wrong is what the test pictures say:
the long one is better by more than the 95 % interval, or not by one standard error.
Between the two nothing is decided. The column `cut` tests the patience that ends labels
alone (kd/study/paying.py): the best validation score less the best at which patience
would have ended the run; empty where it would not have.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _record import newest, write
from kd.core.intervals import Z
from kd.core.text import markdown_table
from kd.study.learning import judge_learning
from kd.study.paying import patience_of

Row = dict[str, Any]
VALIDATION = {
    "tiny50_all": 500,
    "fruit10": 111,
    "fruit10_vit": 111,
    "dishes": 240,
    "tiny25": 250,
}  # pictures, else 200
AS_WRITTEN = {
    "tiny10": 8,
    "tiny50_all": 2,
    "fruit10": 18,
    "fruit10_vit": 18,
    "dishes": 7,
    "cifar100": 2,
}
"""Views of the teacher in what kd-init writes."""
# of each run, evenly spaced; with the last step, which is one more where 20 do not
# divide the steps
EVALUATIONS = 20


def read(file: Path | None) -> list[Row]:
    """Return the rows of the study."""
    if file is None:
        return newest("curves")[1]
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return list(
        csv.DictReader(
            line for line in file.read_text().splitlines() if not line.startswith("#")
        )
    )


def scores_of(row: Row) -> list[tuple[float, float]]:
    """Return (share of the steps, validation accuracy) of each evaluation."""
    steps = int(row["steps"])
    scores = [float(pair.split(":")[1]) for pair in row["curve"].split()]
    every = max(1, steps // EVALUATIONS)
    return [
        (min(1.0, (i + 1) * every / steps), score) for i, score in enumerate(scores)
    ]


def same(row: Row) -> tuple[str, ...]:
    """Return all that two runs of a pair have in common; as many views as epochs are a
    fresh view in each.
    """
    keys = dict(key.split("=", 1) for key in row["keys"].split())
    views = keys.pop("teacher.cache.views", str(AS_WRITTEN.get(row["setup"], "")))
    views = "fresh" if views == keys.pop("run.epochs", "") else views
    keys.pop("run.steps", None)
    views = "" if row["arm"] == "labels" else views
    return (
        row["setup"],
        row["arm"],
        str(row["seed"]),
        row["student"],
        views,
        json.dumps(keys, sort_keys=True),
    )


def gained(short: Row, long: Row) -> tuple[float, str]:
    """Return the longer run's gain on the test pictures, and whether it is more, no
    more, or unclear.
    """
    short_score, long_score = (float(row["accuracy"]) for row in (short, long))
    error = math.sqrt(
        sum(
            share * (1 - share) / int(short["test_images"])
            for share in (short_score, long_score)
        )
    )
    gain = long_score - short_score
    if gain > Z * error:
        return gain, "more"
    return gain, "unclear" if gain > error else "no more"


def cut(scores: Sequence[float]) -> str:
    """Return the points that patience would have cost, in validation accuracy; "": it
    would not have ended the run.
    """
    for end in range(1, len(scores) + 1):
        idle = end - 1 - scores.index(max(scores[:end]))
        if idle >= patience_of(len(scores)) and end < len(scores):
            return f"{100 * (max(scores) - max(scores[:end])):.1f} after {end}"
    return ""


def pairs(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield a row of each run: the rule's answer, and what each longer run gave."""
    for row in rows:
        scores = scores_of(row)
        if (
            row["setup"] == "trays" or len(scores) < EVALUATIONS
        ):  # its score is no share; ended by patience
            continue
        answer = judge_learning(scores, VALIDATION.get(row["setup"], 200))
        facts = {
            "setup": row["setup"],
            "cell": row["cell"],
            "seed": row["seed"],
            "steps": row["steps"],
        }
        facts |= {"answer": answer.answer, "reason": answer.reason}
        facts |= {"cut": cut([score for _, score in scores])}
        longer = [
            candidate
            for candidate in rows
            if same(candidate) == same(row)
            and int(candidate["steps"]) >= 2 * int(row["steps"])
        ]
        for longer_row in longer:
            gain, gave = gained(row, longer_row)
            right = {("learning", "more"): "right", ("stopped", "no more"): "right"}
            right |= {("learning", "no more"): "wrong", ("stopped", "more"): "wrong"}
            outcome = {
                "longer": f"{int(longer_row['steps']) / int(row['steps']):.2g}x",
                "gain": round(100 * gain, 2),
            }
            yield {
                **facts,
                **outcome,
                "gave": gave,
                "rule": right.get((answer.answer, gave), "open"),
            }
        if not longer:
            yield {**facts, "longer": "", "gain": "", "gave": "", "rule": ""}


def main() -> None:
    """Print the rows and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path)
    rows = list(pairs(read(parser.parse_args().curves)))
    print(markdown_table(rows))
    counts = Counter(row["rule"] for row in rows if row["rule"])
    print(
        ", ".join(f"{name} {count}" for name, count in counts.items())
        or "no run has a longer one"
    )
    write("still_learning", "python benchmarks/still_learning.py", rows)


if __name__ == "__main__":
    main()
