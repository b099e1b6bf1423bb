"""`kd-predict EXPORT IMAGES`: classify many images on a CPU, without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-predict",
        "Classify images and write a row for each: image, label, score, error. Interrupted, the same command resumes.",
        "kd-predict runs/vit_food/export photos --to labels.csv",
        with_config=False,
    )
    made.add_argument("export", metavar="EXPORT", type=Path, help="what kd-export wrote")
    made.add_argument(
        "images",
        metavar="IMAGES",
        help="a folder, a list (a path a line), shards (train-{000..009}.tar), or a URL such as s3://BUCKET/PREFIX",
    )
    made.add_argument(
        "--to", metavar="FILE", type=Path, default=Path("predictions.csv"), help=".csv, .jsonl or .parquet"
    )
    made.add_argument("--file", default="model.onnx", help="model.onnx (default), model.int8.onnx or openvino.xml")
    made.add_argument("--top", metavar="N", type=_count, default=1, help="labels of each image; 0: all (default 1)")
    made.add_argument("--threads", metavar="N", type=_count, default=0, help="cores to use; 0: all (default 0)")
    made.add_argument("--max-pixels", metavar="N", type=_count, default=100_000_000, help="of an image (default 1e8)")
    given = made.parse_args(argv)

    def command() -> None:
        from kd.predict.run import Settings, predict

        done = predict(
            Settings(
                export=given.export,
                images=given.images,
                to=given.to,
                file=given.file,
                top=given.top,
                cores=given.threads,
                max_pixels=given.max_pixels,
            )
        )
        earlier = f", {done.resumed} of them by an earlier start" if done.resumed else ""
        speed = (done.images - done.resumed) / max(done.seconds, 1e-9)
        print(f"{done.images} images{earlier}, {speed:.1f} images/s: {given.to}")
        if done.num_unreadable:
            print(f"{done.num_unreadable} images are unreadable; their rows have an error:", file=sys.stderr)
            print(*(f"  {line}" for line in done.unreadable), sep="\n", file=sys.stderr)

    return guarded(command, resumable=True)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number >= 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
