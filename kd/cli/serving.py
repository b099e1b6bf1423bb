"""`kd-export`, `kd-serve` and `kd-predict`. The last two start without torch."""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from pathlib import Path

from kd.cli.command import Parser, add_fields, add_trust, guarded, new_parser, taken, whole_number
from kd.core.errors import Interrupted
from kd.core.text import VARIANTS_NOTE, table, variant_rows
from kd.deploy.export.options import GROUPS, NAMES, ExportOptions

SAGEMAKER_WORD, SAGEMAKER_MODEL = "serve", "/opt/ml/model"
"""SageMaker starts a container as `docker run IMAGE serve`, with the export in this folder."""
DRAIN = 5  # seconds that a container drains; SageMaker and Kubernetes ask for its health every few seconds
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
GRAPHS = "the graph (default: the one that kd-export --compare picked, or model.onnx)"


def export(argv: Sequence[str] | None = None) -> int:
    """`kd-export RUN [--to FOLDER]`: write the best student as a folder that timm loads and `kd-serve` serves."""
    options = _export_parser().read(argv)

    def command() -> None:
        from kd.deploy.export.export import export

        wanted = ExportOptions.of(**{name: getattr(options, name) for name in (*NAMES, "license")})
        exported = export(options.run, options.to, wanted, options.overrides, options.trust, options.teacher)
        print(f"wrote {exported.folder}")
        for line in exported.lines:
            print(f"  {line}")
        if rows := variant_rows(exported.manifest):
            print(f"{table(rows)}\n{VARIANTS_NOTE}\npicked: {exported.manifest['pick']}, which kd-serve now loads")
        if options.sagemaker:
            from kd.cluster.archives import sagemaker_archives

            archives = sagemaker_archives(exported.folder)
            print(*(f"wrote {path}" for path in archives), sep="\n")
            if len(archives) == 1:
                why = "without a network of your own, and without the map into the teacher's space"
                print(f"left out: pytorch/model.tar.gz, which runs the weights in timm, {why}")
        print(f"load it:  {exported.load}")
        if wanted.graphs.onnx:
            print(f"serve it: kd-serve {exported.folder}")

    return guarded(command)


def _export_parser() -> Parser:
    parser = new_parser(
        "kd-export",
        "Write the best student of a run as one folder: for timm, for onnxruntime, for `kd-serve`. Every graph is "
        "compared with PyTorch on the run's validation images before it is kept.",
        "kd-export runs/vit_food --int8",
        with_config=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder")
    add("overrides", metavar="key=value", nargs="*", help="where the data lies now: data.root=FOLDER")
    add("--to", metavar="FOLDER", type=Path, help="where to write (default: RUN/export)")
    text = "write the teacher, for kd-predict --second (default folder: RUN/export-teacher)"
    add("--teacher", action="store_true", help=text)
    for group in (*GROUPS.values(), ExportOptions):
        add_fields(parser, group)
    add("--sagemaker", action="store_true", help="also model.tar.gz for SageMaker, in FOLDER-sagemaker")
    add_trust(parser)
    return parser


def serve(argv: Sequence[str] | None = None) -> int:
    """`kd-serve FOLDER`: answer for an export over HTTP, on a CPU, without torch."""
    options = _serve_parser().read(argv)

    def command() -> None:
        from kd.deploy.serve.limits import Limits
        from kd.deploy.serve.server import ServeOptions, serve

        hosted = options.folder == SAGEMAKER_WORD
        if options.drain_seconds is None:
            options.drain_seconds = DRAIN if hosted else 0
        serve(
            taken(
                ServeOptions,
                options,
                folder=Path(SAGEMAKER_MODEL if hosted else options.folder),
                host=options.host or ("0.0.0.0" if hosted else "127.0.0.1"),
                ui=options.ui and not hosted,
                limits=taken(Limits, options, max_pixels=int(options.max_pixels)),
            )
        )

    return guarded(command)


def _serve_parser() -> Parser:
    parser = new_parser(
        "kd-serve",
        "Answer for an export over HTTP: POST /invocations, GET /ping, GET /metrics, and a page at /.",
        "kd-serve runs/vit_food/export",
        with_config=False,
    )
    add, count = parser.add_argument, whole_number
    hosted = f"the bare word `{SAGEMAKER_WORD}`: {SAGEMAKER_MODEL}, on 0.0.0.0"
    add("folder", metavar="FOLDER", help=f"what kd-export wrote; {hosted}")
    add("--file", metavar="FILE", default="", help=GRAPHS)
    add("--host", metavar="HOST", default="", help="interface (default 127.0.0.1: only this machine)")
    port = os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080")
    text = f"default {port}; 0: any free one, which is printed"
    add("--port", metavar="PORT", type=count(0, 65535), default=port, help=text)
    add("--threads", metavar="N", dest="cores", type=_cores, default=0, help="cores to use (default auto: all it may)")
    add("--slots", metavar="N", type=count(1, 1024), default=0, help="requests computed at once")
    add("--max-body", metavar="SIZE", type=_size, default=6 * 2**20, help="of a request (default 6MiB)")
    add("--max-pixels", metavar="N", type=_positive, default=25e6, help="of an image (default 25e6)")
    add("--max-images", metavar="N", type=count(1, 1024), default=16, help="in a request (default 16)")
    add("--max-in-flight", metavar="N", type=count(1, 65536), default=32, help="then 503 (default 32)")
    add("--deadline", metavar="S", type=_positive, default=10.0, help="for an answer (default 10)")
    text = "for a body (default 10)"
    add("--body-timeout", metavar="S", dest="body_seconds", type=_positive, default=10.0, help=text)
    text = f"from SIGTERM, /ping fails for so long before the port closes (default {DRAIN} of `serve`, else 0)"
    add("--drain", metavar="S", dest="drain_seconds", type=count(0, 3600), help=text)
    add("--ui", action=BooleanOptionalAction, default=True, help="the page at / (default: yes)")
    add("--quiet", action="store_true", help="log no requests")
    add("--log-format", choices=["text", "json"], default="text", help="json: an object a line")
    return parser


def _cores(text: str) -> int:
    return 0 if text == "auto" else whole_number(1, 4096)(text)


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


def predict(argv: Sequence[str] | None = None) -> int:
    """`kd-predict EXPORT IMAGES`: classify many images on a CPU, without torch."""
    parser = new_parser(
        "kd-predict",
        "Classify images and write a row for each: image, label, score, error. Interrupted, the same command resumes.",
        "kd-predict runs/vit_food/export photos --to labels.csv",
        with_config=False,
    )
    add, count = parser.add_argument, whole_number(0, 999_999_999)
    add("export", metavar="EXPORT", type=Path, help="what kd-export wrote")
    text = (
        "a folder, an image, a list (a path a line), shards (train-{000..009}.tar), a URL such as s3://BUCKET/PREFIX, "
        "or -: an image or a list on the standard input"
    )
    add("images", metavar="IMAGES", help=text)
    add("--to", metavar="FILE", type=Path, default=Path("predictions.csv"), help=".csv, .jsonl or .parquet")
    add("--file", metavar="FILE", default="", help=GRAPHS)
    text = "another export, such as the teacher's, that answers where the first is not sure (kd-export --defer)"
    add("--second", metavar="EXPORT", type=Path, help=text)
    add("--top", metavar="N", type=count, default=1, help="labels of each image; 0: all (default 1)")
    add("--threads", metavar="N", dest="cores", type=count, default=0, help="cores to use; 0: all (default 0)")
    add("--max-pixels", metavar="N", type=count, default=100_000_000, help="of an image (default 1e8)")
    add("--ray", action="store_true", help="use all hosts of the Ray cluster that RAY_ADDRESS names")
    options = parser.read(argv)

    def command() -> None:
        from kd.deploy.predict.predict import PredictOptions, predict

        result = predict(taken(PredictOptions, options))
        earlier = f", {result.resumed} of them by an earlier start" if result.resumed else ""
        speed = (result.images - result.resumed) / max(result.seconds, 1e-9)
        hosts = f" on {result.hosts} hosts" if options.ray else ""
        passed = f", {result.passed_on} of them by the second model" if options.second else ""
        print(f"{result.images} images{earlier}{passed}, {speed:.1f} images/s{hosts}: {options.to}")
        print(*result.notes, sep="\n", end="\n" if result.notes else "")
        if result.num_unreadable:
            print(f"{result.num_unreadable} images are unreadable; their rows have an error:", file=sys.stderr)
            print(*(f"  {line}" for line in result.unreadable), sep="\n", file=sys.stderr)

    code = guarded(command, resumable=True)
    if code == Interrupted.exit_code and threading.active_count() > 1:  # one waits for a storage that does not answer
        sys.stdout.flush()
        os._exit(code)
    return code
