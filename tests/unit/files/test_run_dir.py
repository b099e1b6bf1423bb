"""The run folder: one run, one writer, rows and checkpoints that fit together, no
pickle.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
import zipfile

import pytest
import torch

from kd.core.errors import RunError
from kd.core.types import State
from kd.files import checkpoint
from kd.files.run_dir import RunDir


@pytest.fixture
def opened(tmp_path):
    folder = RunDir(tmp_path / "run", keep=2)
    folder.open("run: {}\n")
    yield folder
    folder.close()


def save(folder: RunDir, step: int, best: bool = False) -> None:
    folder.checkpoint(State(step=step), {"w": torch.full((2,), float(step))}, {}, best)


def kept_steps(folder: RunDir) -> list[int]:
    return [
        int(path.name.removeprefix("step_"))
        for path in sorted(folder.checkpoints.glob("step_*"))
    ]


@pytest.mark.parametrize(
    "content", [b'{"modes": \xff', b"[]", b'"x"', b'{"modes": []}', b"[" * 100_000]
)
def test_a_damaged_manifest_is_one_line(content, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(RunError, match=r"^run\.folder: .*manifest\.json' is damaged"):
        RunDir(tmp_path).manifest()


@pytest.mark.parametrize(
    "row", ['{"kind": "val"}', '{"step": 3}', '{"kind": "val", "step": "three"}']
)
def test_a_row_without_a_step_is_one_line(row, opened):
    save(opened, 1)
    with (opened.path / "metrics.jsonl").open("a") as file:
        file.write(row + "\n")
    for read in (opened.restore, lambda: opened.metrics("val")):
        with pytest.raises(
            RunError,
            match=r"^run\.folder: .*metrics\.jsonl' is corrupt or was edited: a row",
        ):
            read()


def test_a_folder_that_is_no_checkpoint_is_one_line(opened):
    save(opened, 1)
    (opened.checkpoints / "step_abc").mkdir()
    for read in (opened.step, opened.restore, opened.best):
        with pytest.raises(
            RunError, match=r"^run\.folder: '.*step_abc' is no checkpoint of kd"
        ):
            read()


def test_the_newest_and_the_best_are_kept(opened):
    for step, best in [
        (1, True),
        (2, False),
        (3, True),
        (4, False),
        (5, False),
        (6, False),
    ]:
        save(opened, step, best)
    assert kept_steps(opened) == [3, 5, 6]
    assert opened.best()[0].step == 3
    assert opened.restore()[0].step == 6
    save(opened, 7, True)
    assert kept_steps(opened) == [6, 7]
    assert opened.best()[0].step == 7


def test_rows_after_the_checkpoint_are_made_again(opened):
    for step in range(1, 5):
        opened.log("train", State(step=step), {"loss": 1.0 / step})
        if step == 2:
            save(opened, step)
    assert [row["step"] for row in opened.metrics("train")] == [1, 2, 3, 4]
    opened.restore()
    assert [row["step"] for row in opened.metrics("train")] == [1, 2]


def test_rows_without_any_checkpoint_go(opened):
    opened.log("train", State(step=1), {"loss": 1.0})
    assert opened.restore() is None
    assert opened.metrics("train") == []


def test_half_a_row_is_no_row(opened):
    opened.log("train", State(step=1), {"loss": 1.0})
    save(opened, 1)
    with (opened.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert [row["step"] for row in opened.metrics("train")] == [1]
    opened.restore()
    opened.log("train", State(step=2), {"loss": 0.5})
    assert [row["step"] for row in opened.metrics("train")] == [1, 2]


def test_rows_are_json_with_their_place(opened):
    opened.log(
        "val", State(step=3, epoch=1, images=24, seconds=1.23456), {"accuracy": 0.5}
    )
    row = json.loads((opened.path / "metrics.jsonl").read_text())
    assert row == {
        "kind": "val",
        "step": 3,
        "epoch": 1,
        "images": 24,
        "seconds": 1.235,
        "accuracy": 0.5,
    }


def test_other_ranks_write_nothing(tmp_path):
    follower = RunDir(tmp_path / "run", rank=1)
    follower.open("run: {}\n")
    follower.log("train", State(), {"loss": 1.0})
    follower.record(a=1)
    assert not (tmp_path / "run").exists()


def evaluated(folder: RunDir, step: int, accuracy: float, best: float) -> None:
    """Log and checkpoint an evaluation, as the engine does."""
    state = State(step=step, best=max(best, accuracy))
    folder.log("val", state, {"accuracy": accuracy})
    folder.checkpoint(state, {"w": torch.full((2,), float(step))}, {}, accuracy > best)


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_killed_right_after_a_checkpoint_knows_its_best(
    tmp_path, monkeypatch, step
):
    """`State.best` was in the checkpoint, and what named it the best was not: nothing
    was ever better.
    """
    folder = RunDir(tmp_path / "run", keep=1)
    folder.open("")
    if step == 2:
        evaluated(folder, 1, 0.25, -1.0)
    write = checkpoint.write

    def killed(*args, **options):
        write(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluated(folder, step, 1.0, 0.25)
    folder.close()
    folder.open("")
    assert folder.restore()[0].best == 1.0
    assert folder.best()[0].step == step
    assert folder.best_row()["accuracy"] == 1.0
    folder.close()


def test_a_best_checkpoint_that_was_removed_is_not_the_best_for_ever(tmp_path, caplog):
    folder = RunDir(tmp_path / "run", keep=2)
    folder.open("")
    for step, accuracy, best in ((1, 0.3, -1.0), (2, 0.9, 0.3), (3, 0.5, 0.9)):
        evaluated(folder, step, accuracy, best)
    assert (kept_steps(folder), folder.best()[0].step, caplog.messages) == (
        [2, 3],
        2,
        [],
    )
    shutil.rmtree(folder.checkpoints / "step_00000002")
    assert (folder.best()[0].step, folder.best_row()["accuracy"]) == (3, 0.5)
    assert caplog.messages == [
        f"run: the best checkpoint of '{folder.path}' is gone. 'step_00000003' is used."
    ]
    state = folder.restore()[0]
    assert (state.step, state.best) == (3, -1.0)
    evaluated(folder, 4, 0.6, state.best)
    assert (folder.best()[0].step, folder.best_row()["accuracy"]) == (4, 0.6)
    folder.close()


def test_nothing_is_removed_while_it_is_not_known_which_is_the_best(opened, caplog):
    for step, accuracy, best in ((1, 0.9, -1.0), (2, 0.5, 0.9), (3, 0.5, 0.9)):
        evaluated(opened, step, accuracy, best)
    (opened.checkpoints / "step_00000002" / "state.json").write_text("{")
    evaluated(opened, 4, 0.5, 0.9)
    assert kept_steps(opened) == [1, 2, 3, 4]
    assert "step_00000002/state.json' is damaged" in caplog.text
    with pytest.raises(RunError, match=r"Remove '.*step_00000002'"):
        opened.best()
    shutil.rmtree(opened.checkpoints / "step_00000002")
    assert opened.best()[0].step == 1


@pytest.mark.parametrize("call", ["unlink", "rmdir"])
def test_a_checkpoint_that_cannot_be_removed_is_a_warning(
    opened, monkeypatch, caplog, call
):
    def busy(*args, **options):
        raise OSError(errno.EBUSY, "Device or resource busy")

    save(opened, 1)
    save(opened, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, busy)
        save(opened, 3)
    assert kept_steps(opened) == [2, 3]
    assert "cannot remove '" in caplog.text
    assert "Device or resource busy" in caplog.text
    opened.close()
    opened.open("")
    assert sorted(path.name for path in opened.checkpoints.iterdir()) == [
        "step_00000002",
        "step_00000003",
    ]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(
    tmp_path, monkeypatch, caplog, number
):
    def without(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    folder = RunDir(tmp_path / "run")
    folder.open("")
    assert "lies on a file system without locks" in caplog.text
    assert "is writing" not in caplog.text
    save(folder, 1)
    assert folder.restore()[0].step == 1
    folder.close()


def test_a_file_system_that_cannot_flush_folders(opened, monkeypatch):
    flush = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    save(opened, 1, True)
    opened.record(a=1)
    assert opened.best()[0].step == 1


def test_a_start_that_stopped_before_its_config_can_be_repeated(tmp_path):
    """A disk that was full at the first file leaves a lock and an empty folder; the
    remedy is the same command.
    """
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".lock").write_text("1")
    folder = RunDir(tmp_path / "run")
    folder.open("run: {}\n")
    folder.close()
    assert folder.stored_config() == "run: {}\n"


def test_half_written_checkpoints_of_a_killed_process_go(opened):
    (opened.checkpoints / ".step_00000009.123.tmp").mkdir()
    opened.close()
    opened.open("")
    assert list(opened.checkpoints.iterdir()) == []


def test_the_stored_config_and_facts_stay(opened):
    opened.record(data="abc", modes={"student": "fp32+fused"})
    save(opened, 1)
    opened.close()
    opened.open("run: {name: other}\n")
    assert opened.stored_config() == "run: {}\n"
    assert opened.manifest() == {"data": "abc", "modes": {"student": "fp32+fused"}}


def test_before_its_first_checkpoint_a_folder_can_be_taken_anew(opened):
    opened.record(data="abc", modes={"student": "fp32+fused"})
    opened.log("train", State(step=1), {"loss": 1.0})
    opened.close()
    opened.open("run: {}\n")  # the same run, perhaps on repaired data
    assert opened.manifest() == {}
    opened.close()
    opened.open("run: {name: other}\n", ["optimizer.lr (1 -> 2)"])
    assert opened.stored_config() == "run: {name: other}\n"
    assert opened.manifest() == {}
    assert opened.restore() is None
    assert opened.metrics("train") == []


def test_one_writer_at_a_time(opened):
    with pytest.raises(
        RunError,
        match=(
            rf"^run\.name: process {os.getpid()} is writing '.*run'\. Wait for it, or"
            r" choose"
        ),
    ):
        RunDir(opened.path).open("")
    opened.close()
    again = RunDir(opened.path)
    again.open("")
    again.close()


def test_nothing_is_pickled(opened):
    opened.record(a=1)
    opened.log("train", State(step=1), {"loss": 1.0})
    save(opened, 1, True)
    files = [path for path in opened.path.rglob("*") if path.is_file()]
    assert len(files) == 6
    for path in files:
        assert not zipfile.is_zipfile(path), path  # torch.save
        assert path.read_bytes()[:1] != b"\x80", path  # pickle


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("")
    with pytest.raises(
        RunError, match=r"^run\.name: '.*photos' exists and is not a run folder"
    ):
        RunDir(tmp_path / "photos").open("")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["a.jpg"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match=r"^run\.(name|folder): "):
        RunDir(tmp_path / "run").open("")


def test_there_is_nothing_to_export_before_the_first_checkpoint(opened):
    with pytest.raises(RunError, match="has no checkpoint yet"):
        opened.best()
