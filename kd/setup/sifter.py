"""The sifter of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kd.core.contracts import Backend, Sifter
from kd.core.types import SiftContext
from kd.parts import registry
from kd.setup.loaders import BatchSplit
from kd.setup.recipe import LoopPlan, Session


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


def build_sifter(session: Session, loop: LoopPlan) -> tuple[Sifter, str]:
    """Build the sifter of the training images; and a line where its delay leaves it nothing to do."""
    section, data, split = loop.sifter, session.data, session.split
    context = sift_context(len(data.train), data.labels, session.backend, split, loop.seed)
    context = replace(context, views=data.plan.views, balance=loop.balance)
    delay = registry.facts("sifters", section.kind, section.options, "sifter.kind").delay
    length = loop.length
    steps = length.steps or length.epochs * (len(data.train) // length.batch_size)
    if steps <= delay:
        everything = registry.default_options("sifters", "none")
        line = f"sifter '{section.kind}' waits for {delay} steps and the run has {steps}: everything is visited"
        line += ". Lower sifter.sift_delay"
        return registry.build("sifters", "none", everything, "sifter", context=context), line
    return registry.build("sifters", section.kind, section.options, "sifter.kind", context=context), ""
