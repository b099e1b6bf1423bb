"""Shared by the datasets: validation images held out of the training images, and groups
that stay together.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from kd.core.errors import DataError
from kd.parts.datasets._columns import Repeated

NAMED = {"parent": "(.*)/"}  # patterns with a name


def check_splits(options: Any, kind: str) -> None:
    train, val, test, fraction = (
        options.train_split,
        options.val_split,
        options.test_split,
        options.val_fraction,
    )
    if not train or not val or (train == val and not fraction):
        raise ValueError(
            f"train_split and val_split must be two different {kind}s; to share one,"
            " set val_fraction"
        )
    if test and test in (train, "" if fraction else val):
        wrong = (
            f"test_split must be another {kind} than train_split and val_split; or set"
            " test_fraction"
        )
        raise ValueError(wrong)


def grouped(rule: str, split: str, texts: Iterable[str]) -> Repeated | None:
    """Return the group of each image by `data.group`, from its path or its cell in that
    column; None without a rule.
    """
    # An image whose path the pattern does not match is alone.
    if not rule:
        return None
    broken = ""
    try:
        pattern = re.compile(NAMED.get(rule, rule))
    except re.error as error:  # a column's name need be no pattern
        broken = f", and is no pattern: {error}"
    else:
        if pattern.groups:
            texts = (
                found[1] if (found := pattern.search(text)) else text for text in texts
            )
    groups = Repeated.of_each(texts)
    if split == "train" and len(groups.texts) == len(groups.of):
        allowed = (
            "`parent`, a pattern with the group in brackets such as '(.*)_', or a"
            " column of the table"
        )
        raise DataError(
            "data.group",
            f"'{rule}' puts no two training images into one group{broken}",
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
    held = np.zeros(len(labels), bool)
    stops = np.cumsum(
        np.bincount(labels + 1)
    )  # unlabelled images (-1) are held out like a class
    for start, stop in zip(np.r_[0, stops[:-1]], stops, strict=True):
        count = int(stop - start)
        if count > 1:
            held[
                order[
                    start : start + min(max(int(fraction * count + 0.5), 1), count - 1)
                ]
            ] = True
    return held


def part(
    keys: Iterable[bytes],
    groups: Repeated | None,
    labels: np.ndarray,
    fraction: float,
    split: str,
) -> tuple[np.ndarray, Repeated | None]:
    """Return the ids of a split and their groups, where "train" and "val" share a list
    if `fraction` is not 0.

    See `hold_out`. Groups are held out as a whole: `fraction` is then the share of the
    groups of each class, and a group has the class of its first image.
    """
    ids = np.arange(len(labels))
    if fraction and split != "test":
        if groups:
            firsts = np.unique(groups.of, return_index=True)[1]
            held = hold_out(map(str.encode, groups.texts), labels[firsts], fraction)[
                groups.of
            ]
        else:
            held = hold_out(keys, labels, fraction)
        ids = np.flatnonzero(held == (split == "val"))
        if not len(ids):
            wrong = (
                "no class has two images, or two groups, so that none is left for the"
                f" split '{split}'"
            )
            raise DataError("data.val_fraction", wrong, "", "Add images")
    return ids, groups and groups._replace(of=groups.of[ids])
