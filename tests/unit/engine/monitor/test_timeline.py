"""The timeline against a clock of its own, on a device that is late, after a restart,
and in a real run.
"""

import logging
import time

import pytest

import kd
from kd.core.types import Loading, State
from kd.engine.monitor.timeline import (
    WARM_UP,
    DeviceClock,
    Timeline,
    active,
    describe_steps,
)
from kd.files.storage import read_rows

PARTS = ("data", "teacher", "forward", "backward", "optimizer")


@pytest.fixture
def made_clock(monkeypatch):
    """A clock that only sleeping moves, so that a busy machine changes no number."""
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: 1e9 + clock[0])
    monkeypatch.setattr(
        time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )


def work(timeline: Timeline, step: int, seconds: float = 0.001, **extra: float) -> None:
    """Make a step whose parts sleep, and log it."""
    for name in PARTS:
        with timeline.span(name):
            time.sleep(seconds + extra.get(name, 0.0))
    timeline.window(State(step=step))


def test_the_parts_sum_to_an_independent_clock(tmp_path):
    """What a busy machine puts between two readings of a clock lies outside the one
    bound or inside both.
    """
    begin = time.perf_counter()
    with Timeline(path=tmp_path / "timeline_0.jsonl") as timeline:
        inner = time.perf_counter()
        time.sleep(0.02)
        for step in range(1, 8):
            work(timeline, step, backward=0.002)
            with timeline.span("evaluation" if step % 2 else "checkpoint"):
                time.sleep(0.002)
        inner = 1000 * (time.perf_counter() - inner)
    outer = 1000 * (time.perf_counter() - begin)
    rows = read_rows(tmp_path / "timeline_0.jsonl")
    assert inner - 0.1 <= sum(row["wall_ms"] for row in rows) <= outer + 0.1
    assert sum(timeline.totals.values()) == pytest.approx(
        sum(row["wall_ms"] for row in rows), abs=0.1
    )
    for row in rows:
        assert sum(row["ms"].values()) == pytest.approx(row["wall_ms"], abs=0.01)
    assert timeline.totals["backward"] >= 21
    assert timeline.totals["evaluation"] >= 8
    assert timeline.totals["setup"] >= 20


def test_first_step_warm_up_and_steady_steps_have_rows_of_their_own(tmp_path):
    with Timeline(path=tmp_path / "t", start=30) as timeline:
        for step in range(31, 31 + WARM_UP + 3):
            for name in PARTS:
                with timeline.span(name):
                    pass
            if step % 4 == 0:
                timeline.window(State(step=step))
    rows = [
        (row["kind"], row["step"], row["steps"]) for row in read_rows(tmp_path / "t")
    ]
    assert rows == [
        ("setup", 30, 0),
        ("first", 31, 1),
        ("warm-up", 32, 1),
        ("warm-up", 35, 3),
        ("steady", 36, 1),
        ("steady", 38, 2),
    ]


@pytest.mark.usefixtures("made_clock")
def test_a_span_inside_another_is_not_counted_twice():
    with Timeline() as timeline:
        with timeline.span("data"):
            with timeline.span("sifting"), timeline.span("teacher"):
                time.sleep(0.02)
            time.sleep(0.01)
        with timeline.span("optimizer"):
            pass
        values = timeline.window(State(step=1))
    assert values["ms_teacher"] == pytest.approx(20)
    assert values["ms_data"] == pytest.approx(10)
    assert values.get("ms_sifting", 0.0) == pytest.approx(0)
    assert values["data_wait"] == pytest.approx(values["ms_data"] / values["step_ms"])


def test_a_row_has_what_loading_its_batches_took(tmp_path):
    """Batches that arrive in a step's `data` count for that step, however long ago they
    were made.
    """
    loaded = Loading()
    with Timeline(path=tmp_path / "t") as timeline:
        timeline.loading = lambda: loaded
        for step in range(1, 4):
            with timeline.span("data"):
                loaded = loaded.plus(Loading(0.010 * step, 0.004, 0.006))
            with timeline.span("optimizer"):
                pass
            timeline.window(State(step=step))
    first, *later_rows = [
        row["loading_ms"] for row in read_rows(tmp_path / "t") if row["steps"]
    ]
    none = {"resizing": 0.0, "whole": 0.0}
    assert first == pytest.approx(
        {"seconds": 10.0, "busy": 4.0, "decoding": 6.0} | none
    )
    assert [row["seconds"] for row in later_rows] == pytest.approx([20.0, 30.0])


@pytest.mark.usefixtures("made_clock")
def test_a_window_has_the_median_step_without_evaluation(tmp_path):
    with Timeline(path=tmp_path / "t") as timeline:
        for step in range(1, 4):
            for name in PARTS:
                with timeline.span(name):
                    time.sleep(0.03 if (step, name) == (2, "teacher") else 0.001)
            with timeline.span("evaluation"):
                time.sleep(0.005)
        values = timeline.window(State(step=3))
    names = {name for name in values if name.startswith("ms_")}
    assert names == {
        "ms_data",
        "ms_teacher",
        "ms_forward",
        "ms_backward",
        "ms_optimizer",
        "ms_other",
    }
    assert values["step_ms"] == pytest.approx(5)
    # the mean, without the evaluations
    assert sum(values[name] for name in names) == pytest.approx((5 + 34 + 5) / 3)
    first, later = [row for row in read_rows(tmp_path / "t") if row["steps"]]
    assert (
        first["steps"],
        later["steps"],
        later["slowest"][0],
        later["slowest"][2],
    ) == (
        1,
        2,
        2,
        "teacher",
    )


@pytest.mark.parametrize(
    ("lengths", "median"),
    [([10] * 9 + [40], 10.0), ([50, 10], 30.0), ([10, 40, 40], 40.0)],
)
def test_the_slowest_step_names_what_took_the_time(lengths, median):
    """The first of equal ones; by the span that exceeds its own median, not by the
    longest one.
    """
    steps = [{"forward": 100.0, "data": float(length)} for length in lengths]
    slowest = lengths.index(max(lengths))
    expected = {
        "median_ms": 100 + median,
        "slowest": [7 + slowest, 100.0 + lengths[slowest], "data"],
    }
    assert describe_steps(steps, first=7) == expected


def test_communication_is_taken_out_of_the_backward_pass(tmp_path):
    with Timeline(path=tmp_path / "t", communication=lambda: 4.0) as timeline:
        for step in (1, 2):
            work(timeline, step, backward=0.01)
        values = timeline.window(State(step=2))
    rows = [row for row in read_rows(tmp_path / "t") if row["steps"]]
    assert values["ms_communication"] == pytest.approx(4.0)
    for row in rows:
        assert row["ms"]["communication"] == pytest.approx(4.0)
        assert row["ms"]["backward"] >= 6
        assert sum(row["ms"].values()) == pytest.approx(row["wall_ms"], abs=0.01)


class Late:
    """A device that finishes what it is given `behind` marks later; its clock counts 10
    ms from mark to mark.
    """

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.marks = 0
        self.made = 0

    def event(self):
        device = self
        device.made += 1

        class Event:
            def record(self):
                device.marks += 1
                self.at = device.marks

            def query(self):
                return device.marks - self.at >= device.behind

            def elapsed_time(self, end):
                assert end.query(), (
                    "an event that is not over must not be asked: that would wait for"
                    " the device"
                )
                return 10.0 * (end.at - self.at)

        return Event()


@pytest.mark.usefixtures("made_clock")
def test_a_device_is_timed_by_events_that_are_over(tmp_path):
    device = Late(behind=7)
    with Timeline(
        "device", tmp_path / "t", device=DeviceClock(device.event)
    ) as timeline:
        for step in range(1, 11):
            for name in PARTS:
                with timeline.span(name):
                    pass
            if step == 5:
                device.behind = 0  # a log point has waited for it
                values = timeline.window(State(step=5))
                device.behind = 7
        device.behind = 0
        timeline.window(State(step=10))
    # in each step 5 intervals lie inside spans and 5 between them
    assert values["step_ms"] == pytest.approx(100.0)
    assert values["data_wait"] == pytest.approx(0.1, abs=0.01)
    rows = [row for row in read_rows(tmp_path / "t") if row["steps"]]
    for row in rows[1:-1]:
        assert row["device_ms"]["forward"] == pytest.approx(10.0 * row["steps"])
        assert row["median_ms"] == pytest.approx(100.0, abs=11)
        assert row["ms"]["forward"] == 0  # the host only hands over
    assert device.made < 60 < device.marks  # events are used again


def test_rows_of_steps_that_are_made_again_are_dropped(tmp_path):
    file = tmp_path / "timeline_0.jsonl"
    with Timeline(path=file) as timeline:
        for step in range(1, 10):
            work(timeline, step, 0.0)
    file.write_text(file.read_text() + '{"time": 1, "st')  # a killed process
    with Timeline(path=file, start=6) as timeline:
        for step in range(7, 9):
            work(timeline, step, 0.0)
    assert [row["step"] for row in read_rows(file)] == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8]
    with Timeline(path=file) as timeline:
        work(timeline, 1, 0.0)
    assert [row["step"] for row in read_rows(file)] == [0, 1]


def test_a_timeline_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING, "kd"),
        Timeline(path=tmp_path / "nowhere" / "t") as timeline,
    ):
        for step in (1, 2):
            work(timeline, step, 0.0)
    assert [record.message.split(":")[0] for record in caplog.records] == ["run.folder"]
    assert timeline.finished_steps == 2


def test_an_error_in_a_step_leaves_the_rows_before_it(tmp_path):
    def run() -> None:
        with Timeline(path=tmp_path / "t") as timeline:
            work(timeline, 1, 0.0)
            with timeline.span("data"), timeline.span("sifting"):
                raise ValueError("no image")

    with pytest.raises(ValueError, match="no image"):
        run()
    rows = [
        (row["kind"], row["step"], row["steps"]) for row in read_rows(tmp_path / "t")
    ]
    # its time is told, and that it made no step
    assert rows == [
        ("setup", 0, 0),
        ("first", 1, 1),
        ("warm-up", 1, 0),
    ]
    assert not active


def test_regions_lie_inside_the_spans(tmp_path):
    with Timeline(path=tmp_path / "t") as timeline:
        for step in (1, 2):
            with timeline.span("data"), kd.region("Decode"):
                time.sleep(0.005)
            with timeline.span("optimizer"):
                pass
            timeline.window(State(step=step))
    for row in read_rows(tmp_path / "t")[1:]:
        assert 5 <= row["regions"]["Decode"] <= row["ms"]["data"] + 0.1
    with kd.region("outside of any run"):
        pass
