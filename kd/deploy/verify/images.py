"""The images behind an export's numbers, found by the CRC-32 of their files in any folder."""

from __future__ import annotations

import csv
import io
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import DataError, ModelError
from kd.core.evaluation import Task
from kd.core.host import versions
from kd.deploy.export import parity
from kd.deploy.export.parity import BATCH, Batches
from kd.deploy.predict.image_list import GONE, find
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.limits import Problem
from kd.deploy.verify.claims import IMAGES, Claims

Line = tuple[int, int, Sequence[str] | None]
"""CRC-32 of a file and of its pixels, and labels (None: unknown)."""


def lines_of(folder: Path) -> list[Line] | None:
    """Return the images in an export's list; None: it has no list."""
    file = folder / parity.IMAGES
    if not file.is_file():
        return None
    try:
        lines = list(csv.reader(io.StringIO(file.read_text(encoding="utf-8"), newline="")))
        if not lines:
            raise ValueError("it is empty")
        return [(int(a, 16), int(b, 16), names if known == "1" else None) for a, b, known, *names in lines]
    except (csv.Error, ValueError) as error:
        raise ModelError(f"export.{file.name}", f"is no list of images ({error})", "", "Export it anew") from error


@dataclass(frozen=True, slots=True)
class Shown:
    """The images of an export below `--data`."""

    lines: Sequence[Line]
    read: Callable[[int], bytes]  # (CRC-32) -> content
    folders: Mapping[int, Sequence[str]]  # names of the files with a CRC-32
    total: int  # number of files below `--data`

    @staticmethod
    def among(source: str, lines: Sequence[Line], copies: Path) -> Shown:
        """Find the listed images of an export below `--data`."""
        try:
            images = find(source, copies)
        except DataError as error:
            raise DataError("--data", error.wrong, error.allowed, error.remedy) from error
        at: dict[int, list[int]] = {encoded: [] for encoded, *_ in lines}
        unread = 0
        for id in range(len(images.names)):
            try:
                at.get(zlib.crc32(images.content(id)), []).append(id)
            except (*GONE, Problem):
                unread += 1
        there = sum(bool(at[encoded]) for encoded, *_ in lines)
        if there < len(lines):
            wrong = f"'{source}' holds {there} of the {len(lines)} images behind the export's numbers"
            wrong += f"; files there that cannot be read: {unread}" if unread else ""
            raise DataError("--data", wrong, "All of them, among any others", "Name the run's validation images")
        folders = {one: [f"/{images.names[id].rpartition('/')[0]}" for id in ids] for one, ids in at.items()}
        return Shown(lines, lambda encoded: images.content(at[encoded][0]), folders, len(images.names))

    def batches(self, told: Mapping[str, Any], labels: Sequence[str], task: Task) -> Batches:
        """Yield the images as `kd-serve` decodes them, with the export's labels."""
        size, crop, margin, bits = told["size"], told["crop"], told.get("margin", 0), told.get("bits", 16)
        for first in range(0, len(self.lines), BATCH):
            crcs, _, names = zip(*self.lines[first : first + BATCH], strict=True)
            if task.logits == "sigmoid":
                sets = [[-1 if one is None else int(label in one) for label in labels] for one in names]
                truth = np.array(sets, np.int8)
            else:
                truth = np.array([-1 if one is None else labels.index(one[0]) for one in names])
            try:
                files = [prepare(self.read(crc), size, crop, margin=margin, bits=bits) for crc in crcs]
            except Problem as problem:
                raise DataError("--data", f"an image of the export: {problem.detail}") from problem
            yield np.stack([file.pixels for file in files]), truth, crcs

    def show(self, known: Claims, labels: Sequence[str], seen: Sequence[tuple[int, int]]) -> None:
        """Compare pixels with the recorded ones, labels with folder names, and count images."""
        told, count = known.claimed["input"], len(self.lines)
        same = sum(one[1] == pixels for one, (_, pixels) in zip(self.lines, seen, strict=True))
        here, there = versions("pillow")["pillow"], known.claimed["environment"]["packages"]["pillow"]
        keys = ("size", "crop", "margin", "bits")
        if same == count:
            known.show(IMAGES, {"input": {key: told[key] for key in keys if key in told}})
        elif here == there:
            text = f"{count - same} of {count} images have other pixels"
            known.show(IMAGES, {"input": {key: text for key in keys if key in told}})
        known.claimed["images.csv"] |= {"times": "each as often as it is there", "labels": "as folders are named"}
        often = Counter(crc for crc, *_ in self.lines)
        more = sum(times > len(self.folders[crc]) for crc, times in often.items())
        known.show(IMAGES, {"images.csv": {"times": f"{more} more often" if more else "each as often as it is there"}})
        known.reasons["images.csv/choice"] = f"{count} of {self.total} images below --data; --run shows which they are"
        if text := self._against_folders(labels, bool(known.claimed["scores"].get("models", {}).get("student"))):
            known.show(IMAGES, {"images.csv": {"labels": text}})
        unseen = len(set(labels) - {name for *_, names in self.lines for name in names or ()})
        if labels and unseen:
            for what in ("about/labels", "config.json/label_names"):
                known.reasons[what] = f"{unseen} of {len(labels)} classes have no image; --run shows their places"
        else:
            known.show(IMAGES, {"about": {"labels": list(labels)}})
            known.show(IMAGES, {"config.json": {"label_names": list(labels)}} if labels else {})

    def _against_folders(self, labels: Sequence[str], scored: bool) -> str:
        """Compare labels with folder names; "" if no folder has a class's name, or no image has a label.

        Images without a label are an error if the student is `scored` against labels.
        """
        inside = {crc: {name for one in folders for name in labels if one.endswith(f"/{name}")}
                  for crc, folders in self.folders.items()}  # fmt: skip
        named = [(one, inside[crc]) for crc, _, one in self.lines if inside[crc] and (one is None or len(one) == 1)]
        if not named or (not scored and all(one is None for *_, one in self.lines)):
            return ""
        other = sum(one is None or one[0] not in folders for one, folders in named)
        return f"{other} of {len(named)} otherwise, or unknown" if other else "as folders are named"
