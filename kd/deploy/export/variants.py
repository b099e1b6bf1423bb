"""The files of an export as variants: how right each is, and how fast on this machine.

A variant is one graph in one precision, and one file name. How right it is comes from the run's validation images. How
fast it is comes from `kd-serve` itself (`kd.deploy.serve.bench`): a time is what one client waits for an answer.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kd.core.evaluation import Task
from kd.deploy.export import parity
from kd.deploy.serve import bench
from kd.deploy.serve.bench import Latency
from kd.files.manifest import GRAPHS
from kd.models import runtimes

ONNX = "model.onnx"
SECONDS = 12.0
"""For which each server is asked, at most: enough for `bench.ENOUGH` answers of a graph of 30 ms."""
JPEG_QUALITY = 90  # of the picture that is sent, as cameras and web pages have it
TAIL = 3.0  # times the median: from there a p99 is other work. Undisturbed it is 1.9 to 2.2 (variants_table, repvit)
SLOWER, SERVER_MS = 5.0, 10.0
"""Times the CPU time, and milliseconds for the request, from which a median is other work: 39.5 ms was seen of 0.42."""
LEAST_INT8 = 0.5
"""Share of the weights below which an export says how many are int8. Of a network of convolutions dynamic quantization
makes the head alone int8 (as little as 0.6 %), so that the file is float32 by another name."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One graph of an export."""

    name: str
    """Its file name, by which `kd-serve --file` finds it."""
    runtime: str
    """"onnxruntime" or "openvino"."""
    precision: str
    """"float32", "bf16" or "int8"."""
    paths: tuple[Path, ...]
    """The graph, and the file of its weights where they lie apart."""

    @classmethod
    def at(cls, path: Path) -> Variant:
        """Return the variant in a file; its name says what it is."""
        graph = GRAPHS[path.name]
        return cls(path.name, graph.runtime, graph.precision, files(path))

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def runner(self, threads: int = 1) -> parity.Runner:
        """Return a function from uint8 [B, 3, S, S] to float32 logits [B, C] or vectors [B, D]."""
        if self.runtime == "openvino":
            return runtimes.openvino_runner(self.paths[0], threads, bf16=self.precision == "bf16")
        return runtimes.onnx_runner(self.paths[0], threads)


def files(path: Path) -> tuple[Path, ...]:
    """Return the files of a graph: OpenVINO's has its weights in a second one."""
    return (path, path.with_suffix(".bin")) if path.suffix == ".xml" else (path,)


@dataclass(frozen=True, slots=True)
class Quality:
    """How right a variant is."""

    title: str
    """Of the score that decides."""
    unit: str
    score: float
    interval: tuple[float, float]
    """95 % of it."""
    drop: float
    """What it loses against the student as trained."""
    agreement: float
    """With the student as trained: share of equal answers, or what the task compares."""
    images: int
    cpu_ms: float = 0.0
    """CPU time of an image with one thread, without a server."""


@dataclass(frozen=True, slots=True)
class MeasuredVariant:
    """A variant, how right and how fast it is."""

    variant: Variant
    quality: Quality
    speed: Mapping[int, Latency]
    """By number of threads: one image at a time on so many; for `images_per_second` as many at a time as threads."""

    def facts(self) -> dict[str, Any]:
        """Return all of it as JSON values, for manifest.json."""
        one, quality = self.variant, asdict(self.quality)
        speed = {str(threads): {k: round(v, 3) for k, v in asdict(s).items()} for threads, s in self.speed.items()}
        return {"runtime": one.runtime, "precision": one.precision, "bytes": one.bytes, **quality, "speed": speed}


def quality(name: str, outputs: parity.GraphOutputs, task: Task) -> Quality:
    """Return how right a graph is, from what it and PyTorch answered."""
    scores = outputs.scores(name, task)
    key, images = scores.decides, len(outputs.labels)
    value = scores.facts[key]
    agreement = scores.facts["same_top1"] / max(1, images) if "same_top1" in scores.facts else value
    unit = next((one.unit for one in task.scores.own if one.title == scores.title), "")
    drop, ends = outputs.drop(name, task), outputs.interval(name, task)
    return Quality(scores.title, unit, value, ends, drop, agreement, images, outputs.cpu_ms[name])


def measure(
    folder: Path, qualities: Mapping[str, Quality], pixels: np.ndarray, threads: Sequence[int]
) -> list[MeasuredVariant]:
    """Measure the speed of variants in an export that `kd-serve` can serve.

    Args:
        folder: the export.
        qualities: of each file that is measured.
        pixels: an image, uint8 [3, S, S], which is sent as a JPEG.
        threads: numbers of threads.
    """
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=JPEG_QUALITY)
    speeds: dict[str, dict[int, Latency]] = {name: {} for name in qualities}
    for count in threads:
        alone = bench.ask(folder, list(qualities), file.getvalue(), count, 1, SECONDS)
        if any(noisy(one, qualities[name].cpu_ms) for name, one in alone.items()):  # perhaps it is quiet now
            alone = bench.ask(folder, list(qualities), file.getvalue(), count, 1, SECONDS)
        many = alone if count == 1 else bench.ask(folder, list(qualities), file.getvalue(), count, count, SECONDS)
        for name, seen in alone.items():
            speeds[name][count] = replace(seen, images_per_second=many[name].images_per_second)
    return [MeasuredVariant(Variant.at(folder / name), one, speeds[name]) for name, one in qualities.items()]


def noisy(one: Latency, cpu_ms: float) -> bool:
    """Return whether other work disturbed what clients of one server saw, so that it says little of the graph."""
    return one.p99_ms > TAIL * one.p50_ms or one.p50_ms > SLOWER * cpu_ms + SERVER_MS
