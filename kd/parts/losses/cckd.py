"""Match the similarities of a batch's images in the student to those in the teacher.

Peng et al. 2019 (CCKD, arXiv:1904.01802), equation 4, with the bilinear kernel of
vectors of length 1. There is no projector: similarities are comparable between
different widths. With x the pooled features of B images:

    S_ij = cos(x_i, x_j)
    L = 1 / B^2 * sum_ij (S^student_ij - S^teacher_ij)^2

The value of image i is the mean over j, so the mean over B is the paper's loss.

Not handled: only the images of this rank's micro-batch are compared. Images of weight 0
(padding) count among the others. It is invariant to rotations, so `agreement` compares
similarities.

Shape legend: B images of a batch, D features.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.facts import LossFacts
from kd.core.facts import NoOptions as Options
from kd.core.types import Batch, Dims, Outputs
from kd.parts.losses._features import require_features

facts = LossFacts(
    teacher=True, features=frozenset({"pooled"}), agreement=True, images=2
)


class CCKD(nn.Module):
    """Computes the mean squared difference of each image's similarities.

    Reads the pooled features [B, D] of both models, whose widths may differ; returns
    float32 [B]. The equation is in the module's docstring (arXiv:1904.01802).
    """

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        return (
            (_similarities(student) - _similarities(teacher).detach())
            .square()
            .mean(dim=1)
        )

    def agreement(self, student: Outputs, teacher: Outputs) -> Tensor:
        """Return the cosine between both models' similarities of an image, [B]."""
        return F.cosine_similarity(
            _similarities(student), _similarities(teacher), dim=1
        )


def _similarities(outputs: Outputs) -> Tensor:
    unit_BD = F.normalize(outputs.features["pooled"].float(), dim=1)
    return (unit_BD @ unit_BD.T).float()


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss."""
    require_features("losses.cckd", dims.student_features, dims.teacher_features)
    return CCKD()
