"""Choose a student within limits: weights at hand come before random ones."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kd.core import recommended
from kd.core.errors import ConfigError, KdError, ModelError, first_sentence
from kd.core.text import markdown_table
from kd.jobs.init.networks import (
    ChosenTeacher,
    PretrainedWeights,
    pretrained_keys,
    resampled_note,
)
from kd.models.classifier import Classifier
from kd.models.live_teacher import count_parameters
from kd.models.load_classifier import load
from kd.models.recognize import identify
from kd.models.spec import Spec
from kd.models.timm_folder import (
    cached_models,
    default_side,
    folder_config,
    input_keys,
    takes_any_size,
)
from kd.study.sweeps.costs import measure_costs

STUDENTS: dict[str, dict[str, Any]] = {
    "xcit_nano_12_p8_224": {"embed_dim": 64, "depth": 6, "num_heads": 4},
    "repvit_m0_9": {"embed_dim": [24, 48, 96, 192], "depth": [1, 1, 4, 1]},
    "mobilenetv4_conv_small_050": {},
    "lcnet_050": {},
}
"""Students from docs/guide.md, "How small may the student be?", most accurate first:
one per kind and cost.
"""
# images of at least this side get patches of 16 px instead of 8, at a quarter of the
# cost
COARSE = 96
SERVING_MS = 1.0  # milliseconds that kd-serve adds: decoding a small JPEG, and HTTP
# networks that are timed for the table once one fits: exporting one takes 4 to 17 s
TIMED = 4
LIMITS = "--student-ms, --student-mb"
Keys = dict[str, Any]  # keys of the section `student`

log = logging.getLogger("kd")


class Budget(NamedTuple):
    """The limits of a student; None: no limit."""

    ms: float | None = None  # milliseconds per image
    mb: float | None = None  # megabytes in float32

    @property
    def is_set(self) -> bool:
        """Return whether there is a limit."""
        return self != Budget()


@dataclass
class Candidate:
    """A network that may be the student, its costs, and why it is not chosen."""

    name: str
    keys: Keys  # that build it
    weights: PretrainedWeights | None = None  # None: random ones
    file: Path | None = None  # of the weights, in the hub's cache
    mb: float = 0.0
    ms: float | None = None
    fault: str = ""  # why it cannot be chosen

    @property
    def costs(self) -> str:
        """Return its size and time as text."""
        text = f"{self.mb / 4:.2f} M parameters, {self.mb:.1f} MB"
        if self.ms is not None:
            text += (
                f", {self.ms:.1f} ms here on one thread, {SERVING_MS:g} of them for"
                " kd-serve"
            )
        return text

    def build(self, classes: Sequence[str], size: int) -> Classifier:
        """Build the network without its weights, on which its costs do not depend."""
        model, args = self.keys["model"], self.keys.get("args", {})
        return load(Spec("student", model, args, classes, free_size=True), size)

    def row(self, verdict: str) -> dict[str, str]:
        """Return its row of the table."""
        ms = "-" if self.ms is None else f"{self.ms:.1f}"
        mb = f"{self.mb:.1f}" if self.mb else "-"
        weights = "at hand" if self.weights else "random"
        return dict(
            zip(
                ("student", "ms", "MB", "weights", "choice"),
                (self.name, ms, mb, weights, verdict),
                strict=True,
            )
        )


def choose_student(
    named: Sequence[str],
    teacher: ChosenTeacher | None,
    size: int,
    classes: Sequence[str],
    budget: Budget,
) -> tuple[Keys, str]:
    """Return the keys of the student, and the reason.

    Args:
        named: weights of the user; none are looked for beside them. One is taken as
            it is, and `--accept` checks the exported file.
        teacher: None: it starts at random, so that pretrained weights are not used.
        size: `data.image_size`, pixels.
        classes: the data's classes; empty: only features are needed.
        budget: the limits.
    """
    if len(named) == 1:
        weights = pretrained_keys("--student", named[0])
        return _tuned(weights, size, [weights.why or "named by --student"])
    if named:
        if not budget.is_set:
            wrong = f"is given {len(named)} times, and no limit chooses between them"
            allowed = "One, or several with a limit"
            remedy = "Add --student-ms or --student-mb"
            raise ConfigError("--student", wrong, allowed, remedy)
        candidates = [_named(text) for text in named]
    else:
        random = [_listed(name, args, size) for name, args in STUDENTS.items()]
        if not budget.is_set:
            _weigh(random[:1], classes, size)
            return _settled(random[0], size)
        candidates = [*_cached(teacher, classes, size), *random]
    _weigh(candidates, classes, size)
    # larger is more accurate, as a rule; the list is in its own order
    candidates.sort(key=lambda each: -each.mb if each.weights else 1)
    return _within(candidates, classes, size, budget)


def _listed(name: str, args: Keys, size: int) -> Candidate:
    if size >= COARSE:
        name = name.replace("_p8_", "_p16_")
    return Candidate(name, {"model": name, **({"args": args} if args else {})})


def _named(text: str) -> Candidate:
    weights = pretrained_keys("--student", text)
    return Candidate(text, {"model": weights.keys["model"]}, weights)


def _cached(
    teacher: ChosenTeacher | None, classes: Sequence[str], size: int
) -> list[Candidate]:
    """Return the networks in the hub's cache; a large one or the teacher gets a fault.

    A teacher of transformers is not built, and no candidate is compared with its size.
    """
    if teacher is None:
        return []
    candidates = []
    for name, file in cached_models().items():
        weights = PretrainedWeights({"model": name}, "", default_side(name))
        candidate = Candidate(name, weights.keys, weights, file)
        if "/" in name:  # of any owner: the folder says of which network
            candidate.keys = {"model": str(file.parent)}
            candidate.weights = PretrainedWeights(candidate.keys, "")
            candidate.file = None
            if "architecture" not in folder_config(file.parent):
                candidate.fault = "not of timm: see student.kind=transformers"
        if candidate.keys["model"] == teacher.keys["model"]:
            candidate.fault = "it is the teacher"
        candidates.append(candidate)
    if "kind" in teacher.keys:
        return candidates
    taught = Candidate("the teacher", teacher.keys)
    _weigh([taught, *candidates], classes, size)
    for candidate in candidates:
        if taught.mb and candidate.mb >= taught.mb and not candidate.fault:
            candidate.fault = "not smaller than the teacher"
    return candidates


def _weigh(candidates: Sequence[Candidate], classes: Sequence[str], size: int) -> None:
    """Set the sizes of networks; one that cannot be built gets a fault."""
    for candidate in candidates:
        if candidate.fault or candidate.mb:
            continue
        try:
            with torch.device("meta"):
                parameters = count_parameters(candidate.build(classes, size))
            candidate.mb = 4 * parameters / 1e6
        except KdError as error:
            candidate.fault = first_sentence(error.wrong)


def _within(
    candidates: Sequence[Candidate], classes: Sequence[str], size: int, budget: Budget
) -> tuple[Keys, str]:
    """Return the first candidate within the limits, and show all as a table."""
    chosen: tuple[Keys, str] | None = None
    rows = []
    timed = 0
    for candidate in candidates:
        if not candidate.fault and budget.mb and candidate.mb > budget.mb:
            candidate.fault = f"over {budget.mb:g} MB"
        if budget.ms and not candidate.fault and (chosen is None or timed < TIMED):
            timed += 1
            _time(candidate, classes, size, budget.ms)
        verdict = candidate.fault or "after the chosen one"
        if not candidate.fault and chosen is None:
            try:
                chosen = _settled(candidate, size)
                verdict = "chosen: the largest within the limits"
                if not candidate.weights:
                    verdict = "chosen: the first of the list within the limits"
            except ModelError as error:  # the weights are not those of the network
                verdict = candidate.fault = first_sentence(error.wrong)
        rows.append(candidate.row(verdict))
    if chosen is None:
        misses = [f"{each.name}: {each.costs} ({each.fault})" for each in candidates]
        wrong = f"no student is within them: {'; '.join(misses)}"
        raise ModelError(LIMITS, wrong, "", "Allow more")
    log.info("%s", markdown_table(rows))
    return chosen


def _time(candidate: Candidate, classes: Sequence[str], size: int, most: float) -> None:
    """Set the milliseconds of a network; one above `most` gets a fault."""
    name = candidate.name
    log.info("timing %s on images of %d px ...", name, size)
    build = partial(candidate.build, classes, size)
    costs = measure_costs({name: build}, {name: size})[name]
    if "untimed" in costs:
        candidate.fault = f"cannot be timed: {first_sentence(costs['untimed'])}"
        return
    candidate.ms = ms = SERVING_MS + costs["ms"]
    if ms > most:
        candidate.fault = f"over {most:g} ms"


def _settled(candidate: Candidate, size: int) -> tuple[Keys, str]:
    """Return the keys of a candidate, and the reason.

    Raises:
        ModelError: its weights cannot be read, or are those of another network.
    """
    weights = candidate.weights
    if weights is None:
        return candidate.keys, f"{candidate.costs}; see docs/guide.md, Many settings"
    why = weights.why or "named by --student"
    if candidate.file is not None:
        model, by_order, why, side = identify(
            "--student", candidate.file, candidate.name
        )
        keys = {"model": model, "checkpoint": str(candidate.file)}
        if by_order:
            keys["weights"] = "by_order"
        weights = PretrainedWeights(keys, why, side)
        why = f"in the hub's cache here, {why.removesuffix('; known by you')}"
    return _tuned(weights, size, [candidate.costs, why])


def _tuned(
    weights: PretrainedWeights, size: int, reasons: Sequence[str]
) -> tuple[Keys, str]:
    """Return keys of a student with pretrained weights, and the reason."""
    any_size = takes_any_size(weights.keys["model"])
    keys = {**weights.keys, "init": "pretrained"}
    if any_size:  # else a ViT, which is built for the data's size
        keys |= input_keys(keys["model"], size)
    keys["tuning"] = {"head_lr_scale": recommended.RATES[any_size][1]}
    note = resampled_note(weights.side, size)
    return keys, "; ".join([*reasons, *([note] if note else [])])
