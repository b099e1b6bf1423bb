"""Find the images behind an export's numbers by CRC-32, in any folder."""

from __future__ import annotations

import csv
import io
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import DataError, ModelError, first_sentence
from kd.core.evaluation import Task
from kd.core.host import package_versions
from kd.deploy.export import parity
from kd.deploy.export.claims import IMAGES
from kd.deploy.export.parity import BATCH, Batches
from kd.deploy.predict.image_list import GONE, find
from kd.deploy.serve.limits import Problem
from kd.deploy.verify.comparison import Claims
from kd.files.pixels import decode_rgb, least_of_centre, open_training_image, planes

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
        text = file.read_text(encoding="utf-8")
        lines = list(csv.reader(io.StringIO(text, newline="")))
        if not lines:
            raise ValueError("it is empty")
        return [
            (
                int(file_crc, 16),
                int(pixel_crc, 16),
                names if is_labelled == "1" else None,
            )
            for file_crc, pixel_crc, is_labelled, *names in lines
        ]
    except (csv.Error, ValueError) as error:
        raise ModelError(
            f"export.{file.name}",
            f"is no list of images ({error})",
            "",
            "Export it anew",
        ) from error


def _evaluation_crop(file: bytes, entry: Mapping[str, Any]) -> np.ndarray:
    """Return evaluation's crop of an image file, uint8 [3, S, S].

    `entry`: `input` of the manifest.
    """
    size = entry["size"]
    crop = entry["crop"]
    least = partial(least_of_centre, size=size, crop=crop)
    with open_training_image(file) as image:
        rgb, _ = decode_rgb(image, least, entry.get("margin", 0), entry.get("bits", 16))
    return planes(rgb, size, crop)


@dataclass(frozen=True, slots=True)
class ListedImages:
    """The images of an export below `--data`."""

    lines: Sequence[ListedImage]
    content: Callable[[int], bytes]  # (id) -> content of a file
    ids: Mapping[int, Sequence[int]]  # of the files with a CRC-32
    total: int  # number of files below `--data`

    @staticmethod
    def locate(source: str, lines: Sequence[ListedImage], copies: Path) -> ListedImages:
        """Find the listed images of an export below `--data`."""
        try:
            images = find(source, copies)
        except DataError as error:
            raise DataError(
                "--data", error.wrong, error.allowed, error.remedy
            ) from error
        ids: dict[int, list[int]] = {crc: [] for crc, *_ in lines}
        unread = 0
        for id in range(len(images.names)):
            try:
                ids.get(zlib.crc32(images.content(id)), []).append(id)
            except (*GONE, Problem):
                unread += 1
        present = sum(bool(ids[crc]) for crc, *_ in lines)
        if present < len(lines):
            wrong = (
                f"'{source}' holds {present} of the {len(lines)} images behind the"
                " export's numbers"
            )
            if unread:
                wrong += f"; files there that cannot be read: {unread}"
            raise DataError(
                "--data",
                wrong,
                "All of them, among any others",
                "Name the run's validation images",
            )
        return ListedImages(lines, images.content, ids, len(images.names))

    def batches(
        self, entry: Mapping[str, Any], labels: Sequence[str], task: Task
    ) -> Batches:
        """Yield the images as the export decoded them, with its labels."""
        for first in range(0, len(self.lines), BATCH):
            lines = self.lines[first : first + BATCH]
            crcs, _, names = zip(*lines, strict=True)
            if task.logits == "sigmoid":
                sets = [
                    [
                        -1 if image_labels is None else int(label in image_labels)
                        for label in labels
                    ]
                    for image_labels in names
                ]
                truth = np.array(sets, np.int8)
            else:
                truth = np.array(
                    [
                        -1 if image_labels is None else labels.index(image_labels[0])
                        for image_labels in names
                    ]
                )
            try:
                crops = [self._crop(line, entry) for line in lines]
            except OSError as error:  # of a format that Pillow cannot read here
                wrong = (
                    "an image of the export cannot be decoded here"
                    f" ({first_sentence(error)})"
                )
                remedy = "Install the decoders that the export had"
                raise DataError("--data", wrong, "", remedy) from error
            yield np.stack(crops), truth, crcs

    def _crop(self, line: ListedImage, entry: Mapping[str, Any]) -> np.ndarray:
        """Return the crop of the file with the listed pixels, else of the first file.

        Files may share one CRC-32, as PNGs of noise do.
        """
        file_crc, pixel_crc, _ = line
        crops = []
        for id in self.ids[file_crc][:MOST_ALIKE]:
            crops.append(_evaluation_crop(self.content(id), entry))
            if zlib.crc32(crops[-1].tobytes()) == pixel_crc:
                return crops[-1]
        return crops[0]

    def repeated(self, claims: Claims) -> bool:
        """Return whether images are listed more often than they are there."""
        counts = Counter(crc for crc, *_ in self.lines)
        excess = sum(count > len(self.ids[crc]) for crc, count in counts.items())
        claims.claimed["images.csv"]["times"] = "0 too often"
        claims.add_evidence(IMAGES, {"images.csv": {"times": f"{excess} too often"}})
        return excess > 0

    def compare_pixels(
        self, claims: Claims, image_crcs: Sequence[tuple[int, int]]
    ) -> None:
        """Compare pixels with the recorded ones, and count images.

        `image_crcs`: of each image's file and pixels.
        """
        claimed = claims.claimed
        count = len(self.lines)
        same = sum(
            line[1] == pixels
            for line, (_, pixels) in zip(self.lines, image_crcs, strict=True)
        )
        pillow = claimed["environment"]["packages"]["pillow"]
        if same == count or package_versions("pillow")["pillow"] == pillow:
            entry = claimed["input"]
            keys = {"size", "crop", "margin", "bits"} & entry.keys()
            wrong = f"{count - same} of {count} images have other pixels"
            remade = {key: entry[key] if same == count else wrong for key in keys}
            claims.add_evidence(IMAGES, {"input": remade})
        claims.reasons["images.csv/choice"] = (
            f"{count} of {self.total} images below --data; --run shows which, and their"
            " labels"
        )
