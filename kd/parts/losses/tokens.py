"""Predict the teacher's patch tokens from the student's through a learned projector.

Ranzinger et al. 2023 (AM-RADIO, arXiv:2312.06709), the loss on spatial features, with
its weights:

    L = mean_n 0.9 * (1 - cos(p_n, t_n)) + 0.1 * mean_d smooth_l1(p_nd, t_nd),    p = W student + b

If the models have different grids, the finer one is resampled to the coarser one
(bilinear, antialiased), so no model has to match missing detail. Tokens are patch
tokens, without class and register tokens; for a CNN, positions in the last feature map.

The projector is trained with the student and is not exported. Its initial weights come
from torch's global generator.

Not handled: grids that are not square, and tokens of inner layers.

Shape legend: B images of a batch, N tokens, D teacher features, E student features, S
tokens along a side.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.errors import ModelError
from kd.core.facts import LossFacts
from kd.core.facts import NoOptions as Options
from kd.core.types import Batch, Dims, Outputs
from kd.parts.losses._features import require_features

COSINE = 0.9  # share of the cosine; the paper's weights

facts = LossFacts(teacher=True, features=frozenset({"tokens"}), agreement=True)


class Tokens(nn.Module):
    """The distance between the projected student tokens and the teacher's, [B]; their
    mean cosine is the agreement.
    """

    def __init__(self, student_features: int, teacher_features: int, side: int) -> None:
        super().__init__()
        self.project = nn.Linear(student_features, teacher_features)
        self.side = side  # side of the coarser grid

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        projected_BND, target_BND = self._pair(student, teacher)
        cosine_B = F.cosine_similarity(projected_BND, target_BND, dim=2).mean(dim=1)
        smooth_B = F.smooth_l1_loss(projected_BND, target_BND, reduction="none").mean(
            dim=(1, 2)
        )
        return COSINE * (1 - cosine_B) + (1 - COSINE) * smooth_B

    def agreement(self, student: Outputs, teacher: Outputs) -> Tensor:
        return F.cosine_similarity(*self._pair(student, teacher), dim=2).mean(dim=1)

    def _pair(self, student: Outputs, teacher: Outputs) -> tuple[Tensor, Tensor]:
        student_BNE = resample(student.features["tokens"].float(), self.side)
        target_BND = resample(teacher.features["tokens"].detach().float(), self.side)
        return self.project(student_BNE).float(), target_BND


def resample(tokens_BND: Tensor, side: int) -> Tensor:
    """Return the tokens of a square grid on a grid of `side` x `side`."""
    own = math.isqrt(tokens_BND.shape[1])
    if own == side:
        return tokens_BND
    map_BDSS = tokens_BND.transpose(1, 2).unflatten(2, (own, own))
    resized_BDSS = F.interpolate(
        map_BDSS, size=(side, side), mode="bilinear", antialias=True
    )
    return resized_BDSS.flatten(2).transpose(1, 2)


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss, with a projector from the student's width to the teacher's."""
    (count, width), (teacher_count, teacher_width) = (
        dims.student_tokens,
        dims.teacher_tokens,
    )
    require_features("losses.tokens", width, teacher_width)
    for model, number in (("student", count), ("teacher", teacher_count)):
        if math.isqrt(number) ** 2 != number:
            wrong = f"the {model} gives {number} tokens, which are not a square grid"
            raise ModelError(
                "losses.tokens",
                wrong,
                "Square grids",
                "Take a loss on pooled features, such as cosine",
            )
    return Tokens(
        width, teacher_width, min(math.isqrt(count), math.isqrt(teacher_count))
    )
