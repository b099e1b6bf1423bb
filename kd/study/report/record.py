"""Values of a run folder for a report; nothing is computed on a device."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kd.config import instances
from kd.core.intervals import Samples, wilson
from kd.core.scores import Column, Scored, Scores
from kd.core.text import clock, money, percent
from kd.files.json_file import read_json
from kd.files.run_dir import RunDir
from kd.setup.recipe import Recipe, fit_folders, match_baseline_length

# images of a class below which no percentage is shown: 10 of 20 has the 95 % interval
# 30 to 70 %
FEWEST = 20
T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a 95 % interval of the mean of 2, 3, ... values; for more values the
last one, which is wider.
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A validation image on which teacher and student differ."""

    name: str
    truth: str
    teacher: str
    teacher_share: float  # the teacher's probability for its prediction
    student: str
    student_share: float
    data: str  # a small JPEG as data URI


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of student and teacher on validation images."""

    classes: Sequence[str]
    label: Sequence[int]
    student: Sequence[int]
    teacher: Sequence[int]  # empty without a teacher
    # images of the validation split; more than predicted if only a part was requested
    of: int
    pictures: Sequence[Picture] = ()
    student_sure: Sequence[
        float
    ] = ()  # the student's probability for its prediction, calibrated on every second image
    cpu_ms: Mapping[str, float] = field(default_factory=dict)
    """CPU milliseconds per image by model; empty: they ran on a GPU."""
    leaked: Sequence[int] = ()
    """Positions in `label` of images that are also in another split, if the run folder
    lists them.
    """

    def without_leaks(self) -> str:
        """Report the accuracy with and without images that are also in another split;
        "" without such images.
        """
        if not self.leaked:
            return ""
        clean = sorted({*range(len(self.label))} - {*self.leaked})
        shares = []
        for rows in (range(len(self.label)), clean):
            right = sum(self.student[i] == self.label[i] for i in rows)
            ends = " to ".join(
                percent(end) for end in wilson(right / max(1, len(rows)), len(rows))
            )
            shares.append(f"{percent(right / max(1, len(rows)))} ({ends})")
        count = (
            f"{len(self.leaked)} of {len(self.label)} validation images are also in"
            " another split"
        )
        return (
            f"{count} (audit/duplicates.csv): the student's accuracy is {shares[0]}"
            f" with them, {shares[1]} without."
        )

    def images(self) -> list[int]:
        counts = Counter(self.label)
        return [counts[label] for label in range(len(self.classes))]

    def accuracy(self, answers: Sequence[int]) -> list[float]:
        """Return the accuracy on each class; NaN without images."""
        right = Counter(
            label
            for label, answer in zip(self.label, answers, strict=True)
            if label == answer
        )
        return [
            right[label] / count if count else math.nan
            for label, count in enumerate(self.images())
        ]

    def confusion(self) -> list[list[int]]:
        """Return the confusion matrix: counts by label (row) and the student's
        prediction (column).
        """
        table = [[0] * len(self.classes) for _ in self.classes]
        for label, answer in zip(self.label, self.student, strict=True):
            table[label][answer] += 1
        return table


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run folder."""

    name: str
    keys: Mapping[
        str, Any
    ]  # the configuration as {"section.key": value}; texts from the environment are references
    manifest: Mapping[str, Any]
    train: Sequence[Mapping[str, Any]]
    val: Sequence[Mapping[str, Any]]
    epochs: Sequence[Mapping[str, Any]]
    scores: Scores  # columns of `val`
    timeline: Mapping[int, Sequence[Mapping[str, Any]]] = field(
        default_factory=dict
    )  # log windows by rank
    monitor: Mapping[str, Sequence[Mapping[str, Any]]] = field(
        default_factory=dict
    )  # samples by host and rank
    findings: Sequence[Mapping[str, Any]] = ()
    profile: Mapping[str, Any] = field(
        default_factory=dict
    )  # profile/operators.json of `Profiler`
    answers: Predictions | None = None
    scored: Scored | None = (
        None  # final score of the chosen checkpoint; None: the run has not ended
    )
    chosen: int = -1  # step of the chosen checkpoint; -1: unknown
    exported: Mapping[str, Any] = field(
        default_factory=dict
    )  # manifest.json of `export/`, if there is one
    baseline: RunRecord | None = None  # the same student trained on labels alone
    fitting: float = 0.0  # seconds of fitting its teachers, in this run or earlier
    fitting_spent: float | None = 0.0  # same, in the unit of `spent`
    notes: Sequence[str] = ()  # reasons for missing parts

    @property
    def selection_metric(self) -> Column:
        return self.scores.deciding(self.val[0] if self.val else {})

    @property
    def best(self) -> Mapping[str, Any]:
        """The validation row of the chosen checkpoint, else the first one with the
        highest score; may be empty.
        """
        key, step = (
            self.selection_metric.key,
            (self.chosen if self.scored is None else self.scored.step),
        )
        chosen = [row for row in self.val if row["step"] == step]
        return (
            chosen[-1]
            if chosen
            else max(self.val, key=lambda row: row.get(key, -math.inf), default={})
        )

    @property
    def counted(self) -> Mapping[str, Any]:
        """The final score's row, else the best validation row."""
        return self.best if self.scored is None else self.scored.row

    @property
    def samples(self) -> Mapping[str, Samples]:
        return {} if self.scored is None else self.scored.samples

    @property
    def split(self) -> str:
        return "validation" if self.scored is None else self.scored.title

    @property
    def steps(self) -> int:
        return int(self.train[-1]["step"]) if self.train else 0

    @property
    def gave_up(self) -> bool:
        """Whether it ended early, after `run.patience` evaluations without a
        new best.
        """
        patience, decides = (
            int(self.keys.get("run.patience", 0) or 0),
            str(self.manifest.get("decides")),
        )
        scores = [float(row[decides]) for row in self.val if decides in row]
        return (
            0 < patience < len(scores) - scores.index(max(scores)) if scores else False
        )

    @property
    def unfinished(self) -> str:
        """The progress of an unfinished run; "" for a finished one."""
        steps, epochs = (
            int(self.keys.get(f"run.{key}", 0) or 0) for key in ("steps", "epochs")
        )
        epoch = int(self.train[-1]["epoch"]) if self.train else 0
        ended = self.gave_up or (self.steps >= steps if steps else epoch >= epochs)
        if ended and (
            not self.steps or (self.val and self.val[-1]["step"] >= self.steps)
        ):
            return ""
        return (
            f"step {self.steps:,} of {steps:,}"
            if steps
            else f"step {self.steps:,}, epoch {epoch} of {epochs}"
        )

    @property
    def unfinished_text(self) -> str:
        """A sentence if the run or its baseline is unfinished."""
        for one, who in (
            (self, self.name),
            (self.baseline, f"{self.name} (labels only)"),
        ):
            if one is not None and one.unfinished:
                ended = f"{who} has not finished: {one.unfinished}."
                return (
                    f"{ended} It was stopped, or it still runs; the command that"
                    " started it resumes it."
                )
        return ""

    @property
    def skipped(self) -> int:
        return int(sum(row.get("skipped", 0) for row in self.train))

    @property
    def images(self) -> int:
        return int(self.train[-1]["images"]) if self.train else 0

    @property
    def seconds(self) -> float:
        """Training time without evaluations and checkpoints, seconds."""
        return float(self.train[-1]["seconds"]) if self.train else 0.0

    @property
    def spent(self) -> float | None:
        """Cost of training: CPU seconds of all processes, or seconds of all
        accelerators; None: not recorded.
        """
        return spent_of(self.train, self.manifest)

    @property
    def at_hand(self) -> float | None:
        """Cost of stored outputs of earlier runs, likewise."""
        seconds = self.manifest.get("at_hand", {"cpu_seconds": 0.0})["cpu_seconds"]
        return seconds if seconds == 0 or on_cpu(self.manifest) else None

    @property
    def spent_in_all(self) -> float | None:
        """Cost of distilling with the teacher's fit and outputs, likewise."""
        return total((self.fitting_spent, self.at_hand, self.spent))

    @property
    def billable(self) -> float:
        """Billable seconds, from start to end of all starts of the run; training time
        if unknown.
        """
        return float(self.manifest.get("billable_seconds", self.seconds))

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def per_hour(self) -> float:
        """US dollars per hour for all machines; 0: unknown."""
        own = float(self.keys.get("price.per_hour", 0.0) or 0.0)
        each = own or instances.price_per_hour(str(self.keys.get("price.instance", "")))
        return int(self.manifest.get("machines", 1)) * each

    @property
    def cost(self) -> float:
        return self.per_hour * self.billable / 3600


def total(parts: Iterable[float | None]) -> float | None:
    """Return the sum of parts; None if one of them is unknown."""
    known = list(parts)
    return None if None in known else sum(filter(None, known))


def on_cpu(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run trained on CPUs."""
    return manifest.get("device", "cpu") == "cpu"


def spent_of(
    rows: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]
) -> float | None:
    """Return the cost of the steps up to the last row, in the unit of
    `RunRecord.spent`.
    """
    last = rows[-1] if rows else {}
    if on_cpu(manifest):
        return last.get("cpu_seconds")
    return last["seconds"] * manifest.get("world_size", 1) if last else None


def record_of(folder: RunDir, recipe: Recipe) -> RunRecord:
    """Read the scores of a run and of its baseline, without timings and predictions."""
    manifest, findings, alone = (
        folder.manifest(),
        folder.path / "findings.json",
        folder.alone(),
    )
    trained = recipe.baseline if alone.config_file.is_file() else None
    folders = fit_folders(recipe, manifest.get("data", "")).values()
    fits = [rows for one, _ in folders if (rows := RunDir(one.path).metrics("train"))]
    return RunRecord(
        name=recipe.name,
        keys=recipe.record.display_keys,
        manifest=manifest,
        train=folder.metrics("train"),
        val=folder.metrics("val"),
        chosen=folder.best_row().get("step", -1),
        epochs=folder.metrics("epoch"),
        scores=(
            Scores.read(manifest["scores"])
            if "scores" in manifest
            else recipe.task.scores
        ),
        findings=(
            read_json(findings, "run", "Remove the file", list)
            if findings.is_file()
            else ()
        ),
        scored=folder.scored(),
        fitting=sum(float(rows[-1]["seconds"]) for rows in fits),
        fitting_spent=(
            total(spent_of(rows, manifest) for rows in fits)
            if len(fits) == len(folders)
            else None
        ),
        baseline=(
            None
            if trained is None
            else record_of(alone, match_baseline_length(trained, folder))
        ),
    )


def differences(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, except the name, as rows with a
    column for each run.
    """
    keys = sorted(
        {key for run in runs for key in run.keys} - {"run.name", "run.folder"}
    )
    changed = (
        key for key in keys if len({str(run.keys.get(key, "-")) for run in runs}) > 1
    )
    return [
        {"key": key, **{run.name: run.keys.get(key, "-") for run in runs}}
        for key in changed
    ]


def repeats(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return groups of runs that differ only in the seed and are scored on the same
    split; the first of each seed.
    """
    groups: dict[tuple[tuple[str, str], ...], dict[Any, RunRecord]] = {}
    for run in runs:
        keys = run.keys.keys() - {"run.name", "run.folder", "run.seed"}
        group = groups.setdefault(
            (("", run.split), *((key, str(run.keys[key])) for key in sorted(keys))), {}
        )
        group.setdefault(run.keys.get("run.seed"), run)
    return [[*group.values()] for group in groups.values() if len(group) > 1]


def mean_cells(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the mean of each score of several runs with the 95 % interval of that mean
    (Student's t), by title.
    """
    cells, quantile = {}, T_975[min(len(runs), len(T_975)) - 1]
    for column in runs[0].scores.columns:
        values = [
            float(run.counted[column.key]) for run in runs if column.key in run.counted
        ]
        if len(values) == len(runs):
            half = quantile * statistics.stdev(values) / math.sqrt(len(values))
            mean = column.text(statistics.mean(values)).removesuffix(f" {column.unit}")
            cells[column.title] = f"{mean} ± {column.text(half)}"
    return cells


def teachers_of(
    runs: Sequence[RunRecord], split: str = "counted"
) -> dict[str, Mapping[str, float]]:
    """Return each teacher's "counted" or "validation" scores by name; a shared teacher
    appears once.
    """
    found: dict[str, tuple[str, Mapping[str, float]]] = {}
    for run in runs:
        row = run.counted if split == "counted" else run.best
        for name, values in run.scores.of_teachers(row).items():
            found.setdefault(
                f"{run.manifest.get('teacher') or run.name} {name}",
                (f"{name} of {run.name}", values),
            )
    names = [name.rpartition(" of ")[0] for name, _ in found.values()]
    return {
        short if names.count(short) == 1 else name: values
        for short, (name, values) in zip(names, found.values(), strict=True)
    }


def verdicts(runs: Sequence[RunRecord]) -> list[str]:
    """Compare models: each student with its teachers, each run with the first.

    By the selection metric, with the 95 % interval of the difference; only models
    scored on the same images.
    """
    first, lines = runs[0], []
    for run in runs:
        if run.scored is None:
            continue
        models = {
            name: run.scored.of(name) for name in run.scores.of_teachers(run.counted)
        }
        if (
            run is not first
            and first.scored is not None
            and run.scored.same_images(first.scored)
        ):
            models[first.name] = first.samples
        for name, samples in models.items():
            if text := run.scored.against(samples, run.selection_metric):
                lines.append(
                    f"{run.name} against {name}: {run.selection_metric.title} {text}"
                )
    return lines


def price_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return a table of runs: throughput, billable time, cost, saving relative to the
    first run with a price.

    As SageMaker computes: cost = price per hour x billable seconds / 3600. An epoch's
    cost counts only the student's own steps, and saving = 1 - cost / cost of the first
    run.
    """
    costs = [run.per_hour * run.seconds / 3600 for run in runs]
    rows, first = [], next((number for number, cost in enumerate(costs) if cost), 0)
    for number, (run, own) in enumerate(zip(runs, costs, strict=True)):
        score, epochs = (
            run.selection_metric,
            len(run.epochs) or (run.train[-1]["epoch"] if run.train else 0),
        )
        value = float(run.counted.get(score.key, 0.0))
        gained = 100 * value if score.unit == "%" else 0.0
        rows.append(
            {
                "run": run.name,
                "images/s": f"{run.images_per_second:.0f}",
                "billable": clock(run.billable),
                "USD/h": f"{run.per_hour:.3f}" if run.per_hour else "-",
                "USD": money(run.cost) if run.cost else "-",
                "USD an epoch": money(own / epochs) if own and epochs else "-",
                "USD a point": money(run.cost / gained) if run.cost and gained else "-",
                "score": (
                    score.with_title(value, run.samples.get(score.key))
                    if run.best
                    else "-"
                ),
                "saving": (
                    f"{100 * (1 - own / costs[first]):.1f} %"
                    if own and number != first
                    else "-"
                ),
            }
        )
    return rows
