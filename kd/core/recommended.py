"""A run has recommended lengths, views, sizes and rates.

`kd-init` writes them, `auto` takes them, `--check` compares a configuration with them.
"""

from typing import NamedTuple

SIZES = (64, 96, 128, 160, 192, 224)
"""Sides of images. Below 64 px timm's networks halve them too often. A CPU gets 128, a
third of the cost of 224, and 64 where the teacher has random weights too, as in
docs/tutorial.md.
"""
VISITS = 100_000
"""Image visits of a run on a CPU, minutes of a small student. With ten classes of Tiny
ImageNet, 15 labels each, 100,000 gave 56.1 % and 300,000 61.0 %; the end of a run says
whether it still learned (`curves_*.csv`).
"""
ACCELERATOR_VISITS = 1_000_000
"""Image visits of a run with an accelerator. Not measured."""
TUNING_VISITS = 35_000
"""Image visits of a student with pretrained weights (configs/grocery.yaml: 34,000)."""
FIT_VISITS = 20_000
"""Image visits that fit a pretrained teacher (configs/few_labels.yaml: 19,200), also
where labels are few: `FITTED`.
"""
FITTED = (
    "with 20 labels per class of fruit a teacher had 66.6 % after 9,600 visits, 70.2 %"
    " after 19,200"
)
"""EfficientNet-Lite2, one seed (`proof_grocery_half_*.csv`)."""
TEACHER_SIDE = 128
"""Smallest input side of a pretrained teacher, which enlarges smaller images itself:
`ENLARGED`. On fruit of 64 px a linear classifier of a ViT-S/14's features reached 40.4
% at 64 px and 53.0 % at 128.
"""
ENLARGED = (
    "fitted on 1,000 pictures of 32 px, EfficientNet-Lite0 reached 69.9 % at 64 px and"
    " 77.0 % at 128"
)
"""One seed (benchmarks/LOG.md)."""
REPETITIONS = 5
"""Epochs that show a stored view again: on 1,142 images for 300 epochs a student
reached 45.4 % with 8 views, each shown 37 times, and 51.2 % with 60 views. On ten
classes of Tiny ImageNet in 40 epochs 2 views gave 51.3 %, 8 views 56.1 %, fresh ones
56.9 % (`curves_*.csv`). On CIFAR-10 12 repetitions were not worse (benchmarks/LOG.md).
"""
RATES = {True: (0.001, 5.0), False: (5e-5, 10.0)}
"""Learning rate and `head_lr_scale` for pretrained weights of CNNs
(configs/few_labels.yaml) and transformers.
"""
TEMPERATURE = 2.0
"""1, 2 and 4 were equal in half a run of configs/few_labels.yaml
(`proof_few_labels_*.csv`), and on ten classes of Tiny ImageNet after 10 epochs: 49.4,
48.0 and 48.1 %, each within 2.7 points (`curves_*.csv`). There, neither another rate
than 0.003 (0.001: 48.7, 0.006: 43.2), nor decay 0.2 (47.6), averaged weights (47.5),
crops from 0.1 or 0.75 of the area (45.8, 50.4) or mixup (45.0) was better beyond
chance.
"""
LABEL_WEIGHT = 0.1
"""Weight of a loss on labels beside one on the teacher's outputs. A batch's few labels
are a mean of their own: `WEIGHED`.
"""
MOST_LABEL_WEIGHT = 0.3
"""Weight above which `--check` names it where few images have a label; between 0.1 and
1 nothing was measured.
"""
WEIGHED = "weight 1 reached 34.4 %, 0.1 reached 48.0 %, no labels 49.2 %"
"""The student's accuracy there, with 15 labels per class, after 10 epochs, one seed
(`curves_*.csv`).
"""


class Length(NamedTuple):
    """A student's training has this length."""

    batch_size: int
    epochs: int


def length(images: int, accelerator: bool, pretrained: bool) -> Length:
    """Return the recommended length for a number of training images.

    Args:
        images: training images, with and without a label.
        accelerator: whether the student trains on one.
        pretrained: whether the student starts from pretrained weights.
    """
    visits = ACCELERATOR_VISITS if accelerator else VISITS
    fewest_epochs = 10
    most_epochs = 300
    if pretrained:
        visits = TUNING_VISITS
        fewest_epochs = 5
        most_epochs = 30
    epochs = min(most_epochs, max(fewest_epochs, round(visits / max(1, images))))
    batch_size = 32 if images < 5000 else 64
    if accelerator:
        batch_size = 256
    return Length(min(batch_size, largest_power(images)), epochs)


def stored_views(epochs: float) -> int:
    """Return how many views of each image the cache should have for `epochs`."""
    return max(1, min(round(epochs), max(2, round(epochs / REPETITIONS))))


def fit_visits(labelled: int, student: float = 0) -> int:
    """Return how many image visits should fit a teacher to labelled images.

    Args:
        labelled: training images with a label.
        student: image visits of the student, of which a teacher with random weights
            gets half; 0: a pretrained teacher.
    """
    return max(round(student / 2) or FIT_VISITS, labelled)


def image_side(median: int, accelerator: bool, pretrained_teacher: bool) -> int:
    """Return the side of training images, pixels.

    `median`: the median of the images' shorter sides.
    """
    largest = 128 if pretrained_teacher else 64
    if accelerator:
        largest = 224
    allowed = max(min(largest, median), SIZES[0])
    return max(side for side in SIZES if side <= allowed)


def crop_scale(median: int, side: int) -> float:
    """Return the smallest area of a random crop, a share.

    Images that are enlarged lose less of theirs.
    """
    return 0.75 if median < side else 0.35


def largest_power(count: int) -> int:
    """Return the largest power of two that is not larger than a count of at least 1."""
    return 1 << (max(1, count).bit_length() - 1)
