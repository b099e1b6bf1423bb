"""Predict the teacher's pooled features from the student's through a learned projector.

Romero et al. 2014 (FitNets, arXiv:1412.6550), equation 3, on the features before the classifier. The teacher's are
standardized as in Wei et al. 2022 (arXiv:2205.14141), so that a few channels of large magnitude do not dominate:

    target = LayerNorm(teacher), without affine parameters
    L = mean_d (W student + b - target)_d^2     or     1 - cos(W student + b, target)

The projector is trained with the student and is not exported. Models of equal width get one too, because equal widths
do not mean equal axes. Its initial weights come from torch's global generator.

Not handled: features of single tokens or of inner layers.

Shape legend: B images of a batch, D teacher features, E student features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from kd.contracts import Loss
from kd.losses._features import require_features
from kd.types import Batch, Dims, Needs, Outputs

Distance = Literal["mse", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of `kind: feature`."""

    distance: Distance = "mse"
    """`mse`: squared error, mean over features. `cosine`: 1 - cosine, which ignores the norm of the features."""
    normalize: bool = True
    """Standardize each image's teacher features to mean 0 and variance 1 first."""

    def __post_init__(self) -> None:
        if self.distance not in get_args(Distance):
            raise ValueError(f"distance must be one of {', '.join(get_args(Distance))}, is '{self.distance}'")


class Feature(nn.Module):
    """Compute the distance between the projected student features and the teacher's."""

    needs = Needs(teacher=True, features=frozenset({"pooled"}))

    def __init__(self, student_features: int, teacher_features: int, distance: Distance, normalize: bool) -> None:
        super().__init__()
        self.project = nn.Linear(student_features, teacher_features)
        self.distance = distance
        self.normalize = normalize

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the distance of each image [B]; `batch` is not read."""
        projected_BD, target_BD = self._pair(student, teacher)
        if self.distance == "cosine":
            return 1 - F.cosine_similarity(projected_BD, target_BD, dim=1)
        return (projected_BD - target_BD).square().mean(dim=1)

    def agreement(self, student: Outputs, teacher: Outputs) -> Tensor:
        """Return the cosine of each image [B] with what is predicted."""
        return F.cosine_similarity(*self._pair(student, teacher), dim=1)

    def _pair(self, student: Outputs, teacher: Outputs) -> tuple[Tensor, Tensor]:
        target_BD = teacher.features["pooled"].detach().float()
        if self.normalize:
            target_BD = F.layer_norm(target_BD, target_BD.shape[1:])
        # The first float() matches the float32 weights. The second one undoes autocast, which multiplies in bfloat16.
        return self.project(student.features["pooled"].float()).float(), target_BD


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss, with a projector from the student's width to the teacher's.

    Raises:
        ModelError: one of the models has no features.
    """
    require_features("losses.feature", dims.student_features, dims.teacher_features)
    return Feature(dims.student_features, dims.teacher_features, options.distance, options.normalize)
