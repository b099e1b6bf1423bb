"""Weight the label by the teacher's confidence, and match the renormalized other classes: NKD.

Yang et al. 2023, "From Knowledge Distillation to Self-Knowledge Distillation" (arXiv:2303.13005), the NKD loss. With
y the label, p the teacher's and q the student's probabilities, and p^, q^ the softmax at temperature T over the
classes other than y:

    L = - p_y * log q_y  -  gamma * T^2 * sum_{c != y} p^_c * log q^_c

The two terms are cross-entropies, not a divergence: the loss is not 0 where the student equals the teacher. With two
classes the second term is 0.

Not handled: mixed labels. The authors' code takes the label with the larger share.

Shape legend: B images of a batch, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.contracts import Loss
from kd.types import Batch, Dims, Needs, Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of `kind: nkd`; the defaults are those of the authors' code, meant for ImageNet."""

    gamma: float = 1.5
    """Weight of the other classes' term, >= 0. The authors use 1 for DeiT students."""
    temperature: float = 1.0
    """Divides the logits of the other classes, > 0. The label's term is always at 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma must be finite and >= 0, is {self.gamma:g}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and > 0, is {self.temperature:g}")


class NKD(nn.Module):
    """Compute the cross-entropies of the label, weighted by the teacher, and of the renormalized other classes."""

    needs = Needs(teacher=True, labels=True, unmixed=True, logits="softmax")

    def __init__(self, gamma: float, temperature: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.temperature = temperature

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the weighted sum of the two cross-entropies of each image [B], in nats."""
        student_BC, teacher_BC = student.logits.float(), teacher.logits.detach().float()
        label_B1 = batch.label[:, None]
        log_student_B = F.log_softmax(student_BC, dim=1).gather(1, label_B1).squeeze(1)
        log_teacher_B = F.log_softmax(teacher_BC, dim=1).gather(1, label_B1).squeeze(1)
        target_B = -log_teacher_B.exp() * log_student_B

        is_label_BC = torch.arange(student_BC.shape[1], device=student_BC.device) == label_B1
        # The lowest finite number, not -inf: its probability is 0 too, and 0 * -inf would be NaN.
        lowest = torch.finfo(torch.float32).min
        log_student_other_BC = F.log_softmax((student_BC / self.temperature).masked_fill(is_label_BC, lowest), dim=1)
        teacher_other_BC = F.softmax((teacher_BC / self.temperature).masked_fill(is_label_BC, lowest), dim=1)
        other_B = -(teacher_other_BC * log_student_other_BC).sum(dim=1)
        return target_B + self.gamma * self.temperature**2 * other_B


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return NKD(options.gamma, options.temperature)
