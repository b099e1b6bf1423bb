"""The profiler around a few steps of a loop of one's own: what it writes, and which
names are in it.
"""

import gzip
import json

import pytest
import torch

import kd
from kd.core.types import State
from kd.engine.monitor.profiler import Profiler
from kd.engine.monitor.timeline import Timeline
from kd.files.storage import read_rows


def test_some_steps_are_traced(tmp_path):
    """The timeline calls it; its own time is no part of a step."""
    holder = {}
    with Timeline(
        path=tmp_path / "t", on_step=lambda step: holder["profiler"].step(step)
    ) as timeline:
        holder["profiler"] = Profiler(
            [2, 3], tmp_path / "profile", False, timeline.span
        )
        for step in range(1, 6):
            with timeline.span("data"):
                images = torch.zeros(64, 1000)
            with timeline.span("forward"), kd.region(f"Step {step}"):
                (images @ torch.zeros(1000, 500)).sum()
            with timeline.span("optimizer"):
                pass
            timeline.window(State(step=step))
            assert (tmp_path / "profile").exists() == (step >= 4)
    folder = tmp_path / "profile"
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert {"data", "forward", "optimizer", "Step 2", "Step 3"} <= set(names)
    assert not {"Step 1", "Step 4"} & set(names)
    assert names.count("aten::mm") == 2
    (row,) = [
        line
        for line in (folder / "operators.txt").read_text().splitlines()
        if "aten::mm" in line
    ]
    assert row.split()[-1] == "2"  # calls
    report = json.loads((folder / "operators.json").read_text())
    products = [
        operator for operator in report["operators"] if operator["name"] == "aten::mm"
    ]
    assert [(operator["dtype"], operator["calls"]) for operator in products] == [
        ("float32", 2)
    ]
    shown_ms = float(row.split()[2].removesuffix("us").removesuffix("ms")) * (
        0.001 if "us" in row.split()[2] else 1
    )
    assert products[0]["ms"] == pytest.approx(shown_ms, rel=0.01)  # its own time
    assert report["steps"] == 2
    assert sum(operator["ms"] for operator in report["operators"]) <= report["wall_ms"]
    assert not {"data", "forward", "optimizer", "Step 2"} & {
        operator["name"] for operator in report["operators"]
    }
    assert timeline.totals["profile"] > 0
    rows = read_rows(tmp_path / "t")
    assert rows[-1]["steps"] == 1
    assert "profile" not in {row["slowest"][2] for row in rows if row["steps"]}


def test_a_run_that_ends_within_the_profiled_steps_keeps_them(tmp_path):
    with Timeline() as timeline:
        profiler = Profiler([1, 9], tmp_path / "profile", False, timeline.span)
        profiler.step(1)
        torch.zeros(10).sum()
        profiler.close()
        profiler.close()
    written = {path.name for path in (tmp_path / "profile").iterdir()}
    assert written == {"trace.json.gz", "operators.txt", "operators.json"}
    assert (
        json.loads((tmp_path / "profile" / "operators.json").read_text())["steps"] == 1
    )


def test_a_run_that_ends_before_the_profiled_steps_warns(tmp_path, caplog):
    with Timeline() as timeline:
        profiler = Profiler([5, 9], tmp_path / "profile", False, timeline.span)
        profiler.step(4)
        profiler.close()
    assert "ended at step 4" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_steps_to_profile_are_within_the_run(settings):
    short = {**settings, "run": {"name": "short", "steps": 12}}
    with pytest.raises(kd.KdError, match=r"^profile\.steps: .*run\.steps is 12"):
        kd.load_config(short, ["profile.steps=[8, 13]"])
    assert kd.load_config(short, ["profile.steps=[8, 12]"]).profile.steps == (8, 12)


@pytest.mark.parametrize("steps", ["[1]", "[3, 2]", "[0, 2]", "[1, 2, 3]"])
def test_steps_to_profile_are_two_rising_numbers(settings, steps):
    with pytest.raises(
        kd.KdError, match=r"^profile\.steps: is .*first and the last step"
    ):
        kd.load_config(settings, [f"profile.steps={steps}"])
    assert kd.load_config(settings, ["profile.steps=[2, 2]"]).profile.steps == (2, 2)
