"""Set up Optuna for a sweep: what is optimized, sampler, pruner, stored study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection

from kd.core.errors import ConfigError, RunError, did_you_mean, first_sentence
from kd.core.scores import Column, Scores
from kd.core.seeds import seed_from
from kd.study.sweeps.calls import classes_of, construct, construct_named
from kd.study.sweeps.costs import COSTS
from kd.study.sweeps.space import Space

REHEARSED = 12  # trials of a rehearsal: samplers draw at random up to the tenth
NUMPY_SEEDS = 2**32  # NumPy's generators take smaller seeds
Sampler = Callable[[int], optuna.samplers.BaseSampler]


@dataclass(frozen=True, slots=True)
class Goal:
    """The score by which trials are ranked, and the objectives."""

    scores: Scores
    by: str  # key of the ranking score; "": the selection metric
    objectives: tuple[str, ...]  # (): the ranking score alone

    @classmethod
    def read(cls, scores: Scores, by: str, objectives: str) -> Goal:
        """Check the keys of scores and objectives, such as `accuracy,ms`."""
        keys = tuple(filter(None, objectives.replace(" ", "").split(",")))
        score_keys = [key for key in keys if key not in COSTS]
        if not by and score_keys:
            by = score_keys[0]
        goal = cls(scores, by, keys)
        for option, key in goal._options():
            allowed = [*goal.columns]
            if option == "--objectives":
                allowed += COSTS
            if key not in allowed:
                near = did_you_mean(key, allowed) or "Choose one of them"
                raise ConfigError(
                    option, f"is '{key}'", f"Allowed: {', '.join(allowed)}", near
                )
        if len(set(keys)) != len(keys) or len(keys) == 1:
            raise ConfigError(
                "--objectives",
                f"is '{objectives}'",
                "Two different keys or more, such as accuracy,ms",
            )
        return goal

    @property
    def columns(self) -> dict[str, Column]:
        return {column.key: column for column in (*self.scores.own, *self.scores.pair)}

    @property
    def directions(self) -> list[StudyDirection]:
        smaller = {key for key, column in self.columns.items() if column.smaller}
        smaller.update(COSTS)
        return [
            StudyDirection.MINIMIZE if key in smaller else StudyDirection.MAXIMIZE
            for key in self.objectives or (self.by,)
        ]

    def key_in(self, row: Mapping[str, Any]) -> str:
        """Return the key of the ranking score; the row must have all named scores."""
        for option, key in self._options():
            if key not in row and key not in COSTS:
                columns = [column for column in self.columns if column in row]
                wrong = f"is '{key}', which these runs do not have"
                allowed = f"Allowed: {', '.join(columns)}"
                raise ConfigError(option, wrong, allowed, "Choose one of them")
        return self.by or self.scores.deciding(row).key

    def _options(self) -> list[tuple[str, str]]:
        """Return each named key with its option."""
        options = [("--objectives", key) for key in self.objectives]
        if self.by and self.by not in self.objectives:
            options.insert(0, ("--by", self.by))
        return options


def sampler_of(text: str, space: Space, trials: int, seed: int) -> Sampler | None:
    """Return a function of a trial's number that builds its sampler.

    None: all combinations are trained in order. A sampler's random numbers depend on
    `run.seed` and the trial's number alone, in any process.
    """
    if text == "grid" or not (text or space.ranges or trials):
        if not (space.ranges or trials):
            return None
        wrong = "is grid, which trains all"
        if space.ranges:
            wrong = f"is grid, but '{space.ranges[0]}' has a range"
        raise ConfigError(
            "--sampler",
            wrong,
            "Lists key=a,b,c without --trials",
            "Leave --sampler out",
        )
    sampler = partial(_seeded, text or "tpe", seed)
    sampler(0)  # its name is checked first
    if not trials:
        allowed = "A number of trials, for a range or a sampler"
        raise ConfigError(
            "--trials", "is missing", allowed, "Add, for example, --trials 20"
        )
    return sampler


def _seeded(text: str, seed: int, number: int) -> optuna.samplers.BaseSampler:
    classes = classes_of(optuna.samplers, "Sampler")
    trial_seed = seed_from(seed, "trial", number) % NUMPY_SEEDS
    return construct_named(classes, "--sampler", text, seed=trial_seed)


def pruner_of(text: str, goal: Goal) -> optuna.pruners.BasePruner:
    """Build the pruner that a text names."""
    if text != "none" and goal.objectives:
        raise ConfigError(
            "--pruner",
            f"is '{text}', with several objectives",
            "none",
            "Optuna prunes by one objective",
        )
    classes = classes_of(optuna.pruners, "Pruner")
    classes = {"none": classes.pop("nop"), **classes}
    return construct_named(classes, "--pruner", text)


def rehearse(
    space: Space, goal: Goal, sampler: Sampler | None, pruner: optuna.pruners.BasePruner
) -> None:
    """Run sampler and pruner in memory, to report what they refuse before training."""
    study = optuna.create_study(
        directions=goal.directions, sampler=sampler and sampler(0), pruner=pruner
    )
    axes = space.axes if sampler else {}
    for number in range(REHEARSED):
        trial = construct(
            "--sampler", type(study.sampler).__name__, partial(study.ask, dict(axes))
        )
        if not goal.objectives:
            trial.report(number, 0)
            construct("--pruner", type(pruner).__name__, trial.should_prune)
        study.tell(trial, [float(number)] * len(goal.directions))


def open_study(
    name: str, storage: str, folder: Path, goal: Goal, pruner: optuna.pruners.BasePruner
) -> optuna.Study:
    """Create or load a study.

    `storage`: a URL; "": a journal in the sweep's folder.
    """
    journal = folder / "journal.log"
    try:
        return optuna.create_study(
            study_name=name,
            storage=storage
            or optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
            directions=goal.directions,
            pruner=pruner,
            load_if_exists=True,
        )
    except Exception as error:  # a database has its own errors
        if not storage:
            wrong = f"'{journal}' is damaged ({first_sentence(error)})"
            remedy = "Remove it: finished runs stay"
            raise RunError("run.folder", wrong, "", remedy) from error
        allowed = (
            "A URL of Optuna's, such as sqlite:///sweep.db or postgresql://HOST/NAME"
        )
        raise RunError(
            "--storage", f"cannot be opened ({first_sentence(error)})", allowed
        ) from error


def on_pareto_front(
    points: Sequence[Sequence[float]], directions: Sequence[StudyDirection]
) -> list[bool]:
    """Return whether each point is on the Pareto front.

    No other point is then as good in all and better in one.
    """
    study = optuna.create_study(directions=directions)
    study.add_trials(optuna.trial.create_trial(values=list(point)) for point in points)
    best = {trial.number for trial in study.best_trials}
    return [number in best for number in range(len(points))]
