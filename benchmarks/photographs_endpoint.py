"""What a photograph costs `kd-serve` over HTTP by its size, decoded whole and reduced:
CPU time of the server.

    python benchmarks/photographs_endpoint.py EXPORT IMAGES [--rounds 3] [--seconds 3]

EXPORT and IMAGES as for photographs.py. Two servers of one thread and two slots take
turns: one has the export, one a copy whose manifest says `margin` 0, as exports had
before JPEGs were reduced. One client sends a photograph of each size for some seconds,
then eight clients one of 12 million pixels. `model_ms` is the graph alone, in this
process. Server and clients share the machine; a clock of the kernel counts hundredths
of a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _load import Server, closed_loop, kd_serve, percentile, request
from photographs import LIMITS, SIDES, enlarged, milliseconds

from _record import write
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.model import describe, load
from kd.files.manifest import MANIFEST
from kd.files.pixels import MARGIN

CASES = [*((size, 1) for size in SIDES), ("12 MP", 8)]


def unreduced(export: Path, into: Path) -> Path:
    """Copy an export as one of before JPEGs were reduced."""
    shutil.copytree(export, into)
    manifest = json.loads((into / MANIFEST).read_text())
    del manifest["checksum"]  # they had none, either
    manifest["input"]["margin"] = 0
    (into / MANIFEST).write_text(json.dumps(manifest))
    return into


def measured_load(
    server: Server, body: bytes, clients: int, seconds: float
) -> dict[str, Any]:
    """Send a photograph again and again, and return what that took."""
    message = request(server.url, body, "image/jpeg")
    asyncio.run(closed_loop(server.url, message, clients, 0.2))
    cpu_seconds = server.cpu_seconds()
    began = time.perf_counter()
    answers = asyncio.run(closed_loop(server.url, message, clients, seconds))
    cpu_seconds = server.cpu_seconds() - cpu_seconds
    took = time.perf_counter() - began
    assert {answer.status for answer in answers} == {200}
    waits = [1000 * answer.took for answer in answers]
    return {
        "cpu_ms": round(1000 * cpu_seconds / len(answers), 2),
        "p50_ms": round(percentile(waits, 0.5), 1),
        "p99_ms": round(percentile(waits, 0.99), 1),
        "per_second": round(len(answers) / took, 1),
        "answers": len(answers),
    }


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    paths = sorted(options.images.rglob("*.jpg"))
    random.Random(0).shuffle(paths)
    bodies = {size: enlarged(paths[0], sides) for size, sides in SIDES.items()}
    model = load(describe(options.export), 1, 1)
    pixels = prepare(bodies["as it is"], model.size, model.crop, LIMITS).pixels[None]
    alone = statistics.median(
        milliseconds(lambda: model.engine(pixels)) for _ in range(50)
    )
    flags = (
        "--max-pixels",
        "100e6",
        "--max-body",
        "64MiB",
        "--threads",
        "1",
        "--slots",
        "2",
        "--no-self-check",
    )
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = {
            0.0: unreduced(options.export, Path(temporary) / "whole"),
            MARGIN: options.export,
        }
        servers = {
            margin: kd_serve(folder, *flags) for margin, folder in folders.items()
        }
        try:
            for turn in range(options.rounds):
                for size, clients in CASES:
                    for margin in servers if turn % 2 else reversed(servers):
                        measured = measured_load(
                            servers[margin], bodies[size], clients, options.seconds
                        )
                        common = {
                            "photograph": size,
                            "clients": clients,
                            "margin": margin,
                            "round": turn,
                        }
                        rows.append({**common, **measured, "model_ms": round(alone, 2)})
                        print(rows[-1], flush=True)
        finally:
            for server in servers.values():
                server.stop()
    flags = f"--rounds {options.rounds} --seconds {options.seconds:g}"
    write(
        "photographs_endpoint",
        f"python benchmarks/photographs_endpoint.py EXPORT IMAGES {flags}",
        rows,
    )


if __name__ == "__main__":
    main()
