"""Read WebDataset shards (.tar) with random access and no unpacking.

Remote shards are copied first. The package webdataset is not used: it streams, but
distillation reads images by id (for stored outputs and the sifter). The shards are
indexed once; an image is then one read at a known offset.
"""

import json
import os
import re
import tarfile
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
from kd.parts.datasets._columns import Categorical, Names
from kd.parts.datasets._decode import check_file_size, read_retried
from kd.parts.datasets._source import (
    ImageSource,
    LabelColumn,
    SplitRequest,
    Storage,
    dataset_facts,
    file_stamp,
    source,
)

MAX_LABEL = 2**20  # bytes of a label member
SIDE_ENDINGS = (
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
KEY_NOTE = (
    "; a key ends at the first dot of a name: write img_4-final.jpg for"
    " img_4.final.jpg, or set data.image_keys"
)


def facts(options: "Options") -> DatasetFacts:
    """Return the dataset's facts."""
    return dataset_facts(options, "test", "set" if options.label_sets else "class")


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


class Members(Storage):
    """Read images at known offsets in tar files."""

    def __init__(
        self,
        names: Names,
        sizes: np.ndarray,
        shards: Sequence[str],
        shard_of: np.ndarray,
        offsets: np.ndarray,
        config_path: str,
    ) -> None:
        stamps = np.array([file_stamp(os.stat(path)) for path in shards], np.uint64)
        super().__init__(names, sizes, stamps[shard_of])
        self.config_path = config_path
        self._shards = shards
        self._shard_of = shard_of
        self._offsets = offsets

    def read(self, row: int) -> bytes:
        shard = self._shards[int(self._shard_of[row])]
        offset = int(self._offsets[row])
        size = int(self.sizes[row])
        subject = self.subject(row)
        check_file_size(size, subject, self.config_path)
        return read_retried(
            lambda: read_member(shard, offset, size), subject, self.config_path
        )


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> ImageSource:
    """Index the shards of a split."""
    # Reads every header at each start, ten seconds for 100,000 images, mostly tarfile's
    # parsing. An index file beside the shards would save this but could be stale.
    config_path = f"data.{split}"
    shards = find_shards(getattr(options, split), config_path, options.copies)
    _check_disjoint(options, split, shards)
    storage, written = _index_shards(shards, options, config_path, labels)
    if not len(storage.names):
        allowed = f"Members ending in {', '.join(_endings(options.image_keys))}"
        wrong = "; ".join([f"no images in {len(shards)} shards", *storage.notes])
        raise DataError(config_path, wrong, allowed, "Set data.image_keys")
    return source(
        storage,
        _to_label_column(written, options),
        SplitRequest(split, classes, labels, config_path),
    )


def _index_shards(
    shards: Sequence[Shard], options: Options, config_path: str, labels: str
) -> tuple[Members, Categorical]:
    """Return the images of all shards, and their labels as written."""
    paths = tuple(shard.path for shard in shards)
    # of URLs too: a title is the part that differs
    origin_paths = [os.path.abspath(shard.origin) for shard in shards]
    common = os.path.commonpath([os.path.dirname(origin) for origin in origin_paths])
    shard_of = array("i")
    offsets = array("q")
    sizes = array("q")
    codes = array("i")
    code_of: dict[str, int] = {}
    unread_endings = Counter[str]()

    def read_names() -> Iterator[bytes]:
        for number, (path, origin) in enumerate(zip(paths, origin_paths, strict=True)):
            title = os.path.relpath(origin, common).replace(os.sep, "/")
            images, unread = _read_shard(path, options, config_path, labels)
            unread_endings.update(unread)
            for image in images:
                shard_of.append(number)
                offsets.append(image.offset)
                sizes.append(image.size)
                codes.append(code_of.setdefault(image.label, len(code_of)))
                yield f"{title}/{image.key}".encode("utf-8", "surrogateescape")

    storage = Members(
        Names(read_names()),
        np.asarray(sizes),
        paths,
        np.asarray(shard_of),
        np.asarray(offsets),
        config_path,
    )
    storage.notes = count_unread(unread_endings, "member", KEY_NOTE)
    return storage, Categorical([*code_of], np.asarray(codes))


def _to_label_column(written: Categorical, options: Options) -> LabelColumn:
    names = _read_class_names(options.class_names) if options.class_names else []
    if options.label_sets:
        lists: list[list[str] | None] = [
            json.loads(text) if text else None for text in written.categories
        ]
        texts = {text for labels in lists for text in labels or ()}
        name_of = _names_by_position(texts, names) if names else {}
        sets = [
            labels
            if labels is None
            else frozenset(name_of.get(text, text) for text in labels)
            for labels in lists
        ]
        return LabelColumn(written._replace(categories=sets), names or None, sets=True)
    if not names:
        return LabelColumn(*name_labels(written, ()))
    composed = written._replace(categories=[nfc(text) for text in written.categories])
    texts = as_classes(composed, "data.label_key").categories
    name_of = _names_by_position(texts, names)
    named = [name_of.get(text, text) for text in texts]
    return LabelColumn(written._replace(categories=named), names)


def _check_disjoint(options: Options, split: str, shards: Sequence[Shard]) -> None:
    # Scores on images of training would be too high, and nothing later would reveal it.
    splits = ("train", "val", "test")
    paths = {os.path.abspath(shard.origin) for shard in shards}
    for earlier in splits[: splits.index(split)]:
        for origin in origins(getattr(options, earlier), f"data.{earlier}"):
            if os.path.abspath(origin) in paths:
                raise DataError(
                    f"data.{split}",
                    f"'{origin}' is also a shard of data.{earlier}",
                    "Shards of one split",
                    "Name each shard in one split",
                )


def _read_shard(
    shard: str, options: Options, config_path: str, labels: str
) -> tuple[list[_Image], Counter[str]]:
    try:
        with open(shard, "rb", buffering=0) as file:
            return _list_samples(file, shard, options, config_path, labels)
    except (OSError, tarfile.TarError) as error:
        compressed = shard.endswith(("gz", "bz2", "xz", "zst"))
        remedy = "Unpack it first" if compressed else "Copy or write it again"
        wrong = f"the shard '{shard}' cannot be read ({error})"
        raise DataError(
            config_path, wrong, "Whole, uncompressed .tar files", remedy
        ) from error


def _list_samples(
    file: BinaryIO, shard: str, options: Options, config_path: str, labels: str
) -> tuple[list[_Image], Counter[str]]:
    """Return the images of a shard, and the endings of members that belong to none."""
    endings = _endings(options.image_keys)
    read_endings = {*endings, options.label_key.lower()}
    images = list[_Image]()
    unread = Counter[str]()
    for key, sample in members(file, shard, config_path, read_endings).items():
        image = next((sample[ending] for ending in endings if ending in sample), None)
        label = sample.get(options.label_key.lower()) if labels != "none" else None
        side_endings = [ending for ending in sample if ending not in read_endings]
        if image is None and label is None:
            unread.update(
                f".{ending}" for ending in side_endings if ending not in SIDE_ENDINGS
            )
            continue
        unread.update(
            f".{ending}"
            for ending in side_endings
            if _is_other_sample(ending, sample, read_endings)
        )
        if image is not None and label is None and labels != "all":
            images.append(_Image(key, *image, ""))
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
            raise DataError(
                config_path,
                f"the label of '{shard}/{key}' has {label[1]} bytes",
                f"At most {MAX_LABEL}",
                "Repair the shard, or set data.label_key",
            )
        text = _read_label(
            read_bytes(file, *label), f"{shard}/{key}", options, config_path
        )
        images.append(_Image(key, *image, text))
    return images, unread


def _is_other_sample(
    ending: str, sample: Collection[str], endings: Collection[str]
) -> bool:
    """Return whether members beside an image are a sample, as `b.jpg` and `b.cls`."""
    first, _, last = ending.rpartition(".")
    if not first or last not in endings:
        return False
    return sum(f"{first}.{suffix}" in sample for suffix in endings) > 1


def _read_label(data: bytes, name: str, options: Options, config_path: str) -> str:
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
            and all(type(label) in (str, int) for label in value)
        ):
            return json.dumps(sorted({nfc(str(label)) for label in value}))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        form = "a JSON list" if options.label_sets else "text"
        if options.label_field:
            form = f"JSON with the key '{options.label_field}'"
        wrong = f"the label of '{name}' is {data[:60]!r}"
        raise DataError(
            config_path, wrong, f"Allowed: {form}", "Set data.label_field"
        ) from error
    if (
        value == ""
        or isinstance(value, bool)
        or not isinstance(value, str | int)
        or options.label_sets
    ):
        allowed = "An integer or a class name"
        if options.label_sets:
            allowed = "A JSON list of names or integers"
        remedy = "Repair the shard"
        if isinstance(value, list):
            remedy = "Set data.label_sets=true"
        raise DataError(
            config_path, f"the label of '{name}' is {value!r}", allowed, remedy
        )
    return str(value)


def _names_by_position(texts: Collection[str], names: Sequence[str]) -> dict[str, str]:
    """Return the names of labels that are positions; refuse one that may be a name."""
    name_of = {
        text: names[int(text)]
        for text in texts
        if re.fullmatch("[0-9]{1,9}", text) and int(text) < len(names)
    }
    numbers = {text for text in texts if re.fullmatch("-?[0-9]+", text)}
    all_names = numbers <= {*names}
    all_positions = numbers <= {*name_of}
    doubtful = [text for text, name in name_of.items() if text != name]
    if doubtful and all_names == all_positions and not numbers.isdisjoint(names):
        text = min(doubtful)
        wrong = (
            f"the label {text} is the position of '{name_of[text]}' and may be a name"
            " in this file"
        )
        raise DataError(
            "data.class_names",
            wrong,
            "Labels that are all names or all positions",
            "Rename the classes that are numbers",
        )
    return {} if all_names else name_of


def _read_class_names(path: str) -> list[str]:
    config_path = "data.class_names"
    try:
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
            text = file.read()
        is_json = text.lstrip().startswith(("[", "{"))
        names = json.loads(text) if is_json else text.splitlines()
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
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or not names:
        wrong = f"'{path}' is empty"
        if repeated:
            wrong = f"'{path}' has '{repeated[0]}' twice"
        raise DataError(config_path, wrong, "Each class once")
    return names


def _endings(keys: str) -> list[str]:
    return [key.strip().lower().lstrip(".") for key in keys.split(";") if key.strip()]
