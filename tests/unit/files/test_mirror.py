"""The copy of a run folder in an object store, which is moto's here: whole checkpoints, whatever happens."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kd import config
from kd.core.errors import ConfigError, DataError, KdError, RunError
from kd.core.types import State
from kd.files import object_store
from kd.files.run_dir import RunDir
from kd.jobs.folder import open_run
from kd.setup.recipe import Record, resolve

URL = "s3://bucket/runs/tiny"


def opened(path: Path, url: str = URL) -> RunDir:
    folder = RunDir(path, keep=2, mirror=url)
    try:
        folder.restore_copy()
        folder.open("run: {}")
    except KdError:
        folder.close()
        raise
    return folder


def train(folder: RunDir, first: int, last: int) -> None:
    for step in range(first, last + 1):
        state = State(step=step, best=step / 10)
        folder.log("val", state, {"accuracy": step / 10})
        folder.checkpoint(state, {"w": torch.full((3,), float(step))}, {}, best=True)


def local(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def remote(aws, prefix: str = "runs/tiny/") -> dict[str, bytes]:
    """Return the files of the copy, but for the one that says who writes it."""
    s3 = aws("s3")
    found = s3.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    bodies = {each["Key"]: s3.get_object(Bucket="bucket", Key=each["Key"])["Body"].read() for each in found}
    return {name: body for key, body in bodies.items() if (name := key.removeprefix(prefix)) != ".kd-owner"}


@pytest.fixture
def mirrored(aws, tmp_path) -> Path:
    """A finished run of four steps with its copy."""
    folder = opened(tmp_path / "run")
    train(folder, 1, 4)
    folder.complete_copy()
    folder.close()
    return tmp_path / "run"


def test_the_copy_is_the_folder_and_an_empty_folder_becomes_the_copy(mirrored, aws, tmp_path):
    assert remote(aws) == local(mirrored)
    assert {name.split("/")[1] for name in remote(aws) if "/" in name} == {"step_00000003", "step_00000004"}
    folder = opened(tmp_path / "elsewhere")
    assert local(tmp_path / "elsewhere") == local(mirrored)
    state, tensors, _ = folder.restore() or pytest.fail("nothing was restored")
    assert (state.step, tensors["w"].tolist()) == (4, [4.0] * 3)
    train(folder, 5, 5)
    folder.complete_copy()
    folder.close()
    assert remote(aws) == local(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"run\.mirror: .*step_00000005, which is newer .*step_00000004"):
        opened(mirrored)


def test_a_checkpoint_that_was_not_uploaded_whole_does_not_count(mirrored, aws, tmp_path):
    aws("s3").delete_object(Bucket="bucket", Key="runs/tiny/checkpoints/step_00000004/state.json")
    folder = opened(tmp_path / "elsewhere")
    state, _, _ = folder.restore() or pytest.fail("nothing was restored")
    assert state.step == 3
    train(folder, 4, 5)
    folder.complete_copy()
    folder.close()
    assert remote(aws) == local(tmp_path / "elsewhere")


def test_a_store_that_is_away_does_not_stop_the_run(mirrored, aws, caplog):
    folder = opened(mirrored)
    s3 = aws("s3")
    for name in (*remote(aws), ".kd-owner"):
        s3.delete_object(Bucket="bucket", Key=f"runs/tiny/{name}")
    s3.delete_bucket(Bucket="bucket")
    with caplog.at_level(logging.WARNING, "kd"):
        train(folder, 5, 6)
        with pytest.raises(RunError, match=r"run\.mirror: the copy is not complete"):
            folder.complete_copy()
    assert "The run goes on" in caplog.text
    s3.create_bucket(Bucket="bucket")
    folder.complete_copy()
    folder.close()
    whole = local(mirrored)
    kept = {name for name in whole if name.startswith("checkpoints/step_00000006")}
    assert kept <= remote(aws).keys()
    with pytest.raises(DataError, match="another-bucket"):
        RunDir(mirrored, mirror="s3://another-bucket/tiny").restore_copy()


def test_nothing_foreign_is_overwritten_or_removed(aws, tmp_path):
    aws("s3").put_object(Bucket="bucket", Key="runs/tiny/photo.jpg", Body=b"mine")
    with pytest.raises(RunError, match="files that are no run"):
        opened(tmp_path / "run")
    aws("s3").put_object(Bucket="bucket", Key="runs/tiny/config.yaml", Body=b"")
    folder = opened(tmp_path / "run")
    train(folder, 1, 3)
    folder.complete_copy()
    folder.close()
    assert remote(aws)["photo.jpg"] == b"mine"


def test_a_kill_at_any_moment_leaves_a_copy_to_go_on_from(tmp_path, monkeypatch, record_property):
    """After each number of uploads and removals: a whole checkpoint or none, with its rows, and the run goes on."""
    made, allowed = 0, 0

    def counted(operation):
        def run(*arguments):
            nonlocal made
            made += 1
            if made > allowed:
                raise DataError("run.mirror", "the process is gone")
            return operation(*arguments)

        return run

    for name in ("upload", "remove"):
        monkeypatch.setattr(object_store, name, counted(getattr(object_store, name)))
    reached = []
    while True:
        url, here = f"memory://killed/{allowed}", tmp_path / str(allowed)
        made = 0
        with suppress(DataError):  # killed while it takes the copy over
            killed = opened(here / "killed", url)
            for step in range(1, 5):
                train(killed, step, step)
                with suppress(RunError):
                    killed.complete_copy()
            killed.close()
        whole = made <= allowed
        made = -(10**9)
        folder = opened(here / "resumed", url)
        found = folder.restore()
        step = found[0].step if found is not None else 0
        assert found is None or found[1]["w"].tolist() == [float(step)] * 3
        assert [row["step"] for row in folder.metrics("val")] == list(range(1, step + 1))
        train(folder, step + 1, 5)
        folder.complete_copy()
        folder.close()
        reached.append(step)
        if whole:
            break
        allowed += 1
    record_property("tried", len(reached))
    assert reached == sorted(reached)
    assert set(reached) == {0, 1, 2, 3, 4}


def test_a_file_outside_of_the_copy_is_refused(aws, tmp_path):
    for name in ("config.yaml", "../../outside"):
        aws("s3").put_object(Bucket="bucket", Key=f"runs/tiny/{name}", Body=b"x")
    with pytest.raises(RunError, match=r"has a file '\.\./\.\./outside'"):
        opened(tmp_path / "a" / "run")
    assert not (tmp_path / "outside").exists()


def damage(aws, step: int, file: str = "tensors.safetensors") -> None:
    """Change one byte of a checkpoint in the copy."""
    key = f"runs/tiny/checkpoints/step_{step:08d}/{file}"
    body = bytearray(aws("s3").get_object(Bucket="bucket", Key=key)["Body"].read())
    body[-3] ^= 1
    aws("s3").put_object(Bucket="bucket", Key=key, Body=bytes(body))


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
def test_of_a_rotten_checkpoint_in_the_copy_the_one_before_it_is_restored(mirrored, aws, tmp_path, caplog, file):
    damage(aws, 4, file)
    for name in ("stopped", "elsewhere"):  # the first is killed before it makes a checkpoint
        with caplog.at_level(logging.WARNING, "kd"):
            folder = opened(tmp_path / name)
        found = folder.restore() or pytest.fail("nothing was restored")
        assert (found[0].step, found[1]["w"].tolist()) == (3, [3.0] * 3)
        folder.close()
    assert "step_00000004" in caplog.text
    folder = opened(tmp_path / "stopped")  # its disk is still there
    train(folder, 4, 5)
    folder.complete_copy()
    folder.close()
    assert remote(aws) == local(tmp_path / "stopped")


def test_a_copy_without_a_whole_checkpoint_is_not_begun_anew(mirrored, aws, tmp_path):
    damage(aws, 3)
    damage(aws, 4)
    before = remote(aws)
    for _ in range(2):
        with pytest.raises(RunError, match=r"run\.mirror: no checkpoint .*'s3://bucket/runs/tiny' is whole.*run\.name"):
            opened(tmp_path / "elsewhere")
    assert remote(aws) == before


def test_folder_markers_are_no_files(mirrored, aws, tmp_path):
    """Consoles and tools of object stores write an empty object for a folder."""
    for marker in ("", "checkpoints/", "checkpoints/step_00000004/"):
        aws("s3").put_object(Bucket="bucket", Key=f"runs/tiny/{marker}", Body=b"")
    folder = opened(tmp_path / "elsewhere")
    folder.close()
    assert local(tmp_path / "elsewhere") == local(mirrored)


@pytest.mark.parametrize("url", ["file:///tmp/copies", "local://copies", "FILE:///tmp/copies", "s3://", "://b"])
def test_a_mirror_on_this_machine_is_refused_before_the_run(settings, url):
    with pytest.raises(ConfigError, match=r"^run\.mirror: is '.*://.*A URL"):
        config.load(settings, [f"run.mirror={url}"])


@pytest.mark.parametrize("name", ["/tmp/elsewhere", "../elsewhere"])
def test_a_run_outside_of_its_folder_has_no_place_in_the_copy(settings, name):
    with pytest.raises(ConfigError, match=r"^run\.name: is '.*elsewhere', .*below run\.folder.*run\.mirror"):
        config.load(settings, [f"run.name={name}", "run.mirror=s3://bucket/runs"])


def test_a_copy_that_cannot_be_written_is_refused_before_the_run(aws, tmp_path):
    """Listing is allowed, writing is not."""
    rules = '{"Statement": [{"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": "*"}]}'
    aws("s3").put_bucket_policy(Bucket="bucket", Policy=rules)
    with pytest.raises(DataError, match=r"^run\.mirror: .*'s3://bucket/runs/tiny"):
        opened(tmp_path / "run")


def record_of(settings, folder: Path, *overrides: str) -> Record:
    """Return the record of a run named `tiny` whose copy is at `URL`."""
    return resolve(config.load(settings, ["run.mirror=s3://bucket/runs", f"run.folder={folder}", *overrides])).record


@pytest.mark.parametrize("here", ["no folder", "a folder"])
def test_the_copy_of_another_run_stays(settings, aws, tmp_path, here):
    with open_run(record_of(settings, tmp_path / "one"), 0) as folder:
        train(folder, 1, 2)
    before = remote(aws)
    if here == "a folder":  # trained without a copy so far, and longer
        with open_run(record_of(settings, tmp_path / "two", "optimizer.lr=0.5", "run.mirror="), 0) as folder:
            train(folder, 1, 5)
    other = record_of(settings, tmp_path / "two", "optimizer.lr=0.5")
    differs = r"^run\.mirror: .*another run; it differs in optimizer\.lr .*run\.name"
    with pytest.raises(RunError, match=differs), open_run(other, 0) as folder:
        train(folder, 6, 7)
    assert remote(aws) == before
    with open_run(record_of(settings, tmp_path / "one", "run.keep=3"), 0) as folder:  # nothing that it computes
        train(folder, 3, 3)
    assert {name.split("/")[1] for name in remote(aws) if "/" in name} == {f"step_0000000{i}" for i in (1, 2, 3)}


def test_the_copy_of_the_same_configuration_on_other_data_stays(settings, aws, tmp_path):
    for name, more in (("one", ()), ("two", ("run.mirror=",))):
        with open_run(record_of(settings, tmp_path / name, *more), 0) as folder:
            folder.record(data=f"the images of {name}", teacher="1")
            train(folder, 1, 2)
    before = remote(aws)
    differs = r"^run\.mirror: .*another run; it differs in data "
    with pytest.raises(RunError, match=differs), open_run(record_of(settings, tmp_path / "two"), 0) as folder:
        train(folder, 3, 4)
    assert remote(aws) == before


def test_of_two_live_writers_the_earlier_one_ends_and_the_copy_is_whole(aws, tmp_path):
    """The second starts on an empty disk while the first goes on: it takes the copy over where it stands."""
    one = opened(tmp_path / "one")
    train(one, 1, 2)
    one.complete_copy()
    two = opened(tmp_path / "two")
    assert two.step() == 2
    train(one, 3, 3)
    with pytest.raises(RunError, match=r"^run\.mirror: another process .*'2 .*here '1 .*One writer"):
        one.complete_copy()
    assert one.step() == 3  # on its own disk
    with pytest.raises(RunError, match="another process"):  # it does not go on beside the other
        train(one, 4, 4)
    one.close()
    assert remote(aws) == local(tmp_path / "two")
    train(two, 3, 5)
    two.complete_copy()
    two.close()
    assert remote(aws) == local(tmp_path / "two")


def test_two_runs_that_fit_one_teacher_on_two_machines_both_go_on(settings, aws, tmp_path, caplog):
    with open_run(record_of(settings, tmp_path / "one"), 0, shared=True) as one:
        train(one, 1, 1)
        one.complete_copy()
        with open_run(record_of(settings, tmp_path / "two"), 0, shared=True) as two:
            for step in range(2, 5):
                train(one, step, step)
            one.complete_copy()
            train(two, 2, 3)
    assert caplog.text.count("another process") == 1
    assert one.step() == 4
    assert remote(aws) == local(tmp_path / "two" / "tiny")


def test_a_process_that_waits_for_the_folder_takes_no_copy_over(mirrored, aws):
    writer = opened(mirrored)
    with pytest.raises(RunError, match="is writing"):
        opened(mirrored)
    train(writer, 5, 5)
    writer.complete_copy()
    writer.close()
    assert remote(aws) == local(mirrored)


def test_a_run_inside_of_the_run_folder_has_a_copy_of_its_own(mirrored, aws, tmp_path):
    """The baseline's: its rotten checkpoint is left out too."""
    inner = opened(mirrored / "labels_only", f"{URL}/labels_only")
    train(inner, 1, 2)
    inner.complete_copy()
    inner.close()
    key = "runs/tiny/labels_only/checkpoints/step_00000002/tensors.safetensors"
    aws("s3").put_object(Bucket="bucket", Key=key, Body=b"rotten")
    opened(tmp_path / "elsewhere").close()
    inner = opened(tmp_path / "elsewhere" / "labels_only", f"{URL}/labels_only")
    state, _, _ = inner.restore() or pytest.fail("nothing was restored")
    assert state.step == 1
    inner.close()
