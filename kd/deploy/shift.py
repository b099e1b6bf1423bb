"""Detect input shift by comparing counts of predictions with those on validation.

Five numbers per image are counted under its predicted label: its confidence,
brightness, detail and two colour differences (see `measure`). No image is kept. Images
of an embedding model, which has no labels and no confidences, are counted together by
the other four numbers.

Two questions are tested apart, because they have different remedies:

- appearance: do images of the same predicted label have the same numbers? Labels are
  strata, so a change of label frequencies has no effect.
- labels: are the labels as frequent as in validation?

Both are two-sample tests, valid for any number of validation images. Under the null
hypothesis the number of images below a bound is a sum of hypergeometric numbers, one
per label, and Hoeffding's exp(-n KL(observed || expected)) bounds its tail (1963,
theorems 1 and 4). Bonferroni's correction covers bounds, labels and windows. Images
must be independent of each other: frames of a video are not.

Shape legend: C labels, Q numbers of an image, T + 1 bins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

# bin ends of channel differences: dense around grey, where photographs are
COLOUR = (
    -96.0, -64.0, -48.0, -32.0, -24.0, -16.0, -8.0, 0.0, 8.0, 16.0, 24.0, 32.0, 48.0,
    64.0, 96.0
)  # fmt: skip
Measures = tuple[float, float, float, float]  # numbers per image: see `measure`
CONFIDENCE = "confidence"
# upper ends of each number's bins; the last bin is open
BOUNDS: dict[str, tuple[float, ...]] = {
    CONFIDENCE: (
        0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999,
        0.9999
    ),
    "brightness": tuple(float(16 * i) for i in range(1, 16)),
    "detail": (
        0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0
    ),
    "red - green": COLOUR,
    "blue - green": COLOUR,
}  # fmt: skip
WINDOW = 250  # images between two tests of a stream (a window)
# numbers of latest windows tested together: detecting a small change takes more images
SPANS = (1, 2, 4, 8)
MOST_IMAGES = 10**8  # largest count in a manifest: sums stay within an int32
# -log10 of the p-value from which images count as different: by chance in one of a
# million windows
ALARM = 6.0


def measure(pixels: np.ndarray) -> Measures:
    """Return brightness, detail, red - green, blue - green of uint8 pixels [3, S, S].

    They are the mean of the green channel (0 to 255), the mean difference of neighbours
    in a row, and the means of red and blue minus that of green. Only some 128 rows are
    read: their mean is as good, and every prediction pays for it.
    """
    rows = pixels[:, :: max(1, pixels.shape[1] // 64)]
    red, green, blue = (int(channel.sum()) / channel.size for channel in rows)
    green_rows = rows[1].astype(np.int16)
    steps = green_rows[:, 1:] - green_rows[:, :-1]
    detail = int(np.abs(steps, out=steps).sum()) / steps.size
    return (
        round(green, 3),
        round(detail, 3),
        round(red - green, 3),
        round(blue - green, 3),
    )


class Tally:
    """Counts of images by label, and for each label by the bins of their numbers."""

    def __init__(self, labels: int, numbers: int) -> None:
        # images [2, C]: odd and even ones
        self.labels = np.zeros((2, labels), np.int64)
        self.bins = np.zeros((numbers, labels, 16), np.int32)  # images [Q, C, T + 1]
        self.images = 0
        self.confidence = 0.0  # sum

    def add(self, label: int, bins: Sequence[int], confidence: float) -> None:
        self.labels[self.images & 1, label] += 1
        for number, index in enumerate(bins):
            self.bins[number, label, index] += 1
        self.images += 1
        self.confidence += confidence

    @staticmethod
    def joined(tallies: Sequence[Tally]) -> Tally:
        total = Tally(0, 0)
        for name in ("labels", "bins", "images", "confidence"):
            setattr(total, name, sum(getattr(tally, name) for tally in tallies))
        return total


@dataclass(frozen=True, slots=True)
class ShiftResult:
    """Result of a test."""

    images: int
    appearance: float  # -log10 of the p-value, 0 or more
    labels: float
    difference: str  # description of the change of appearance
    mix: str  # description of the label with the largest change of frequency
    # mean confidence: the expected accuracy if calibrated. NaN for an embedding model.
    confidence: float

    @property
    def alarms(self) -> dict[str, bool]:
        return {"appearance": self.appearance >= ALARM, "labels": self.labels >= ALARM}

    @property
    def lines(self) -> list[str]:
        """The differences as text; empty without differences."""
        lines = []
        note = "the photographs of a label look as in validation"
        if self.alarms["appearance"]:
            line = "these photographs are not like those of validation"
            lines.append(f"{line}: {self.difference}")
            note = "which may follow from that"
        if self.alarms["labels"]:
            line = "the mix of labels is not that of validation"
            lines.append(f"{line}: {self.mix}; {note}")
        return lines


@dataclass(slots=True)
class Reference:
    """A graph's predictions on validation images."""

    names: Sequence[str]  # C labels; [""] for an embedding model
    bounds: Mapping[str, Sequence[float]]  # Q numbers with T bounds each
    tally: Tally
    calibrated: bool = False  # whether the mean confidence estimates the accuracy
    right: int = -1  # number of right predictions; -1: not all images have labels
    # whether a second model replaces unsure predictions: their accuracy is not known
    replaced: bool = False
    index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.index = {name: i for i, name in enumerate(self.names)}

    @staticmethod
    def of(
        names: Sequence[str],
        answers: Iterable[tuple[int, Sequence[float]]],
        calibrated: bool,
    ) -> Reference:
        """Count predictions, given each image's label and numbers.

        The label is 0 without `names`.
        """
        bounds = dict(BOUNDS)
        if not names:
            del bounds[CONFIDENCE]
            names = ("",)
        tally = Tally(len(names), len(bounds))
        reference = Reference(names, bounds, tally, calibrated)
        for label, numbers in answers:
            reference._add(tally, label, numbers)
        return reference

    def count(
        self, tally: Tally, answer: Mapping[str, Any], measures: Sequence[float]
    ) -> None:
        """Count an image under its most probable label.

        `answer`: its prediction (`LoadedGraph.answers`); `measures`: see `measure`.
        """
        if "top" in answer:
            best = answer["top"][0]
            self._add(tally, self.index[best["label"]], (best["score"], *measures))
        else:
            self._add(tally, 0, measures)

    def _add(self, tally: Tally, label: int, numbers: Sequence[float]) -> None:
        bins = [
            bisect_left(bounds, value)
            for bounds, value in zip(self.bounds.values(), numbers, strict=True)
        ]
        tally.add(label, bins, numbers[0] if CONFIDENCE in self.bounds else 0.0)

    def empty(self) -> Tally:
        """Return an empty tally for images to compare with these."""
        return Tally(len(self.names), len(self.bounds))

    def record(self) -> dict[str, Any]:
        """Return JSON values for manifest.json, with "BIN:IMAGES ..." per label."""
        record: dict[str, Any] = {
            "images": self.tally.images,
            "calibrated": self.calibrated,
            "confidence": self.tally.confidence,
        }
        if self.right >= 0:
            record["right"] = self.right
        record["labels"] = self._sparse(self.tally.labels.T)
        record["numbers"] = {
            name: {
                "bounds": " ".join(f"{bound:g}" for bound in bounds),
                "counts": self._sparse(counts),
            }
            for (name, bounds), counts in zip(
                self.bounds.items(), self.tally.bins, strict=True
            )
        }
        return record

    def _sparse(self, counts: np.ndarray) -> dict[str, str]:
        """Return counts [C, N] as text, for labels with images."""
        return {
            label: " ".join(f"{i}:{count}" for i, count in enumerate(row) if count)
            for label, row in zip(self.names, counts.tolist(), strict=True)
            if any(row)
        }

    @staticmethod
    def read(record: Mapping[str, Any], names: Sequence[str]) -> Reference:
        """Read the values of `record`, for an export with these labels.

        Raises one of `kd.files.json_file.DAMAGE` for any other values.
        """
        reference = Reference.of(names, (), bool(record["calibrated"]))
        tally = reference.tally
        numbers = record["numbers"]
        if numbers.keys() != reference.bounds.keys():
            names_read = ", ".join(map(str, numbers))[:60]
            raise ValueError(f"validation has the numbers {names_read}")
        tally.images = int(record["images"])
        tally.confidence = float(record["confidence"])
        for label, text in record["labels"].items():
            _fill(tally.labels[:, reference.index[label]], text)
        for (name, bounds), counts in zip(
            reference.bounds.items(), tally.bins, strict=True
        ):
            if tuple(map(float, numbers[name]["bounds"].split())) != tuple(bounds):
                raise ValueError(f"validation has other bounds of {name}")
            for label, text in numbers[name]["counts"].items():
                _fill(counts[reference.index[label]], text)
            if (counts.sum(1) != tally.labels.sum(0)).any():
                raise ValueError(
                    f"validation has other counts of {name} than of labels"
                )
        if (
            tally.images != tally.labels.sum()
            or not 0 <= tally.confidence <= tally.images
        ):
            wrong = "images, other counts, or a sum of confidences beyond"
            raise ValueError(f"validation has {tally.images} {wrong}")
        right = int(record.get("right", -1))
        if not -1 <= right <= tally.images:
            wrong = f"{right} right predictions of {tally.images}"
            raise ValueError(f"validation has {wrong}")
        reference.right = right
        return reference

    def compare(self, tally: Tally) -> ShiftResult:
        appearance, difference = self._appearance(tally)
        labels, mix = self._labels(tally)
        mean = math.nan
        if CONFIDENCE in self.bounds:
            mean = tally.confidence / max(tally.images, 1)
        return ShiftResult(
            tally.images, max(0.0, appearance), max(0.0, labels), difference, mix, mean
        )

    def notes(self, tally: Tally) -> tuple[str, ...]:
        """Return lines about new images: their expected accuracy and differences.

        The accuracy is a bound where images look different.
        """
        result = self.compare(tally)
        if not (self.calibrated and tally.images):
            return tuple(result.lines)
        images = self.tally.images
        usual = self.tally.confidence / images
        line = f"mean confidence {result.confidence:.1%}, {usual:.1%} on validation"
        if self.replaced:
            line = (
                f"expected accuracy unknown with a second model; of the first, {line}"
            )
        elif self.right >= 0:
            bound = "at most " if result.alarms["appearance"] else ""
            line = (
                f"expected accuracy {bound}{self.expected(result.confidence):.1%}:"
                f" {self.right / images:.1%} of {images} validation images were right,"
                f" and they chose the checkpoint; {line}"
            )
        return line, *result.lines

    def expected(self, confidence: float) -> float:
        """Return the validation accuracy plus the change of the mean confidence.

        arXiv:2107.03315, clipped to 0 to 1.
        """
        difference = (self.right - self.tally.confidence) / self.tally.images
        return min(1.0, max(0.0, difference + confidence))

    def _appearance(self, tally: Tally) -> tuple[float, str]:
        new_C = tally.labels.sum(0)
        usual_C = self.tally.labels.sum(0)
        # A window has few of 20,000 labels.
        in_both = np.flatnonzero((new_C > 0) & (usual_C > 0))
        ends = [
            (name, bound) for name, bounds in self.bounds.items() for bound in bounds
        ]
        x, y = (
            counts.bins[:, in_both]
            .cumsum(2)[:, :, :-1]
            .transpose(1, 0, 2)
            .reshape(len(in_both), len(ends))
            for counts in (tally, self.tally)
        )
        evidence, share, expected = _evidence(
            x, new_C[in_both, None], y, usual_C[in_both, None]
        )
        values = _log10(evidence, 2 * len(ends))
        best = values.reshape(len(self.bounds), -1).argmax(1)
        best += np.arange(0, len(ends), len(ends) // len(self.bounds))
        lines = [
            f"{ends[i][0]} at most {ends[i][1]:g} in {share[i]:.0%} of {tally.images}"
            f" images, {expected[i]:.0%} in validation"
            for i in best
            if values[i] >= ALARM
        ]
        return float(values.max()), "; ".join(lines)

    def _labels(self, tally: Tally) -> tuple[float, str]:
        """Test each label's frequency, and frequent labels of one half on the other.

        The first test detects one label, the second small changes of many, jointly.
        Halves, because the images that choose labels cannot also test them.
        """
        new_C = tally.labels.sum(0)
        usual_C = self.tally.labels.sum(0)
        if len(usual_C) < 2:
            return 0.0, ""
        evidence = _share_evidence(new_C, new_C.sum(), usual_C, usual_C.sum())
        values = [_log10(evidence, 2 * 2 * len(new_C)).max()]
        for half in (0, 1):
            new_half_C, x = tally.labels[[half, 1 - half]]
            usual_half_C, y = self.tally.labels[[half, 1 - half]]
            chosen_C = new_half_C * usual_half_C.sum() > usual_half_C * new_half_C.sum()
            evidence = _share_evidence(
                x[chosen_C].sum()[None], x.sum(), y[chosen_C].sum()[None], y.sum()
            )
            values.append(_log10(evidence, 2 * 2 * 2).max())
        share = new_C / max(1, new_C.sum())
        expected = usual_C / max(1, usual_C.sum())
        i = int(abs(share - expected).argmax())
        mix = (
            f"{self.names[i]!r} in {share[i]:.0%} of {tally.images} predictions,"
            f" {expected[i]:.0%} in validation"
        )
        return float(max(values)), mix


class ShiftWatch:
    """Watches a stream of predictions, with a test every `WINDOW` images.

    Not thread-safe.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        # predictions by label; an image may have several labels, or none
        self.label_counts: Counter[str] = Counter()
        # of the last test: the worst span
        self.result = ShiftResult(0, 0.0, 0.0, "", "", math.nan)
        # number of windows that raised each alarm
        self.alarms = dict.fromkeys(self.result.alarms, 0)
        self._windows: deque[Tally] = deque(maxlen=max(SPANS))
        self._open = reference.empty()
        self._tested = reference.empty()

    @property
    def all(self) -> Tally:
        return Tally.joined([self._tested, self._open])

    def add(
        self, answer: Mapping[str, Any], measures: Sequence[float], returned: Any = None
    ) -> list[str]:
        """Count an image, and return lines if the alarms change.

        `returned`: the prediction whose labels are counted (default: `answer`).
        """
        returned = returned or answer
        labels = returned.get("labels", returned.get("top", ())[:1])
        self.label_counts.update(label["label"] for label in labels)
        self.reference.count(self._open, answer, measures)
        if self._open.images < WINDOW:
            return []
        before = self.result.alarms
        self.result = self._test()
        if before == self.result.alarms:
            return []
        return self.result.lines or [
            "the photographs are like those of validation again"
        ]

    def _test(self) -> ShiftResult:
        self._windows.append(self._open)
        self._tested = self.all
        self._open = self.reference.empty()
        windows = list(self._windows)
        results = [
            self.reference.compare(Tally.joined(windows[-span:]))
            for span in SPANS
            if span <= len(windows)
        ]
        by_appearance = max(results, key=lambda result: result.appearance)
        by_labels = max(results, key=lambda result: result.labels)
        correction = math.log10(len(SPANS))
        result = replace(
            by_appearance,
            images=WINDOW,
            appearance=max(0.0, by_appearance.appearance - correction),
            labels=max(0.0, by_labels.labels - correction),
            mix=by_labels.mix,
            confidence=results[0].confidence,
        )
        for name, alarm in result.alarms.items():
            self.alarms[name] += alarm
        return result


def _evidence(
    x: np.ndarray, n: np.ndarray, y: np.ndarray, m: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return -log of the p-value of x of n images against y of m in C strata, [T].

    `x` and `y` are integers [C, T], `n` and `m` [C, 1]; `y` and `m` are of validation.
    Also return the shares [T] of x over all strata, and their expectation from the
    shares of y.
    """
    in_both = ((n > 0) & (m > 0))[:, 0]
    x, n, y, m = (array[in_both].astype(np.float64) for array in (x, n, y, m))
    if not len(n):
        zero = np.zeros(x.shape[1])
        return zero, zero, zero
    pooled = (x + y) / (n + m)
    bounds = []
    # Both are samples of the pool: take the tighter bound.
    for counts, images in ((x, n), (y, m)):
        total = images.sum()
        expected = (images * pooled).sum(0) / total
        bounds.append(total * _divergence(counts.sum(0) / total, expected))
    return np.maximum(*bounds), x.sum(0) / n.sum(), (n * y / m).sum(0) / n.sum()


def _share_evidence(x: np.ndarray, n: int, y: np.ndarray, m: int) -> np.ndarray:
    """Return -log of the p-value [T] of x [T] of n images against y [T] of m."""
    return _evidence(x[None], np.array([[n]]), y[None], np.array([[m]]))[0]


def _divergence(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Return KL(q || p) of shares, nats; 0 if both are 0 or 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        yes = np.where(q > 0, q * np.log(q / p), 0.0)
        no = np.where(q < 1, (1 - q) * np.log((1 - q) / (1 - p)), 0.0)
    return np.maximum(yes + no, 0.0)


def _log10(evidence: np.ndarray, tests: int) -> np.ndarray:
    """Return -log10 of p-values, corrected for `tests` tests."""
    return (evidence - math.log(tests)) / math.log(10)


def _fill(row: np.ndarray, text: str) -> None:
    """Read the text of `Reference._sparse`; raise ValueError for any other text."""
    before = -1
    for pair in text.split():
        i, count = map(int, pair.split(":"))
        if not before < i < len(row) or not 0 < count <= MOST_IMAGES:
            raise ValueError(f"validation has the count {pair[:40]!r}")
        row[i] = count
        before = i
