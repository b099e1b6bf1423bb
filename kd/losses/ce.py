"""Learn the ground-truth label, smoothed and mixed, by cross-entropy without a teacher.

Label smoothing is Szegedy et al. 2015 (arXiv:1512.00567), section 7; mixup is Zhang et al. 2017 (arXiv:1710.09412):

    target = lam * onehot(label) + (1 - lam) * onehot(partner_label)
    L = - sum_c ( (1 - s) * target_c + s / C ) * log softmax(student)_c

Not handled: class weights. For several labels an image there is `bce`.

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
    """The YAML keys of `kind: ce`."""

    label_smoothing: float = 0.0
    """The share `s` of the target that is spread evenly over all classes, 0 to 1. Beside a teacher, 0 is usual."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, is {self.label_smoothing:g}")


class CE(nn.Module):
    """Compute the cross-entropy with the label, or with both labels of a mixed image."""

    needs = Needs(labels=True, logits="softmax")

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the cross-entropy of each image [B], in nats; `teacher` is not read."""
        log_student_BC = F.log_softmax(student.logits.float(), dim=1)
        label_B = -log_student_BC.gather(1, batch.label[:, None]).squeeze(1)
        partner_B = -log_student_BC.gather(1, batch.partner_label[:, None]).squeeze(1)
        mixed_B = batch.lam * label_B + (1 - batch.lam) * partner_B
        uniform_B = -log_student_BC.mean(dim=1)
        return (1 - self.label_smoothing) * mixed_B + self.label_smoothing * uniform_B


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return CE(options.label_smoothing)
