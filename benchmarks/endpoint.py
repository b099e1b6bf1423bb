"""Every image of a test split sent to `kd-serve`, for each graph of an export:
accuracy, images/s, size on the disk.

    python benchmarks/endpoint.py EXPORT IMAGES [--clients 4] [--threads 1] [--images 0]

IMAGES has a folder for each class. Server and client share the machine. Each image file
is sent as it is, once for each graph; the first `WARM` answers of a graph do not count
for its time. An answer is right where its first label is the name of the image's
folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from _load import answered, kd_serve, percentile, request

from _record import write
from kd.core.intervals import wilson_interval
from kd.parts import registry

WARM = 50


async def ask(
    url: str, images: Sequence[Path], clients: int
) -> tuple[list[str], list[float], float]:
    """Return the first label of each image, the seconds of each answer, and those of
    all but the first `WARM`.
    """
    address = urlsplit(url)
    labels = [""] * len(images)
    took = [0.0] * len(images)
    waiting = iter(range(len(images)))
    count = 0
    began = time.perf_counter()

    async def client() -> None:
        nonlocal count, began
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for index in waiting:
            message = request(url, images[index].read_bytes(), "image/jpeg")
            start = time.perf_counter()
            status, body = await answered(reader, writer, message)
            took[index] = time.perf_counter() - start
            if status != 200:
                raise SystemExit(f"{images[index]}: status {status}, {body.decode()}")
            labels[index] = json.loads(body)["predictions"][0]["label"]
            count += 1
            if count == WARM:
                began = time.perf_counter()
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return labels, took, time.perf_counter() - began


def rows(
    export: Path, images: Sequence[Path], clients: int, threads: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each graph."""
    manifest = json.loads((export / "manifest.json").read_text())
    for file in (
        name
        for name, graph in registry.graphs().items()
        if name in manifest["files"] and not graph.code
    ):
        server = kd_serve(export, "--file", file, "--threads", str(threads))
        try:
            labels, took, seconds = asyncio.run(ask(server.url, images, clients))
            memory = server.resident_mb(peak=True)
            cpu_seconds = server.cpu_seconds()
        finally:
            server.stop()
        accuracy = float(
            np.mean(
                [
                    label == path.parent.name
                    for label, path in zip(labels, images, strict=True)
                ]
            )
        )
        low, high = wilson_interval(accuracy, len(images))
        weights = export / Path(file).with_suffix(".bin").name
        size = (export / file).stat().st_size + (
            weights.stat().st_size if file.endswith(".xml") else 0
        )
        yield {
            "export": manifest["name"],
            "file": file,
            "images": len(images),
            "accuracy": round(100 * accuracy, 2),
            "low": round(100 * low, 2),
            "high": round(100 * high, 2),
            "images_per_second": round((len(images) - WARM) / seconds, 1),
            "p50_ms": round(1000 * percentile(took[WARM:], 0.5), 2),
            "p99_ms": round(1000 * percentile(took[WARM:], 0.99), 2),
            "server_cpu_ms_per_image": round(1000 * cpu_seconds / len(images), 3),
            "mb": round(size / 1e6, 3),
            "memory_mb": round(memory),
            "clients": clients,
            "threads": threads,
        }


def main() -> None:
    """Ask each graph and write one CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path)
    parser.add_argument("folder", type=Path, metavar="IMAGES")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=0, help="drawn from all; 0: all")
    options = parser.parse_args()
    every = sorted(path for path in options.folder.glob("*/*") if path.is_file())
    order = np.random.default_rng(0).permutation(len(every))[: options.images or None]
    measured = list(
        rows(
            options.export, [every[i] for i in order], options.clients, options.threads
        )
    )
    for row in measured:
        print(row)
    flags = f"--clients {options.clients} --threads {options.threads} --images {options.images}"
    write("endpoint", f"python benchmarks/endpoint.py EXPORT IMAGES {flags}", measured)


if __name__ == "__main__":
    main()
