"""Find the model outputs that a run's losses read, and the task that fits them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kd.config.schema import DataSection, LossSection, TaskSection
from kd.core.evaluation import Task
from kd.core.facts import LossFacts
from kd.parts import registry


@dataclass(frozen=True, slots=True)
class Reads:
    """The outputs that the losses of a run read."""

    teacher: bool  # whether a loss needs a teacher
    # False: the losses read only the teacher's features, so it needs no classes
    teacher_logits: bool
    features: tuple[str, ...]  # names of features, of both models


def loss_facts(losses: Sequence[LossSection]) -> list[LossFacts]:
    """Return what each loss reads."""
    return [
        registry.facts("losses", loss.kind, loss.options, f"losses[{i}].kind")
        for i, loss in enumerate(losses)
    ]


def reads(losses: Sequence[LossSection]) -> Reads:
    """Return which outputs the losses read."""
    facts = loss_facts(losses)
    on_logits = [loss for loss in facts if loss.logits]
    features = frozenset().union(*(loss.features for loss in facts))
    if not on_logits:
        features |= {"pooled"}  # the output that is exported and evaluated
    return Reads(
        teacher=any(loss.teacher for loss in facts),
        teacher_logits=any(loss.teacher for loss in on_logits) or not features,
        features=tuple(sorted(features)),
    )


def label_of(data: DataSection) -> str:
    """Return the kind of an image's label, "class" or "set", or "" without labels."""
    if data.labels == "none":
        return ""
    return registry.facts("datasets", data.kind, data.options, "data.kind").label


def build_task(section: TaskSection) -> Task:
    """Build the task that a section names."""
    return registry.build("tasks", section.kind, section.options, "task.kind")


def resolved_task(
    section: TaskSection, losses: Sequence[LossSection], data: DataSection
) -> TaskSection:
    """Return the task; `auto` is the built-in one that fits labels and losses."""
    if section.kind != "auto":
        return section
    functions = [loss.logits for loss in loss_facts(losses) if loss.logits] or [""]
    function = functions[0]
    label = label_of(data)

    def fit(candidate: TaskSection) -> tuple[bool, bool]:
        task = build_task(candidate)
        fits_losses = task.logits == function
        fits_label = label in ("", task.label)
        fits = bool(task.logits) == bool(function) and fits_label
        # without a full fit, the error names the loss that does not fit the labels,
        # not the task
        return fits and (bool(label) or fits_losses), fits_losses

    candidates = [
        TaskSection(kind=name, options=registry.default_options("tasks", name))
        for name in registry.names("tasks")
    ]
    return max(candidates, key=fit)
