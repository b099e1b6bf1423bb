"""The scoring pass that a sifter may ask for. See `kd.contracts.Score`.

Shape legend: A micro-batches a step on one rank, W ranks, M images of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kd.engine.criterion import Distillation
from kd.engine.run import Run
from kd.types import Batch, TeacherOutputs


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
            if by == "loss":
                batch = replace(batch, teacher_outputs=TeacherOutputs(self.run.teacher(batch)))
            with backend.autocast():
                value_M = score(distillation, batch, by)
            scored.append(batch)
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


def score(distillation: Distillation, batch: Batch, by: str) -> Tensor:
    """Return the distillation loss [M], unweighted, or the entropy of the student's prediction, nats."""
    if by == "loss":
        assert batch.teacher_outputs is not None
        return distillation(batch, batch.teacher_outputs.outputs)[1]["per_image"]
    log_prob_MC = distillation.student(batch.image).logits.float().log_softmax(-1)
    return -(log_prob_MC.exp() * log_prob_MC).sum(-1)  # UNIX, arXiv:2012.09413
