"""`kd-export RUN [--to FOLDER]`: write the best student as a folder that timm loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-export",
        "Write the best student of a run folder as a folder that timm loads, class names included.",
        "kd-export runs/vit_food",
        with_config=False,
    )
    made.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    made.add_argument("--to", metavar="FOLDER", type=Path, help="where to write (default: RUN/export)")
    given = made.parse_args(argv)

    def command() -> None:
        from kd import jobs

        target = jobs.export(given.run, given.to)
        print(f"wrote {target}")
        print(f"load it: timm.create_model('local-dir:{target}', pretrained=True)")

    return guarded(command)


if __name__ == "__main__":
    sys.exit(main())
