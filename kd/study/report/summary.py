"""report.md of a run: its scores as a table, its curves as sparklines, and what to type next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.core.intervals import Samples
from kd.core.scores import Scored, Scores
from kd.core.text import table

ALONE = "student, labels only"
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a finished training has to show."""

    folder: Path
    metrics: Mapping[str, float]  # the validation row of the best checkpoint
    parameters: int
    images_per_second: float  # over all of the training so far, evaluation left out
    teacher_parameters: int = 0  # of all teachers
    scored: Scored | None = None  # the best checkpoint, scored once at the end; None: a teacher that was fitted
    sifting: str = ""  # what the sifter did, as Markdown
    at_home: tuple[str, ...] = ()  # how each teacher's answers differ from those with its own preprocessing
    steps: int = 0
    skipped: int = 0  # steps whose gradient was not finite
    baseline: Trained | None = None  # the same student, trained on labels alone


def summary(name: str, seed: int, result: Trained, scores: Scores) -> str:
    """Return the scores of a run and what to type next, as Markdown; empty if it was never evaluated."""
    if not result.metrics:
        return ""
    scored, baseline = result.scored, result.baseline
    row = result.metrics if scored is None else scored.row
    teachers, comparison = scores.of_teachers(row), scores.against_teacher(row)
    student = "student, distilled" if comparison else "student"
    models, samples = {**teachers, student: row}, samples_of(scored, teachers, student)
    sizes = [(result.teacher_parameters if len(teachers) == 1 else 0, 0.0)] * len(teachers)
    sizes.append((result.parameters, result.images_per_second))
    if baseline is not None:
        models[ALONE] = baseline.metrics if baseline.scored is None else baseline.scored.row
        samples |= samples_of(baseline.scored, (), ALONE)
        sizes.append((baseline.parameters, baseline.images_per_second))
    rows = [
        {
            **cells,
            "parameters": f"{parameters / 1e6:.2f} M" if parameters else "-",
            "training images/s": f"{speed:.0f}" if speed else "-",
        }
        for cells, (parameters, speed) in zip(scores.table(models, samples), sizes, strict=True)
    ]
    on = [f"On {scored.images:,} {scored.title} images:", ""] if scored is not None else []
    lines = [f"# {name}", "", *on, table(rows), ""]
    lines += differences(scores, row, samples, student)
    lines += [comparison, ""] if comparison else []
    lines += verdict(scores, row, samples, student)
    for of, one in (("", result), ("Labels only: ", baseline)):
        lines += [of + skipped_text(one.skipped, one.steps), ""] if one is not None and one.skipped else []
    lines += [f"{line[0].upper()}{line[1:]}.\n" for line in result.at_home]
    lines += [result.sifting] if result.sifting else []
    lines += [scored.note, ""] if scored is not None else []
    key = scores.deciding(row).key
    lines += [
        f"Best of the evaluations on the validation split by {scores.deciding(row).with_title(result.metrics[key])}; "
        f"seed {seed}; run folder `{result.folder}`.",
        "",
        f"Next: `kd-export {result.folder}` writes a folder that timm loads; `kd-report {result.folder}` a page about "
        "the run.",
        "",
    ]
    return "\n".join(lines)


def samples_of(scored: Scored | None, teachers: Iterable[str], student: str) -> dict[str, Mapping[str, Samples]]:
    """Return what the last scores of a run were computed from, by the names of its models."""
    if scored is None:
        return {}
    return {**{name: scored.of(name) for name in teachers}, student: scored.samples}


def differences(
    scores: Scores, row: Mapping[str, float], samples: Mapping[str, Mapping[str, Samples]], student: str
) -> list[str]:
    """Say of each other model whether the student is better, by the score that decides; nothing without intervals."""
    column, own = scores.deciding(row), samples.get(student, {})
    lines = [
        f"- {student} against {name}: {column.title} {column.difference(own[column.key], other[column.key])}"
        for name, other in samples.items()
        if name != student and column.key in own and column.key in other
    ]
    note = "In brackets: 95 % intervals, of the difference on the same images where two models are compared."
    return [*lines, "", note, ""] if lines else []


def verdict(
    scores: Scores, row: Mapping[str, float], samples: Mapping[str, Mapping[str, Samples]], student: str
) -> list[str]:
    """Say whether distillation paid against labels alone; nothing without such a run whose images are the same."""
    column = scores.deciding(row)
    own, alone = (samples.get(name, {}).get(column.key) for name in (student, ALONE))
    if own is None or alone is None:
        return []
    value, low, high = alone.minus(own) if column.smaller else own.minus(alone)
    paid = "Distillation paid" if low > 0 else "Distillation did not pay" if high < 0 else "Not shown to have paid"
    points = f"{100 * value:+.1f} points" if column.unit == "%" else f"{value:+.4f}"
    return [f"{paid}: {points} of {column.title} over labels alone at equal steps, with one seed.", ""]


def skipped_text(skipped: int, steps: int) -> str:
    """Say how many steps were left out by `optimizer.on_nonfinite: skip`; "" where none was."""
    text = f"{skipped} of {steps} optimizer steps were skipped: their gradient was NaN or infinite."
    return text if skipped else ""


def curves(train: Sequence[Mapping[str, Any]], val: Sequence[Mapping[str, Any]], scores: Scores) -> str:
    """Return the curves of a run as sparklines, with first and last values; empty before the second row."""
    lines = {
        "loss": _curve(train, "loss"),
        **{column.title: _curve(val, column.key, column.text) for column in scores.columns},
        "step, ms": _curve(train, "step_ms"),
        "images/s": _curve(train, "images_per_second"),
    }
    lines = {title: curve for title, curve in lines.items() if curve}
    width = max(map(len, lines), default=0)
    text = [f"{title:{width}s} {curve}" for title, curve in lines.items()]
    return "\n".join(["```", *text, "```", ""]) if text else ""


def _curve(rows: Sequence[Mapping[str, Any]], key: str, text: Callable[[float], str] = "{:.4g}".format) -> str:
    """Return one sparkline with its first and last value; empty with fewer than two values."""
    values = [float(row[key]) for row in rows if key in row and math.isfinite(row[key])]
    return f"{sparkline(values)} {text(values[0])} -> {text(values[-1])}" if len(values) > 1 else ""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return values as a row of blocks, lowest to highest, at most `width` of them; more are averaged."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int(8 * (value - low) / span))] for value in means)
