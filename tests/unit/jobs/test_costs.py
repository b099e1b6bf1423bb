"""What a run took: time of all its starts, killed ones too, and memory."""

import json
import re
import time
from pathlib import Path

import pytest

from kd import config
from kd.files.run_dir import RunDir
from kd.jobs import forecast
from kd.jobs.train import record_billable_time, train
from kd.setup.recipe import resolve


def test_a_killed_start_counts_up_to_its_last_row(tmp_path):
    """Issue 62: of three starts of 40.4 s in all 23 s were billed, since a killed one
    wrote nothing.
    """
    began = time.time() - 1000
    run = tmp_path / "run"
    fit = tmp_path / "fit"
    rows = {
        run / "monitor_host_0.jsonl": [3.0, 12.5],
        run / "timeline_0.jsonl": [11.0],
        run / "labels_only/monitor_host_0.jsonl": [20.25],
        fit / "timeline_0.jsonl": [2.0],
    }
    folder = RunDir(run)
    folder.open("a: 1")
    folder.record(billable_seconds=5.0, began=began)
    for file, times in rows.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "".join(json.dumps({"time": began + seconds}) + "\n" for seconds in times)
            + '{"time": '
        )
    folder.close()
    again = RunDir(run)
    again.open(
        "a: 1"
    )  # before the first checkpoint a start begins anew, and what was billed stays
    started = time.perf_counter()
    with record_billable_time(again, started - 2.0, [fit]):
        manifest = again.manifest()
        assert manifest["billable_seconds"] == pytest.approx(5.0 + 20.25)
        assert manifest["began"] == pytest.approx(time.time() - 2.0, abs=1.0)
    elapsed = time.perf_counter() - started
    assert 27.25 <= again.manifest()["billable_seconds"] <= 27.25 + elapsed + 0.01
    assert again.manifest()["began"] == 0
    with record_billable_time(
        again, time.perf_counter()
    ):  # the last start ended by itself: nothing is counted twice
        assert again.manifest()["billable_seconds"] <= 27.25 + elapsed + 0.01
    again.close()
    replaced = RunDir(run)
    replaced.open("a: 2")  # another run in its place
    assert replaced.manifest() == {}
    replaced.close()


def high_water() -> float:
    """Return the peak of this process as Linux counts it, MiB."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def test_the_peak_of_the_process_is_foretold_and_recorded(settings):
    """Issue 62: 50 and 20 MiB were said, which was the step's share of 851 and 899."""
    text = forecast.forecast(resolve(config.load(settings)))
    before = high_water()
    foretold, own_mib = re.findall(
        r"memory    (\d+) MiB at the peak of the process, including (\d+) MiB per rank",
        text,
    )[0]
    assert float(foretold) == pytest.approx(before + forecast.LATER_MIB, abs=20)
    assert int(own_mib) < 20
    folder = train(config.load(settings, ["run.epochs=1"])).folder
    peak = json.loads((folder / "manifest.json").read_text())["peak_mib"]
    assert before - 1 <= peak <= high_water() + 1
