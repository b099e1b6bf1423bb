"""Shared by the datasets: decoding to RGB, classes from labels, and compact listings."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from PIL import UnidentifiedImageError

from kd.core.errors import CorruptImage, DataError, did_you_mean, in_short
from kd.core.facts import DatasetFacts
from kd.core.text import class_order, nfc
from kd.core.types import Decoded, Label
from kd.files import pixels
from kd.files.pixels import AVIF, FORMATS, HEIF, MAX_BYTES, Least, boxed
from kd.files.storage import REMEDY, retried

ENDINGS = tuple(f".{ending}".encode() for ending in (*pixels.ENDINGS, *["avif"] * AVIF, *["heic", "heif"] * HEIF))
"""Endings of image files."""
PILLOW_HEIF = "pillow-heif reads them: pip install 'PATH/kd[heic]'"
READ_BY: dict[str, str] = {".heic": PILLOW_HEIF, ".heif": PILLOW_HEIF, ".avif": "Pillow 11.3 or later reads them"}
"""Remedies for endings that may be unreadable here."""
BLOCK = 128  # names per compressed block
MOST_CLASSES = 1_000_000  # limit of numeric labels; a larger one is a date or an article number
MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"II*\0", b"MM\0*", b"BM")  # TIFF and BMP last


def read(content: Callable[[], bytes], subject: str, where: str, remedy: str = REMEDY) -> bytes:
    """Read an image file, with retries if the storage fails."""
    allowed = "Every listed file can be read; data.on_corrupt=skip is for damaged images only"
    return retried(content, subject, where, allowed=allowed, remedy=remedy)


def read_file(path: str | bytes, subject: str, where: str) -> bytes:

    def content() -> bytes:
        with open(path, "rb") as file:
            check_bytes(os.fstat(file.fileno()).st_size, subject, where)
            return file.read()

    return read(content, subject, where)


def check_bytes(size: int, subject: str, where: str) -> None:
    if size > MAX_BYTES:
        raise refuse(subject, where, f"it has {size} bytes, more than the limit of {MAX_BYTES}")


def decode(data: bytes, subject: str, where: str, least: Least | None = None, bits: int = 16) -> Decoded:
    """Decode an image file to upright RGB, 8 bits per channel; also return the CRC-32 of its bytes."""
    # `kd.files.pixels` defines the conversion to RGB. Not handled: damage that leaves a JPEG decodable. `subject`: the
    # file's name in messages, "file 'apple/1.jpg'"; `least`, `bits`: see `kd.files.pixels.load`.
    if not data:
        raise refuse(subject, where, "it is empty (0 bytes)")
    try:
        # Pillow warns about broken EXIF and odd palettes of fine images. catch_warnings changes a global and is not
        # thread-safe: two threads here may leave the filter in place, so it silences only Pillow, and no result depends
        # on it.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            with pixels.open_training_image(data) as image:
                rgb, used = pixels.load(image, least, bits=bits)
                return Decoded(rgb, zlib.crc32(data), used, image.format or "", len(data))
    except UnidentifiedImageError as error:
        if data[4:8] == b"ftyp":
            kind = ".avif" if boxed(data) == "AVIF" else ".heic"
            raise refuse(subject, where, f"its content is {kind} ({READ_BY[kind]}), or damaged") from error
        if data.startswith(MAGIC):
            raise refuse(subject, where, "the image is truncated or damaged in its first bytes") from error
        raise refuse(subject, where, f"it is not an image (it begins with {data[:16]!r})") from error
    except pixels.Beyond as error:
        raise refuse(subject, where, f"the image is beyond a limit: it {error}") from error
    except MemoryError:
        raise  # an error of the machine, not of the image
    except Exception as error:  # Pillow's parsers raise errors of any type on damaged data
        detail = in_short(error)
        verb = "is truncated" if "truncated" in detail.lower() or isinstance(error, EOFError) else "cannot be decoded"
        raise refuse(subject, where, f"the image {verb} ({detail})") from error


def refuse(subject: str, where: str, wrong: str) -> CorruptImage:
    allowed = f"Allowed: whole images in {', '.join(FORMATS[:-1])} or {FORMATS[-1]} format"
    return CorruptImage(where, f"{subject}: {wrong}", allowed, "Replace or delete it, or set data.on_corrupt=skip")


class Names:
    """Names in compressed blocks: 4 to 20 bytes each, instead of 100 or more as objects."""

    # Every forked worker would also copy a list of strings page by page, since reading an element writes its reference
    # count. Reading one name takes some microseconds, names in a row less than one each.

    def __init__(self, names: Iterable[bytes]) -> None:
        packed, self._starts, self._count, self.size = bytearray(), array("q", [0]), 0, 0
        names = iter(names)
        while block := [*islice(names, BLOCK)]:
            joined = b"\0".join(block)  # file names have no zero byte
            packed += zlib.compress(joined, 1)
            self._starts.append(len(packed))
            self._count += len(block)
            self.size += len(joined) + bool(self.size)
        self._packed, self._last = bytes(packed), (-1, [b""])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, id: int) -> bytes:
        block, position = divmod(id, BLOCK)
        number, names = self._last
        if block != number:
            names = self._joined(block).split(b"\0")
            self._last = block, names
        return names[position]

    def __iter__(self) -> Iterator[bytes]:
        for block in range(len(self._starts) - 1):
            yield from self._joined(block).split(b"\0")

    def joined(self) -> Iterator[bytes]:  # all names, separated by zero bytes, in pieces of `size` bytes
        for block in range(len(self._starts) - 1):
            yield b"\0" * bool(block) + self._joined(block)

    def _joined(self, block: int) -> bytes:
        return zlib.decompress(memoryview(self._packed)[self._starts[block] : self._starts[block + 1]])


class Repeated(NamedTuple):
    """One text per image, such as its class name, when many images share it."""

    texts: list[str]  # distinct texts
    of: np.ndarray  # index of each image's text, int32 [N]

    @classmethod
    def of_each(cls, texts: Iterable[str]) -> Repeated:
        position: dict[str, int] = {}
        of = np.fromiter((position.setdefault(text, len(position)) for text in texts), np.int32)
        return cls([*position], of)


def name_labels(raw: Repeated, names: Sequence[str]) -> tuple[Repeated, list[str]]:
    """Return the class name of each image and all classes in order, from labels as written; "": unlabelled."""
    # Integers are positions in `names`, the class names in order; if `names` is empty, they are names themselves.
    raw = as_classes(raw._replace(texts=[nfc(text) for text in raw.texts]), "data.label_key")
    names, distinct = [nfc(name) for name in names], {*raw.texts} - {""}
    integers = {text: int(text) for text in distinct if re.fullmatch(r"-?[0-9]{1,18}", text)}
    if names:
        name_of = {text: names[value] for text, value in integers.items() if 0 <= value < len(names)}
        order = list(names)
    elif len(integers) == len(distinct):
        name_of = {text: str(value) for text, value in integers.items()}
        most = max(integers.values(), default=-1)
        if most >= MOST_CLASSES:
            wrong, allowed = f"an image has the label {most}", f"Numbers below {MOST_CLASSES}: each is a class"
            raise DataError("data.label_key", wrong, allowed, "Write names, or choose the key that holds the class")
        order = [str(value) for value in range(most + 1)]
    else:
        name_of, order = {}, class_order(distinct)
    return raw._replace(texts=[name_of.get(text, text) for text in raw.texts]), order


WHOLE, BROKEN = re.compile(r"(-?[0-9]+)[.,]0*"), re.compile(r"-?[0-9]*[.,][0-9]*[1-9][0-9]*")  # numbers with a fraction


def as_classes(raw: Repeated, where: str) -> Repeated:
    """Return labels as written (1.0 as 1 if all are numbers); refuse fractions, which are measurements."""
    numbers = [text for text in raw.texts if text]
    if not all(WHOLE.fullmatch(text) or BROKEN.fullmatch(text) or re.fullmatch("-?[0-9]+", text) for text in numbers):
        return raw
    if broken := [text for text in numbers if BROKEN.fullmatch(text)]:
        wrong = f"{len(broken)} labels are numbers with a fraction, such as {min(broken)}: kd classifies"
        remedy = "Choose the column of the classes, or write a name for each range of numbers, such as low and high"
        raise DataError(where, wrong, "Names of classes, or whole numbers", remedy)
    return raw._replace(texts=[WHOLE.sub(r"\1", text) for text in raw.texts])


def label_images(
    names: Repeated, own: Sequence[str], classes: Sequence[str] | None, where: str, split: str, labels: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class order and the label of each image, int32 [N]; -1: unlabelled."""
    # `names`: class name of each image, "" if unlabelled; `own`: this split's classes in order. Training's `classes`
    # are used instead; None for the training split itself.
    if not len(names.of):
        raise DataError(where, f"the split '{split}' has no images", "At least one image", "Check the path")
    if labels == "none":
        return (), np.full(len(names.of), -1, np.int32)
    names = names._replace(texts=[nfc(name) for name in names.texts])
    labelled = {name for name in names.texts if name or labels == "all"}
    if not labelled:
        remedy = "Label some, or set data.labels=none"
        raise DataError(where, f"the split '{split}' has no labelled image", "data.labels=some", remedy)
    order = tuple(own if classes is None else classes)
    if len(order) < 2:
        wrong = f"the split '{split}' has only one class, '{next(iter(order), '')}'"
        remedy = "Point it at the folder or table that holds all classes"
        raise DataError(where, wrong, "A classifier needs at least two classes", remedy)
    position = {name: i for i, name in enumerate(order)}
    unknown = sorted(labelled - set(position))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        whose = "listed" if classes is None else "of training"
        wrong = f"the split '{split}' has the class '{unknown[0]}'{more}, which is not among the {len(order)} classes "
        remedy = did_you_mean(unknown[0], order) or "Rename or remove it"
        raise DataError(where, wrong + whose, f"Allowed: {first_few(order)}", remedy)
    return order, np.array([position[name] if name in labelled else -1 for name in names.texts], np.int32)[names.of]


def label_sets(
    rows: Sequence[Collection[str] | None], order: Sequence[str], where: str, subjects: Sequence[object]
) -> np.ndarray:
    """Return the sets as int8 [N, C] of 0 and 1; -1 for None, an image without a label."""
    position = {name: i for i, name in enumerate(order)}
    sets = np.zeros((len(rows), len(order)), np.int8)
    for row, labels, subject in zip(sets, rows, subjects, strict=True):
        if unknown := sorted({*(labels or ())} - {*position}):
            wrong = f"{subject} has the label '{unknown[0]}', which no training image has"
            remedy = did_you_mean(unknown[0], order) or "Rename it"
            raise DataError(where, wrong, f"Allowed: {first_few(order)}", remedy)
        row[:] = -(labels is None)
        row[[position[label] for label in labels or ()]] = 1
    return sets


MOST_KINDS = 6  # endings named in a line


def left_out(other: Counter[str], noun: str = "file", remedy: str = "") -> list[str]:
    """Return a line that counts unread files or shard members by ending; nothing if all are read."""
    if not other:
        return []
    words = []
    for ending, count in other.most_common(MOST_KINDS):
        by = READ_BY.get(ending.lower(), "")
        words.append(f"{count} {ending or 'without an ending'}" + (f" ({by})" if by else ""))
    more = f" and {len(other) - MOST_KINDS} kinds more" if len(other) > MOST_KINDS else ""
    count = other.total()
    are = "is" if count == 1 else "are"
    return [f"{count} {noun}{'s' * (count > 1)} {are} not read: {', '.join(words)}{more}{remedy}"]


def first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def facts_of(options: Any, test: str, label: str = "class") -> DatasetFacts:
    """Return the facts of options whose key of the test split is `test`."""
    return DatasetFacts(label=label, root=getattr(options, "root", ""), test=test if getattr(options, test) else "")


class Listed:
    """A listing of existing images; base of all sources of files. See `kd.core.contracts.Source`."""

    where: str  # config path for errors
    noun = "image"  # an image in errors
    bits = 16  # `data.bits`
    groups: Repeated | None = None  # of each image, by `data.group`

    def __init__(
        self, classes: Sequence[str], names: Names, labels: np.ndarray, sizes: np.ndarray, stamps: np.ndarray
    ) -> None:
        """Store the listing in order; labels: one class each, or sets, int8 [N, C].

        The fingerprint is equal for equal listings on every machine. It has the sizes of files and not their times: a
        copy of the data is the same data.
        """
        self.classes, self._labels, self.sizes, self._stamps = tuple(classes), labels, sizes, stamps
        self.names = names
        digest = hashlib.sha256()
        title = "\0".join(classes).encode("utf-8", "surrogatepass")
        arrays = [np.ascontiguousarray(labels, "<i4").reshape(-1), np.ascontiguousarray(sizes, "<i8").reshape(-1)]
        columns = ((one.nbytes, [one.data]) for one in arrays)
        for length, pieces in ((len(title), [title]), (names.size, names.joined()), *columns):
            digest.update(length.to_bytes(8, "little"))
            for piece in pieces:
                digest.update(piece)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, id: int) -> Label:
        return int(self._labels[id]) if self._labels.ndim == 1 else self._labels[id]

    def stamp(self, id: int) -> int:
        return int(self._stamps[id])

    def decode(self, id: int) -> Decoded:
        return self.decode_reduced(id, None)

    def decode_reduced(self, id: int, least: Least | None) -> Decoded:
        return decode(self.encoded(id), self.subject(id), self.where, least, self.bits)

    def encoded(self, id: int) -> bytes:
        raise NotImplementedError

    def name(self, id: int) -> str:
        return text(self.names[id])

    def group(self, id: int) -> str:
        return self.groups.texts[self.groups.of[id]] if self.groups else self.name(id)

    def subject(self, id: int) -> str:
        return f"{self.noun} '{self.name(id)}'"

    def prepare(self) -> None: ...


def stamp(status: os.stat_result) -> int:
    """Return 64 bits that change with a file's times; see `kd.core.contracts.Stamped`."""
    # A copy may keep mtime, but nothing keeps ctime; some file systems lack it.
    return (status.st_mtime_ns + 3 * status.st_ctime_ns) % 2**64


def text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")  # a name in another encoding must be printable
