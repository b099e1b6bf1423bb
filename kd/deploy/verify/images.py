"""The images behind an export's numbers, found by the CRC-32 of their files in any
folder.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import DataError, ModelError, in_short
from kd.core.evaluation import Task
from kd.core.host import versions
from kd.deploy.export import parity
from kd.deploy.export.claims import IMAGES
from kd.deploy.export.parity import BATCH, Batches
from kd.deploy.predict.image_list import GONE, find
from kd.deploy.serve.limits import Problem
from kd.deploy.verify.comparison import Claims
from kd.files.pixels import least_of_centre, load, open_training_image, planes

# files with one CRC-32 that are looked at; of 4,000 PNGs of noise 112 share one with
# another
MOST_ALIKE = 8
ListedImage = tuple[int, int, Sequence[str] | None]
"""CRC-32 of a file and of its pixels, and labels (None: unknown)."""


def read_image_list(folder: Path) -> list[ListedImage] | None:
    """Return the images in an export's list; None: it has no list."""
    file = folder / parity.IMAGES
    if not file.is_file():
        return None
    try:
        lines = list(
            csv.reader(io.StringIO(file.read_text(encoding="utf-8"), newline=""))
        )
        if not lines:
            raise ValueError("it is empty")
        return [
            (int(a, 16), int(b, 16), names if known == "1" else None)
            for a, b, known, *names in lines
        ]
    except (csv.Error, ValueError) as error:
        raise ModelError(
            f"export.{file.name}",
            f"is no list of images ({error})",
            "",
            "Export it anew",
        ) from error


def _cropped(file: bytes, told: Mapping[str, Any]) -> np.ndarray:
    """Return evaluation's crop of an image file, uint8 [3, S, S]; `told`: `input` of
    the manifest.
    """
    size, crop, margin, bits = (
        told["size"],
        told["crop"],
        told.get("margin", 0),
        told.get("bits", 16),
    )
    with open_training_image(file) as image:
        rgb, _ = load(
            image, partial(least_of_centre, size=size, crop=crop), margin, bits
        )
    return planes(rgb, size, crop)


@dataclass(frozen=True, slots=True)
class ListedImages:
    """The images of an export below `--data`."""

    lines: Sequence[ListedImage]
    read: Callable[[int], Iterator[bytes]]  # (CRC-32) -> contents of its files
    files: Mapping[int, int]  # number of files with a CRC-32
    total: int  # number of files below `--data`

    @staticmethod
    def among(source: str, lines: Sequence[ListedImage], copies: Path) -> ListedImages:
        """Find the listed images of an export below `--data`."""
        try:
            images = find(source, copies)
        except DataError as error:
            raise DataError(
                "--data", error.wrong, error.allowed, error.remedy
            ) from error
        at: dict[int, list[int]] = {encoded: [] for encoded, *_ in lines}
        unread = 0
        for id in range(len(images.names)):
            try:
                at.get(zlib.crc32(images.content(id)), []).append(id)
            except (*GONE, Problem):
                unread += 1
        there = sum(bool(at[encoded]) for encoded, *_ in lines)
        if there < len(lines):
            wrong = (
                f"'{source}' holds {there} of the {len(lines)} images behind the"
                " export's numbers"
            )
            wrong += f"; files there that cannot be read: {unread}" if unread else ""
            raise DataError(
                "--data",
                wrong,
                "All of them, among any others",
                "Name the run's validation images",
            )
        files = {crc: len(ids) for crc, ids in at.items()}
        return ListedImages(
            lines,
            lambda crc: map(images.content, at[crc][:MOST_ALIKE]),
            files,
            len(images.names),
        )

    def batches(
        self, told: Mapping[str, Any], labels: Sequence[str], task: Task
    ) -> Batches:
        """Yield the images as the export decoded them, with its labels."""
        for first in range(0, len(self.lines), BATCH):
            lines = self.lines[first : first + BATCH]
            crcs, _, names = zip(*lines, strict=True)
            if task.logits == "sigmoid":
                sets = [
                    [-1 if one is None else int(label in one) for label in labels]
                    for one in names
                ]
                truth = np.array(sets, np.int8)
            else:
                truth = np.array(
                    [-1 if one is None else labels.index(one[0]) for one in names]
                )
            try:
                crops = [self._crop(line, told) for line in lines]
            except OSError as error:  # of a format that Pillow cannot read here
                wrong = (
                    f"an image of the export cannot be decoded here ({in_short(error)})"
                )
                raise DataError(
                    "--data", wrong, "", "Install the decoders that the export had"
                ) from error
            yield np.stack(crops), truth, crcs

    def _crop(self, line: ListedImage, told: Mapping[str, Any]) -> np.ndarray:
        """Return an image's crop: of files with one CRC-32, as PNGs of noise may have,
        that with its pixels.
        """
        crops = (_cropped(content, told) for content in self.read(line[0]))
        first = next(crops)
        return next(
            (
                crop
                for crop in chain([first], crops)
                if zlib.crc32(crop.tobytes()) == line[1]
            ),
            first,
        )

    def repeated(self, known: Claims) -> bool:
        """Return whether images are listed more often than they are there."""
        listed = Counter(crc for crc, *_ in self.lines)
        more = sum(times > self.files[crc] for crc, times in listed.items())
        known.claimed["images.csv"]["times"] = "0 too often"
        known.show(IMAGES, {"images.csv": {"times": f"{more} too often"}})
        return more > 0

    def show(self, known: Claims, seen: Sequence[tuple[int, int]]) -> None:
        """Compare pixels with the recorded ones, and count images."""
        claimed, count = known.claimed, len(self.lines)
        same = sum(
            line[1] == pixels
            for line, (_, pixels) in zip(self.lines, seen, strict=True)
        )
        here, there = (
            versions("pillow")["pillow"],
            claimed["environment"]["packages"]["pillow"],
        )
        if same == count or here == there:
            wrong = f"{count - same} of {count} images have other pixels"
            keys = {"size", "crop", "margin", "bits"} & claimed["input"].keys()
            known.show(
                IMAGES,
                {
                    "input": {
                        key: claimed["input"][key] if same == count else wrong
                        for key in keys
                    }
                },
            )
        known.reasons["images.csv/choice"] = (
            f"{count} of {self.total} images below --data; --run shows which, and their"
            " labels"
        )
