"""Measured gains of distillation for a student of random weights: the line `expect` of `--check`.

The values are those of docs/does-it-help.md, from the CSVs that it names; a test recomputes them. There is no line for
a case between or beyond the measured ones.
"""

from collections.abc import Mapping

import torch

from kd.setup.recipe import Recipe

NEAR = 1.5
"""A measured number of labels or pictures per class covers those up to this many times more or fewer. The gains of
neighbouring rows (a factor of 4) differ by 5 and 8 points."""
FEW_LABELS: Mapping[int, tuple[str, str]] = {
    10: ("`make run`", "+17.0 ± 7.9"),
    25: ("CIFAR-10", "+19.6 ± 2.1"),
    100: ("CIFAR-10", "+14.9 ± 1.7"),
    400: ("CIFAR-10", "+7.3 ± 0.5"),
}
"""Labels per class, ten classes, at least nine of ten pictures without a label: points over labels alone."""
FEW_PICTURES: Mapping[int, tuple[str, str]] = {10: ("+2.9 ± 1.5", "-1.6 ± 2.3"), 50: ("+4.3 ± 1.7", "-0.8 ± 1.8")}
"""Pictures per class, 50 classes of Tiny ImageNet and no other pictures: points over the teacher's top class, and
over the labels of all of them."""

PASSES, MANY_PASSES = 12, {10: 512, 50: 102}
"""Epochs of the measured runs with few labels, and with few pictures per class. A run that is more than `NEAR` times
shorter is not covered."""


def expected(recipe: Recipe, labels: torch.Tensor, classes: int, epochs: float) -> list[str]:
    """Return the line about the gain that runs of this kind had, or nothing where none was measured.

    `labels`: the training images' labels, int64 [N], -1: none.
    """
    single = labels.ndim == 1 and recipe.teacher.needed
    if not single or recipe.student.init != "scratch" or recipe.student.checkpoint:
        return []
    known = int((labels >= 0).sum())
    share, per_class = known / len(labels), known / classes
    if 0 < share <= 0.1 and 5 <= classes <= 20 and epochs * NEAR >= PASSES and (row := _nearest(FEW_LABELS, per_class)):
        where, points = FEW_LABELS[row]
        found = f"{points} points against labels alone on {where} (docs/does-it-help.md)"
        return [f"expect    {row} labels per class, other pictures without: {found}"]
    few = share in (0, 1) and classes >= 25
    if few and (row := _nearest(FEW_PICTURES, len(labels) / classes)) and epochs * NEAR >= MANY_PASSES[row]:
        over_class, over_labels = FEW_PICTURES[row]
        found = f"{over_class} points against the teacher's top class, {over_labels} against the true labels"
        return [f"expect    {row} pictures per class, no others: {found} on Tiny ImageNet (docs/does-it-help.md)"]
    return []


def _nearest(grid: Mapping[int, tuple[str, str]], number: float) -> int:
    """Return the measured number within `NEAR` of this one, or 0."""
    return next((row for row in grid if row / NEAR <= number <= row * NEAR), 0)
