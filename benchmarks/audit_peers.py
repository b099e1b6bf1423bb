"""Which way finds copies of photographs? kd's and those of other libraries, on planted
and on real copies; CPU seconds.

    python benchmarks/audit_peers.py planted --data GROCERY [--draws 0 1 2]     # copies of five kinds: see `KINDS`
    python benchmarks/audit_peers.py listed --data CIFAR10 --known CSV --labels NPY NPY

`listed`: the 249 pairs of arXiv:1902.00423 among `MORE` further images of each split. A
peer compares training images with test images and their mirror images only; kd compares
all. Needs imagehash, pdqhash and scikit-learn; `--weights`: the file of an
EfficientNet-Lite0, for embeddings. `--kd` is the name of kd's row, to compare two of
its commits: "kd, with faiss" is commit b675337d.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import imagehash  # pyright: ignore[reportMissingImports]
import numpy as np
import pdqhash  # pyright: ignore[reportMissingImports]
import timm
import torch
from audit import opened, published
from PIL import Image, ImageOps
from sklearn.neighbors import NearestNeighbors

import _record
from kd.core.contracts import Source
from kd.study.audit.copies import Album, copies

SHARE = 0.05  # of the training images, per kind of copy
KINDS = (
    "exact",
    "jpeg70",
    "crop90",
    "mirrored90",
    "bars",
)  # cropped to 90 % and mirrored; between black bars
MORE = 2500
CROP_RESISTANT = (
    60  # images of each split compared by imagehash.crop_resistant_hash: it takes long
)
Found = Iterator[tuple[str, set[tuple[int, int]], float, float]]
"""A way's name, its pairs of positions, and its CPU seconds to describe and to
compare.
"""
Images = Sequence[Image.Image]


def described(
    images: Images, describe: Callable[[Image.Image], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what describes the images and their mirror images."""
    plain = np.stack([describe(image) for image in images])
    return plain, np.stack([describe(ImageOps.mirror(image)) for image in images])


def by_bits(
    name: str, describe: Callable[[Image.Image], np.ndarray], radii: Sequence[int]
) -> Callable[..., Found]:
    """Return a way that compares hashes by their differing bits."""

    def find(train: Images, test: Images) -> Found:
        start = time.process_time()
        first = described(train, describe)[0]
        seconds = described(test, describe)
        middle = time.process_time()
        nearest = [np.zeros(0)] * len(test)
        for row in range(len(test)):
            nearest[row] = np.min(
                [(first ^ second[row]).sum(1) for second in seconds], axis=0
            )
        differing = np.stack(nearest, axis=1)
        compared = time.process_time() - middle
        for radius in radii:
            pairs = {
                (int(a), int(b))
                for a, b in zip(*np.nonzero(differing <= radius), strict=True)
            }
            yield f"{name}, {radius} bits", pairs, middle - start, compared

    return find


def by_cosine(
    name: str,
    describe: Callable[[Images], tuple[np.ndarray, np.ndarray]],
    least: Sequence[float],
) -> Callable[..., Found]:
    """Return a way that compares vectors by scikit-learn's NearestNeighbors."""

    def find(train: Images, test: Images) -> Found:
        start = time.process_time()
        first = describe(train)[0]
        seconds = describe(test)
        middle = time.process_time()
        index = NearestNeighbors(metric="cosine", algorithm="brute").fit(first)
        distances, rows = zip(
            *(index.radius_neighbors(second, 1 - min(least)) for second in seconds),
            strict=True,
        )
        compared = time.process_time() - middle
        for score in least:
            pairs = set()
            for distance_of, row_of in zip(distances, rows, strict=True):
                for second, (distance, firsts) in enumerate(
                    zip(distance_of, row_of, strict=True)
                ):
                    pairs |= {
                        (int(row), second) for row in firsts[distance <= 1 - score]
                    }
            yield f"{name}, {score:g}", pairs, middle - start, compared

    return find


def thumbnail(image: Image.Image) -> np.ndarray:
    """Return a picture of 24 x 24 grey levels with mean 0."""
    small = np.asarray(
        image.convert("L").resize((24, 24), Image.Resampling.BOX), np.float32
    ).ravel()
    return small - small.mean()


def embedded(
    weights: Path, side: int
) -> Callable[[Images], tuple[np.ndarray, np.ndarray]]:
    """Return what computes the pooled features of images and of their mirror images."""
    network: Any = timm.create_model("tf_efficientnet_lite0")
    stored = torch.load(weights, weights_only=True)
    network.load_state_dict(
        dict(zip(network.state_dict(), stored.values(), strict=True))
    )
    network.reset_classifier(0)
    network.eval()

    def features(images: Images) -> np.ndarray:
        batches = []
        for start in range(0, len(images), 64):
            pictures = np.stack(
                [
                    np.asarray(image.resize((side, side), 3))
                    for image in images[start : start + 64]
                ]
            )
            with torch.inference_mode():
                batches.append(
                    network(
                        (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() - 127)
                        / 128
                    ).numpy()
                )
        return np.concatenate(batches)

    return lambda images: (
        features(images),
        features([ImageOps.mirror(image) for image in images]),
    )


def crop_resistant(train: Images, test: Images) -> Found:
    """Compare imagehash's hashes of segments, by its defaults."""
    start = time.process_time()
    first = [imagehash.crop_resistant_hash(image) for image in train]
    plain = [imagehash.crop_resistant_hash(image) for image in test]
    mirrored = [imagehash.crop_resistant_hash(ImageOps.mirror(image)) for image in test]
    middle = time.process_time()
    pairs = {
        (a, b)
        for a, hash_of_first in enumerate(first)
        for b, hashes in enumerate(zip(plain, mirrored, strict=True))
        if any(hash_of_first.matches(hash_of_second) for hash_of_second in hashes)
    }
    yield (
        "imagehash crop_resistant_hash",
        pairs,
        middle - start,
        time.process_time() - middle,
    )


def kd(name: str) -> Callable[..., Found]:
    """Return kd's own way."""

    def find(train: Images, test: Images) -> Found:
        from kd.core.types import Decoded

        start = time.process_time()
        album = Album(len(train) + len(test))
        for split, images in enumerate((train, test)):
            for id, image in enumerate(images):
                album.add(split, id, Decoded(image, 0))
        middle = time.process_time()
        pairs = copies(album)
        compared = time.process_time() - middle
        rows = np.sort(np.stack([pairs.first, pairs.second]), axis=0).T
        across = rows[album.split[rows[:, 0]] != album.split[rows[:, 1]]]
        yield (
            name,
            {(int(a), int(b) - len(train)) for a, b in across},
            middle - start,
            compared,
        )

    return find


def ways(weights: Path | None, side: int, name: str) -> dict[str, Callable[..., Found]]:
    """Return all ways."""
    by_name: dict[str, Callable[..., Found]] = {
        "kd": kd(name),
        "phash": by_bits(
            "imagehash phash",
            lambda image: imagehash.phash(image).hash.ravel(),
            (4, 8, 12),
        ),
        "dhash": by_bits(
            "imagehash dhash",
            lambda image: imagehash.dhash(image).hash.ravel(),
            (4, 8, 12),
        ),
        "pdq": by_bits(
            "pdqhash",
            lambda image: pdqhash.compute(np.asarray(image))[0].astype(bool),
            (31, 60, 90),
        ),
        "thumbnails": by_cosine(
            "thumbnails", lambda images: described(images, thumbnail), (0.99, 0.95, 0.9)
        ),
    }
    if weights:
        by_name["embedding"] = by_cosine(
            "embedding", embedded(weights, side), (0.95, 0.9, 0.85)
        )
    return by_name


def plant(
    root: Path, home: Path, seed: int
) -> tuple[list[Path], dict[tuple[str, str], str]]:
    """Copy a folder and plant copies in its test split; return its training files, and
    each planted pair's kind.
    """
    rng = random.Random(seed)
    truth = {}
    shutil.copytree(
        root, home, ignore=lambda path, names: ["val"] if Path(path) == root else []
    )
    files = sorted(home.glob("train/*/*.jpg"))
    count = round(SHARE * len(files))
    for number, file in enumerate(rng.sample(files, len(KINDS) * count)):
        kind = KINDS[number // count]
        target = home / "test" / file.parent.name / f"planted_{number}.jpg"
        _plant(file, target, kind, rng)
        truth[
            f"train/{file.parent.name}/{file.name}",
            f"test/{file.parent.name}/{target.name}",
        ] = kind
    return files, truth


def _plant(file: Path, target: Path, kind: str, rng: random.Random) -> None:
    if kind == "exact":
        shutil.copy(file, target)
        return
    with Image.open(file) as opened_image:
        image = opened_image.convert("RGB")
    if (
        kind == "bars"
    ):  # a tenth to a quarter of a side, above and below or left and right
        width, height = image.size
        bar = rng.uniform(0.1, 0.25) / 2
        upright = rng.random() < 0.5
        x, y = (0, round(bar * height)) if upright else (round(bar * width), 0)
        image = ImageOps.expand(image, (x, y), 0)
    if kind in ("crop90", "mirrored90"):
        width, height = image.size
        x, y = (rng.random() * 0.1 * side for side in (width, height))
        image = image.crop(
            (round(x), round(y), round(x + 0.9 * width), round(y + 0.9 * height))
        )
        image = ImageOps.mirror(image) if kind == "mirrored90" else image
    image.save(target, quality=70 if kind == "jpeg70" else 90)


def pictures(source: Source, ids: Sequence[int]) -> list[Image.Image]:
    """Decode images."""
    return [source.decode(id).image for id in ids]


def planted(
    root: Path, draws: Sequence[int], chosen: dict[str, Callable[..., Found]]
) -> list[dict[str, Any]]:
    """Count planted copies that each way finds, by kind."""
    rows = []
    for draw in draws:
        with tempfile.TemporaryDirectory() as folder:
            _, truth = plant(root, Path(folder) / "data", draw)
            splits = opened(Path(folder) / "data", "train", "test")
            names = [
                [source.name(id) for id in range(len(source))]
                for source in splits.values()
            ]
            train, test = (
                pictures(source, range(len(source))) for source in splits.values()
            )
        for find in chosen.values():
            for way, pairs, describe_s, compare_s in find(train, test):
                named_pairs = {(names[0][a], names[1][b]) for a, b in pairs}
                row: dict[str, Any] = {
                    "data": "planted",
                    "draw": draw,
                    "way": way,
                    "images": len(train) + len(test),
                }
                row |= {
                    kind: sum(
                        pair in named_pairs
                        for pair, planted_kind in truth.items()
                        if planted_kind == kind
                    )
                    for kind in KINDS
                }
                row |= {
                    "found": len(named_pairs & truth.keys()),
                    "of": len(truth),
                    "others": len(named_pairs - truth.keys()),
                }
                rows.append(row | times(describe_s, compare_s))
                print(rows[-1], flush=True)
        if draw == 0 and len(chosen) > 1:
            some = random.Random(0).sample(sorted(truth), CROP_RESISTANT)
            first = [train[names[0].index(pair[0])] for pair in some]
            second = [test[names[1].index(pair[1])] for pair in some]
            for way, pairs, describe_s, compare_s in crop_resistant(first, second):
                right = [truth[some[a]] for a, b in pairs if a == b]
                row = {
                    "data": "planted",
                    "draw": draw,
                    "way": way,
                    "images": 2 * len(some),
                }
                row |= {kind: right.count(kind) for kind in KINDS}
                row |= {
                    "found": len(right),
                    "of": len(some),
                    "others": len(pairs) - len(right),
                }
                rows.append(row | times(describe_s, compare_s))
                print(rows[-1], flush=True)
    return rows


def listed(
    root: Path,
    published_list: Path,
    labels: list[Path],
    chosen: dict[str, Callable[..., Found]],
) -> list[dict[str, Any]]:
    """Count the pairs of a published list that each way finds."""
    splits = opened(root, "train", "test")
    truth = published(published_list, labels)(splits)
    names = []
    images = []
    for place, source in enumerate(splits.values()):
        listed_names = {pair[place] for pair in truth}
        sampled = set(random.Random(0).sample(range(len(source)), MORE))
        ids = [
            id
            for id in range(len(source))
            if id in sampled or source.name(id) in listed_names
        ]
        names.append([source.name(id) for id in ids])
        images.append(pictures(source, ids))
    rows = []
    for find in chosen.values():
        for way, pairs, describe_s, compare_s in find(*images):
            named_pairs = {(names[0][a], names[1][b]) for a, b in pairs}
            row = {
                "data": "listed",
                "draw": 0,
                "way": way,
                "images": sum(map(len, images)),
            }
            row |= {
                "found": len(named_pairs & truth),
                "of": len(truth),
                "others": len(named_pairs - truth),
            }
            rows.append(row | times(describe_s, compare_s))
            print(rows[-1], flush=True)
    return rows


def times(describe_s: float, compare_s: float) -> dict[str, float]:
    """Return CPU seconds, rounded."""
    return {"describe_s": round(describe_s, 2), "compare_s": round(compare_s, 2)}


def main() -> None:
    """Measure one part, and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("planted", "listed"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draws", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--known", type=Path)
    parser.add_argument("--labels", type=Path, nargs=2)
    parser.add_argument("--weights", type=Path)
    parser.add_argument(
        "--side", type=int, default=96, help="pixels of a side for the embedding"
    )
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--kd", default="kd")
    options = parser.parse_args()
    chosen = ways(options.weights, options.side, options.kd)
    chosen = {name: chosen[name] for name in options.only or chosen}
    if options.part == "planted":
        rows = planted(options.data, options.draws, chosen)
    else:
        rows = listed(options.data, options.known, options.labels, chosen)
    ways_now = {row["way"] for row in rows}
    _, earlier = _record.newest("audit_peers")
    rows = [
        row
        for row in earlier
        if row["data"] != options.part or row["way"] not in ways_now
    ] + rows
    _record.write(
        "audit_peers",
        f"python benchmarks/audit_peers.py {options.part} --data PATH",
        rows,
    )


if __name__ == "__main__":
    main()
