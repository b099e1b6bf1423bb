"""Precision, attention kernel, threads and batch size, chosen by measurement at the start of a run.

Precision first, then attention at that precision: where the processor has no bfloat16 units, one bfloat16 step can take
as long as thirty others, and should be taken once only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from kd.config import Config
from kd.contracts import Backend, Teacher
from kd.engine.criterion import Distillation
from kd.engine.fit_batch import largest
from kd.engine.probe import fastest
from kd.errors import ConfigError
from kd.models.classifier import count_attention, set_attention
from kd.models.ensemble import TeacherModel
from kd.models.teacher import LiveTeacher, NoTeacher
from kd.types import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_TRIAL = 16
"""Images of a trial on a CPU; an accelerator is tried with the whole micro-batch, which is what fills it."""
DEVICE_TRIAL = 64
"""Images of a trial at most, where the batch size itself is still to be found."""

Table = dict[str, float]


def choose_teacher(
    config: Config, model: TeacherModel | None, micro: int, backend: Backend, choices: dict[str, str]
) -> tuple[Teacher, Table]:
    """Build the live teacher with the fastest frozen forward; write the choice into `choices`."""
    if model is None:
        return NoTeacher(), {}
    section, batch = config.teacher, trial_batch(config, micro, backend)

    def candidate(name: str) -> LiveTeacher:
        precision, attention = name.split("+")
        place = backend.shard if section.shard else None
        stages = backend.pipeline if section.pipeline else None
        live = LiveTeacher(model, backend.device, DTYPES[precision], section.micro_batch, place, stages)
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


def provisional(config: Config, num_images: int, backend: Backend, choices: Mapping[str, str]) -> Config:
    """Return the configuration with a number in place of `data.batch_size: auto`: what was found, or one to try with.

    Raises:
        ConfigError: on this backend every size would be compiled.
    """
    if config.data.batch_size != "auto":
        return config
    if "batch_size" not in choices and backend.preferred:
        wrong = f"is auto, but on backend '{backend.kind}' each size that is tried would be compiled, for minutes"
        raise ConfigError("data.batch_size", wrong, "A number", "Set data.batch_size and data.micro_batch")
    share = max(1, min(DEVICE_TRIAL, num_images // backend.world_size))
    return with_batch(config, int(choices.get("batch_size", share * backend.world_size)))


def with_batch(config: Config, batch_size: int) -> Config:
    """Return the configuration with another batch size."""
    return replace(config, data=replace(config.data, batch_size=batch_size))


def choose_batch(
    config: Config,
    distillation: Distillation,
    teacher: Teacher,
    num_images: int,
    backend: Backend,
    choices: dict[str, str],
) -> tuple[Config, str]:
    """Put the largest batch that fits in place of `data.batch_size: auto`; write it into `choices`.

    Returns:
        The configuration with a number, and how the number was found: empty where nothing was searched.
    """
    if config.data.batch_size != "auto":
        return config, ""
    found = None
    if "batch_size" not in choices:

        def trial(size: int) -> None:
            one_step(config, distillation, teacher, size, backend)

        found = largest(trial, num_images // backend.world_size, backend)
        choices["batch_size"] = str(found.size * backend.world_size)
    return with_batch(config, int(choices["batch_size"])), found.told if found is not None else ""


def one_step(config: Config, distillation: Distillation, teacher: Teacher, size: int, backend: Backend) -> None:
    """Make one whole step on `size` black images with a copy of the student, and forget it.

    The copy takes the place of what is not here yet: the reduction's buckets or the averaged weights.
    """
    section, module = config.optimizer, copy.deepcopy(distillation)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if section.zero:  # about what one rank keeps the state of
        parameters = sorted(parameters, key=lambda parameter: -parameter.numel())[:: backend.world_size]
    stepper = torch.optim.AdamW(parameters) if section.kind == "adamw" else torch.optim.SGD(parameters, momentum=0.9)
    side = config.data.image_size
    image = torch.zeros(size, 3, side, side, dtype=torch.uint8, device=backend.device)
    batch = Batch.of(image, torch.zeros(size, dtype=torch.int64, device=backend.device))
    answers = teacher(batch)
    with backend.autocast():
        _, scores = module(batch, answers)
    scores["loss"].mean().backward()
    stepper.step()
    scores["loss"].sum().item()  # waits for the device: what does not fit must fail here


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
