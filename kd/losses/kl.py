"""Match the student's softened class probabilities to the teacher's: plain knowledge distillation.

Hinton et al. 2015 (arXiv:1503.02531), section 2:

    L = T^2 * KL( softmax(teacher / T) || softmax(student / T) )

summed over classes, so that the mean over images is what torch calls `batchmean`; a mean over classes too would
make the weight of the loss depend on the number of classes.

Not handled: a teacher that is wrong is followed where it is wrong.

Shape legend: B images of a batch, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from kd.contracts import Loss
from kd.types import Batch, Dims, Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of `kind: kl`."""

    temperature: float = 1.0
    """Divides both models' logits, > 0. The default is what long, strongly augmented recipes use, where the teacher is
    soft already (arXiv:2204.03475); 4 is usual for CNNs on CIFAR-100, whose teachers are nearly certain."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and > 0, is {self.temperature:g}")


class KL(nn.Module):
    """Score how far the student's softened class probabilities are from the teacher's."""

    needs: frozenset[str] = frozenset({"teacher"})

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the divergence of each image [B], in nats times T^2; `batch` is not read."""
        log_student_BC = F.log_softmax(student.logits.float() / self.temperature, dim=1)
        log_teacher_BC = F.log_softmax(teacher.logits.detach().float() / self.temperature, dim=1)
        divergence_BC = F.kl_div(log_student_BC, log_teacher_BC, reduction="none", log_target=True)
        # T^2 undoes the 1/T^2 of the gradient, so that changing T does not change the weight of the loss.
        return divergence_BC.sum(dim=1) * self.temperature**2


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return KL(options.temperature)
