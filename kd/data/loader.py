"""Load this rank's micro-batches of a plan in its order, in this process or in workers.

Also iterates over a split in batches, in this process.
"""

import atexit
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, default_collate
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from kd.core.contracts import Dataset
from kd.core.errors import DataError, KdError
from kd.core.host import BusyClock
from kd.core.types import Batch, Loading, Plan, Small
from kd.data.workers import (
    Watch,
    connection_error,
    serve_until_the_trainer_ends,
    sigterm_blocked,
    worker_error,
)

BATCH = 50
"""Images per forward. On a CPU the cost per image is constant from about 16 on; 50 of
224 pixels take 30 MB.
"""


class Request(NamedTuple):
    """A worker must load one micro-batch."""

    ids: list[int]
    weights: list[float]
    view: int
    small: bool = False
    full_size: bool = False  # load also at full size, for the teacher


@dataclass(frozen=True, slots=True)
class Share:
    """A share is this rank's part of each step of a plan."""

    batch_size: int  # images of a step, all ranks
    accumulate: int
    rank: int
    world_size: int

    @property
    def micro(self) -> int:
        return self.batch_size // (self.accumulate * self.world_size)

    def requests(
        self, plan: Plan, view: int, start: int, small: Small | None = None
    ) -> Iterator[Request]:
        """Yield a plan's micro-batches one by one.

        A plan as lists would take nine times its memory.
        """
        for step in range(start, len(plan.ids) // self.batch_size):
            for i in range(self.accumulate):
                first = step * self.batch_size
                first += (i * self.world_size + self.rank) * self.micro
                images = slice(first, first + self.micro)
                is_small = full_size = False
                if small is not None and step < small.steps:
                    is_small = True
                    full_size = bool(small.needs_full_size[images].any())
                # Plain lists: each tensor in a request would need a file in shared
                # memory.
                yield Request(
                    plan.ids[images].tolist(),
                    plan.weights[images].tolist(),
                    view,
                    is_small,
                    full_size,
                )


class LocalLoader:
    """This loader makes micro-batches here; see `kd.core.contracts.Loader`.

    docs/design.md says how a step is divided.
    """

    def __init__(
        self,
        dataset: Dataset,
        share: Share,
        workers: int,
        pin_memory: bool = False,
        max_skipped: float = 1.0,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Load from a dataset.

        Worker processes start with the first epoch; 0 workers: this process loads.

        `max_skipped`: largest share of undecodable images (one is always allowed);
        `timeout_seconds`: longest wait for a batch.
        """
        self.dataset = dataset
        self.share = share
        self.workers = workers
        self.max_skipped = max_skipped
        self.timeout_seconds = timeout_seconds
        # ids of images that could not be decoded, among those loaded so far
        self.unreadable: set[int] = set()
        self.loading = Loading()  # sums over all batches so far
        self._requests = _Requests()
        self._batches = DataLoader(
            Fetch(dataset),
            batch_size=None,
            sampler=self._requests,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            prefetch_factor=prefetched_batches(workers) if workers else None,
            worker_init_fn=serve_until_the_trainer_ends,
            # fork shares the listing's memory; workers use neither the device nor
            # torch's thread pool
            multiprocessing_context=(
                "fork" if workers and sys.platform == "linux" else None
            ),
        )

    def epoch(
        self, plan: Plan, view: int, start: int = 0, small: Small | None = None
    ) -> Iterator[Batch]:
        # Not a method of this loader: the DataLoader's iterator would keep it alive,
        # and its workers would never end.
        self._requests.make = partial(self.share.requests, plan, view, start, small)
        for batch in self._arriving_batches():
            if isinstance(batch, KdError):
                try:
                    raise batch
                finally:
                    # breaks a reference cycle through its traceback, which would keep
                    # the workers alive
                    del batch
            self.unreadable.update(batch.unreadable)
            self.loading = self.loading.plus(batch.loading)
            self._require_few_skipped()
            yield batch

    def _arriving_batches(self) -> Iterator[Batch | KdError]:
        """Yield batches as they arrive; raise a RunError if a worker dies or hangs."""
        if not self.workers:
            yield from self._batches
            return
        processes = weakref.WeakMethod(self.processes)
        forked = bool(self.processes())
        # its thread may outlive a dropped loader
        watch = Watch(lambda: (processes() or list)(), self.timeout_seconds)
        try:
            if forked:
                watch.start()
            with nullcontext() if forked else sigterm_blocked():
                batches = iter(self._batches)
            if not forked:
                # Runs at exit before torch's own handler, which waits 5 s for each
                # worker that fills pinned memory.
                atexit.register(
                    weakref.finalize(self, end_workers, batches, os.getpid())
                )
                watch.start()  # after the fork, which is safer with fewer threads
            for batch in batches:
                watch.waiting = False
                yield batch
                watch.number += 1
                watch.waiting = True
        except (RuntimeError, OSError, EOFError) as error:
            explained = (
                watch.error()
                or worker_error(error)
                or connection_error(error, self.processes())
            )
            if explained is None:
                raise
            self._abandon()
            raise explained from error
        finally:
            watch.close()

    def processes(self) -> list[BaseProcess]:
        """Return the worker processes; none before the first epoch.

        Torch has no public name for them.
        """
        return list(getattr(self._batches._iterator, "_workers", []))

    def _abandon(self) -> None:
        """Kill the remaining workers.

        Torch's signal handler must not raise again for that.
        """
        iterator = self._batches._iterator
        processes = self.processes()
        if iterator is None:
            return
        with suppress(RuntimeError, ValueError):
            _remove_worker_pids(id(iterator))
        for process in processes:
            process.kill()
        for process in processes:
            process.join(5)
        iterator._shutdown = True  # type: ignore[attr-defined]  # else it could wait for a lock that a worker held
        self._batches._iterator = None

    def batch_bytes(self, size: int) -> int:
        """Return an estimate of the shared memory of batches, bytes.

        This rank's batches have `size` pixels per side.
        """
        if not self.workers:
            return 0
        # The loop holds two more batches than the workers prefetch. Each tensor takes
        # whole pages.
        batch = self.share.micro * (3 * size**2 + 36) + 7 * mmap.PAGESIZE
        return (self.workers * prefetched_batches(self.workers) + 2) * batch

    def _require_few_skipped(self) -> None:
        images = len(self.dataset)
        allowed_number = most_skipped(self.max_skipped, images)
        if len(self.unreadable) > allowed_number:
            ids = ", ".join(str(id) for id in sorted(self.unreadable)[:5])
            wrong = (
                f"{len(self.unreadable)} of {images} images could not be decoded, the"
                f" first with the ids {ids}"
            )
            allowed = (
                f"At most {allowed_number} (a share of {self.max_skipped:g}, and always"
                " one)"
            )
            remedy = (
                "Look at the images with data.on_corrupt=error, which names them, or"
                " raise data.max_skipped"
            )
            raise DataError("data.max_skipped", wrong, allowed, remedy)


def prefetched_batches(workers: int) -> int:
    """Return how many micro-batches each worker prefetches."""
    # 15 workers times 4 of 256 images of 224 px were 2.3 GB of shared memory, and on a
    # GPU as much of pinned memory.
    return 4 if workers <= 4 else 2


def most_skipped(share: float, images: int) -> int:
    """Return how many undecodable images of a split may be skipped, at least one."""
    return max(1, int(share * images))


def end_workers(batches: Any, process: int) -> None:
    """Tell torch's workers to end before their queues are garbage-collected.

    Torch would wait 5 s for each.
    """
    if os.getpid() == process:  # a worker inherits the loader
        # torch's signal handler raises it if another loader's worker was killed
        with suppress(RuntimeError):
            batches._shutdown_workers()


class _Requests(Sampler[Request]):
    """The sampler yields the requests of the current epoch.

    The DataLoader keeps its workers and iterates over it again each epoch.
    """

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Request]] = lambda: iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.make()


class Fetch(TorchDataset[Batch | KdError]):
    """A worker process runs this dataset of micro-batches."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.small = getattr(dataset, "small", None)

    def _spent(self) -> Loading:
        spent = getattr(self.dataset, "spent", Loading())
        return spent.plus(getattr(self.small, "spent", Loading()))

    def __getitem__(self, request: Request) -> Batch | KdError:
        busy = BusyClock()
        begin = time.perf_counter()
        before = self._spent()
        dataset = self.dataset
        if request.small and self.small is not None:
            dataset = self.small
        full_size = None
        try:
            samples = [dataset.load(id, request.view) for id in request.ids]
            if request.full_size:
                full_size = torch.stack(
                    [self.dataset.load(id, request.view).pixels for id in request.ids]
                )
        # torch would wrap it into a RuntimeError with the worker's traceback as text
        except KdError as error:
            return error
        readable = torch.tensor([sample.readable for sample in samples])
        # A worker builds its batch directly in shared memory.
        image = default_collate([sample.pixels for sample in samples])
        loading = self._spent().minus(before)
        loading = loading._replace(seconds=time.perf_counter() - begin, busy=busy())
        return Batch(
            ids=torch.tensor(request.ids),
            image=image,
            label=torch.from_numpy(np.array([sample.label for sample in samples])),
            partner_label=torch.from_numpy(
                np.array([sample.partner_label for sample in samples])
            ),
            lam=torch.tensor([sample.lam for sample in samples], dtype=torch.float32),
            weight=torch.tensor(request.weights, dtype=torch.float32) * readable,
            view=request.view,
            crc=tuple(sample.crc for sample in samples),
            unreadable=tuple(
                id
                for id, sample in zip(request.ids, samples, strict=True)
                if not sample.readable
            ),
            loading=loading,
            small=request.small,
            full_size=full_size,
        )


def evaluation_plan(num_images: int, batch_size: int) -> Plan:
    """Return all images in order, padded to a multiple of `batch_size`.

    The padding is image 0 at weight 0.
    """
    padding = -num_images % batch_size
    ids = torch.cat([torch.arange(num_images), torch.zeros(padding, dtype=torch.int64)])
    weights = torch.cat([torch.ones(num_images), torch.zeros(padding)])
    return Plan(ids=ids, weights=weights)


def batches_of(
    dataset: Dataset, ids: Sequence[int], size: int = BATCH
) -> Iterator[Batch]:
    """Yield the readable ones of the images `ids`, in batches of up to `size`.

    The batches are on the CPU.
    """
    for first in range(0, len(ids), size):
        samples = [(id, dataset.load(id, 0)) for id in ids[first : first + size]]
        samples = [(id, sample) for id, sample in samples if sample.readable]
        if samples:
            labels = torch.from_numpy(np.array([sample.label for _, sample in samples]))
            pixels = torch.stack([sample.pixels for _, sample in samples])
            batch = Batch.of(pixels, labels, torch.tensor([id for id, _ in samples]))
            yield replace(batch, crc=tuple(sample.crc for _, sample in samples))
