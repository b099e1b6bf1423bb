"""Whole runs of the trainer on the stand-ins of smddp and Neuron: two processes, cache,
sifter, clipping, resumed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pieces import slow

CONTRACTS = Path(__file__).parents[1] / "contracts"
WHOLE = (
    "sifter.kind=history",
    "sifter.keep=0.7",
    "teacher.cache.views=2",
    "optimizer.clip_grad_norm=0.1",
)
KINDS = {
    "smddp": ({"kind": "smddp", "device": "cpu"}, "optimizer.zero=true"),
    "neuron": ({"kind": "torch_neuronx.on_cpu"}, "optimizer.zero=false"),
}


@pytest.mark.parametrize("kind", [slow("smddp"), "neuron"])
def test_a_run_is_the_cpus_and_resumes_to_the_same_bits(train, kind, tmp_path):
    backend, zero = KINDS[kind]
    cpu = train(
        f"cpu_for_{kind}", 2, *WHOLE, zero, f"teacher.cache.path={tmp_path / 'of_cpu'}"
    )
    cpu.world.ended_well()

    def here():
        run_of_backend = train(
            f"on_{kind}",
            2,
            *WHOLE,
            zero,
            f"teacher.cache.path={tmp_path / 'cache'}",
            path=(CONTRACTS / f"{kind}_stand_in",),
            backend={**backend, "precision": "fp32", "timeout_seconds": 20},
        )
        run_of_backend.world.ended_well()
        return run_of_backend

    run = here()
    assert run.losses() == cpu.losses()
    expected = run.checkpoint()
    shutil.rmtree(max((run.folder / "checkpoints").iterdir()))
    torch.testing.assert_close(
        here().checkpoint(), expected, rtol=0, atol=0, equal_nan=True
    )  # a loss not known yet is NaN
