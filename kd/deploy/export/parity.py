"""Compare exported graphs with PyTorch on real images and measure the cost
per image.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from kd.core.errors import DataError, ModelError
from kd.core.evaluation import Task
from kd.core.intervals import around, paired, resampled, wilson
from kd.core.scores import GraphScores
from kd.core.seeds import evenly_spaced
from kd.data.loader import batches_of
from kd.deploy.export.claims import ParityClaims
from kd.deploy.shift import Measures, Reference, measure
from kd.models.classifier import Classifier
from kd.models.runtimes import cpu_ms
from kd.parts.tasks.single_label import calibration_error
from kd.setup.data import Data

Runner = Callable[[np.ndarray], np.ndarray]
Batches = Iterable[tuple[Any, ...]]
"""uint8 images [B, 3, S, S], labels [B] or sets [B, C], and the CRC-32 of their files
[B] if known.
"""
# batch size of the comparison: outputs do not depend on it, and memory stays small
BATCH = 16
# seconds for timing all graphs in turns: some hundred predictions of a small student
TIMED_SECONDS = 4.0
EAGER = ""  # name of PyTorch among the graphs
IMAGES = "images.csv"  # file of an export: the list of images used for its numbers


@dataclass(frozen=True, slots=True)
class GraphOutputs:
    """Outputs of PyTorch and of each graph for the same N images; 4 bytes per value."""

    outputs: Mapping[str, torch.Tensor]  # logits [N, C] or vectors [N, D] by graph
    labels: torch.Tensor  # int [N], or label sets [N, C]; -1 if unknown
    measures: Sequence[Measures]  # see `kd.deploy.shift.measure`
    cpu_ms: Mapping[str, float]  # CPU time per image on one thread
    first: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.uint8)
    )  # the first image, uint8 [3, S, S]
    images: Sequence[
        tuple[int, int]
    ] = ()  # CRC-32 of each file (0 if unknown) and of its pixels

    def reference(
        self, name: str, task: Task, classes: Sequence[str], calibrated: bool
    ) -> Reference:
        """Return a graph's predictions as the reference for input shift."""
        if not task.logits:
            return Reference.of((), ((0, numbers) for numbers in self.measures), False)
        logits_NC = self.outputs[name].double()
        best = (
            logits_NC.softmax(1) if task.logits == "softmax" else logits_NC.sigmoid()
        ).max(1)
        found = zip(
            best.indices.tolist(), best.values.tolist(), self.measures, strict=True
        )
        made = Reference.of(
            classes,
            ((label, (score, *numbers)) for label, score, numbers in found),
            calibrated,
        )
        if task.logits == "softmax" and bool((self.labels >= 0).all()):
            made.right = int((best.indices == self.labels).sum())
        return made

    def scores(self, name: str, task: Task, picks: Any = slice(None)) -> GraphScores:
        """Return the scores on all images or on the picked ones."""
        return task.graph_scores(
            self.outputs[name][picks], self.outputs[EAGER][picks], self.labels[picks]
        )

    def interval(self, name: str, task: Task) -> tuple[float, float]:
        """Return the 95 % interval of the selection metric: Wilson for shares, else the
        bootstrap.
        """
        found = self.scores(name, task)
        if found.share_of:
            return wilson(found.score, found.share_of)
        return around(
            found.score,
            resampled(
                lambda picks: self.scores(name, task, picks).score, len(self.labels)
            ),
        )

    def drop(self, name: str, task: Task, picks: Any = slice(None)) -> float:
        """Return PyTorch's selection metric minus the graph's."""
        return (
            self.scores(EAGER, task, picks).score - self.scores(name, task, picks).score
        )

    def drop_interval(self, name: str, task: Task) -> tuple[float, float]:
        """Return the 95 % interval of `drop`: from the images whose prediction changed,
        or by the bootstrap.
        """
        if images := self.scores(name, task).share_of:
            expected = self.outputs[EAGER].argmax(1)
            label = self.labels if bool((self.labels >= 0).any()) else expected
            was, now = expected == label, self.outputs[name].argmax(1) == label
            return paired(int((was & ~now).sum()), int((now & ~was).sum()), images)
        return around(
            self.drop(name, task),
            resampled(lambda picks: self.drop(name, task, picks), len(self.labels)),
        )

    def facts(self, name: str, task: Task) -> ParityClaims:
        """Return a graph's entry in manifest.json: accuracy, distance from PyTorch, and
        cost.
        """
        known = self.labels >= 0
        entry: ParityClaims = {
            "images": len(self.labels),
            "max_difference": float(f"{self.difference(name):.3g}"),
            "cpu_ms": round(self.cpu_ms[name], 3),
        }
        entry.update(cast(ParityClaims, self.scores(name, task).facts))
        if task.logits == "softmax" and bool(known.any()):
            entry["ece"] = calibration_error(
                self.outputs[name][known], self.labels[known]
            )
        return entry

    def write_images(self, file: Path, classes: Sequence[str]) -> None:
        """Write one line per image: CRC-32 of file and pixels, whether its labels are
        known, and their names.
        """
        with file.open("w", newline="", encoding="utf-8") as opened:
            rows = csv.writer(opened, lineterminator="\n")
            for (encoded, pixels), label in zip(
                self.images, self.labels.numpy(), strict=True
            ):
                names = label_names(label, classes)
                rows.writerow(
                    [
                        f"{encoded:08x}",
                        f"{pixels:08x}",
                        int(names is not None),
                        *(names or ()),
                    ]
                )

    def joined(self, other: GraphOutputs) -> GraphOutputs:
        outputs, took = (
            {**self.outputs, **other.outputs},
            {
                **self.cpu_ms,
                **other.cpu_ms,
            },
        )
        return replace(self, outputs=outputs, cpu_ms=took)

    def difference(self, name: str) -> float:
        """Return the largest absolute difference from PyTorch; inf if a value is not
        finite.
        """
        found = (self.outputs[name] - self.outputs[EAGER]).abs()
        return float(found.max()) if bool(found.isfinite().all()) else float("inf")


def label_names(label: np.ndarray, classes: Sequence[str]) -> list[str] | None:
    """Return the names of an image's label, a number, or of its label set [C]; None:
    unknown.
    """
    if not classes or label.min() < 0:
        return None
    return [
        classes[i]
        for i in (np.flatnonzero(label).tolist() if label.ndim else [int(label)])
    ]


def validation_batches(data: Data, limit: int, training: bool = False) -> Batches:
    """Yield `Batches` of the validation split in evaluation's view.

    `limit`: number of images, evenly spaced; 0: all. `training`: the training split,
    with the views of its first epoch.
    """
    shown = data.views()[0] if training else data.shown(data.val)
    ids = evenly_spaced(len(shown), limit or len(shown))
    images = 0
    for batch in batches_of(shown, ids, BATCH):
        images += len(batch.ids)
        yield batch.image.numpy(), batch.label.numpy(), batch.crc
    if not images:
        split = "training" if training else "validation"
        raise DataError(
            "data",
            f"no image of the {split} split can be decoded",
            "",
            "Check data.root",
        )


def compare(
    eager: Runner, runners: Mapping[str, Runner], images: Batches
) -> GraphOutputs:
    """Run every image through PyTorch and every graph."""
    every = {EAGER: eager, **runners}
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in every}
    labels, measures, seen, first = [], [], list[tuple[int, int]](), np.zeros(0)
    for pixels, label, *crc in images:
        first = first if len(first) else pixels[:1]
        labels.append(label)
        measures += map(measure, pixels)
        shown = [zlib.crc32(image.tobytes()) for image in pixels]
        seen += zip_longest(crc[0] if crc else (), shown, fillvalue=0)
        for name, run in every.items():
            outputs[name].append(run(pixels))
    joined = {
        name: torch.from_numpy(np.concatenate(parts)) for name, parts in outputs.items()
    }
    took = cpu_ms(
        {name: partial(run, first) for name, run in every.items()}, TIMED_SECONDS
    )
    return GraphOutputs(
        joined, torch.from_numpy(np.concatenate(labels)), measures, took, first[0], seen
    )


def eager_runner(student: Classifier) -> Runner:
    """Return the student as a function from uint8 [B, 3, S, S] to float32 logits [B, C]
    or vectors [B, D].
    """
    student = student.eval()

    def run(image: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return student.answer(torch.from_numpy(image)).float().numpy()

    return run


def require_exact(
    name: str, scores: GraphScores, difference: float, tolerance: float, images: int
) -> None:
    """Require a graph's outputs to equal PyTorch's within the tolerance."""
    if difference > tolerance or scores.others:
        wrong = (
            f"values differ from PyTorch's by up to {difference:.2g}; {scores.others}"
            f" of {images} predictions change"
        )
        remedy = "Nothing was written; export with --no-onnx, or report the network"
        allowed = (
            f"At most {tolerance:g} (--tolerance), and the same prediction for every"
            " image"
        )
        raise ModelError(f"export.{name}", wrong, allowed, remedy)
