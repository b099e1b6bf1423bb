"""The section `data`: the images, and how they become batches."""

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from kd.config.section import PartSection
from kd.config.tuning import Augment
from kd.core.keys import (
    Auto,
    Field,
    Fraction,
    Keys,
    PositiveFraction,
    file_key,
    keys,
    part_kind,
)


@keys
class Progressive(Keys):
    """Small images in the first part of a run (progressive resizing; EfficientNetV2,
    arXiv:2104.00298).
    """

    size: NonNegativeInt = 0
    """Side of the images that the student is trained on in that part, pixels. Its
    teacher, and evaluation, see `image_size`. 0: `image_size` throughout.
    """
    until: Fraction = 0.0
    """Share of the run after which images have `image_size`."""


@keys
class DataSection(PartSection):
    """The images and how they become batches."""

    kind: str = part_kind("datasets")
    """The dataset."""
    test_fraction: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
    """Share of the validation images that is set aside as a test split, by a hash of
    each name: the same images in every run. Scored once, at the end of a run, and never
    used to choose a checkpoint. Not allowed with a test split of the dataset.
    """
    labels: Literal["all", "some", "none"] = "all"
    """Which images have a label. some: loss terms that need a label skip the other
    images. none: the classes are the teacher's, and the student is compared with the
    teacher only.
    """
    labels_per_class: NonNegativeInt = 0
    """Keep this many labels per class, drawn by `run.seed` and the images' names. With
    `labels:
    some` the others lose their label, with `all` they are left out. 0: keep all.
    `teacher.fit` sees labelled images.
    """
    image_size: Annotated[int, Field(ge=8)] = 224
    """Side of the square images from the data pipeline, in pixels. A model with another
    input size resizes them.
    """
    batch_size: PositiveInt = 256
    """Images per optimizer step, all ranks and micro-batches together."""
    micro_batch: NonNegativeInt = 0
    """Images per forward on one rank (micro-batch). 0: the rank's whole share of a
    batch.
    """
    eval_batch: NonNegativeInt = 0
    """Images per forward in evaluation on one rank. 0: as in training."""
    crop_pct: PositiveFraction = 1.0
    """Share of the shorter side that evaluation's centre crop keeps."""
    workers: Auto | NonNegativeInt = "auto"
    """Processes that decode and augment. 0: the training process itself. `auto`: one on
    a CPU, none on one or two cores; beside an accelerator this rank's cores - 1, at
    most 32.
    """
    loader: Literal["local", "ray"] = "local"
    """Who decodes: this rank's `workers`, or all hosts of the Ray cluster that
    RAY_ADDRESS names, in place of them; the same bits. `kd-launch` starts such a
    cluster.
    """
    deadline: PositiveFloat = 30.0
    """With `loader: ray`, seconds to wait for another host's 32 images before this host
    makes them itself.
    """
    store: Literal["none", "ram", "disk", "views"] = "none"
    """Decode each image once and keep its pixels: in memory (ram), or below
    `run.folder` for all runs (disk). Training images are shrunk until the smallest
    random crop has `image_size` pixels a side. `views`: keep repeated training views in
    memory; bit-identical to `none`.
    """
    store_size: NonNegativeInt = 0
    """Shorter side of a stored training image, pixels. Smaller images take less space
    and have less detail. 0: by that rule.
    """
    balance: Fraction = 0.0
    """Share of the training images drawn for each epoch, without repetition and
    balanced over the classes as far as each has enough images. 0: all images. Not
    allowed with a sifter.
    """
    views: NonNegativeInt = 0
    """Number of different views per image; epoch e shows view `e mod views`. 0: a fresh
    view every epoch, or as many as `teacher.cache.views`.
    """
    on_corrupt: Literal["error", "skip"] = "error"
    """What to do with an image that cannot be decoded. skip: give it weight 0, count it
    and list its name. A file that cannot be read ends the run in either case.
    """
    max_skipped: Fraction = 0.01
    """Largest share of a split's images that may be skipped; one is always allowed.
    More end the run. Each rank counts the images that it has loaded.
    """
    bits: Annotated[int, Field(ge=9, le=16)] = 16
    """Bits used by images of 16 bits per channel: cameras, microscopes and X-ray write
    10, 12 or 14. It holds for all images, here and in the export. `--check` reports the
    bits in use; a pixel value beyond them is an error.
    """
    exclude: str = file_key("")
    """Text file of images to leave out, one NAME or SPLIT:NAME per line, such as
    `audit/exclude.txt` from `--check`. Ids shift, so caches and stores are rebuilt.
    """
    license: str = ""
    """Licence of the images for model cards, such as cc-by-4.0. It does not affect the
    run.
    """
    augment: Augment = Augment()
    """Random changes of training images."""
    progressive: Progressive = Progressive()
    """Small images first."""
