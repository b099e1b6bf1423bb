"""The graphs of an export: how accurate each is, and how fast on this machine.

A time is the latency of one client of `kd-serve` (`kd.deploy.serve.bench`).
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kd.core.evaluation import Task
from kd.deploy.export import parity
from kd.deploy.serve import bench
from kd.deploy.serve.bench import Latency
from kd.parts import registry

ONNX = "model.onnx"
INT8 = "model.int8.onnx"
SECONDS = 12.0  # for which each server is asked, at most: enough for `bench.ENOUGH` answers of a graph of 30 ms
JPEG_QUALITY = 90  # of the picture that is sent, as cameras and web pages have it
TAIL = 3.0  # times the median: a larger p99 shows a busy machine. When quiet it is 1.9 to 2.2 (variants_table, repvit)
SLOWER, SERVER_MS = 5.0, 10.0  # times the CPU time + ms, from which a median is other work: seen 39.5 of 0.42 ms
LEAST_INT8 = 0.5
"""Share of the weights below which an export says how many are int8. Of a network of convolutions dynamic quantization
makes the head alone int8 (as little as 0.6 %), so that the file is float32 by another name."""


def files(path: Path) -> tuple[Path, ...]:
    """Return the files of a graph, some of which have their weights in a second one."""
    weights = registry.graphs()[path.name].weights
    return (path, path.with_name(weights)) if weights else (path,)


def size(path: Path) -> int:
    """Return the bytes of a graph on the disk."""
    return sum(file.stat().st_size for file in files(path))


def quality(name: str, outputs: parity.GraphOutputs, task: Task) -> dict[str, Any]:
    """Return how accurate a graph is as JSON values; `drop` and `agreement` are against the student as trained."""
    scores = outputs.scores(name, task)
    value, images = scores.facts[scores.selection_metric], len(outputs.labels)
    return {
        "title": scores.title,
        "unit": next((one.unit for one in task.scores.own if one.title == scores.title), ""),
        "score": value,
        "interval": outputs.interval(name, task),
        "drop": outputs.drop(name, task),
        "agreement": scores.facts["same_top1"] / max(1, images) if "same_top1" in scores.facts else value,
        "images": images,
        "cpu_ms": outputs.cpu_ms[name],
    }


def measure(
    folder: Path, cpu_ms: Mapping[str, float], pixels: np.ndarray, threads: Sequence[int]
) -> dict[str, dict[int, Latency]]:
    """Return the speed of graphs in an export that `kd-serve` can serve, by name and number of threads.

    One image (`pixels`, uint8 [3, S, S], as a JPEG) at a time is computed on that many threads; for `images_per_second`
    as many at a time as threads. `cpu_ms` of each graph: see `noisy`.
    """
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=JPEG_QUALITY)
    speeds: dict[str, dict[int, Latency]] = {name: {} for name in cpu_ms}
    for count in threads:
        alone = bench.ask(folder, list(cpu_ms), file.getvalue(), count, 1, SECONDS)
        if any(noisy(one, cpu_ms[name]) for name, one in alone.items()):  # perhaps it is quiet now
            alone = bench.ask(folder, list(cpu_ms), file.getvalue(), count, 1, SECONDS)
        many = alone if count == 1 else bench.ask(folder, list(cpu_ms), file.getvalue(), count, count, SECONDS)
        for name, seen in alone.items():
            speeds[name][count] = replace(seen, images_per_second=many[name].images_per_second)
    return speeds


def facts(path: Path, quality: Mapping[str, Any], speed: Mapping[int, Latency]) -> dict[str, Any]:
    """Return a graph's measured values as JSON, for manifest.json."""
    graph = registry.graphs()[path.name]
    named = {"runtime": graph.runtime, "precision": graph.precision, "bytes": size(path)}
    return {**named, **quality, "speed": speed_facts(speed)}


def speed_facts(speed: Mapping[int, Latency]) -> dict[str, dict[str, float]]:
    """Return speeds as JSON values, by the number of threads."""
    return {str(threads): {k: round(v, 3) for k, v in asdict(s).items()} for threads, s in speed.items()}


def noisy(one: Latency, cpu_ms: float) -> bool:
    """Return whether other work disturbed what clients of one server saw, so that it says little of the graph."""
    return one.p99_ms > TAIL * one.p50_ms or one.p50_ms > SLOWER * cpu_ms + SERVER_MS
