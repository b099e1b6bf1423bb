"""Draw docs/soft-less-hard.svg: what the teacher's probabilities add to its top class,
from the rows of `proof.py`.

Run: python benchmarks/soft_less_hard.py

Left: points of accuracy over pictures per class, where there are no other pictures and
no labels. Right: the same difference over the teacher's accuracy, for all experiments.
"Hard" is the better of the arms with the teacher's class that have the length of
"soft". A dot is the mean over the seeds that both arms have; a bar is its 95 %
interval, from three seeds on.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kd.study.report.charts import FILE, Axis, Chart, Points, Series
from kd.study.report.charts import points as drawn_points

ROOT = Path(__file__).resolve().parents[1]
STUDENT_T = {3: 4.303}  # two-sided 95 %, by the number of seeds
HARD = ("hard", "whole, hard")
NAMES = {
    "few_labels": "{labels} labels",
    "few_pictures": "{labels}",
    "few_pictures_200": "200 classes",
    "wrong_labels": "40 % wrong",
    "tiny_imagenet": "500",
    "grocery_half": "fruit",
}
MANY = ("few_pictures", "few_pictures_200", "tiny_imagenet")  # 50 classes or 200
COLORS = {"50 or 200 classes": "#2f6fde", "10 or 28 classes": "#d9822b"}
SIZE = (390, 250)  # of a panel, pixels


class Point(NamedTuple):
    """A difference: its experiment, pictures or labels per class (0: all), the
    teacher's accuracy, points, interval.
    """

    experiment: str
    labels: int
    teacher: float
    points: float
    half: float  # 0: fewer than three seeds
    seeds: int


def point(experiment: str, labels: int, rows: Sequence[dict[str, str]]) -> Point | None:
    """Return soft less hard of the rows of one experiment and number of labels; None
    without a pair.
    """
    by_arm = {
        arm: {row["seed"]: float(row["accuracy"]) for row in rows if row["arm"] == arm}
        for arm in ("soft", *HARD)
    }
    hard = max(
        (by_arm[arm] for arm in HARD if by_arm[arm]),
        key=lambda by_seed: statistics.mean(by_seed.values()),
        default={},
    )
    pairs = [
        by_arm["soft"][seed] - value
        for seed, value in hard.items()
        if seed in by_arm["soft"]
    ]
    if not pairs:
        return None
    half = (
        STUDENT_T[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
        if len(pairs) in STUDENT_T
        else 0.0
    )
    teacher = statistics.mean(
        float(row["teacher_accuracy"]) for row in rows if row["arm"] == "soft"
    )
    return Point(experiment, labels, teacher, statistics.mean(pairs), half, len(pairs))


def points() -> list[Point]:
    """Return the differences of all committed rows, the newest file of each
    experiment.
    """
    measured = []
    for experiment in NAMES:
        files = sorted(
            (ROOT / "benchmarks" / "results").rglob(f"proof_{experiment}_[a-z]*-*.csv"),
            key=lambda candidate: candidate.name[-14:],
        )
        if not files:
            continue
        rows = list(
            csv.DictReader(
                line
                for line in files[-1].read_text().splitlines()
                if not line.startswith("#")
            )
        )
        rows = [row for row in rows if row["experiment"] == experiment]
        for labels in sorted({int(row["labels"]) for row in rows}):
            candidate = point(
                experiment,
                labels,
                [row for row in rows if int(row["labels"]) == labels],
            )
            measured += [candidate] if candidate else []
    return measured


def panel(chosen: Sequence[Point], x_axis: Axis, named: bool) -> Chart:
    """Return a panel: over the pictures per class if its axis is logarithmic, else over
    the teacher's accuracy.
    """
    groups = []
    for (name, color), is_many in zip(COLORS.items(), (True, False), strict=True):
        of_kind = [item for item in chosen if (item.experiment in MANY) == is_many]
        at = [
            (float(item.labels) if x_axis.log else item.teacher, item.points)
            for item in of_kind
        ]
        texts = [
            (
                NAMES[item.experiment].format(labels=item.labels)
                if named
                else f"{item.points:+.1f}"
            )
            for item in of_kind
        ]
        intervals = [
            (item.points - item.half, item.points + item.half) if item.half else None
            for item in of_kind
        ]
        groups.append(Points(name, color, at, texts, intervals))
    axes = (x_axis, Axis("soft less hard, points of accuracy"))
    return drawn_points(groups, SIZE, axes, [], Series("", "", [], []), [])


def main() -> None:
    """Write the picture and print its points."""
    measured = points()
    few = [item for item in measured if item.experiment == "few_pictures"]
    left_panel = panel(few, Axis("pictures per class", log=True), named=False)
    right = panel(measured, Axis("accuracy of the teacher, %"), named=True)
    for item in measured:
        found_by = f"teacher {item.teacher:.1f} %, {item.seeds} seeds"
        print(
            f"{item.experiment} {item.labels}: {item.points:+.1f} ± {item.half:.1f} points"
            f" ({found_by})"
        )
    text = Chart(
        {
            "hconcat": [left_panel.spec, right.spec],
            "resolve": {"scale": {"color": "independent"}},
        }
    ).svg(FILE)
    (ROOT / "docs" / "soft-less-hard.svg").write_text(text)


if __name__ == "__main__":
    main()
