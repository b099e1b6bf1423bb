"""The images that the numbers of an export are of, found by the CRC-32 of their files wherever they lie."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kd.core.errors import DataError, ModelError
from kd.core.evaluation import Task
from kd.core.host import versions
from kd.deploy.export.parity import BATCH, IMAGES, Batches
from kd.deploy.predict.image_list import GONE, find
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.limits import LOCAL, Problem
from kd.deploy.serve.model import Description
from kd.deploy.verify.claims import Claims


@dataclass(frozen=True, slots=True)
class Shown:
    """The images that the numbers are of: CRC-32 of file and pixels, labels (None: unknown), content, folders."""

    rows: Sequence[tuple[int, int, Sequence[str] | None]]
    read: Callable[[int], bytes]  # (CRC-32) -> content
    folders: Mapping[int, Sequence[str]]  # of the files with a CRC-32

    @staticmethod
    def among(source: str, folder: Path, copies: Path) -> Shown:
        """Find the images that an export lists, wherever they lie."""
        file = folder / IMAGES
        lines = list(csv.reader(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []
        if not lines:
            wrong = f"'{folder}' does not say which images its numbers are of: it has no {IMAGES}"
            raise ModelError("export", wrong, "", "Export it anew, from images that lie in files")
        rows = [(int(a, 16), int(b, 16), names if known == "1" else None) for a, b, known, *names in lines]
        try:
            images = find(source, copies)
        except DataError as error:
            raise DataError("--data", error.wrong, error.allowed, error.remedy) from error
        at: dict[int, list[int]] = {encoded: [] for encoded, *_ in rows}
        unread = 0
        for id in range(len(images.names)):
            try:
                at.get(zlib.crc32(images.content(id)), []).append(id)
            except (*GONE, Problem):
                unread += 1
        there = sum(bool(at[encoded]) for encoded, *_ in rows)
        if there < len(rows):
            wrong = f"'{source}' holds {there} of the {len(rows)} images that the export's numbers are of"
            wrong += f"; files there that cannot be read: {unread}" if unread else ""
            raise DataError("--data", wrong, "All of them, among any others", "Name the run's validation images")
        folders = {one: [f"/{images.names[id].rpartition('/')[0]}" for id in ids] for one, ids in at.items()}
        return Shown(rows, lambda encoded: images.content(at[encoded][0]), folders)

    def batches(self, export: Description, task: Task) -> Batches:
        """Yield the images as `kd-serve` decodes them, with the labels that the export has for them."""
        labels = export.labels
        for first in range(0, len(self.rows), BATCH):
            crcs, _, names = zip(*self.rows[first : first + BATCH], strict=True)
            if task.logits == "sigmoid":
                sets = [[-1 if one is None else int(label in one) for label in labels] for one in names]
                truth = np.array(sets, np.int8)
            else:
                truth = np.array([-1 if one is None else labels.index(one[0]) for one in names])
            try:
                seen = export.size, export.crop, LOCAL, export.margin, export.bits
                files = [prepare(self.read(crc), *seen) for crc in crcs]
            except Problem as problem:
                raise DataError("--data", f"an image of the export: {problem.detail}") from problem
            yield np.stack([file.pixels for file in files]), truth, crcs

    def compare(self, known: Claims, export: Description, seen: Sequence[tuple[int, int]]) -> None:
        """Compare pixels with those that were recorded, and labels with the names of folders."""
        same = sum(one[1] == pixels for one, (_, pixels) in zip(self.rows, seen, strict=True))
        pillow = versions("pillow")["pillow"] == known.manifest["environment"]["packages"]["pillow"]
        text = f"{same} of {len(self.rows)} images have the pixels"
        right = same == len(self.rows) or (False if pillow else None)
        claimed = f"{export.size}, {export.crop:g}, {export.margin:g}"
        known.add("preprocessing: size, crop, margin", claimed, text, right)
        told = [(one, {name for folder in self.folders[crc] for name in export.labels if folder.endswith(f"/{name}")})
                for crc, _, one in self.rows if one is not None and len(one) == 1]  # fmt: skip
        told = [(one, inside) for one, inside in told if inside]
        agree = sum(one[0] in inside for one, inside in told)
        text = f"{agree} of {len(told)} as their folders are named"
        known.add("labels", f"of {len(self.rows)} images", text, agree == len(told) if told else None)
