"""A tracker whose server is away: one warning, and training goes on."""

import pytest

from kd.jobs.progress.trackers import Trackers

accelerate = pytest.importorskip(
    "accelerate", reason="the extra track is not installed"
)
from accelerate import tracking  # noqa: E402


@pytest.fixture
def away(monkeypatch):
    """Register trackers with accelerate; return what they were told, and set what
    fails.
    """
    calls = []
    failing = set()

    class Away(tracking.GeneralTracker):
        name = "away"
        requires_logging_directory = False

        def __init__(self, run_name):
            super().__init__()

        def _do(self, call):
            if call in failing:
                raise ConnectionError("the server\nis away")
            calls.append(call)

        tracker = property(lambda self: None)

        def start(self):
            self._do("start")

        def store_init_configuration(self, values):
            self._do("configuration")

        def log(self, values, step=None, **options):
            self._do("log")

        def finish(self):
            self._do("finish")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "away", Away)
    monkeypatch.setattr(tracking, "_available_trackers", ["away"])
    return calls, failing


@pytest.mark.parametrize(
    ("failing_call", "expected"),
    [
        ("configuration", ["start"]),
        ("log", ["start", "configuration"]),
        ("finish", ["start", "configuration", "log", "log"]),
    ],
)
def test_a_tracker_that_fails_is_left_out(
    away, tmp_path, caplog, failing_call, expected
):
    calls, failing = away
    failing.add(failing_call)
    trackers = Trackers(["away"], "run", tmp_path, {"run.name": "run"})
    for step in (1, 2):
        trackers.log("train", step, {"loss": 1.0})
    trackers.close()
    assert calls == expected
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert message.startswith(
        "run.trackers: 'away' failed (ConnectionError: the server is away)"
    )
