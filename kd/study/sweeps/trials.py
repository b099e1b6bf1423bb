"""Train the trials of a sweep: several at a time, resumed after a kill, each recorded once it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kd.config.reads import build_task
from kd.core.errors import ConfigError
from kd.core.scores import Column
from kd.files.run_dir import RunDir
from kd.files.storage import append_rows, disk_error, flush, lock, read_rows
from kd.setup.recipe import resolve
from kd.study.sweeps.median import Point, Verdict, judge
from kd.study.sweeps.processes import Processes, failure
from kd.study.sweeps.space import Trial, prepared_alike, student_alike, write_yaml

POLL = 0.5
"""Seconds between two looks at the trials."""
CHOOSE = "Choose one of them"
log = logging.getLogger("kd")


class Trials:
    """The trials of a folder, in order, and what is recorded of them."""

    def __init__(self, folder: Path, trials: Sequence[Trial], by: str) -> None:
        """Read what is recorded. `by`: the key of the score that counts; "": the one that decides in each run."""
        self.folder, self.trials, self.by, self.failed = folder, trials, by, dict[str, str]()
        self._journal, names = folder / "journal.jsonl", {trial.name for trial in trials}
        rows = [row for row in read_rows(self._journal, last=None) if row["trial"] in names and row["by"] == by]
        self.rows = {row["trial"]: row for row in rows}
        self.scores = build_task(trials[0].config.task).scores
        self._columns = {column.key: column for column in (*self.scores.own, *self.scores.pair)}
        if by and by not in self._columns:
            raise ConfigError("--by", f"is '{by}'", f"Allowed: {', '.join(self._columns)}", CHOOSE)

    def column(self) -> Column:
        """Return the column of the score that counts, once a trial was evaluated."""
        key = self.by or next((row["key"] for row in self.rows.values()), "")
        known = (row for trial in self.trials for row in self._evaluations(trial))
        return self._columns[key] if key else self.scores.deciding(next(known))

    def last_row(self, name: str) -> Mapping[str, Any]:
        """Return the last scores of a run below the folder; {} where there is no such run."""
        run = RunDir(self.folder / name)
        scored = run.scored()
        return run.best_row() if scored is None else scored.row

    def train(self, jobs: int, final: bool = False) -> None:
        """Train what is not recorded yet. `final`: also score the test images, and end no trial early."""
        waiting = [trial for trial in self.trials if trial.name not in self.rows]
        self._prepare(waiting)
        over: set[str] = set()
        with Processes() as processes:
            while waiting or len(processes.running) or over:
                for name, line in processes.ended().items():
                    over.add(name)
                    if line:
                        self.failed[name] = line
                over -= self.failed.keys()
                for trial, curve, verdict in self._judged(over, final):
                    if verdict.end is not None and trial.name in processes.running:
                        processes.stop(trial.name)
                    elif verdict.end is not None or (trial.name in over and verdict.until == float("inf")):
                        self._record(trial, curve, verdict)
                over -= self.rows.keys()
                waiting = [trial for trial in waiting if trial.name not in self.rows]
                for trial in waiting[:]:
                    if len(processes.running) < jobs and not _in_use(self.folder / trial.name):
                        waiting.remove(trial)
                        words = ["train", str(write_yaml(trial, self.folder)), *([] if final else ["--no-test"])]
                        processes.start(trial.name, words, self.folder / f"{trial.name}.log")
                time.sleep(POLL if len(processes.running) or waiting else 0)
        for name, line in self.failed.items():
            log.info("sweep: %s failed: %s ('%s' has all that it said)", name, line, self.folder / f"{name}.log")

    def _prepare(self, waiting: Sequence[Trial]) -> None:
        """Fit each teacher and fill each cache that several trials share, before the first of them begins."""
        alike: dict[str, list[Trial]] = {}
        for trial in waiting:
            alike.setdefault(prepared_alike(trial), []).append(trial)
        for trials in alike.values():
            first, plan = trials[0], resolve(trials[0].config).teacher
            job = "cache" if plan.members and plan.section.cache.views else "teach" * bool(plan.fits)
            begun = any((self.folder / trial.name / "config.yaml").is_file() for trial in trials)
            if begun or not job or len(trials) < 2:
                continue
            log.info("sweep: kd-%s for %d trials", job, len(trials))
            with Processes() as processes:
                processes.start(job, [job, str(write_yaml(first, self.folder))], self.folder / "prepare.log")
                while not (ended := processes.ended()):
                    time.sleep(POLL)
            if ended[job]:
                raise failure(ended[job])

    def _judged(self, over: set[str], final: bool) -> list[tuple[Trial, Sequence[Point], Verdict]]:
        """Return the trials that are not recorded, with their curves and what the median rule says."""
        curves = [self._curve(trial) for trial in self.trials]
        ended = [trial.name in self.rows or trial.name in over or trial.name in self.failed for trial in self.trials]
        if final or not any(curves):
            verdicts = [Verdict(float("inf") if done else 0.0) for done in ended]
        else:
            verdicts = [Verdict(0.0)] * len(curves)
            alike: dict[str, list[int]] = {}
            for i, trial in enumerate(self.trials):  # a student that is small is not hopeless because a large one leads
                alike.setdefault(student_alike(trial), []).append(i)
            for group in alike.values():
                recorded = {at for at, i in enumerate(group) if self.trials[i].name in self.rows}
                found = judge([curves[i] for i in group], [ended[i] for i in group], recorded, self.column().smaller)
                for i, verdict in zip(group, found, strict=True):
                    verdicts[i] = verdict
        known = self.rows.keys() | self.failed.keys()
        return [one for one in zip(self.trials, curves, verdicts, strict=True) if one[0].name not in known]

    def _evaluations(self, trial: Trial) -> list[dict[str, Any]]:
        return RunDir(self.folder / trial.name).metrics("val")

    def _curve(self, trial: Trial) -> list[Point]:
        if trial.name in self.rows:
            return [Point(*point) for point in self.rows[trial.name]["curve"]]
        run, curve, best, score = trial.config.run, [], float("-inf"), 0.0
        for row in self._evaluations(trial):
            decides = self.scores.deciding(row).key
            if self.by and self.by not in row:
                known = ", ".join(key for key in self._columns if key in row)
                raise ConfigError("--by", f"is '{self.by}', which these runs do not have", f"Allowed: {known}", CHOOSE)
            if row[decides] > best:  # as the loop finds the best checkpoint
                best, score = row[decides], row[self.by or decides]
            share = row["step"] / run.steps if run.steps else row["epoch"] / run.epochs
            curve.append(Point(row["step"], share, score))
        return curve

    def _record(self, trial: Trial, curve: Sequence[Point], verdict: Verdict) -> None:
        """Write the line of a trial that has ended. One whose end came too late to save anything counts alike."""
        column = self.column()
        points = [point for point in curve if verdict.end is None or point.step <= verdict.end.step]
        row: dict[str, Any] = {"trial": trial.name, "values": dict(trial.values), "by": self.by, "key": column.key}
        row |= {"score": points[-1].score, "why": "", "curve": [list(asdict(point).values()) for point in points]}
        if verdict.end is not None:
            texts = column.text(verdict.end.score), column.text(verdict.median)
            row["why"] = f"ended at step {verdict.end.step}: {texts[0]}, the median of the others is {texts[1]}"
        else:
            row |= self._last_score(trial, column.key)
        try:
            append_rows(self._journal, row)
            flush(self._journal)
        except OSError as error:
            raise disk_error(error, self._journal, "run.folder") from error
        self.rows[trial.name] = row
        shown = ", ".join(f"{key}={text}" for key, text in trial.values.items())
        log.info("sweep: %s: %s", shown, row["why"] or column.with_title(row["score"]))

    def _last_score(self, trial: Trial, key: str) -> dict[str, Any]:
        """Return interval and images of the last score of a run; that of test images under a key of its own."""
        scored = RunDir(self.folder / trial.name).scored()
        if scored is None:
            return {}
        ends: Mapping[str, Any] = {"interval": scored.samples[key].interval()} if key in scored.samples else {}
        found = {"score": scored.row[key], "data": scored.data, **ends}
        return {"test": found} if scored.split == "test" else {name: found[name] for name in found if name != "score"}


def _in_use(folder: Path) -> bool:
    """Return whether a process is writing a run folder: one that outlived a killed sweep."""
    if not (folder / ".lock").is_file():
        return False
    held = lock(folder / ".lock", "run.name")
    if held is not None:
        held.close()
    return held is None
