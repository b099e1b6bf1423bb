"""What a training view costs beside timm's loader and torchvision's transforms: CPU
time, in turns, batches of 32.

Run: python benchmarks/loading_peers.py IMAGES [--images 256] [--large 16] [--rounds 5]

IMAGES has folders of JPEGs. Each loader makes uint8 batches of 224 px from the same
files, as they are and enlarged to 12 million pixels: random crop (0.35 of the area or
more, bilinear, antialiased), flip, and colour jitter 0 or 0.4; once in this process,
once in two workers. Counted is the CPU time of all processes, since other work may
share the machine. torchvision: its JPEG decoder and v2 on tensors. FFCV and DALI were
not tried.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import timm.data
import torch
from mfu import matrix_rate
from photographs import SIDES, enlarged
from timm.data.loader import fast_collate
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from _record import write
from kd.core.host import keep_freed_memory
from kd.core.types import Plan
from kd.data.loader import LocalLoader, Share
from kd.data.views import TrainTransform, Views
from kd.parts.datasets.imagefolder import Options, build

SIZE = 224
CROP = 0.35
BATCH = 32
Epoch = Callable[[int], Iterable[Any]]


def ours(root: Path, jitter: float, workers: int) -> Epoch:
    """Return kd's loader."""
    views = Views(
        build(Options(root=str(root)), "train", None),
        TrainTransform(SIZE, CROP, 0.5, jitter),
        SIZE,
        0,
    )
    loader = LocalLoader(views, Share(min(BATCH, len(views)), 1, 0, 1), workers)
    plan = Plan(torch.arange(len(views)), torch.ones(len(views)))
    return lambda number: loader.epoch(plan, number)


def timms(root: Path, jitter: float, workers: int) -> Epoch:
    """Return what timm's train.py loads with: its transforms on Pillow's images, and
    its collate function.
    """
    scale = (CROP, 1.0)
    options = {
        "color_jitter": jitter or None,
        "interpolation": "bilinear",
        "use_prefetcher": True,
    }
    transform = timm.data.create_transform(
        SIZE, is_training=True, scale=scale, hflip=0.5, **options
    )
    dataset: Any = timm.data.ImageDataset(str(root / "train"), transform=transform)
    loader = DataLoader(
        dataset,
        BATCH,
        num_workers=workers,
        collate_fn=fast_collate,
        persistent_workers=workers > 0,
    )
    return lambda number: loader


def torchvisions(root: Path, jitter: float, workers: int) -> Epoch:
    """Return torchvision's decoder and transforms on tensors, with torch's
    DataLoader.
    """
    steps = [
        v2.RandomResizedCrop(SIZE, (CROP, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    steps += [v2.ColorJitter(jitter, jitter, jitter)] if jitter else []
    dataset = ImageFolder(
        root / "train",
        v2.Compose(steps),
        loader=lambda path: decode_image(path, ImageReadMode.RGB),
    )
    loader = DataLoader(
        dataset, BATCH, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda number: loader


LOADERS = {"kd": ours, "timm": timms, "torchvision v2": torchvisions}


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers so far."""
    workers = (child.cpu_times() for child in psutil.Process().children())
    return time.process_time() + sum(times.user + times.system for times in workers)


def folder(into: Path, files: list[bytes], images: int) -> Path:
    """Write a folder of two classes with `images` names for some files."""
    into.mkdir()
    for number, data in enumerate(files):
        (into / f"{number}.jpg").write_bytes(data)
    for number in range(images):
        name = into / "train" / str(number % 2) / f"{number}.jpg"
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(into / f"{number % len(files)}.jpg")
    return into


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="IMAGES")
    parser.add_argument(
        "--images", type=int, default=256, help="whole batches, or fewer than one"
    )
    parser.add_argument(
        "--large", type=int, default=16, help="images of 12 million pixels"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run of kd does; the others gain from it, too
    paths = sorted(options.data.rglob("*.jpg"))
    random.Random(0).shuffle(paths)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for pixels, images, different in (
            ("as it is", options.images, options.images),
            ("12 MP", options.large, 4),
        ):
            files = [enlarged(path, SIDES[pixels]) for path in paths[:different]]
            root = folder(Path(temporary) / pixels, files, images)
            for jitter, workers in ((0.0, 0), (0.4, 0), (0.0, 2), (0.4, 2)):
                rows += measure(
                    root, jitter, workers, options.rounds, {"photograph": pixels}
                )
    rate = matrix_rate(torch.device("cpu"), torch.float32, (1024,)) / 1e9
    write(
        "loading_peers",
        f"python benchmarks/loading_peers.py IMAGES {' '.join(sys.argv[2:])}".rstrip(),
        [{**row, "gflops": round(rate, 1)} for row in rows],
    )


def measure(
    root: Path, jitter: float, workers: int, rounds: int, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time an epoch of each loader in turns; the first one starts the workers and reads
    the files.
    """
    epochs = {loader: make(root, jitter, workers) for loader, make in LOADERS.items()}
    rows = []
    common = {**common, "jitter": jitter, "workers": workers}
    for turn in range(rounds + 1):
        for loader in epochs if turn % 2 else reversed(epochs):
            before = cpu_seconds()
            images = 0
            for batch in epochs[loader](turn):
                pixels = batch.image if loader == "kd" else batch[0]
                assert (pixels.dtype, *pixels.shape[1:]) == (torch.uint8, 3, SIZE, SIZE)
                images += len(pixels)
            ms = 1000 * (cpu_seconds() - before) / images
            if turn:
                rows.append(
                    {
                        **common,
                        "which": loader,
                        "round": turn,
                        "ms": round(ms, 4),
                        "per_core": round(1000 / ms),
                    }
                )
    middle = {
        w: statistics.median(row["ms"] for row in rows if row["which"] == w)
        for w in epochs
    }
    print(common, {loader: round(ms, 3) for loader, ms in middle.items()}, flush=True)
    return rows


if __name__ == "__main__":
    main()
