"""The global batch of a run: found where it is left open, then divided over ranks and micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kd.config import Config
from kd.contracts import Backend, Teacher
from kd.engine.criterion import Distillation
from kd.engine.fit_batch import largest
from kd.errors import ConfigError
from kd.types import Batch

DEVICE_TRIAL = 64
"""Images of a trial at most, where the batch size itself is still to be found."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How the global batch is divided."""

    batch_size: int
    world_size: int
    micro_batch: int
    accumulate: int
    eval_batch: int

    def __str__(self) -> str:
        return f"{self.batch_size} images = {self.world_size} ranks x {self.accumulate} micros x {self.micro_batch}"


def arithmetic(config: Config, world_size: int, num_images: int) -> BatchSplit:
    """Divide the global batch over ranks and micro-batches.

    Raises:
        ConfigError: it does not divide, or there are fewer images than a batch.
    """
    section, batch_size = config.data, fixed_batch(config)
    share, rest = divmod(batch_size, world_size)
    micro = section.micro_batch or share
    if rest or not share or share % micro:
        near = max(1, round(batch_size / (world_size * micro or 1))) * world_size * (micro or 1)
        raise ConfigError(
            "data.batch_size",
            f"{batch_size} images cannot be divided into {world_size} ranks x micro-batches of {micro}",
            "batch_size = ranks x micros x micro_batch, all whole",
            f"Set data.batch_size={near}, or change data.micro_batch",
        )
    if num_images < batch_size:
        raise ConfigError(
            "data.batch_size",
            f"is {batch_size}, but the training split has {num_images} images",
            "At most the size of the training split",
            f"Set data.batch_size={max(world_size, num_images // world_size * world_size)}",
        )
    return BatchSplit(batch_size, world_size, micro, share // micro, section.eval_batch or micro)


def fixed_batch(config: Config) -> int:
    """Return the global batch size.

    Raises:
        ConfigError: it is `auto`, and nobody has searched.
    """
    if isinstance(config.data.batch_size, str):
        remedy = "Set a number here"
        raise ConfigError("data.batch_size", "is auto, and is found only by a training run", "A number", remedy)
    return config.data.batch_size


def provisional(config: Config, num_images: int, backend: Backend, choices: Mapping[str, str]) -> Config:
    """Return the configuration with a number in place of `data.batch_size: auto`: what was found, or one to try with.

    Raises:
        ConfigError: on this backend every size would be compiled.
    """
    if config.data.batch_size != "auto":
        return config
    if "batch_size" not in choices and backend.fixed_mode:
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
