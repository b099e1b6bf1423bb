"""Read the values of a run folder for a report, without computing on a device."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kd.config import instances
from kd.config.bill import Bill
from kd.core.intervals import Samples, wilson_interval
from kd.core.scores import Column, Scored, Scores
from kd.core.text import format_dollars, format_seconds, percent
from kd.files.json_file import read_json
from kd.files.run_dir import RunDir
from kd.setup.recipe import Recipe, fit_folders, match_baseline_length

# images of a class below which no percentage is shown: 10 of 20 has the 95 % interval
# 30 to 70 %
FEWEST = 20
T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a 95 % interval of the mean of 1, 2, 3, ... values.

For more values the last one is taken, which is wider.
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
    student_sure: Sequence[float] = ()
    """The probability of the student's prediction, calibrated on every second image."""
    cpu_ms: Mapping[str, float] = field(default_factory=dict)
    """CPU milliseconds per image by model; empty: they ran on a GPU."""
    leaked: Sequence[int] = ()
    """Positions in `label` of images that the run folder lists in another split too."""

    def without_leaks(self) -> str:
        """Report the accuracy with and without images that are in another split too."""
        if not self.leaked:
            return ""
        images = range(len(self.label))
        shares = []
        for rows in (images, sorted({*images} - {*self.leaked})):
            right = sum(self.student[i] == self.label[i] for i in rows)
            share = right / max(1, len(rows))
            ends = " to ".join(map(percent, wilson_interval(share, len(rows))))
            shares.append(f"{percent(share)} ({ends})")
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
        """Return counts by label (row) and the student's prediction (column)."""
        table = [[0] * len(self.classes) for _ in self.classes]
        for label, answer in zip(self.label, self.student, strict=True):
            table[label][answer] += 1
        return table


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run folder."""

    name: str
    # the configuration as {"section.key": value}; texts from the environment are
    # references
    keys: Mapping[str, Any]
    manifest: Mapping[str, Any]
    train: Sequence[Mapping[str, Any]]
    val: Sequence[Mapping[str, Any]]
    epochs: Sequence[Mapping[str, Any]]
    scores: Scores  # columns of `val`
    # log windows by rank
    timeline: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    # samples by host and rank
    monitor: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    findings: Sequence[Mapping[str, Any]] = ()
    # profile/operators.json of `Profiler`
    profile: Mapping[str, Any] = field(default_factory=dict)
    answers: Predictions | None = None
    # final score of the chosen checkpoint; None: the run has not ended
    scored: Scored | None = None
    chosen: int = -1  # step of the chosen checkpoint; -1: unknown
    # manifest.json of `export/`, if there is one
    exported: Mapping[str, Any] = field(default_factory=dict)
    baseline: RunRecord | None = None  # the same student trained on labels alone
    fitting: float = 0.0  # seconds of fitting its teachers, in this run or earlier
    fitting_spent: float | None = 0.0  # same, in the unit of `spent`
    notes: Sequence[str] = ()  # reasons for missing parts

    @property
    def selection_metric(self) -> Column:
        return self.scores.deciding(self.val[0] if self.val else {})

    @property
    def best(self) -> Mapping[str, Any]:
        """The validation row of the chosen checkpoint, else that of the best score.

        Of equal scores it is the first one; without evaluations it is empty.
        """
        step = self.chosen if self.scored is None else self.scored.step
        chosen = [row for row in self.val if row["step"] == step]
        if chosen:
            return chosen[-1]
        key = self.selection_metric.key
        return max(self.val, key=lambda row: row.get(key, -math.inf), default={})

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
        """Whether it ended early, after `run.patience` evaluations without a best."""
        patience = self.count("run.patience")
        decides = str(self.manifest.get("decides"))
        scores = [float(row[decides]) for row in self.val if decides in row]
        if not scores:
            return False
        return 0 < patience < len(scores) - scores.index(max(scores))

    def count(self, key: str) -> int:
        """Return a number in the configuration; 0 if it is missing."""
        return int(self.keys.get(key, 0) or 0)

    @property
    def unfinished(self) -> str:
        """The progress of an unfinished run; "" for a finished one."""
        steps = self.count("run.steps")
        epochs = self.count("run.epochs")
        epoch = int(self.train[-1]["epoch"]) if self.train else 0
        ended = self.gave_up or (self.steps >= steps if steps else epoch >= epochs)
        evaluated = not self.steps or (self.val and self.val[-1]["step"] >= self.steps)
        if ended and evaluated:
            return ""
        if steps:
            return f"step {self.steps:,} of {steps:,}"
        return f"step {self.steps:,}, epoch {epoch} of {epochs}"

    @property
    def unfinished_text(self) -> str:
        """The progress as a sentence, of the run or else of its baseline."""
        name = self.name
        progress = self.unfinished
        if not progress and self.baseline is not None:
            name = f"{self.name} (labels only)"
            progress = self.baseline.unfinished
        if not progress:
            return ""
        return (
            f"{name} has not finished: {progress}. It was stopped, or it still runs;"
            " the command that started it resumes it."
        )

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
        """Cost of training, seconds of all CPUs or accelerators; None: unknown."""
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
        """Billable seconds, with set-up and evaluations; training time if unknown."""
        return float(self.manifest.get("billable_seconds", self.seconds))

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def per_hour(self) -> float:
        """US dollars per hour for all machines; 0: unknown."""
        machine = str(self.keys.get("price.instance", ""))
        price = self.keys.get("price.per_hour") or instances.price_per_hour(machine)
        return int(self.manifest.get("machines", 1)) * float(price)

    @property
    def cost(self) -> float:
        return Bill(self.billable / 3600, self.per_hour).usd


def total(costs: Iterable[float | None]) -> float | None:
    """Return the sum of costs; None if one of them is unknown."""
    costs = list(costs)
    return None if None in costs else sum(filter(None, costs))


def on_cpu(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run trained on CPUs."""
    return manifest.get("device", "cpu") == "cpu"


def spent_of(
    rows: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]
) -> float | None:
    """Return the cost of the steps up to the last row, as `RunRecord.spent`."""
    last = rows[-1] if rows else {}
    if on_cpu(manifest):
        return last.get("cpu_seconds")
    return last["seconds"] * manifest.get("world_size", 1) if last else None


def record_of(folder: RunDir, recipe: Recipe) -> RunRecord:
    """Read the scores of a run and of its baseline, without timings and predictions."""
    manifest = folder.manifest()
    findings = folder.path / "findings.json"
    baseline_folder = folder.baseline()
    baseline = None
    if recipe.baseline is not None and baseline_folder.config_file.is_file():
        baseline = record_of(
            baseline_folder, match_baseline_length(recipe.baseline, folder)
        )
    scores = recipe.task.scores
    if "scores" in manifest:
        scores = Scores.read(manifest["scores"])
    folders = fit_folders(recipe, manifest.get("data", "")).values()
    fits = [RunDir(fit_folder.path).metrics("train") for fit_folder, _ in folders]
    return RunRecord(
        name=recipe.name,
        keys=recipe.record.display_keys,
        manifest=manifest,
        train=folder.metrics("train"),
        val=folder.metrics("val"),
        chosen=folder.best_row().get("step", -1),
        epochs=folder.metrics("epoch"),
        scores=scores,
        findings=(
            read_json(findings, "run", "Remove the file", list)
            if findings.is_file()
            else ()
        ),
        scored=folder.scored(),
        fitting=sum(float(rows[-1]["seconds"]) for rows in fits if rows),
        fitting_spent=total(spent_of(rows, manifest) for rows in fits),
        baseline=baseline,
    )


def differences(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a row for each key that differs between runs, except their name."""
    keys = {key for run in runs for key in run.keys} - {"run.name", "run.folder"}
    names = [run.name for run in runs]
    rows = []
    for key in sorted(keys):
        values = [run.keys.get(key, "-") for run in runs]
        if len(set(map(str, values))) > 1:
            rows.append({"key": key, **dict(zip(names, values, strict=True))})
    return rows


def seed_groups(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return groups of runs that differ only in the seed, the first of each seed.

    The runs of a group are scored on the same split.
    """
    groups: dict[tuple[tuple[str, str], ...], dict[Any, RunRecord]] = {}
    for run in runs:
        keys = run.keys.keys() - {"run.name", "run.folder", "run.seed"}
        settings = ((key, str(run.keys[key])) for key in sorted(keys))
        group = groups.setdefault((("", run.split), *settings), {})
        group.setdefault(run.keys.get("run.seed"), run)
    return [[*group.values()] for group in groups.values() if len(group) > 1]


def mean_cells(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the mean of each score with its 95 % interval (Student's t), by title."""
    quantile = T_975[min(len(runs), len(T_975)) - 1]
    cells = {}
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
    """Return each teacher's "counted" or "validation" scores by name.

    A shared teacher appears once.
    """
    teachers: dict[str, tuple[str, str, Mapping[str, float]]] = {}
    for run in runs:
        row = run.counted if split == "counted" else run.best
        for name, values in run.scores.of_teachers(row).items():
            teacher = f"{run.manifest.get('teacher') or run.name} {name}"
            teachers.setdefault(teacher, (name, run.name, values))
    names = [name for name, _, _ in teachers.values()]
    return {
        name if names.count(name) == 1 else f"{name} of {run}": values
        for name, run, values in teachers.values()
    }


def verdicts(runs: Sequence[RunRecord]) -> list[str]:
    """Compare models: each student with its teachers, each run with the first.

    By the selection metric, with the 95 % interval of the difference; only models
    scored on the same images.
    """
    first = runs[0]
    lines = []
    for run in runs:
        scored = run.scored
        if scored is None:
            continue
        models = {name: scored.of(name) for name in run.scores.of_teachers(run.counted)}
        if run is not first and first.scored and scored.same_images(first.scored):
            models[first.name] = first.samples
        column = run.selection_metric
        for name, samples in models.items():
            if text := scored.against(samples, column):
                lines.append(f"{run.name} against {name}: {column.title} {text}")
    return lines


def price_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return throughput, billable time, cost and saving of each run as rows.

    The saving is relative to the first run with a price. As in SageMaker, the cost is
    that of the billable seconds. Saving and an epoch's cost count only the student's
    own steps.
    """
    rows = []
    first = Bill(0.0, 0.0)
    for run in runs:
        epochs = len(run.epochs)
        if not epochs and run.train:
            epochs = run.train[-1]["epoch"]
        column = run.selection_metric
        value = float(run.counted.get(column.key, 0.0))
        points = 100 * value if column.unit == "%" else 0.0
        score = saving = "-"
        if run.best:
            score = column.with_title(value, run.samples.get(column.key))
        steps = Bill(run.seconds / 3600, run.per_hour)
        saved = steps.saving(first)
        if saved is not None:
            saving = f"{100 * saved:.1f} %"
        first = first if first.usd else steps
        rows.append(
            {
                "run": run.name,
                "images/s": f"{run.images_per_second:.0f}",
                "billable": format_seconds(run.billable),
                "USD/h": f"{run.per_hour:.3f}" if run.per_hour else "-",
                "USD": format_dollars(run.cost) if run.cost else "-",
                "USD an epoch": format_dollars(steps.usd / epochs)
                if steps.usd and epochs
                else "-",
                "USD a point": format_dollars(run.cost / points)
                if run.cost and points
                else "-",
                "score": score,
                "saving": saving,
            }
        )
    return rows
