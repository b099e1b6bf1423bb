"""Steps that are slow at a regular interval: found where planted, never in noise."""

import math
import time
from itertools import pairwise

import numpy as np
import pytest

from kd.core.types import Loading, State
from kd.engine.monitor.evidence import Evidence, Facts, Finding
from kd.engine.monitor.recurrence import MIN_REPEATS, recurrence
from kd.engine.monitor.rules import find_bottlenecks
from kd.engine.monitor.timeline import Timeline
from kd.files.storage import read_rows

SEEDS = 200


def planted(period: int, count: int, times: float, spread: float = 0.1) -> list[float]:
    """Return milliseconds of steps, 20 but for each `period`-th, with lognormal noise."""
    draws = np.random.default_rng(period).standard_normal(count)
    lengths = 20 * np.exp(spread * draws)
    lengths[period - 1 :: period] *= times
    return lengths.tolist()


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [25, 120])
def test_noise_is_no_recurrence(spread, count):
    for seed in range(SEEDS):
        draws = np.random.default_rng(seed).standard_normal(count)
        assert recurrence((20 * np.exp(spread * draws)).tolist()) is None


def test_bursts_are_no_recurrence():
    """A neighbour takes the cores now and then: 0.8 of a step's noise is the last's."""
    for seed in range(SEEDS):
        draws = np.random.default_rng(seed).standard_normal(120)
        noise = [draws[0]]
        for draw in draws[1:]:
            noise.append(0.8 * noise[-1] + draw)
        assert recurrence((20 * np.exp(noise)).tolist()) is None


@pytest.mark.parametrize(
    ("period", "count", "times"), [(2, 30, 3.75), (10, 80, 3.75), (100, 600, 40.0)]
)
@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_a_planted_period_is_measured(period, count, times, spread):
    pattern = recurrence(planted(period, count, times, spread))
    assert pattern is not None
    assert (pattern.period, pattern.first) == (period, period - 1)
    assert pattern.slow_ms / pattern.usual_ms == pytest.approx(times, rel=spread + 0.05)
    saved = (times - 1) / (times - 1 + period)
    assert pattern.share == pytest.approx(saved, rel=spread + 0.05)


def test_the_chance_is_fishers():
    """20 of 20 slow steps among 40, times 40**3 / (2 * 25) choices."""
    pattern = recurrence([20.0, 50.0] * 20)
    assert pattern is not None
    choices = 40**3 // (2 * MIN_REPEATS**2)
    assert pattern.chance == pytest.approx(choices / math.comb(40, 20))


@pytest.mark.parametrize(("times", "slow"), [(1.4, False), (1.6, True)])
def test_a_step_is_slow_by_its_ratio(times, slow):
    assert (recurrence([20.0, 20.0 * times] * 40) is not None) == slow


@pytest.mark.parametrize(("regular", "slow"), [(14, False), (17, True)])
def test_most_recurring_steps_must_be_slow(regular, slow):
    lengths = [20.0, 20.0, 20.0, 60.0] * regular + [20.0] * 4 * (20 - regular)
    order = np.random.default_rng(0).permutation(20)
    shuffled = np.array(lengths).reshape(20, 4)[order].ravel()
    assert (recurrence(shuffled.tolist()) is not None) == slow


def test_only_the_latest_steps_count_and_the_phase_is_that_of_all():
    lengths = [20.0] * 3001 + [20.0, 20.0, 80.0] * 400
    pattern = recurrence(lengths)
    assert pattern is not None
    assert (pattern.period, pattern.first) == (3, 3003 % 3)
    assert pattern.since(len(lengths)) == 0


class Clock:
    """A clock that only `spend` moves."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Return the findings on a run of real `Timeline` rows, by rule.

    `extra(step)`: seconds by span beyond a step of 8 s; `reading`: share of the loading
    that waits for bytes.
    """
    clock = Clock(monkeypatch)

    def run(
        extra, count: int = 90, reading: float = 0.1, **facts
    ) -> dict[str, Finding]:
        loaded = Loading()
        usual = {"data": 0.2, "sifting": 0.0, "forward": 3.0, "backward": 4.6}
        usual |= {"optimizer": 0.2}
        with Timeline(path=tmp_path / "t") as timeline:
            timeline.loading = lambda: loaded
            for step in range(1, count + 1):
                more = extra(step)
                for name in (*usual, *(more.keys() - usual.keys())):
                    with timeline.span(name):
                        seconds = usual.get(name, 0.0) + more.get(name, 0.0)
                        clock.now += seconds
                        if name == "data":
                            busy = (1 - reading) * seconds
                            loaded = loaded.plus(Loading(seconds, busy, busy))
                if step % 7 == 0:  # no multiple of a period below
                    timeline.window(State(step=step))
        of_run = Facts(cores=4, **facts)
        rows = read_rows(tmp_path / "t")
        assert all(a["step"] <= b["step"] for a, b in pairwise(rows))
        findings = find_bottlenecks(Evidence({0: rows}, [], of_run))
        return {finding.rule: finding for finding in findings}

    return run


@pytest.mark.parametrize(
    ("reading", "cause"), [(0.9, "storage"), (0.1, "decoding")], ids=str
)
def test_steps_of_8_and_30_seconds_in_turns_are_named(judge, reading, cause):
    found = judge(lambda step: {"data": 22.0 * (step % 2)}, reading=reading)
    finding = found["RecurringSteps"]
    assert "one step in 2 takes 30 s, the others 8 s" in finding.evidence
    assert f"wait for data: {cause}" in finding.evidence
    assert (finding.severity, finding.key, finding.value) == (
        "warning",
        "data.store",
        "ram",
    )


@pytest.mark.parametrize(
    ("event", "every"), [("evaluation", "evaluate"), ("checkpoint", "checkpoint")]
)
def test_slow_steps_after_an_evaluation_or_a_checkpoint_are_named(judge, event, every):
    def extra(step: int) -> dict[str, float]:
        after = {"backward": 20.0 * (step % 10 == 1)}
        return after | ({event: 1.0} if step % 10 == 0 else {})

    finding = judge(extra, **{every: 10})["RecurringSteps"]
    assert "one step in 10 takes 28 s, the others 8 s" in finding.evidence
    assert "backward" in finding.evidence
    assert f"after the {event}" in finding.evidence
    assert (finding.key, finding.value) == (f"run.every.{every}", 20)


def test_slow_steps_at_the_start_of_an_epoch_are_named(judge):
    extra = {True: {"data": 60.0}, False: {}}
    finding = judge(lambda step: extra[step % 15 == 1], 120, epoch=15)["RecurringSteps"]
    assert "one step in 15 takes 1 min 08 s, the others 8 s" in finding.evidence
    assert "start of an epoch" in finding.evidence
    assert finding.key == "data.store"
    other = judge(lambda step: extra[step % 15 == 1], 120, epoch=14)["RecurringSteps"]
    assert "start of an epoch" not in other.evidence


def test_unexplained_slow_steps_are_profiled(judge):
    """Of 90 steps the last slow one is 88."""
    found = judge(lambda step: {"forward": 9.0 * (step % 4 == 0)})
    assert found.keys() == {"RecurringSteps"}
    assert "forward" in found["RecurringSteps"].evidence
    assert found["RecurringSteps"].value == [87, 88]


def test_what_saves_little_or_is_asked_for_is_no_finding(judge):
    """A twentieth of the time; a sifter that scores for two steps at a time."""
    assert judge(lambda step: {"forward": 8.0 * (step % 20 == 0)}, 200) == {}
    scored = {"teacher": 9.0, "sifting": 0.3}
    assert judge(lambda step: scored if step % 2 else {}) == {}


def test_long_evaluations_are_named_with_their_period(judge):
    """Every tenth step takes 8 + 40 s with it."""
    found = judge(
        lambda step: {"evaluation": 40.0} if step % 10 == 0 else {}, evaluate=10
    )
    assert found.keys() == {"TimeShare"}
    assert "one step in 10 takes 48 s, the others 8 s" in found["TimeShare"].evidence
