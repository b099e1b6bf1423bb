"""`kd-serve FOLDER`: answer for an export over HTTP, on a CPU, without torch."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli._common import guarded, parser

CONTRACT = "serve"
SAGEMAKER_MODEL = "/opt/ml/model"
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = _parser().parse_args(argv)

    def command() -> None:
        from kd.serve.limits import Limits
        from kd.serve.server import Settings, serve

        # `docker run IMAGE serve` is how SageMaker starts a container: its folder, its port, all interfaces.
        hosted = given.folder == CONTRACT
        limits = Limits(
            max_body=given.max_body,
            max_pixels=int(given.max_pixels),
            max_images=given.max_images,
            max_in_flight=given.max_in_flight,
            deadline=given.deadline,
            body_seconds=given.body_timeout,
        )
        serve(
            Settings(
                folder=Path(SAGEMAKER_MODEL if hosted else given.folder),
                file=given.file,
                host=given.host or ("0.0.0.0" if hosted else "127.0.0.1"),
                port=given.port if given.port is not None else int(os.environ.get("SAGEMAKER_BIND_TO_PORT", 8080)),
                cores=given.threads,
                slots=given.slots,
                ui=given.ui and not hosted,
                quiet=given.quiet,
                limits=limits,
            )
        )

    return guarded(command)


def _parser() -> argparse.ArgumentParser:
    made = parser(
        "kd-serve",
        "Answer for an export over HTTP: POST /invocations, GET /ping, GET /metrics, KServe v2, and a page at /.",
        "kd-serve runs/vit_food/export",
        with_config=False,
    )
    made.add_argument(
        "folder", metavar="FOLDER", help=f"what kd-export wrote; the bare word `serve`: {SAGEMAKER_MODEL}, on 0.0.0.0"
    )
    made.add_argument("--file", default="model.onnx", help="model.onnx (default), model.int8.onnx or openvino.xml")
    made.add_argument("--host", default="", help="interface (default 127.0.0.1: only this machine)")
    made.add_argument("--port", type=_between(0, 65535), help="default 8080; 0: any free one, which is printed")
    made.add_argument(
        "--threads", type=_cores, default=0, metavar="N", help="cores to use (default auto: the cgroup's)"
    )
    made.add_argument("--slots", type=_between(1, 1024), default=0, metavar="N", help="requests computed at once")
    made.add_argument("--max-body", type=_size, default=6 * 2**20, metavar="SIZE", help="of a request (default 6MiB)")
    made.add_argument("--max-pixels", type=_positive, default=25e6, metavar="N", help="of an image (default 25e6)")
    made.add_argument("--max-images", type=_between(1, 1024), default=16, metavar="N", help="in a request (default 16)")
    made.add_argument("--max-in-flight", type=_between(1, 65536), default=32, metavar="N", help="then 503 (default 32)")
    made.add_argument("--deadline", type=_positive, default=10.0, metavar="S", help="for an answer (default 10)")
    made.add_argument("--body-timeout", type=_positive, default=10.0, metavar="S", help="for a body (default 10)")
    made.add_argument("--ui", action=argparse.BooleanOptionalAction, default=True, help="the page at / (default: yes)")
    made.add_argument("--quiet", action="store_true", help="log no requests")
    return made


def _between(low: int, high: int):
    def whole(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return whole


def _cores(text: str) -> int:
    return 0 if text == "auto" else _between(1, 4096)(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12})(|B|KiB|MiB|GiB)", text, re.IGNORECASE)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 6MiB, 512KiB or 1000000")
    return int(match[1]) * UNITS[match[2].lower()]


if __name__ == "__main__":
    sys.exit(main())
