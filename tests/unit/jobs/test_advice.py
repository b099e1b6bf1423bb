"""`--check` advises: candidates are timed in turns, and only keys that pay are printed."""

from dataclasses import asdict

import pytest
import torch

from kd import config
from kd.jobs import estimate
from kd.jobs import forecast as advice
from kd.jobs.estimate import clear_winner, fastest, milliseconds
from kd.jobs.forecast import Found, forecast, torch_stages
from kd.setup.modes import ExecutionMode
from kd.setup.recipe import resolve

RULE, FUSED = ExecutionMode("bf16", "unfused"), ExecutionMode("bf16", "fused")
COMPILED, EXPORTED = ExecutionMode("bf16", "unfused", compiled=True), ExecutionMode("fp32", "openvino")


class Clock:
    """A clock that work moves: no comparison depends on what else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def working(self, seconds):
        """Return work that takes so long, a number or what returns one."""

        def work() -> torch.Tensor:
            self.now += seconds() if callable(seconds) else seconds
            return torch.ones(1)

        return work


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(estimate, "time", made)
    return made


@pytest.fixture
def compared(clock):
    """Compare modes that take so long; return also which of them were made."""

    def compare(seconds: float, **times: float) -> tuple[Found, list[ExecutionMode]]:
        modes = {"rule": RULE, "fused": FUSED, "compiled": COMPILED, "exported": EXPORTED}
        names, made = {modes[name]: taken for name, taken in times.items()}, []

        def work(mode: ExecutionMode):
            made.append(mode)
            if not callable(names[mode]) and names[mode] < 0:
                raise RuntimeError("no compiler here\nand a long explanation")
            return clock.working(names[mode])

        return advice.compared(RULE, [[asdict(mode) for mode in names]], work, seconds, "teacher"), made

    return compare


def test_only_what_is_faster_is_advised(compared):
    assert compared(1e6, rule=0.01, fused=0.01)[0][:2] == ([], [])
    (line,) = compared(1e6, rule=0.03, fused=0.005)[0].keys
    key, _, reason = line.partition("   # ")
    assert key == "teacher.attention: fused"
    assert reason.startswith("teacher: bf16+fused is ")
    assert reason.endswith(" times as fast as bf16+unfused")


@pytest.mark.parametrize(("seconds", "tried"), [(239.0, False), (240.0, True)])
def test_a_form_is_timed_where_it_can_pay(compared, seconds, tried):
    """A minute of compiling in work of four minutes."""
    found, made = compared(seconds, rule=0.03, compiled=0.005)
    assert (COMPILED in made) == tried
    assert bool(found[0]) == tried


def test_a_form_must_save_more_than_it_costs(compared):
    assert compared(240.0, rule=0.03, compiled=0.027)[0][:2] == ([], [])  # a tenth of 240 s, and a minute at each start
    keys = [line.split("   #")[0] for line in compared(1e6, rule=0.03, exported=0.005)[0][0]]
    assert keys == ["teacher.precision: fp32", "teacher.runtime: openvino"]


def test_a_mode_that_cannot_run_is_reported_and_skipped(compared):
    found, _ = compared(1e6, rule=0.005, compiled=-1.0)
    said = "teacher: bf16+unfused+compiled cannot be run here (RuntimeError: no compiler here and a long explanation)"
    assert found[:2] == ([], [said])


def test_keys_that_are_named_are_left_alone():
    stages = torch_stages("auto", "auto", 2)
    assert stages == [[{"precision": "fp32"}, {"precision": "bf16"}], [{"kernel": "unfused"}, {"kernel": "fused"}]]
    assert torch_stages("auto", "unfused", 2) == stages[:1]
    assert torch_stages("bf16", "auto", 2) == stages[1:]
    assert torch_stages("bf16", "auto", 0) == []


def test_a_candidate_must_win_clearly():
    plain = [20.0, 20.0, 20.0, 60.0]
    assert clear_winner({"plain": plain, "other": [19.5, 19.5, 19.5, 19.5]}, 0.05) == "plain"
    assert clear_winner({"plain": plain, "other": [19.0, 19.0, 19.0, 90.0], "third": [21.0]}, 0.05) == "other"
    assert clear_winner({"plain": plain, "other": [10.0, 10.0, 21.0, 61.0]}, 0.05) == "plain"  # only in two of four
    assert clear_winner({"plain": [20.0], "other": [18.0], "third": [17.0]}, 0.05) == "third"
    assert clear_winner({"plain": [20.0, 20.0], "other": [25.0, 25.0]}, 0.0) == "plain"


def test_a_first_call_that_compiles_is_not_measured(clock):
    assert milliseconds(clock.working(0.005)) == pytest.approx(5)
    first_call = iter([0.7])  # hopeless, if it were measured
    slow_once = {"a": clock.working(0.02), "b": clock.working(lambda: next(first_call, 0.001))}
    assert fastest(slow_once, 0.0)[0] == "b"


def test_printed_keys_are_valid_yaml(settings, monkeypatch):
    """The keys are YAML that a file takes; the models are as they were before."""
    line = "teacher.attention: fused   # 1.30 times"
    monkeypatch.setattr(advice, "compared", lambda *given: Found([line], ["form: cannot be run here"]))
    settings["sifter"] = {"kind": "history"}
    lines = forecast(resolve(config.load(settings))).splitlines()
    start = lines.index(line) - 1
    assert lines[start].startswith("keys      faster here")
    assert any(one.startswith("sifter    'history' ") for one in lines[start:])
    assert config.load({**settings, "teacher.attention": "fused"}).teacher.attention == "fused"


def test_a_single_win_is_not_advised(compared):
    """A neighbour slows the plain mode in the first comparison (one warm-up and four rounds) alone."""
    disturbed = iter([0.01] + [0.05] * 4)
    assert compared(1e6, rule=lambda: next(disturbed, 0.01), fused=0.01)[0].keys == []


def test_threads_are_timed_with_the_keys_that_were_found(clock):
    """Issue 62: fp32 and one thread were each said to be 4 times as fast; together they were 6 times, not 16."""
    assert advice.compare_threads(2, [clock.working(0.01)]) == (2, [])

    def step(precision: str) -> float:
        return {("bf16", 2): 0.24, ("bf16", 1): 0.06, ("fp32", 2): 0.06, ("fp32", 1): 0.04}[
            precision, torch.get_num_threads()
        ]

    before = torch.get_num_threads()
    try:
        number, keys = advice.compare_threads(2, [clock.working(lambda: step("fp32"))])
        assert (number, keys) == (1, ["backend.threads: 1   # 1.50 times as fast as 2 threads"])
        plain = advice.stepping(2, [clock.working(lambda: step("bf16"))])
        best = advice.stepping(1, [clock.working(lambda: step("fp32"))])
        assert advice.twice({"plain": plain, "all": best}) == ("all", pytest.approx(6.0))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cost", "alone", "key"),
    [(100.0, 40.0, "run.baseline_steps=1250"), (100.0, 250.0, "run.baseline_steps=200"), (100.0, 95.0, "")],
)
def test_check_names_the_length_of_labels_alone_that_costs_as_much(cost, alone, key):
    """500 steps took `alone`; within a tenth nothing is said, since the verdict at the end allows it."""
    said = estimate.same_cost(cost, alone, 500)
    assert [key in line for line in said] == ([True] if key else [])
