"""`kd-report RUN... [--price] [key=value ...]`: show where the time and the money of runs went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kd.cli.command import Parser, add_fields, add_trust, guarded, new_parser
from kd.core.options import option, whole_number


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """What is written, and where."""

    to: Path | None = option(None, "FILE", Path)
    """where to write the page (default: report.html in the first RUN), or the prices"""
    price: bool = option(False)
    """print throughput, billable time, cost and saving only"""
    images: int = option(2000, "N", whole_number(0, 10**9))
    """validation images to ask both models; 0: all"""


def report(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().read(argv)
    overrides = [text for text in options.runs if "=" in text and not Path(text).is_dir()]
    paths = [Path(text) for text in options.runs if text not in overrides]

    def command() -> None:
        from kd.core.errors import ConfigError
        from kd.core.text import table
        from kd.files.storage import write_text
        from kd.study.report import report as job

        if not paths:
            wrong = f"'{overrides[0]}' is no run folder, and there is no other"
            raise ConfigError("RUN", wrong, "Run folders, then key=value", "Name one, such as runs/vit_food")
        if options.price:
            text = table(job.prices(paths, overrides, options.trust))
            print(text)
            if options.to:
                write_text(options.to, text + "\n", "--to")
        else:
            page = job.report(paths, options.to, options.images, overrides, options.trust)
            print(page.summary)
            print(f"wrote {page.file} ({page.size / 2**20:.2f} MiB, needs nothing from elsewhere)")

    return guarded(command)


def _parser() -> Parser:
    parser = new_parser(
        "kd-report",
        "Write one HTML file about a run, or about several side by side: findings, curves, where the time went, what "
        "the machine did, what was sifted, which classes and photographs the student loses against its teacher.",
        "kd-report runs/vit_food runs/zscore --to compared.html",
        with_config=False,
    )
    text = "run folders; also key=value, such as price.instance=NAME"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=text)
    add_fields(parser, ReportOptions)
    add_trust(parser)
    return parser
