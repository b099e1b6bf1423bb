"""Accuracy of an export's graphs, and their speed on this machine.

Times are latencies of one client of `kd-serve` (`kd.deploy.serve.bench`).
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from kd.core.evaluation import Task
from kd.core.intervals import clip_to_share
from kd.deploy.export import parity
from kd.deploy.export.claims import QualityClaims, SpeedClaims, VariantClaims
from kd.deploy.serve import bench
from kd.deploy.serve.bench import Latency
from kd.parts import registry

ONNX = "model.onnx"
INT8 = "model.int8.onnx"
# seconds of requests per server: enough for `bench.ENOUGH` responses of a graph of 30
# ms
SECONDS = 12.0
JPEG_QUALITY = 90  # JPEG quality of the sent picture, as from cameras and web pages
# p99 / median above which the machine is busy; quiet: 1.9 to 2.2 (variants_table,
# repvit)
TAIL = 3.0
SLOWER, SERVER_MS = (
    5.0,
    10.0,
)  # a median above SLOWER x CPU ms + SERVER_MS is other work: seen 39.5 for 0.42 ms
LEAST_INT8 = 0.5
"""Share of int8 weights below which an export reports it. In a convolutional network
dynamic quantization converts only the head (as little as 0.6 %), so the file is
practically float32.
"""


def files(path: Path) -> tuple[Path, ...]:
    """Return the files of a graph."""
    return tuple(map(path.with_name, registry.graph_files(path.name)))


def size(path: Path) -> int:
    """Return the bytes of a graph on the disk."""
    return sum(file.stat().st_size for file in files(path))


def quality(name: str, outputs: parity.GraphOutputs, task: Task) -> QualityClaims:
    """Return a graph's accuracy as JSON values; `drop` and `agreement` are relative to
    the student as trained.
    """
    scores = outputs.scores(name, task)
    units, images = (
        {one.title: one.unit for one in task.scores.own},
        len(outputs.labels),
    )
    unit, ends = (
        ("%" if scores.share_of else units.get(scores.title, "")),
        outputs.interval(name, task),
    )
    return {
        "title": scores.title,
        "unit": unit,
        "score": scores.score,
        "interval": clip_to_share(*ends) if unit == "%" else ends,
        "drop": outputs.drop(name, task),
        "agreement": (
            scores.facts["same_top1"] / max(1, images)
            if "same_top1" in scores.facts
            else scores.score
        ),
        "images": images,
        "cpu_ms": outputs.cpu_ms[name],
    }


def measure(
    folder: Path,
    cpu_ms: Mapping[str, float],
    pixels: np.ndarray,
    threads: Sequence[int],
) -> dict[str, dict[int, Latency]]:
    """Measure the speed of graphs in a servable export, by name and number of threads.

    Latency: one image (`pixels`, uint8 [3, S, S], as a JPEG) at a time on these
    threads. `images_per_second`: as many images at a time as threads. `cpu_ms` of each
    graph: see `noisy`.
    """
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=JPEG_QUALITY)
    speeds: dict[str, dict[int, Latency]] = {name: {} for name in cpu_ms}
    for count in threads:
        alone = bench.ask(folder, list(cpu_ms), file.getvalue(), count, 1, SECONDS)
        if any(
            noisy(one, cpu_ms[name]) for name, one in alone.items()
        ):  # the machine may be quiet now
            alone = bench.ask(folder, list(cpu_ms), file.getvalue(), count, 1, SECONDS)
        many = (
            alone
            if count == 1
            else bench.ask(folder, list(cpu_ms), file.getvalue(), count, count, SECONDS)
        )
        for name, seen in alone.items():
            speeds[name][count] = replace(
                seen, images_per_second=many[name].images_per_second
            )
    return speeds


def facts(
    path: Path, quality: QualityClaims, speed: Mapping[int, Latency]
) -> VariantClaims:
    """Return a graph's measured values as JSON, for manifest.json."""
    graph = registry.graphs()[path.name]
    speeds = speed_facts(speed)
    return {
        "runtime": graph.runtime,
        "precision": graph.precision,
        "bytes": size(path),
        **quality,
        "speed": speeds,
    }


def speed_facts(speed: Mapping[int, Latency]) -> dict[str, SpeedClaims]:
    """Return speeds as JSON values, by the number of threads."""
    return {
        str(threads): {
            "p50_ms": round(seen.p50_ms, 3),
            "p99_ms": round(seen.p99_ms, 3),
            "images_per_second": round(seen.images_per_second, 3),
            "memory_mb": round(seen.memory_mb, 3),
        }
        for threads, seen in speed.items()
    }


def noisy(one: Latency, cpu_ms: float) -> bool:
    """Return whether other work disturbed a server's measurement too much."""
    return one.p99_ms > TAIL * one.p50_ms or one.p50_ms > SLOWER * cpu_ms + SERVER_MS
