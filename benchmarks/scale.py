"""What many images cost one rank: seconds and MiB at 10^5, 10^6 and 10^7, each part in
a process of its own.

    python benchmarks/scale.py                        # all sizes; the files of 10^5 images are made and removed
    python benchmarks/scale.py --sizes 100000 --parts folder csv

`folder` and `csv` list real files (100,000 links to a few; above that not run).
`listing` starts behind the file system: it makes a listing of names and statuses as a
scan yields them, holds out 5 % of each class and hashes it. `hex` is the same with
names of 32 random digits, which compress least. `labels`: the labels of all images.
`epoch`: a plan of all images with four views, and the requests of one of eight ranks.
`history`: the sifter's table, over two epochs. `cache`: the search for records in a
file of answers without any.

MiB are of resident memory above that before, `held` in the end and `peak` in between;
bytes are per image.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import _record
from kd.core.types import SiftContext
from kd.data.loader import Share
from kd.models.cache import Codec, open_store
from kd.parts.datasets import csv, imagefolder
from kd.parts.datasets._columns import Categorical, Names
from kd.parts.datasets._files import Files
from kd.parts.datasets._source import (
    ImageSource,
    LabelColumn,
    SplitRequest,
    Storage,
    source,
)
from kd.parts.sifters import history
from kd.parts.sifters._plan import full_plan
from kd.setup.data import Data
from kd.setup.data_plan import DataPlan

FOLDER = 1000
"""Images of a class."""
MOST_FILES = 100_000
VAL = 0.05


def names(count: int, random: bool) -> Iterator[bytes]:
    """Yield names as ImageNet has them, or of random digits, in order."""
    for folder in range(count // FOLDER):
        ids = (
            hashlib.md5(b"%d" % (folder * FOLDER + i)).hexdigest().encode()
            for i in range(FOLDER)
        )
        numbers = (
            ids
            if random
            else (b"n%08d_%d" % (folder, i * 7919 % 100_000) for i in range(FOLDER))
        )
        yield from sorted(b"n%08d/%s.JPEG" % (folder, file) for file in numbers)


def listing(count: int, random: bool = False) -> ImageSource:
    """Make a listing of images that are nowhere, as `imagefolder` does behind
    its scan.
    """
    sizes = 10_000 + np.arange(count) % 997
    stamps = 2**63 + np.arange(count, dtype=np.uint64)
    files = Storage(Names(names(count, random)), sizes, stamps)
    classes = [f"n{folder:08d}" for folder in range(count // FOLDER)]
    column = Categorical(
        classes, np.repeat(np.arange(len(classes), dtype=np.int32), FOLDER)
    )
    return source(
        files, LabelColumn(column), SplitRequest("train", None, "all", "data.root", VAL)
    )


def context(count: int) -> SiftContext:
    """Return what a sifter knows of a run on one rank."""
    return SiftContext(
        count,
        1000,
        1000,
        0,
        1,
        0,
        lambda: torch.zeros(count),
        lambda tensor: tensor,
        views=4,
    )


def epoch(count: int) -> Any:
    """Plan an epoch and make the requests of one rank of eight."""
    plan = full_plan(context(count), 0)
    requested = sum(
        len(request.ids) for request in Share(1000, 1, 0, 8).requests(plan, 0, 0)
    )
    assert requested == count // 1000 * 125
    return plan


def sifted(count: int) -> Any:
    """Plan a full epoch and a sifted one, a loss an image."""
    sifter = history.build(history.Options(keep=0.6), context(count))
    for number in range(2):
        ids = sifter.plan(number, 0.0).ids
        sifter.observe(ids, torch.rand(len(ids)))
    return sifter, sifter.state_dict()


def missing(count: int) -> Any:
    """Look for the records of a cache that has none."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(
            Path(folder), {}, Codec(101, "fp16", 0), count, writable=True
        )
        store.write(0, [count - 1], [np.ones((1, 101), np.float16)], [0])
        missing_ids = store.missing(0)
        assert len(missing_ids) == count - 1
        return missing_ids


def make_files(root: Path, count: int) -> None:
    """Make links to a few files, and a list of them."""
    with open(root.parent / "list.csv", "w") as listed:
        listed.write("path,label\n")
        for number, name in enumerate(names(count, False)):
            path = root / name.decode()
            source = root / f".{number // 50_000}"
            if number % FOLDER == 0:
                path.parent.mkdir(parents=True)
            if number % 50_000 == 0:
                source.write_bytes(b"\xff\xd8\xff" + b"x" * number)
            os.link(source, path)
            listed.write(f"{name.decode()},{path.parent.name}\n")


def sections(root: str) -> dict[str, Callable[[int], Any]]:
    """Return what is measured, by name."""
    table = csv.Options(root=root, train_list="../list.csv", val_fraction=VAL)
    return {
        "folder": lambda count: imagefolder.build(
            imagefolder.Options(root=root, val_fraction=VAL), "train", None
        ),
        "csv": lambda count: csv.build(table, "train", None),
        "listing": listing,
        "hex": lambda count: listing(count, random=True),
        "labels": labels,
        "epoch": epoch,
        "history": sifted,
        "cache": missing,
    }


def labels(count: int) -> Any:
    """Read the label of each image of a listing."""
    images = ImageSource(Files("/nowhere", []), np.zeros(count, np.int32), ("a", "b"))
    return images, Data(DataPlan(), images, images).labels()


def measure(name: str, count: int, root: str) -> dict[str, Any]:
    """Measure one part in this process."""
    full_plan(context(2000), 0)  # what torch takes at its first use
    before = resident()
    wall = time.perf_counter()
    busy = time.process_time()
    objects = sections(root)[name](count)
    row = {
        "part": name,
        "images": count,
        "wall_s": round(time.perf_counter() - wall, 2),
    }
    row["cpu_s"] = round(time.process_time() - busy, 2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    gc.collect()  # Python's lists of freed tuples too
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what Python has freed and glibc keeps
    memory_held = resident() - before
    del objects
    row |= {"held_mib": round(memory_held), "peak_mib": round(peak)}
    return row | {
        "held_bytes": round(memory_held * 2**20 / count, 1),
        "peak_bytes": round(peak * 2**20 / count, 1),
    }


def resident() -> float:
    """Return the resident memory of this process, MiB."""
    return (
        int(Path("/proc/self/statm").read_text().split()[1])
        * resource.getpagesize()
        / 2**20
    )


def main() -> None:
    """Measure every part at every size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--parts", nargs="+", default=[*sections("/")])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, count, root = args.one
        print(json.dumps(measure(name, int(count), root)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "images"
        root.mkdir()
        if {"folder", "csv"} & {*args.parts}:
            make_files(root, MOST_FILES)
        for name in args.parts:
            for count in args.sizes:
                if name in ("folder", "csv") and count != MOST_FILES:
                    continue
                command = [
                    sys.executable,
                    __file__,
                    "--one",
                    name,
                    str(count),
                    str(root),
                ]
                process = subprocess.run(
                    command, capture_output=True, text=True, check=True
                )
                rows.append(json.loads(process.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    _record.write(
        "scale", f"python benchmarks/scale.py {' '.join(sys.argv[1:])}".strip(), rows
    )


if __name__ == "__main__":
    main()
