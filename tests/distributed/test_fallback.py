"""`backend.fallback`: where smddp's library is missing, the run says on what it runs instead, and records it."""

from __future__ import annotations

import json

import pytest
import yaml
from ranks import HERE, start
from test_resume import same_bits

STAND_IN = HERE.parent / "contracts" / "smddp_stand_in"


@pytest.fixture
def smddp(config_file, tmp_path):
    """Train on `kind: smddp` with so many ranks, the stand-in of the library importable or not."""

    def run(ranks: int, *overrides: str, library: bool = False):
        content = yaml.safe_load(config_file.read_text())
        content["sifter"] = {"kind": "none"}
        content["backend"] = {"kind": "smddp", "device": "cpu", "precision": "fp32", "timeout_seconds": 20}
        file = tmp_path / "smddp.yaml"
        file.write_text(yaml.safe_dump(content))
        argv = [file, f"run.folder={tmp_path}", *overrides]
        return start("kd.cli.training:train", argv, ranks, path=(HERE, STAND_IN) if library else (HERE,))

    return run


def test_without_the_library_the_fallback_runs_says_so_and_is_recorded(smddp, plain, tmp_path):
    world = smddp(2, "backend.fallback=gloo", "run.name=instead").ended_well()
    for log in world.logs:
        assert "backend: smddp is not installed; running on gloo, as backend.fallback allows" in log
    assert json.loads((tmp_path / "instead" / "manifest.json").read_text())["backend"] == "gloo, in place of smddp"
    reference = plain(2)
    assert same_bits(reference.checkpoint(), type(reference)(world, tmp_path / "instead").checkpoint())


def test_with_the_library_nothing_falls_back(smddp, plain, tmp_path):
    world = smddp(2, "backend.fallback=gloo", "run.name=itself", library=True).ended_well()
    assert "not installed" not in "".join(world.logs)
    assert json.loads((tmp_path / "itself" / "manifest.json").read_text())["backend"] == "smddp"
    reference = plain(2)
    assert same_bits(reference.checkpoint(), type(reference)(world, tmp_path / "itself").checkpoint())


def test_without_library_and_fallback_it_is_one_line(smddp):
    world = smddp(1)
    assert world.codes == [2]
    assert "cannot be imported" in world.logs[0]
    assert "set backend.fallback=nccl" in world.logs[0]


@pytest.mark.parametrize(
    "pair", ["fallback nccl does not go with device cpu", "fallback gloo does not go with device cuda"]
)
def test_a_fallback_that_does_not_fit_the_device(smddp, pair):
    _, name, *_, device = pair.split()
    world = smddp(1, f"backend.fallback={name}", f"backend.device={device}")
    assert world.codes == [2]
    assert pair in world.logs[0]
