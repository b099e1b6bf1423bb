"""Inspection of a folder of images: its layout as keys of `data`, its labels, and a
sample of decoded images.
"""

import posixpath
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from kd.core.errors import CorruptImage, DataError
from kd.parts import registry
from kd.setup.data import Data, open_sources
from kd.setup.data_plan import DataPlan

SAMPLE, SECONDS = (
    200,
    2.5,
)  # most images and seconds for decoding a sample: ten seconds in all
ANY = "imagefolder"  # accepts any folder, so it is tried last
Keys = dict[str, Any]  # keys of a section, `kind` first


class ImageFolder(NamedTuple):
    """Findings."""

    keys: Keys
    labels: str  # `data.labels`
    why: str  # images have no labels
    data: Data
    counts: list[int]  # number of training images per class; empty without labels
    side: int  # median shorter side of the `sampled` images, pixels
    sampled: int
    damaged: int  # undecodable images in the sample
    bits: int  # bits used by sampled images of 16 bits per channel; 0: no such images

    @property
    def sets(self) -> bool:
        """Whether an image may have several labels."""
        plan = self.data.plan
        return (
            registry.facts("datasets", plan.kind, plan.options, "FOLDER").label == "set"
        )


def inspect_folder(folder: Path) -> ImageFolder:
    """Find the layout of a folder, list its images, and decode a sample of them."""
    if not folder.is_dir():
        wrong = f"'{folder}' " + ("is a file" if folder.exists() else "does not exist")
        raise DataError(
            "FOLDER",
            wrong,
            "A folder of images",
            "Unpack the archive, or check the path",
        )
    try:
        keys = _recognize_layout(folder)
        labels, why, data = _open_splits(**keys)
        known = data.labels()
        counts = (known > 0).sum(0) if known.ndim == 2 else known[known >= 0].bincount()
        return ImageFolder(
            keys, labels, why, data, counts.tolist(), *_sample_images(data)
        )
    except OSError as error:
        wrong = f"'{error.filename}' cannot be read ({error.strerror})"
        raise DataError("FOLDER", wrong, "", "Check its rights") from error
    except DataError as error:
        raise DataError("FOLDER", error.wrong, error.allowed, error.remedy) from error


def _recognize_layout(folder: Path) -> Keys:
    """Return the keys of the kind of data that recognizes the folder, by default class
    folders.
    """
    for kind in sorted(registry.names("datasets"), key=lambda name: name == ANY):
        recognizes = getattr(
            registry.find("datasets", kind, "FOLDER"), "recognizes", None
        )
        if recognizes is not None and (keys := recognizes(folder)) is not None:
            return {"kind": kind, **keys}
    raise AssertionError(ANY)


def _open_splits(kind: str, **keys: Any) -> tuple[str, str, Data]:
    """Open the splits, unlabelled if there are fewer than two classes; return
    `data.labels`, the reason, the data.
    """
    options = registry.default_options("datasets", kind, **keys)
    try:
        data = open_sources(DataPlan(kind=kind, options=options))
    except DataError as error:
        if kind != "imagefolder":
            raise
        data = open_sources(DataPlan(kind=kind, options=options, labels="none"))
        if (
            len(
                {
                    posixpath.dirname(data.train.name(id))
                    for id in range(len(data.train))
                }
            )
            > 1
        ):
            raise error from None
        return "none", error.wrong, data
    if getattr(options, "unlabelled", None) not in data.classes:
        return "all", "", data
    return "some", "", open_sources(DataPlan(kind=kind, options=options, labels="some"))


def _sample_images(data: Data) -> tuple[int, int, int, int]:
    """Decode training images in random order; return `side`, `sampled`, `damaged` and
    `bits` of `ImageFolder`.
    """
    train, end = data.train, time.monotonic() + SECONDS
    sides, damaged, bits = list[int](), list[str](), 0
    for id in random.Random(0).sample(range(len(train)), min(SAMPLE, len(train))):
        try:
            decoded = train.decode(id)
            sides.append(min(decoded.image.size))
            bits = max(bits, decoded.used)
        except CorruptImage as error:
            damaged.append(error.wrong)
        if time.monotonic() > end:
            break
    if not sides:
        wrong = f"none of {len(damaged)} sampled images can be decoded; {damaged[0]}"
        raise DataError(
            "FOLDER", wrong, "Whole images in formats that kd reads", "Replace them"
        )
    return sorted(sides)[len(sides) // 2], len(sides), len(damaged), bits
