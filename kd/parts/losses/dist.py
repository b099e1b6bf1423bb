"""Match correlations of probabilities, not their values, for a much stronger teacher.

Huang et al. 2022, "Knowledge Distillation from A Stronger Teacher" (arXiv:2205.10536),
the losses L_inter and L_intra. With Q the student's and P the teacher's probabilities
[B, C] at temperature T, and rho Pearson's correlation:

    L_inter = mean_i 1 - rho(Q_i:, P_i:)         per image, over the classes
    L_intra = mean_c 1 - rho(Q_:c, P_:c)         per class, over the images of the batch
    L = T^2 * (beta * L_inter + gamma * L_intra)

L_inter has one value per image. L_intra is one number per batch and is added to each
image, so that the mean over B is the paper's loss.

Not handled: L_intra uses only this rank's micro-batch. Two images give it no gradient;
a few give a noisy one. Images of weight 0 (padding) count in its statistics. With two
classes, rho(Q_i:, P_i:) is 1 or -1 and has no gradient. Equal student probabilities (a
classifier initialized to zero) have very large gradients, because of the 1e-8: clip
them.

Shape legend: B images of a batch, C classes.
"""

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.facts import LossFacts
from kd.core.keys import Keys, keys
from kd.core.types import Batch, Dims, Outputs


@keys
class Options(Keys):
    """The YAML keys of `kind: dist`; the defaults are those of the authors' code."""

    beta: NonNegativeFloat = 1.0
    """Weight of L_inter, the correlation over classes, >= 0."""
    gamma: NonNegativeFloat = 1.0
    """Weight of L_intra, the correlation over images, >= 0."""
    temperature: PositiveFloat = 1.0
    """Divides both models' logits, > 0."""


class DIST(nn.Module):
    """Computes DIST: each image's L_inter plus the batch's L_intra.

    Reads the logits [B, C] of both models; returns float32 [B], times T^2. The equation
    is in the module's docstring (arXiv:2205.10536).

    Args:
        beta: weight of L_inter, >= 0.
        gamma: weight of L_intra, >= 0.
        temperature: T, > 0.
    """

    def __init__(self, beta: float, gamma: float, temperature: float) -> None:
        super().__init__()
        self.beta = beta
        self.gamma = gamma
        self.temperature = temperature

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        student_BC = F.softmax(student.logits.float() / self.temperature, dim=1)
        teacher_BC = F.softmax(
            teacher.logits.detach().float() / self.temperature, dim=1
        )
        inter_B = 1 - _correlate(student_BC, teacher_BC, dim=1)
        intra = (1 - _correlate(student_BC, teacher_BC, dim=0)).mean()
        return (self.beta * inter_B + self.gamma * intra) * self.temperature**2


def _correlate(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Return Pearson's correlation along `dim`, 0 where either side is constant."""
    a = a - a.mean(dim=dim, keepdim=True)
    b = b - b.mean(dim=dim, keepdim=True)
    norms = torch.linalg.vector_norm(a, dim=dim) * torch.linalg.vector_norm(b, dim=dim)
    # The authors' 1e-8 is part of the method: it suppresses classes that neither model
    # predicts in this batch.
    return (a * b).sum(dim=dim) / (norms + 1e-8)


def facts(options: Options) -> LossFacts:
    """Return what the loss reads."""
    images = 3 if options.gamma else 1  # rho of 2 images is 1 or -1
    return LossFacts(teacher=True, logits="softmax", images=images)


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return DIST(options.beta, options.gamma, options.temperature)
