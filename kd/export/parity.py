"""Do the exported graphs answer as PyTorch does, on real images, and what does an image cost?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kd.data.views import Views
from kd.engine import evaluate
from kd.engine.label_sets import score, thresholds
from kd.errors import DataError, ModelError
from kd.export.calibrate import divide_logits, temperature
from kd.models.classifier import Classifier
from kd.setup.data import Data, evenly_spaced
from kd.text import percent

Runner = Callable[[np.ndarray], np.ndarray]
BATCH = 16
FEWEST_LABELLED = 100
"""Images with a label below which no temperature is fitted."""
TIMED_SECONDS, TIMED_ROUNDS = 4.0, 30


@dataclass(slots=True)
class Row:
    """One graph against PyTorch."""

    embedding: bool = False
    """It compares vectors of length 1, not logits."""
    images: int = 0
    same_top1: int = 0
    correct: int = 0
    max_difference: float = 0.0
    """Of all logits, or values of a vector, of all images."""
    cosine: float = 0.0
    """Sum of the cosines with PyTorch's vectors."""
    cpu_ms: float = 0.0
    answers: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Logits [B, C] and label sets [B, C], where images have several labels."""

    @property
    def accuracy(self) -> float:
        """Share of right answers; of label sets the mean average precision."""
        if self.answers:
            logits_NC, label_NC = self.whole()
            return score(logits_NC, label_NC > 0)["map"]
        return self.correct / max(1, self.images)

    @property
    def score(self) -> str:
        """The name of what `accuracy` holds."""
        return "mAP" if self.answers else "accuracy"

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all logits and all label sets, [N, C]."""
        logits_NC, label_NC = (torch.from_numpy(np.concatenate(each)) for each in zip(*self.answers, strict=True))
        return logits_NC, label_NC

    def add(self, logits: np.ndarray, reference: np.ndarray, labels: np.ndarray) -> None:
        """Count one batch: logits [B, C] or vectors [B, D] twice, labels [B] or label sets [B, C]."""
        difference = np.abs(logits - reference).max()
        self.images += len(labels)
        self.cosine += float((logits * reference).sum()) if self.embedding else 0.0
        self.same_top1 += int((logits.argmax(1) == reference.argmax(1)).sum())
        if labels.ndim == 2:
            known = (labels >= 0).all(1)
            self.answers.append((logits[known], labels[known]))
        else:  # without a label PyTorch is right
            self.correct += int((logits.argmax(1) == np.where(labels < 0, reference.argmax(1), labels)).sum())
        # NaN compares with nothing: it must not pass as no difference
        self.max_difference = max(self.max_difference, float(difference) if np.isfinite(difference) else np.inf)

    def facts(self) -> dict[str, Any]:
        """Return what the manifest and the card hold."""
        rounded = {"max_difference": float(f"{self.max_difference:.3g}"), "cpu_ms": round(self.cpu_ms, 3)}
        if self.embedding:
            return {"images": self.images, **rounded, "cosine": self.mean_cosine}
        counted = {"images": self.images, "same_top1": self.same_top1, "correct": self.correct}
        if self.answers:
            del counted["correct"]
        return {**counted, **rounded, self.score: self.accuracy}

    @property
    def mean_cosine(self) -> float:
        """Mean cosine with PyTorch's vectors."""
        return self.cosine / max(1, self.images)

    @property
    def summary(self) -> str:
        """How its answers compare, as text."""
        if self.embedding:
            return f"mean cosine {self.mean_cosine:.6f} on {self.images} validation images"
        return f"same top-1 on {self.same_top1} of {self.images} validation images"


def validation_images(data: Data, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield uint8 images [B, 3, S, S] and labels [B] of the validation split as evaluation sees them.

    Args:
        data: both splits, opened.
        limit: how many images, evenly spaced over the split; 0: all.

    Raises:
        DataError: not one of them can be decoded.
    """
    shown = Views(data.val, data.evaluate(), data.section.image_size, 0, on_corrupt=data.section.on_corrupt)
    ids = evenly_spaced(len(shown), limit or len(shown))
    found = 0
    for first in range(0, len(ids), BATCH):
        samples = [sample for sample in (shown.load(id, 0) for id in ids[first : first + BATCH]) if sample.readable]
        if samples:
            found += len(samples)
            yield np.stack([s.pixels.numpy() for s in samples]), np.array([s.label for s in samples])
    if not found:
        raise DataError("data", "no image of the validation split can be decoded", "", "Check data.root")


def compare(
    student: Classifier, runners: Mapping[str, Runner], images: Iterator[tuple[np.ndarray, np.ndarray]]
) -> tuple[Row, dict[str, Row]]:
    """Run every image through PyTorch and every graph; return PyTorch's own row and one for each graph."""
    embedding = not student.num_classes
    eager, rows = Row(embedding), {name: Row(embedding) for name in runners}
    answer = eager_runner(student)
    first = np.zeros((0,))
    for pixels, labels in images:
        first = pixels[:1] if not len(first) else first
        reference = answer(pixels)
        eager.add(reference, reference, labels)
        for name, run in runners.items():
            rows[name].add(run(pixels), reference, labels)
    _time(first, {"": answer, **runners}, {"": eager, **rows})
    return eager, rows


def calibrate(student: Classifier, images: Iterator[tuple[np.ndarray, np.ndarray]]) -> tuple[dict[str, Any], str]:
    """Fit a temperature on validation images and divide the student's logits by it.

    Args:
        student: on the CPU; its last layer is changed in place.
        images: uint8 [B, 3, S, S], with labels [B].

    Returns:
        Temperature, images and the calibration error before and after, as JSON values, and a line about them. Where
        nothing was changed, nothing and the reason.

    Raises:
        ModelError: the network's logits are not what its last layer returns.
    """
    answer = eager_runner(student)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    pixels = np.zeros(0)
    for pixels, labels in images:
        seen.append((answer(pixels), labels))
    logits_NC, label_N = (torch.from_numpy(np.concatenate(each)) for each in zip(*seen, strict=True))
    logits_NC, label_N = logits_NC[label_N >= 0], label_N[label_N >= 0]
    mistakes = int((logits_NC.argmax(1) != label_N).sum())
    if len(label_N) < FEWEST_LABELLED or not mistakes:
        reason = f"{len(label_N)} validation images have a label and {mistakes} of the answers are wrong"
        return {}, f"not calibrated: {reason}; it takes {FEWEST_LABELLED} images and a wrong answer"
    found = temperature(logits_NC, label_N)
    if not divide_logits(student.network, found):
        return {}, f"not calibrated: the last layer of {type(student.network).__name__} is not one nn.Linear"
    if not np.allclose(answer(pixels) * found, seen[-1][0], rtol=1e-3, atol=1e-3):
        wrong = f"the logits of {type(student.network).__name__} are not what its last layer returns"
        raise ModelError("export.calibrate", wrong, "", "Export with --no-calibrate")
    before, after = (evaluate.calibration_error(each_NC, label_N) for each_NC in (logits_NC, logits_NC / found))
    line = f"calibrated: logits divided by {found:.3g}, as {len(label_N)} validation images ask for; "
    line += f"calibration error there {percent(before)} -> {percent(after)}"
    return {"temperature": found, "images": len(label_N), "ece": before, "calibrated_ece": after}, line


def chosen_thresholds(eager: Row, classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return for each class from which probability it is answered, and how that was found, as JSON values.

    Args:
        eager: PyTorch's answers on the validation images that were compared.
        classes: in the order of the logits.
    """
    found = {name: {"threshold": 0.5, "chosen": False, "images": 0} for name in classes}
    if not eager.answers:
        return found
    logits_NC, label_NC = eager.whole()
    values_C, enough_C = thresholds(logits_NC, label_NC > 0)
    for name, value, enough, shown in zip(
        classes, values_C.tolist(), enough_C.tolist(), (label_NC > 0).sum(0).tolist(), strict=True
    ):
        found[name] = {"threshold": round(value, 6), "chosen": enough, "images": shown}
    return found


def eager_runner(student: Classifier) -> Runner:
    """Return the student as a function from uint8 [B, 3, S, S] to float32 logits [B, C] or vectors [B, D]."""
    student = student.eval()

    def run(image: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return student.answer(torch.from_numpy(image)).float().numpy()

    return run


def _time(image: np.ndarray, runners: Mapping[str, Runner], rows: Mapping[str, Row]) -> None:
    """Measure the CPU time of one image with one thread, in turns, as medians."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        took: dict[str, list[float]] = {name: [] for name in runners}
        begin = time.perf_counter()
        for turn in range(TIMED_ROUNDS + 2):
            for name, run in runners.items():
                start = time.process_time()
                run(image)
                if turn >= 2:
                    took[name].append(1000 * (time.process_time() - start))
            if turn > 4 and time.perf_counter() - begin > TIMED_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    for name, row in rows.items():
        row.cpu_ms = statistics.median(took[name])


def check_exact(name: str, row: Row, tolerance: float) -> str:
    """Require a graph to compute what PyTorch computes; say how close it is.

    Raises:
        ModelError: a value differs by more than `tolerance`, or an answer does.
    """
    others = 0 if row.embedding else row.images - row.same_top1
    if row.max_difference > tolerance or others:
        raise ModelError(
            f"export.{name}",
            f"its values differ from PyTorch's by up to {row.max_difference:.2g}, and {others} of {row.images} "
            "answers do",
            f"At most {tolerance:g} (--tolerance), and every answer the same",
            "Nothing was written; export with --no-onnx, or report the network",
        )
    return f"max |d{'value' if row.embedding else 'logit'}| {row.max_difference:.1e}"


def check_drop(name: str, row: Row, eager: Row, max_drop: float) -> str:
    """Require an approximate graph to be about as right as PyTorch, or its vectors to point where PyTorch's do.

    Returns:
        What it loses, as text.

    Raises:
        ModelError: it loses more than `max_drop` of the accuracy, or of the mean cosine.
    """
    if row.embedding:
        before, after, what = 1.0, row.mean_cosine, "the mean cosine with PyTorch's vectors"
        shown = f"{after:.4f}"
    else:
        before, after, what = eager.accuracy, row.accuracy, row.score
        shown = f"{percent(before)} -> {percent(after)} (drop {100 * (before - after):.2f} points)"
    if not before - after <= max_drop:
        raise ModelError(
            f"export.{name}",
            f"{what} falls from {percent(before)} to {percent(after)} on {row.images} images",
            f"A drop of at most {100 * max_drop:g} points (--max-drop)",
            "Nothing was written; raise --max-drop, or export without --int8",
        )
    return f"max |d{'value' if row.embedding else 'logit'}| {row.max_difference:.1e}, {what} {shown}"
