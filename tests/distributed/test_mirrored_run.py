"""A run that is terminated goes on from its copy in an object store, on a machine with an empty disk."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import yaml
from pieces import tiny
from ranks import World, start
from safetensors.torch import load_file
from world_runs import STEPS

RANKS = 2


@pytest.mark.slow
def test_a_terminated_run_is_resumed_elsewhere_with_the_same_bits(aws, config_file, tmp_path):
    """The fitted teacher comes from the copy too."""
    content = yaml.safe_load(config_file.read_text())
    content["teacher"] = {**tiny(2, 48), "attention": "unfused", "precision": "fp32", "min_accuracy": 0}
    content["teacher"]["fit"] = {"epochs": 1, "lr": 3e-3}
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(content))
    access = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def run(folder: str, copy: str, **env: str) -> World:
        places = [f"run.folder={tmp_path / folder}", f"teacher.fit.folder={tmp_path / folder / 'teachers'}"]
        argv = [file, "data.kind=outside.signalling", f"run.mirror=s3://bucket/{copy}", *places]
        return start("kd.cli.training:train", argv, RANKS, {**access, **env})

    stopped = run("one", "all", KD_SIGNAL="SIGTERM:train:60", KD_SLOW="0.02")
    assert stopped.codes == [75] * RANKS, stopped.logs
    shutil.rmtree(tmp_path / "one")
    resumed = run("one", "all").ended_well()
    assert "run.mirror: restored step_" in resumed.logs[0]
    assert "teacher: reusing" in resumed.logs[0]
    finished = tmp_path / "one" / "tiny"
    names = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()}
    listed = aws("s3").list_objects_v2(Bucket="bucket", Prefix="all/tiny/")["Contents"]
    assert {each["Key"].removeprefix("all/tiny/") for each in listed} == names - {".lock"} | {".kd-owner"}

    run("two", "other").ended_well()
    checkpoint = f"tiny/checkpoints/step_{STEPS:08d}/tensors.safetensors"
    one, two = (load_file(tmp_path / folder / checkpoint) for folder in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
