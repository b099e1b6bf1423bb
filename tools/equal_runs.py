"""Are two fresh runs of one file and seed the same bits, one of them beside a busy
neighbour?

    python tools/equal_runs.py --pairs 5

Everything that `auto` decides is left to it. A run fits its teacher, distills it and
writes its folder anew. The neighbour keeps all cores busy with matrix products.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from same_losses import digest, settings

BUSY = "import torch\nwhile True: torch.randn(700, 700) @ torch.randn(700, 700)"
FIXED = {
    "teacher": ("precision", "attention", "compile", "runtime"),
    "student": ("attention", "compile"),
}
"""Keys that the golden runs fix, left to `auto` here; and all of `backend` but its
kind.
"""


def train(folder: Path) -> tuple[str, float, str]:
    """Train in an empty folder; return its rows' hash, the last loss, and what ran."""
    chosen = settings("live", folder)
    for section, keys in FIXED.items():
        for key in keys:
            del chosen[section][key]
    chosen["backend"] = {"kind": "cpu"}
    file = folder / "live.json"
    file.write_text(json.dumps(chosen))
    command = [
        sys.executable,
        str(Path(__file__).with_name("same_losses.py")),
        "--one",
        str(file),
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stdout[-500:] + ended.stderr[-2000:])
    manifest = json.loads((folder / "live" / "manifest.json").read_text())
    return (
        *digest(folder / "live"),
        f"{manifest['modes']}, {manifest['threads']} threads",
    )


@contextmanager
def neighbour() -> Iterator[None]:
    """Keep all cores busy meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """Run the pairs; the exit code is the number of those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    differing = 0
    with tempfile.TemporaryDirectory() as temporary:
        os.environ.setdefault("FOOD_MINI", f"{temporary}/food")
        for number in range(args.pairs):
            folders = [
                Path(temporary) / f"{number}-{name}" for name in ("alone", "beside")
            ]
            for folder in folders:
                folder.mkdir()
            alone = train(folders[0])
            with neighbour():
                beside = train(folders[1])
            differing += alone != beside
            print(
                f"pair {number + 1}: {'equal' if alone == beside else 'DIFFERENT'}",
                alone,
                beside,
                flush=True,
            )
    return differing


if __name__ == "__main__":
    raise SystemExit(main())
