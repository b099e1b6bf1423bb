"""`backend.fallback`: where smddp's library is missing, the run says on what it runs
instead, and records it.
"""

from __future__ import annotations

import pytest
from pieces import Trained
from ranks import HERE, start
from test_resume import same_bits

STAND_IN = HERE.parent / "contracts" / "smddp_stand_in"


@pytest.fixture
def smddp(changed_file, tmp_path):
    """Train on `kind: smddp` with so many ranks, the stand-in of the library importable
    or not.
    """
    backend = {
        "kind": "smddp",
        "device": "cpu",
        "precision": "fp32",
        "timeout_seconds": 20,
    }
    file = changed_file(sifter={"kind": "none"}, backend=backend)

    def run(ranks: int, *overrides: str, library: bool = False):
        argv = [file, f"run.folder={tmp_path}", *overrides]
        return start(
            "kd.cli.training:train",
            argv,
            ranks,
            path=(HERE, STAND_IN) if library else (HERE,),
        )

    return run


@pytest.mark.parametrize("library", [False, True])
def test_the_fallback_runs_where_the_library_is_missing_says_so_and_is_recorded(
    smddp, plain, tmp_path, library
):
    world = smddp(
        2, "backend.fallback=gloo", "run.name=instead", library=library
    ).ended_well()
    for log in world.logs:
        warned = (
            "backend: smddp is not installed; running on gloo, as backend.fallback"
            " allows" in log
        )
        assert warned == (not library)
    ran = Trained(tmp_path / "instead")
    assert ran.manifest()["backend"] == (
        "smddp" if library else "gloo, in place of smddp"
    )
    assert same_bits(plain(2).checkpoint(), ran.checkpoint())


def test_without_library_and_fallback_it_is_one_line(smddp):
    world = smddp(1)
    assert world.codes == [2]
    assert "cannot be imported" in world.logs[0]
    assert "set backend.fallback=nccl" in world.logs[0]


@pytest.mark.parametrize(
    "pair",
    [
        "fallback nccl does not go with device cpu",
        "fallback gloo does not go with device cuda",
    ],
)
def test_a_fallback_that_does_not_fit_the_device_is_refused(smddp, pair):
    _, name, *_, device = pair.split()
    world = smddp(1, f"backend.fallback={name}", f"backend.device={device}")
    assert world.codes == [2]
    assert pair in world.logs[0]
