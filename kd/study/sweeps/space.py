"""What a sweep tries: all combinations of listed values, or draws; and the configuration of each trial."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kd import config
from kd.config import Config
from kd.config.flat import alternatives, plain
from kd.config.reads import reads
from kd.core.errors import ConfigError
from kd.core.seeds import seed_from
from kd.files.storage import write_text
from kd.parts import registry
from kd.setup.recipe import FREE, flatten

NUMBER = r"[+]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
COUNTED = ("run.every.evaluate", "data.test", "data.exclude")
"""Of the keys that change no weight, those that a score depends on."""
SHOWN = 60
"""Letters of a trial's values in the name of its folder."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration of a sweep."""

    name: str
    """Of its run folder below the sweep's: its values, and a hash of all that its score depends on."""
    values: Mapping[str, str]
    """The text of each key that varies."""
    config: Config


@dataclass(frozen=True, slots=True)
class Space:
    """What varies, and what does not."""

    settings: Any
    """A YAML file or its contents."""
    fixed: Sequence[str]
    """`key=value` for all trials."""
    lists: Mapping[str, Sequence[str]]
    """The values of each key that lists some."""
    ranges: Mapping[str, tuple[str, str]]
    """Both ends of each key that names a range."""

    @classmethod
    def read(cls, settings: Any, overrides: Sequence[str]) -> Space:
        """Sort the overrides of a command.

        Raises:
            ConfigError: a list or a range that is none, a key that changes no weight, or nothing that varies.
        """
        fixed, lists, ranges = [], {}, {}
        keys = [re.sub(r"\[(\w+)\]", r".\1", override.partition("=")[0]) for override in overrides]
        for i, override in enumerate(overrides):
            key, _, text = override.partition("=")
            values, ends = alternatives(override), RANGE.fullmatch(text)
            if ends is None and len(values) == 1:
                fixed.append(override)
                continue
            if key.startswith(FREE):
                wrong, allowed = "changes no weight of a student, but has several values", "One value"
                raise ConfigError(key, wrong, allowed, "Sweep a key that is learned with, such as optimizer.lr")
            if keys[i] in keys[i + 1 :]:
                wrong, allowed = "stands again behind its list or range", "One list or range of a key, standing last"
                raise ConfigError(key, wrong, allowed, "Leave one out")
            if ends is None:
                lists[key] = values
                continue
            if not 0 < float(ends[1]) < float(ends[2]):
                raise ConfigError(key, f"is the range {text}", "LOW..HIGH with 0 < LOW < HIGH", "Change the ends")
            ranges[key] = ends[1], ends[2]
        if not lists and not ranges:
            remedy = "Give a key two values or more: optimizer.lr=1e-3,3e-3"
            raise ConfigError("kd-sweep", "no key has several values", "key=a,b,c or key=LOW..HIGH", remedy)
        if "student" in lists:  # each mapping is a whole section: no argument of another network stays
            settings = plain(settings)
            settings.pop("student", None)
        return cls(settings, fixed, lists, ranges)

    def combinations(self, number: int) -> list[dict[str, str]]:
        """Return the values of each trial; 0: all combinations, else so many draws from a fixed seed.

        The first draws are the same for every number. Lists take their combinations by turns, in an order of chance.
        """
        if self.ranges and not number:
            remedy = "Add --trials 20, for example, or list values"
            raise ConfigError(next(iter(self.ranges)), "is a range, of which there is no end", "--trials N", remedy)
        listed = [dict(zip(self.lists, one, strict=True)) for one in itertools.product(*self.lists.values())]
        if not number:
            return listed
        random.Random(seed_from("sweep")).shuffle(listed)
        number = number if self.ranges else min(number, len(listed))
        return [
            listed[i % len(listed)]
            | {key: _drawn(*ends, seed_from("sweep", key, i)) for key, ends in self.ranges.items()}
            for i in range(number)
        ]

    def load(self, values: Mapping[str, str], *more: str) -> Config:
        """Load the configuration with these values, then `more` overrides."""
        return config.load(self.settings, [*self.fixed, *(f"{key}={text}" for key, text in values.items()), *more])

    def trial(self, values: Mapping[str, str], name: str, shared: Sequence[str], baseline: bool = False) -> Trial:
        """Return a trial; `name` of the sweep's folder, `shared` overrides; `baseline`: with one, if settings have."""
        loaded = self.load(values, *shared, *([] if baseline else ["run.baseline=false"]))
        keys = flatten(config.to_dict(loaded, values=True))
        free = (*FREE, "backend.threads")
        counted = {key: keys[key] for key in keys if key.startswith(COUNTED) or not key.startswith(free)}
        hashed = hashlib.sha256(json.dumps(counted, sort_keys=True, default=str).encode()).hexdigest()[:8]
        texts = "_".join(f"{key.rpartition('.')[2]}-{text}" for key, text in values.items())
        own = f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', texts)[:SHOWN]}_{hashed}"
        return Trial(own, values, replace(loaded, run=replace(loaded.run, name=f"{name}/{own}")))


def require_different(trials: Iterable[Trial]) -> None:
    """Refuse two trials whose values make the same run.

    Raises:
        ConfigError: naming a key in which they differ.
    """
    seen: dict[str, Trial] = {}
    for trial in trials:
        other = seen.setdefault(trial.name.rpartition("_")[2], trial)
        for key, text in trial.values.items():
            if text != other.values[key]:
                wrong = f"'{other.values[key]}' and '{text}' make the same run"
                raise ConfigError(key, wrong, "Values of which each changes the run", "Leave one out")


def _drawn(low: str, high: str, seed: int) -> str:
    """Return a value between two ends, uniform in its logarithm; whole where both ends are."""
    a, b = math.log(float(low)), math.log(float(high))
    value = math.exp(a + (b - a) * random.Random(seed).random())
    return str(round(value)) if low.isdecimal() and high.isdecimal() else f"{value:.4g}"


def sharing(settings: Config, threads: int) -> list[str]:
    """Return the overrides by which the trials of a sweep share the teacher's answers and the decoded images.

    The views stay those of a run alone. The answers are rounded to float16, as in every cache. Where a run is so many
    steps long, or a loss reads features, a cache is for the user to choose: its size is not known here, or large.
    """
    backend, read, found = settings.backend, reads(settings.losses), []
    facts = registry.facts("backends", backend.kind, backend.options, "backend.kind")
    if facts.cpu and not facts.threads:
        found.append(f"backend.threads={threads}")
    if settings.data.store == "ram":
        found.append("data.store=disk")
    teacher, views = settings.teacher, settings.data.views or (0 if settings.run.steps else settings.run.epochs)
    settled = not teacher.model or teacher.cache.views or teacher.shard or teacher.pipeline
    if views and not settled and read.teacher_logits and not read.features:
        found.append(f"teacher.cache.views={views}")
    return found


def prepared_alike(trial: Trial) -> str:
    """Return a text that is equal for trials with the same teacher, cache and images."""
    one = trial.config
    return repr((one.data, one.teacher, one.task, one.backend, one.run.seed, reads(one.losses)))


def student_alike(trial: Trial) -> str:
    """Return a text that is equal for trials whose students cost the same: one network, at one size of images."""
    one = trial.config.student
    return repr((one.kind, one.model, one.args, one.options, trial.config.data.image_size))


def write_yaml(trial: Trial, folder: Path) -> Path:
    """Write the configuration of a trial, which `kd-train` takes, and return the file."""
    file = folder / f"{trial.name}.yaml"
    write_text(file, config.dump(trial.config))
    return file
