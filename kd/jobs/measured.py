"""Measured gains of distillation for a student of random weights: the line `expect` of `--check`.

They are those of docs/does-it-help.md: single runs less labels alone with the same seed, in points. A test recomputes
them from its CSVs. A run's own student, teacher and steps are not among the conditions, so there is only a range.
"""

import torch

from kd.setup.recipe import Recipe

NEAR = 1.5
"""A range covers up to this many times more or fewer labels or pictures per class. Neighbouring rows, a factor of 4
apart, differ by up to 8 points."""
FEW_LABELS, FEW_PICTURES, ALL = (7.1, 20.7), (-3.4, 1.5), (-14.1, 20.7)
"""Smallest and largest gain: with 10 to 400 labels per class, ten or twelve classes, at least nine of ten pictures
without a label; with 10 to 200 pictures per class, 50 classes, and no others; in all runs of the page."""


def expected(recipe: Recipe, labels: torch.Tensor, classes: int) -> list[str]:
    """Return the line about the gains that runs on such data had, or nothing where none was measured.

    `labels`: the training images' labels, int64 [N], -1: none.
    """
    single = labels.ndim == 1 and recipe.teacher.needed
    if not single or recipe.student.init != "scratch" or recipe.student.checkpoint:
        return []
    known = int((labels >= 0).sum())
    if 0 < known <= len(labels) / 10 and 5 <= classes <= 20 and 10 <= NEAR * known / classes <= 400 * NEAR**2:
        kind, (least, most) = "few labels, many pictures without", FEW_LABELS
    elif known in (0, len(labels)) and classes >= 25 and 10 <= NEAR * len(labels) / classes <= 200 * NEAR**2:
        kind, (least, most) = "few pictures of many classes, no others", FEW_PICTURES
    else:
        return []
    text = f"expect    {kind}: {least:+.1f} to {most:+.1f} points against labels alone where measured, on all kinds of "
    text += f"data {ALL[0]:+.1f} to {ALL[1]:+.1f}; with other students, teachers and steps (docs/does-it-help.md)"
    return [text]
