"""Ranks that do not begin with the same stop together, each with one line, before a
step is made.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import start

from kd.files import checkpoint
from kd.models.cache import Codec, Store

CACHED = ("teacher.cache.views=2", "teacher.cache.dtype=fp32")


def all_refuse(world, *words) -> None:
    """Require exit code 2 and one line with these words from every rank."""
    assert world.codes == [2] * len(world.codes), world.logs
    for rank, text in enumerate(world.logs):
        lines = [line for line in text.splitlines() if line.startswith("[rank ")]
        assert len(lines) == 1, text
        assert lines[0].startswith(f"[rank {rank}]")
        assert all(word in lines[0] for word in words), text


def test_all_ranks_refuse_a_cache_of_another_teacher(train, tmp_path):
    path = f"teacher.cache.path={tmp_path / 'cache'}"
    train("cache-filled", 2, *CACHED, path, "run.steps=4").world.ended_well()
    train("cache-read", 2, *CACHED, path, "run.steps=4").world.ended_well()
    store = Store(tmp_path / "cache", Codec(3, "fp32", 0), 36, writable=True)
    arrays, complete, _ = store.read_arrays(0, range(36))
    ids = np.flatnonzero(complete)
    store.write(0, ids.tolist(), [arrays[0].numpy()[ids] + 0.1], [0] * len(ids))
    refused = train("cache-refused", 2, *CACHED, path, "run.steps=4")
    all_refuse(
        refused.world,
        "teacher.cache.path:",
        "a stored logit differs by 0.1",
        "Remove the folder",
    )


@pytest.fixture(scope="module")
def killed(config_file, tmp_path_factory) -> Path:
    """Folders `rank_0` and `rank_1`: two ranks without a common file system, killed
    after checkpoints 5 and 10.
    """
    folder = tmp_path_factory.mktemp("apart")
    assert (
        start(
            "kd.cli.training:train", apart(config_file, folder), 2, {"KD_DIE": "1:13"}
        ).codes[1]
        == -9
    )
    names = sorted(
        path.name for path in (folder / "rank_0" / "run" / "checkpoints").glob("step_*")
    )
    assert names == ["step_00000005", "step_00000010"]
    return folder


def apart(config_file, folder) -> list[object]:
    """Return the arguments of two ranks, each of which has a run folder of its own."""
    return [config_file, f"run.folder={folder}/rank_${{oc.env:RANK}}"]


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def older(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "step_00000010")


def other_weights(folder: Path) -> None:
    state, tensors, info = checkpoint.read(folder / "checkpoints" / "step_00000010")
    name = next(name for name in tensors if name.startswith("model."))
    tensors[name] = tensors[name] * (1 + 2**-20)
    shutil.rmtree(folder / "checkpoints" / "step_00000010")
    checkpoint.write(folder / "checkpoints" / "step_00000010", state, tensors, info)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nothing, ["do not find the same checkpoint"]),
        (older, ["do not find the same checkpoint", "finds one of step"]),
        (other_weights, ["do not find the same checkpoint", "finds one of step 10"]),
    ],
)
def test_ranks_that_would_resume_from_different_checkpoints_stop(
    killed, config_file, tmp_path, change, words
):
    for rank in (0, 1):
        shutil.copytree(killed / "rank_0", tmp_path / f"rank_{rank}")
    change(tmp_path / "rank_1" / "run")
    refused = start("kd.cli.training:train", apart(config_file, tmp_path), 2)
    all_refuse(refused, "run.folder:", "All ranks", "copy rank 0's run folder", *words)


def test_ranks_with_equal_copies_of_the_run_folder_go_on(killed, config_file, tmp_path):
    for rank in (0, 1):
        shutil.copytree(killed / "rank_0", tmp_path / f"rank_{rank}")
    start("kd.cli.training:train", apart(config_file, tmp_path), 2).ended_well()
    assert (tmp_path / "rank_0" / "run" / "checkpoints" / "step_00000020").is_dir()
