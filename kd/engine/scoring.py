"""The scoring pass that a sifter may ask for. See `kd.contracts.Score`.

Shape legend: A micro-batches a step on one rank, W ranks, M images of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kd.engine.run import Run
from kd.types import Answer, Batch


class Scoring:
    """Score one step's worth of images on all ranks, without training on them."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @torch.no_grad()
    def __call__(self, batches: Sequence[Batch], by: str) -> tuple[Tensor, list[Batch]]:
        """Return the scores of all ranks' images in the plan's order, and the batches with the teacher's answers."""
        backend, distillation = self.run.backend, self.run.distillation
        distillation.eval()  # batch norm's statistics and dropout's draws belong to training
        scored, values = [], []
        for batch in batches:
            with backend.autocast():
                value_M, answered = entropy(self.run, batch) if by == "entropy" else loss(self.run, batch)
            scored.append(answered)
            values.append(value_M.float())
        distillation.train()
        all_AWM = torch.zeros(len(values), backend.world_size, len(values[0]), device=backend.device)
        all_AWM[:, backend.rank] = torch.stack(values)
        total = backend.reduce_sum(all_AWM)
        backend.end_step()
        return total.flatten().cpu(), scored

    def cut(self) -> None:
        """Cut the graph."""
        self.run.backend.end_step()


def loss(run: Run, batch: Batch) -> tuple[Tensor, Batch]:
    """Return the distillation loss [M], unweighted, and the batch with the teacher's answer."""
    teacher = run.teacher(batch)
    _, scores = run.distillation(batch, teacher)
    return scores["per_image"], replace(batch, answer=Answer(teacher))


def entropy(run: Run, batch: Batch) -> tuple[Tensor, Batch]:
    """Return the entropy [M] of the student's prediction, nats (UNIX, arXiv:2012.09413); the teacher is not asked."""
    log_prob_MC = run.distillation.student(batch.image).logits.float().log_softmax(-1)
    return -(log_prob_MC.exp() * log_prob_MC).sum(-1), batch
