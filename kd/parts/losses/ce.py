"""Learn the ground-truth label, smoothed and mixed, by cross-entropy without a teacher.

Label smoothing is Szegedy et al. 2015 (arXiv:1512.00567), section 7; mixup is Zhang et
al. 2017 (arXiv:1710.09412):

    target = lam * onehot(label) + (1 - lam) * onehot(partner_label)
    L = - sum_c w_c * ( (1 - s) * target_c + s / C ) * log softmax(student)_c

w is 1 without class weights. torch's CrossEntropyLoss divides by the weights of a
batch's labels. In kd an image's value must not depend on its batch, so weights are
divided by their mean over the training images; the mean over the training set equals
torch's.

Not handled: several labels per image; that is `bce`.

Shape legend: B images of a batch, C classes, N training images.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.contracts import Loss
from kd.core.errors import ConfigError, did_you_mean
from kd.core.facts import LossFacts
from kd.core.keys import Fraction, Keys, keys
from kd.core.types import Batch, Dims, Outputs

KEY = "losses[].class_weights"
WEIGHTS = (
    "class_weights must be `balanced`, a list of numbers, or a section `class: number`;"
    " each >= 0"
)

facts = LossFacts(labels=True, logits="softmax")


@keys
class Options(Keys):
    """The YAML keys of `kind: ce`."""

    label_smoothing: Fraction = 0.0
    """Label smoothing `s`: the share of the target spread evenly over all classes, 0 to
    1. With a teacher, 0 is usual.
    """
    class_weights: Any = None
    """Weight of each class: a list in class order, or a section `class: weight` with 1
    for other classes. Only ratios matter. `balanced`: equal total weight for all
    classes, independent of their numbers of images. null: no weights.
    """

    def __post_init__(self) -> None:
        weights = self.class_weights
        if weights is None or weights == "balanced":
            return
        if isinstance(weights, Mapping):
            weights = list(weights.values())
        is_list = isinstance(weights, (list, tuple)) and weights
        if not (is_list and all(map(_is_weight, weights))):
            raise ValueError(f"{WEIGHTS}, is {self.class_weights!r}")


def _is_weight(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )


class CE(nn.Module):
    """Computes the cross-entropy with the label, float32 [B] in nats.

    Reads the student's logits [B, C], `batch.label` and `batch.partner_label`, int64
    [B], and `batch.lam` [B]; the equation is in the module's docstring.

    Args:
        label_smoothing: s, 0 to 1.
        weight_C: w, the weight of each class, float32 [C]; None: 1.
    """

    weight_C: Tensor | None

    def __init__(self, label_smoothing: float, weight_C: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.register_buffer("weight_C", weight_C, persistent=False)

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        log_student_BC = F.log_softmax(student.logits.float(), dim=1)
        if self.weight_C is not None:
            log_student_BC = log_student_BC * self.weight_C
        label_B = -log_student_BC.gather(1, batch.label[:, None]).squeeze(1)
        partner_B = -log_student_BC.gather(1, batch.partner_label[:, None]).squeeze(1)
        mixed_B = batch.lam * label_B + (1 - batch.lam) * partner_B
        uniform_B = -log_student_BC.mean(dim=1)
        return (1 - self.label_smoothing) * mixed_B + self.label_smoothing * uniform_B


def class_weights(setting: Any, dims: Dims) -> Tensor:
    """Return the weight of each class; their mean over the training images is 1.

    Args:
        setting: the key `class_weights`: "balanced", a list, or weights by class name.
        dims: the number and names of classes, and the labels [N] of training images.

    Returns:
        Weights, float32 [C].

    Raises:
        ConfigError: the setting names no class, has another number of weights, or
            gives every training image weight 0.
    """
    assert dims.labels is not None
    labels_N = dims.labels()
    count_C = torch.bincount(
        labels_N[labels_N >= 0], minlength=dims.num_classes
    ).double()
    if setting == "balanced":
        raw_C = torch.where(count_C > 0, 1 / count_C.clamp_min(1), 0.0)
    elif isinstance(setting, Mapping):
        names = list(dims.classes)
        by_name = {str(name): float(weight) for name, weight in setting.items()}
        for name in by_name:
            if name not in names:
                wrong = f"has '{name}', which is no class"
                remedy = did_you_mean(name, names) or "Correct it"
                raise ConfigError(KEY, wrong, "The classes of the data", remedy)
        raw_C = torch.tensor(
            [by_name.get(name, 1.0) for name in names], dtype=torch.float64
        )
    else:
        raw_C = torch.tensor(setting, dtype=torch.float64)
    if len(raw_C) != dims.num_classes:
        wrong = f"has {len(raw_C)} numbers, but there are {dims.num_classes} classes"
        remedy = "Correct the list, or name the classes"
        raise ConfigError(KEY, wrong, "One weight per class", remedy)
    total = (raw_C * count_C).sum()
    if not total > 0:
        wrong = "gives every training image weight 0"
        raise ConfigError(KEY, wrong, "At least one weight > 0", "Raise one")
    return (raw_C * count_C.sum() / total).float()


def build(options: Options, dims: Dims) -> Loss:
    """Build the loss, without class weights if labels are unknown (`dims.labels`)."""
    weight_C = None
    if options.class_weights is not None and dims.labels is not None:
        weight_C = class_weights(options.class_weights, dims)
    return CE(options.label_smoothing, weight_C)
