"""What a photograph costs by its size, decoded whole and reduced: CPU time, in turns,
in one process.

Run: python benchmarks/photographs.py EXPORT IMAGES [--rounds 5] [--compared 100]

EXPORT is a folder of `kd-export`, IMAGES one of folders of JPEGs, which are enlarged to
2, 12 and 48 million pixels. `request`: what `kd-serve` does with a body, decode, crop
and graph. `view`: what training does, 224 px, crop 0.35, no jitter. Into a file of its
own go the graph's answers for reduced pictures of 12 million pixels against those for
whole ones, of two kinds: `enlarged`, and `mosaic`, photographs side by side as they
are, which have detail down to the last pixel.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from _record import write
from kd.data.views import TrainTransform
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe, load
from kd.files.pixels import MARGIN
from kd.parts.datasets._decode import decode_image

SIDES = {
    "as it is": None,
    "2 MP": (1600, 1200),
    "12 MP": (4000, 3000),
    "48 MP": (8000, 6000),
}
LIMITS = Limits(max_pixels=100_000_000)


def jpeg(image: Image.Image) -> bytes:
    """Return a JPEG of quality 90."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def enlarged(path: Path, sides: tuple[int, int] | None) -> bytes:
    """Return a photograph in another size."""
    if sides is None:
        return path.read_bytes()
    return jpeg(Image.open(path).convert("RGB").resize(sides, Image.Resampling.BICUBIC))


def mosaic(paths: list[Path]) -> bytes:
    """Return a picture of 4000 x 3000 pixels, photographs side by side."""
    canvas = Image.new("RGB", (4000, 3000))
    tiles = [Image.open(path).convert("RGB") for path in paths]
    for number in range(144):
        canvas.paste(
            tiles[number % len(tiles)], (number % 12 * 348, number // 12 * 348)
        )
    return jpeg(canvas)


def milliseconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    before = time.process_time()
    work()
    return 1000 * (time.process_time() - before)


def costs(model: Any, path: Path, rounds: int) -> list[dict[str, Any]]:
    """Time a request and a training view of one photograph in all sizes."""
    train = TrainTransform(224, 0.35, 0.5, 0.0)
    rows = []
    for name, sides in SIDES.items():
        data = enlarged(path, sides)

        def request(margin: float, data: bytes = data) -> object:
            return model.engine(
                prepare(data, model.size, model.crop, LIMITS, margin).pixels[None]
            )

        def view(margin: float, data: bytes = data) -> object:
            least = train.least if margin else None
            return train(
                decode_image(data, "file", "data", least).image, random.Random(0)
            )

        for turn in range(rounds):
            for kind, work in (("request", request), ("view", view)):
                for margin in (0.0, MARGIN) if turn % 2 else (MARGIN, 0.0):
                    ms = round(
                        milliseconds(lambda margin=margin, work=work: work(margin)), 3
                    )
                    rows.append(
                        {
                            "what": kind,
                            "photograph": name,
                            "margin": margin,
                            "round": turn,
                            "value": ms,
                        }
                    )
    print(*rows, sep="\n", flush=True)
    return rows


def answers(model: Any, files: list[bytes], kind: str) -> list[dict[str, Any]]:
    """Compare the answers for reduced pictures with those for whole ones."""
    rows = []
    for number, data in enumerate(files):
        expected, sliced = (
            model.engine(
                prepare(data, model.size, model.crop, LIMITS, margin).pixels[None]
            )[0]
            for margin in (0.0, MARGIN)
        )
        apart = float(np.abs(sliced - expected).max())
        same = int(sliced.argmax() == expected.argmax())
        common = {"photograph": kind, "margin": MARGIN, "round": number}
        rows.append({"what": "logit difference", **common, "value": round(apart, 5)})
        rows.append({"what": "same answer", **common, "value": same})
    return rows


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compared", type=int, default=100)
    options = parser.parse_args()
    model = load(describe(options.export), 1, 1)
    paths = sorted(options.images.rglob("*.jpg"))
    random.Random(0).shuffle(paths)
    rows = []
    for kind in ("enlarged", "mosaic"):
        for first in range(options.compared):
            photograph = paths[first % len(paths)]
            some = random.Random(first).sample(paths, min(24, len(paths)))
            data = (
                enlarged(photograph, SIDES["12 MP"])
                if kind == "enlarged"
                else mosaic(some)
            )
            new_rows = answers(model, [data], kind)
            rows += [{**row, "round": first} for row in new_rows]
            print(kind, first, *(row["value"] for row in new_rows), flush=True)
    for key in dict.fromkeys(
        (row["what"], row["photograph"], row["margin"]) for row in rows
    ):
        values = [
            row["value"]
            for row in rows
            if (row["what"], row["photograph"], row["margin"]) == key
        ]
        summary = (
            f"mean {statistics.mean(values):.4f}, median"
            f" {statistics.median(values):.3f}, most {max(values):.3f}"
        )
        print(*key, f"{summary}, of {len(values)}", sep=" | ")
    command = f"python benchmarks/photographs.py EXPORT IMAGES {' '.join(sys.argv[3:])}".rstrip()
    if rows:
        write("photographs_answers", command, rows)
    if options.rounds:
        write("photographs", command, costs(model, paths[0], options.rounds))


if __name__ == "__main__":
    main()
