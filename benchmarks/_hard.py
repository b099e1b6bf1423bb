"""Hard pseudo-labels as a loss: the cross-entropy to the class that the teacher names
for this very view.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.facts import LossFacts
from kd.core.types import Batch, Dims, Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the loss."""

    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes, as in the arm of labels
    alone.
    """


class Hard(nn.Module):
    """Compute the cross-entropy to the teacher's largest logit."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the loss of each image [B]; labels are not read."""
        named_B = teacher.logits.argmax(dim=1)
        logits_BC = student.logits.float()
        return F.cross_entropy(
            logits_BC, named_B, reduction="none", label_smoothing=self.label_smoothing
        )


def facts(options: Options) -> LossFacts:
    """Return what the loss reads."""
    return LossFacts(teacher=True, logits="softmax")


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return Hard(options.label_smoothing)
