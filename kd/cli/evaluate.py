"""`kd-evaluate RUN [key=value ...]`: student, teacher and their agreement; with `--endpoint`, a running endpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-evaluate",
        "Evaluate the best student of a run folder, its teacher and their agreement on the validation split; or, with "
        "--endpoint and --data, a running endpoint on a folder of class folders.",
        "kd-evaluate runs/vit_food data.workers=2\n"
        "         kd-evaluate --endpoint http://localhost:8080 --data images/val",
        with_config=False,
    )
    made.add_argument("run", metavar="RUN", type=Path, nargs="?", help="a run folder")
    made.add_argument("overrides", metavar="key=value", nargs="*", help="keys of the run's configuration to change")
    made.add_argument("--endpoint", metavar="URL", default="", help="what kd-serve printed")
    made.add_argument("--data", metavar="FOLDER", type=Path, help="images at FOLDER/<label>/...")
    given = made.parse_intermixed_args(argv)
    if bool(given.endpoint) != bool(given.data) or bool(given.endpoint) == bool(given.run):
        made.error("give either RUN, or --endpoint URL and --data FOLDER")

    def command() -> None:
        if given.endpoint:
            from kd.serve import client

            values = client.evaluate(given.endpoint, given.data)
        else:
            from kd.jobs.evaluate import evaluate

            values = evaluate(given.run, given.overrides)
        for name, value in values.items():
            print(f"{name:20s} {value:.4f}" if isinstance(value, float) else f"{name:20s} {value}")

    return guarded(command)


if __name__ == "__main__":
    sys.exit(main())
