"""Intervals of scores: against published numbers, and how often they hold the truth."""

import json
import math

import numpy as np
import pytest

from kd.core.intervals import (
    RESAMPLES,
    Samples,
    bootstrap_interval,
    bootstrap_scores,
    interval_verdict,
    paired_interval,
    wilson_interval,
)
from kd.core.scores import Column


@pytest.mark.parametrize(
    ("right", "images", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)],
)
def test_wilson_is_newcombes_method_3(right, images, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), table I: both examples to four
    digits.
    """
    assert wilson_interval(right / images, images) == (
        pytest.approx(low, abs=5e-5),
        pytest.approx(high, abs=5e-5),
    )


def test_wilson_stays_within_0_and_1():
    # the same table: 0 of 20
    assert wilson_interval(0.0, 20) == (
        0.0,
        pytest.approx(0.1611, abs=5e-5),
    )
    assert wilson_interval(1.0, 29) == (
        pytest.approx(1 - 0.1170, abs=5e-5),
        pytest.approx(1.0),
    )
    assert wilson_interval(0.5, 0) == (0.0, 1.0)


def test_paired_is_that_of_bonett_and_price():
    """Fagerland, Lydersen and Laake (2014), airways of 21 patients: 1 against 7
    discordant pairs.
    """
    assert paired_interval(1, 7, 21) == (
        pytest.approx(-0.508, abs=1e-3),
        pytest.approx(-0.013, abs=1e-3),
    )
    assert paired_interval(7, 1, 21) == tuple(
        -end for end in reversed(paired_interval(1, 7, 21))
    )
    assert paired_interval(3, 3, 0) == (-1.0, 1.0)


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of the exact test: a fair coin for each
    discordant image.
    """
    few = min(gained, lost)
    discordant = gained + lost
    return min(
        1.0, 2 * sum(math.comb(discordant, k) for k in range(few + 1)) / 2**discordant
    )


@pytest.mark.parametrize("images", [111, 1200, 10_000])
def test_better_is_what_mcnemars_exact_test_confirms(images):
    """The two may differ at the edge alone: nothing with p > 0.1 is called better,
    nothing with p < 0.02 is missed.
    """
    for gained in range(40):
        for lost in range(40):
            differs = (
                interval_verdict(*paired_interval(gained, lost, images))
                != "no difference shown"
            )
            p = mcnemar(gained, lost)
            assert not (differs and p > 0.1), (gained, lost)
            assert differs or p >= 0.02, (gained, lost)


def test_the_verdict_says_on_which_side_of_0_the_interval_lies():
    assert [
        interval_verdict(0.01, 0.2),
        interval_verdict(-0.2, -0.01),
        interval_verdict(-0.1, 0.1),
        interval_verdict(0.0, 0.1),
    ] == [
        "better",
        "worse",
        "no difference shown",
        "no difference shown",
    ]


@pytest.mark.parametrize("truth", [0.15, 0.5, 0.9, 0.97])
def test_wilson_holds_the_truth_in_93_of_100_samples(truth):
    draw = np.random.default_rng(0)
    ends = np.array(
        [wilson_interval(right / 200, 200) for right in draw.binomial(200, truth, 2000)]
    )
    assert 0.93 <= ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean() <= 0.98


def test_paired_holds_the_truth_in_93_of_100_samples():
    draw = np.random.default_rng(1)
    table = draw.multinomial(200, [0.06, 0.03, 0.91], 2000)
    ends = np.array([paired_interval(gained, lost, 200) for gained, lost, _ in table])
    assert 0.93 <= ((ends[:, 0] <= 0.03) & (ends[:, 1] >= 0.03)).mean() <= 0.98


def test_the_bootstrap_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(2).normal(3.0, 2.0, 500)
    replicates = bootstrap_scores(lambda ids: values[ids].mean(), len(values))
    low, high = bootstrap_interval(values.mean(), replicates)
    assert len(replicates) == RESAMPLES
    # 200 resamples: +- 10 %
    assert (high - low) / 2 == pytest.approx(
        1.96 * values.std() / math.sqrt(500), rel=0.15
    )
    # a mean has no bias
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.02)


def test_the_bias_of_the_bootstrap_is_taken_off():
    """The largest of few values is too small; the interval says so. By hand: 2 x 5 - 4,
    and 1.96 x sqrt(2).
    """
    assert bootstrap_interval(5.0, [3.0, 5.0]) == pytest.approx(
        (6 - 1.959964 * math.sqrt(2), 6 + 1.959964 * math.sqrt(2))
    )


def test_all_models_are_scored_on_the_same_samples():
    """So that their difference is paired: two models that differ by a constant have no
    spread between them.
    """
    values = np.random.default_rng(3).random(300)
    first, second = (
        bootstrap_scores(lambda ids, add=add: values[ids].mean() + add, 300)
        for add in (0.0, 0.1)
    )
    assert bootstrap_interval(0.1, second - first) == (
        pytest.approx(0.1),
        pytest.approx(0.1),
    )


def test_samples_survive_their_record():
    draw = np.random.default_rng(4)
    right = Samples(0.7, right=draw.random(203) < 0.7)
    again = Samples.read(json.loads(json.dumps(right.record())))
    assert again.right.tolist() == right.right.tolist()
    assert len(json.dumps(right.record())) < 203 / 4 + 60  # a digit for four images
    resampled = Samples(0.5, replicates=draw.normal(0.5, 0.1, RESAMPLES))
    again = Samples.read(json.loads(json.dumps(resampled.record())))
    assert again.interval() == pytest.approx(resampled.interval(), abs=1e-6)


def test_the_interval_of_a_share_that_is_shown_ends_at_100_percent():
    near = Samples(
        0.99,
        replicates=np.random.default_rng(6).normal(0.99, 0.01, RESAMPLES),
        share=False,
    )
    assert near.interval()[1] > 1
    assert Column("map", "mAP").text(0.99, near).endswith(" to 100.0)")
    assert Column("nll", "loss", "nats").text(0.99, near).partition(" to ")[2] > "1."


def test_the_interval_of_a_share_ends_at_0_and_1_and_that_of_a_difference_does_not():
    """By hand: standard errors 0.1 x sqrt(2), and 0.2 x sqrt(2) of the difference. A
    sweep refused its own 1.18.
    """
    high = Samples(0.9, replicates=np.array([0.8, 1.0]))
    low = Samples(0.1, replicates=np.array([0.2, 0.0]))
    half = 1.959964 * 0.1 * math.sqrt(2)
    assert (high.interval(), low.interval()) == (
        (pytest.approx(0.9 - half), 1.0),
        (0.0, pytest.approx(0.1 + half)),
    )
    assert high.minus(low) == pytest.approx((0.8, 0.8 - 2 * half, 0.8 + 2 * half))
    beyond = Samples(1.0, replicates=np.array([0.8, 0.8]))  # both ends would be 1.2
    assert beyond.interval() == (1.0, 1.0)
    nats = Samples(0.9, replicates=np.array([0.8, 1.0]), share=False)
    again = Samples.read(json.loads(json.dumps(nats.record())))
    assert (
        nats.interval() == again.interval() == pytest.approx((0.9 - half, 0.9 + half))
    )


def test_a_difference_of_samples_is_paired():
    first, second = (
        np.array([1] * a + [0] * b + [1] * c, bool)
        for a, b, c in ((60, 10, 30), (50, 20, 30))
    )
    assert Samples(0.9, right=first).minus(Samples(0.8, right=second)) == (
        pytest.approx(0.1),
        *paired_interval(10, 0, 100),
    )
    spread = np.random.default_rng(5).normal(0, 0.1, RESAMPLES)
    difference = Samples(0.6, replicates=0.6 + spread).minus(
        Samples(0.5, replicates=0.5 + spread)
    )
    # what both owe to the sample is no difference between them
    assert difference == pytest.approx((0.1, 0.1, 0.1))


def average_precision(truth: np.ndarray, score: np.ndarray) -> float:
    """Return the mean over classes with a positive image; truth and score are
    [N, C].
    """
    hits = np.take_along_axis(truth, np.argsort(-score, axis=0), 0)
    precision = np.cumsum(hits, 0) / np.arange(1, len(hits) + 1)[:, None]
    has_positive = hits.any(0)
    return float(
        ((precision * hits).sum(0)[has_positive] / hits.sum(0)[has_positive]).mean()
    )


def test_few_images_call_two_equal_models_different_in_five_of_a_hundred_cases_at_most():
    """60 images, 20 rare classes: it was 10 of 100 here, and 13 of 100 with another
    statistician's labels.
    """
    draw = np.random.default_rng(1)
    images = 60
    false = 0
    cases = 120
    for _ in range(cases):
        truth = draw.random((images, 20)) < 0.08
        shared = 1.5 * truth + 0.7 * draw.normal(size=truth.shape)
        models = []
        for _ in range(2):
            score = shared + 0.7 * draw.normal(size=truth.shape)
            drawn = bootstrap_scores(
                lambda ids, score=score, truth=truth: average_precision(
                    truth[ids], score[ids]
                ),
                images,
            )
            models.append(
                Samples(
                    average_precision(truth, score), replicates=drawn, images=images
                )
            )
        _, low, high = models[0].minus(models[1])
        false += interval_verdict(low, high) != "no difference shown"
    assert false <= 0.06 * cases
