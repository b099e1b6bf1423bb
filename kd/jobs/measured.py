"""Measured gains of distillation: the line `plan` of `--check` without a comparable run."""

FEW_LABELS, OTHERS = (7.1, 20.7), (-14.1, 5.6)
"""Smallest and largest gain of single runs over labels alone with the same seed, points: all runs of
docs/does-it-help.md with 10 to 400 labels per class and at least nine of ten pictures without; and all others. A test
recomputes them. A run's own student, teacher and steps are not among the conditions, so there is only a range."""
EXPECTED = (
    "of all, measured against labels alone, {:+.1f} to {:+.1f} points with few labels and many pictures without, "
    "{:+.1f} to {:+.1f} on other data; students, teachers and steps differ from yours (docs/does-it-help.md)"
).format(*FEW_LABELS, *OTHERS)
