"""The line `expect` of `--check`: the measured gains are those of the CSVs, and no case beyond them has a line."""

import importlib.util
from pathlib import Path

import pytest
import torch

from kd import config
from kd.jobs.measured import FEW_LABELS, FEW_PICTURES, MANY_PASSES, NEAR, PASSES, expected
from kd.setup.recipe import resolve

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("results_page", ROOT / "tools" / "results.py")
assert SPEC is not None
assert SPEC.loader is not None
results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results)


def told(settings: dict, labels: list[int], classes: int, *overrides: str, epochs: float = 100) -> str:
    return "".join(expected(resolve(config.load(settings, overrides)), torch.tensor(labels), classes, epochs))


def committed(theme: str) -> list[dict[str, str]]:
    """Return the rows of a theme's newest CSV."""
    files = sorted((ROOT / "benchmarks" / "results").rglob(f"{theme}_amd-epyc-2cores_*.csv"))
    return results.read(files[-1])[1]


def over(theme: str, arm: str, other: str, **where: str) -> str:
    return results.gain(arm, other, **where)(committed(theme))[0].removesuffix(" points")


@pytest.mark.parametrize("labels", FEW_LABELS)
def test_gain_with_few_labels_is_that_of_its_csv(labels):
    where = {} if labels == 10 else {"labels": str(labels)}
    first = over("make-run", "distilled", "strong augmentation") if labels == 10 else ""
    assert FEW_LABELS[labels][1] == (first or over("proof_few_labels", "soft", "labels only, strong", **where))


@pytest.mark.parametrize("pictures", FEW_PICTURES)
def test_gain_with_few_pictures_is_that_of_its_csv(pictures):
    arms = (("soft", "hard"), ("soft", "labels only"))
    assert FEW_PICTURES[pictures] == tuple(over("proof_few_pictures", *pair, labels=str(pictures)) for pair in arms)


def test_a_run_with_few_labels_is_told_the_gain_of_the_nearest_measured_number(settings):
    few = [label for label in range(10) for _ in range(100)] + [-1] * 9000
    assert "100 labels per class" in told(settings, few, 10)
    assert FEW_LABELS[100][1] in told(settings, few, 10)


def test_a_run_with_few_pictures_is_told_the_gain_over_the_top_class(settings):
    pictures = [label for label in range(50) for _ in range(40)]
    assert 50 in FEW_PICTURES
    assert 50 / NEAR < 40
    assert all(text in told(settings, pictures, 50) for text in FEW_PICTURES[50])
    assert told(settings, [-1] * len(pictures), 50) == told(settings, pictures, 50), "labels are not needed"
    assert not told(settings, pictures, 50, epochs=MANY_PASSES[50] / NEAR - 1)


@pytest.mark.parametrize("number", FEW_PICTURES)
def test_a_run_with_few_pictures_is_as_long_as_the_measured_one(settings, number):
    """4,000 steps of 64 images."""
    assert MANY_PASSES[number] == 4000 * 64 // (50 * number)
    pictures = [label for label in range(50) for _ in range(number)]
    assert told(settings, pictures, 50, epochs=MANY_PASSES[number])
    assert not told(settings, pictures, 50, epochs=MANY_PASSES[number] / NEAR - 1)


def test_a_run_of_few_passes_over_few_labels_has_no_line(settings):
    few = [label for label in range(10) for _ in range(100)] + [-1] * 9000
    assert told(settings, few, 10, epochs=PASSES)
    assert not told(settings, few, 10, epochs=1)


@pytest.mark.parametrize(
    ("labels", "classes", "override"),
    [
        ([0, 1, 2, 3, 4] * 1000, 5, ""),  # all have a label
        ([*range(5)] * 100 + [-1] * 500, 5, ""),  # half of them
        ([*range(10)] * 45 + [-1] * 9000, 10, ""),  # between 25 and 100 labels
        ([*range(50)] * 1000, 50, ""),  # many pictures
        ([*range(50)] * 50, 50, "student.init=pretrained"),
        ([*range(10)] * 100 + [-1] * 9000, 10, "losses=[{kind: ce}]"),
    ],
)
def test_a_case_that_was_not_measured_has_no_line(settings, labels, classes, override):
    assert not told(settings, labels, classes, *[override] * bool(override))
