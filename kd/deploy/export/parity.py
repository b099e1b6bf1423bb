"""Compare exported graphs with PyTorch on real images, and measure their cost."""

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
from kd.core.intervals import (
    bootstrap_interval,
    bootstrap_scores,
    paired_interval,
    wilson_interval,
)
from kd.core.scores import GraphScores
from kd.core.seeds import evenly_spaced
from kd.data.loader import batches_of
from kd.deploy.export.claims import ParityClaims
from kd.deploy.shift import Measures, Reference, measure
from kd.models.classifier import Classifier
from kd.models.runtimes import median_cpu_ms
from kd.parts.tasks.single_label import calibration_error
from kd.setup.data import Data

Runner = Callable[[np.ndarray], np.ndarray]
Batches = Iterable[tuple[Any, ...]]
"""uint8 images [B, 3, S, S], labels [B] or sets [B, C], CRC-32 of their files if known.
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
    # the first image, uint8 [3, S, S]
    first: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    # CRC-32 of each file (0 if unknown) and of its pixels
    images: Sequence[tuple[int, int]] = ()

    def reference(
        self, name: str, task: Task, classes: Sequence[str], calibrated: bool
    ) -> Reference:
        """Return a graph's predictions as the reference for input shift."""
        if not task.logits:
            return Reference.of((), ((0, numbers) for numbers in self.measures), False)
        logits_NC = self.outputs[name].double()
        is_softmax = task.logits == "softmax"
        share_NC = logits_NC.softmax(1) if is_softmax else logits_NC.sigmoid()
        score_N, label_N = share_NC.max(1)
        rows = zip(label_N.tolist(), score_N.tolist(), self.measures, strict=True)
        reference = Reference.of(
            classes,
            ((label, (score, *numbers)) for label, score, numbers in rows),
            calibrated,
        )
        if is_softmax and bool((self.labels >= 0).all()):
            reference.right = int((label_N == self.labels).sum())
        return reference

    def scores(self, name: str, task: Task, picks: Any = slice(None)) -> GraphScores:
        """Return the scores on all images or on the picked ones."""
        return task.graph_scores(
            self.outputs[name][picks], self.outputs[EAGER][picks], self.labels[picks]
        )

    def interval(self, name: str, task: Task) -> tuple[float, float]:
        """Return the 95 % interval of the selection metric.

        It is Wilson's for a share of images, else the bootstrap's.
        """
        scores = self.scores(name, task)
        if scores.share_of:
            return wilson_interval(scores.score, scores.share_of)
        return bootstrap_interval(
            scores.score,
            bootstrap_scores(
                lambda picks: self.scores(name, task, picks).score, len(self.labels)
            ),
        )

    def drop(self, name: str, task: Task, picks: Any = slice(None)) -> float:
        """Return PyTorch's selection metric minus the graph's."""
        return (
            self.scores(EAGER, task, picks).score - self.scores(name, task, picks).score
        )

    def drop_interval(self, name: str, task: Task) -> tuple[float, float]:
        """Return the 95 % interval of `drop`.

        It is computed from the images whose prediction changed, or by the bootstrap.
        """
        if images := self.scores(name, task).share_of:
            eager_N = self.outputs[EAGER].argmax(1)
            label_N = self.labels if bool((self.labels >= 0).any()) else eager_N
            before_N = eager_N == label_N
            after_N = self.outputs[name].argmax(1) == label_N
            lost = int((before_N & ~after_N).sum())
            return paired_interval(lost, int((after_N & ~before_N).sum()), images)
        return bootstrap_interval(
            self.drop(name, task),
            bootstrap_scores(
                lambda picks: self.drop(name, task, picks), len(self.labels)
            ),
        )

    def facts(self, name: str, task: Task) -> ParityClaims:
        """Return a graph's entry in manifest.json."""
        is_labelled = self.labels >= 0
        entry: ParityClaims = {
            "images": len(self.labels),
            "max_difference": float(f"{self.difference(name):.3g}"),
            "cpu_ms": round(self.cpu_ms[name], 3),
        }
        entry.update(cast(ParityClaims, self.scores(name, task).facts))
        if task.logits == "softmax" and bool(is_labelled.any()):
            entry["ece"] = calibration_error(
                self.outputs[name][is_labelled], self.labels[is_labelled]
            )
        return entry

    def write_images(self, file: Path, classes: Sequence[str]) -> None:
        """Write one line per image.

        It has the CRC-32 of file and pixels, whether labels are known, and their names.
        """
        with file.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.writer(opened, lineterminator="\n")
            for (encoded, pixels), label in zip(
                self.images, self.labels.numpy(), strict=True
            ):
                names = label_names(label, classes)
                writer.writerow(
                    [
                        f"{encoded:08x}",
                        f"{pixels:08x}",
                        int(names is not None),
                        *(names or ()),
                    ]
                )

    def joined(self, graphs: GraphOutputs) -> GraphOutputs:
        return replace(
            self,
            outputs={**self.outputs, **graphs.outputs},
            cpu_ms={**self.cpu_ms, **graphs.cpu_ms},
        )

    def difference(self, name: str) -> float:
        """Return the largest absolute difference from PyTorch; inf if not finite."""
        differences = (self.outputs[name] - self.outputs[EAGER]).abs()
        return (
            float(differences.max())
            if bool(differences.isfinite().all())
            else float("inf")
        )


def label_names(label: np.ndarray, classes: Sequence[str]) -> list[str] | None:
    """Return the names of a label or of a label set [C]; None: unknown."""
    if not classes or label.min() < 0:
        return None
    indices = np.flatnonzero(label).tolist() if label.ndim else [int(label)]
    return [classes[i] for i in indices]


def validation_batches(data: Data, limit: int, training: bool = False) -> Batches:
    """Yield `Batches` of the validation split in evaluation's view.

    `limit`: number of images, evenly spaced; 0: all. `training`: the training split,
    with the views of its first epoch.
    """
    dataset = data.views()[0] if training else data.evaluation_views(data.val)
    ids = evenly_spaced(len(dataset), limit or len(dataset))
    image_count = 0
    for batch in batches_of(dataset, ids, BATCH):
        image_count += len(batch.ids)
        yield batch.image.numpy(), batch.label.numpy(), batch.crc
    if not image_count:
        split = "training" if training else "validation"
        wrong = f"no image of the {split} split can be decoded"
        raise DataError("data", wrong, "", "Check data.root")


def compare(
    eager: Runner, runners: Mapping[str, Runner], images: Batches
) -> GraphOutputs:
    """Run every image through PyTorch and every graph."""
    runners = {EAGER: eager, **runners}
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in runners}
    labels: list[np.ndarray] = []
    measures: list[Measures] = []
    image_crcs: list[tuple[int, int]] = []
    first = np.zeros(0)
    for pixels, label, *crc in images:
        first = first if len(first) else pixels[:1]
        labels.append(label)
        measures += map(measure, pixels)
        pixel_crcs = [zlib.crc32(image.tobytes()) for image in pixels]
        image_crcs += zip_longest(crc[0] if crc else (), pixel_crcs, fillvalue=0)
        for name, run in runners.items():
            outputs[name].append(run(pixels))
    return GraphOutputs(
        {name: torch.from_numpy(np.concatenate(outputs[name])) for name in outputs},
        torch.from_numpy(np.concatenate(labels)),
        measures,
        median_cpu_ms(
            {name: partial(runners[name], first) for name in runners}, TIMED_SECONDS
        ),
        first[0],
        image_crcs,
    )


def eager_runner(student: Classifier) -> Runner:
    """Return the student as a function from uint8 [B, 3, S, S] to float32 [B, C or D].

    It returns logits [B, C] or vectors [B, D].
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
    if difference > tolerance or scores.changed:
        wrong = (
            f"values differ from PyTorch's by up to {difference:.2g}; {scores.changed}"
            f" of {images} predictions change"
        )
        remedy = "Nothing was written; export with --no-onnx, or report the network"
        allowed = (
            f"At most {tolerance:g} (--tolerance), and the same prediction for every"
            " image"
        )
        raise ModelError(f"export.{name}", wrong, allowed, remedy)
