"""What loading an image costs, with the store of decoded pixels and without: CPU time,
in turns, in one process.

Run: python benchmarks/loading.py [--data FOLDER] [--size 224] [--crop 0.35] [--policy NAME] [--images 200] [--rounds 6]

`fill` is the first visit of an image with a store on the disk: decode, shrink, write.
Without --data: food_mini, whose pictures of 96 px are kept as they are at 64 px, and
are cheap to decode; photographs have more to gain.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from _record import write
from kd import config
from kd.core.seeds import evenly_spaced
from kd.data.views import Views
from kd.setup.build import build_backend
from kd.setup.data import open_data, open_sources
from kd.setup.recipe import resolve


def settings(options: argparse.Namespace, folder: str) -> config.Config:
    """Return a configuration of the data alone."""
    data: dict[str, Any] = {
        "image_size": options.size,
        "batch_size": 1,
        "augment": {"crop_scale": options.crop},
    }
    if options.policy:
        data["augment"] |= {
            "policy": options.policy,
            "mixup": 0.2,
            "mix_probability": 0.5,
        }
    data |= (
        {"kind": "imagefolder", "root": options.data}
        if options.data
        else {"kind": "food_mini"}
    )
    return config.load(
        {
            "run": {"name": "loading", "folder": folder, "epochs": 10},
            "data": data,
            "student": {"model": "none"},
            "losses": [{"kind": "ce"}],
            "backend": {"kind": "cpu", "threads": 1},
        }
    )


def with_store(plain: config.Config, store: str) -> Views:
    """Return the training views behind a store."""
    recipe = resolve(replace(plain, data=replace(plain.data, store=store)))
    return open_data(recipe.data, build_backend(recipe.backend)).views()[0]


def milliseconds(dataset: Views, ids: list[int], view: int) -> float:
    """Return the CPU time of loading an image of `ids`, milliseconds."""
    before = time.process_time()
    for id in ids:
        dataset.load(id, view)
    return 1000 * (time.process_time() - before) / len(ids)


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", default="", help="folder with train/<class>/* and val/<class>/*"
    )
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--crop", type=float, default=0.35)
    parser.add_argument(
        "--policy",
        default="",
        help="rand-augment, with mixup, as configs/vit_food101.yaml has them",
    )
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain = settings(options, folder)
        data = open_sources(resolve(plain).data)
        data.train.prepare()
        ids = evenly_spaced(len(data.train), options.images)
        ways = {store: with_store(plain, store) for store in ("none", "disk", "ram")}
        first = {
            loader: milliseconds(dataset, ids, 0) for loader, dataset in ways.items()
        }  # reads the files once, too
        rows.append({"round": 0, "which": "fill", "ms": round(first["disk"], 4)})
        for turn in range(1, options.rounds + 1):
            for loader in ways if turn % 2 else reversed(ways):
                rows.append(
                    {
                        "round": turn,
                        "which": loader,
                        "ms": round(milliseconds(ways[loader], ids, turn), 4),
                    }
                )
        room = sum(
            file.stat().st_blocks * 512
            for file in Path(folder).glob("stores/train-*/pixels")
        ) / len(ids)
    median = {
        w: statistics.median(row["ms"] for row in rows if row["which"] == w)
        for w in (*ways, "fill")
    }
    print(
        f"{len(ids)} images, {options.size} px, crop {options.crop}: CPU ms an image "
        + ", ".join(f"{loader} {value:.2f}" for loader, value in median.items())
        + f"; disk / none {median['disk'] / median['none']:.2f}; {room / 1024:.0f} KiB"
        " an image kept"
    )
    argv = [
        "FOLDER" if options.data and word == str(options.data) else word
        for word in sys.argv[1:]
    ]
    write("loading", " ".join(["python benchmarks/loading.py", *argv]), rows)


if __name__ == "__main__":
    main()
