"""A fault or a kill at every call that changes the disk: the folder stays whole, and
the best is the true best.

Calls are counted and fail in place: the files are real. A kill is `os._exit` in a
forked process, so that no `finally` runs. Only single faults and faults that last are
tried, not every combination of two.
"""

import errno
import io
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from kd.core.errors import RunError
from kd.core.types import State
from kd.files import checkpoint
from kd.files.run_dir import RunDir
from kd.files.storage import atomic_folder, recover

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EBUSY, errno.EINVAL)
LASTING = (errno.ENOSPC, errno.EROFS)
ACCURACY = {1: 0.3, 2: 0.2, 3: 0.5, 4: 0.5, 5: 0.4}
"""By step. The best are 1, 1, 3, 3, 3."""
KILLED = 7


class Faults:
    """Makes the `at`-th call that changes the disk fail, or each one from there on."""

    def __init__(self, at: int, number: int, lasting: bool) -> None:
        """`number`: of the error; KILLED ends the process."""
        self.at = at
        self.number = number
        self.lasting = lasting
        self.calls = 0

    def fails(self) -> bool:
        self.calls += 1
        return self.calls == self.at or (self.lasting and self.calls > self.at)

    def fail(self) -> OSError:
        if self.number == KILLED:
            os._exit(KILLED)
        return OSError(self.number, os.strerror(self.number))

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "replace", "fsync", "unlink", "rmdir"):
                patch.setattr(os, name, self._checked(getattr(os, name)))
            opened = Path.open
            save = checkpoint.save_file

            def open_(
                path: Path, mode: str = "r", *args: object, **options: object
            ) -> io.IOBase:
                if mode[0] in "xwa" and self.fails():
                    with opened(path, mode) as file:
                        file.write('{"kind": "ha')  # half of what was to be written
                    raise self.fail()
                return opened(path, mode, *args, **options)  # type: ignore[arg-type]

            def save_(
                tensors: dict[str, torch.Tensor],
                path: Path,
                metadata: dict[str, str] | None,
            ) -> None:
                save(tensors, path, metadata)
                if self.fails():
                    os.truncate(path, 20)
                    raise SafetensorError(f"I/O error: {self.fail().strerror}")

            patch.setattr(Path, "open", open_)
            patch.setattr(checkpoint, "save_file", save_)
            yield

    def _checked(self, call: Callable) -> Callable:
        def checked(*args: object, **options: object) -> object:
            if self.fails():
                raise self.fail()
            return call(*args, **options)

        return checked


def attempts(
    work: Callable[[Path], None],
    check: Callable[[Path], None],
    base: Path,
    number: int,
    lasting: bool,
) -> int:
    """Do `work` on a copy of `base` with a fault at the first call, the second, ...;
    return how many were tried.
    """
    folder = base.with_name("run")
    for at in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        faults = Faults(at, number, lasting)
        if number == KILLED:
            child = os.fork()
            if not child:
                with suppress(BaseException), faults.everywhere():
                    work(folder)
                os._exit(0)
            reached = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
        else:
            with faults.everywhere(), suppress(RunError):  # and no other error
                work(folder)
            reached = faults.calls >= at
        check(folder)
        if not reached:
            return at - 1
    return 0


FAULTS = [
    (KILLED, False),
    *((number, False) for number in ERRORS),
    *((number, True) for number in LASTING),
]
IDS = [
    "killed",
    *(
        f"{errno.errorcode[number]}{'-lasting' * lasting}"
        for number, lasting in FAULTS[1:]
    ),
]


def train(folder: RunDir, best: float, first: int, last: int) -> None:
    """Log and checkpoint some steps, as the engine does."""
    for step in range(first, last + 1):
        improved = ACCURACY[step] > best
        best = max(best, ACCURACY[step])
        state = State(step=step, best=best)
        folder.log("val", state, {"accuracy": ACCURACY[step]})
        folder.checkpoint(state, {"w": torch.full((3,), float(step))}, {}, improved)


def check_and_finish(path: Path, expected_steps: set[int]) -> None:
    """Require that a folder restores to one of `expected_steps` with the true best, and
    goes on to the end.
    """
    folder = RunDir(path, keep=1)
    folder.open("")
    restored = folder.restore()
    state = restored[0] if restored else State()
    assert state.step in expected_steps
    assert [
        name for name in os.listdir(folder.checkpoints) if name.startswith(".")
    ] == []
    if restored:
        assert restored[1]["w"].tolist() == [float(state.step)] * 3
        require_best(folder, state.step)
        assert state.best == max(ACCURACY[step] for step in range(1, state.step + 1))
    train(folder, state.best, state.step + 1, 5)
    require_best(folder, 5)
    assert [row["step"] for row in folder.metrics("val")] == [1, 2, 3, 4, 5]
    folder.close()


def require_best(folder: RunDir, last: int) -> None:
    best = max(range(1, last + 1), key=lambda step: (ACCURACY[step], -step))
    state, tensors, _ = folder.best()
    assert (state.step, tensors["w"].tolist()) == (best, [float(best)] * 3)
    assert (folder.best_row()["step"], folder.best_row()["accuracy"]) == (
        best,
        ACCURACY[best],
    )


@pytest.fixture(autouse=True)
def quick(caplog, monkeypatch) -> None:
    """Keep no warnings, and wait for no disk: a test in one process cannot see whether
    a file was flushed.
    """
    caplog.set_level(logging.CRITICAL, "kd")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# All faults where a checkpoint is the new best and others are removed; a kill and one
# error elsewhere.
CASES = [(3, *fault) for fault in FAULTS] + [
    (step, number, False) for step in (1, 5) for number in (KILLED, errno.EIO)
]


@pytest.mark.parametrize(("step", "number", "lasting"), CASES)
def test_a_checkpoint_survives_every_fault(
    tmp_path, record_property, step, number, lasting
):
    """The first one, one that is the new best and removes the old best, and one that
    removes a worse one.
    """
    base = RunDir(tmp_path / "base", keep=1)
    base.open("")
    train(base, -1.0, 1, step - 1)
    base.close()

    def work(path: Path) -> None:
        train(
            RunDir(path, keep=1),
            max([-1.0, *(ACCURACY[earlier] for earlier in range(1, step))]),
            step,
            step,
        )

    def check(path: Path) -> None:
        check_and_finish(path, {step - 1, step})

    tried = attempts(work, check, base.path, number, lasting)
    record_property("tried", tried)
    assert tried > 10


@pytest.mark.parametrize(("number", "lasting"), FAULTS, ids=IDS)
def test_a_folder_that_is_replaced_survives_every_fault(
    tmp_path, record_property, number, lasting
):
    (tmp_path / "base" / "export").mkdir(parents=True)
    (tmp_path / "base" / "export" / "file").write_text("old")

    def work(path: Path) -> None:
        with (
            atomic_folder(path / "export") as draft,
            (draft / "file").open("w") as file,
        ):
            file.write("new")

    def check(path: Path) -> None:
        if number != KILLED and not lasting:
            assert (path / "export" / "file").is_file()  # at once
        recover(path, "export")
        assert [child.name for child in path.iterdir()] == ["export"]
        assert (path / "export" / "file").read_text() in ("old", "new")

    tried = attempts(work, check, tmp_path / "base", number, lasting)
    record_property("tried", tried)
    assert tried > 7
