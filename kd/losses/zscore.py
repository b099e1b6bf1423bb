"""Match standardized logits by KL divergence, which leaves the scale of the logits free.

Sun et al. 2024 (arXiv:2403.01427), algorithms 1 and 2:

    z(x) = (x - mean_c x) / (std_c x + 1e-7)
    L = T^2 * KL( softmax(z(teacher) / T) || softmax(z(student) / T) )

The standard deviation is the unbiased one, as in the authors' code. They use a large weight: 9, with 0.1 * ce, for
CNNs on CIFAR-100.

Not handled: equal logits (a classifier initialized to zero), whose gradient the 1e-7 multiplies by 1e7. Clip it, or
initialize the classifier otherwise. With two classes z is +-1/sqrt(2): only their order is left.

Shape legend: B images of a batch, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from kd.contracts import Loss
from kd.types import Batch, Dims, Needs, Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of `kind: zscore`."""

    temperature: float = 2.0
    """Divides the standardized logits, > 0. The default is the paper's."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and > 0, is {self.temperature:g}")


class ZScore(nn.Module):
    """Compute the KL divergence of the class probabilities of standardized logits, teacher to student."""

    needs = Needs(teacher=True, logits="softmax")

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the divergence of each image [B], in nats times T^2; `batch` is not read."""
        log_student_BC = F.log_softmax(_standardize(student.logits) / self.temperature, dim=1)
        log_teacher_BC = F.log_softmax(_standardize(teacher.logits.detach()) / self.temperature, dim=1)
        divergence_BC = F.kl_div(log_student_BC, log_teacher_BC, reduction="none", log_target=True)
        return divergence_BC.sum(dim=1) * self.temperature**2


def _standardize(logits_BC: Tensor) -> Tensor:
    """Give each image's logits mean 0 and standard deviation 1; in float32, because 1e-7 is lost in float16."""
    logits_BC = logits_BC.float()
    centred_BC = logits_BC - logits_BC.mean(dim=1, keepdim=True)
    return centred_BC / (logits_BC.std(dim=1, keepdim=True) + 1e-7)


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return ZScore(options.temperature)
