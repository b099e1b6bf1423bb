"""Match the student's softened probabilities to the teacher's (plain distillation).

Plain knowledge distillation, Hinton et al. 2015 (arXiv:1503.02531), section 2:

    L = T^2 * KL( softmax(teacher / T) || softmax(student / T) )

It is summed over classes; its mean over images is torch's `batchmean`. A mean over
classes would make the weight of the loss depend on their number.

With `hard` the teacher's top class is the target (a pseudo-label): T is 1, and L is the
cross-entropy.

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

facts = LossFacts(teacher=True, logits="softmax")


@keys
class Options(Keys):
    """The YAML keys of `kind: kl`."""

    temperature: PositiveFloat = 1.0
    """Divides both models' logits, > 0. 1 suits long recipes with strong augmentation,
    where teacher probabilities are soft already (arXiv:2204.03475). 4 is usual for CNNs
    on CIFAR-100, whose teachers are very confident.
    """
    hard: bool = False
    """Learn only the teacher's top class for each view, a pseudo-label; the baseline
    for soft targets. `temperature` must be 1.
    """

    def __post_init__(self) -> None:
        if self.hard and self.temperature != 1:
            raise ValueError(
                f"temperature is {self.temperature:g}, but with hard: true it must be 1"
            )


class KL(nn.Module):
    """Computes the KL divergence of softened class probabilities, teacher to student.

    Reads the logits [B, C] of both models; returns float32 [B] in nats times T^2. The
    equation is in the module's docstring (arXiv:1503.02531, section 2).

    Args:
        temperature: T, > 0.
        hard: whether the teacher's top class is the target.
    """

    def __init__(self, temperature: float, hard: bool = False) -> None:
        super().__init__()
        self.temperature = temperature
        self.hard = hard

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        log_student_BC = F.log_softmax(student.logits.float() / self.temperature, dim=1)
        if self.hard:
            return F.nll_loss(
                log_student_BC, teacher.logits.argmax(dim=1), reduction="none"
            )
        log_teacher_BC = F.log_softmax(
            teacher.logits.detach().float() / self.temperature, dim=1
        )
        divergence_BC = F.kl_div(
            log_student_BC, log_teacher_BC, reduction="none", log_target=True
        )
        # The gradient scales with 1/T^2; T^2 keeps the weight of the loss independent
        # of T.
        return divergence_BC.sum(dim=1) * self.temperature**2


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return KL(options.temperature, options.hard)
