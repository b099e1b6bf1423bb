"""Worker processes that are stopped, killed, or have no shared memory: one line, and
never a wait without end.
"""

import gc
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from pieces import wait_until

from kd.config.schema import BackendSection, DataSection
from kd.core.errors import RunError
from kd.core.host import process_stat
from kd.core.types import Plan, Sample
from kd.data.loader import LocalLoader, Share
from kd.data.workers import worker_error
from kd.parts.registry import default_options
from kd.setup.build import build_backend, distributed
from kd.setup.data import BatchSplit, loaders

# torch's handler of SIGCHLD may raise inside torch's own NamedTemporaryFile
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
PLAN = Plan(torch.arange(400), torch.ones(400))


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep what other modules left out of the collections below: with a million objects
    each takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected(frozen) -> None:
    """Collect the loaders of the test before: a forked worker that does so in the
    middle of an import fails.
    """
    gc.collect()


class Slow:
    """A dataset whose images take a while."""

    classes = ("a", "b")

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 400

    def load(self, id: int, view: int) -> Sample:
        time.sleep(self.seconds)
        return Sample(
            torch.full((3, 8, 8), id % 256, dtype=torch.uint8), id % 2, id % 2, 1.0
        )


def loader(
    workers: int = 2, timeout: float = 2.0, seconds: float = 0.002
) -> LocalLoader:
    return LocalLoader(
        Slow(seconds), Share(8, 1, 0, 1), workers, timeout_seconds=timeout
    )


def error_line(batches: LocalLoader, harm, after: int = 2) -> str:
    """Harm the workers after some batches; return the line. Not pytest.raises: its
    traceback would keep the workers.
    """
    try:
        for number, _ in enumerate(batches.epoch(PLAN, 0), 1):
            if number == after:
                harm([worker.pid for worker in batches.processes()])
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("settled", [False, True])
def test_a_stopped_worker_ends_the_run_and_is_named(number, settled):
    """`settled`: it has announced batches already, and the trainer waits for the rest
    of them, not for a message.
    """
    pids = []

    def stop(processes) -> None:
        pids.extend(processes)
        time.sleep(0.5 * settled)
        os.kill(processes[number], signal.SIGSTOP)

    line = error_line(loader(), stop)
    assert line.startswith(
        f"data.workers: worker {number} (process {pids[number]}, stopped) made no batch"
        " within 2 s"
    )
    assert "resumes" in line
    assert len(pids) == 2
    # this process can end
    wait_until(
        lambda: all(process_stat(pid)[:1] in ([], ["Z"]) for pid in pids), seconds=10
    )


def test_a_worker_stopped_between_two_epochs_is_named():
    worker_loader = loader()
    assert len(list(worker_loader.epoch(PLAN, 0))) == 50
    os.kill(worker_loader.processes()[1].pid or 0, signal.SIGSTOP)
    assert "worker 1 (process " in error_line(worker_loader, None, after=-1)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_worker_is_one_line(number, busy):
    """`busy`: torch's signal handler raises wherever the main thread is, here in
    `sleep`.

    If that is in a callback of the garbage collector, Python drops the error, and the
    deadline finds the dead worker.
    """
    pids = []

    def kill(processes) -> None:
        pids.extend(processes)
        os.kill(processes[number], signal.SIGKILL)
        time.sleep(0.2 * busy)

    line = ""
    section = BackendSection(kind="cpu", options=default_options("backends", "cpu"))
    try:
        with distributed(section):
            line = error_line(loader(), kill)
    except RunError as error:
        line = str(error)
    ended = f"data.workers: the worker process {pids[number]} has ended ("
    late = f"data.workers: worker {number} (process {pids[number]}, dead) made no batch"
    assert line.startswith((ended, late))
    assert "fewer data.workers" in line or line.startswith(late)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux names a signal's sender"
)
def test_no_thread_of_a_worker_takes_a_signal_that_its_trainer_did_not_send():
    """Torch starts its pool of threads anew in a worker, before any code of ours runs
    there.
    """
    torch.set_num_threads(torch.get_num_threads())  # makes the pool here
    worker_loader = loader()
    batches = worker_loader.epoch(PLAN, 0)
    next(batches)
    for worker in worker_loader.processes():
        deadline = time.monotonic() + 10
        statuses = []
        while (
            len(statuses) < 3 and time.monotonic() < deadline
        ):  # the second worker may still be starting
            statuses = [
                (task / "status").read_text()
                for task in Path(f"/proc/{worker.pid}/task").iterdir()
            ]
        unblocked = [
            text
            for text in statuses
            if not int(re.findall(r"SigBlk:\s*(\w+)", text)[0], 16) >> 14 & 1
        ]
        # the main thread, the one that waits for the signal, and that of a queue
        assert len(statuses) >= 3
        assert len(unblocked) <= 1, unblocked  # the one that waits for it
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert len(list(batches)) == 49


def test_a_slow_loader_is_not_late():
    """An epoch may take longer than a batch may."""
    assert (
        len(
            list(
                loader(1, timeout=2.0, seconds=0.03).epoch(
                    Plan(PLAN.ids[:80], PLAN.weights[:80]), 0
                )
            )
        )
        == 10
    )


def test_a_loop_that_computes_for_long_does_not_make_its_workers_late():
    worker_loader = loader(1, timeout=1.5)
    batches = 0
    for _ in worker_loader.epoch(Plan(PLAN.ids[:16], PLAN.weights[:16]), 0):
        time.sleep(2.0)
        batches += 1
    assert batches == 2


def test_watching_ends_with_the_epoch():
    worker_loader = loader(1)
    list(worker_loader.epoch(PLAN, 0))
    some = worker_loader.epoch(PLAN, 0)
    next(some)
    del some
    wait_until(
        lambda: "kd-watch" not in {thread.name for thread in threading.enumerate()},
        seconds=10,
    )


@pytest.mark.parametrize(
    "text", ["shape mismatch", "Caught ValueError in DataLoader worker process 0."]
)
def test_other_errors_are_not_taken_for_an_end(text):
    assert worker_error(RuntimeError(text)) is None


def test_batches_that_do_not_fit_into_the_shared_memory_are_refused_at_the_start():
    """256 images of 8192 x 8192 a batch: more than any machine has."""
    section = BackendSection(kind="cpu", options=default_options("backends", "cpu"))
    backend = build_backend(section)
    split = BatchSplit(256, 1, 256, 1, 256)
    datasets = (Slow(), Slow())
    for workers in (2, 0):
        data = DataSection(kind="food_mini", image_size=8192, workers=workers)
        if not workers:
            assert [
                split_loader.batch_bytes(8192)
                for split_loader in loaders(datasets, data, split, backend, 60)
            ] == [0, 0]
            continue
        with pytest.raises(
            RunError,
            match=r"^data\.workers: the batches of 2 workers take about 98\d{4} MiB",
        ) as e:
            loaders(datasets, data, split, backend, 60)
        assert all(
            word in str(e.value)
            for word in ("/dev/shm", "--shm-size=", "data.workers=0")
        )
