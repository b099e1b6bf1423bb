"""int8 within a budget: two ways to quantize, the cheap one first. The first that loses at most so much is written.

1. dynamic: int8 weights, activations quantized as they come (onnxruntime). It leaves convolutions in float32, and
   does not hold where they have most of the weights.
2. post-training: weights and activations in OpenVINO's IR, ranges found on training views, with SmoothQuant
   (arXiv:2211.10438) and bias correction (NNCF).

What each loses is measured on the run's validation images.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.core.errors import MissingExtra, ModelError
from kd.core.evaluation import Task
from kd.core.host import signal_stack
from kd.core.intervals import around, paired, resampled
from kd.core.scores import GraphScores
from kd.core.text import percent
from kd.deploy.export.parity import eager_runner
from kd.deploy.export.variants import LEAST_INT8, ONNX, Variant
from kd.models import runtimes
from kd.models.classifier import Classifier

DYNAMIC, STATIC = "model.int8.onnx", "openvino.int8.xml"
VIEWS = 300
"""Training views on which NNCF finds ranges: its own default. With SmoothQuant and so many, two ViTs with planted
outliers lost 0.0 and 0.65 points of 40 (benchmarks/int8_planted*.csv)."""
Shown = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
Views = Callable[[int], Iterable[tuple[np.ndarray, np.ndarray]]]
"""Yields so many training views, uint8 [B, 3, S, S], with labels."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to quantize, and what it loses."""

    name: str
    file: str
    title: str  # of the score that decides
    score: float
    drop: float  # against the student in PyTorch
    interval: tuple[float, float]  # 95 % of the drop: of the difference on the same images
    agreement: float  # share of the images with the same answer as in PyTorch; of an embedding model the mean cosine
    bytes: int
    share: float = 1.0  # of the weights, that are int8; known of dynamic quantization

    def holds(self, max_drop: float) -> bool:
        """Return whether it loses at most so much, and is int8 in more than name."""
        return self.drop <= max_drop and self.share >= LEAST_INT8

    def line(self) -> str:
        """Return it as a line for a person."""
        low, high = (100 * each for each in self.interval)
        text = (
            f"int8, {self.name}: {self.title} {percent(self.score)}, drop {100 * self.drop:.2f} points "
            f"(95 %: {low:.2f} to {high:.2f}), as trained {percent(self.agreement)}, {self.bytes / 1e6:.2f} MB"
        )
        return text + (f"; {percent(self.share)} of the weights are int8" if self.share < LEAST_INT8 else "")


@dataclass(frozen=True, slots=True)
class Exam:
    """Says what a graph loses against the student in PyTorch, on the same images."""

    task: Task
    images: Shown  # yields uint8 [B, 3, S, S] and labels [B], always the same N
    reference: torch.Tensor  # what the student returns for them in PyTorch: logits [N, C] or vectors [N, D]
    labels: torch.Tensor

    @classmethod
    def of(cls, task: Task, student: Classifier, images: Shown) -> Exam:
        """Ask the student about all images."""
        answer = eager_runner(student)
        batches = [(answer(pixels), label) for pixels, label in images()]
        outputs, labels = (torch.from_numpy(np.concatenate(each)) for each in zip(*batches, strict=True))
        return cls(task, images, outputs, labels)

    def __call__(self, name: str, path: Path) -> Rung:
        """Return what the graph in a file loses."""
        variant = Variant.at(path)
        run = variant.runner()
        outputs = torch.from_numpy(np.concatenate([run(pixels) for pixels, _ in self.images()]))
        scores, before = self.scores(outputs), self.scores(self.reference)
        value, facts = scores.facts[scores.decides], scores.facts
        drop = before.facts[before.decides] - value
        agreement = facts["same_top1"] / len(outputs) if "same_top1" in facts else facts.get("cosine", value)
        return Rung(name, path.name, scores.title, value, drop, self.interval(outputs, drop), agreement, variant.bytes)

    def scores(self, outputs: torch.Tensor) -> GraphScores:
        """Return the scores of outputs, [N, C] or [N, D], for the images."""
        return self.task.graph_scores(outputs, self.reference, self.labels)

    def interval(self, outputs: torch.Tensor, drop: float) -> tuple[float, float]:
        """Return the 95 % interval of a drop: from the images that changed, or by the bootstrap."""
        images = len(outputs)
        if "correct" in self.scores(outputs).facts:  # one label an image: right or wrong
            expected = self.reference.argmax(1)
            label = torch.where(self.labels < 0, expected, self.labels)
            was, now = expected == label, outputs.argmax(1) == label
            return paired(int((was & ~now).sum()), int((now & ~was).sum()), images)

        def lost(picks: np.ndarray) -> float:
            pair = [
                self.task.graph_scores(each[picks], self.reference[picks], self.labels[picks])
                for each in (self.reference, outputs)
            ]
            return pair[0].facts[pair[0].decides] - pair[1].facts[pair[1].decides]

        return around(drop, resampled(lost, images))


def climb(folder: Path, exam: Exam, views: Views, max_drop: float, both: bool = False) -> list[Rung]:
    """Quantize the folder's model.onnx until the drop holds; return what was tried, of which the last one holds.

    A file that does not hold is removed. `both`: whoever compares speeds wants both files, whatever the first loses.
    """
    runtimes.write_int8(folder / ONNX, folder / DYNAMIC)
    share = runtimes.int8_share(folder / DYNAMIC)
    dynamic = replace(exam("dynamic", folder / DYNAMIC), share=share)
    if dynamic.holds(max_drop) and not both:
        return [dynamic]
    if not both:
        (folder / DYNAMIC).unlink()
    _require_nncf(dynamic, max_drop)
    post_training(folder / ONNX, folder / STATIC, views)
    rungs = [dynamic, exam("post-training", folder / STATIC)]
    if any(rung.holds(max_drop) for rung in rungs):
        return rungs
    few = {one.name: f" ({percent(one.share)} of the weights)" for one in rungs if one.share < LEAST_INT8}
    tried = ", ".join(f"{one.name} {100 * one.drop:.2f}{few.get(one.name, '')}" for one in rungs)
    wrong = f"no int8 graph holds it: on {len(exam.labels)} validation images they lose {tried} points"
    allowed = f"A drop of at most {100 * max_drop:g} points"
    raise ModelError("--max-drop", wrong, allowed, "Nothing was written; raise --max-drop, or leave out --int8")


def _require_nncf(dynamic: Rung, max_drop: float) -> None:
    """Require what post-training quantization needs; say why dynamic quantization is not enough."""
    for name in ("nncf", "openvino"):
        if not runtimes.installed(name):
            lost = f"dynamic int8 loses {100 * dynamic.drop:.2f} points, "
            lost += f"at most {100 * max_drop:g} are allowed (--max-drop)"
            if dynamic.share < LEAST_INT8:
                lost = f"dynamic int8 leaves convolutions in float32, {percent(1 - dynamic.share)} of the weights"
            wrong = f"{lost}, and post-training quantization needs {name}, which is not installed"
            raise MissingExtra("--int8", wrong, "", "pip install 'kd[nncf]'")


def post_training(source: Path, path: Path, views: Views, smooth: bool = True) -> None:
    """Write OpenVINO's IR, `path` (.xml) and its .bin, with int8 weights and activations, ranges from training views.

    `smooth`: use SmoothQuant.
    """
    with _nncf() as nncf:
        openvino = runtimes.require("openvino", "--int8", "nncf")
        quantized = nncf.quantize(
            openvino.convert_model(str(source)),
            nncf.Dataset(_singles(views)),
            model_type=nncf.ModelType.TRANSFORMER,
            target_device=nncf.TargetDevice.CPU,
            subset_size=VIEWS,
            advanced_parameters=_advanced(nncf, smooth),
        )
        openvino.save_model(quantized, str(path), compress_to_fp16=False)


def _singles(views: Views) -> list[np.ndarray]:
    """Return training views one by one, uint8 [1, 3, S, S]: NNCF's statistics are those of an image."""
    pixels = (image[None] for batch, _ in views(VIEWS) for image in batch)
    return list(itertools.islice(pixels, VIEWS))


def _advanced(nncf: Any, smooth: bool) -> Any:
    off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
    return nncf.AdvancedQuantizationParameters(**({} if smooth else {"smooth_quant_alphas": off}))


@contextmanager
def _nncf() -> Iterator[Any]:
    """Import NNCF, and keep its progress bars and log from a user who cannot act on them."""
    os.environ.setdefault("NNCF_CI", "1")  # nothing is sent to Intel: NNCF's telemetry is off
    level = logging.getLogger("nncf").level
    with signal_stack(), runtimes.quiet(), redirect_stdout(io.StringIO()):
        yield runtimes.require("nncf", "--int8", "nncf")
    logging.getLogger("nncf").setLevel(level)
