"""The space of a sweep: keys with lists or ranges of values; and the configuration of
each trial.
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
from kd.study.sweeps.calls import call_of, constructed

COUNTED = ("run.every.evaluate", "data.test", "data.exclude")
"""Keys that change no weight but affect a score."""
NAME_LETTERS = 60
"""Letters of a trial's values in its folder name: with the hash it stays far below the
limit of 255 bytes.
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
        fixed, axes = [], {}
        keys = [
            re.sub(r"\[(\w+)\]", r".\1", override.partition("=")[0])
            for override in overrides
        ]
        for i, override in enumerate(overrides):
            key = override.partition("=")[0]
            axis = axis_of(override)
            if axis is None:
                fixed.append(override)
                continue
            if is_resume_mutable(key):
                wrong, allowed = (
                    "changes no weight of a student, but has several values",
                    "One value",
                )
                raise ConfigError(
                    key,
                    wrong,
                    allowed,
                    "Sweep a key that is learned with, such as optimizer.lr",
                )
            if keys[i] in keys[i + 1 :]:
                wrong, allowed = (
                    "stands again behind its list",
                    "One list of a key, standing last",
                )
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
        """Return all combinations of the lists, in the order of the command; a range
        counts with its ends.
        """
        return [
            dict(zip(self.axes, texts, strict=True))
            for texts in itertools.product(*self._ends().values())
        ]

    def probes(self) -> list[dict[str, str]]:
        """Return few combinations that together have each value of a list and the ends
        of each range.
        """
        ends = self._ends()
        first = {key: texts[0] for key, texts in ends.items()}
        return [
            first,
            *(
                {**first, key: text}
                for key, texts in ends.items()
                for text in texts[1:]
            ),
        ]

    def _ends(self) -> dict[str, list[str]]:
        return {
            key: [str(value) for value in _ends_of(axis)]
            for key, axis in self.axes.items()
        }

    def load(self, values: Mapping[str, str], *more: str) -> Config:
        return config.load(
            self.settings,
            [*self.fixed, *(f"{key}={text}" for key, text in values.items()), *more],
        )

    def trial(
        self,
        values: Mapping[str, str],
        name: str,
        shared: Sequence[str],
        baseline: bool = False,
    ) -> Trial:
        """Return a trial. `name`: the sweep's folder; `shared`: common overrides;
        `baseline`: keep the baseline.
        """
        loaded = self.load(
            values, *shared, *([] if baseline else ["run.baseline=false"])
        )
        keys = flatten(config.to_dict(loaded, values=True))
        counted = {
            key: keys[key]
            for key in keys
            if key.startswith(COUNTED) or not is_resume_mutable(key, "backend.threads")
        }
        hashed = hashlib.sha256(
            json.dumps(counted, sort_keys=True, default=str).encode()
        ).hexdigest()[:8]
        texts = "_".join(
            f"{key.rpartition('.')[2]}-{text}" for key, text in values.items()
        )
        own = f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', texts)[:NAME_LETTERS]}_{hashed}"
        return Trial(
            own, values, replace(loaded, run=replace(loaded.run, name=f"{name}/{own}"))
        )


def axis_of(override: str) -> Any:
    """Return Optuna's distribution of the list or range in `key=TEXT`; None: it is one
    value.
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
    name, numbers, options = call_of(text)
    if word is None or (word[1] not in kinds and len(numbers) < 2):
        texts = alternatives(override)
        return CategoricalDistribution(texts) if len(texts) > 1 else None
    numeric = [
        number
        for number in numbers
        if isinstance(number, (int, float)) and math.isfinite(number)
    ]
    whole = all(isinstance(number, int) for number in numeric)
    rising = len(numeric) == len(numbers) == 2 and numeric[0] < numeric[1]
    if name not in kinds or options or not rising or (name == "integers" and not whole):
        wrong = f"'{text}' is no range"
        raise ConfigError(
            key,
            wrong,
            RANGES,
            "LOW is below HIGH, and both are whole numbers for integers",
        )
    return constructed(key, text, lambda: kinds[name](*numbers))


def _ends_of(axis: Any) -> Sequence[Any]:
    """Return the values of a list, or of a range its ends and, if it is of fractions,
    one between them.
    """
    if hasattr(axis, "choices"):
        return axis.choices
    between = (
        [axis.low + (axis.high - axis.low) / 3] if isinstance(axis.low, float) else []
    )
    return [axis.low, axis.high, *between]


def require_different(trials: Iterable[Trial]) -> None:
    """Refuse two trials that make the same run, naming a key in which they differ."""
    seen: dict[str, Trial] = {}
    for trial in trials:
        other = seen.setdefault(trial.name.rpartition("_")[2], trial)
        for key, text in trial.values.items():
            if text != other.values[key]:
                wrong = f"'{other.values[key]}' and '{text}' make the same run"
                raise ConfigError(
                    key, wrong, "Values of which each changes the run", "Leave one out"
                )


def sharing(settings: Config, threads: int) -> list[str]:
    """Return the overrides that let trials share the teacher's outputs and decoded
    images.

    The views are as in a single run. Outputs are rounded to float16, as in every cache.
    If a run's length is in steps, or a loss reads features, no cache is set: its size
    is unknown here, or large.
    """
    backend, read, found = settings.backend, reads(settings.losses), []
    facts = registry.facts("backends", backend.kind, backend.options, "backend.kind")
    if facts.cpu and facts.threads == 0:
        found.append(f"backend.threads={threads}")
    if settings.data.store == "ram":
        found.append("data.store=disk")
    teacher, views = settings.teacher, settings.data.views
    if not views and not settings.run.steps:
        views = completed(settings).run.epochs
    settled = (
        not teacher.model or teacher.cache.views or teacher.shard or teacher.pipeline
    )
    if views and not settled and read.teacher_logits and not read.features:
        found.append(f"teacher.cache.views={views}")
    return found


def prepared_alike(trial: Trial) -> str:
    """Return the key of teacher, cache and images: trials with equal keys share one
    preparation.
    """
    one = trial.config
    return repr(
        (one.data, one.teacher, one.task, one.backend, one.run.seed, reads(one.losses))
    )


def student_alike(trial: Trial) -> str:
    """Return the key of the network and the image size: equal keys, equal latency."""
    one = trial.config.student
    return repr(
        (one.kind, one.model, one.args, one.options, trial.config.data.image_size)
    )


def write_yaml(trial: Trial, folder: Path) -> str:
    """Write the configuration of a trial for `kd-train` and return the file."""
    file = folder / f"{trial.name}.yaml"
    write_text(file, config.dump(trial.config))
    return str(file)
