"""Relative sifting: ranks against a plain reference, kept fractions, draws of a fixed
size.
"""

import math

import pytest
import torch

from kd.parts.sifters._window import (
    LossWindow,
    generator_at,
    inclusion,
    quota,
    systematic,
)

BETAS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 10.0)
DISTRIBUTIONS = {
    "constant": lambda n, g: torch.full((n,), 0.7),
    "two values": lambda n, g: (torch.rand(n, generator=g) < 0.3).float(),
    "mostly zero": lambda n, g: torch.rand(n, generator=g).sub(0.9).clamp(min=0),
    "uniform": lambda n, g: torch.rand(n, generator=g),
    "heavy tail": lambda n, g: torch.rand(n, generator=g).pow(-3.0),
    "with infinities": (
        lambda n, g: torch.rand(n, generator=g).sub(0.1).log()
    ),  # a tenth is NaN
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def half(size: int) -> torch.Tensor:
    """The rank of each loss in the middle of its ties."""
    return torch.full((size,), 0.5, dtype=torch.float64)


def naive(history: list[float], batch: list[float], place: list[float]) -> list[float]:
    """The definition, for one loss at a time."""
    pool = history + batch
    ranks = []
    for loss, place_of_loss in zip(batch, place, strict=True):
        below = sum(pooled < loss for pooled in pool)
        equal = sum(pooled == loss for pooled in pool)
        ranks.append((below + place_of_loss * equal) / len(pool))
    return ranks


@pytest.mark.parametrize("values", [3, 10_000])
def test_the_percentile_is_the_definition(values):
    draw = generator()
    window = LossWindow(10)
    history = []
    for size in (4, 1, 7, 12, 3):  # a batch longer than the window among them
        losses = torch.randint(values, (size,), generator=draw).double() / 7
        place = torch.rand(size, generator=draw, dtype=torch.float64)
        single = losses.float().tolist()
        assert window.percentile(losses, place).tolist() == pytest.approx(
            naive(history, single, place.tolist())
        )
        assert window.percentile(losses, half(size)).tolist() == pytest.approx(
            naive(history, single, [0.5] * size)
        )
        window.push(losses)
        history = (history + single)[-10:]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_kept_fraction_is_that_of_beta_for_any_distribution(name, beta):
    draw = generator(1)
    window = LossWindow(500)
    # One per cent is then four standard deviations for every beta.
    size = 8192
    batches = 1 + math.ceil(20 * beta)
    kept_count = sum(
        len(window.sift(DISTRIBUTIONS[name](size, draw), beta, draw))
        for _ in range(batches)
    )
    assert kept_count / (size * batches) == pytest.approx(1 / (1 + beta), rel=0.01)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_first_losses_of_a_run_are_calibrated_too(batch):
    draw = generator(2)
    kept_count = sum(
        len(LossWindow(50).sift(torch.full((batch,), 2.0), 3.0, draw))
        for _ in range(3_000)
    )
    assert kept_count / (3_000 * batch) == pytest.approx(
        0.25, abs=0.032
    )  # four standard deviations


@pytest.mark.parametrize("beta", BETAS)
def test_quotas_add_up_to_the_kept_fraction(beta):
    candidates = kept_count = 0
    for size in (32, 7, 32, 1, 1, 64) * 200:
        share = quota(candidates, size, beta)
        assert 0 <= share <= size
        candidates += size
        kept_count += share
        assert kept_count == math.floor(candidates / (1 + beta) + 1e-9)


@pytest.mark.parametrize("size", [0, 1, 5, 19, 20])
def test_a_fixed_draw_is_exact_ascending_and_distinct(size):
    draw = generator(3)
    for _ in range(200):
        probability = torch.rand(20, generator=draw, dtype=torch.float64) ** 10
        share = inclusion(probability, size)
        assert share.sum().item() == pytest.approx(size)
        assert share.max() <= 1
        chosen = systematic(share, size, draw).tolist()
        assert len(chosen) == size
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(range(20))


def test_inclusion_is_proportional_below_the_cap():
    probability = torch.tensor([0.5, 0.01, 0.02, 0.4, 0.03], dtype=torch.float64)
    share = inclusion(probability, 3)
    assert share[[0, 3]].tolist() == [1.0, 1.0]
    assert share[[1, 2, 4]].tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_a_fixed_draw_has_the_inclusion_probabilities():
    draw = generator(4)
    share = inclusion(torch.linspace(0.05, 1, 12, dtype=torch.float64), 4)
    counts = torch.zeros(12, dtype=torch.float64)
    for _ in range(5_000):
        counts[systematic(share, 4, draw)] += 1
    assert (counts / 5_000 - share).abs().max() < 0.029  # four standard deviations


def test_underflowing_probabilities_still_fill_a_fixed_draw():
    assert len(LossWindow(4).sift(torch.arange(6.0), 5000.0, generator(), size=4)) == 4


def test_draws_repeat_and_do_not_use_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again = [
        LossWindow(9).sift(torch.arange(9.0), 0.5, generator_at(7, 1, 3), size)
        for size in (4, 4)
    ]
    assert first.tolist() == again.tolist()
    LossWindow(9).sift(torch.arange(9.0), 0.5, generator_at(7, 1, 3))
    assert torch.equal(before, torch.get_rng_state())
    places = ((7, 1, 3), (7, 1, 4), (7, 2, 3), (8, 1, 3), (7, 1, 5), (7, 3, 3))
    assert len(
        {torch.rand(1, generator=generator_at(*place)).item() for place in places}
    ) == len(places)


def test_a_window_resumes_from_its_state():
    draw = generator(6)
    uninterrupted = LossWindow(10)
    uninterrupted.push(torch.rand(7, generator=draw))
    resumed = LossWindow(10)
    resumed.load_state_dict(uninterrupted.state_dict())
    for _ in range(3):
        losses = torch.rand(4, generator=draw)
        assert torch.equal(
            uninterrupted.percentile(losses, half(4)),
            resumed.percentile(losses, half(4)),
        )
        for window in (uninterrupted, resumed):
            window.push(losses)
    assert torch.equal(uninterrupted.losses_L, resumed.losses_L)


@pytest.mark.parametrize("length", [3, 6, 9])
@pytest.mark.parametrize("pushed", [4, 10])
def test_a_state_fits_a_window_of_another_length(length, pushed):
    window = LossWindow(6)
    window.push(torch.arange(float(pushed)))
    resized = LossWindow(length)
    resized.load_state_dict(window.state_dict())
    values = [number + 0.5 for number in range(pushed)]
    expected = naive(
        [float(loss) for loss in range(pushed)][-min(length, 6) :],
        values,
        [0.5] * pushed,
    )
    assert resized.percentile(
        torch.tensor(values), half(pushed)
    ).tolist() == pytest.approx(expected)


def test_a_batch_is_ranked_before_it_is_remembered():
    window = LossWindow(6)
    twin = LossWindow(6)
    losses = torch.tensor([0.2, 3.0, 0.9])
    for each in (window, twin):
        each.push(torch.arange(4.0))
    place = torch.rand(3, generator=generator(5), dtype=torch.float64)
    expected = twin.percentile(losses, place) ** 2
    assert torch.equal(window.probability(losses, 2.0, generator(5)), expected)
    assert window.losses_L.tolist()[-3:] == losses.tolist()


def test_a_loss_that_is_no_number_ranks_highest():
    window = LossWindow(6)
    window.push(torch.arange(4.0))
    percentiles = window.percentile(torch.tensor([1.5, math.nan, math.inf]), half(3))
    assert percentiles.tolist() == pytest.approx(
        naive([0.0, 1.0, 2.0, 3.0], [1.5, math.inf, math.inf], [0.5] * 3)
    )
