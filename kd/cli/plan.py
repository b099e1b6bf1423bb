"""`kd-plan CONFIG --on MACHINE [xN]`: hours, cost and efficiency of a run on rented machines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-plan",
        "Say how many hours and dollars a configuration takes on 1, 2, ... devices of a machine, from a few measured "
        "steps and a model of the communication. The assumptions are printed.",
        "kd-plan configs/vit_food101.yaml --on p4d.24xlarge x4",
    )
    made.add_argument("--on", metavar=("MACHINE", "xN"), nargs="+", help="a machine of --instances, and how many")
    made.add_argument("--mfu", type=float, default=0.35, help="share of the peak rate that is reached (default 0.35)")
    made.add_argument("--run", metavar="RUN", type=Path, help="take the step from a run on such devices instead")
    made.add_argument("--instances", action=_Listing, help="list the known machines and their prices, and exit")
    given = made.parse_intermixed_args(argv)
    if not given.on:
        made.error("give --on MACHINE xN; --instances lists the machines")

    def command() -> None:
        from kd import config
        from kd.report.plan import plan
        from kd.setup.recipe import resolve

        print(plan(resolve(config.load(given.config, given.overrides)), given.on, given.mfu, given.run))

    return guarded(command)


class _Listing(argparse.Action):
    """Print the table of machines."""

    def __init__(self, option_strings: list[str], dest: str, **options: object) -> None:
        super().__init__(option_strings, dest, nargs=0, help=str(options["help"]))

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        """Print and exit."""
        from kd.report.plan import listing

        print(listing())
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
