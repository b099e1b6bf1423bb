"""A validation row has columns: a task's scores and their display.

One of them chooses the checkpoint.

A row holds the student's scores under their keys, a teacher's under `teacher_KEY` (a
second teacher's under `teacher_KEY_2`), and scores of the student against its teacher.
Everything that shows a row uses the columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kd.core.intervals import Samples, clip_to_share, interval_verdict
from kd.core.text import percent

DIFFERENCES_NOTE = (
    "In brackets: 95 % intervals, of the difference on the same images where two models"
    " are compared."
)
TITLES = {"test": "test", "val": "validation"}  # names of splits as text


@dataclass(frozen=True, slots=True)
class Column:
    """A column is one score."""

    key: str  # key in a validation row
    title: str
    # "%": a share, 0 to 1, shown in percent. With "nats" and "" it is shown as a
    # number.
    unit: str = "%"
    # noun phrase after the value; empty: the title
    meaning: str = field(default="", compare=False)
    smaller: bool = field(default=False, compare=False)  # whether smaller is better

    def text(self, value: float, samples: Samples | None = None) -> str:
        """Return the value with its unit: `71.6 % (69.0 to 74.1)`.

        The 95 % interval is left out without samples.
        """
        if self.unit == "%":
            text = percent(value)
        else:
            text = f"{value:.4f} {self.unit}".rstrip()
        if samples is None:
            return text
        ends = samples.interval()
        if self.unit == "%":
            ends = clip_to_share(*ends)
        return (
            f"{text} ({' to '.join(self.text(end).removesuffix(' %') for end in ends)})"
        )

    def with_title(self, value: float, samples: Samples | None = None) -> str:
        """Return the title and the value: `accuracy 71.6 %`."""
        return f"{self.title} {self.text(value, samples)}"

    def difference(self, samples: Samples, baseline: Samples) -> str:
        """Describe the difference between two models' scores.

        For example `-5.2 points (-7.9 to -2.4): worse`.
        """
        return self.difference_text(*samples.minus(baseline))

    def difference_text(self, value: float, low: float, high: float) -> str:
        """Format a difference and the ends of its interval like `difference`."""
        points = [
            f"{100 * number:+.1f}" if self.unit == "%" else f"{number:+.4f}"
            for number in (value, low, high)
        ]
        unit = " points" if self.unit == "%" else ""
        interval = f"{points[1]} to {points[2]}"
        return f"{points[0]}{unit} ({interval}): {interval_verdict(low, high)}"


@dataclass(frozen=True, slots=True)
class Scores:
    """A task has these columns."""

    own: tuple[Column, ...]
    """Scores of one model against the labels. The first one chooses the checkpoint;
    larger is better.
    """
    # scores of the student against its teacher. The first one decides if there are no
    # labels.
    pair: tuple[Column, ...]
    # how the own scores are computed, one sentence for the model card; empty: commonly
    # known
    note: str = ""

    def selection_metric(self, labelled: bool) -> Column:
        """Return the column that chooses the checkpoint."""
        return (self.own if labelled else self.pair)[0]

    def deciding(self, row: Mapping[str, Any]) -> Column:
        """Return the deciding column of a validation row."""
        return self.selection_metric(self.own[0].key in row or not self.pair)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of tables and charts.

        They are the own scores, and the first score of the student against its teacher.
        """
        return (*self.own, *self.pair[:1])

    def cells(
        self, row: Mapping[str, Any], samples: Mapping[str, Samples] | None = None
    ) -> dict[str, str]:
        """Return a row's values of `columns` as texts by title.

        Scores that have samples get an interval.
        """
        samples = samples or {}
        return {
            column.title: column.text(row[column.key], samples.get(column.key))
            for column in self.columns
            if column.key in row
        }

    def text(self, row: Mapping[str, Any]) -> str:
        """Return a row as one line.

        For example `accuracy 71.6 % (teacher 77.8 %), agreement 80.1 %`.
        """
        first = self.own[0]
        pair = [column.with_title(row[column.key]) for column in self.pair_in(row)]
        if first.key not in row:
            return ", ".join(pair)
        text = first.with_title(row[first.key])
        teachers = [
            f"{name} {first.text(values[first.key])}"
            for name, values in self.of_teachers(row).items()
        ]
        if teachers:
            text += f" ({', '.join(teachers)})"
        return ", ".join([text, *pair[:1]])

    def pair_in(self, row: Mapping[str, Any]) -> list[Column]:
        """Return a row's columns of the student against its teacher."""
        return [column for column in self.pair if column.key in row]

    def against_teacher(self, row: Mapping[str, Any], on: str = "") -> str:
        """Return the scores against the teacher as a sentence, or "".

        `on` names the images.
        """
        scores = []
        for column in self.pair_in(row):
            meaning = f" ({column.meaning})" if column.meaning else ""
            scores.append(column.with_title(row[column.key]) + meaning)
        if not scores:
            return ""
        images = f" on {on} images" if on else ""
        return f"Student against its teacher{images}: {', '.join(scores)}."

    def table(
        self,
        models: Mapping[str, Mapping[str, Any]],
        samples: Mapping[str, Mapping[str, Samples]] | None = None,
    ) -> list[dict[str, str]]:
        """Return the own scores of models, by name, as rows of a table.

        `samples` give the intervals.
        """
        columns = [
            column
            for column in self.own
            if any(column.key in values for values in models.values())
        ]
        samples = samples or {}
        rows = []
        for name, values in models.items():
            row = {"model": name}
            for column in columns:
                row[column.title] = "-"
                if column.key in values:
                    behind = samples.get(name, {}).get(column.key)
                    row[column.title] = column.text(values[column.key], behind)
            rows.append(row)
        return rows

    def conclusion(self, scored: Scored) -> str:
        """Return the final score of a run as one line, with intervals.

        It says whether the student reaches its teacher.
        """
        column = self.deciding(scored.row)
        student = scored.samples.get(column.key)
        text = f"{scored.title} {column.with_title(scored.row[column.key], student)}"
        if column not in self.own:
            return text
        for name, values in self.of_teachers(scored.row).items():
            teacher = scored.of(name)
            value = column.text(values[column.key], teacher.get(column.key))
            text += f", {name} {value}"
            difference = scored.against(teacher, column)
            if difference:
                text += f"; the student against it {difference}"
        for pair in self.pair_in(scored.row)[:1]:
            text += f"; {pair.with_title(scored.row[pair.key])}"
        return text

    def of_teachers(self, row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Return each teacher's own scores in a row, by name.

        The names are "teacher", "teacher 2" and so on.
        """
        teachers = {}
        number = 1
        while number == 1 or f"teacher_{self.own[0].key}_{number}" in row:
            end = f"_{number}" if number > 1 else ""
            keys = {column.key: f"teacher_{column.key}{end}" for column in self.own}
            values = {key: row[name] for key, name in keys.items() if name in row}
            if self.own[0].key in values:
                teachers[f"teacher {number}" if end else "teacher"] = values
            number += 1
        return teachers

    def record(self) -> dict[str, Any]:
        """Return the columns as JSON values, for manifest.json of a run."""
        return asdict(self)

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Scores:
        own, pair = (
            tuple(Column(**column) for column in recorded[name])
            for name in ("own", "pair")
        )
        return cls(own, pair, recorded.get("note", ""))


@dataclass(frozen=True, slots=True)
class Scored:
    """The final score of a run belongs to its chosen checkpoint.

    It is on the test split, else on the validation split.
    """

    # "test": nothing was chosen on it. "val": it chose one of `evaluations`.
    split: str
    step: int  # step of the checkpoint
    data: str  # a hash of the split's listing: equal hashes mean equal images
    images: int  # number of scored images
    evaluations: int
    row: Mapping[str, float]  # as a validation row
    # samples of the scores in `row`, by key; a score without samples has no interval
    samples: Mapping[str, Samples]

    @property
    def title(self) -> str:
        return TITLES[self.split]

    @property
    def note(self) -> str:
        """One sentence on how far the number can be trusted."""
        if self.split == "test":
            return (
                f"Scored once, on {self.images:,} test images on which nothing was"
                " chosen."
            )
        if self.evaluations == 1:
            return (
                f"Scored on {self.images:,} validation images, once: no checkpoint was"
                " chosen on them."
            )
        return (
            f"Chosen from {self.evaluations} evaluations on the same {self.images:,}"
            " validation images, which flatters it: name a test split of the data, or"
            " set images aside with `data.test_fraction`."
        )

    def of(self, teacher: str) -> Mapping[str, Samples]:
        """Return a teacher's samples under the keys of the own scores.

        `teacher` is "teacher", "teacher 2" and so on.
        """
        end = teacher.removeprefix("teacher").replace(" ", "_")
        return {
            key.removeprefix("teacher_").removesuffix(end): samples
            for key, samples in self.samples.items()
            if key.startswith("teacher_") and key.endswith(end)
        }

    def against(self, model: Mapping[str, Samples], column: Column) -> str:
        """Describe the student's difference from another model; "": unknown.

        Both were scored on the same images.
        """
        if column.key not in self.samples or column.key not in model:
            return ""
        return column.difference(self.samples[column.key], model[column.key])

    def same_images(self, scored: Scored) -> bool:
        """Return whether both scores are on the same images, so can be paired."""
        return (self.data, self.images) == (scored.data, scored.images)

    def record(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in ("split", "step", "data", "images", "evaluations")
        }
        return {
            **plain,
            "row": dict(self.row),
            "samples": {key: samples.record() for key, samples in self.samples.items()},
        }

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Scored:
        # float32; those beside the samples are not rounded, so differences would not
        # agree
        values = recorded["row"]
        samples = {
            key: Samples.read({**sample, "value": values.get(key, sample["value"])})
            for key, sample in recorded["samples"].items()
        }
        return cls(**{**recorded, "samples": samples})


def samples_of(
    scored: Scored | None, teachers: Iterable[str], student: str
) -> dict[str, Mapping[str, Samples]]:
    """Return the samples of a run's last scores by model name."""
    if scored is None:
        return {}
    return {**{name: scored.of(name) for name in teachers}, student: scored.samples}


@dataclass(frozen=True, slots=True)
class GraphScores:
    """An exported graph's predictions were compared with PyTorch's.

    Both are on the same images.
    """

    facts: dict[str, float]  # values by name, for manifest.json of an export
    score: float  # the deciding score, which a quantized graph may lower a little
    title: str  # of that score
    summary: str  # as text: `same top-1 on 200 of 200 validation images`
    changed: int = 0  # number of images with another prediction
    # number of images of which the score is a share; 0: it is no share
    share_of: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished training has these results."""

    folder: Path
    metrics: Mapping[str, float]  # validation row of the chosen checkpoint
    parameters: int
    steps: int
    scored: Scored | None = None  # final score of the chosen checkpoint
    baseline: Trained | None = None  # the same student, trained on labels alone
    report: str = ""  # text of report.md


def not_finite_text(row: Mapping[str, float]) -> str:
    """Name the scores of a validation row that are not finite; "": all are."""
    names = [name for name, value in row.items() if not math.isfinite(value)]
    if not names:
        return ""
    return (
        f"validation: {', '.join(names)} are NaN or infinite: so are a model's outputs"
        " for at least one image"
    )


def skipped_text(skipped: int, steps: int) -> str:
    """Report the steps skipped by `optimizer.on_nonfinite: skip`; "": none were."""
    if not skipped:
        return ""
    return (
        f"{skipped} of {steps} optimizer steps were skipped: their gradient was NaN or"
        " infinite."
    )
