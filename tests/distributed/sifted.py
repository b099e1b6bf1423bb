"""What a rank of `test_sifting_dropin.py` does: plain DDP loops over sifted loaders,
each with losses of its own.
"""

from __future__ import annotations

import datetime
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from kd.sifting import Loss, RelativeProbabilisticSiftConfig, SiftingDataloader

EPOCHS = 5


class Stream(IterableDataset):
    """A dataset without a length, longer on higher ranks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        for i in range(self.count):
            yield torch.tensor([i / 100, 1.0]), i


class Uneven(Loss):
    """Through the DDP model, whose batch norm has buffers that DDP broadcasts; falling
    on rank 0, rising elsewhere.
    """

    def __init__(self, rank: int) -> None:
        self.sign = -1.0 if rank == 0 else rank * 7.0

    def loss(self, model, transformed_batch, original_batch=None):
        x, _ = original_batch
        return model(x).flatten() * 0.01 + self.sign * x[:, 0]


def data(count: int) -> TensorDataset:
    ids = torch.arange(count)
    return TensorDataset(torch.stack([ids / count, torch.ones(count)], 1), ids)


def loaders(rank: int, ranks: int) -> dict:
    """Equal shards, shards of different sizes, shards without a length."""
    sampler = DistributedSampler(data(103), ranks, rank, seed=1)
    return {
        "equal": DataLoader(data(103), batch_size=4, sampler=sampler),
        "uneven": DataLoader(data(31 + 9 * rank), batch_size=4, shuffle=True),
        "one sample more": DataLoader(
            data(34 + (rank > 0)), batch_size=4, shuffle=True
        ),
        "streams": DataLoader(Stream(40 + 11 * rank), batch_size=4),
    }


def train(loader: SiftingDataloader, model: nn.Module) -> list[int]:
    """Train and return the number of steps of each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lengths = []
    for _ in range(EPOCHS):
        steps = 0
        for x, _ in loader:
            delayed = loader.state_dict()["steps"] <= 12
            assert x.shape == (4, 2) or delayed, (
                x.shape
            )  # the delay passes a short last batch
            optimizer.zero_grad()
            (model(x).flatten() - x[:, 0]).square().mean().backward()
            optimizer.step()
            steps += 1
        lengths.append(steps)
    return lengths


def main(argv: list[str]) -> None:
    """Run every case and print one JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    facts = {}
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (
        calls.append(args) or all_reduce(*args, **kwargs)
    )  # DDP's own are not these
    for pick in ("fixed", "bernoulli"):
        for name, original in loaders(rank, ranks).items():
            torch.manual_seed(rank)
            model = DistributedDataParallel(
                nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
            )
            config = RelativeProbabilisticSiftConfig(
                0.8, 60, {"sift_config": {"sift_delay": 12}}
            )
            loader = SiftingDataloader(config, original, model, Uneven(rank), pick=pick)
            before = len(calls)
            lengths = train(loader, model)
            metrics = loader.metrics
            pending = loader.state_dict()["pending"]
            weight = model.module[1].weight.tolist()
            facts[f"{pick}, {name}"] = [
                lengths,
                metrics["num_orig_samples_seen"],
                0 if pending is None else len(pending[1]),
                weight,
                len(calls) - before,
            ]
    dist.barrier()
    print(json.dumps(facts))
    dist.destroy_process_group()
