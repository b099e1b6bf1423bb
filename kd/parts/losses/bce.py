"""Learn a set of labels, smoothed and mixed, by one binary cross-entropy per class.

For images of several labels or none. Label smoothing is Szegedy et al. 2015
(arXiv:1512.00567), section 7, over the two outcomes of each class; mixup is Zhang et
al. 2017 (arXiv:1710.09412):

    target_c = lam * [c in labels] + (1 - lam) * [c in partner's labels]
    t_c = (1 - s) * target_c + s / 2
    q_c = sigmoid(student_c)
    L = - sum_c ( t_c * log q_c + (1 - t_c) * log(1 - q_c) )

It is summed over classes: the negative log-likelihood of the set, as `ce` is that of
the label.

Not handled: class weights, and images with labels for some classes only.

Shape legend: B images of a batch, C classes.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.facts import LossFacts
from kd.core.keys import Fraction, Keys, keys
from kd.core.types import Batch, Dims, Outputs

facts = LossFacts(labels=True, logits="sigmoid")


@keys
class Options(Keys):
    """The YAML keys of `kind: bce`."""

    label_smoothing: Fraction = 0.0
    """Label smoothing `s`: the share of each class's target spread evenly over yes and
    no, 0 to 1.
    """


class BCE(nn.Module):
    """Computes the binary cross-entropy with the labels, float32 [B] in nats.

    Reads the student's logits [B, C], `batch.label` and `batch.partner_label`, int8
    [B, C] of 0 and 1, and `batch.lam` [B]; the equation is in the module's docstring.

    Args:
        label_smoothing: s, 0 to 1.
    """

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        lam_B1 = batch.lam[:, None]
        target_BC = lam_B1 * batch.label + (1 - lam_B1) * batch.partner_label
        target_BC = (1 - self.label_smoothing) * target_BC + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(
            student.logits.float(), target_BC, reduction="none"
        ).sum(dim=1)


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss; `dims` is not needed."""
    return BCE(options.label_smoothing)
