"""Draw docs/soft-less-hard.svg: what the teacher's probabilities add to its top class, from the rows of `proof.py`.

Run: python benchmarks/soft_less_hard.py

Left: points of accuracy over pictures per class, where there are no other pictures and no labels. Right: the same
difference over the teacher's accuracy, for all experiments. "Hard" is the better of the arms with the teacher's class
that have the length of "soft". A dot is the mean over the seeds that both arms have; a bar is its 95 % interval, from
three seeds on.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kd.study.report.svg import standalone

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
BELOW = ("few_labels", "grocery_half")  # the name stands below the dot
COLORS = {"--many": "#2f6fde", "--few": "#d9822b"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 900, 330, 46, 40, 44, 70


class Point(NamedTuple):
    """A difference: its experiment, pictures or labels per class (0: all), the teacher's accuracy, points, interval."""

    experiment: str
    labels: int
    teacher: float
    points: float
    half: float  # 0: fewer than three seeds
    seeds: int


def point(experiment: str, labels: int, rows: Sequence[dict[str, str]]) -> Point | None:
    """Return soft less hard of the rows of one experiment and number of labels; None without a pair."""
    by_arm = {
        arm: {row["seed"]: float(row["accuracy"]) for row in rows if row["arm"] == arm} for arm in ("soft", *HARD)
    }
    hard = max((by_arm[arm] for arm in HARD if by_arm[arm]), key=lambda own: statistics.mean(own.values()), default={})
    pairs = [by_arm["soft"][seed] - value for seed, value in hard.items() if seed in by_arm["soft"]]
    if not pairs:
        return None
    half = STUDENT_T[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) in STUDENT_T else 0.0
    teacher = statistics.mean(float(row["teacher_accuracy"]) for row in rows if row["arm"] == "soft")
    return Point(experiment, labels, teacher, statistics.mean(pairs), half, len(pairs))


def points() -> list[Point]:
    """Return the differences of all committed rows, the newest file of each experiment."""
    found = []
    for experiment in NAMES:
        files = sorted(
            (ROOT / "benchmarks" / "results").rglob(f"proof_{experiment}_[a-z]*-*.csv"), key=lambda one: one.name[-14:]
        )
        if not files:
            continue
        rows = list(csv.DictReader(line for line in files[-1].read_text().splitlines() if not line.startswith("#")))
        rows = [row for row in rows if row["experiment"] == experiment]
        for labels in sorted({int(row["labels"]) for row in rows}):
            one = point(experiment, labels, [row for row in rows if int(row["labels"]) == labels])
            found += [one] if one else []
    return found


def panel(title: str, x_name: str, left: float, shown: Sequence[Point], log: bool, named: bool) -> list[str]:
    """Return the marks of one panel."""
    width, low, high = (WIDTH - LEFT - GAP) / 2 - 10, -4.0, 12.0
    value = [math.log10(one.labels) if log else one.teacher for one in shown]
    first, last = (min(value), max(value)) if log else (10.0 * (min(value) // 10), 10.0 * -(-max(value) // 10))
    pad = 0.12 * (last - first or 1.0) if log else 0.0
    x = [left + (one - first + pad) / (last - first + 2 * pad or 1.0) * width for one in value]

    def y(points: float) -> float:
        return TOP + (high - points) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{left:.0f}" y="18" style="font-weight:600">{title}</text>']
    for tick in range(int(low), int(high) + 1, 4):
        parts.append(
            f'<line class="grid" x1="{left:.0f}" x2="{left + width:.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        parts.append(f'<text x="{left - 6:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:+d}</text>')
    for mark in sorted({one.labels for one in shown}) if log else range(round(first), round(last) + 1, 10):
        place = left + ((math.log10(mark) if log else mark) - first + pad) / (last - first + 2 * pad or 1.0) * width
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - 24}" text-anchor="middle">{mark}{"" if log else " %"}</text>')
    parts.append(f'<text x="{left + width:.0f}" y="{HEIGHT - 6}" text-anchor="end">{x_name}</text>')
    for one, at in sorted(zip(shown, x, strict=True), key=lambda pair: pair[1]):
        color = "--many" if one.experiment in MANY else "--few"
        if one.half:
            ends = f'y1="{y(one.points - one.half):.1f}" y2="{y(one.points + one.half):.1f}"'
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" {ends} style="stroke:var({color});stroke-width:2"/>')
        parts.append(f'<circle cx="{at:.1f}" cy="{y(one.points):.1f}" r="5" style="fill:var({color})"/>')
        text = NAMES[one.experiment].format(labels=one.labels) if named else f"{one.points:+.1f}"
        below = one.experiment in BELOW
        where = f'x="{at:.1f}" y="{y(one.points) + (20 if below else -11):.1f}" text-anchor="middle"'
        parts.append(f'<text {where} style="font-size:11px">{text}</text>')
    return parts


def main() -> None:
    """Write the picture and print its points."""
    found = points()
    few = [one for one in found if one.experiment == "few_pictures"]
    second = LEFT + (WIDTH - LEFT - GAP) / 2 + GAP - 10
    parts = [
        *panel("Soft less hard, points of accuracy", "pictures per class", LEFT, few, log=True, named=False),
        *panel("The same over the teacher's accuracy", "", second, found, log=False, named=True),
        f'<circle cx="{second + 6:.0f}" cy="{HEIGHT - 10}" r="5" style="fill:var(--many)"/>',
        f'<text x="{second + 16:.0f}" y="{HEIGHT - 6}">pictures per class, 50 or 200 classes</text>',
        f'<circle cx="{second + 276:.0f}" cy="{HEIGHT - 10}" r="5" style="fill:var(--few)"/>',
        f'<text x="{second + 286:.0f}" y="{HEIGHT - 6}">10 or 28 classes</text>',
    ]
    for one in found:
        found_by = f"teacher {one.teacher:.1f} %, {one.seeds} seeds"
        print(f"{one.experiment} {one.labels}: {one.points:+.1f} ± {one.half:.1f} points ({found_by})")
    text = standalone(f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>', COLORS)
    (ROOT / "docs" / "soft-less-hard.svg").write_text(text)


if __name__ == "__main__":
    main()
