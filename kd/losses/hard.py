"""Train on the teacher's top-1 class as the label: DeiT's hard distillation.

Touvron et al. 2020 (arXiv:2012.12877), the teacher's term of equation 3:

    L = - log softmax(student)_k,   k = argmax_c teacher_c

The teacher classifies the mixed image, so mixup is allowed. The label's term of equation 3 is the loss `ce`.

Not handled: DeiT's distillation token. Both terms act on one classifier.

Shape legend: B images of a batch, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from kd.contracts import Loss
from kd.types import Batch, Dims, Needs, Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """`kind: hard` has no keys: the paper uses neither a temperature nor label smoothing here."""


class Hard(nn.Module):
    """Compute the cross-entropy with the teacher's top-1 class."""

    needs = Needs(teacher=True, logits="softmax")

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the cross-entropy of each image [B], in nats; `batch` is not read."""
        choice_B = teacher.logits.argmax(dim=1)
        return F.cross_entropy(student.logits.float(), choice_B, reduction="none")


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return Hard()
