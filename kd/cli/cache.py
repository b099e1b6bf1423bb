"""`kd-cache CONFIG [key=value ...] [--verify] [--export FILE]`: compute the teacher's logits ahead of training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kd.cli._common import guarded, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser(
        "kd-cache",
        "Fill the teacher's cache of CONFIG ahead of training, on any number of ranks. Interrupted, the same command "
        "goes on.",
        "kd-cache configs/vit_food.yaml teacher.cache.views=4",
    )
    made.add_argument("--verify", action="store_true", help="compute a sample of the records again and compare")
    text = "also write the answers by file name, for teacher.kind=answers elsewhere (.safetensors)"
    made.add_argument("--export", metavar="FILE", default="", help=text)
    given = made.parse_intermixed_args(argv)

    def command() -> None:
        from kd import config
        from kd.jobs.cache import cache

        done = cache(config.load(given.config, given.overrides), given.verify, given.export)
        print(
            f"cache: '{done.folder}' holds {done.records} records, {done.missing} are missing; "
            f"the teacher ran on {done.computed} images in {done.seconds:.1f} s"
        )
        if given.export:
            print(f"cache: wrote '{given.export}'")
        if given.verify:
            print(f"cache: largest difference between a stored logit and the teacher's: {done.difference:.3g}")

    return guarded(command, resumable=True)


if __name__ == "__main__":
    sys.exit(main())
