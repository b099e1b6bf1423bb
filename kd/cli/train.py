"""`kd-train CONFIG [key=value ...] [--check] [--compile-only]`: distill a teacher into a student."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-train",
        "Distill a frozen teacher into a small student. The same command resumes a run that was interrupted.",
        "kd-train configs/vit_food.yaml run.epochs=5 optimizer.lr=5e-4",
    )
    made.add_argument(
        "--check",
        action="store_true",
        help="check everything, time a few steps, say what the run takes and costs; train nothing",
    )
    made.add_argument(
        "--compile-only",
        action="store_true",
        help="make every graph of the run in a few steps and write nothing, for neuron_parallel_compile",
    )
    given = made.parse_intermixed_args(argv)

    def command() -> None:
        from kd import config
        from kd.jobs.forecast import forecast
        from kd.jobs.precompile import compile_only
        from kd.jobs.train import train
        from kd.setup.recipe import resolve

        settings = config.load(given.config, given.overrides)
        if given.check:
            print(forecast(resolve(settings), given.config))
            return
        if given.compile_only:
            print(compile_only(settings))
            return
        text = train(settings).report
        if text:
            print("\n" + text)

    return guarded(command, resumable=True)


if __name__ == "__main__":
    sys.exit(main())
