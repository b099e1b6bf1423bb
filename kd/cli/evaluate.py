"""`kd-evaluate RUN [key=value ...]`: student, teacher and their agreement on the validation split."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-evaluate",
        "Evaluate the best student of a run folder, its teacher and their agreement on the validation split.",
        "kd-evaluate runs/vit_food data.workers=2",
        with_config=False,
    )
    made.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    made.add_argument("overrides", metavar="key=value", nargs="*", help="keys of the run's configuration to change")
    given = made.parse_intermixed_args(argv)

    def command() -> None:
        from kd import jobs

        for name, value in jobs.evaluate(given.run, given.overrides).items():
            print(f"{name:20s} {value:.4f}")

    return guarded(command)


if __name__ == "__main__":
    sys.exit(main())
