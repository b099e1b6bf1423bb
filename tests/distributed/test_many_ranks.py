"""The arithmetic of docs/scale.md for 8 and 32 ranks; torch's FakeProcessGroup sends
nothing.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.backends.cpu import CPU

MIB = 2**20
CAP = 25 * MIB
FIRST = MIB
"""torch's sizes of a bucket, and of the first one, which is reduced while the backward
pass has just begun.
"""


@pytest.fixture(params=[8, 32])
def backend(request, monkeypatch):
    """Rank 0 of a world whose other ranks do not exist; `setup` would find that they do
    not add up.
    """
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": request.param,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "fake")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    threads = torch.get_num_threads()
    yield CPU("fp32", 60.0, threads)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def weights():
    """A ViT-Ti for the 101 dishes."""
    return load(
        Spec("student", "vit_tiny_patch16_224", {}, [str(i) for i in range(101)]), 224
    )


def numel(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_step_reduces_four_bytes_a_weight_in_two_buckets(backend, weights):
    wrapped = backend.wrap(copy.deepcopy(weights))
    steps: list[list[int]] = [[]]

    def counted(state, bucket):
        steps[-1].append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, counted)
    image = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    for _ in range(2):  # torch orders the buckets anew after the first step
        wrapped(image).logits.sum().backward()
        steps.append([])
    for buckets in steps[:2]:
        assert sum(buckets) == 4 * numel(weights)
        assert sum(buckets) / MIB == pytest.approx(21.2, abs=0.1)
    assert max(steps[1]) <= CAP
    assert min(steps[1]) >= FIRST
    assert len(steps[1]) == 2


def test_zero_keeps_about_a_rank_th_of_the_state(backend, weights):
    optimizer = backend.optimizer(
        [{"params": list(copy.deepcopy(weights).parameters())}],
        torch.optim.AdamW,
        True,
        lr=1e-3,
    )
    shares = [
        sum(p.numel() for group in rank for p in group["params"])
        for rank in optimizer._partition_parameters()
    ]
    assert len(shares) == backend.world_size
    assert sum(shares) == numel(weights)
    largest = max(parameter.numel() for parameter in weights.parameters())
    assert (
        max(shares) < numel(weights) / backend.world_size + largest
    )  # a weight is not cut
    assert 8 * max(shares) / MIB == pytest.approx(
        {8: 5.3, 32: 1.7}[backend.world_size], abs=0.1
    )
