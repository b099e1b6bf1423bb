"""Whether later images are like those of validation: the bound of the p-value, what
each test sees, and its record.
"""

import json
import math

import numpy as np
import pytest
import torch

from kd.deploy.export.parity import GraphOutputs
from kd.deploy.shift import (
    ALARM,
    WINDOW,
    Reference,
    ShiftWatch,
    Tally,
    _evidence,
    measure,
)
from kd.parts.tasks.single_label import SingleLabel

NAMES = [f"label {i}" for i in range(10)]


def answers(
    rng: np.random.Generator,
    images: int,
    shares=None,
    low=0.0,
    bright=120.0,
    red=0.0,
    names=NAMES,
):
    """Draw answers: labels by `shares`, confidences that depend on the label, `low` of
    them lower, and measures.
    """
    label = rng.choice(len(names), images, p=shares)
    confidence = np.where(
        rng.random(images) < low,
        rng.uniform(0.2, 0.6, images),
        1 - rng.beta(1, 4 + label % 5, images),
    )
    return list(
        zip(
            *(
                label.tolist(),
                confidence.tolist(),
                rng.normal(bright, 30, images),
                rng.gamma(4, 2, images),
            ),
            *(rng.normal(red, 15, images), rng.normal(0, 15, images)),
            strict=True,
        )
    )


def reference(rng: np.random.Generator, images: int = 2000, names=NAMES) -> Reference:
    rows = (
        (label, tuple(numbers)) for label, *numbers in answers(rng, images, names=names)
    )
    return Reference.of(names, rows, calibrated=True)


def as_answer(label: int, confidence: float, names=NAMES) -> dict:
    best = {"label": names[label], "score": confidence}
    return {**best, "top": [best, {"label": names[label - 1], "score": 1 - confidence}]}


def tally(usual: Reference, drawn) -> Tally:
    counts = usual.empty()
    for label, confidence, *measures in drawn:
        usual.count(counts, as_answer(label, confidence, usual.names), measures)
    return counts


def test_the_bound_holds_and_is_not_loose():
    """Beside the exact tail of the hypergeometric distribution, in one stratum."""
    n = 250
    m = 2000
    marked = 180
    total = math.comb(n + m, n)
    tail = {
        x: math.comb(marked, x) * math.comb(n + m - marked, n - x) / total
        for x in range(marked + 1)
    }
    for x in (25, 30, 40, 60):
        exact = sum(p for k, p in tail.items() if k >= x)
        ones = np.ones((1, 1), np.int64)
        evidence, share, expected = _evidence(
            x * ones, n * ones, (marked - x) * ones, m * ones
        )
        assert exact <= math.exp(-evidence[0]) <= exact ** (0.7 if x >= 40 else 0.3)
        assert (share[0], expected[0]) == (x / n, pytest.approx((marked - x) / m))


def test_strata_are_compared_inside():
    """Two labels with other confidences each, alike in both samples, in other shares:
    no evidence at all.
    """
    new = np.array([[180], [2]])
    old = np.array([[900], [100]])
    evidence, share, expected = _evidence(
        new, np.array([[200], [20]]), old, np.array([[1000], [1000]])
    )
    assert evidence[0] == pytest.approx(0, abs=1e-9)
    assert share[0] == pytest.approx(expected[0])
    assert share[0] != pytest.approx(1000 / 2000)


def test_clean_streams_raise_no_alarm():
    rng = np.random.default_rng(0)
    highest = 0.0
    for _ in range(5):
        watch = ShiftWatch(reference(rng))
        for label, confidence, *measures in answers(rng, 2000):
            assert watch.add(as_answer(label, confidence), measures) == []
            highest = max(highest, watch.result.appearance, watch.result.labels)
        assert (watch.result.images, watch.alarms) == (
            WINDOW,
            {"appearance": 0, "labels": 0},
        )
        assert watch.all.images == 2000
    assert highest < ALARM / 2


@pytest.mark.parametrize("change", [{"low": 0.3}, {"bright": 80.0}, {"red": 25.0}])
def test_another_appearance_raises_an_alarm(change):
    rng = np.random.default_rng(1)
    usual = reference(rng)
    comparison = usual.compare(tally(usual, answers(rng, WINDOW, **change)))
    assert comparison.appearance > ALARM > comparison.labels
    (line,) = comparison.lines
    assert line.startswith("these photographs are not like those of validation: ")
    assert {"low": "confidence", "bright": "brightness", "red": "red - green"}[
        next(iter(change))
    ] in line


@pytest.mark.parametrize(
    ("first", "other_share"),
    [(0.5, None), (0.17, 0.03)],
    ids=["one label", "every second"],
)
def test_the_mix_of_labels_is_not_appearance(first, other_share):
    rng = np.random.default_rng(2)
    usual = reference(rng)
    shares = (
        [first] + [0.5 / 9] * 9 if other_share is None else [first, other_share] * 5
    )
    comparison = usual.compare(tally(usual, answers(rng, 2 * WINDOW, shares)))
    assert comparison.labels > ALARM > comparison.appearance
    (line,) = comparison.lines
    assert "the mix of labels" in line
    assert "look as in validation" in line
    if other_share is None:
        assert "'label 0' in 5" in line


def test_few_of_many_labels_raise_an_alarm_together():
    """None of the 60 labels that come is frequent enough alone; together they are."""
    rng = np.random.default_rng(3)
    names = [f"label {i}" for i in range(1000)]
    usual = reference(rng, names=names)
    shares = np.zeros(1000)
    shares[rng.permutation(1000)[:60]] = 1 / 60
    clean, changed = (
        usual.compare(tally(usual, answers(rng, WINDOW, each, names=names)))
        for each in (None, shares)
    )
    assert clean.lines == []
    assert changed.labels > ALARM > changed.appearance


def test_a_watch_says_when_it_begins_and_ends():
    rng = np.random.default_rng(4)
    watch = ShiftWatch(reference(rng))
    lines = []
    for low, images in ((0.0, 4 * WINDOW), (0.9, 2 * WINDOW), (0.0, 20 * WINDOW)):
        for label, confidence, *measures in answers(rng, images, low=low):
            lines += [
                (watch.all.images, line)
                for line in watch.add(as_answer(label, confidence), measures)
            ]
    (begin, first), (end, last) = lines
    assert begin == 5 * WINDOW
    assert "not like those of validation: confidence" in first
    assert (end > 6 * WINDOW, last) == (
        True,
        "the photographs are like those of validation again",
    )
    assert 2 <= watch.alarms["appearance"] <= 10
    assert watch.alarms["labels"] == 0
    assert sum(watch.label_counts.values()) == watch.all.images == 26 * WINDOW


def test_a_watch_has_the_confidence_of_the_last_window_and_the_worst_span_of_each_test():
    """The appearance differs in both windows, the mix of labels in the last."""
    rng = np.random.default_rng(8)
    watch = ShiftWatch(reference(rng))
    for shares, low in ((None, 0.9), ([0.55] + [0.05] * 9, 0.7)):
        drawn = answers(rng, WINDOW, shares, low)
        for label, confidence, *measures in drawn:
            watch.add(as_answer(label, confidence), measures)
    assert watch.result.confidence == pytest.approx(
        np.mean([confidence for _, confidence, *_ in drawn])
    )
    assert f"of {2 * WINDOW} images" in watch.result.difference
    assert f"of {WINDOW} predictions" in watch.result.mix


def test_the_record_is_json_and_says_the_same():
    rng = np.random.default_rng(5)
    usual = reference(rng, 300)
    usual.right = 240
    text = json.dumps(usual.record(), sort_keys=True)
    read = Reference.read(json.loads(text), NAMES)
    assert read.calibrated
    assert np.array_equal(read.tally.bins, usual.tally.bins)
    assert np.array_equal(read.tally.labels, usual.tally.labels)
    drawn = tally(usual, answers(rng, 100))
    assert read.compare(drawn) == usual.compare(drawn)
    expected = 0.8 + drawn.confidence / 100 - usual.tally.confidence / 300
    (note,) = read.notes(drawn)
    assert note.startswith(
        f"expected accuracy {expected:.1%}: 80.0% of 300 validation images were right"
    )
    assert note.endswith(
        f"mean confidence {drawn.confidence / 100:.1%}, {usual.tally.confidence / 300:.1%}"
        " on validation"
    )
    read.right = (
        -1
    )  # an export of before, or images without labels: no accuracy was measured
    assert "accuracy" not in read.notes(drawn)[0]
    with pytest.raises(ValueError, match="301 right predictions of 300"):
        Reference.read({**usual.record(), "right": 301}, NAMES)
    assert len(text) < 5000
    with pytest.raises(KeyError):
        Reference.read(json.loads(text), ["another", *NAMES[1:]])


def test_where_photographs_look_different_the_expected_accuracy_is_a_bound():
    """Half of the light: 66.3 % were expected and 35.1 % were right
    (docs/watching.md).
    """
    rng = np.random.default_rng(5)
    usual = reference(rng, 300)
    usual.right = 240
    dark = tally(
        usual,
        [
            (label, score, 1.0, *measures)
            for label, score, _, *measures in answers(rng, 300)
        ],
    )
    assert usual.compare(dark).alarms == {"appearance": True, "labels": False}
    expected = 0.8 + dark.confidence / 300 - usual.tally.confidence / 300
    assert usual.notes(dark)[0].startswith(
        f"expected accuracy at most {expected:.1%}: "
    )
    assert "at most" not in usual.notes(tally(usual, answers(rng, 300)))[0]
    mixed = tally(
        usual, answers(rng, 300, [0.55] + [0.05] * 9)
    )  # its mix alone: 63.5 % were expected, 71.6 % right
    assert usual.compare(mixed).alarms == {"appearance": False, "labels": True}
    assert "at most" not in usual.notes(mixed)[0]


def test_a_label_that_validation_never_gave_raises_an_alarm():
    usual = Reference.of(
        ["a", "b"], [(0, (0.9, 100.0, 5.0, 0.0, 0.0))] * 500, calibrated=False
    )
    comparison = usual.compare(tally(usual, [(1, 0.9, 100.0, 5.0, 0.0, 0.0)] * WINDOW))
    assert comparison.labels > ALARM
    assert (comparison.appearance, comparison.difference) == (0.0, "")
    assert usual.notes(usual.empty()) == ()


def test_several_labels_count_each_but_compare_the_most_probable():
    watch = ShiftWatch(
        Reference.of(
            ["a", "b"], [(0, (0.9, 100.0, 5.0, 0.0, 0.0))] * 5, calibrated=False
        )
    )
    best = [{"label": "b", "score": 0.8}, {"label": "a", "score": 0.7}]
    watch.add({"labels": best, "top": best}, (1.0, 2.0, 0.0, 0.0))
    watch.add({"labels": [], "top": best}, (1.0, 2.0, 0.0, 0.0))
    assert watch.label_counts == {"a": 1, "b": 1}
    assert watch.all.labels.sum(0).tolist() == [0, 2]


@pytest.mark.parametrize("size", [16, 224, 300])
def test_a_measure_samples_rows_and_no_columns(size):
    """Rows are sampled; columns are not, so that neighbours stay neighbours."""
    ramp = np.tile(np.arange(size) % 50 * 5, (3, size, 1)).astype(np.uint8)
    ramp[0] = 0
    ramp[2] = 255
    brightness, detail, *colours = measure(ramp)
    assert brightness == pytest.approx(ramp[1].mean(), abs=1e-3)
    assert colours == pytest.approx([-brightness, 255 - brightness], abs=2e-3)
    assert detail == pytest.approx(
        np.abs(np.diff(ramp[1].astype(float), axis=1)).mean(), abs=1e-3
    )


@pytest.mark.parametrize("change", ["warm", "red and blue exchanged"])
def test_colour_is_seen(change):
    """Issue 49: before, green alone was read, and neither change raised an alarm in
    1,000 images.
    """
    rng = np.random.default_rng(7)

    def numbers(images: int, changed: bool = False):
        """Measures of pictures in colours of food: more red than blue."""
        for _ in range(images):
            pixels = rng.normal(
                rng.normal((150, 120, 95), 25)[:, None, None], 20, (3, 16, 16)
            )
            if changed:
                pixels = (
                    pixels[::-1]
                    if change != "warm"
                    else pixels * np.array([1.15, 1, 0.8])[:, None, None]
                )
            yield measure(pixels.clip(0, 255).astype(np.uint8))

    usual = Reference.of(
        (), ((0, measures) for measures in numbers(2000)), calibrated=False
    )
    for changed in (False, True):
        counts = usual.empty()
        for measures in numbers(WINDOW, changed):
            usual.count(counts, {"embedding": [1.0]}, measures)
        assert bool(usual.compare(counts).lines) is changed


def test_the_evidence_of_a_tally_is_the_formula_with_its_bonferroni_factor():
    """Hoeffding's bound of the best of all bounds, two tails each; the pixels alone of
    an embedding model.
    """
    rng = np.random.default_rng(3)
    width = len(measure(np.zeros((3, 8, 8), np.uint8)))
    old = rng.normal(120, 20, (600, width))
    new = rng.normal(150, 24, (90, width))
    usual = Reference.of((), ((0, tuple(row)) for row in old), False)
    counts = usual.empty()
    for row in new:
        usual.count(counts, {"embedding": [0.0]}, tuple(row))
    best = 0.0
    ends = 0
    for column, bounds in enumerate(usual.bounds.values()):
        for bound in bounds:
            ends += 1
            x, y = (int((values[:, column] <= bound).sum()) for values in (new, old))
            pooled = (x + y) / 690
            evidence = []
            for count, images in ((x, 90), (y, 600)):
                q = count / images
                terms = [(q, pooled), (1 - q, 1 - pooled)]
                evidence.append(
                    images * sum(a * math.log(a / b) for a, b in terms if a > 0)
                )
            best = max(best, *evidence)
    expected = (best - math.log(2 * ends)) / math.log(10)
    assert expected > 1
    assert usual.compare(counts).appearance == pytest.approx(expected)


def test_a_partly_labelled_split_says_nothing_of_its_accuracy():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 3, 8, 8)).astype(np.uint8)
    logits = 5 * torch.eye(3)[[0, 1, 2, 0]]
    for labels, right in (([0, 1, -1, -1], -1), ([0, 1, 1, 0], 3)):
        outputs = GraphOutputs(
            {"": logits, "g": logits},
            torch.tensor(labels),
            [measure(image) for image in pixels],
            {},
        )
        usual = outputs.reference("g", SingleLabel(), ("a", "b", "c"), False)
        assert usual.right == right
        assert ("right" in usual.record()) == (right >= 0)
