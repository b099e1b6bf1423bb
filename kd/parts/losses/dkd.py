"""Weight the divergences of the target class and of the other classes separately.

Decoupled knowledge distillation, Zhao et al. 2022 (arXiv:2203.08679), equation 7. With
y the label, p the teacher's and q the student's probabilities at temperature T, and p^,
q^ the same over the classes other than y, renormalized to sum to 1:

    TCKD = KL( [p_y, 1 - p_y] || [q_y, 1 - q_y] )
    NCKD = KL( p^ || q^ )
    L = T^2 * (alpha * TCKD + beta * NCKD)

Plain distillation is alpha = 1 and beta = 1 - p_y (equation 6), so a confident teacher
almost removes NCKD. With two classes NCKD is 0.

Not handled: a warm-up of the weight. The authors' code raises it linearly over 20
epochs on CIFAR-100, 1 on ImageNet.

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

facts = LossFacts(teacher=True, labels=True, unmixed=True, logits="softmax")


@keys
class Options(Keys):
    """The YAML keys of `kind: dkd`; the defaults are the authors' for CIFAR-100."""

    alpha: NonNegativeFloat = 1.0
    """Weight of TCKD, the term of the target class, >= 0."""
    beta: NonNegativeFloat = 8.0
    """Weight of NCKD, the term of the other classes, >= 0. The authors use 0.5 to 2 on
    ImageNet.
    """
    temperature: PositiveFloat = 4.0
    """Divides both models' logits, > 0. The authors use 1 on ImageNet."""


class DKD(nn.Module):
    """Computes the KL divergences TCKD and NCKD, each with its weight.

    Reads the logits [B, C] of both models and `batch.label` [B]; returns float32 [B] in
    nats times T^2. The equation is in the module's docstring (arXiv:2203.08679, 7).

    Args:
        alpha: weight of TCKD, >= 0.
        beta: weight of NCKD, >= 0.
        temperature: T, > 0.
    """

    def __init__(self, alpha: float, beta: float, temperature: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.beta = beta
        self.temperature = temperature

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        student_BC = student.logits.float() / self.temperature
        teacher_BC = teacher.logits.detach().float() / self.temperature
        log_student_pair_B2, log_student_other_BC = _decouple(student_BC, batch.label)
        log_teacher_pair_B2, log_teacher_other_BC = _decouple(teacher_BC, batch.label)
        target_B = F.kl_div(
            log_student_pair_B2, log_teacher_pair_B2, reduction="none", log_target=True
        ).sum(dim=1)
        other_B = F.kl_div(
            log_student_other_BC,
            log_teacher_other_BC,
            reduction="none",
            log_target=True,
        ).sum(dim=1)
        return (self.alpha * target_B + self.beta * other_B) * self.temperature**2


def _decouple(logits_BC: Tensor, label_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return log [p_y, 1 - p_y], [B, 2], and log p^ of the other classes, [B, C]."""
    label_B1 = label_B[:, None]
    is_label_BC = torch.arange(logits_BC.shape[1], device=logits_BC.device) == label_B1
    # The lowest finite number, not -inf: its probability is 0 too, and 0 * -inf would
    # be NaN.
    other_BC = logits_BC.masked_fill(is_label_BC, torch.finfo(torch.float32).min)
    # p_y = sigmoid(log-odds) and 1 - p_y = sigmoid(-log-odds): neither becomes log(0).
    odds_B = -(other_BC - logits_BC.gather(1, label_B1)).logsumexp(dim=1)
    pair_B2 = F.logsigmoid(torch.stack([odds_B, -odds_B], dim=1))
    return pair_B2, F.log_softmax(other_BC, dim=1)


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return DKD(options.alpha, options.beta, options.temperature)
