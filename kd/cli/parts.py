"""`kd-parts [FOLDER]`: list the losses, sifters, datasets and backends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser("kd-parts", "List the parts that a configuration can name.", "kd-parts losses", with_config=False)
    made.add_argument("folder", nargs="?", help="losses, sifters, datasets or backends (default: all)")
    given = made.parse_args(argv)

    def command() -> None:
        from kd import parts
        from kd.errors import ConfigError, did_you_mean

        if given.folder and given.folder not in parts.FOLDERS:
            near = did_you_mean(given.folder, parts.FOLDERS) or "Give none to see all"
            raise ConfigError("kd-parts", f"no folder '{given.folder}'", f"Allowed: {', '.join(parts.FOLDERS)}", near)
        for folder in [given.folder] if given.folder else parts.FOLDERS:
            print(f"{folder}:")
            for name, summary in parts.describe(folder):
                print(f"  {name:14s} {summary}")

    return guarded(command)


if __name__ == "__main__":
    sys.exit(main())
