"""A store is a Source that wraps another Source and decodes each image once.

It keeps decoded pixels, on disk or in memory.

Also `StoredViews`, a store of repeated views.

One file per split, one record per image (`Records`): width, height, CRC of the encoded
bytes, then uint8 RGB. The first process that decodes an image writes its record, in any
worker of any rank of any run. All would write the same bytes, so no process waits for
another. An image is decoded again if its record is not whole or its file's times have
changed: the store's identity has only names and sizes, and a file may be replaced by
one of the same size.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image, features

from kd.core.contracts import Source, Stamped
from kd.core.errors import CorruptImage, DataError, RunError
from kd.core.types import Decoded, Label, Loading, Sample
from kd.data.subset import decode_image
from kd.data.views import EvalTransform, Views
from kd.files.pixels import least_of_random
from kd.files.records import Records, Stop, record_bytes
from kd.files.storage import log, on_disk, open_folder

FORMAT = 5  # raised with every change of a record; a store of another format is rebuilt
# width, height, the CRC-32 of the encoded bytes, and the file's stamp
HEAD = struct.Struct("<IIIQ")
# the CRC-32 of the encoded bytes, and lam; then the partner's label and the pixels
VIEW = struct.Struct("<Id")
WHERE = "data.store"
PIXELS = "pixels"  # name of the file in a store's folder
LONGEST = 4.0  # largest aspect at which every image fits into its slot


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Shrink a training image to the pixels that a random crop can need."""

    # Every random crop has at least `size` pixels per side. A smaller image is stored
    # as it is.

    size: int  # side of the smallest crop, pixels
    crop: float
    """Smallest share of the area in a random crop; 1.0: no random crop, the shorter
    side becomes `size`.
    """

    @property
    def max_pixels(self) -> int:
        """Pixels of a slot: enough for any image up to 4 times as long as wide."""
        pixels = max(LONGEST, 4 / 3 / self.crop) * self.size**2
        # both sides are rounded up
        return math.ceil(pixels + 2 * math.sqrt(LONGEST * pixels)) + 1

    def __call__(self, image: Image.Image) -> Image.Image:
        factor = self.least(*image.size)
        if factor >= 1.0:
            return image
        sides = math.ceil(factor * image.width), math.ceil(factor * image.height)
        return image.resize(sides, Image.Resampling.BICUBIC, reducing_gap=3.0)

    def least(self, width: int, height: int) -> float:
        return least_of_random(width, height, self.size, self.crop)


class StoredImage(NamedTuple):
    """An image was read from a store."""

    image: Image.Image
    crc: int  # CRC-32 of the encoded bytes that it was decoded from
    stamp: int  # stamp of its file; see `kd.core.contracts.Stamped`


class Slots:
    """An open file has one record per image, for this process and its forks.

    Others open its `path`, if it has one.
    """

    def __init__(
        self, file: int, pixels: int, name: str, path: Path | None = None
    ) -> None:
        self.pixels = pixels
        self.path = path
        stop = Stop(
            f"{WHERE}: {name}",
            "Stored images are used; the others are decoded each time.",
        )
        self.records = Records(file, HEAD.size + 3 * pixels, stop, align=mmap.PAGESIZE)

    def read(self, id: int) -> StoredImage | None:
        content = self.records.read(id)
        if content is None:
            return None
        width, height, crc, stamp = HEAD.unpack_from(content)
        pixels: Any = memoryview(content)[HEAD.size :]
        return StoredImage(Image.frombytes("RGB", (width, height), pixels), crc, stamp)

    def write(self, id: int, slot: StoredImage) -> None:
        head = HEAD.pack(*slot.image.size, slot.crc, slot.stamp)
        self.records.write(id, head + slot.image.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:  # spawned workers, as on macOS, inherit no memory
            wrong = "is ram, but worker processes do not inherit memory on this system"
            remedy = "Set data.store=disk or data.workers=0"
            raise DataError(WHERE, wrong, "none, disk", remedy)
        return _open_slots, (self.path, self.pixels)


def slot_bytes(pixels: int) -> int:
    """Return the bytes of a slot in the file.

    It has whole pages, so that no two images share a page.
    """
    return record_bytes(HEAD.size + 3 * pixels, mmap.PAGESIZE)


class Stored:
    """This source decodes images once and stores them as training needs them.

    See `kd.core.contracts.Source`.
    """

    # `decode` returns `keep(image)`, equal from a slot or just decoded; without slots
    # nothing is stored. Two kinds are not stored: undecodable images, which raise as
    # before, and long images (over 4 : 1) with more pixels than a slot. If the source
    # is not `Stamped`, only `refresh` notices a file replaced by one of the same size,
    # in a sample.

    def __init__(
        self, source: Source, keep: Shrunk | EvalTransform, slots: Slots | None = None
    ) -> None:
        self.source = source
        self.keep = keep
        self.slots = slots
        self.classes: Sequence[str] = source.classes
        self.fingerprint = source.fingerprint
        self._stamped = source if isinstance(source, Stamped) else None
        # A byte per image: 1 if its file was compared with the slot in this run. The
        # last byte: warned once. Forked workers share it. Hosts with copies of the data
        # may share a store, but not the file times.
        self._same = mmap.mmap(-1, len(source) + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.source, self.keep, self.slots)

    def __len__(self) -> int:
        return len(self.source)

    def label(self, id: int) -> Label:
        return self.source.label(id)

    def name(self, id: int) -> str:
        return self.source.name(id)

    def prepare(self) -> None:
        self.source.prepare()

    def decode(self, id: int) -> Decoded:
        stamp = self._stamped.stamp(id) if self._stamped is not None else 0
        slot = self.slots.read(id) if self.slots is not None else None
        if slot is None or (slot.stamp != stamp and not self._same[id]):
            image, crc = decode_image(self.source, id, self.keep.least)[:2]
            if slot is not None:
                self._same[id] = crc == slot.crc
                if not self._same[id] and not self._same[len(self)]:  # warn once
                    self._same[len(self)] = 1
                    text = (
                        "%s: '%s' has changed since it was decoded; it and all others"
                        " that have are decoded again"
                    )
                    log.warning(text, WHERE, self.name(id))
            slot = StoredImage(self.keep(image), crc, stamp)
            if self.slots is not None:
                self.slots.write(id, slot)
        return Decoded(slot.image, slot.crc)

    def refresh(self, ids: Iterable[int]) -> int:
        """Read some images again and return how many have changed."""
        # If one sampled file has changed, others may have: the whole store is cleared.
        # Files with stamps are compared as they are used.
        if self.slots is None or self._stamped is not None:
            return 0
        changed = 0
        for id in ids:
            stored = self.slots.read(id)
            if stored is not None and stored.crc:
                # training will decode it, and data.on_corrupt decides
                with suppress(CorruptImage):
                    changed += self.source.decode(id).crc not in (0, stored.crc)
        if changed:
            self.slots.records.clear()
        return changed


def identity(source: Source, split: str, rule: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the stored pixels depend on, by name; JSON values."""
    decoders = {
        name: features.version(name)
        for name in ("jpg", "libjpeg_turbo", "webp", "zlib")
    }
    return {
        "format": FORMAT,
        "data": source.fingerprint,
        "split": split,
        "images": len(source),
        "kept": rule,
        "pillow": PIL.__version__,
        "decoders": decoders,
    }


def open_disk(folder: Path, made_from: dict[str, Any], pixels: int) -> Slots:
    """Open or create the store in a folder made from an `identity`.

    Images have at most `pixels`.
    """
    open_folder(folder, made_from, WHERE)
    return _open_slots(folder / PIXELS, pixels)


def open_ram(pixels: int, name: str) -> Slots:
    """Store images in memory for this process and its future forks.

    Memory grows with each stored image.
    """
    return Slots(_memory_file(name), pixels, f"the store of {name} images in memory")


def _memory_file(name: str) -> int:
    # An anonymous file: containers limit /dev/shm to 64 MB, and writing to a full one
    # ends in SIGBUS.
    make = getattr(os, "memfd_create", None)
    if make is None:
        wrong = "is in memory, which needs Linux"
        raise RunError(WHERE, wrong, "none, disk", "Set data.store=disk")
    return make(f"kd-{name}")


def _open_slots(path: Path, pixels: int) -> Slots:
    with on_disk(path, WHERE):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    return Slots(file, pixels, f"'{path}'", path)


class StoredViews:
    """This dataset keeps the first `number` views of each image in memory.

    See `kd.core.contracts.Dataset`.
    """

    # For this process and its forks. A sample is equal whether it is read or made. An
    # image that changes during the job keeps its views. Undecodable images are not
    # stored.

    def __init__(self, views: Views, number: int) -> None:
        self.views = views
        self.number = number
        self.classes = views.classes
        self.size = views.size
        self.small = None
        if views.small is not None:
            self.small = StoredViews(views.small, number)
        stop = Stop(
            f"{WHERE}: the store of views",
            "Stored views are used; the others are made each time.",
        )
        self.records = Records(_memory_file("views"), view_bytes(views), stop)

    @property
    def spent(self) -> Loading:
        return self.views.spent

    def __len__(self) -> int:
        return len(self.views)

    def load(self, id: int, view: int) -> Sample:
        if view >= self.number:
            return self.views.load(id, view)
        place = view * len(self) + id
        content = self.records.read(place)
        if content is None:
            sample = self.views.load(id, view)
            if sample.readable:
                partner = np.asarray(sample.partner_label)
                head = VIEW.pack(sample.crc, sample.lam) + partner.tobytes()
                self.records.write(place, head + sample.pixels.numpy().tobytes())
            return sample
        label = self.views.source.label(id)
        crc, lam = VIEW.unpack_from(content)
        like = np.asarray(label)
        partner = np.frombuffer(content, like.dtype, like.size, VIEW.size)
        pixels = torch.frombuffer(
            bytearray(content), dtype=torch.uint8, offset=VIEW.size + like.nbytes
        )
        partner_label = partner.copy() if like.ndim else int(partner[0])
        return Sample(
            pixels.view(3, self.size, self.size), label, partner_label, lam, crc=crc
        )


def view_bytes(views: Views) -> int:
    """Return the largest size of a stored view, bytes, without its record's head."""
    return VIEW.size + np.asarray(views.source.label(0)).nbytes + 3 * views.size**2
