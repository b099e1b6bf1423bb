"""`kd-export`, `kd-serve` and `kd-predict`. The last two start without torch."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli.command import Parser, add_trust, guarded, new_parser, whole_number

DRAIN = 5
SAGEMAKER_WORD, SAGEMAKER_MODEL = "serve", "/opt/ml/model"
"""SageMaker starts a container as `docker run IMAGE serve`, with the export in this folder."""
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
GRAPHS = "model.onnx (default), model.int8.onnx or openvino.xml"


def export(argv: Sequence[str] | None = None) -> int:
    """`kd-export RUN [--to FOLDER]`: write the best student as a folder that timm loads and `kd-serve` serves."""
    options = _export_parser().read(argv)

    def command() -> None:
        from kd.export.export import Options, export

        exported = export(
            options.run,
            options.to,
            Options(
                onnx=options.onnx,
                int8=options.int8,
                openvino=options.openvino,
                pt2=options.pt2,
                calibrate=options.calibrate,
                max_drop=options.max_drop,
                tolerance=options.tolerance,
                images=options.images,
                license=options.license,
            ),
            options.overrides,
            options.trust,
        )
        print(f"wrote {exported.folder}")
        for line in exported.lines:
            print(f"  {line}")
        if options.sagemaker:
            from kd.sagemaker.archives import sagemaker_archives

            for path in sagemaker_archives(exported.folder):
                print(f"wrote {path}")
        if options.push:
            from kd.export.hub import push

            print(f"uploaded to {push(exported.folder, options.push)}")
        print(f"load it:  timm.create_model('local-dir:{exported.folder}', pretrained=True)")
        if options.onnx:
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
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="where the data lies now: data.root=FOLDER")
    parser.add_argument("--to", metavar="FOLDER", type=Path, help="where to write (default: RUN/export)")
    parser.add_argument(
        "--onnx", action=argparse.BooleanOptionalAction, default=True, help="write model.onnx (default: yes)"
    )
    parser.add_argument("--int8", action="store_true", help="also model.int8.onnx, if it is about as accurate")
    parser.add_argument("--openvino", action="store_true", help="also openvino.xml; needs kd[openvino]")
    parser.add_argument("--pt2", action="store_true", help="also model.pt2 for torch.export.load")
    parser.add_argument(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="divide the logits by a temperature fitted on validation images, so that confidences are right on "
        "average; the answers stay the same (default: yes, where graphs are written)",
    )
    parser.add_argument("--sagemaker", action="store_true", help="also model.tar.gz for SageMaker, in FOLDER-sagemaker")
    parser.add_argument("--push", metavar="OWNER/NAME", default="", help="upload to the Hugging Face hub")
    parser.add_argument(
        "--license", metavar="ID", default="", help="licence to state in the model card, e.g. apache-2.0"
    )
    parser.add_argument(
        "--max-drop", metavar="X", type=float, default=0.01, help="accuracy int8 may lose (default 0.01)"
    )
    parser.add_argument(
        "--tolerance", metavar="X", type=float, default=1e-3, help="logits may differ by this much (default 1e-3)"
    )
    parser.add_argument(
        "--images", metavar="N", type=int, default=2000, help="images compared, evenly spaced; 0: all (default 2000)"
    )
    add_trust(parser)
    return parser


def serve(argv: Sequence[str] | None = None) -> int:
    """`kd-serve FOLDER`: answer for an export over HTTP, on a CPU, without torch."""
    options = _serve_parser().read(argv)

    def command() -> None:
        from kd.serve.limits import Limits
        from kd.serve.server import Settings, serve

        hosted = options.folder == SAGEMAKER_WORD
        limits = Limits(
            max_body=options.max_body,
            max_pixels=int(options.max_pixels),
            max_images=options.max_images,
            max_in_flight=options.max_in_flight,
            deadline=options.deadline,
            body_seconds=options.body_timeout,
            drain_seconds=(DRAIN if hosted else 0) if options.drain is None else options.drain,
        )
        port = options.port
        serve(
            Settings(
                folder=Path(SAGEMAKER_MODEL if hosted else options.folder),
                file=options.file,
                host=options.host or ("0.0.0.0" if hosted else "127.0.0.1"),
                port=port if port is not None else int(os.environ.get("SAGEMAKER_BIND_TO_PORT", 8080)),
                cores=options.threads,
                slots=options.slots,
                ui=options.ui and not hosted,
                quiet=options.quiet,
                log_format=options.log_format,
                limits=limits,
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
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help=f"what kd-export wrote; the bare word `{SAGEMAKER_WORD}`: {SAGEMAKER_MODEL}, on 0.0.0.0",
    )
    parser.add_argument("--file", default="model.onnx", help=GRAPHS)
    parser.add_argument("--host", default="", help="interface (default 127.0.0.1: only this machine)")
    parser.add_argument("--port", type=whole_number(0, 65535), help="default 8080; 0: any free one, which is printed")
    parser.add_argument(
        "--threads", type=_cores, default=0, metavar="N", help="cores to use (default auto: the cgroup's)"
    )
    parser.add_argument("--slots", type=whole_number(1, 1024), default=0, metavar="N", help="requests computed at once")
    parser.add_argument("--max-body", type=_size, default=6 * 2**20, metavar="SIZE", help="of a request (default 6MiB)")
    parser.add_argument("--max-pixels", type=_positive, default=25e6, metavar="N", help="of an image (default 25e6)")
    parser.add_argument(
        "--max-images", type=whole_number(1, 1024), default=16, metavar="N", help="in a request (default 16)"
    )
    parser.add_argument(
        "--max-in-flight", type=whole_number(1, 65536), default=32, metavar="N", help="then 503 (default 32)"
    )
    parser.add_argument("--deadline", type=_positive, default=10.0, metavar="S", help="for an answer (default 10)")
    parser.add_argument("--body-timeout", type=_positive, default=10.0, metavar="S", help="for a body (default 10)")
    parser.add_argument(
        "--ui", action=argparse.BooleanOptionalAction, default=True, help="the page at / (default: yes)"
    )
    parser.add_argument(
        "--drain",
        type=whole_number(0, 3600),
        metavar="S",
        help=f"from SIGTERM, /ping fails for so long before the port closes (default {DRAIN} of `serve`, else 0)",
    )
    parser.add_argument("--quiet", action="store_true", help="log no requests")
    parser.add_argument("--log-format", choices=["text", "json"], default="text", help="json: an object a line")
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
    count = whole_number(0, 999_999_999)
    parser.add_argument("export", metavar="EXPORT", type=Path, help="what kd-export wrote")
    parser.add_argument(
        "images",
        metavar="IMAGES",
        help="a folder, a list (a path a line), shards (train-{000..009}.tar), or a URL such as s3://BUCKET/PREFIX",
    )
    parser.add_argument(
        "--to", metavar="FILE", type=Path, default=Path("predictions.csv"), help=".csv, .jsonl or .parquet"
    )
    parser.add_argument("--file", default="model.onnx", help=GRAPHS)
    parser.add_argument("--top", metavar="N", type=count, default=1, help="labels of each image; 0: all (default 1)")
    parser.add_argument("--threads", metavar="N", type=count, default=0, help="cores to use; 0: all (default 0)")
    parser.add_argument("--max-pixels", metavar="N", type=count, default=100_000_000, help="of an image (default 1e8)")
    options = parser.read(argv)

    def command() -> None:
        from kd.predict.run import Settings, predict

        result = predict(
            Settings(
                export=options.export,
                images=options.images,
                to=options.to,
                file=options.file,
                top=options.top,
                cores=options.threads,
                max_pixels=options.max_pixels,
            )
        )
        earlier = f", {result.resumed} of them by an earlier start" if result.resumed else ""
        speed = (result.images - result.resumed) / max(result.seconds, 1e-9)
        print(f"{result.images} images{earlier}, {speed:.1f} images/s: {options.to}")
        if result.num_unreadable:
            print(f"{result.num_unreadable} images are unreadable; their rows have an error:", file=sys.stderr)
            print(*(f"  {line}" for line in result.unreadable), sep="\n", file=sys.stderr)

    return guarded(command, resumable=True)
