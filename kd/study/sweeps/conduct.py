"""Conduct a sweep: check everything, train the trials, and write the results.

The best trial is trained again with other seeds.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from kd import config
from kd.config.reads import build_task
from kd.core.errors import RunError
from kd.core.host import cores
from kd.files.json_file import read_json
from kd.files.storage import write_json, write_text
from kd.study.sweeps import frontier, ranking
from kd.study.sweeps.costs import COSTS
from kd.study.sweeps.processes import failure
from kd.study.sweeps.search import (
    Goal,
    Sampler,
    open_study,
    pruner_of,
    rehearse,
    sampler_of,
)
from kd.study.sweeps.space import (
    Space,
    Trial,
    require_different,
    sharing_overrides,
    student_alike,
)
from kd.study.sweeps.sweep import Sweep
from kd.study.sweeps.trials import Trials, sweep_lock

FRESH = 2  # number of other seeds with which the best trial is trained again
log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep that was checked, before anything is written."""

    space: Space
    goal: Goal
    count: int  # number of drawn trials; 0: all combinations
    sampler: Sampler | None
    pruner: optuna.pruners.BasePruner
    # all combinations, or a few trials that together have each value
    probes: Sequence[Trial]

    @property
    def name(self) -> str:
        """The run's own name."""
        probe = self.probes[0]
        return probe.config.run.name.removesuffix(f"_sweep/{probe.name}")

    @property
    def folder(self) -> Path:
        return Path(self.probes[0].config.run.folder) / f"{self.name}_sweep"

    @property
    def sized(self) -> bool:
        """Whether students differ, or a cost is an objective."""
        alike = {student_alike(trial) for trial in self.probes}
        return len(alike) > 1 or not {*COSTS}.isdisjoint(self.goal.objectives)

    def trial(self, values: Mapping[str, str], threads: int, baseline: bool) -> Trial:
        shared = sharing_overrides(self.space.load(values), threads)
        return self.space.trial(values, f"{self.name}_sweep", shared, baseline)


def plan_sweep(
    space: Space, trials: int, sampler: str, pruner: str, by: str, objectives: str
) -> SweepPlan:
    """Check a sweep; see `kd.study.sweeps.sweep.sweep`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    first = space.load(space.probes()[0])
    goal = Goal.read(build_task(first.task).scores, by, objectives)
    build_sampler = sampler_of(sampler, space, trials, first.run.seed)
    built_pruner = pruner_of(pruner, goal)
    combinations = space.probes() if build_sampler else space.combinations()
    folder = f"{first.run.name}_sweep"
    probes = [
        space.trial(values, folder, sharing_overrides(space.load(values), 1))
        for values in combinations
    ]
    require_different(probes)
    rehearse(space, goal, build_sampler, built_pruner)
    return SweepPlan(space, goal, trials, build_sampler, built_pruner, probes)


def train_sweep(plan: SweepPlan, storage: str, jobs: int) -> Sweep:
    """Train the trials of a sweep, and write its results."""
    with sweep_lock(plan.folder):
        file = plan.folder / "sweep.json"
        # a resumed trial keeps the sweep's initial number of threads, so its bits do
        # not change
        if not file.is_file():
            write_json(file, {"threads": max(1, cores() // jobs)})
        threads = read_json(
            file,
            "run.folder",
            "Remove the file",
            lambda content: int(content["threads"]),
        )
    trial_of = partial(plan.trial, threads=threads)
    trials = _trials(plan, storage, partial(trial_of, baseline=plan.sized))
    count = len(trials.rows())
    log.info(
        "sweep: '%s', study '%s', %d trials recorded",
        plan.folder,
        trials.study.study_name,
        count,
    )
    if not count:
        log.info(
            "sweep: runs that have ended in an earlier study are read, not trained"
            " again"
        )
    trials.train(jobs, plan.count, plan.sampler)
    winner = _best(trials)
    seeds_plan = _with_seeds(plan, winner)
    fresh = _trials(seeds_plan, storage, partial(trial_of, baseline=False))
    fresh.train(jobs, final=True)
    if failed := fresh.failed():
        raise failure(failed[0][1])
    with sweep_lock(plan.folder):
        return _write_results(plan, trials, winner, fresh.rows())


def _trials(plan: SweepPlan, storage: str, trial_of: Any) -> Trials:
    """Open the study of a plan: equal settings, values and objectives, equal study."""
    content = (
        plan.probes[0].name,
        sorted(plan.space.axes.items()),
        plan.goal.by,
        plan.goal.objectives,
    )
    name = f"{plan.name}-{hashlib.sha256(repr(content).encode()).hexdigest()[:8]}"
    with sweep_lock(plan.folder):
        study = open_study(name, storage, plan.folder, plan.goal, plan.pruner)
    return Trials(plan.folder, study, plan.space, plan.goal, trial_of)


def _with_seeds(plan: SweepPlan, winner: Trial) -> SweepPlan:
    """Return a plan that trains a trial with seeds that no other trial has."""
    newest = max(trial.config.run.seed for trial in plan.probes)
    seeds = [str(newest + 1 + number) for number in range(FRESH)]
    choices = {key: [text] for key, text in winner.values.items()} | {"run.seed": seeds}
    axes = {
        key: optuna.distributions.CategoricalDistribution(texts)
        for key, texts in choices.items()
    }
    return replace(
        plan,
        space=replace(plan.space, axes=axes),
        goal=replace(plan.goal, objectives=()),
        pruner=optuna.pruners.NopPruner(),
        sampler=None,
    )


def _best(trials: Trials) -> Trial:
    """Return the best of the trials that were not pruned."""
    rows = [row for row in trials.rows() if "pruned" not in row]
    failed = trials.failed()
    if not rows and failed:
        raise failure(failed[0][1])
    if not rows:
        raise RunError(
            "--pruner",
            "ended all trials",
            "At least one trial that ends",
            "Choose a milder one",
        )
    if len({row.get("data") for row in rows}) > 1:
        wrong = "the trials were not all scored on the same validation images"
        remedy = (
            "Sweep no key that changes them; where the images have changed, remove"
            f" '{trials.folder}'"
        )
        raise RunError("data", wrong, "One validation split", remedy)
    return trials.trial(rows[0])


def _write_results(
    plan: SweepPlan, trials: Trials, winner: Trial, fresh: list[dict[str, Any]]
) -> Sweep:
    """Test the best, time the students, and write best.yaml and sweep.md."""
    folder = plan.folder
    best = folder / "best.yaml"
    baseline = plan.space.load(winner.values).run.baseline  # the user's own setting
    run = replace(winner.config.run, name=f"{plan.name}_best", baseline=baseline)
    write_text(best, config.dump(replace(winner.config, run=run)))
    tested = trials.test(winner) if any("test" in row for row in fresh) else {}
    rows = trials.rows()
    column = trials.goal.columns[rows[0]["key"]]
    teacher = {}
    notes = []
    if plan.sized:
        rows, teacher = frontier.with_costs(trials, rows)
        notes.append(frontier.write_frontier(rows, teacher, column, folder))
    table = ranking.trials_table(rows, trials, column, teacher)
    luck = ranking.luck_text(rows, fresh, tested, column)
    hints = (
        f"`kd-train {best}` trains the best again; `kd-report {folder}/*/` shows all"
        " curves on one page."
    )
    text = "\n\n".join([table, *notes, luck, hints])
    write_text(folder / "sweep.md", text + "\n")
    return Sweep(folder, best, rows, fresh, tested, text, trials.study)
