"""A checkpoint and an export come back bit for bit, or say what is wrong with them."""

import errno
import json
from pathlib import Path

import pytest
import torch

from kd.core.errors import RunError
from kd.core.types import State
from kd.deploy.export.package import write_folder
from kd.files import checkpoint

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor(3),
    "c": torch.randn(5).to(torch.bfloat16),
}


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    state = State(step=7, epoch=1, step_in_epoch=3, images=56, seconds=1.25, best=0.5)
    info = {
        "optimizer_groups": [
            {
                "lr": 0.1,
                "betas": [0.9, 0.999],
                "params": [0, 1],
                "fused": True,
                "foreach": None,
            }
        ]
    }
    checkpoint.write(tmp_path / "a", state, TENSORS, info)
    restored = checkpoint.read(tmp_path / "a")
    assert (restored[0], restored[2]) == (state, info)
    assert restored[1].keys() == TENSORS.keys()
    assert all(
        torch.equal(restored[1][n], t) and restored[1][n].dtype == t.dtype
        for n, t in TENSORS.items()
    )


def test_shared_and_strided_tensors_can_be_written(tmp_path):
    matrix = torch.arange(12.0).view(3, 4)
    checkpoint.write(
        tmp_path / "a",
        State(),
        {"a": matrix, "b": matrix, "t": matrix.T, "row": matrix[1]},
        {},
    )
    tensors = checkpoint.read(tmp_path / "a")[1]
    assert torch.equal(tensors["t"], matrix.T)
    assert torch.equal(tensors["b"], matrix)
    assert torch.equal(tensors["row"], matrix[1])


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "no tensors",
        "no state",
        "half a state",
        "format",
        "other bits",
        "a list",
        "step",
    ],
)
def test_a_damaged_checkpoint_says_what_to_remove(tmp_path, damage):
    folder = tmp_path / "step_00000001"
    checkpoint.write(folder, State(step=1), TENSORS, {})
    tensors = folder / "tensors.safetensors"
    state = folder / "state.json"
    content = json.loads(state.read_text())
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif damage == "no tensors":
        tensors.unlink()
    elif damage == "no state":
        state.unlink()
    elif damage == "half a state":
        state.write_text(state.read_text()[:40])
    elif damage == "other bits":
        tensors.write_bytes(b"\xff" * len(tensors.read_bytes()))
    elif damage == "step":
        state.write_text(state.read_text().replace('"step": 1,', '"step": 3,'))
    else:
        state.write_text(
            "[]" if damage == "a list" else json.dumps({**content, "format": 9})
        )
    with pytest.raises(
        RunError,
        match=(
            r"^run\.folder: (checkpoint )?'.*step_00000001.*' .* [Rr]emove"
            r" '.*step_00000001'"
        ),
    ) as e:
        checkpoint.read(folder)
    assert "\n" not in str(e.value)
    assert "None" not in str(e.value)


@pytest.mark.parametrize(
    ("call", "file"), [("open", checkpoint.TENSORS), ("read_bytes", checkpoint.STATE)]
)
def test_a_checkpoint_that_this_user_may_not_read_is_not_to_be_removed(
    tmp_path, monkeypatch, call, file
):
    real = getattr(Path, call)

    def refuse(path, *args, **options):
        if path.name == file:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **options)

    checkpoint.write(tmp_path / "a", State(), TENSORS, {})
    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(
        RunError, match=r"Permission denied.*let this user read it"
    ) as caught:
        checkpoint.read(tmp_path / "a")
    assert not isinstance(caught.value, checkpoint.Broken)


def test_who_may_read_the_folder_may_read_the_tensors(tmp_path):
    checkpoint.write(tmp_path / "a", State(), TENSORS, {})
    mode = (tmp_path / "a").stat().st_mode & 0o644
    assert (tmp_path / "a" / "tensors.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_one_wrong_bit_names_its_tensor(tmp_path, name):
    folder = tmp_path / "step_00000001"
    checkpoint.write(folder, State(step=1), TENSORS, {})
    file = folder / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    offset = json.loads(content[8:begin])[name]["data_offsets"][0]
    content[begin + offset] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        RunError, match=rf"is damaged: .*tensor '{name}' .* Remove '.*step_00000001'"
    ):
        checkpoint.read(folder)


BIG = {"a": torch.zeros(1_000_000)}


def test_a_checkpoint_on_a_full_disk_leaves_the_one_before(small_disk):
    checkpoint.write(small_disk / "step_1", State(step=1), TENSORS, {})
    before = everything(small_disk)
    with pytest.raises(
        RunError,
        match=(
            r"^run\.folder: the disk is full at '.*step_2'\. Free space and run the"
            r" same"
        ),
    ):
        checkpoint.write(small_disk / "step_2", State(step=2), BIG, {})
    assert everything(small_disk) == before
    assert checkpoint.read(small_disk / "step_1")[0].step == 1


def test_an_export_on_a_full_disk_leaves_nothing(small_disk):
    with pytest.raises(RunError, match=r"^export: the disk is full"):
        write_folder(small_disk / "export", {}, BIG, {})
    assert everything(small_disk) == []
