"""Train the trials of an Optuna study in several processes, and stop hopeless ones.

A killed sweep resumes. A process that trains a trial, or asks the study for one, holds
a file lock in the sweep's folder. A trial that is RUNNING in the study while its lock
is free was interrupted: it becomes FAIL, and its values are enqueued again. Its run
folder is named by the values, so that `kd train` continues from the checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from kd.core.errors import KdError, RunError
from kd.core.scores import Scored
from kd.files.run_dir import RunDir
from kd.files.storage import on_disk, take_lock
from kd.setup.recipe import resolve
from kd.study.sweeps.costs import COSTS, measure_costs, student_of
from kd.study.sweeps.processes import POLL, Processes, run_command
from kd.study.sweeps.search import Goal, Sampler
from kd.study.sweeps.space import Space, Trial, prepared_alike, write_yaml

log = logging.getLogger("kd")


@contextmanager
def sweep_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process of the sweep is in such a block."""
    with on_disk(folder, "run.folder"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    with file:
        while not take_lock(file, folder / ".lock", "run.name"):
            time.sleep(POLL)
        yield


@dataclass(slots=True)
class Attempt:
    """A trial that this process trains."""

    trial: Trial
    study_trial: optuna.Trial
    claim: IO[str]  # open, and locked until this process and the training have ended
    reported: int = 0  # number of validation rows


class Trials:
    """The trials of a study, and their run folders in the sweep's folder."""

    def __init__(
        self,
        folder: Path,
        study: optuna.Study,
        space: Space,
        goal: Goal,
        trial_of: Callable[[Mapping[str, str]], Trial],
    ) -> None:
        """`trial_of`: returns the configuration for the values of the varying keys."""
        self.folder = folder
        self.study = study
        self.space = space
        self.goal = goal
        self.trial_of = trial_of

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per run, best first.

        Those of pruned runs have `pruned` and are last.
        """
        ranked: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        # of equal values the last counts
        for record in [
            *self._records(TrialState.PRUNED),
            *self._records(TrialState.COMPLETE),
        ]:
            row = {**record.user_attrs, "values": texts_of(record.params)}
            row.pop("continues", None)
            if record.state == TrialState.PRUNED:
                evaluations = len(record.intermediate_values)
                row |= {"score": record.value, "pruned": evaluations}
            sign = 1 if self.goal.columns[row["key"]].smaller else -1
            order = [
                self.space.axes[key].to_internal_repr(value)
                for key, value in record.params.items()
            ]
            rank = ("pruned" in row, sign * row["score"], order)
            ranked[row["trial"]] = rank, row
        return [row for _, row in sorted(ranked.values(), key=lambda pair: pair[0])]

    def failed(self) -> list[tuple[dict[str, str], str]]:
        """Return values and error of each trial that failed and was not tried again."""
        return [
            (
                texts_of(record.params),
                record.user_attrs.get("failed", "was interrupted"),
            )
            for record in self._failed_records()
        ]

    def trial(self, row: Mapping[str, Any]) -> Trial:
        """Return the configuration of a row."""
        return self.trial_of(row["values"])

    def last_row(self, name: str) -> Mapping[str, Any]:
        """Return the final validation scores of a run; {} if there is no such run."""
        folder = RunDir(self.folder / name)
        scored = folder.scored()
        if scored is None or scored.split == "test":
            return folder.best_row()
        return scored.row

    def train(
        self,
        jobs: int,
        count: int = 0,
        sampler: Sampler | None = None,
        final: bool = False,
    ) -> None:
        """Train until all combinations, or `count` trials of a sampler, have ended.

        `final`: score test images too.
        """
        with sweep_lock(self.folder):
            self._begin(sampler is None)
        attempts: dict[str, Attempt] = {}
        with ExitStack() as claims, Processes() as processes:
            while True:
                for name, line in processes.ended().items():
                    attempt = attempts.pop(name)
                    self._tell(attempt, line, name in processes.stopped)
                    # not earlier: a trial that is RUNNING and free counts as
                    # interrupted
                    attempt.claim.close()
                for name, attempt in attempts.items():
                    if self._hopeless(attempt):
                        processes.stop(name)
                if len(attempts) < jobs and (attempt := self._next(count, sampler)):
                    attempts[attempt.trial.name] = attempt
                    claims.callback(attempt.claim.close)
                    self._start(attempt, processes, final)
                elif not attempts and not self._records(
                    TrialState.RUNNING, TrialState.WAITING
                ):
                    return
                else:
                    time.sleep(POLL)

    def test(self, trial: Trial) -> dict[str, Any]:
        """Score the checkpoint of a finished trial on test images.

        Returned are `score`, `interval` and `data`.
        """
        folder = RunDir(self.folder / trial.name)
        scored = folder.scored()
        if scored is None or scored.split != "test":
            words = ["train", write_yaml(trial, self.folder)]
            run_command("test", words, self.folder / f"{trial.name}.log")
            scored = folder.scored()
        if scored is None:
            wrong = f"'{folder.path}' was not scored"
            raise RunError("run.folder", wrong, "", "Run the same command again")
        return _score_facts(scored, self.goal.key_in(scored.row))

    def _records(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _failed_records(self) -> list[FrozenTrial]:
        """Return the trials that failed and were not tried again."""
        retried = {record.user_attrs.get("continues") for record in self._records()}
        failed = self._records(TrialState.FAIL)
        return [record for record in failed if record.number not in retried]

    def _begin(self, grid: bool) -> None:
        """Prepare for all trials, enqueue the combinations, and retry failed trials."""
        combinations = self.space.combinations() if grid else []
        if not self._records():
            self._prepare(combinations or self.space.probes())
        for values in combinations:
            self.study.enqueue_trial(values, {"values": values}, skip_if_exists=True)
        for record in self._failed_records():
            self._enqueue_again(record)

    def _prepare(self, combinations: Sequence[Mapping[str, str]]) -> None:
        """Fit each teacher and fill each cache shared by several trials."""
        alike: dict[str, list[Trial]] = {}
        for values in combinations:
            trial = self.trial_of(values)
            alike.setdefault(prepared_alike(trial), []).append(trial)
        for trials in alike.values():
            recipe = resolve(trials[0].config)
            if recipe.members and recipe.teacher.cache.views:
                job = "cache"
            elif recipe.fits:
                job = "teach"
            else:
                continue
            if len(trials) > 1:
                log.info("sweep: kd-%s for all trials", job)
                words = [job, write_yaml(trials[0], self.folder)]
                run_command(job, words, self.folder / "prepare.log")

    def _enqueue_again(self, record: FrozenTrial) -> None:
        # a kill while the values were drawn leaves some
        values = record.user_attrs.get("values", record.params)
        self.study.enqueue_trial(values, {"values": values, "continues": record.number})

    def _next(self, count: int, sampler: Sampler | None) -> Attempt | None:
        """Take a trial that waits, or draw one; None: nothing is left at present."""
        with sweep_lock(self.folder):
            self._retry_interrupted()
            records = self._records()
            drawn = sum("continues" not in record.user_attrs for record in records)
            if drawn >= count and not self._records(TrialState.WAITING):
                return None
            if sampler is not None:
                self.study.sampler = sampler(len(records))
            study_trial = self.study.ask(dict(self.space.axes))
            try:
                trial = self.trial_of(texts_of(study_trial.params))
            except KdError as error:
                self._fail(study_trial, str(error))
                return None
            study_trial.set_user_attr("trial", trial.name)
            claim = _claim(self.folder, trial.name)
        # Without the claim equal values are trained at this moment. The trial is then
        # found RUNNING and free, as above.
        return None if claim is None else Attempt(trial, study_trial, claim)

    def _retry_interrupted(self) -> None:
        """Enqueue again the trials that no process trains."""
        for record in self._records(TrialState.RUNNING):
            claim = _claim(self.folder, record.user_attrs.get("trial", "interrupted"))
            if claim is None:
                continue
            # read again: another process may have told the end, and then freed the lock
            running = {trial.number for trial in self._records(TrialState.RUNNING)}
            if record.number in running:
                # before it ends: a kill here repeats this, and loses nothing
                self._enqueue_again(record)
                self.study.tell(record.number, state=TrialState.FAIL)
            claim.close()

    def _start(self, attempt: Attempt, processes: Processes, final: bool) -> None:
        trial = attempt.trial
        words = ["train", write_yaml(trial, self.folder)]
        if not final:
            words.append("--no-test")
        output = self.folder / f"{trial.name}.log"
        processes.start(trial.name, words, output, [attempt.claim.fileno()])

    def _hopeless(self, attempt: Attempt) -> bool:
        """Report new rows, and return whether the pruner ends a run without a score."""
        if not self._report(attempt) or not attempt.study_trial.should_prune():
            return False
        return RunDir(self.folder / attempt.trial.name).scored() is None

    def _report(self, attempt: Attempt) -> bool:
        """Report new validation rows, and return whether there were some.

        Optuna takes none of several objectives.
        """
        if self.goal.objectives:
            return False
        folder = RunDir(self.folder / attempt.trial.name)
        rows = folder.metrics("val")[attempt.reported :]
        for row in rows:
            key = self.goal.key_in(row)
            if not attempt.reported:
                attempt.study_trial.set_user_attr("key", key)
            attempt.study_trial.report(row[key], attempt.reported)
            attempt.reported += 1
        return bool(rows)

    def _tell(self, attempt: Attempt, line: str, stopped: bool) -> None:
        """Record how a trial ended. `line`: its error; "": none."""
        trial = attempt.trial
        study_trial = attempt.study_trial
        values = ", ".join(f"{key}={text}" for key, text in trial.values.items())
        self._report(attempt)
        if line and stopped:
            self.study.tell(study_trial, state=TrialState.PRUNED)
            log.info("sweep: %s: pruned at evaluation %d", values, attempt.reported)
            return
        facts = {} if line else self._facts(trial)
        if error := line or facts.get("untimed", ""):
            self._fail(study_trial, error)
            log.info(
                "sweep: %s failed: %s ('%s/%s.log' has all)",
                values,
                error,
                self.folder,
                trial.name,
            )
            return
        for key, value in facts.items():
            study_trial.set_user_attr(key, value)
        objectives = self.goal.objectives or ("score",)
        self.study.tell(study_trial, [facts[key] for key in objectives])
        column = self.goal.columns[facts["key"]]
        log.info("sweep: %s: %s", values, column.with_title(facts["score"]))

    def _fail(self, study_trial: optuna.Trial, error: str) -> None:
        study_trial.set_user_attr("failed", error)
        self.study.tell(study_trial, state=TrialState.FAIL)

    def _facts(self, trial: Trial) -> dict[str, Any]:
        """Return the scores of a finished run, and its costs if they are objectives."""
        folder = RunDir(self.folder / trial.name)
        best = folder.best_row()
        key = self.goal.key_in(best)
        facts = {"key": key, "score": best[key]}
        if (scored := folder.scored()) is not None:
            final = _score_facts(scored, key)
            facts |= {"test": final} if scored.split == "test" else final
        final = self.last_row(trial.name)
        for objective in self.goal.objectives:
            if objective in final:
                facts[objective] = final[objective]
        if not {*COSTS}.isdisjoint(self.goal.objectives):
            load = partial(student_of, self.folder, trial)
            facts |= measure_costs({"": load}, {"": trial.config.data.image_size})[""]
        return facts


def texts_of(params: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a trial as they stand behind `key=`."""
    return {key: str(value) for key, value in params.items()}


def _claim(folder: Path, name: str) -> IO[str] | None:
    """Return the locked file of a trial; None if another process trains it."""
    path = folder / f"{name}.lock"
    file = path.open("a")
    if take_lock(file, path, "run.name"):
        return file
    file.close()
    return None


def _score_facts(scored: Scored, key: str) -> dict[str, Any]:
    """Return a `score`, its `interval` (if known) and `data`, a hash of the images."""
    facts = {"score": scored.row[key], "data": scored.data}
    if key in scored.samples:
        facts["interval"] = list(scored.samples[key].interval())
    return facts
