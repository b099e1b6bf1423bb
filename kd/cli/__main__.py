"""`python -m kd.cli NAME ...` is `kd-NAME ...`, for launchers that start a module: torchrun, mpirun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kd.cli import launch, report, serving, training

COMMANDS = {
    "train": training.train,
    "teach": training.teach,
    "cache": training.cache,
    "evaluate": training.evaluate,
    "plan": training.plan,
    "parts": training.parts,
    "export": serving.export,
    "serve": serving.serve,
    "predict": serving.predict,
    "report": report.report,
    "launch": launch.launch,
}


def main(argv: Sequence[str]) -> int:
    """Run the command that the first word names and return its exit code."""
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m kd.cli NAME ..., NAME one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
