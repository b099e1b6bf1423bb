"""WebDataset shards (.tar) with random access and no unpacking. Remote shards are
copied first.

The package webdataset is not used: it streams, but distillation reads images by id (for
stored outputs and the sifter). The shards are indexed once; an image is then one read
at a known offset.
"""

import json
import os
import re
import tarfile
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kd.core.errors import DataError
from kd.core.facts import DatasetFacts
from kd.core.keys import Keys, file_key, keys
from kd.core.text import nfc
from kd.files.folders import count_unread
from kd.files.shards import (
    Shard,
    find_shards,
    members,
    origins,
    read_bytes,
    read_member,
)
from kd.parts.datasets._classes import as_classes, name_labels
from kd.parts.datasets._columns import Names, Repeated
from kd.parts.datasets._decode import check_bytes
from kd.parts.datasets._decode import read as read_retried
from kd.parts.datasets._source import (
    LabelColumn,
    Listed,
    SplitRequest,
    Storage,
    facts_of,
    source,
    stamp,
)

MAX_LABEL = 2**20  # bytes of a label member
SIDE = (
    "txt",
    "md",
    "json",
    "csv",
    "tsv",
    "yaml",
    "yml",
    "xml",
    "html",
    "pdf",
    "index",
    "idx",
    "license",
    "readme",
)
"""Endings of members that describe the shard, such as a readme; they are not
reported.
"""
REMEDY = (
    "; a key ends at the first dot of a name: write img_4-final.jpg for"
    " img_4.final.jpg, or set data.image_keys"
)


def facts(options: "Options") -> DatasetFacts:
    """Return the dataset's facts."""
    return facts_of(options, "test", "set" if options.label_sets else "class")


@keys
class Options(Keys):
    """Location of the shards, and the members of a sample that are image and label."""

    train: str = file_key()
    """Training shards: a path or URL (`s3://...`) with braces
    (`train-{000000..000009}.tar`) or wildcards (`train-*.tar`).
    """
    val: str = file_key()
    """Validation shards, like `train`."""
    test: str = file_key("")
    """Test shards, like `train`: scored once, at the end of a run, and never used for
    choices. Empty: no test split.
    """
    image_keys: str = "jpg;jpeg;png;webp"
    """Endings of the image members; the first match in a sample is used."""
    label_key: str = "cls"
    """Ending of the label member: an integer or a class name as text, or JSON with
    `label_field`.
    """
    label_field: str = ""
    """The key of the label in the JSON member; empty for a text member."""
    label_sets: bool = False
    """Whether an image has several labels, or none: the label is a JSON list of class
    names or integers.
    """
    class_names: str = file_key("")
    """File of the class names in order, one per line or a JSON list. Labels are such
    names, or positions from 0. Empty: integers are the names, texts are sorted.
    """
    copies: str = "runs/shards"
    """Folder for copies of remote shards. Each is copied once; delete the folder when
    no run needs it.
    """

    def __post_init__(self) -> None:
        for key in ("train", "val"):
            if not getattr(self, key):
                raise ValueError(f"{key} is empty; it must be the path of .tar shards")
        if not _endings(self.image_keys) or not self.label_key:
            raise ValueError(
                "image_keys and label_key must name member endings, such as 'jpg;png'"
                " and 'cls'"
            )
        if self.label_key.lower() in _endings(self.image_keys):
            raise ValueError(
                f"label_key '{self.label_key}' is one of image_keys; they must differ"
            )
        if (
            self.label_key.lower().endswith("json")
            and not self.label_field
            and not self.label_sets
        ):
            raise ValueError(
                f"label_key '{self.label_key}' is JSON and label_field is empty; name"
                " the label's key"
            )


class _Image(NamedTuple):  # only while a shard is read
    key: str
    offset: int
    size: int
    label: str


class _Index:
    """The images of all shards, as columns."""

    def __init__(
        self,
        shards: Sequence[Shard],
        read: Callable[[str], tuple[Sequence[_Image], Counter[str]]],
    ) -> None:
        self.shards = tuple(shard.path for shard in shards)
        origins = [
            os.path.abspath(shard.origin) for shard in shards
        ]  # of URLs too: a title is the part that differs
        common = os.path.commonpath([os.path.dirname(origin) for origin in origins])
        titles = [
            os.path.relpath(origin, common).replace(os.sep, "/") for origin in origins
        ]
        columns = shard_of, offsets, sizes, label_of = (
            array("i"),
            array("q"),
            array("q"),
            array("i"),
        )
        position: dict[str, int] = {}
        unread = Counter[str]()

        def named() -> Iterator[bytes]:
            for number, (path, title) in enumerate(
                zip(self.shards, titles, strict=True)
            ):
                found, other = read(path)
                unread.update(other)
                for image in found:
                    row = (
                        number,
                        image.offset,
                        image.size,
                        position.setdefault(image.label, len(position)),
                    )
                    for column, value in zip(columns, row, strict=True):
                        column.append(value)
                    yield f"{title}/{image.key}".encode("utf-8", "surrogateescape")

        self.names = Names(named())
        self.shard_of, self.offsets, self.sizes = (
            np.asarray(shard_of),
            np.asarray(offsets),
            np.asarray(sizes),
        )
        self.labels = Repeated([*position], np.asarray(label_of))
        self.notes = count_unread(unread, "member", REMEDY)


class Members(Storage):
    """Images at known offsets in tar files."""

    def __init__(self, index: _Index, config_path: str) -> None:
        stamps = np.array([stamp(os.stat(path)) for path in index.shards], np.uint64)[
            index.shard_of
        ]
        super().__init__(index.names, index.sizes, stamps)
        self.config_path, self.notes = config_path, index.notes
        self._shards, self._shard_of, self._offsets = (
            index.shards,
            index.shard_of,
            index.offsets,
        )

    def read(self, row: int) -> bytes:
        shard, offset, size = (
            self._shards[self._shard_of[row]],
            int(self._offsets[row]),
            int(self.sizes[row]),
        )
        check_bytes(size, self.subject(row), self.config_path)
        return read_retried(
            lambda: read_member(shard, offset, size),
            self.subject(row),
            self.config_path,
        )


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> Listed:
    """Index the shards of a split."""
    # Reads every header at each start, ten seconds for 100,000 images, mostly tarfile's
    # parsing. An index file beside the shards would save this but could be stale.
    config_path = f"data.{split}"
    shards = find_shards(getattr(options, split), config_path, options.copies)
    _check_disjoint(options, split, shards)
    index = _Index(
        shards, partial(_index, options=options, config_path=config_path, labels=labels)
    )
    if not len(index.names):
        allowed = f"Members ending in {', '.join(_endings(options.image_keys))}"
        wrong = "; ".join([f"no images in {len(shards)} shards", *index.notes])
        raise DataError(config_path, wrong, allowed, "Set data.image_keys")
    return source(
        Members(index, config_path),
        _labels(index.labels, options),
        SplitRequest(split, classes, labels, config_path),
    )


def _labels(written: Repeated, options: Options) -> LabelColumn:
    names = _class_names(options.class_names) if options.class_names else []
    if options.label_sets:
        sets: list[list[str] | None] = [
            json.loads(text) if text else None for text in written.texts
        ]
        places = _places({*chain(*filter(None, sets))}, names) if names else {}
        named = [
            (
                None
                if labels is None
                else frozenset(places.get(name, name) for name in labels)
            )
            for labels in sets
        ]
        return LabelColumn(written._replace(texts=named), names or None, sets=True)
    if not names:
        return LabelColumn(*name_labels(written, ()))
    composed = as_classes(
        written._replace(texts=[nfc(text) for text in written.texts]), "data.label_key"
    )
    places = _places({*composed.texts}, names)
    return LabelColumn(
        composed._replace(texts=[places.get(text, text) for text in composed.texts]),
        names,
    )


def _check_disjoint(options: Options, split: str, shards: Sequence[Shard]) -> None:
    # Scores on images of training would be too high, and nothing later would reveal it.
    order, own = (
        ("train", "val", "test"),
        {os.path.abspath(shard.origin) for shard in shards},
    )
    for other in order[: order.index(split)]:
        for origin in origins(getattr(options, other), f"data.{other}"):
            if os.path.abspath(origin) in own:
                wrong = f"'{origin}' is also a shard of data.{other}"
                raise DataError(
                    f"data.{split}",
                    wrong,
                    "Shards of one split",
                    "Name each shard in one split",
                )


def _index(
    shard: str, options: Options, config_path: str, labels: str
) -> tuple[list[_Image], Counter[str]]:
    try:
        with open(shard, "rb", buffering=0) as file:
            return _images(file, shard, options, config_path, labels)
    except (OSError, tarfile.TarError) as error:
        remedy = (
            "Unpack it first"
            if shard.endswith(("gz", "bz2", "xz", "zst"))
            else "Copy or write it again"
        )
        wrong = f"the shard '{shard}' cannot be read ({error})"
        raise DataError(
            config_path, wrong, "Whole, uncompressed .tar files", remedy
        ) from error


def _images(
    file: BinaryIO, shard: str, options: Options, config_path: str, labels: str
) -> tuple[list[_Image], Counter[str]]:
    """Return the images of a shard, and the endings of members that belong to
    no image.
    """
    endings, found, other = _endings(options.image_keys), list[_Image](), Counter[str]()
    wanted = {*endings, options.label_key.lower()}
    for key, sample in members(file, shard, config_path, wanted).items():
        image = next((sample[ending] for ending in endings if ending in sample), None)
        label = sample.get(options.label_key.lower()) if labels != "none" else None
        whole = image is not None or label is not None
        other.update(
            f".{ending}"
            for ending in sample
            if ending not in wanted
            and (_hidden(ending, sample, wanted) if whole else ending not in SIDE)
        )
        if not whole:
            continue
        if image is not None and label is None and labels != "all":
            found.append(_Image(key, *image, ""))
            continue
        if image is None or label is None:
            lacks, remedy = (
                ("image", "image_keys") if image is None else ("label", "label_key")
            )
            wrong = (
                f"the sample '{key}' of the shard '{shard}' has no {lacks}. It has:"
                f" {', '.join(sorted(sample))}"
            )
            allowed = f"Image: {', '.join(endings)}. Label: {options.label_key}"
            raise DataError(config_path, wrong, allowed, f"Set data.{remedy}")
        if label[1] > MAX_LABEL:
            wrong = f"the label of '{shard}/{key}' has {label[1]} bytes"
            raise DataError(
                config_path,
                wrong,
                f"At most {MAX_LABEL}",
                "Repair the shard, or set data.label_key",
            )
        found.append(
            _Image(
                key,
                *image,
                _label(
                    read_bytes(file, *label), f"{shard}/{key}", options, config_path
                ),
            )
        )
    return found, other


def _hidden(ending: str, sample: Collection[str], wanted: Collection[str]) -> bool:
    """Return whether members beside an image form another sample, as `b.jpg` and
    `b.cls` do.
    """
    first, _, last = ending.rpartition(".")
    return (
        bool(first)
        and last in wanted
        and sum(f"{first}.{one}" in sample for one in wanted) > 1
    )


def _label(data: bytes, name: str, options: Options, config_path: str) -> str:
    try:
        parsed = options.label_field or options.label_sets
        value: Any = (
            json.loads(data)
            if parsed or data.lstrip()[:1] == b"["
            else data.decode("utf-8-sig").strip()
        )
        value = value[options.label_field] if options.label_field else value
        if (
            options.label_sets
            and isinstance(value, list)
            and all(type(one) in (str, int) for one in value)
        ):
            return json.dumps(sorted({nfc(str(one)) for one in value}))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        wanted = (
            f"JSON with the key '{options.label_field}'"
            if options.label_field
            else "text"
        )
        wanted = (
            "a JSON list" if options.label_sets and not options.label_field else wanted
        )
        wrong = f"the label of '{name}' is {data[:60]!r}"
        raise DataError(
            config_path, wrong, f"Allowed: {wanted}", "Set data.label_field"
        ) from error
    if (
        value == ""
        or isinstance(value, bool)
        or not isinstance(value, str | int)
        or options.label_sets
    ):
        allowed = (
            "A JSON list of names or integers"
            if options.label_sets
            else "An integer or a class name"
        )
        remedy = (
            "Set data.label_sets=true"
            if isinstance(value, list)
            else "Repair the shard"
        )
        raise DataError(
            config_path, f"the label of '{name}' is {value!r}", allowed, remedy
        )
    return str(value)


def _places(texts: Collection[str], names: Sequence[str]) -> dict[str, str]:
    """Return the names of labels that are positions; refuse one that may be another
    class's name.
    """
    name_of = {
        text: names[int(text)]
        for text in texts
        if re.fullmatch("[0-9]{1,9}", text) and int(text) < len(names)
    }
    numbers = {text for text in texts if re.fullmatch("-?[0-9]+", text)}
    named, placed = numbers <= {*names}, numbers <= {*name_of}
    if (
        named == placed
        and not numbers.isdisjoint(names)
        and any(text != name for text, name in name_of.items())
    ):
        text = min(text for text, name in name_of.items() if text != name)
        wrong = (
            f"the label {text} is the position of '{name_of[text]}' and may be a name"
            " in this file"
        )
        allowed = "Labels that are all names or all positions"
        raise DataError(
            "data.class_names", wrong, allowed, "Rename the classes that are numbers"
        )
    return {} if named else name_of


def _class_names(path: str) -> list[str]:
    config_path = "data.class_names"
    try:
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
            text = file.read()
        names = (
            json.loads(text)
            if text.lstrip().startswith(("[", "{"))
            else text.splitlines()
        )
    except (OSError, ValueError) as error:
        raise DataError(
            config_path,
            f"'{path}' cannot be read ({error})",
            "Text or a JSON list",
            "Check the path",
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            config_path,
            f"'{path}' is no list of names",
            "One name a line, or a JSON list of strings",
        )
    names = [nfc(name.strip()) for name in names if name.strip()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        raise DataError(
            config_path,
            f"'{path}' has '{twice[0]}' twice" if twice else f"'{path}' is empty",
            "Each class once",
        )
    return names


def _endings(keys: str) -> list[str]:
    return [key.strip().lower().lstrip(".") for key in keys.split(";") if key.strip()]
