"""Hold validation images out of the training images, with groups kept together."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from kd.core.errors import DataError
from kd.parts.datasets._columns import Categorical

NAMED_PATTERNS = {"parent": "(.*)/"}


def check_splits(options: Any, noun: str) -> None:
    """Refuse splits that are equal; `noun`: what a split is, such as a folder."""
    train = options.train_split
    val = options.val_split
    fraction = options.val_fraction
    if not train or not val or (train == val and not fraction):
        raise ValueError(
            f"train_split and val_split must be two different {noun}s; to share one,"
            " set val_fraction"
        )
    if options.test_split and options.test_split in (train, "" if fraction else val):
        raise ValueError(
            f"test_split must be another {noun} than train_split and val_split; or set"
            " test_fraction"
        )


def find_groups(rule: str, split: str, texts: Iterable[str]) -> Categorical | None:
    """Return each image's group by `data.group`, from its text; None without a rule.

    A text is the image's path, or its cell in the column of that name. An image whose
    text the pattern does not match is alone.
    """
    if not rule:
        return None
    pattern_error = ""
    try:
        pattern = re.compile(NAMED_PATTERNS.get(rule, rule))
    except re.error as error:  # a column's name need be no pattern
        pattern_error = f", and is no pattern: {error}"
    else:
        if pattern.groups:
            texts = (
                match[1] if (match := pattern.search(text)) else text for text in texts
            )
    groups = Categorical.from_values(texts)
    if split == "train" and len(groups.categories) == len(groups.codes):
        allowed = (
            "`parent`, a pattern with the group in brackets such as '(.*)_', or a"
            " column of the table"
        )
        raise DataError(
            "data.group",
            f"'{rule}' puts no two training images into one group{pattern_error}",
            allowed,
        )
    return groups


def hold_out(keys: Iterable[bytes], labels: np.ndarray, fraction: float) -> np.ndarray:
    """Choose the validation images: bool [N], about `fraction` of each class."""
    # The images of a class are ranked by the hash of their key and the first are held
    # out, so the choice depends only on the keys, not on machine, listing order or
    # seed. Every class of two images or more has at least one on either side. Related
    # images (frames of one film) are kept together by `data.group` alone.
    digests = bytearray()
    for key in keys:
        digests += hashlib.blake2b(key, digest_size=8).digest()
    order = np.lexsort((np.frombuffer(digests, ">u8"), labels))
    held_out = np.zeros(len(labels), bool)
    # Unlabelled images (-1) are held out like a class.
    stops = np.cumsum(np.bincount(labels + 1))
    for start, stop in zip(np.r_[0, stops[:-1]], stops, strict=True):
        count = int(stop - start)
        if count > 1:
            share = min(max(int(fraction * count + 0.5), 1), count - 1)
            held_out[order[start : start + share]] = True
    return held_out


def split_rows(
    keys: Iterable[bytes],
    groups: Categorical | None,
    labels: np.ndarray,
    fraction: float,
    split: str,
) -> tuple[np.ndarray, Categorical | None]:
    """Return a split's rows and groups; a `fraction` divides the list of training.

    See `hold_out`. Groups are held out as a whole: `fraction` is then the share of the
    groups of each class, and a group has the class of its first image.
    """
    rows = np.arange(len(labels))
    if fraction and split != "test":
        if groups:
            firsts = np.unique(groups.codes, return_index=True)[1]
            group_keys = map(str.encode, groups.categories)
            held_out = hold_out(group_keys, labels[firsts], fraction)[groups.codes]
        else:
            held_out = hold_out(keys, labels, fraction)
        rows = np.flatnonzero(held_out == (split == "val"))
        if not len(rows):
            wrong = (
                "no class has two images, or two groups, so that none is left for the"
                f" split '{split}'"
            )
            raise DataError("data.val_fraction", wrong, "", "Add images")
    return rows, groups and groups._replace(codes=groups.codes[rows])
