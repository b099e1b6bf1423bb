"""The graphs of an export: int8 with SmoothQuant, how accurate each is, and how fast on this machine.

A time is what one client of `kd-serve` waits for an answer (`kd.deploy.serve.bench`). Post-training quantization uses
SmoothQuant (arXiv:2211.10438) and bias correction (NNCF); dynamic quantization is `runtimes.write_int8`.
"""

import io
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kd.core.evaluation import Task
from kd.core.host import signal_stack
from kd.deploy.export import parity
from kd.deploy.serve import bench
from kd.deploy.serve.bench import Latency
from kd.files.manifest import GRAPHS
from kd.models import runtimes

ONNX = "model.onnx"
INT8, STATIC = "model.int8.onnx", "openvino.int8.xml"
VIEWS = 300
"""Training views on which NNCF finds ranges: its own default. With SmoothQuant, two ViTs with planted outliers lost 0.0
and 0.65 points of 40 (int8_planted in benchmarks/ at commit 443d35d4)."""
Views = Callable[[int], parity.Batches]  # so many
SECONDS = 12.0  # for which each server is asked, at most: enough for `bench.ENOUGH` answers of a graph of 30 ms
JPEG_QUALITY = 90  # of the picture that is sent, as cameras and web pages have it
TAIL = 3.0  # times the median: a larger p99 shows a busy machine. When quiet it is 1.9 to 2.2 (variants_table, repvit)
SLOWER, SERVER_MS = 5.0, 10.0  # times the CPU time + ms, from which a median is other work: seen 39.5 of 0.42 ms
LEAST_INT8 = 0.5
"""Share of the weights below which an export says how many are int8. Of a network of convolutions dynamic quantization
makes the head alone int8 (as little as 0.6 %), so that the file is float32 by another name."""


def files(path: Path) -> tuple[Path, ...]:
    """Return the files of a graph: OpenVINO's has its weights in a second one."""
    return (path, path.with_suffix(".bin")) if path.suffix == ".xml" else (path,)


def size(path: Path) -> int:
    """Return the bytes of a graph on the disk."""
    return sum(file.stat().st_size for file in files(path))


def runner(path: Path) -> parity.Runner:
    """Return a function from uint8 [B, 3, S, S] to float32 logits [B, C] or vectors [B, D], on one thread."""
    if path.suffix == ".xml":
        return runtimes.openvino_runner(path, 1, bf16=GRAPHS[path.name].precision == "bf16")
    return runtimes.onnx_runner(path, 1)


def quality(name: str, outputs: parity.GraphOutputs, task: Task) -> dict[str, Any]:
    """Return how accurate a graph is as JSON values; `drop` and `agreement` are against the student as trained."""
    scores = outputs.scores(name, task)
    value, images = scores.facts[scores.decides], len(outputs.labels)
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

    One image (`pixels`, uint8 [3, S, S], as a JPEG) at a time is computed on so many threads; for `images_per_second`
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
    """Return what was measured of a graph as JSON values, for manifest.json."""
    graph = GRAPHS[path.name]
    named = {"runtime": graph.runtime, "precision": graph.precision, "bytes": size(path)}
    return {**named, **quality, "speed": speed_facts(speed)}


def speed_facts(speed: Mapping[int, Latency]) -> dict[str, dict[str, float]]:
    """Return speeds as JSON values, by the number of threads."""
    return {str(threads): {k: round(v, 3) for k, v in asdict(s).items()} for threads, s in speed.items()}


def noisy(one: Latency, cpu_ms: float) -> bool:
    """Return whether other work disturbed what clients of one server saw, so that it says little of the graph."""
    return one.p99_ms > TAIL * one.p50_ms or one.p50_ms > SLOWER * cpu_ms + SERVER_MS


def post_training(source: Path, path: Path, views: Views) -> None:
    """Write OpenVINO's IR, `path` (.xml) and its .bin, with int8 weights and activations."""
    with _nncf() as nncf:
        openvino = runtimes.require("openvino", "--int8", "nncf")
        quantized = nncf.quantize(
            openvino.convert_model(str(source)),
            nncf.Dataset(_singles(views)),
            model_type=nncf.ModelType.TRANSFORMER,
            target_device=nncf.TargetDevice.CPU,
            subset_size=VIEWS,
        )
        openvino.save_model(quantized, str(path), compress_to_fp16=False)


def _singles(views: Views) -> list[np.ndarray]:
    """Return training views one by one, uint8 [1, 3, S, S]: NNCF's statistics are those of an image."""
    pixels = (image[None] for batch, *_ in views(VIEWS) for image in batch)
    return list(itertools.islice(pixels, VIEWS))


@contextmanager
def _nncf() -> Iterator[Any]:
    """Import NNCF, and keep its progress bars and log from a user who cannot act on them."""
    os.environ.setdefault("NNCF_CI", "1")  # nothing is sent to Intel: NNCF's telemetry is off
    level = logging.getLogger("nncf").level
    with signal_stack(), runtimes.quiet(), redirect_stdout(io.StringIO()):
        yield runtimes.require("nncf", "--int8", "nncf")
    logging.getLogger("nncf").setLevel(level)
