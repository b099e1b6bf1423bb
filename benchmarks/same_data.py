"""What it costs that ranks compare their images at a start: two processes over gloo, on
one machine.

    python benchmarks/same_data.py                     # 1,000,000 names, and files of two sizes

`listing` is what each start did before: names, labels and sizes as a scan yields them,
and their hash. `equal` is one comparison of equal listings. `search` finds one label
that differs, in the middle. `contents` reads files from memory (the file cache) and
hashes them, so many for each split: JPEG files of 500 x 375 and of 4,032 x 3,024
pixels.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scale import FOLDER, listing

import _record
from kd.core.errors import DataError
from kd.parts import registry
from kd.parts.datasets import imagefolder
from kd.setup import same_data

SIDES = {"500 x 375": (500, 375), "4032 x 3024": (4032, 3024)}
SAMPLED = (16, 64, 256)
EQUAL = 50  # comparisons of equal listings, of which the mean is told


def timed(
    section: str, images: int, work: Callable[[], Any], times: int = 1
) -> dict[str, Any]:
    """Return a row: seconds of one call, by the clock and of this process's CPU."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    for _ in range(times):
        work()
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime
    return {
        "part": section,
        "images": images,
        "wall_s": f"{wall / times:.4f}",
        "cpu_s": f"{cpu / times:.4f}",
    }


def as_rank(count: int) -> None:
    """Be one of the two ranks, and print the rows."""
    module = registry.find("backends", "cpu", "benchmark")
    backend = module.build(
        module.Options(threads=1), precision="fp32", timeout_seconds=600.0
    )
    backend.setup()
    opened: list[Any] = []
    rows = [timed("listing", count, lambda: opened.append(listing(count)))]
    source = opened[0]
    splits = {"train": source}

    def compare() -> None:
        same_data.require_equal(
            source.fingerprint, same_data.image_facts(splits, {}), backend
        )

    rows.append(timed("equal", len(source), compare, EQUAL))
    middle = len(source) // 2
    if backend.rank == 1:
        source._labels[middle] += 1
        source.fingerprint = f"another {source.fingerprint}"

    messages: list[str] = []

    def search() -> None:
        try:
            compare()
        except DataError as error:
            messages.append(str(error))

    rows.append(timed("search", len(source), search))
    assert source.name(middle) in messages[0], messages
    if backend.rank == 0:
        print(json.dumps(rows))
    backend.close()


def read(folder: Path, count: int) -> list[dict[str, Any]]:
    """Read and hash files of each size, as `same_contents` does for one split."""
    rows = []
    pixels = np.random.default_rng(0)
    module = registry.find("backends", "cpu", "benchmark")
    alone = module.build(
        module.Options(threads=1), precision="fp32", timeout_seconds=60.0
    )
    for title, (width, height) in SIDES.items():
        root = folder / title.replace(" ", "")
        for number in range(count):
            path = root / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if number < 4:  # then hard links: as many files, and little disk
                small = pixels.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
                Image.fromarray(small).resize((width, height)).save(path, quality=90)
            else:
                os.link(root / f"class{number % 2}" / f"{number % 4}.jpg", path)
        source = imagefolder.build(
            imagefolder.Options(root=str(root), val_fraction=1e-9), "train", None
        )
        for sampled in (sample for sample in SAMPLED if sample <= count):
            same_data.SAMPLED = sampled
            work = partial(same_data.same_contents, {"train": source}, alone)
            rows.append(timed(f"contents, {title}", sampled, work, 3))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=int, default=1_000_000, help=f"names, a multiple of {FOLDER}"
    )
    parser.add_argument(
        "--files", type=int, default=max(SAMPLED), help="files of each size"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        as_rank(options.images)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--rank", "--images", str(options.images)]
    meeting = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    texts = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    rows = json.loads(texts[0])
    with tempfile.TemporaryDirectory() as folder:
        rows += read(Path(folder), options.files)
    for row in rows:
        print(row)
    _record.write(
        "same_data",
        "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        rows,
    )


if __name__ == "__main__":
    main()
