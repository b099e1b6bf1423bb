"""`kd-teach CONFIG [key=value ...]`: fit the teacher that a configuration describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-teach",
        "Fit the teacher of CONFIG (or several) on the labels, keep its best epoch, and print its folder. "
        "One fitted before from the same content is reused.",
        "kd-teach configs/vit_food101.yaml teacher.fit.epochs=10",
    )
    given = made.parse_intermixed_args(argv)

    def command() -> None:
        from kd import config
        from kd.jobs.teach import teach

        for folder in teach(config.load(given.config, given.overrides)):
            print(folder)

    return guarded(command, resumable=True)


if __name__ == "__main__":
    sys.exit(main())
