"""From a plan to this rank's micro-batches, in this process or in workers. The order is the plan's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from kd.contracts import Dataset
from kd.data.worker import serve_until_the_trainer_ends
from kd.errors import KdError
from kd.types import Batch, Plan


class Request(NamedTuple):
    """What a worker needs to make one micro-batch."""

    ids: list[int]
    weights: list[float]
    view: int


class LocalLoader:
    """Load micro-batches on this machine. See `kd.contracts.Loader`.

    Step s of a plan is `plan.ids[s * batch_size : (s + 1) * batch_size]`, cut into accumulate x world micro-batches;
    rank r takes number r of every `world`. So a step is the same set of images on any number of ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        accumulate: int,
        rank: int,
        world_size: int,
        workers: int,
        pin_memory: bool = False,
        ahead: int = 4,
    ) -> None:
        """Put a loader before a dataset; its workers start with the first epoch.

        Args:
            dataset: views, pure.
            batch_size: images of a step, all ranks.
            accumulate: micro-batches of a step on one rank.
            rank: of this process.
            world_size: ranks.
            workers: processes; 0: this one.
            pin_memory: for copies that do not wait.
            ahead: micro-batches that each worker makes before they are asked for.
        """
        self.batch_size, self.accumulate, self.rank, self.world_size = batch_size, accumulate, rank, world_size
        self.dataset, self.workers = dataset, workers
        self.unreadable: set[int] = set()
        """Ids of images that could not be decoded, as far as they were asked for."""
        self._requests = _Requests()
        self._batches = DataLoader(
            _Fetch(dataset),
            batch_size=None,
            sampler=self._requests,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            prefetch_factor=ahead if workers else None,
            worker_init_fn=serve_until_the_trainer_ends,
            # fork keeps the decoded listing shared; workers touch neither the device nor torch's thread pool
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        )

    def epoch(self, plan: Plan, view: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's micro-batches of the steps from `start` on."""
        micro = self.batch_size // (self.accumulate * self.world_size)
        # Plain lists: a tensor in a request would travel to the worker through shared memory, one file each.
        ids, weights = plan.ids.tolist(), plan.weights.tolist()
        requests = []
        for step in range(start, len(ids) // self.batch_size):
            for i in range(self.accumulate):
                first = step * self.batch_size + (i * self.world_size + self.rank) * micro
                requests.append(Request(ids[first : first + micro], weights[first : first + micro], view))
        self._requests.now = requests
        for batch in self._batches:
            if isinstance(batch, KdError):
                try:
                    raise batch
                finally:
                    del batch  # its traceback holds this frame: in a circle the workers would outlive the loader
            self.unreadable.update(batch.unreadable)
            yield batch


class _Requests(Sampler[Request]):
    """The requests of the epoch at hand; the DataLoader asks anew each epoch and keeps its workers."""

    def __init__(self) -> None:
        self.now: Sequence[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class _Fetch(TorchDataset[Batch | KdError]):
    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Request) -> Batch | KdError:
        try:
            samples = [self.dataset.load(id, request.view) for id in request.ids]
        except KdError as error:  # torch would turn it into a RuntimeError with the worker's traceback as its text
            return error
        readable = torch.tensor([sample.readable for sample in samples])
        return Batch(
            ids=torch.tensor(request.ids),
            image=torch.stack([sample.pixels for sample in samples]),
            label=torch.tensor([sample.label for sample in samples]),
            partner_label=torch.tensor([sample.partner_label for sample in samples]),
            lam=torch.tensor([sample.lam for sample in samples], dtype=torch.float32),
            weight=torch.tensor(request.weights, dtype=torch.float32) * readable,
            view=request.view,
            unreadable=tuple(id for id, sample in zip(request.ids, samples, strict=True) if not sample.readable),
        )


def evaluation_plan(num_images: int, batch_size: int) -> Plan:
    """Return all images in order, padded with image 0 at weight 0 to a multiple of `batch_size`."""
    padding = -num_images % batch_size
    ids = torch.cat([torch.arange(num_images), torch.zeros(padding, dtype=torch.int64)])
    weights = torch.cat([torch.ones(num_images), torch.zeros(padding)])
    return Plan(ids=ids, weights=weights)
