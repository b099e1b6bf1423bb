"""Images in one folder per class, with train/val folders or split by fraction."""

import os
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import DataError, did_you_mean
from kd.core.keys import Keys, ProperFraction, file_key, keys
from kd.files.folders import (
    ENDINGS,
    Walk,
    count_unread,
    folders,
    folders_without_images,
    printable,
)
from kd.parts.datasets._columns import Repeated, first_few
from kd.parts.datasets._files import Files, find_root, size_and_stamp
from kd.parts.datasets._recognize import HELD_OUT, SPLITS
from kd.parts.datasets._source import (
    LabelColumn,
    Listed,
    SplitRequest,
    facts_of,
    source,
)
from kd.parts.datasets._splits import check_splits

WHERE = Files.config_path
facts = partial(facts_of, test="test_split")


@keys
class Options(Keys):
    """Location and split of the folders."""

    root: str = file_key()
    """Folder of the images. A class is the path of the folder that directly holds
    images: `apple`, `fruit/apple`.
    """
    train_split: str = "train"
    """Folder of the training images in `root`; not used with `val_fraction` alone."""
    val_split: str = "val"
    """Folder of the validation images in `root`; not used with `val_fraction`."""
    test_split: str = ""
    """Folder of the test images in `root`: scored once, at the end of a run; nothing is
    chosen on it. Empty: none.
    """
    val_fraction: ProperFraction = 0.0
    """Share of each class held out for validation, chosen by a hash of the path: from
    `root` if it has no split folders, from `train_split` if `test_split` is set.
    """
    group: str = ""
    """What belongs together, such as the frames of a clip, and stays in one split if kd
    splits by hash: a pattern with the group in brackets, such as '(.*)_', searched in
    the path below the split's folder. Empty: each image alone.
    """
    unlabelled: str = "unlabelled"
    """With `labels: some`, the folder beside the classes' whose images have
    no label.
    """

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError("root is empty; it must be the folder of the images")
        check_splits(self, "folder")


def recognizes(folder: Path) -> dict[str, Any]:
    """Return the keys of a folder; any folder may hold class folders."""
    inner = folders(folder)
    while len(inner) == 1 and (below := folders(folder / inner[0])):
        folder, inner = (
            folder / inner[0],
            below,
        )  # one folder around all others, as in archives
    there = {name.lower(): name for name in inner}
    found = {
        split: there[one]
        for split, names in SPLITS.items()
        for one in reversed(names)
        if one in there
    }
    if "train" not in found or len(found) == 1:
        return {"root": str(folder / found.get("train", "")), **HELD_OUT}
    keys = {
        f"{split}_split": name
        for split, name in found.items()
        if split == "test" or name != split
    }
    return {"root": str(folder), **({} if "val" in found else HELD_OUT), **keys}


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> Listed:
    """List the images of a split; unlabelled images may be in any folder."""
    root, shared = (
        find_root(options.root),
        bool(options.val_fraction) and split != "test",
    )
    folder = b""
    if not shared or options.test_split:
        folder = os.fsencode(_split_folder(options, "train" if shared else split, root))
    walk = Walk(root, folder, WHERE)
    positions, folder_of = dict[bytes, int](), array("i")

    def listed() -> Iterator[tuple[bytes, int, int]]:
        for directory, path, entry in walk:
            folder_of.append(positions.setdefault(directory, len(positions)))
            yield path, *size_and_stamp(entry.path)

    files = Files(root, listed())
    column = Repeated([*positions], np.asarray(folder_of))
    files.notes = (*count_unread(walk.unread), *_without_images(walk, column))
    start = len(folder) + 1 if folder else 0  # of a path in the folder of the split
    class_of = column._replace(texts=[printable(name[start:]) for name in column.texts])
    if shared and not options.test_split:
        _check_unsplit(options, column.texts)
    if not len(files.names):
        raise _no_images(os.path.join(root, os.fsdecode(folder)), split, files.notes)
    if labels != "none":
        _check_inside(files, class_of)
    if labels == "some":
        class_of = _unlabelled(options.unlabelled, class_of)
    request = SplitRequest(
        split, classes, labels, WHERE, options.val_fraction, options.group
    )
    try:
        return source(
            files,
            LabelColumn(class_of),
            request,
            (printable(name[start:]) for name in files.names),
        )
    except DataError as error:
        if error.config_path != WHERE:
            raise
        # a class may be missing because its files are unreadable
        wrong = "; ".join([error.wrong, *files.notes])
        raise DataError(
            error.config_path, wrong, error.allowed, error.remedy
        ) from error


def _without_images(walk: Walk, holding: Repeated) -> list[str]:
    bare = folders_without_images(walk.folders, holding.texts)
    if not bare:
        return []
    words = (
        ("1 folder has", "is")
        if len(bare) == 1
        else (f"{len(bare)} folders have", "are")
    )
    return [f"{words[0]} no image and {words[1]} no class: {first_few(bare)}"]


def _split_folder(options: Options, split: str, root: str) -> str:
    key = f"{split}_split"
    name = getattr(options, key)
    if os.path.isdir(os.path.join(root, name)):
        return name.strip("/")
    there = folders(root)
    # Other names are proposed and never chosen silently: validating on `test` is a
    # decision.
    near = next(
        (
            f"Did you mean '{other}'?"
            for other in (*SPLITS[split], "test")
            if other in there
        ),
        "",
    )
    wrong = (
        f"'{root}' has no folder '{name}'. It has: {first_few(there) or 'no folders'}"
    )
    remedy = (
        f"Set data.{key}, or data.{'test' if split == 'test' else 'val'}_fraction=0.1"
        + (
            " where the class folders lie directly in data.root"
            if split != "test"
            else ""
        )
    )
    raise DataError(WHERE, wrong, did_you_mean(name, there) or near, remedy)


def _unlabelled(name: str, class_of: Repeated) -> Repeated:
    """Return the classes without the folder of the images that have no label."""
    # Else `unlabeled` or `Unlabelled` would become a class without an error.
    meant = {name.casefold(), "unlabelled", "unlabeled"}
    for top in sorted({folder.partition("/")[0] for folder in class_of.texts} - {name}):
        if top.casefold() in meant:
            wrong = f"is '{name}', and the folder '{top}' would be a class"
            raise DataError(
                "data.unlabelled",
                wrong,
                "The folder of the images without a label",
                f"Set it to {top}",
            )
    texts = [
        "" if f"{folder}/".startswith(f"{name}/") else folder
        for folder in class_of.texts
    ]
    return class_of._replace(texts=texts)


def _check_unsplit(options: Options, holding: Sequence[bytes]) -> None:
    # Else `train/apple` and `val/apple` would become two classes without an error.
    for folder in (options.train_split, options.val_split):
        if any(name.startswith(os.fsencode(folder) + b"/") for name in holding):
            wrong = (
                f"data.root is already split: it has a folder '{folder}' with classes"
                " in it"
            )
            remedy = f"Remove val_fraction, or set data.root to that '{folder}'"
            raise DataError("data.val_fraction", wrong, "A folder of classes", remedy)


def _no_images(path: str, split: str, notes: Sequence[str]) -> DataError:
    allowed = (
        f"Files in class folders, ending in {', '.join(map(os.fsdecode, ENDINGS))}"
        " (capitals too)"
    )
    there = f" ({'; '.join(notes)})" if notes else ""
    return DataError(
        WHERE,
        f"no images for the split '{split}' in '{path}'{there}",
        allowed,
        "Check the path",
    )


def _check_inside(files: Files, class_of: Repeated) -> None:
    if "" in class_of.texts:
        found = np.flatnonzero(class_of.of == class_of.texts.index(""))
        outside = printable(files.names[found[0]])
        wrong = (
            f"the image '{outside}' lies outside any class folder, with"
            f" {len(found) - 1} more"
        )
        raise DataError(
            WHERE,
            wrong,
            "Images lie in a folder named like their class",
            "Move or delete them",
        )
