"""Load batches from all hosts of a Ray cluster, bit-identical to the local loader's.

`data.loader: ray`. Ray places the decoders and restarts them (`kd.cluster.decoders`).
An image is a pure function of (seed, view, id), so a call may be repeated on any host.
Each rank has its own queue of calls, and waits for a call at most until the deadline.
"""

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, pairwise
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from kd.cluster.decoders import (
    WHERE,
    Call,
    Pool,
    RemoteDecoder,
    Unanswered,
    pack,
    unpack,
)
from kd.core.contracts import Dataset
from kd.core.errors import KdError, RunError
from kd.core.types import TENSORS, Batch
from kd.data.loader import Fetch, LocalLoader, Request, Share

# most images per call: enough to amortize a call, few enough to spread over decoders
CHUNK = 32

T = TypeVar("T")


class RemoteLoader(LocalLoader):
    """Load micro-batches from a pool of decoders. See `kd.core.contracts.Loader`."""

    def __init__(
        self,
        pool: Pool,
        number: int,
        dataset: Dataset,
        share: Share,
        pin_memory: bool = False,
        max_skipped: float = 1.0,
    ) -> None:
        """Load dataset `number` of a pool; other arguments as in `LocalLoader`."""
        super().__init__(dataset, share, 0, max_skipped=max_skipped)
        self.pool = pool
        self.number = number
        self.pin_memory = pin_memory
        self.workers = max(1, len(pool.slots) // share.world_size)
        self._compared = set[str]()  # hosts whose pixels were compared in this pass
        self.made_here = 0  # images that this process made itself
        self._fetch = Fetch(dataset)

    @override
    def _arriving_batches(self) -> Iterator[Batch | KdError]:
        self.pool.grow()
        self._compared.clear()
        yield from prefetch(self._decoded_batches())

    def _decoded_batches(self) -> Generator[Batch | KdError, None, None]:
        """Yield the batches of the current requests, with several calls pending."""
        waiting = chain.from_iterable(map(split_request, self._requests))
        calls: deque[Call] = deque()
        made_before = self.made_here
        images = 0
        try:
            for request in self._requests:
                chunks: list[dict[str, Any]] = []
                for _ in split_request(request):
                    free = self.pool.num_free(len(calls), self.share.world_size)
                    for small_request in islice(waiting, free):
                        calls.append(self.pool.send(self.number, small_request))
                    chunk = self._result(calls.popleft(), calls)
                    if isinstance(chunk, KdError):
                        yield chunk
                        return
                    chunks.append(chunk)
                batch = unpack(chunks)
                images += len(batch.ids)
                yield batch.pin_memory() if self.pin_memory else batch
            if images:
                self.pool.report_share((self.made_here - made_before) / images)
        finally:
            self.pool.forget(calls)

    def _result(self, call: Call, pending: deque[Call]) -> dict[str, Any] | KdError:
        """Return a decoder's result, or this process's if it fails or is late."""
        if call.slot is None:
            return self._decode_here(call.request)
        try:
            answer = self.pool.get(call)
            if not isinstance(answer, KdError):
                return self._pixel_error(call.slot, call.request, answer) or answer
        except Unanswered as error:
            self._reassign(self.pool.suspect(call.slot, str(error)), pending)
            return self._decode_here(call.request)
        # An error counts only if this process gets it too: the other host may lack a
        # file.
        here = self._decode_here(call.request)
        if not isinstance(here, KdError):
            reason = f"cannot read what this one can ({answer})"
            self._reassign(self.pool.drop(call.slot, reason), pending)
        return here

    def _pixel_error(
        self, slot: RemoteDecoder, request: Request, answer: dict[str, Any]
    ) -> RunError | None:
        """Compare each host's first image in a pass with this process's."""
        # the host's copy of the data may differ
        if slot.address in self._compared:
            return None
        self._compared.add(slot.address)
        first = Request(request.ids[:1], request.weights[:1], request.view)
        here = pack(self._fetch[first])
        if isinstance(here, KdError):
            return None
        if all(np.array_equal(here[name], answer[name][:1]) for name in TENSORS):
            return None
        wrong = (
            f"the host {slot.address} makes other pixels of image {request.ids[0]} than"
            " this one"
        )
        return RunError(
            WHERE,
            wrong,
            "The same data on all hosts",
            "Copy it there again, or set data.loader=local",
        )

    def _reassign(
        self, suspects: Sequence[RemoteDecoder], pending: deque[Call]
    ) -> None:
        for i, call in enumerate(pending):
            if call.slot in suspects:
                pending[i] = self.pool.resend(self.number, call)

    def _decode_here(self, request: Request) -> dict[str, Any] | KdError:
        self.made_here += len(request.ids)
        return pack(self._fetch[request])


def split_request(request: Request) -> list[Request]:
    """Cut a request into calls of nearly equal size."""
    count = math.ceil(len(request.ids) / CHUNK)
    cuts = [len(request.ids) * i // count for i in range(count + 1)]
    return [
        Request(request.ids[begin:end], request.weights[begin:end], request.view)
        for begin, end in pairwise(cuts)
    ]


def prefetch(items: Generator[T, None, None]) -> Iterator[T]:
    """Yield items made by a thread, two in advance; its errors are raised here."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="kd-ahead")
    ahead = deque(pool.submit(next, items, None) for _ in range(2))
    try:
        while (item := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(next, items, None))
            yield item
    finally:
        for future in ahead:
            future.cancel()
        pool.submit(items.close)
        pool.shutdown(wait=False)
