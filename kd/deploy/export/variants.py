"""Accuracy of an export's graphs, and their speed on this machine.

Times are latencies of one client of `kd-serve` (`kd.deploy.serve.bench`).
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from kd.core.evaluation import Task
from kd.core.intervals import clip_to_share
from kd.core.text import percent
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
JPEG_QUALITY = 90  # JPEG quality of the sent image, as from cameras and web pages
# p99 / median above which the machine is busy; quiet: 1.9 to 2.2 (variants_table,
# repvit)
TAIL = 3.0
# a median above SLOWER x CPU ms + SERVER_MS is other work: seen 39.5 for 0.42 ms
SLOWER = 5.0
SERVER_MS = 10.0  # see SLOWER
LEAST_INT8 = 0.5
"""Share of int8 weights below which log and card report it: most weights are as trained
then, and more than 5/8 of float32's bytes are left. Of a convolutional network dynamic
quantization converts only the head.
"""


def int8_note(share: float) -> str:
    """Return what a small share of int8 weights means; "" if it is not small."""
    if share >= LEAST_INT8:
        return ""
    bytes_left = percent(1 - 0.75 * share)
    return (
        f"{percent(share)} of the weights are int8, the others are as trained:"
        f" {bytes_left} of the bytes are left"
    )


def files(path: Path) -> tuple[Path, ...]:
    """Return the files of a graph."""
    return tuple(map(path.with_name, registry.graph_files(path.name)))


def size(path: Path) -> int:
    """Return the bytes of a graph on the disk."""
    return sum(file.stat().st_size for file in files(path))


def quality(name: str, outputs: parity.GraphOutputs, task: Task) -> QualityClaims:
    """Return a graph's accuracy as JSON values.

    `drop` and `agreement` are relative to the student as trained.
    """
    scores = outputs.scores(name, task)
    images = len(outputs.labels)
    units = {column.title: column.unit for column in task.scores.own}
    unit = "%" if scores.share_of else units.get(scores.title, "")
    ends = outputs.interval(name, task)
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
    graph: see `is_noisy`.
    """
    jpeg = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(jpeg, "JPEG", quality=JPEG_QUALITY)
    ask = partial(bench.ask, folder, list(cpu_ms), jpeg.getvalue())
    speeds: dict[str, dict[int, Latency]] = {name: {} for name in cpu_ms}
    for thread_count in threads:
        latencies = ask(thread_count, 1, SECONDS)
        # the machine may be quiet at the second time
        if any(is_noisy(latency, cpu_ms[name]) for name, latency in latencies.items()):
            latencies = ask(thread_count, 1, SECONDS)
        parallel = latencies
        if thread_count > 1:
            parallel = ask(thread_count, thread_count, SECONDS)
        for name, latency in latencies.items():
            speeds[name][thread_count] = replace(
                latency, images_per_second=parallel[name].images_per_second
            )
    return speeds


def facts(
    path: Path, quality: QualityClaims, speed: Mapping[int, Latency]
) -> VariantClaims:
    """Return a graph's measured values as JSON, for manifest.json."""
    graph = registry.graphs()[path.name]
    return {
        "runtime": graph.runtime,
        "precision": graph.precision,
        "bytes": size(path),
        **quality,
        "speed": speed_facts(speed),
    }


def speed_facts(speed: Mapping[int, Latency]) -> dict[str, SpeedClaims]:
    """Return speeds as JSON values, by the number of threads."""
    return {
        str(threads): {
            "p50_ms": round(latency.p50_ms, 3),
            "p99_ms": round(latency.p99_ms, 3),
            "images_per_second": round(latency.images_per_second, 3),
            "memory_mb": round(latency.memory_mb, 3),
        }
        for threads, latency in speed.items()
    }


def is_noisy(latency: Latency, cpu_ms: float) -> bool:
    """Return whether other work disturbed a server's measurement too much."""
    return (
        latency.p99_ms > TAIL * latency.p50_ms
        or latency.p50_ms > SLOWER * cpu_ms + SERVER_MS
    )
