"""Listings that are kept in a folder, so that what has not changed since is not listed again.

A folder's time changes when an entry is made, renamed or removed. A file that is written in place keeps its folder's
time: it is seen only if it is among those that are looked at.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kd.files.storage import atomic_file
from kd.parts.datasets._decode import Names, stamp
from kd.parts.datasets._folder import ENDINGS, WHERE, Files, ImageFolder

FORMAT = 1
SAMPLE = 1000  # files, evenly spaced, whose size and times are compared
SETTLED = 2.0
"""Seconds that a folder must have rested before it was listed: some storages keep its time in whole seconds."""
Made = tuple[ImageFolder, np.ndarray, Mapping[bytes, int]]
"""A listing, the sizes of its files, and the folders with their times."""

log = logging.getLogger("kd")


def kept(folder: str, root: str, asked: Any, make: Callable[[], Made]) -> ImageFolder:
    """Return the listing of `root` that lies in `folder`, if nothing has changed; else make it and keep it there.

    `asked`: what else the listing depends on, as JSON values.
    """
    named = json.dumps([FORMAT, os.path.realpath(root), sorted(map(os.fsdecode, ENDINGS)), asked])
    file = Path(folder).expanduser() / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.npz"
    found = _read(file, root)
    if found is not None:
        return found
    start = time.time_ns()
    listing, sizes, visited = make()
    if start - max(visited.values()) < SETTLED * 1e9:
        log.warning(f"{WHERE}: a folder has changed within the last seconds, so that the listing is not kept")
        return listing
    ids = np.linspace(0, len(listing) - 1, min(SAMPLE, len(listing))).astype(np.int64)
    facts = {"classes": listing.classes, "notes": listing.notes, "fingerprint": listing.fingerprint}
    arrays = {
        **listing.names.arrays(),
        "labels": listing.labels,
        "stamps": listing.stamps,
        "sample": ids,
        "sizes": sizes[ids],
        "folders": np.frombuffer(b"\0".join(visited), np.uint8),
        "times": np.fromiter(visited.values(), np.int64),
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
    }
    with atomic_file(file, "data.listing") as draft, open(draft, "wb") as opened:
        np.savez(opened, **arrays)
    return listing


def _read(file: Path, root: str) -> ImageFolder | None:
    """Return the listing in a file, or None where there is none or something has changed."""
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as opened:
            facts = json.loads(opened["facts"].tobytes())
            changed = _changed(os.fsencode(root), opened)
            if changed:
                log.info(f"data: {changed} since it was listed in '{file}'; it is listed again")
                return None
            names = Names.of_arrays(opened)
            files, labels = Files(names, np.empty(0), opened["stamps"]), opened["labels"]
            checked = f"{len(opened['times'])} folders and {len(opened['sample'])} of its files are unchanged"
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning(f"data.listing: '{file}' cannot be read ({error}); the folder is listed again")
        return None
    told = f"the listing of {len(labels)} images in '{file}' is used: {checked}"
    return ImageFolder(root, files, labels, facts["classes"], (*facts["notes"], told), facts["fingerprint"])


def _changed(root: bytes, opened: Mapping[str, np.ndarray]) -> str:
    """Return what has changed in a folder, or "" where nothing was seen."""
    for folder, before in zip(opened["folders"].tobytes().split(b"\0"), opened["times"].tolist(), strict=True):
        path = os.path.join(root, folder) if folder else root
        if _time(path) != before:
            return f"folder '{os.fsdecode(folder) or '.'}' has changed"
    names, stamps = Names.of_arrays(opened), opened["stamps"]
    for id, size in zip(opened["sample"].tolist(), opened["sizes"].tolist(), strict=True):
        try:
            status = os.stat(os.path.join(root, names[id]))
            same = (status.st_size, stamp(status)) == (size, int(stamps[id]))
        except OSError:
            same = size < 0  # a link that led nowhere, see `file_of`
        if not same:
            return f"file '{os.fsdecode(names[id])}' has changed"
    return ""


def _time(path: bytes) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1
