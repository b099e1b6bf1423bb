"""Match softened probabilities, with more weight where the teacher is uncertain.

Zheng and Yang 2024, "Knowledge Distillation Based on Transformed Teacher Matching"
(arXiv:2402.11148), weighted TTM, section 4. With p the teacher's and q the student's
probabilities, both at temperature 1:

    U = sum_c p_c^gamma
    L = U * KL( p^gamma / U || q )

The exponent is a temperature of 1/gamma on the teacher only; gamma = 1 is plain
distillation. U is 1 for a certain teacher and C^(1 - gamma) for uniform probabilities.
The loss is therefore large with many classes and small gamma: lower its weight
accordingly (the authors use 4 with gamma 0.2 on CIFAR-100).

Not handled: plain TTM, which has no factor U.

Shape legend: B images of a batch, C classes.
"""

from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.facts import LossFacts
from kd.core.keys import Keys, keys
from kd.core.types import Batch, Dims, Outputs

facts = LossFacts(teacher=True, logits="softmax")


@keys
class Options(Keys):
    """The YAML keys of `kind: wttm`."""

    gamma: PositiveFloat = 0.2
    """The exponent on the teacher's probabilities, > 0. Below 1 it softens them. The
    default is the authors'.
    """


class WTTM(nn.Module):
    """Computes the KL divergence from the power-transformed teacher, times U.

    Reads the logits [B, C] of both models; returns float32 [B] in nats. The equation is
    in the module's docstring (arXiv:2402.11148, section 4).

    Args:
        gamma: the exponent on the teacher's probabilities, > 0.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        log_student_BC = F.log_softmax(student.logits.float(), dim=1)
        log_power_BC = self.gamma * F.log_softmax(
            teacher.logits.detach().float(), dim=1
        )
        log_sum_B1 = log_power_BC.logsumexp(dim=1, keepdim=True)
        divergence_BC = F.kl_div(
            log_student_BC, log_power_BC - log_sum_B1, reduction="none", log_target=True
        )
        return divergence_BC.sum(dim=1) * log_sum_B1.squeeze(1).exp()


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return WTTM(options.gamma)
