"""What does real data repeat, and what does a comparison cost? CPU seconds, for the
machine is shared.

    python benchmarks/audit.py leaks --data FOLDER --splits train test     # what real data repeats
    python benchmarks/audit.py scale                          # 10^4 to 10^6 synthetic pictures

`leaks --known CSV --labels NPY NPY`: the list of arXiv:1902.00423 for CIFAR-10, whose
ids count in the published order, which the labels of training and test images in that
order tell.
"""

from __future__ import annotations

import argparse
import csv
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import _record
from kd.core.contracts import Source
from kd.parts import registry
from kd.study.audit.copies import BASES, Album, copies
from kd.study.audit.lists import COPY, repeats


def opened(root: Path, train: str, val: str) -> dict[str, Source]:
    """List two splits of a folder."""
    options = registry.options_type("datasets", "imagefolder", "data.kind")(
        root=str(root), train_split=train, val_split=val
    )
    first = registry.build(
        "datasets", "imagefolder", options, "data.kind", split="train", classes=None
    )
    second = registry.build(
        "datasets",
        "imagefolder",
        options,
        "data.kind",
        split="val",
        classes=first.classes,
    )
    return {"train": first, "val": second}


def filled(splits: dict[str, Source]) -> Album:
    """Decode all images and add them."""
    album = Album(sum(map(len, splits.values())))
    for split, source in enumerate(splits.values()):
        for id in range(len(source)):
            album.add(split, id, source.decode(id))
    return album


def cost(source: Source, rounds: int = 9, block: int = 200) -> dict[str, float]:
    """Return the CPU milliseconds of decoding an image, and of decoding and adding it,
    in turns; medians of blocks.
    """
    times: dict[str, list[float]] = {"decode": [], "decode_and_add": []}
    for number in range(2 * rounds):
        name = ("decode", "decode_and_add")[(number + number // 2) % 2]
        album = Album(block)
        first = number // 2 * block
        start = time.process_time()
        for id in range(first, first + block):
            decoded = source.decode(id % len(source))
            if name != "decode":
                album.add(0, id, decoded)
        times[name].append(1000 * (time.process_time() - start) / block)
    return {
        f"{name}_ms": round(float(np.median(durations)), 4)
        for name, durations in times.items()
    }


def leaks(
    root: Path,
    train: str,
    val: str,
    read_known: Callable[[dict[str, Source]], set[tuple[str, str]]] | None,
) -> dict:
    """Return what a real dataset repeats in two splits, and how much of a published
    list is among it.
    """
    splits = opened(root, train, val)
    album = filled(splits)
    start = time.process_time()
    pairs = copies(album)
    compared = time.process_time() - start
    repeated = repeats(album, pairs, splits)
    across = [repeat for repeat in repeated if repeat.leaks]
    row = {
        "part": f"leaks of {root.name}",
        "images": len(album),
        "all_pairs": len(pairs.first),
    }
    row |= {
        "leaking_pairs": len(across),
        "leaking_images": len({repeat.second.name for repeat in across}),
    }
    row |= {
        "same_bytes": sum(repeat.kind == COPY for repeat in across),
        "two_labels": sum(repeat.contradicts for repeat in repeated),
    }
    row |= {
        "exact_labels_differ": sum(repeat.contradicts for repeat in across),
        "of": len(splits["val"]),
    }
    row |= cost(splits["train"])
    row["compare_ms"] = round(1000 * compared / len(album), 4)
    if read_known is not None:
        listed = read_known(splits)
        named = {(repeat.first.name, repeat.second.name) for repeat in across}
        row |= {"listed": len(listed), "listed_found": len(listed & named)}
        row["listed_images_found"] = len(
            {val for _, val in listed} & {val for _, val in named}
        )
    print(
        row,
        [
            (repeat.first.name, repeat.second.name, repeat.kind, repeat.score)
            for repeat in across[:5]
        ],
        flush=True,
    )
    return row


def published(
    file: Path, labels: list[Path]
) -> Callable[[dict[str, Source]], set[tuple[str, str]]]:
    """Return what reads pairs of a published list by the names of the images here,
    where a class has them in order.
    """

    def names(source: Source, order: np.ndarray) -> list[str]:
        by_label: dict[int, list[str]] = {}
        for id in range(len(source)):
            by_label.setdefault(int(source.label(id)), []).append(source.name(id))  # type: ignore[arg-type]
        rows = {label: iter(sorted(group)) for label, group in by_label.items()}
        return [next(rows[int(label)]) for label in order]

    def read(splits: dict[str, Source]) -> set[tuple[str, str]]:
        train, val = (
            names(source, np.load(path))
            for source, path in zip(splits.values(), labels, strict=True)
        )
        with file.open() as content:
            rows = [
                row for row in csv.DictReader(content) if row["Judgment"] in ("0", "1")
            ]
        return {(train[int(row["TrainID"])], val[int(row["TestID"])]) for row in rows}

    return read


def scale(count: int) -> dict[str, Any]:
    """Compare so many synthetic pictures, one in a hundred a noisy copy, in this
    process.
    """
    from kd.parts.datasets._columns import Names

    names = Names(
        [f"train/class_{id % 1000:04d}/{id:07d}.jpg".encode() for id in range(count)]
    )
    album = Album(count)
    rng = np.random.default_rng(0)
    decay = 1 / (1 + np.add.outer(np.arange(8), np.arange(8)))
    for start in range(0, count, 10_000):
        waves = rng.normal(size=(10_000, 8, 8)) * decay * 30
        waves[100:200] = waves[:100]
        drawn = (
            128
            + 24 * 24 * (BASES[0].T @ waves @ BASES[0])
            + rng.normal(size=(10_000, 24, 24)) * 2
        )
        album._columns[0][start : start + 10_000] = drawn.clip(0, 255).astype(np.uint8)
    for column, value in zip(album._columns[1:], (0, 0, np.arange(count)), strict=True):
        column[:] = value
    album._show(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.process_time()
    pairs = copies(album)
    seconds = time.process_time() - start
    a = np.minimum(pairs.first, pairs.second)
    b = np.maximum(pairs.first, pairs.second)
    right = int(((b - a == 100) & (a % 10_000 < 100)).sum())
    row = {
        "part": "scale",
        "images": count,
        "planted": count // 100,
        "found": right,
        "others": len(a) - right,
    }
    row |= {
        "compare_s": round(seconds, 2),
        "names_mib": round(names.size / 2**20),
    }
    row |= {
        "before_mib": round(before),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    return row


def main() -> None:
    """Measure one part, and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("leaks", "scale"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--splits", nargs=2, default=("train", "test"))
    parser.add_argument("--known", type=Path)
    parser.add_argument("--labels", type=Path, nargs=2)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=(10_000, 100_000, 1_000_000)
    )
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    if options.part == "scale" and len(options.sizes) > 1:
        rows = []
        for size in options.sizes:  # the peak of memory is that of a process
            command = [sys.executable, __file__, "scale", "--sizes", str(size)]
            text = subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout
            rows.append(eval(text.splitlines()[-1]))  # what this file has printed
            print(rows[-1], flush=True)
    elif options.part == "scale":
        print(scale(options.sizes[0]))
        return
    else:
        published_list = (
            published(options.known, options.labels) if options.known else None
        )
        train, val = options.splits
        rows = [leaks(options.data, train, val, published_list)]
    words = [word if "/" not in word else "PATH" for word in sys.argv[1:]]
    _record.write(
        f"audit_{options.name or options.part}",
        f"python benchmarks/audit.py {' '.join(words)}",
        rows,
    )


if __name__ == "__main__":
    main()
