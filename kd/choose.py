"""Precision, attention kernel and threads of teacher and student, chosen by measurement at the start of a run.

Precision first, then attention at that precision: where the processor has no bfloat16 units, one bfloat16 step can take
as long as thirty others, and should be taken once only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from kd.config import Config
from kd.contracts import Backend, Teacher
from kd.engine.criterion import Distillation
from kd.engine.probe import fastest
from kd.models.classifier import Classifier, count_attention, set_attention
from kd.models.teacher import LiveTeacher, NoTeacher
from kd.types import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_TRIAL = 16
"""Images of a trial on a CPU; an accelerator is tried with the whole micro-batch, which is what fills it."""

Table = dict[str, float]


def choose_teacher(
    config: Config, model: Classifier | None, micro: int, backend: Backend, choices: dict[str, str]
) -> tuple[Teacher, Table]:
    """Build the live teacher with the fastest frozen forward; write the choice into `choices`."""
    if model is None:
        return NoTeacher(), {}
    section, batch = config.teacher, trial_batch(config, micro, backend)

    def candidate(name: str) -> LiveTeacher:
        precision, attention = name.split("+")
        place = backend.shard if section.shard else None
        live = LiveTeacher(model, backend.device, DTYPES[precision], section.micro_batch, place)
        set_attention(live.model, attention == "fused")
        return live

    def work(name: str) -> Callable[[], torch.Tensor]:
        live = candidate(name)
        return lambda: live(batch).logits

    stages = options(section.precision, section.attention, choices.get("teacher"), backend.preferred, model)
    choices["teacher"], table = in_stages(*stages, work, backend)
    return candidate(choices["teacher"]), table


def choose_student(
    config: Config,
    distillation: Distillation,
    teacher: Teacher,
    micro: int,
    backend: Backend,
    choices: dict[str, str],
) -> Table:
    """Set the fastest forward and backward of the student on `distillation` and `backend`; write it into `choices`."""
    batch = trial_batch(config, micro, backend)
    answers, trial = teacher(batch), copy.deepcopy(distillation)

    def apply(name: str, module: nn.Module) -> None:
        precision, attention = name.split("+")
        backend.autocast_dtype = torch.bfloat16 if precision == "bf16" else None
        set_attention(module, attention == "fused")

    def step(name: str) -> torch.Tensor:
        apply(name, trial)
        with backend.autocast():
            _, scores = trial(batch, answers)
        loss = scores["loss"].mean()
        loss.backward()
        trial.zero_grad()
        backend.end_step()
        return loss.detach()

    asked = config.backend.precision, config.student.attention
    stages = options(*asked, choices.get("student"), backend.preferred, distillation)
    choices["student"], table = in_stages(*stages, lambda name: lambda: step(name), backend)
    table |= choose_threads(lambda: step(choices["student"]), backend, choices)
    apply(choices["student"], distillation)
    return table


def choose_threads(step: Callable[[], torch.Tensor], backend: Backend, choices: dict[str, str]) -> Table:
    """Set the number of CPU threads that makes a step fastest; write it into `choices`."""
    if not backend.thread_counts:
        return {}

    def work(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        return step()

    counts = [int(choices["threads"])] if "threads" in choices else backend.thread_counts
    name, table = fastest({f"{n} threads": (lambda n=n: work(n)) for n in counts}, backend)
    choices["threads"] = name.split()[0]
    torch.set_num_threads(int(choices["threads"]))
    return table


def in_stages(
    precisions: Sequence[str],
    attentions: Sequence[str],
    work: Callable[[str], Callable[[], torch.Tensor]],
    backend: Backend,
) -> tuple[str, Table]:
    """Return the name `precision+attention` of the fastest and the milliseconds measured."""
    table: Table = {}
    best = f"{precisions[0]}+{attentions[0]}"
    for names in ([f"{p}+{attentions[0]}" for p in precisions], attentions):
        full = [name if "+" in name else f"{best.split('+')[0]}+{name}" for name in names]
        best, measured = fastest({name: work(name) for name in full}, backend)
        table |= measured
    return best, table


def options(
    precision: str, attention: str, pinned: str | None, preferred: str, module: nn.Module
) -> tuple[list[str], list[str]]:
    """List the precisions and the attention kernels to try; one of each where nothing is left to choose."""
    if pinned:
        precision, attention = pinned.split("+")
    if attention == "auto" and not count_attention(module):
        attention = "unfused"  # no layer of this model has the other kernel
    settled = preferred.split("+") if preferred else []
    precisions = (settled[:1] or ["fp32", "bf16"]) if precision == "auto" else [precision]
    attentions = (settled[1:] or ["unfused", "fused"]) if attention == "auto" else [attention]
    return precisions, attentions


def trial_batch(config: Config, micro: int, backend: Backend) -> Batch:
    """Make a batch of noise with label 0."""
    count = min(micro, CPU_TRIAL) if backend.device.type == "cpu" else micro
    size = config.data.image_size
    image = torch.randint(256, (count, 3, size, size), dtype=torch.uint8).to(backend.device)
    return Batch.of(image, torch.zeros(count, dtype=torch.int64, device=image.device))
