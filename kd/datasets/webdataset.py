"""Local WebDataset shards (.tar), read by position: any image at any time, with no unpacking.

The package webdataset is not needed: it streams, while distillation asks for images by id (the teacher's stored
answers and the sifter both do). The shards are indexed once, and an image is one read at a known offset.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from kd.datasets._decode import Names, decode, fingerprint, label_images, name_labels, retried
from kd.errors import DataError, did_you_mean
from kd.types import Decoded

BLOCK = 512
"""Bytes of a tar block; headers and contents begin on its multiples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Where the shards lie and which members of a sample are the image and the label."""

    train: str
    """Training shards: a path with braces (`shards/train-{000000..000009}.tar`) or wildcards (`shards/train-*.tar`)."""
    val: str
    """Validation shards, like `train`."""
    image_keys: str = "jpg;jpeg;png;webp"
    """Endings of the image members; the first of them that a sample has is taken."""
    label_key: str = "cls"
    """Ending of the label member: an integer or a class name as text, or JSON with `label_field`."""
    label_field: str = ""
    """The key of the label in the JSON member; empty for a text member."""
    class_names: str = ""
    """File of the class names in order, one a line or a JSON list. Empty: integers are the names, or text is sorted."""

    def __post_init__(self) -> None:
        for key in ("train", "val"):
            if not getattr(self, key):
                raise ValueError(f"{key} is empty; it must be the path of .tar shards")
        if not _endings(self.image_keys) or not self.label_key:
            raise ValueError("image_keys and label_key must name member endings, such as 'jpg;png' and 'cls'")
        if self.label_key.lower() in _endings(self.image_keys):
            raise ValueError(f"label_key '{self.label_key}' is one of image_keys; they must differ")
        if self.label_key.lower().endswith("json") and not self.label_field:
            raise ValueError(
                f"label_key '{self.label_key}' is JSON and label_field is empty; set the label's key in it"
            )


@dataclass(frozen=True, slots=True)
class _Image:
    """One line of the index; only while it is built."""

    key: str
    offset: int
    size: int
    label: str


class WebDataset:
    """Images at known offsets in tar files."""

    def __init__(
        self,
        shards: Sequence[str],
        shard_of: np.ndarray,
        images: Sequence[_Image],
        labels: np.ndarray,
        classes: Sequence[str],
        where: str,
    ) -> None:
        self.classes = tuple(classes)
        self._shards, self._shard_of, self._labels, self._where = tuple(shards), shard_of, labels, where
        common = os.path.commonpath([os.path.dirname(os.path.abspath(shard)) for shard in shards])
        titles = [os.path.relpath(os.path.abspath(shard), common).replace(os.sep, "/") for shard in shards]
        self._names = Names(
            [
                f"{titles[shard]}/{image.key}".encode("utf-8", "surrogateescape")
                for shard, image in zip(shard_of, images, strict=True)
            ]
        )
        self._offsets = np.fromiter((image.offset for image in images), np.int64, len(images))
        self._sizes = np.fromiter((image.size for image in images), np.int64, len(images))
        self.fingerprint = fingerprint(self.classes, self._names.buffer, labels, self._sizes)

    def __len__(self) -> int:
        return len(self._names)

    def label(self, id: int) -> int:
        """Return the label of one image."""
        return int(self._labels[id])

    def name(self, id: int) -> str:
        """Return shard and key, `train-000000.tar/0001`."""
        return self._names[id].decode("utf-8", "backslashreplace")

    def prepare(self) -> None:
        """Do nothing: the images are there."""

    def decode(self, id: int) -> Decoded:
        """Return one image as RGB, 8 bits a channel.

        The shard is opened for each read, which costs some microseconds beside milliseconds of decoding. An open file
        kept in the object would have to survive threads, forks, pickling and the limit on open files.

        Raises:
            CorruptImage: the member is no whole image.
            DataError: the shard is gone, cannot be read, or is shorter than it was.
        """
        subject = f"image '{self.name(id)}'"
        return decode(retried(lambda: self._content(id), subject, self._where), subject, self._where)

    def _content(self, id: int) -> bytes:
        size, shard = int(self._sizes[id]), self._shards[self._shard_of[id]]
        with open(shard, "rb", buffering=0) as file:
            data = _read(file, int(self._offsets[id]), size)
        if len(data) < size:
            raise OSError(errno.EIO, f"the shard '{shard}' has become shorter since it was indexed")
        return data


def build(options: Options, split: str, classes: Sequence[str] | None, labels: str = "all") -> WebDataset:
    """Index the shards of a split.

    Reads every header at every start, some ten seconds for 100,000 images: tarfile's parsing, not the disk. An index
    file beside the shards would save that and could be stale.

    Raises:
        DataError: no such shard, a shard that is cut short, a sample without label, a class unknown to training.
    """
    where = f"data.{split}"
    shards = _shards(getattr(options, split), where)
    shard_of: list[int] = []
    images: list[_Image] = []
    for number, shard in enumerate(shards):
        found = _index(shard, options, where, labels)
        images.extend(found)
        shard_of.extend([number] * len(found))
    if not images:
        raise DataError(
            where,
            f"no images in {len(shards)} shards",
            f"Members ending in {', '.join(_endings(options.image_keys))}",
            "Set data.image_keys",
        )
    names = _class_names(options.class_names) if options.class_names else []
    found_names, known = name_labels([image.label for image in images], names)
    order, label = label_images(found_names, [name for name in known if name], classes, where, split, labels)
    return WebDataset(shards, np.asarray(shard_of, np.int32), images, label, order, where)


def _shards(pattern: str, where: str) -> list[str]:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://|pipe:", pattern):
        raise DataError(
            where, f"'{pattern}' is remote", "Local .tar files", "Download the shards or mount the bucket first"
        )
    shards: dict[str, None] = {}
    missing: list[str] = []
    for path in _expand_braces(os.path.expanduser(pattern)):
        matches = sorted(glob.glob(path)) if glob.has_magic(path) else [path] * os.path.isfile(path)
        shards.update(dict.fromkeys(matches))
        missing.extend([] if matches else [path])
    if not missing:
        return list(shards)
    folder = os.path.dirname(missing[0]) or "."
    files = os.listdir(folder) if os.path.isdir(folder) else []
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    remedy = did_you_mean(os.path.basename(missing[0]), files) or "Check the path and the range in the braces"
    raise DataError(where, f"no shard '{missing[0]}'{more}", "A path with braces or wildcards", remedy)


def _expand_braces(pattern: str) -> list[str]:
    """Expand `{000..009}` and `{a,b}`; braces within braces are not handled."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    if match[3] is not None:
        choices = match[3].split(",")
    else:
        first, last = int(match[1]), int(match[2])
        width = max(len(match[1]), len(match[2])) if match[1].startswith("0") or match[2].startswith("0") else 0
        step = 1 if first <= last else -1
        choices = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    head, tails = pattern[: match.start()], _expand_braces(pattern[match.end() :])
    return [head + choice + tail for choice in choices for tail in tails]


def _index(shard: str, options: Options, where: str, labels: str) -> list[_Image]:
    """Return the images of a shard in its order, each with its label as written."""
    try:
        with open(shard, "rb", buffering=0) as file:
            samples = _members(file, shard, where)
            return _pair(file, samples, shard, options, where, labels)
    except (OSError, tarfile.TarError) as error:
        remedy = "Unpack it first" if shard.endswith(("gz", "bz2", "xz", "zst")) else "Copy or write it again"
        raise DataError(
            where, f"the shard '{shard}' cannot be read ({error})", "Whole, uncompressed .tar files", remedy
        ) from error


def _members(file: BinaryIO, shard: str, where: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return offset and size of every member, by key and ending."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    end = 0
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            size = member.size if member.isreg() else 0
            end = member.offset_data + -(-size // BLOCK) * BLOCK
            folder, _, base = member.name.rpartition("/")
            key, _, ending = base.partition(".")  # WebDataset's rule: the key ends at the first dot of the file name
            if not key or not ending or member.isdir():
                continue
            key, ending = f"{folder}/{key}" if folder else key, ending.lower()
            if not member.isreg() or member.sparse is not None:
                raise DataError(
                    where, f"'{member.name}' in the shard '{shard}' is a link", "Plain files", "Write it anew"
                )
            sample = samples.setdefault(key, {})
            if ending in sample:
                raise DataError(where, f"the shard '{shard}' has '{member.name}' twice", "", "Write it anew")
            sample[ending] = (member.offset_data, size)
    # tarfile takes a damaged or missing header for the end, and so would lose the images behind it in silence.
    if _read(file, end, BLOCK) != bytes(BLOCK):
        raise DataError(
            where,
            f"the shard '{shard}' is cut short or damaged at byte {end}",
            "Whole .tar files, which end with empty blocks",
            "Copy or write it again",
        )
    return samples


def _pair(
    file: BinaryIO,
    samples: dict[str, dict[str, tuple[int, int]]],
    shard: str,
    options: Options,
    where: str,
    labels: str,
) -> list[_Image]:
    endings, images = _endings(options.image_keys), []
    for key, members in samples.items():
        image = next((members[ending] for ending in endings if ending in members), None)
        label = members.get(options.label_key.lower()) if labels != "none" else None
        if image is None and label is None:
            continue  # a readme or a manifest
        if image is not None and label is None and labels != "all":
            images.append(_Image(key, *image, ""))
            continue
        if image is None or label is None:
            lacks, remedy = ("image", "image_keys") if image is None else ("label", "label_key")
            raise DataError(
                where,
                f"the sample '{key}' of the shard '{shard}' has no {lacks}. It has: {', '.join(sorted(members))}",
                f"Image: {', '.join(endings)}. Label: {options.label_key}",
                f"Set data.{remedy}",
            )
        images.append(_Image(key, *image, _label(_read(file, *label), f"{shard}/{key}", options, where)))
    return images


def _label(data: bytes, name: str, options: Options, where: str) -> str:
    try:
        value = json.loads(data)[options.label_field] if options.label_field else data.decode().strip()
    except (ValueError, KeyError, TypeError) as error:
        wanted = f"JSON with the key '{options.label_field}'" if options.label_field else "text"
        raise DataError(
            where, f"the label of '{name}' is {data[:60]!r}", f"Allowed: {wanted}", "Set data.label_field"
        ) from error
    if value == "" or isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(where, f"the label of '{name}' is {value!r}", "An integer or a class name", "Repair the shard")
    return str(value)


def _class_names(path: str) -> list[str]:
    where = "data.class_names"
    try:
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
            text = file.read()
        names = json.loads(text) if text.lstrip().startswith(("[", "{")) else text.splitlines()
    except (OSError, ValueError) as error:
        raise DataError(where, f"'{path}' cannot be read ({error})", "Text or a JSON list", "Check the path") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(where, f"'{path}' is no list of names", "One name a line, or a JSON list of strings")
    names = [name.strip() for name in names if name.strip()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        raise DataError(where, f"'{path}' has '{twice[0]}' twice" if twice else f"'{path}' is empty", "Each class once")
    return names


def _endings(keys: str) -> list[str]:
    return [key.strip().lower().lstrip(".") for key in keys.split(";") if key.strip()]


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    parts = []
    while size > 0 and (part := file.read(size)):  # an unbuffered read may return less than asked
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
