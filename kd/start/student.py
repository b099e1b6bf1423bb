"""The student's kernels, CPU threads and batch size, chosen by measurement at the start of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kd.config import Config
from kd.contracts import Backend, Teacher
from kd.engine.criterion import Distillation
from kd.engine.fit_batch import largest
from kd.engine.probe import fastest
from kd.errors import ConfigError
from kd.models.classifier import compile_forward, set_attention
from kd.start.kernels import Effort, Kernel, Table, challenge, demanded, in_stages, options, trial_batch
from kd.types import Batch

DEVICE_TRIAL = 64
"""Images of a trial at most, where the batch size itself is still to be found."""


def choose_student(
    config: Config,
    distillation: Distillation,
    teacher: Teacher,
    micro: int,
    backend: Backend,
    choices: dict[str, str],
    images: int = 0,
) -> tuple[Table, str]:
    """Set the fastest forward and backward of the student on `distillation` and `backend`; write it into `choices`.

    Args:
        config: of the run.
        distillation: student and criterion.
        teacher: answers for the trials.
        micro: images of a micro-batch.
        backend: where it runs.
        choices: what was chosen before; completed.
        images: how many this rank will train on; with none nothing is compiled to see whether it pays.

    Returns:
        The milliseconds measured, and a line for a person where compiling was tried, else "".

    Raises:
        ModelError: `student.compile` is on, or was chosen when the run began, and the student cannot be compiled.
    """
    batch = trial_batch(config, micro, backend)
    answers, trials = teacher(batch), {False: copy.deepcopy(distillation)}

    def step(name: str) -> torch.Tensor:
        compiled = Kernel.parse(name).compiled
        if compiled not in trials:
            trials[compiled] = copy.deepcopy(distillation)
        run_student(Kernel.parse(name), trials[compiled], backend)
        with backend.autocast():
            _, scores = trials[compiled](batch, answers)
        loss = scores["loss"].mean()
        loss.backward()
        trials[compiled].zero_grad()
        backend.end_step()
        return loss.detach()

    def work(name: str) -> Callable[[], torch.Tensor]:
        return lambda: step(name)

    pinned, asked = choices.get("student"), (config.backend.precision, config.student.attention)
    stages = options(*asked, pinned, backend.preferred, distillation)
    name, table = in_stages(*stages, work, backend)
    table |= choose_threads(lambda: step(name), backend, choices)
    told = ""
    if Kernel.parse(pinned).compiled if pinned else config.student.compile == "on":
        name = f"{name}+compiled"
        demanded(work(name), "student.compile", f"'{name}' is asked for")
    elif not pinned and config.student.compile == "auto" and not backend.preferred:
        effort = Effort(images, len(batch.label), table.get(name, 0.0))
        name, more, told = challenge(name, [f"{name}+compiled"], work, effort, backend)
        table |= more
    choices["student"] = name
    run_student(Kernel.parse(name), distillation, backend)
    return table, told


def run_student(kernel: Kernel, module: Distillation, backend: Backend) -> None:
    """Let student and backend compute with a kernel."""
    backend.autocast_dtype = torch.bfloat16 if kernel.precision == "bf16" else None
    set_attention(module, kernel.how == "fused")
    if kernel.compiled and module.student._compiled_call_impl is None:
        compile_forward(module.student)


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
