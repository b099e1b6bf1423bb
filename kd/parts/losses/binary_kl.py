"""Match each class's probability to the teacher's, for several labels per image.

The multi-label logits distillation (MLD) of Yang et al. 2023 (arXiv:2308.06453): each
class is a binary decision, and the KL divergences are summed over classes. Temperature
and T^2 are those of Hinton et al. 2015 (arXiv:1503.02531), section 2:

    p_c = sigmoid(teacher_c / T)    q_c = sigmoid(student_c / T)
    L = T^2 * sum_c ( p_c * log(p_c / q_c) + (1 - p_c) * log((1 - p_c) / (1 - q_c)) )

Not handled: errors of the teacher, which the student learns too.

Shape legend: B images of a batch, C classes.
"""

from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.facts import LossFacts
from kd.core.keys import Keys, keys
from kd.core.types import Batch, Dims, Outputs

facts = LossFacts(teacher=True, logits="sigmoid")


@keys
class Options(Keys):
    """The YAML keys of `kind: binary_kl`."""

    temperature: PositiveFloat = 1.0
    """Divides both models' logits, > 0."""


class BinaryKL(nn.Module):
    """Computes the KL divergences, teacher to student, summed over classes.

    Reads the logits [B, C] of both models; returns float32 [B] in nats times T^2. The
    equation is in the module's docstring (arXiv:2308.06453).

    Args:
        temperature: T, > 0.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        student_BC = student.logits.float() / self.temperature
        teacher_BC = teacher.logits.detach().float() / self.temperature
        # p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with log sigmoid(-x) for log(1
        # - sigmoid(x))
        yes_BC = F.logsigmoid(teacher_BC) - F.logsigmoid(student_BC)
        no_BC = F.logsigmoid(-teacher_BC) - F.logsigmoid(-student_BC)
        divergence_BC = teacher_BC.sigmoid() * yes_BC + (-teacher_BC).sigmoid() * no_BC
        return divergence_BC.sum(dim=1) * self.temperature**2


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return BinaryKL(options.temperature)
