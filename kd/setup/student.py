"""The student: built from the run's seed, and executed in the mode that is fastest here."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kd import parts
from kd.config.schema import LossSection, StudentSection
from kd.contracts import Backend, Teacher, TeacherModel
from kd.engine.criterion import Criterion, Distillation
from kd.models.classifier import Classifier, compile_forward, feature_shapes, set_attention
from kd.models.load import Spec, load
from kd.seeds import seed_from
from kd.setup.modes import ExecutionMode, Workload, choose_plain, compare, require
from kd.setup.recipe import Session
from kd.setup.trial import Table, Trial, Work, trial_images
from kd.types import NOT_FEATURES, Dims


def build_student(
    section: StudentSection, seed: int, classes: Sequence[str], image_size: int, features: Collection[str] = ()
) -> Classifier:
    """Build the student; its random weights are a function of the run's seed.

    Args:
        section: of the configuration.
        seed: of the run.
        classes: class names; empty: an embedding model, without a classifier.
        image_size: of the data, pixels.
        features: names of the features to return beside the logits.
    """
    torch.manual_seed(seed_from(seed, "student"))
    started, logits = section.init == "pretrained", bool(classes)
    spec = Spec("student", section.model, section.args, classes, section.checkpoint, started, logits=logits)
    return load(spec, image_size, features)


def sizes(num_classes: int, student: Classifier, teacher: TeacherModel | None, image_size: int) -> list[Dims]:
    """Return the sizes from which losses build projectors, one for each teacher."""
    own = feature_shapes(student, image_size)
    members: Any = getattr(teacher, "members", [teacher])
    found = [feature_shapes(member, image_size) if member is not None else {} for member in members]
    none = (0, 0)
    return [
        Dims(
            num_classes,
            own.get("pooled", (0,))[0],
            theirs.get("pooled", (0,))[0],
            own.get("tokens", none),  # type: ignore[arg-type]
            theirs.get("tokens", none),  # type: ignore[arg-type]
        )
        for theirs in found
    ]


def build_criterion(
    losses: Sequence[LossSection],
    dims: Sequence[Dims],
    seed: int,
    shares: Sequence[float] = (1.0,),
    labelled: float = 1.0,
) -> Criterion:
    """Build the loss terms; what they learn starts from the run's seed.

    A term on features is built once for each of several teachers, with a projector for each (arXiv:2312.06709).

    Args:
        losses: of the configuration.
        dims: for each teacher.
        seed: of the run.
        shares: of each teacher in a term on features; their sum is 1.
        labelled: share of the training images that have a label.

    Raises:
        ModelError: a term needs features that a model does not have.
    """
    torch.manual_seed(seed_from(seed, "criterion"))
    terms, members = [], []
    for i, section in enumerate(losses):
        for member, share in enumerate(shares):
            term = parts.build("losses", section.kind, section.options, f"losses[{i}]", dims=dims[member])
            on_features = bool(term.needs - NOT_FEATURES)
            terms.append((section.kind, section.weight * (share if on_features else 1.0), term))
            members.append(member)
            if not on_features:
                break
    return Criterion(terms, members, labelled)


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a model is executed, and what was measured."""

    mode: ExecutionMode
    table: Table
    """Milliseconds of each candidate; empty where nothing was measured."""
    summary: str
    """For a person, where a compiler or a runtime was tried; else ""."""


def choose_student(
    session: Session,
    distillation: Distillation,
    section: StudentSection,
    precision: str,
    teacher: Teacher,
    images: int,
    recorded: str,
) -> Chosen:
    """Choose the fastest forward and backward of the student.

    Args:
        session: the backend and the sizes.
        distillation: the student and its losses on the device, not wrapped yet.
        section: `attention` and `compile`.
        precision: `backend.precision`.
        teacher: answers in the trials.
        images: how many this rank will train on; with none nothing is compiled to see whether it pays.
        recorded: the mode of an earlier start of this run, or "".

    Raises:
        ModelError: `student.compile` is on, or was chosen when the run began, and the student cannot be compiled.
    """
    backend, size = session.backend, session.image_size
    count = trial_images(session.split.micro_batch, backend)
    with ExitStack() as stack:
        trials: dict[bool, Trial] = {}

        def work(name: str) -> Work:
            mode = ExecutionMode.parse(name)
            if mode.compiled not in trials:  # compiling cannot be undone, so it is tried on a copy
                module = copy.deepcopy(distillation) if mode.compiled else distillation
                trials[mode.compiled] = stack.enter_context(Trial(module, teacher, backend, size, count))
            return lambda: step(mode, trials[mode.compiled])

        def step(mode: ExecutionMode, trial: Trial) -> torch.Tensor:
            apply_mode(mode, trial.distillation, backend)
            return trial.step()

        name, table, summary = recorded, {}, ""
        if not recorded:
            name, table = choose_plain(precision, section.attention, distillation, work, backend)
        if ExecutionMode.parse(name).compiled or (not recorded and section.compile == "on"):
            name = str(ExecutionMode(*name.split("+")[:2], compiled=True))
            require(work(name), "student.compile", f"'{name}' is asked for")
        elif not recorded and section.compile == "auto" and not backend.fixed_mode:
            workload = Workload(images, count, table.get(name, 0.0))
            name, more, summary = compare(name, [f"{name}+compiled"], work, workload, backend)
            table |= more
    return Chosen(ExecutionMode.parse(name), table, summary)


def apply_mode(mode: ExecutionMode, module: Distillation | nn.Module, backend: Backend) -> None:
    """Let student and backend compute in a mode."""
    backend.autocast_dtype = torch.bfloat16 if mode.precision == "bf16" else None
    set_attention(module, mode.backend == "fused")
    if mode.compiled and module.student._compiled_call_impl is None:  # type: ignore[union-attr]
        compile_forward(module.student)  # type: ignore[arg-type]
