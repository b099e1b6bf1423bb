"""`data.batch_size: auto`: the largest micro-batch that fits into memory on every rank.

An accelerator reports a full memory by an error that can be caught: sizes are halved until one runs. A CPU does not:
its process is killed, or the machine swaps. There memory is measured at small sizes and the rest is arithmetic.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kd.config.schema import OptimizerSection
from kd.contracts import Backend, Teacher
from kd.engine.criterion import Distillation
from kd.errors import ConfigError
from kd.host import keep_freed_memory
from kd.setup.recipe import Session
from kd.setup.trial import Trial

SHARE = 0.8
"""Of the free memory that is spent: the loader, evaluation and checkpoints need the rest."""
SMALLEST, VISIBLE_MIB = 4, 16.0
"""Images of the first measurement; growth of a process that is more than noise."""
FULL = "a rank is out of memory."
"""In the words by which accelerate knows such an error."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the search found."""

    size: int
    """Images of a micro-batch on one rank."""
    summary: str
    """How it was found, for a person."""


def choose_batch(session: Session, distillation: Distillation, teacher: Teacher, optimizer: OptimizerSection) -> Found:
    """Return the largest micro-batch that fits, by whole steps on a copy of the student.

    The copy takes the place of what is not here yet: the reduction's buckets or the averaged weights.
    """
    backend = session.backend

    def step(size: int) -> None:
        module = copy.deepcopy(distillation)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if optimizer.zero:  # about the share of which one rank keeps the state
            parameters = sorted(parameters, key=lambda parameter: -parameter.numel())[:: backend.world_size]
        sgd = optimizer.kind == "sgd"
        stepper = torch.optim.SGD(parameters, momentum=0.9) if sgd else torch.optim.AdamW(parameters)
        with Trial(module, teacher, backend, session.image_size, size) as trial:
            trial.step(stepper).item()  # waits for the device: what does not fit must fail here

    return largest(step, len(session.data.train) // backend.world_size, backend)


def largest(trial: Callable[[int], object], most: int, backend: Backend) -> Found:
    """Return the largest power of two, at most `most`, for which `trial` fits into memory on all ranks.

    `trial` makes one step on so many images and forgets it; it holds no collective.
    """
    from accelerate.utils import find_executable_batch_size  # heavy, and only here

    size = 2 ** int(math.log2(most))
    switched = backend.device.type == "cpu" and keep_freed_memory(False)  # memory that is kept is neither used nor free
    room = SHARE * backend.free_mib()
    each = 0.0 if math.isinf(room) else per_image(trial, size)
    if switched:
        keep_freed_memory()
    tried = []

    def halve() -> int:
        nonlocal size
        size //= 2
        if not size:
            wrong = "is auto, but not even one image fits into memory"
            remedy = "Take a smaller student or a smaller data.image_size"
            raise ConfigError("data.batch_size", wrong, "One image a rank at least", remedy)
        return size

    def attempt(batch_size: int) -> int:
        fits = each * batch_size <= room and (each > 0 or _executes(trial, batch_size))
        tried.append(f"{batch_size} {'fits' if fits else 'does not'}")
        failed = backend.reduce_sum(torch.tensor([0.0 if fits else 1.0], device=backend.device))
        if failed.item():  # the smallest of all ranks, found with nothing but sums
            raise RuntimeError(FULL)
        return batch_size

    # not as a decorator: with arguments, older accelerate forgets reduce_batch_size_fn
    found = find_executable_batch_size(attempt, starting_batch_size=size, reduce_batch_size_fn=halve)()
    if each:
        summary = f"{each:.2f} MiB an image measured, {room:.0f} MiB to spend ({100 * SHARE:.0f} % of what is free)"
    else:
        summary = f"tried on this rank: {', '.join(tried)}"
    return Found(found, f"{found} images a micro-batch; {summary}; at most {most} images a rank")


def _executes(trial: Callable[[int], object], size: int) -> bool:
    """Return whether a trial ends without running out of memory."""
    from accelerate.utils.memory import should_reduce_batch_size

    try:
        trial(size)
    except RuntimeError as error:
        if should_reduce_batch_size(error):
            return False
        raise
    return True


def per_image(trial: Callable[[int], object], most: int) -> float:
    """Return the MiB that one more image costs this process, or 0.0 where `most` images do not make it grow visibly.

    The peak of a process never falls: sizes are doubled until two in a row have raised it.
    """
    size, grew = SMALLEST, False
    before = _peak_mib()
    while size <= most:
        trial(size)
        peak = _peak_mib()
        growth = peak - before
        if grew and growth > VISIBLE_MIB:
            return growth / (size / 2)
        grew, before, size = growth > VISIBLE_MIB / 2, peak, 2 * size
    return 0.0


def _peak_mib() -> float:
    """Return the largest resident size so far.

    Linux's getrusage begins with the parent's, so that a child of a large process would seem never to grow.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10
    except (OSError, StopIteration):
        import resource  # not on Windows

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, others KiB
