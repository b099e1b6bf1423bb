"""Detect input shift: compare counts of predictions with those of the export's
validation images.

Five numbers per image are counted under its predicted label: its confidence,
brightness, detail and two colour differences (see `measure`). No image is kept. Images
of an embedding model, which has no labels and no confidences, are counted together by
the other four numbers.

Two questions are tested apart, because they have different remedies:

- appearance: do images of the same predicted label have the same numbers? Labels are
  strata, so a change of label
frequencies has no effect.
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

COLOUR = (
    -96.0,
    -64.0,
    -48.0,
    -32.0,
    -24.0,
    -16.0,
    -8.0,
    0.0,
    8.0,
    16.0,
    24.0,
    32.0,
    48.0,
    64.0,
    96.0,
)
"""Bin ends of channel differences: dense around grey, where photographs are."""
Measures = tuple[float, float, float, float]  # numbers per image: see `measure`
BOUNDS: dict[
    str, tuple[float, ...]
] = {  # upper ends of each number's bins; the last bin is open
    "confidence": (
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        0.95,
        0.98,
        0.99,
        0.995,
        0.999,
        0.9999,
    ),
    "brightness": tuple(float(16 * i) for i in range(1, 16)),
    "detail": (
        0.5,
        1.0,
        1.5,
        2.0,
        3.0,
        4.0,
        6.0,
        8.0,
        10.0,
        12.0,
        16.0,
        20.0,
        24.0,
        32.0,
        48.0,
    ),
    "red - green": COLOUR,
    "blue - green": COLOUR,
}
CONFIDENCE = "confidence"
WINDOW = 250  # images between two tests of a stream (a window)
SPANS = (
    1,
    2,
    4,
    8,
)  # numbers of latest windows tested together: detecting a small change takes more images
MOST_IMAGES = 10**8  # largest count in a manifest: sums stay within an int32
# -log10 of the p-value from which images count as different: by chance in one of a
# million windows
ALARM = 6.0


def measure(pixels: np.ndarray) -> Measures:
    """Return brightness, detail, red - green and blue - green of the network's uint8
    pixels [3, S, S].

    They are the mean of the green channel (0 to 255), the mean difference of neighbours
    in a row, and the means of red and blue minus that of green. Only some 128 rows are
    read: their mean is as good, and every prediction pays for it.
    """
    some = pixels[:, :: max(1, pixels.shape[1] // 64)]
    red, green, blue = (int(channel.sum()) / channel.size for channel in some)
    rows = some[1].astype(np.int16)
    steps = rows[:, 1:] - rows[:, :-1]
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
        self.labels = np.zeros(
            (2, labels), np.int64
        )  # images [2, C]: odd and even ones
        self.bins = np.zeros((numbers, labels, 16), np.int32)  # images [Q, C, T + 1]
        self.images = 0
        self.confidence = 0.0  # sum

    def add(self, label: int, bins: Sequence[int], confidence: float) -> None:
        self.labels[self.images & 1, label] += 1
        for number, one in enumerate(bins):
            self.bins[number, label, one] += 1
        self.images += 1
        self.confidence += confidence

    @staticmethod
    def joined(tallies: Sequence[Tally]) -> Tally:
        total = Tally(0, 0)
        for name in ("labels", "bins", "images", "confidence"):
            setattr(total, name, sum(getattr(one, name) for one in tallies))
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
        found = []
        if self.alarms["appearance"]:
            found.append(
                f"these photographs are not like those of validation: {self.difference}"
            )
        if self.alarms["labels"]:
            also = (
                "which may follow from that"
                if found
                else "the photographs of a label look as in validation"
            )
            found.append(
                f"the mix of labels is not that of validation: {self.mix}; {also}"
            )
        return found


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
        """Count predictions, given each image's label number (0 without `names`) and
        its numbers.
        """
        bounds = (
            BOUNDS
            if names
            else {key: value for key, value in BOUNDS.items() if key != CONFIDENCE}
        )
        made = Reference(
            names or ("",), bounds, Tally(len(names) or 1, len(bounds)), calibrated
        )
        for label, numbers in answers:
            made._add(made.tally, label, numbers)
        return made

    def count(
        self, tally: Tally, answer: Mapping[str, Any], measures: Sequence[float]
    ) -> None:
        """Count an image under its most probable label, given its prediction
        (`serve.answers`) and `measure`.
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
        """Return JSON values for manifest.json: "BIN:IMAGES ..." per label that has
        images.
        """
        values = {
            name: {
                "bounds": " ".join(f"{bound:g}" for bound in bounds),
                "counts": {
                    label: text
                    for label, row in zip(self.names, rows, strict=True)
                    if (text := _sparse(row))
                },
            }
            for (name, bounds), rows in zip(
                self.bounds.items(), self.tally.bins, strict=True
            )
        }
        halves = {
            name: _sparse(row)
            for name, row in zip(self.names, self.tally.labels.T, strict=True)
            if row.any()
        }
        facts = {
            "images": self.tally.images,
            "calibrated": self.calibrated,
            "confidence": self.tally.confidence,
        }
        right = {"right": self.right} if self.right >= 0 else {}
        return {**facts, **right, "labels": halves, "numbers": values}

    @staticmethod
    def read(record: Mapping[str, Any], names: Sequence[str]) -> Reference:
        """Read what `record` returned, for an export with these labels.

        Raises one of `kd.files.json_file.DAMAGE` for anything else.
        """
        made = Reference.of(names, (), bool(record["calibrated"]))
        numbers = record["numbers"]
        if numbers.keys() != made.bounds.keys():
            raise ValueError(
                f"validation has the numbers {', '.join(map(str, numbers))[:60]}"
            )
        made.tally.images, made.tally.confidence = (
            int(record["images"]),
            float(record["confidence"]),
        )
        for label, text in record["labels"].items():
            _fill(made.tally.labels[:, made.index[label]], text)
        for (name, bounds), row in zip(
            made.bounds.items(), made.tally.bins, strict=True
        ):
            if tuple(map(float, numbers[name]["bounds"].split())) != tuple(bounds):
                raise ValueError(f"validation has other bounds of {name}")
            for label, text in numbers[name]["counts"].items():
                _fill(row[made.index[label]], text)
            if (row.sum(1) != made.tally.labels.sum(0)).any():
                raise ValueError(
                    f"validation has other counts of {name} than of labels"
                )
        if (
            made.tally.images != made.tally.labels.sum()
            or not 0 <= made.tally.confidence <= made.tally.images
        ):
            raise ValueError(
                f"validation has {made.tally.images} images, other counts, or a sum of"
                " confidences beyond"
            )
        made.right = int(record.get("right", -1))
        if not -1 <= made.right <= made.tally.images:
            raise ValueError(
                f"validation has {made.right} right predictions of {made.tally.images}"
            )
        return made

    def compare(self, tally: Tally) -> ShiftResult:
        appearance, difference = self._appearance(tally)
        labels, mix = self._labels(tally)
        mean = (
            tally.confidence / max(tally.images, 1)
            if CONFIDENCE in self.bounds
            else math.nan
        )
        return ShiftResult(
            tally.images, max(0.0, appearance), max(0.0, labels), difference, mix, mean
        )

    def notes(self, tally: Tally) -> tuple[str, ...]:
        """Return lines: the expected accuracy of new images, a bound where they look
        different, and the differences.
        """
        found = self.compare(tally)
        lines = list(found.lines)
        if self.calibrated and tally.images:
            usual = self.tally.confidence / self.tally.images
            text = f"mean confidence {found.confidence:.1%}, {usual:.1%} on validation"
            if self.replaced:
                text = (
                    "expected accuracy unknown with a second model; of the first,"
                    f" {text}"
                )
            elif self.right >= 0:
                measured = (
                    f"{self.right / self.tally.images:.1%} of {self.tally.images}"
                    " validation images"
                )
                measured += " were right, and they chose the checkpoint"
                bound = "at most " if found.alarms["appearance"] else ""
                text = (
                    f"expected accuracy {bound}{self.expected(found.confidence):.1%}:"
                    f" {measured}; {text}"
                )
            lines.insert(0, text)
        return tuple(lines)

    def expected(self, confidence: float) -> float:
        """Return the validation accuracy plus the difference of mean confidences
        (arXiv:2107.03315).
        """
        return min(
            1.0,
            max(
                0.0,
                (self.right - self.tally.confidence) / self.tally.images + confidence,
            ),
        )

    def _appearance(self, tally: Tally) -> tuple[float, str]:
        came, ours = tally.labels.sum(0), self.tally.labels.sum(0)
        in_both = np.flatnonzero(
            (came > 0) & (ours > 0)
        )  # a window has few of 20,000 labels
        ends = [
            (name, bound) for name, bounds in self.bounds.items() for bound in bounds
        ]
        below = (
            one.bins[:, in_both].cumsum(2)[:, :, :-1].transpose(1, 0, 2)
            for one in (tally, self.tally)
        )
        x, y = (counts.reshape(len(in_both), len(ends)) for counts in below)
        evidence, share, expected = _evidence(
            x, came[in_both, None], y, ours[in_both, None]
        )
        values = _log10(evidence, 2 * len(ends))
        best = values.reshape(len(self.bounds), -1).argmax(1) + np.arange(
            0, len(ends), len(ends) // len(self.bounds)
        )
        texts = [
            f"{ends[i][0]} at most {ends[i][1]:g} in {share[i]:.0%} of {tally.images}"
            f" images, {expected[i]:.0%} in validation"
            for i in best
            if values[i] >= ALARM
        ]
        return float(values.max()), "; ".join(texts)

    def _labels(self, tally: Tally) -> tuple[float, str]:
        """Test each label's frequency, and jointly the labels that are too frequent in
        one half, on the other half.

        The first test detects one label, the second small changes of many. Halves,
        because the images that choose labels cannot also test them.
        """
        came, ours = tally.labels.sum(0), self.tally.labels.sum(0)
        if len(ours) < 2:
            return 0.0, ""
        found = [
            _log10(_shares(came, came.sum(), ours, ours.sum()), 2 * 2 * len(came)).max()
        ]
        for half in (0, 1):
            (seen, x), (usual, y) = (
                (one.labels[half], one.labels[1 - half]) for one in (tally, self.tally)
            )
            more = seen * usual.sum() > usual * seen.sum()
            found.append(
                _log10(
                    _shares(x[more].sum()[None], x.sum(), y[more].sum()[None], y.sum()),
                    2 * 2 * 2,
                ).max()
            )
        share, expected = came / max(1, came.sum()), ours / max(1, ours.sum())
        i = int(abs(share - expected).argmax())
        text = (
            f"{self.names[i]!r} in {share[i]:.0%} of {tally.images} predictions,"
            f" {expected[i]:.0%} in validation"
        )
        return float(max(found)), text


class ShiftWatch:
    """Watches a stream of predictions, with a test every `WINDOW` images. Not
    thread-safe.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.answered: Counter[str] = (
            Counter()
        )  # an image may have several labels, or none
        self.found = ShiftResult(
            0, 0.0, 0.0, "", "", math.nan
        )  # result of the last test: the worst span
        self.alarms = dict.fromkeys(
            self.found.alarms, 0
        )  # number of windows that raised each alarm
        self._windows: deque[Tally] = deque(maxlen=max(SPANS))
        self._open, self._tested = reference.empty(), reference.empty()

    @property
    def all(self) -> Tally:
        return Tally.joined([self._tested, self._open])

    def add(
        self, answer: Mapping[str, Any], measures: Sequence[float], returned: Any = None
    ) -> list[str]:
        """Count an image, and the labels of `returned` (default: `answer`); return
        lines if the findings change.
        """
        returned = returned or answer
        self.answered.update(
            one["label"] for one in returned.get("labels", returned.get("top", ())[:1])
        )
        self.reference.count(self._open, answer, measures)
        if self._open.images < WINDOW:
            return []
        before, self.found = self.found, self._test()
        if before.alarms == self.found.alarms:
            return []
        return self.found.lines or [
            "the photographs are like those of validation again"
        ]

    def _test(self) -> ShiftResult:
        self._windows.append(self._open)
        self._tested, self._open = self.all, self.reference.empty()
        windows = list(self._windows)
        found = [
            self.reference.compare(Tally.joined(windows[-span:]))
            for span in SPANS
            if span <= len(windows)
        ]
        appearance, labels = (
            max(found, key=lambda one: one.appearance),
            max(found, key=lambda one: one.labels),
        )
        joined = math.log10(len(SPANS))
        made = replace(
            appearance,
            images=WINDOW,
            appearance=max(0.0, appearance.appearance - joined),
            labels=max(0.0, labels.labels - joined),
            mix=labels.mix,
            confidence=found[0].confidence,
        )
        self.alarms = {
            name: count + made.alarms[name] for name, count in self.alarms.items()
        }
        return made


def _evidence(
    x: np.ndarray, n: np.ndarray, y: np.ndarray, m: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return -log of the p-value [T] of x of n images against y of m in C strata, and
    both shares.

    `x` and `y` are integers [C, T], `n` and `m` [C, 1]; `y` and `m` are of validation.
    The shares [T] are that of x over all strata, and its expectation from the shares of
    y.
    """
    there = ((n > 0) & (m > 0))[:, 0]
    x, n, y, m = (one[there].astype(np.float64) for one in (x, n, y, m))
    if not len(n):
        return np.zeros(x.shape[1]), np.zeros(x.shape[1]), np.zeros(x.shape[1])
    pooled, bounds = (x + y) / (n + m), []
    for part, size in (
        (x, n),
        (y, m),
    ):  # both are samples of the pool: take the tighter bound
        total = size.sum()
        bounds.append(
            total * _divergence(part.sum(0) / total, (size * pooled).sum(0) / total)
        )
    return np.maximum(*bounds), x.sum(0) / n.sum(), (n * y / m).sum(0) / n.sum()


def _shares(x: np.ndarray, n: int, y: np.ndarray, m: int) -> np.ndarray:
    """Return -log of the p-value [T] of x [T] of n images against y [T] of m."""
    return _evidence(x[None], np.array([[n]]), y[None], np.array([[m]]))[0]


def _divergence(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Return KL(q || p) of shares, nats; 0 if both are 0 or 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        yes, no = (
            np.where(q > 0, q * np.log(q / p), 0.0),
            np.where(q < 1, (1 - q) * np.log((1 - q) / (1 - p)), 0.0),
        )
    return np.maximum(yes + no, 0.0)


def _log10(evidence: np.ndarray, tests: int) -> np.ndarray:
    """Return -log10 of p-values, corrected for `tests` tests."""
    return (evidence - math.log(tests)) / math.log(10)


def _sparse(row: np.ndarray) -> str:
    return " ".join(f"{i}:{count}" for i, count in enumerate(row.tolist()) if count)


def _fill(row: np.ndarray, text: str) -> None:
    """Read the text of `_sparse`; ValueError: anything else."""
    before = -1
    for pair in text.split():
        i, count = map(int, pair.split(":"))
        if not before < i < len(row) or not 0 < count <= MOST_IMAGES:
            raise ValueError(f"validation has the count {pair[:40]!r}")
        row[i], before = count, i
