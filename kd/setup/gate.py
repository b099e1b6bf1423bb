"""The sifter of a run, and its gate: whether it saves time, measured at the start, before it can lose any."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kd.core.contracts import Backend, Dataset, Sifter, Teacher
from kd.core.errors import CorruptImage
from kd.core.seeds import evenly_spaced
from kd.core.types import Costs, SiftContext
from kd.data.loader import LocalLoader
from kd.engine.criterion import Distillation
from kd.parts import registry
from kd.setup.loaders import BatchSplit
from kd.setup.recipe import LoopPlan, Session
from kd.setup.trial import Trial, fastest, of_rank_0, trial_images

LOADED, LOADED_SECONDS = 16, 1.0  # images that are loaded to time loading, and when fewer are enough


def sift_context(
    num_images: int, labels: Callable[[], torch.Tensor], backend: Backend, split: BatchSplit, seed: int
) -> SiftContext:
    """Return what a sifter must know of the images and of how they are divided."""
    return SiftContext(
        num_images=num_images,
        batch_size=split.batch_size,
        micro_batch=split.micro_batch,
        rank=backend.rank,
        world_size=backend.world_size,
        seed=seed,
        labels=labels,
        reduce_sum=lambda tensor: backend.reduce_sum(tensor.to(backend.device)).cpu(),
    )


@dataclass(frozen=True, slots=True)
class Gate:
    """The sifter of a run."""

    sifter: Sifter
    decision: str = ""  # to record: the sifter's kind, or "none"; "": there was nothing to decide
    summary: str = ""  # for a person


def choose_sifter(
    session: Session, loop: LoopPlan, distillation: Distillation, teacher: Teacher, loader: LocalLoader, recorded: str
) -> Gate:
    """Build the sifter of the training images, or one that visits everything where it would lose time.

    `recorded` is the decision of an earlier start of this run, or "".
    """
    section, data, split = loop.sifter, session.data, session.split
    context = sift_context(len(data.train), data.labels, session.backend, split, loop.seed)
    context = replace(context, views=data.plan.views, balance=loop.balance)
    made = registry.build("sifters", section.kind, section.options, "sifter.kind", context=context)
    if recorded == "none":
        return Gate(visit_everything(context), recorded)
    delay = registry.facts("sifters", section.kind, section.options, "sifter.kind").delay
    steps = loop.steps or loop.epochs * (len(data.train) // split.batch_size)
    if not recorded and steps <= delay:
        why = f"sifter '{section.kind}' waits for {delay} steps and the run has {steps}: everything is visited"
        return Gate(visit_everything(context), "none", f"{why}. Lower sifter.sift_delay")
    if section.kind == "none" or section.gate == "off" or recorded:
        return Gate(made, recorded)
    share = loop.teacher_share
    costs = measure(session, distillation, teacher, loader, share)
    pays, summary = saving(section.kind, made.cost(costs), costs)
    return Gate(made, section.kind, summary) if pays else Gate(visit_everything(context), "none", summary)


def saving(kind: str, sifted: float, costs: Costs) -> tuple[bool, str]:
    """Return whether a sifter saves time, and what to print; `sifted` is the cost of a sifted epoch, ms an image."""
    share = 1 - sifted / costs.per_image()
    measured = (
        f"teacher {costs.teacher:.2f}, student forward {costs.forward:.2f}, step {costs.step:.2f}, "
        f"loading {costs.load:.2f} ms an image"
    )
    if share >= 0:
        saves = f"sifter '{kind}' will save {100 * share:.0f} % of a sifted epoch's time ({measured})"
        return True, f"{saves}. Compare its accuracy with that of fewer epochs: docs/sifting.md"
    loses = f"sifter '{kind}' would make a sifted epoch {-100 * share:.0f} % longer ({measured})"
    return False, f"{loses}; everything is visited. sifter.gate=off sifts all the same"


def visit_everything(context: SiftContext) -> Sifter:
    """Return the sifter that sifts nothing."""
    return registry.build("sifters", "none", registry.default_options("sifters", "none"), "sifter", context=context)


def measure(
    session: Session, distillation: Distillation, teacher: Teacher, loader: LocalLoader, teacher_share: float
) -> Costs:
    """Time the parts of a step on noise, and loading on a few images; all ranks take rank 0's numbers.

    `teacher_share`: share of the epochs in which the teacher's forward runs: with a cache, only while it fills.
    """
    backend, size = session.backend, session.image_size
    count = trial_images(session.split.micro_batch, backend)
    with Trial(distillation, teacher, backend, size, count) as trial:
        work = {"teacher": trial.ask, "forward": trial.score, "step": trial.step}
        table = fastest(work, backend, warm=True)[1]  # a compiled student meets new shapes here
    load = loading_ms(loader.dataset) / max(1, loader.workers)
    numbers = of_rank_0([*(table[name] / count for name in work), load], backend)
    return Costs(teacher_share * numbers[0], *numbers[1:], overlapped=loader.workers > 0)


def loading_ms(dataset: Dataset) -> float:
    """Return the milliseconds of loading an image in this process, from evenly spaced ones; 0.0 where none can be read.

    Each is loaded twice and the second time counts: where there is a store, it comes out of the store.
    """
    start, times = time.perf_counter(), []
    for id in evenly_spaced(len(dataset), LOADED):
        try:
            if not dataset.load(id, 0).readable:
                continue
        except CorruptImage:
            continue  # data.on_corrupt decides where the run reads it
        before = time.perf_counter()
        dataset.load(id, 0)
        times.append(time.perf_counter() - before)
        if time.perf_counter() - start > LOADED_SECONDS and len(times) > 2:
            break
    return 1000 * sorted(times)[len(times) // 2] if times else 0.0
