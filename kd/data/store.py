"""Decode once: a Source that keeps decoded pixels, on a disk or in memory, in front of one that decodes.

One sparse file a split, one slot of a fixed length an image: a header, then uint8 RGB. Whoever decodes an image first
writes its slot: any worker of any rank of any run. All would write the same bytes, so nobody waits for anybody. A slot
that was never written, or torn by a crash, fails its checksum and its image is decoded (again).

Reads are of mapped pages, which all workers share; writes are calls, so that a full disk is an error and no signal.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
import uuid
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
from PIL import Image, features

from kd.contracts import Source
from kd.errors import DataError, RunError
from kd.pixels import centre_crop

FORMAT = 1
HEADER = struct.Struct("<III")
"""Width, height, checksum."""
PIXELS = "pixels"
"""Name of the file in a store's folder."""
LONGEST = 4.0
"""Longer side by shorter side up to which every image finds room in its slot."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What is kept of a training image: all of it, shrunk until only what training can see is left.

    No random crop of it has less than `size` pixels a side. A crop (`kd.data.transforms.random_box`) has at least the
    share `crop` of the area and, unless a side of the image stops it, a side ratio of at most 4 : 3. So its shorter
    side is no less than sqrt(3/4 crop W H), or than the shorter side of the image. Both stay at `size` or above where

        factor = max(size / min(W, H), size / sqrt(3/4 crop W H))

    which leaves 4/3 size^2 / crop pixels of a photograph, whatever its shape. An image is never enlarged: one that is
    not larger than that is kept as it is.
    """

    size: int
    """Side of the smallest crop, pixels."""
    crop: float
    """Smallest share of the area that a random crop keeps; 1.0: no random crop, the shorter side becomes `size`."""

    @property
    def most(self) -> int:
        """Pixels that a slot has room for: any image up to 4 times as long as wide."""
        pixels = max(LONGEST, 4 / 3 / self.crop) * self.size**2
        return math.ceil(pixels + 2 * math.sqrt(LONGEST * pixels)) + 1  # both sides are rounded up

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the RGB image itself, or a smaller one (bicubic)."""
        width, height = image.size
        factor = self.size / min(width, height)
        if self.crop < 1.0:
            factor = max(factor, self.size / math.sqrt(0.75 * self.crop * width * height))
        if factor >= 1.0:
            return image
        sides = math.ceil(factor * width), math.ceil(factor * height)
        return image.resize(sides, Image.Resampling.BICUBIC, reducing_gap=3.0)


@dataclass(frozen=True, slots=True)
class Cropped:
    """What is kept of a validation image: evaluation's centre crop, the very pixels that the models see."""

    size: int
    crop: float

    @property
    def most(self) -> int:
        """Pixels that a slot has room for."""
        return self.size**2

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return an RGB image of `size` x `size`."""
        return centre_crop(image, self.size, self.crop)


class Slots:
    """A file of one slot an image, read as mapped pages by every process that inherits it."""

    def __init__(self, file: int, count: int, pixels: int, name: str, path: Path | None = None) -> None:
        """Take over an open file and make it long enough, with holes that take no room.

        Args:
            file: descriptor, open for reading and writing; closed with this object.
            count: how many slots.
            pixels: room of a slot.
            name: what a person would call it, for messages.
            path: where it can be opened again; None where it has no name.

        Raises:
            RunError: the file system cannot hold a file of that length.
        """
        self.count, self.room, self.name, self.path = count, 3 * pixels, name, path
        self.stride = slot_bytes(pixels)
        self._file = file
        self._close = weakref.finalize(self, os.close, file)
        length = count * self.stride
        try:
            if os.fstat(file).st_size < length:
                os.ftruncate(file, length)
            self._pixels = memoryview(mmap.mmap(file, length, access=mmap.ACCESS_READ))
        except (OSError, ValueError, OverflowError) as error:
            remedy = "Choose a run.folder on another file system, or set data.store=none"
            wrong = f"{name} cannot become a file of {length / 2**30:.0f} GiB, most of it holes ({error})"
            raise RunError("data.store", wrong, "", remedy) from error
        self._stopped = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the workers: one of them says it, all of them stop

    def read(self, id: int) -> Image.Image | None:
        """Return the image of a slot as RGB, or None where the slot is not whole."""
        start = id * self.stride
        width, height, checksum = HEADER.unpack_from(self._pixels, start)
        length = 3 * width * height
        if not 0 < length <= self.room:
            return None
        start += HEADER.size
        pixels = self._pixels[start : start + length]
        if _checksum(id, width, height, pixels) != checksum:
            return None
        return Image.frombytes("RGB", (width, height), pixels)  # type: ignore[arg-type]

    def write(self, id: int, image: Image.Image) -> None:
        """Write a slot, in one call. Where the disk is full, say so once and keep no more; what is kept stays good."""
        pixels = image.tobytes()
        if self._stopped[0] or len(pixels) > self.room:
            return
        record = HEADER.pack(*image.size, _checksum(id, *image.size, pixels)) + pixels
        try:
            reason = "it is full" if os.pwrite(self._file, record, id * self.stride) < len(record) else ""
        except OSError as error:
            reason = error.strerror or str(error)
        if reason and not self._stopped[0]:
            self._stopped[0] = 1
            told = (
                f"{self.name} takes no more ({reason}). What it holds is used, the other images are decoded each time"
            )
            print(f"data.store: {told}.", file=sys.stderr, flush=True)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:  # workers that are started anew, as on macOS, inherit no memory
            wrong = "is ram, but worker processes do not inherit memory on this system"
            raise DataError("data.store", wrong, "none, disk", "Set data.store=disk or data.workers=0")
        return _reopened, (self.path, self.count, self.room // 3)


def slot_bytes(pixels: int) -> int:
    """Return what so many pixels take in a slot: whole pages, so that no two slots share one."""
    return -(-(HEADER.size + 3 * pixels) // mmap.PAGESIZE) * mmap.PAGESIZE


def _checksum(id: int, width: int, height: int, pixels: bytes | memoryview) -> int:
    """Return the CRC-32 of a slot's content, seeded with its place: an image in another's slot is not whole."""
    return zlib.crc32(pixels, zlib.crc32(b"%d:%d:%d" % (id, width, height)))


class Stored:
    """A source whose images are decoded once and kept as far as training needs them. See `kd.contracts.Source`.

    An image is the same whether it comes out of its slot or has just been decoded. What cannot be decoded raises as
    before and is not kept. Not kept either: images over 4 times as long as wide that have more pixels than a slot.
    Not noticed: a file that was replaced under its name after it was kept, where the listing's fingerprint is equal.
    """

    def __init__(self, source: Source, keep: Callable[[Image.Image], Image.Image], slots: Slots | None = None) -> None:
        """Put slots before a source.

        Args:
            source: decodes.
            keep: what is kept of a decoded image.
            slots: where; None: nowhere, the pixels are the same.
        """
        self.source, self.keep, self.slots = source, keep, slots
        self.classes: Sequence[str] = source.classes
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def label(self, id: int) -> int:
        """Return the label of one image."""
        return self.source.label(id)

    def name(self, id: int) -> str:
        """Return what a person would call this image."""
        return self.source.name(id)

    def prepare(self) -> None:
        """Make the images exist."""
        self.source.prepare()

    def decode(self, id: int) -> Image.Image:
        """Return what is kept of an image, RGB.

        Raises:
            DataError: it is not kept and cannot be decoded.
        """
        image = self.slots.read(id) if self.slots is not None else None
        if image is None:
            image = self.keep(self.source.decode(id))
            if self.slots is not None:
                self.slots.write(id, image)
        return image


def identity(source: Source, split: str, rule: dict[str, Any]) -> dict[str, Any]:
    """Return all that the kept pixels depend on, by name; JSON values."""
    decoders = {name: features.version(name) for name in ("jpg", "libjpeg_turbo", "webp", "zlib")}
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
    """Open the slots of a folder, or begin them. Any number of processes may do so at the same time.

    Args:
        folder: named by a hash of `made_from`, so that only runs with the same come to it.
        made_from: see `identity`.
        pixels: room of a slot.

    Raises:
        RunError: the folder cannot be written, or its manifest is damaged.
    """
    file, text = folder / "manifest.json", json.dumps(made_from, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            draft = folder / f".manifest.{uuid.uuid4().hex}"
            with draft.open("w", encoding="utf-8") as writing:
                writing.write(text)
                writing.flush()
                os.fsync(writing.fileno())
            os.replace(draft, file)
        found = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        wrong = f"cannot write '{folder}' ({error.strerror or error})"
        raise RunError("data.store", wrong, "", "Choose a run.folder that you may write, with room") from error
    if found != text:
        wrong = f"'{file}' is damaged: it does not say what its folder is named after"
        raise RunError("data.store", wrong, "", f"Remove the folder '{folder}'; it is filled again as training goes")
    return _reopened(folder / PIXELS, made_from["images"], pixels)


def open_ram(count: int, pixels: int, name: str) -> Slots:
    """Make slots in memory, for this process and the workers that it will fork; they take room as they are filled.

    A file without a name rather than one in /dev/shm, which containers keep at 64 MB and which ends in SIGBUS.

    Raises:
        RunError: this system has no such files.
    """
    make = getattr(os, "memfd_create", None)
    if make is None:
        raise RunError("data.store", "is ram, which needs Linux", "none, disk", "Set data.store=disk")
    return Slots(make(f"kd-{name}"), count, pixels, f"the store of {name} images in memory")


def _reopened(path: Path, count: int, pixels: int) -> Slots:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        wrong = f"cannot write '{path}' ({error.strerror or error})"
        raise RunError("data.store", wrong, "", "Choose a run.folder that you may write") from error
    return Slots(file, count, pixels, f"'{path}'", path)
