"""The line `expect` of `--check`: a range of measured gains, losses included, and nothing beyond the measured data."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from kd import config
from kd.jobs.measured import ALL, FEW_LABELS, FEW_PICTURES, expected
from kd.setup.recipe import resolve

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("results_page", ROOT / "tools" / "results.py")
assert SPEC is not None
assert SPEC.loader is not None
results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results)
SCARCE = [label for label in range(10) for _ in range(100)] + [-1] * 9000


def told(settings: dict, labels: list[int], classes: int, *overrides: str) -> str:
    return "".join(expected(resolve(config.load(settings, overrides)), torch.tensor(labels), classes))


def committed(theme: str) -> list[dict[str, str]]:
    """Return the rows of a theme's newest CSV."""
    files = sorted((ROOT / "benchmarks" / "results").rglob(f"{theme}_*cores_*.csv"))
    return results.read(files[-1])[1]


def gains(theme: str, arm: str, over: str, **where: str) -> list[float]:
    """Return the differences of the runs of each seed, points."""
    rows = [row for row in committed(theme) if all(row[key] == value for key, value in where.items())]
    mine, other = ({row["seed"]: float(row["accuracy"]) for row in rows if row["arm"] == each} for each in (arm, over))
    return [mine[seed] - other[seed] for seed in mine.keys() & other.keys()]


def test_the_ranges_are_those_of_the_csvs():
    labels = gains("make-run", "distilled", "strong augmentation")
    for number in ("25", "100", "400"):
        labels += gains("proof_few_labels", "soft", "labels only, strong", labels=number)
    pictures = gains("proof_few_pictures", "soft and labels", "labels only", labels="50")
    for number in ("10", "50", "200"):
        pictures += gains("proof_few_pictures", "soft", "labels only", labels=number)
    others = [gains("make-run", f"distilled, {kind}", f"smoothing, {kind}")[0] for kind in ("all labels", "scratch")]
    others += gains("proof_wrong_labels", "soft", "labels only") + gains("proof_grocery", "soft", "labels only")
    for of, values in ((FEW_LABELS, labels), (FEW_PICTURES, pictures), (ALL, labels + pictures + others)):
        assert of == (round(min(values), 1), round(max(values), 1))


def test_a_run_with_few_labels_is_told_the_range_of_all_that_is_near_and_of_the_losses(settings):
    """One whose student lost 6.1 points was told +17.0 ± 7.9, which another student and teacher had gained."""
    line = told(settings, SCARCE, 10)
    assert [float(number) for number in re.findall(r"[+-]\d+\.\d", line)] == [*FEW_LABELS, *ALL]
    assert all(word in line for word in ("few labels", "students", "teachers", "steps"))


@pytest.mark.parametrize("number", [40, 10, 200])
def test_a_run_with_few_pictures_is_told_its_range_with_and_without_labels(settings, number):
    pictures = [label for label in range(50) for _ in range(number)]
    line = told(settings, pictures, 50)
    assert f"few pictures of many classes, no others: {FEW_PICTURES[0]:+.1f} to {FEW_PICTURES[1]:+.1f}" in line
    assert told(settings, [-1] * len(pictures), 50) == line


@pytest.mark.parametrize(
    ("labels", "classes", "override"),
    [
        ([0, 1, 2, 3, 4] * 1000, 5, ""),  # all have a label
        ([*range(5)] * 100 + [-1] * 500, 5, ""),  # half of them
        ([*range(10)] * 6 + [-1] * 9000, 10, ""),  # fewer than ten labels
        ([*range(10)] * 700 + [-1] * 90000, 10, ""),  # many
        ([*range(50)] * 1000, 50, ""),  # many pictures
        ([*range(50)] * 50, 50, "student.init=pretrained"),
        (SCARCE, 10, "losses=[{kind: ce}]"),
    ],
)
def test_a_case_that_was_not_measured_has_no_line(settings, labels, classes, override):
    assert not told(settings, labels, classes, *[override] * bool(override))
