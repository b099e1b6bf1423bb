"""Read images in one folder per class, with train/val folders or split by fraction."""

import os
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.errors import DataError, did_you_mean
from kd.core.keys import Keys, ProperFraction, file_key, keys
from kd.core.text import first_few
from kd.files.folders import (
    ENDINGS,
    Walk,
    count_unread,
    folders,
    folders_without_images,
    printable,
)
from kd.parts.datasets._columns import Categorical
from kd.parts.datasets._files import Files, find_root, size_and_stamp
from kd.parts.datasets._recognize import HELD_OUT, SPLITS
from kd.parts.datasets._source import (
    ImageSource,
    LabelColumn,
    SplitRequest,
    dataset_facts,
    source,
)
from kd.parts.datasets._splits import check_splits

WHERE = Files.config_path
facts = partial(dataset_facts, test="test_split")


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
    """Return the `data` keys that describe a folder: its root and its splits.

    Every folder is recognized, because any may hold class folders.
    """
    inner = folders(folder)
    while len(inner) == 1 and (below := folders(folder / inner[0])):
        folder /= inner[0]  # one folder around all others, as in archives
        inner = below
    lowercase = {name.lower(): name for name in inner}
    split_folders = {
        split: lowercase[name]
        for split, names in SPLITS.items()
        for name in reversed(names)
        if name in lowercase
    }
    if "train" not in split_folders or len(split_folders) == 1:
        return {"root": str(folder / split_folders.get("train", "")), **HELD_OUT}
    keys = {
        f"{split}_split": name
        for split, name in split_folders.items()
        if split == "test" or name != split
    }
    held_out = {} if "val" in split_folders else HELD_OUT
    return {"root": str(folder), **held_out, **keys}


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> ImageSource:
    """List the images of a split; unlabelled images may be in any folder."""
    root = find_root(options.root)
    shared = bool(options.val_fraction) and split != "test"
    folder = b""
    if not shared or options.test_split:
        folder = os.fsencode(_split_folder(options, "train" if shared else split, root))
    walk = Walk(root, folder, WHERE)
    code_of: dict[bytes, int] = {}
    codes = array("i")

    def listed() -> Iterator[tuple[bytes, int, int]]:
        for directory, path, entry in walk:
            codes.append(code_of.setdefault(directory, len(code_of)))
            yield path, *size_and_stamp(entry.path)

    files = Files(root, listed())
    holding = [*code_of]
    files.notes = (*count_unread(walk.unread), *_bare_folders_note(walk, holding))
    start = len(folder) + 1 if folder else 0  # of a path in the folder of the split
    class_of = Categorical(
        [printable(path[start:]) for path in holding], np.asarray(codes)
    )
    if shared and not options.test_split:
        _check_unsplit(options, holding)
    if not len(files.names):
        raise _no_images_error(
            os.path.join(root, os.fsdecode(folder)), split, files.notes
        )
    if labels != "none":
        _check_inside(files, class_of)
    if labels == "some":
        class_of = _without_unlabelled(options.unlabelled, class_of)
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


def _bare_folders_note(walk: Walk, holding: Sequence[bytes]) -> list[str]:
    bare = folders_without_images(walk.folders, holding)
    if not bare:
        return []
    if len(bare) == 1:
        return [f"1 folder has no image and is no class: {bare[0]}"]
    return [f"{len(bare)} folders have no image and are no class: {first_few(bare)}"]


def _split_folder(options: Options, split: str, root: str) -> str:
    key = f"{split}_split"
    name = getattr(options, key)
    if os.path.isdir(os.path.join(root, name)):
        return name.strip("/")
    inner = folders(root)
    # Other names are proposed and never chosen silently: validating on `test` is a
    # decision.
    usual_names = [usual for usual in (*SPLITS[split], "test") if usual in inner]
    suggestion = did_you_mean(name, inner)
    if usual_names and not suggestion:
        suggestion = f"Did you mean '{usual_names[0]}'?"
    wrong = (
        f"'{root}' has no folder '{name}'. It has: {first_few(inner) or 'no folders'}"
    )
    if split == "test":
        remedy = f"Set data.{key}, or data.test_fraction=0.1"
    else:
        remedy = (
            f"Set data.{key}, or data.val_fraction=0.1 where the class folders lie"
            " directly in data.root"
        )
    raise DataError(WHERE, wrong, suggestion, remedy)


def _without_unlabelled(name: str, class_of: Categorical) -> Categorical:
    """Return the classes without the folder of the images that have no label."""
    # Else `unlabeled` or `Unlabelled` would become a class without an error.
    spellings = {name.casefold(), "unlabelled", "unlabeled"}
    tops = {folder.partition("/")[0] for folder in class_of.categories}
    for top in sorted(tops - {name}):
        if top.casefold() in spellings:
            raise DataError(
                "data.unlabelled",
                f"is '{name}', and the folder '{top}' would be a class",
                "The folder of the images without a label",
                f"Set it to {top}",
            )
    classes = [
        "" if f"{folder}/".startswith(f"{name}/") else folder
        for folder in class_of.categories
    ]
    return class_of._replace(categories=classes)


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


def _no_images_error(path: str, split: str, notes: Sequence[str]) -> DataError:
    allowed = (
        f"Files in class folders, ending in {', '.join(map(os.fsdecode, ENDINGS))}"
        " (capitals too)"
    )
    wrong = f"no images for the split '{split}' in '{path}'"
    if notes:
        wrong += f" ({'; '.join(notes)})"
    return DataError(WHERE, wrong, allowed, "Check the path")


def _check_inside(files: Files, class_of: Categorical) -> None:
    if "" in class_of.categories:
        outside = np.flatnonzero(class_of.codes == class_of.categories.index(""))
        wrong = (
            f"the image '{printable(files.names[outside[0]])}' lies outside any class"
            f" folder, with {len(outside) - 1} more"
        )
        raise DataError(
            WHERE,
            wrong,
            "Images lie in a folder named like their class",
            "Move or delete them",
        )
