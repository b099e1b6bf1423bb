"""Ranks that do not read the same images stop together, with the first name that
differs, before a step is made.

So does a run that resumes on other images than it was started on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import start
from test_same_start import all_refuse

VICTIM = "train/fig/03.jpg"


def exchanged(copy: Path) -> None:
    """Exchange the labels of two classes."""
    train = copy / "train"
    (train / "fig").rename(train / "aside")
    (train / "apple").rename(train / "fig")
    (train / "aside").rename(train / "apple")


def missing(copy: Path) -> None:
    (copy / VICTIM).unlink()


def longer(copy: Path) -> None:
    with (copy / VICTIM).open("ab") as file:
        file.write(b"\0")


def other_bytes(copy: Path) -> None:
    content = (copy / VICTIM).read_bytes()
    (copy / VICTIM).write_bytes(content[:-3] + bytes(3))


def renamed_class(copy: Path) -> None:
    for split in ("train", "val"):
        (copy / split / "fig").rename(copy / split / "figs")


@pytest.fixture
def two_folders(photos, tmp_path) -> Callable[..., list[str]]:
    """Copy the images for ranks 0, 1 and 2, change the last one's, and return the
    overrides for it.
    """

    def write(change: Callable[[Path], None], ranks: int) -> list[str]:
        for rank in range(ranks):
            shutil.copytree(photos, tmp_path / f"rank_{rank}")
        change(tmp_path / f"rank_{ranks - 1}")
        return [
            f"data.root={tmp_path}/rank_${{oc.env:RANK}}",
            f"run.folder={tmp_path}/runs",
        ]

    return write


@pytest.mark.parametrize(
    ("target", "ranks", "change", "words"),
    [
        ("train", 2, exchanged, ["train:train/apple/"]),
        ("train", 2, missing, ["train:train/fig/"]),
        ("train", 3, longer, [VICTIM]),
        ("teach", 2, other_bytes, [VICTIM]),
        ("teach", 2, renamed_class, ["classes apple, fig"]),
    ],
)
def test_ranks_with_other_images_stop(
    config_file, two_folders, tmp_path, target, ranks, change, words
):
    argv = [config_file, *two_folders(change, ranks)]
    if target == "teach":
        argv += ["teacher.model=resnet18", "teacher.fit.epochs=1"]
        argv += [f"teacher.fit.folder={tmp_path}/teachers"]
    refused = start(f"kd.cli.training:{target}", argv, ranks)
    all_refuse(
        refused, "data:", f"rank {ranks - 1} has other images than rank 0", *words
    )
    assert not list(tmp_path.glob("*/*/checkpoints/step_*"))


def test_ranks_with_equal_copies_train(config_file, two_folders):
    argv = [config_file, *two_folders(lambda copy: None, 2), "run.steps=2"]
    start("kd.cli.training:train", argv, 2).ended_well()


@pytest.mark.parametrize("change", ["labels", "missing", "nothing"])
def test_ranks_of_kd_distill_with_other_items_stop(change):
    ended = start("distilling:main", [change], 2)
    if change == "nothing":
        ended.ended_well()
    else:
        all_refuse(ended, "data:", "rank 1 has other images than rank 0", "train")


def test_a_run_does_not_resume_on_files_with_other_bytes(train, photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    run = train(
        "other-bytes", 1, f"data.root={root}", env={"KD_DIE": "0:13"}, into=tmp_path
    )
    recorded = run.manifest()
    content = (root / VICTIM).read_bytes()
    other_bytes(root)
    refused = train("other-bytes", 1, f"data.root={root}", into=tmp_path).world
    assert refused.codes == [2]
    assert (
        "run.name: this run was started with another train:train/fig/03.jpg (its"
        " content" in refused.logs[0]
    )
    (root / VICTIM).write_bytes(content)
    train("other-bytes", 1, f"data.root={root}", into=tmp_path).world.ended_well()
    assert run.manifest()["contents"] == recorded["contents"]


def test_a_run_of_an_older_kd_resumes_with_the_facts_that_it_has(train, tmp_path):
    run = train("older", 1, env={"KD_DIE": "0:13"}, into=tmp_path)
    recorded = run.manifest()
    del recorded["contents"]
    (run.folder / "manifest.json").write_text(json.dumps(recorded))
    train("older", 1, into=tmp_path).world.ended_well()
    assert run.manifest()["contents"]
