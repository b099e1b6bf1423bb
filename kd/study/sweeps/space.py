"""Read the space of a sweep, and make the configuration of each trial.

The space has keys with lists or ranges of values.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kd import config
from kd.config import Config
from kd.config.flat import alternatives
from kd.config.reads import reads
from kd.core.errors import ConfigError
from kd.files.storage import write_text
from kd.parts import registry
from kd.setup.auto import completed
from kd.setup.recipe import flatten, is_resume_mutable
from kd.study.sweeps.calls import construct, parse_call

COUNTED = ("run.every.evaluate", "data.test", "data.exclude")
"""Keys that change no weight but affect a score."""
NAME_LETTERS = 60
"""Letters of a trial's values in its folder name.

With the hash it stays far below the limit of 255 bytes.
"""
RANGES = "uniform(LOW,HIGH), loguniform(LOW,HIGH), integers(LOW,HIGH)"


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration of a sweep."""

    # name of its run folder in the sweep's: its values, and a hash of everything that
    # its score depends on
    name: str
    values: Mapping[str, str]  # the text of each varying key
    config: Config


@dataclass(frozen=True, slots=True)
class Space:
    """Varying and fixed keys of a sweep."""

    settings: Any  # a YAML file or its contents
    fixed: Sequence[str]  # `key=value` for all trials
    axes: Mapping[str, Any]  # Optuna's distribution of each varying key

    @classmethod
    def read(cls, settings: Any, overrides: Sequence[str]) -> Space:
        """Read the keys of overrides, each of which stands in the command once."""
        fixed = []
        axes = {}
        keys = [override.partition("=")[0] for override in overrides]
        plain_keys = [re.sub(r"\[(\w+)\]", r".\1", key) for key in keys]
        for i, (key, override) in enumerate(zip(keys, overrides, strict=True)):
            axis = axis_of(override)
            if axis is None:
                fixed.append(override)
                continue
            if is_resume_mutable(key):
                raise ConfigError(
                    key,
                    "changes no weight of a student, but has several values",
                    "One value",
                    "Sweep a key that is learned with, such as optimizer.lr",
                )
            if plain_keys[i] in plain_keys[i + 1 :]:
                wrong = "stands again behind its list"
                allowed = "One list of a key, standing last"
                raise ConfigError(key, wrong, allowed, "Leave one out")
            axes[key] = axis
        if not axes:
            remedy = "Give a key two values or more: optimizer.lr=1e-3,3e-3"
            raise ConfigError(
                "kd-sweep",
                "no key has several values",
                f"key=a,b,c or {RANGES}",
                remedy,
            )
        return cls(settings, fixed, axes)

    @property
    def ranges(self) -> list[str]:
        """The keys with a range, which no list of combinations holds."""
        return [key for key, axis in self.axes.items() if not hasattr(axis, "choices")]

    def combinations(self) -> list[dict[str, str]]:
        """Return all combinations of the lists, in the order of the command.

        A range counts with its ends.
        """
        return [
            dict(zip(self.axes, texts, strict=True))
            for texts in itertools.product(*self._ends().values())
        ]

    def probes(self) -> list[dict[str, str]]:
        """Return few combinations with each value of a list and each end of a range."""
        ends = self._ends()
        first = {key: texts[0] for key, texts in ends.items()}
        probes = [first]
        for key, texts in ends.items():
            probes += [{**first, key: text} for text in texts[1:]]
        return probes

    def _ends(self) -> dict[str, list[str]]:
        return {
            key: [str(value) for value in _ends_of(axis)]
            for key, axis in self.axes.items()
        }

    def load(self, values: Mapping[str, str], *overrides: str) -> Config:
        varying = [f"{key}={text}" for key, text in values.items()]
        return config.load(self.settings, [*self.fixed, *varying, *overrides])

    def trial(
        self,
        values: Mapping[str, str],
        name: str,
        shared: Sequence[str],
        baseline: bool = False,
    ) -> Trial:
        """Return a trial.

        `name`: the sweep's folder; `shared`: common overrides; `baseline`: keep the
        baseline.
        """
        overrides = [*shared] if baseline else [*shared, "run.baseline=false"]
        loaded = self.load(values, *overrides)
        keys = flatten(config.to_dict(loaded, values=True))
        counted = {
            key: keys[key]
            for key in keys
            if key.startswith(COUNTED) or not is_resume_mutable(key, "backend.threads")
        }
        content = json.dumps(counted, sort_keys=True, default=str)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        texts = "_".join(
            f"{key.rpartition('.')[2]}-{text}" for key, text in values.items()
        )
        letters = re.sub(r"[^A-Za-z0-9.+-]+", "_", texts)[:NAME_LETTERS]
        trial_name = f"{letters}_{digest}"
        run = replace(loaded.run, name=f"{name}/{trial_name}")
        return Trial(trial_name, values, replace(loaded, run=run))


def axis_of(override: str) -> Any:
    """Return Optuna's distribution of the list or range in `key=TEXT`.

    None: it is one value.
    """
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    key, _, text = override.partition("=")
    kinds = {
        "uniform": FloatDistribution,
        "loguniform": lambda low, high: FloatDistribution(low, high, log=True),
        "integers": IntDistribution,
    }
    word = re.match(r"(\w+)\(", text)
    name, ends, options = parse_call(text)
    if word is None or (word[1] not in kinds and len(ends) < 2):
        texts = alternatives(override)
        return CategoricalDistribution(texts) if len(texts) > 1 else None
    types = int if name == "integers" else (int, float)
    numeric = all(isinstance(end, types) and math.isfinite(end) for end in ends)
    rising = numeric and len(ends) == 2 and ends[0] < ends[1]
    if name not in kinds or options or not rising:
        wrong = f"'{text}' is no range"
        remedy = "LOW is below HIGH, and both are whole numbers for integers"
        raise ConfigError(key, wrong, RANGES, remedy)
    return construct(key, text, lambda: kinds[name](*ends))


def _ends_of(axis: Any) -> Sequence[Any]:
    """Return the values of a list, or the ends of a range.

    A range of fractions has a further value between its ends.
    """
    if hasattr(axis, "choices"):
        return axis.choices
    if isinstance(axis.low, float):
        return [axis.low, axis.high, axis.low + (axis.high - axis.low) / 3]
    return [axis.low, axis.high]


def require_different(trials: Iterable[Trial]) -> None:
    """Refuse two trials that make the same run, naming a key in which they differ."""
    first_of: dict[str, Trial] = {}
    for trial in trials:
        first = first_of.setdefault(trial.name.rpartition("_")[2], trial)
        for key, text in trial.values.items():
            if text != first.values[key]:
                wrong = f"'{first.values[key]}' and '{text}' make the same run"
                allowed = "Values of which each changes the run"
                raise ConfigError(key, wrong, allowed, "Leave one out")


def sharing_overrides(settings: Config, threads: int) -> list[str]:
    """Return the overrides by which trials share teacher outputs and decoded images.

    The views are as in a single run. Outputs are rounded to float16, as in every cache.
    If a run's length is in steps, or a loss reads features, no cache is set: its size
    is unknown here, or large.
    """
    overrides = []
    backend = settings.backend
    facts = registry.facts("backends", backend.kind, backend.options, "backend.kind")
    if facts.cpu and facts.threads == 0:
        overrides.append(f"backend.threads={threads}")
    if settings.data.store == "ram":
        overrides.append("data.store=disk")
    views = settings.data.views
    if not views and not settings.run.steps:
        views = completed(settings).run.epochs
    teacher = settings.teacher
    several_processes = teacher.shard or teacher.pipeline
    cacheable = teacher.model and not teacher.cache.views and not several_processes
    needs = reads(settings.losses)
    if views and cacheable and needs.teacher_logits and not needs.features:
        overrides.append(f"teacher.cache.views={views}")
    return overrides


def prepared_alike(trial: Trial) -> str:
    """Return a text that is equal for trials with one teacher, cache and images."""
    settings = trial.config
    return repr(
        (
            settings.data,
            settings.teacher,
            settings.task,
            settings.backend,
            settings.run.seed,
            reads(settings.losses),
        )
    )


def student_alike(trial: Trial) -> str:
    """Return a text that is equal for students of one network and image size."""
    student = trial.config.student
    side = trial.config.data.image_size
    return repr((student.kind, student.model, student.args, student.options, side))


def write_yaml(trial: Trial, folder: Path) -> str:
    """Write the configuration of a trial for `kd-train` and return the file."""
    file = folder / f"{trial.name}.yaml"
    write_text(file, config.dump(trial.config))
    return str(file)
