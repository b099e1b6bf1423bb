"""What does a small model save beside a large one: accuracy, time, memory, bytes and
dollars, at the endpoint.

Run: python benchmarks/what_you_save.py IMAGES NAME[@SEED]=EXPORT[:FILE][+SECOND] ... [--price ml.c7i.8xlarge]

IMAGES has class folders: the test photographs, scored once, over HTTP by one client of
a kd-serve with one thread. A system is an export, one of its graphs (default: the one
that kd-serve takes), and perhaps a second export for images on which the first is
unsure. SEED is that of its training. Systems take turns. Columns:

- `accuracy`, `passed_on`: of all photographs; `cpu_ms`: CPU time of the server per
  photograph as it is, decoded in it.
- `behind`, `behind_low`, `behind_high`: percentage points below the first system, with
  the interval of the paired difference; `cpu_share`: its `cpu_ms` over that of the
  first system.
- `p50_ms`, `p99_ms`: one client that sends the first photograph as it is, again and
  again; `p50_12mp_ms` and `p99_12mp_ms`: the same photograph enlarged to 12 million
  pixels.
- `per_core`: photographs per second of one busy core. `usd_per_million`: by the price
  of an instance's vCPU, two to a core, always busy.
- `mb`: of the graph's file, of both graphs of a pair; `memory_mb`: resident, at the
  end. `matrix_gflops`: the machine's own rate of matrix products on one thread, at the
  start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _load import Server, closed_loop, kd_serve, percentile, request
from mfu import matrix_rate
from photographs import SIDES, enlarged

from _record import write
from kd.config.bill import Bill
from kd.config.instances import TABLE
from kd.core.intervals import paired_interval, wilson_interval

Row = dict[str, Any]
LARGE = "12 MP"
DEFAULT = "model.onnx"


@dataclass(frozen=True)
class System:
    """A way to serve: a graph of an export, and perhaps a second export behind it."""

    name: str
    seed: int
    export: Path
    file: str
    second: Path | None

    @classmethod
    def parse(cls, text: str) -> System:
        """Read NAME[@SEED]=EXPORT[:FILE][+SECOND]."""
        title, _, names = text.partition("=")
        name, _, seed = title.partition("@")
        first, _, second = names.partition("+")
        export, _, file = first.partition(":")
        return cls(
            name, int(seed or 0), Path(export), file, Path(second) if second else None
        )

    def start(self) -> Server:
        """Start a server of one thread."""
        options = ["--threads", "1", "--slots", "1", "--no-ui"]
        options += ["--file", self.file] if self.file else []
        options += ["--second", str(self.second)] if self.second else []
        return kd_serve(self.export, *options)

    def megabytes(self) -> float:
        """Return the size of the graphs' files, MB of 10^6 bytes."""
        graphs = [graph_file(self.export, self.file)]
        if self.second:
            graphs.append(graph_file(self.second, ""))
        return (
            sum(
                path.stat().st_size
                for graph in graphs
                for path in (graph, graph.with_suffix(".bin"))
                if path.is_file()
            )
            / 1e6
        )


def graph_file(export: Path, file: str) -> Path:
    """Return the graph that kd-serve takes."""
    accepted = json.loads((export / "manifest.json").read_text()).get("accepted") or {}
    return export / (file or accepted.get("file") or DEFAULT)


def scored(system: System, images: Sequence[Path], first: list[bool]) -> Row:
    """Send every photograph once and return accuracy, share passed on and CPU time.

    `first`: which photographs the first system predicts correctly; filled if it is
    empty.
    """
    server = system.start()
    right = list[bool]()
    passed_on = 0
    try:
        predict(server, images[0])  # the first touches pages that are loaded later
        cpu_seconds = server.cpu_seconds()
        for image in images:
            answer = predict(server, image)
            right.append(answer["label"] == image.parent.name)
            passed_on += answer.get("model") == "second"
        cpu_seconds = server.cpu_seconds() - cpu_seconds
    finally:
        server.stop()
    first[:] = first or right
    accuracy = sum(right) / len(images)
    low, high = wilson_interval(accuracy, len(images))
    row: Row = {"images": len(images), "accuracy": round(100 * accuracy, 2)}
    row |= {"low": round(100 * low, 2), "high": round(100 * high, 2)}
    lost = sum(a and not b for a, b in zip(first, right, strict=True))
    gained = sum(b and not a for a, b in zip(first, right, strict=True))
    row["behind"] = round(100 * (lost - gained) / len(images), 2)
    row["behind_low"], row["behind_high"] = (
        round(100 * side, 2) for side in paired_interval(lost, gained, len(images))
    )
    row["passed_on"] = round(100 * passed_on / len(images), 2) if system.second else ""
    row["cpu_ms"] = round(1000 * cpu_seconds / len(images), 2)
    return row


def predict(server: Server, image: Path) -> Row:
    """Return the endpoint's prediction for one file."""
    headers = {"content-type": "application/octet-stream"}
    with urllib.request.urlopen(
        urllib.request.Request(server.url, image.read_bytes(), headers), timeout=60
    ) as reply:
        return json.load(reply)["predictions"][0]


def timed(
    systems: Sequence[System], image: Path, turns: int, seconds: float
) -> dict[System, Row]:
    """Let one client ask each system in turns, with the photograph as it is and
    enlarged.
    """
    bodies = {"": image.read_bytes(), "12mp_": enlarged(image, SIDES[LARGE])}
    waits: dict[tuple[System, str], list[float]] = {}
    servers = {system: system.start() for system in systems}
    rows: dict[System, Row] = {}
    try:
        for turn in range(turns):
            for system in list(servers)[:: 1 if turn % 2 else -1]:
                for kind, body in bodies.items():
                    url = servers[system].url
                    message = request(url, body, "image/jpeg")
                    asyncio.run(closed_loop(url, message, 1, seconds / 5))
                    answers = asyncio.run(closed_loop(url, message, 1, seconds))
                    statuses = Counter(answer.status for answer in answers)
                    assert set(statuses) == {200}, (system, statuses)
                    waits.setdefault((system, kind), []).extend(
                        1000 * answer.took for answer in answers
                    )
        for system, server in servers.items():
            rows[system] = {
                f"{place}_{kind}ms": round(percentile(waits[system, kind], share), 2)
                for kind in bodies
                for place, share in (("p50", 0.5), ("p99", 0.99))
            }
            rows[system]["memory_mb"] = round(server.resident_mb())
    finally:
        for server in servers.values():
            server.stop()
    return rows


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument(
        "systems",
        nargs="+",
        type=System.parse,
        metavar="NAME[@SEED]=EXPORT[:FILE][+SECOND]",
    )
    priced = sorted(name for name, machine in TABLE.items() if machine.usd)
    parser.add_argument("--price", default="ml.c7i.8xlarge", choices=priced)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    images = sorted(
        path
        for path in options.images.rglob("*")
        if path.suffix.lower() in (".jpg", ".jpeg", ".png")
    )
    instance = TABLE[options.price]
    torch.set_num_threads(1)
    rate = matrix_rate(torch.device("cpu"), torch.float32, (1024,)) / 1e9
    times = timed(options.systems, images[0], options.turns, options.seconds)
    rows = list[Row]()
    first = list[bool]()
    for system in options.systems:
        row: Row = {
            "system": system.name,
            "seed": system.seed,
            **scored(system, images, first),
            **times[system],
        }
        row["cpu_share"] = round(
            row["cpu_ms"] / (rows[0] if rows else row)["cpu_ms"], 3
        )
        row["per_core"] = round(1000 / row["cpu_ms"], 1)
        hours = row["cpu_ms"] * 1e6 / 3.6e6  # of a core
        bill = Bill(hours, instance.usd / instance.cores)
        row["usd_per_million"] = round(bill.usd, 2)
        row["mb"] = round(system.megabytes(), 2)
        row["matrix_gflops"] = round(rate, 1)
        rows.append(row)
        print(row, flush=True)
    write(
        "what_you_save",
        f"python benchmarks/what_you_save.py IMAGES SYSTEM ... --price {options.price}",
        rows,
    )


if __name__ == "__main__":
    main()
