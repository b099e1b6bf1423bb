"""Inspect a folder of images: its layout, its labels, and a sample of its images."""

import posixpath
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from kd.core.errors import CorruptImage, DataError
from kd.parts import registry
from kd.setup.data import Data, open_sources
from kd.setup.data_plan import DataPlan

SAMPLE = 200  # most images of a sample: `kd init` takes ten seconds in all
SECONDS = 2.5  # most seconds for decoding them
ANY = "imagefolder"  # accepts any folder, so it is tried last
Keys = dict[str, Any]  # keys of a section, `kind` first


class ImageFolder(NamedTuple):
    """The findings on a folder of images."""

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
        facts = registry.facts("datasets", plan.kind, plan.options, "FOLDER")
        return facts.label == "set"


def inspect_folder(folder: Path) -> ImageFolder:
    """Find the layout of a folder, list its images, and decode a sample of them."""
    if not folder.is_dir():
        wrong = f"'{folder}' " + ("is a file" if folder.exists() else "does not exist")
        remedy = "Unpack the archive, or check the path"
        raise DataError("FOLDER", wrong, "A folder of images", remedy)
    try:
        keys = _recognize_layout(folder)
        labelled, why, data = _open_splits(**keys)
        labels = data.labels()
        if labels.ndim == 2:
            counts = (labels > 0).sum(0).tolist()
        else:
            counts = labels[labels >= 0].bincount().tolist()
        return ImageFolder(keys, labelled, why, data, counts, *_sample_images(data))
    except OSError as error:
        wrong = f"'{error.filename}' cannot be read ({error.strerror})"
        raise DataError("FOLDER", wrong, "", "Check its rights") from error
    except DataError as error:
        raise DataError("FOLDER", error.wrong, error.allowed, error.remedy) from error


def _recognize_layout(folder: Path) -> Keys:
    """Return the keys of the kind of data that recognizes a folder."""
    for kind in sorted(registry.names("datasets"), key=lambda name: name == ANY):
        dataset: Any = registry.find("datasets", kind, "FOLDER")
        keys = dataset.recognizes(folder) if hasattr(dataset, "recognizes") else None
        if keys is not None:
            return {"kind": kind, **keys}
    raise AssertionError(ANY)


def _open_splits(kind: str, **keys: Any) -> tuple[str, str, Data]:
    """Open the splits, and return `data.labels` with its reason, and the data.

    Fewer than two classes mean that the images are unlabelled.
    """
    options = registry.default_options("datasets", kind, **keys)
    try:
        data = open_sources(DataPlan(kind=kind, options=options))
    except DataError as error:
        if kind != ANY:
            raise
        data = open_sources(DataPlan(kind=kind, options=options, labels="none"))
        train = data.train
        folders = {posixpath.dirname(train.name(id)) for id in range(len(train))}
        if len(folders) > 1:
            raise error from None
        return "none", error.wrong, data
    if getattr(options, "unlabelled", None) not in data.classes:
        return "all", "", data
    return "some", "", open_sources(DataPlan(kind=kind, options=options, labels="some"))


def _sample_images(data: Data) -> tuple[int, int, int, int]:
    """Return side, number, damaged number and bits of randomly sampled images."""
    train = data.train
    end = time.monotonic() + SECONDS
    sides: list[int] = []
    faults: list[str] = []
    bits = 0
    for id in random.Random(0).sample(range(len(train)), min(SAMPLE, len(train))):
        try:
            decoded = train.decode(id)
            sides.append(min(decoded.image.size))
            bits = max(bits, decoded.used_bits)
        except CorruptImage as error:
            faults.append(error.wrong)
        if time.monotonic() > end:
            break
    if not sides:
        wrong = f"none of {len(faults)} sampled images can be decoded; {faults[0]}"
        allowed = "Whole images in formats that kd reads"
        raise DataError("FOLDER", wrong, allowed, "Replace them")
    return sorted(sides)[len(sides) // 2], len(sides), len(faults), bits
