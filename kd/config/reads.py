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
        registry.facts("losses", one.kind, one.options, f"losses[{i}].kind")
        for i, one in enumerate(losses)
    ]


def reads(losses: Sequence[LossSection]) -> Reads:
    """Return which outputs the losses read."""
    facts = loss_facts(losses)
    on_logits = [one for one in facts if one.logits]
    features = frozenset().union(*(one.features for one in facts))
    if not on_logits:
        features |= {"pooled"}  # the output that is exported and evaluated
    return Reads(
        teacher=any(one.teacher for one in facts),
        teacher_logits=any(one.teacher for one in on_logits) or not features,
        features=tuple(sorted(features)),
    )


def label_of(data: DataSection) -> str:
    """Return the kind of an image's label, "class" or "set"; "" for unlabelled
    images.
    """
    if data.labels == "none":
        return ""
    return registry.facts("datasets", data.kind, data.options, "data.kind").label


def build_task(section: TaskSection) -> Task:
    """Build the task that a section names."""
    return registry.build("tasks", section.kind, section.options, "task.kind")


def resolved_task(
    section: TaskSection, losses: Sequence[LossSection], data: DataSection
) -> TaskSection:
    """Return the task. `auto`: the built-in task that fits labels and losses, else the
    one that fits the losses.
    """
    if section.kind != "auto":
        return section
    functions = [one.logits for one in loss_facts(losses) if one.logits] or [""]
    label, found = label_of(data), []
    for name in registry.names("tasks"):
        own = TaskSection(kind=name, options=registry.default_options("tasks", name))
        task = build_task(own)
        fits = bool(task.logits) == bool(functions[0]) and label in ("", task.label)
        # then the error names the loss that does not fit the labels, not the task
        found.append(
            (
                fits and (bool(label) or task.logits == functions[0]),
                task.logits == functions[0],
                own,
            )
        )
    return max(found, key=lambda one: one[:2])[2]
