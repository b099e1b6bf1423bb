"""The threads of a step follow the times of real steps; only the clock is made here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kd.core.types import State
from kd.engine import threads
from kd.engine.threads import EVERY, FULL, QUICK, Threads
from kd.parts.backends.cpu import CPU

FIRST, PAIRS, APART, LENGTH = FULL.begin, FULL.pairs, FULL.apart, FULL.length


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(monkeypatch) -> Callable[..., tuple[list[int], State, list[str]]]:
    """Make steps whose seconds are a function of (step, threads); return each step's threads."""

    def steps(seconds: Callable[[int, int], float], count: int, most: int = 2, state: State | None = None):
        clock = [0.0]
        monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])
        lines: list[str] = []
        choose, used, state = Threads(CPU("fp32", 5.0, threads=1), most, lines.append), [], state or State()
        for _ in range(count):
            state = choose(state)
            used.append(torch.get_num_threads())
            clock[0] += seconds(state.step, used[-1])
            state = State(step=state.step + 1, threads=state.threads)
        return used, state, lines

    return steps


def test_all_cores_stay_where_they_pay(run):
    for share in (1.1, 1.3, 1.9):
        used, state, lines = run(lambda step, count, share=share: share if count == 1 else 1.0, 2 * EVERY)
        assert state.threads == 2
        assert lines == []
        other = [step for step, count in enumerate(used) if count == 1]
        # which steps are tried does not depend on the clock, so that bits repeat
        full = [start + half + i for start in (FIRST, EVERY) for half in (0, PAIRS + APART) for i in (1, 2, 5, 6)]
        assert other == [QUICK.begin + 1, QUICK.begin + 2, *full]


@pytest.mark.parametrize("share", [0.8, 1.0, 1.04])
def test_threads_that_gain_little_are_given_up_and_not_taken_back(run, share):
    used, state, lines = run(lambda step, count: share if count == 1 else 1.0, 2 * EVERY)
    assert state.threads == 1
    assert set(used[FIRST + LENGTH : EVERY]) == {1}
    assert len(lines) == 1
    assert lines[0].startswith("threads: 1 instead of 2, ")
    assert ("1.2 times" in lines[0]) == (share == 0.8)


def test_beside_a_busy_neighbour_half_of_the_threads_are_taken_and_given_back_later(run):
    busy = range(1, 2 * EVERY + 50)
    used, state, lines = run(lambda step, count: 3.0 if count == 2 and step in busy else 1.0 / count, 5 * EVERY)
    assert used[: FIRST + LENGTH].count(2) == QUICK.begin + QUICK.pairs + PAIRS
    assert set(used[FIRST + LENGTH : EVERY]) == {1}
    assert used[-1] == state.threads == 2
    assert sum(count == 2 for count in used[EVERY : 2 * EVERY]) == PAIRS
    assert [line.split(",")[0] for line in lines] == ["threads: 1 instead of 2", "threads: 2 instead of 1"]


def test_it_goes_down_in_halves_as_long_as_it_gets_faster(run):
    used, state, _ = run(lambda step, count: abs(count - 2) + 1.0, EVERY, most=16)
    assert state.threads == 2
    assert set(used) == {16, 8, 4, 2, 1}
    assert set(used[QUICK.begin + 4 * QUICK.length + LENGTH :]) == {2}
    used, state, _ = run(lambda step, count: 1 + 0.2 * abs(math.log2(count) - 1), EVERY, most=16)
    assert set(used[QUICK.begin + QUICK.length : FIRST]) == {16}
    assert state.threads == 2


def test_one_step_that_took_long_decides_nothing(run):
    slow = FIRST + 3  # with all threads
    _, state, _ = run(lambda step, count: 50.0 if step == slow else 2 / count, EVERY)
    assert state.threads == 2


def test_a_burst_of_other_work_decides_nothing(run):
    burst = range(FIRST - 4, FIRST + PAIRS + 4)
    _, state, _ = run(lambda step, count: 3.0 if count == 2 and step in burst else 2 / count, EVERY)
    assert state.threads == 2


def test_what_a_burst_at_the_start_made_is_taken_back(run):
    used, state, lines = run(lambda step, count: 3.0 if count == 2 and step < FIRST - 4 else 2 / count, EVERY)
    assert used[FIRST - 1] == 1
    assert state.threads == 2
    assert set(used[FIRST + LENGTH :]) == {2}
    assert len(lines) == 2


def test_a_resumed_run_goes_on_with_the_same_steps(run):
    def seconds(step: int, count: int) -> float:
        return 1.0 if count == 2 else 1.5

    whole = run(seconds, EVERY + LENGTH)[0]
    for stop in (1, QUICK.begin + 1, QUICK.begin + 4, FIRST + 3, FIRST + PAIRS + 5, FIRST + LENGTH, 100, EVERY + 2):
        first, state, _ = run(seconds, stop)
        rest, _, _ = run(seconds, EVERY + LENGTH - stop, state=state)
        assert first + rest == whole
    assert run(lambda step, count: 1.0, 10, state=State(step=100, threads=1))[0] == [1] * 10
