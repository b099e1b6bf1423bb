"""Are copies found, at what cost, and are planted wrong labels? CPU seconds, for the machine is shared.

    python benchmarks/audit.py planted --data GROCERY         # copies of 5 % each, of five kinds: see `KINDS`
    python benchmarks/audit.py leaks --data FOLDER --splits train test     # what real data repeats
    python benchmarks/audit.py scale                          # 10^4 to 10^6 synthetic pictures
    python benchmarks/audit.py labels --run RUN               # a run on food_mini with label_noise, after --audit

`leaks --known CSV --labels NPY NPY`: the list of arXiv:1902.00423 for CIFAR-10, whose ids count in the published order,
which the labels of training and test images in that order tell.
"""

from __future__ import annotations

import argparse
import csv
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

import _record
from kd.core.contracts import Source
from kd.parts import registry
from kd.study.audit.copies import BASES, Album, Pairs, copies
from kd.study.audit.lists import COPY, FOLDER, repeats

SHARE, SEEDS = 0.05, (0, 1, 2)
KINDS = ("exact", "jpeg70", "crop90", "mirrored90", "bars")  # cropped to 90 % and mirrored; between black bars


def opened(root: Path, train: str, val: str) -> dict[str, Source]:
    """List two splits of a folder."""
    options = registry.options_type("datasets", "imagefolder", "data.kind")(
        root=str(root), train_split=train, val_split=val
    )
    first = registry.build("datasets", "imagefolder", options, "data.kind", split="train", classes=None)
    second = registry.build("datasets", "imagefolder", options, "data.kind", split="val", classes=first.classes)
    return {"train": first, "val": second}


def filled(splits: dict[str, Source]) -> Album:
    """Decode all images and add them."""
    album = Album(sum(map(len, splits.values())))
    for split, source in enumerate(splits.values()):
        for id in range(len(source)):
            album.add(split, id, source.decode(id))
    return album


def cost(source: Source, rounds: int = 9, block: int = 200) -> dict[str, float]:
    """Return the CPU milliseconds of decoding an image, and of decoding and adding it, in turns; medians of blocks."""
    times: dict[str, list[float]] = {"decode": [], "decode_and_add": []}
    for number in range(2 * rounds):
        name = ("decode", "decode_and_add")[(number + number // 2) % 2]
        album, first = Album(block), number // 2 * block
        start = time.process_time()
        for id in range(first, first + block):
            decoded = source.decode(id % len(source))
            if name != "decode":
                album.add(0, id, decoded)
        times[name].append(1000 * (time.process_time() - start) / block)
    return {f"{name}_ms": round(float(np.median(found)), 4) for name, found in times.items()}


def plant(root: Path, home: Path, seed: int) -> tuple[list[Path], dict[tuple[str, str], str]]:
    """Copy a folder and plant copies in its test split; return its training files, and each planted pair's kind."""
    rng, truth = random.Random(seed), {}
    shutil.copytree(root, home, ignore=lambda path, names: ["val"] if Path(path) == root else [])
    files = sorted(home.glob("train/*/*.jpg"))
    count = round(SHARE * len(files))
    for number, file in enumerate(rng.sample(files, len(KINDS) * count)):
        kind = KINDS[number // count]
        target = home / "test" / file.parent.name / f"planted_{number}.jpg"
        _plant(file, target, kind, rng)
        truth[f"train/{file.parent.name}/{file.name}", f"test/{file.parent.name}/{target.name}"] = kind
    return files, truth


def planted(root: Path) -> list[dict[str, Any]]:
    """Plant copies of training photographs in the test split, and count what is found."""
    rows = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder) / "data"
            files, truth = plant(root, home, seed)
            splits = opened(home, "train", "test")
            album = filled(splits)
            start = time.process_time()
            pairs = copies(album)
            compared = time.process_time() - start
            found = {(one.first.name, one.second.name) for one in repeats(album, pairs, splits) if one.leaks}
            scenes = {frozenset(one) for one in _scenes(album, pairs, splits)}
            origin = {copy: first for first, copy in truth}
            others = [pair for pair in found if pair not in truth]
            row: dict[str, Any] = {"part": "planted", "seed": seed, "images": len(album)}
            for kind in KINDS:
                wanted = {pair for pair, one in truth.items() if one == kind}
                row[f"{kind}_planted"], row[f"{kind}_found"] = len(wanted), len(wanted & found)
            row |= {"leaking_pairs": len(found), "second_shots": 0, "to_look_at": 0}
            for first, second in others:  # a planted copy is also like another shot of what it was made from
                known = frozenset((first, origin.get(second, second))) in scenes
                row["second_shots" if known else "to_look_at"] += 1
                print("second shot" if known else "to look at", first, origin.get(second, second))
            row |= cost(splits["train"]) | {
                "compare_ms": round(1000 * compared / len(album), 4),
                "crc_ms": _crc_ms(files),
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def _plant(file: Path, target: Path, kind: str, rng: random.Random) -> None:
    if kind == "exact":
        shutil.copy(file, target)
        return
    with Image.open(file) as opened_image:
        image = opened_image.convert("RGB")
    if kind == "bars":  # a tenth to a quarter of a side, above and below or left and right
        width, height = image.size
        bar, upright = rng.uniform(0.1, 0.25) / 2, rng.random() < 0.5
        x, y = (0, round(bar * height)) if upright else (round(bar * width), 0)
        image = ImageOps.expand(image, (x, y), 0)
    if kind in ("crop90", "mirrored90"):
        width, height = image.size
        x, y = (rng.random() * 0.1 * side for side in (width, height))
        image = image.crop((round(x), round(y), round(x + 0.9 * width), round(y + 0.9 * height)))
        image = ImageOps.mirror(image) if kind == "mirrored90" else image
    image.save(target, quality=70 if kind == "jpeg70" else 90)


def _scenes(album: Album, pairs: Pairs, splits: dict[str, Source]) -> list[tuple[str, str]]:
    """Return the names of pairs within a split: one scene photographed twice, as a look at them shows."""
    sources, split, id = [*splits.values()], album.split, album.id
    same = [(a, b) for a, b in zip(pairs.first, pairs.second, strict=True) if split[a] == split[b]]
    return [tuple(sources[split[row]].name(int(id[row])) for row in pair) for pair in same]  # type: ignore[misc]


def _crc_ms(files: list[Path]) -> float:
    contents = [file.read_bytes() for file in files]
    start = time.process_time()
    for content in contents:
        zlib.crc32(content)
    return round(1000 * (time.process_time() - start) / len(files), 4)


def leaks(root: Path, train: str, val: str, known: Callable[[dict[str, Source]], set[tuple[str, str]]] | None) -> dict:
    """Return what a real dataset repeats in two splits, and how much of a published list is among it."""
    splits = opened(root, train, val)
    album = filled(splits)
    start = time.process_time()
    pairs = copies(album)
    compared = time.process_time() - start
    found = repeats(album, pairs, splits)
    across = [one for one in found if one.leaks]
    row = {"part": f"leaks of {root.name}", "images": len(album), "all_pairs": len(pairs.first)}
    row |= {"leaking_pairs": len(across), "leaking_images": len({one.second.name for one in across})}
    row |= {"same_bytes": sum(one.kind == COPY for one in across), "two_labels": sum(one.contradicts for one in found)}
    row |= {"exact_labels_differ": sum(one.contradicts for one in across), "of": len(splits["val"])}
    row |= cost(splits["train"])
    row["compare_ms"] = round(1000 * compared / len(album), 4)
    if known is not None:
        listed, named = known(splits), {(one.first.name, one.second.name) for one in across}
        row |= {"listed": len(listed), "listed_found": len(listed & named)}
        row["listed_images_found"] = len({val for _, val in listed} & {val for _, val in named})
    print(row, [(one.first.name, one.second.name, one.kind, one.score) for one in across[:5]], flush=True)
    return row


def published(file: Path, labels: list[Path]) -> Callable[[dict[str, Source]], set[tuple[str, str]]]:
    """Return what reads pairs of a published list by the names of the images here, where a class has them in order."""

    def names(source: Source, order: np.ndarray) -> list[str]:
        own: dict[int, list[str]] = {}
        for id in range(len(source)):
            own.setdefault(int(source.label(id)), []).append(source.name(id))  # type: ignore[arg-type]
        rows = {label: iter(sorted(one)) for label, one in own.items()}
        return [next(rows[int(label)]) for label in order]

    def read(splits: dict[str, Source]) -> set[tuple[str, str]]:
        train, val = (names(source, np.load(path)) for source, path in zip(splits.values(), labels, strict=True))
        with file.open() as content:
            rows = [row for row in csv.DictReader(content) if row["Judgment"] in ("0", "1")]
        return {(train[int(row["TrainID"])], val[int(row["TestID"])]) for row in rows}

    return read


def scale(count: int) -> dict[str, Any]:
    """Compare so many synthetic pictures, one in a hundred a noisy copy, in this process."""
    from kd.parts.datasets._columns import Names

    names = Names([f"train/class_{id % 1000:04d}/{id:07d}.jpg".encode() for id in range(count)])
    album, rng = Album(count), np.random.default_rng(0)
    decay = 1 / (1 + np.add.outer(np.arange(8), np.arange(8)))
    for start in range(0, count, 10_000):
        waves = rng.normal(size=(10_000, 8, 8)) * decay * 30
        waves[100:200] = waves[:100]
        drawn = 128 + 24 * 24 * (BASES[0].T @ waves @ BASES[0]) + rng.normal(size=(10_000, 24, 24)) * 2
        album._room[0][start : start + 10_000] = drawn.clip(0, 255).astype(np.uint8)
    for part, value in zip(album._room[1:], (0, 0, np.arange(count)), strict=True):
        part[:] = value
    album._show(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.process_time()
    pairs = copies(album)
    seconds = time.process_time() - start
    a, b = np.minimum(pairs.first, pairs.second), np.maximum(pairs.first, pairs.second)
    right = int(((b - a == 100) & (a % 10_000 < 100)).sum())
    row = {"part": "scale", "images": count, "planted": count // 100, "found": right, "others": len(a) - right}
    row |= {
        "compare_s": round(seconds, 2),
        "names_mib": round(names.size / 2**20),
    }
    row |= {"before_mib": round(before), "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}
    return row


def labels(run: Path) -> list[dict[str, Any]]:
    """Count planted wrong labels among those that lists name first; names say which dish was painted."""
    from kd.data.loader import BATCH
    from kd.setup.data import open_sources
    from kd.setup.recipe import resolve
    from kd.setup.student import best_student
    from kd.study.finished import opened_run

    folder, stored = opened_run(run)
    recipe = resolve(stored)
    data = open_sources(recipe.data)
    names = [data.train.name(id) for id in range(len(data.train))]
    wrong = {name for name in names if not Path(name).name.startswith(Path(name).parent.name + "_")}
    with (run / FOLDER / "labels.csv").open() as file:
        teacher = [row["name"] for row in csv.DictReader(file) if row["split"] == "train"]
    student = best_student(folder, recipe, data.classes)[0].eval()
    losses, crop = [], data.evaluate()
    for start in range(0, len(names), BATCH):
        ids = range(start, min(start + BATCH, len(names)))
        images = [np.array(crop(data.train.decode(id).image, random.Random(0))) for id in ids]
        with torch.no_grad():
            logits = student(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)).logits.float()
        truth = torch.tensor([data.train.label(id) for id in ids])
        losses += torch.nn.functional.cross_entropy(logits, truth, reduction="none").tolist()
    by_loss = [names[id] for id in np.argsort(-np.array(losses))]
    rows = []
    for who, ranked in (("teacher", teacher), ("loss of the student alone", by_loss)):
        first = set(ranked[: len(wrong)])
        row = {"part": "labels", "by": who, "images": len(names), "planted": len(wrong), "listed": len(ranked)}
        row |= {"at": len(first), "right": len(first & wrong), "precision": round(len(first & wrong) / len(first), 4)}
        rows.append(row | {"recall": round(len(first & wrong) / len(wrong), 4)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure one part, and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("planted", "leaks", "scale", "labels"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--splits", nargs=2, default=("train", "test"))
    parser.add_argument("--known", type=Path)
    parser.add_argument("--labels", type=Path, nargs=2)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=(10_000, 100_000, 1_000_000))
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    if options.part == "scale" and len(options.sizes) > 1:
        rows = []
        for size in options.sizes:  # the peak of memory is that of a process
            command = [sys.executable, __file__, "scale", "--sizes", str(size)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append(eval(text.splitlines()[-1]))  # what this file has printed
            print(rows[-1], flush=True)
    elif options.part == "scale":
        print(scale(options.sizes[0]))
        return
    elif options.part == "planted":
        rows = planted(options.data)
    elif options.part == "leaks":
        known = published(options.known, options.labels) if options.known else None
        train, val = options.splits
        rows = [leaks(options.data, train, val, known)]
    else:
        rows = labels(options.run)
    shown = [word if "/" not in word else "PATH" for word in sys.argv[1:]]
    _record.write(f"audit_{options.name or options.part}", f"python benchmarks/audit.py {' '.join(shown)}", rows)


if __name__ == "__main__":
    main()
