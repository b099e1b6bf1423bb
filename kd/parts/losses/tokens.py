"""Predict the teacher's patch tokens from the student's through a learned projector.

Ranzinger et al. 2023 (AM-RADIO, arXiv:2312.06709), the loss on spatial features, with
its weights:

    p = W student + b
    L = mean_n 0.9 * (1 - cos(p_n, t_n)) + 0.1 * mean_d smooth_l1(p_nd, t_nd)

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
    """Computes the distance between the projected student tokens and the teacher's.

    Reads the tokens of student [B, N, E] and teacher [B, N, D], each with its own N;
    returns float32 [B]. The equation is in the module's docstring (arXiv:2312.06709).

    Args:
        student_features: E.
        teacher_features: D.
        side: S of the coarser grid, to which both are resampled.
    """

    def __init__(self, student_features: int, teacher_features: int, side: int) -> None:
        super().__init__()
        self.project = nn.Linear(student_features, teacher_features)
        self.side = side

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        projected_BND, target_BND = self._pair(student, teacher)
        cosine_B = F.cosine_similarity(projected_BND, target_BND, dim=2).mean(dim=1)
        smooth_B = F.smooth_l1_loss(projected_BND, target_BND, reduction="none").mean(
            dim=(1, 2)
        )
        return COSINE * (1 - cosine_B) + (1 - COSINE) * smooth_B

    def agreement(self, student: Outputs, teacher: Outputs) -> Tensor:
        """Return the mean cosine of an image's tokens, [B]."""
        return F.cosine_similarity(*self._pair(student, teacher), dim=2).mean(dim=1)

    def _pair(self, student: Outputs, teacher: Outputs) -> tuple[Tensor, Tensor]:
        student_BNE = resample(student.features["tokens"].float(), self.side)
        target_BND = resample(teacher.features["tokens"].detach().float(), self.side)
        return self.project(student_BNE).float(), target_BND


def resample(tokens_BND: Tensor, side: int) -> Tensor:
    """Return the tokens of a square grid [B, N, D] on a grid of `side` x `side`."""
    old_side = math.isqrt(tokens_BND.shape[1])
    if old_side == side:
        return tokens_BND
    map_BDSS = tokens_BND.transpose(1, 2).unflatten(2, (old_side, old_side))
    resized_BDSS = F.interpolate(
        map_BDSS, size=(side, side), mode="bilinear", antialias=True
    )
    return resized_BDSS.flatten(2).transpose(1, 2)


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss, with a projector from the student's width to the teacher's."""
    config_path = "losses.tokens"
    student_count, student_width = dims.student_tokens
    teacher_count, teacher_width = dims.teacher_tokens
    require_features(config_path, student_width, teacher_width)
    for model, count in (("student", student_count), ("teacher", teacher_count)):
        if math.isqrt(count) ** 2 != count:
            wrong = f"the {model} gives {count} tokens, which are not a square grid"
            remedy = "Take a loss on pooled features, such as cosine"
            raise ModelError(config_path, wrong, "Square grids", remedy)
    side = math.isqrt(min(student_count, teacher_count))
    return Tokens(student_width, teacher_width, side)
