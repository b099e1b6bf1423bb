"""Run kd-export, kd-serve, kd-predict and kd-verify.

kd-serve and kd-predict start without torch.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from kd.cli.command import (
    Parser,
    add_fields,
    add_trust,
    from_options,
    new_parser,
    run_guarded,
)
from kd.core.errors import Interrupted
from kd.core.text import VARIANTS_NOTE, markdown_table, variant_rows
from kd.deploy.export.flags import ExportOptions, accepted_line
from kd.files.manifest import graphs_by_priority

# SageMaker starts a container as `docker run IMAGE serve`, with the export in a folder
SAGEMAKER_WORD = "serve"
SAGEMAKER_MODEL = "/opt/ml/model"
# seconds that a container drains; SageMaker and Kubernetes check its health every few
# seconds
DRAIN = 5


def export(argv: Sequence[str] | None = None) -> int:
    """Write a run's best student as a folder: `kd-export RUN [--to FOLDER]`."""
    options = _export_parser().read(argv)

    def command() -> None:
        from kd.deploy.export.export import export

        settings = from_options(ExportOptions, options)
        exported = export(
            options.run,
            options.to,
            settings,
            options.overrides,
            options.trust,
            options.teacher,
        )
        print(f"wrote {exported.folder}")
        for line in exported.lines:
            print(f"  {line}")
        if rows := variant_rows(exported.manifest):
            print(f"{markdown_table(rows)}\n{VARIANTS_NOTE}")
        cascade = exported.manifest.get("cascade")
        if accepted := exported.manifest.get("accepted") or cascade:
            print(f"{accepted_line(accepted)}, which kd-serve now loads")
        if options.sagemaker:
            from kd.cluster.aws import write_archive

            print(f"wrote {write_archive(exported.folder)}")
        print(f"load it:  {exported.load}")
        if settings.onnx:
            second = f" --second {options.second}" if cascade else ""
            print(f"serve it: kd-serve {exported.folder}{second}")
            first, *others = graphs_by_priority(exported.manifest)
            if others:
                print(f"          it loads {first}; --file loads {' or '.join(others)}")

    return run_guarded(command)


def _export_parser() -> Parser:
    parser = new_parser(
        "kd-export",
        "Write the best student of a run as one folder: for timm, for onnxruntime, for"
        " `kd-serve`. Every graph is compared with PyTorch on the run's validation"
        " images before it is kept.",
        'kd-export runs/vit_food --accept "drop<=1 ms<=5"',
        with_config=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder")
    add(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="the data's present place: data.root=FOLDER",
    )
    add(
        "--to", metavar="FOLDER", type=Path, help="where to write (default: RUN/export)"
    )
    text = (
        "write the teacher, for kd-predict --second (default folder:"
        " RUN/export-teacher)"
    )
    add("--teacher", action="store_true", help=text)
    add_fields(parser, ExportOptions)
    add(
        "--sagemaker",
        action="store_true",
        help="also model.tar.gz for SageMaker, in FOLDER-sagemaker",
    )
    add_trust(parser)
    return parser


def serve(argv: Sequence[str] | None = None) -> int:
    """Serve an export over HTTP on a CPU, without torch: `kd-serve FOLDER`."""
    # Pillow reads this at import and keeps this many blocks of pixels for later images.
    # Freeing and reallocating them causes page faults (600 x 450 JPEG: decode 2.5
    # instead of 3.7 ms, three runs, busy machine).
    os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")
    from kd.deploy.serve.limits import BODY, SAGEMAKER_BODY, Limits
    from kd.deploy.serve.server import ServeOptions, serve

    parser = new_parser(
        "kd-serve",
        "Serve an export over HTTP: POST /invocations, GET /ping, GET /metrics, and a"
        " page at /.",
        "kd-serve runs/vit_food/export",
        with_config=False,
    )
    add_fields(parser, ServeOptions)
    add_fields(parser, Limits)
    parser.set_defaults(
        host="",
        port=os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080"),
        drain_seconds=None,
        max_body=None,
    )
    options = parser.read(argv)

    def command() -> None:
        hosted = options.folder == SAGEMAKER_WORD
        if options.drain_seconds is None:
            options.drain_seconds = DRAIN if hosted else 0
        if options.max_body is None:
            options.max_body = SAGEMAKER_BODY if hosted else BODY
        folder = Path(SAGEMAKER_MODEL if hosted else options.folder)
        host = options.host or ("0.0.0.0" if hosted else "127.0.0.1")
        settings = from_options(
            ServeOptions,
            options,
            folder=folder,
            host=host,
            ui=options.ui and not hosted,
            limits=from_options(Limits, options),
        )
        serve(settings)

    return run_guarded(command)


def predict(argv: Sequence[str] | None = None) -> int:
    """Classify many images on a CPU, without torch: `kd-predict EXPORT IMAGES`."""
    from kd.deploy.predict.predict import PredictOptions, predict

    parser = new_parser(
        "kd-predict",
        "Classify images and write a row for each: image, label, score, error. An"
        " interrupted command resumes.",
        "kd-predict runs/vit_food/export photos --to labels.csv",
        with_config=False,
    )
    add_fields(parser, PredictOptions)
    options = parser.read(argv)

    def command() -> None:
        result = predict(from_options(PredictOptions, options))
        speed = (result.images - result.resumed) / max(result.seconds, 1e-9)
        text = f"{result.images} images"
        if result.resumed:
            text += f", {result.resumed} of them by an earlier start"
        if options.second:
            text += f", {result.passed_on} of them by the second model"
        print(f"{text}, {speed:.1f} images/s: {options.to}")
        print(*result.notes, sep="\n", end="\n" if result.notes else "")
        if result.num_unreadable:
            print(
                f"{result.num_unreadable} images are unreadable; their rows have an"
                " error:",
                file=sys.stderr,
            )
            lines = [f"  {line}" for line in result.unreadable]
            print(*lines, sep="\n", file=sys.stderr)

    code = run_guarded(command, resumable=True)
    # a thread still waits for a hanging storage
    if code == Interrupted.exit_code and threading.active_count() > 1:
        sys.stdout.flush()
        os._exit(code)
    return code


def verify(argv: Sequence[str] | None = None) -> int:
    """Recompute an export's claims: `kd-verify EXPORT --data IMAGES`."""
    # exit code 1: a claim is wrong; 3: no export
    from kd.deploy.verify.verify import VerifyOptions, verify

    parser = new_parser(
        "kd-verify",
        "Recompute every claim in an export's model card and manifest, from its files"
        " and the images used at export.",
        "kd-verify runs/vit_food/export --data images/val",
        with_config=False,
    )
    add_fields(parser, VerifyOptions)
    options = parser.read(argv)

    def command() -> None:
        with redirect_stdout(sys.stderr):  # the log
            result = verify(from_options(VerifyOptions, options))
        if options.json:
            content = {
                "chain": result.manifest.get("chain"),
                "licences": result.manifest.get("licences"),
                "verdict": result.line,
                "rows": [row._asdict() for row in result.rows],
            }
            print(json.dumps(content, indent=1))
        else:
            print("\n".join(result.lines))
        result.require(options.strict)

    return run_guarded(command)
