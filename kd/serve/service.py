"""Between the event loop and the model: who is let in, who waits, and which thread does the work.

The loop only moves bytes. Everything that costs CPU (parsing, decoding, cropping, the graph) is one job on one of
`slots` threads, so that never more jobs run than there are cores: a decoder cannot take the core from a graph that is
half done, and an image does not travel between threads. See docs/design.md for the measurement behind `slots`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from kd.serve import bodies
from kd.serve.images import decode, open_all, warm_up
from kd.serve.limits import Limits
from kd.serve.metrics import Metrics
from kd.serve.model import Description, Model, load
from kd.serve.problems import CLIENT_GONE, Problem, busy, no_memory

Result = TypeVar("Result")


class Service:
    """A model, its threads and its door."""

    def __init__(self, told: Description, limits: Limits, slots: int, threads: int) -> None:
        self.told, self.limits, self.slots, self.threads = told, limits, slots, threads
        self.metrics = Metrics(told.name, told.version)
        self.model: Model | None = None
        self.draining = False
        self.in_flight = 0
        self.buffered = 0
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="kd-slot")

    def load(self) -> None:
        """Load the model and warm every thread up; blocks.

        Raises:
            ModelError: the graph is not what was exported.
            MissingExtra: its runtime is not installed.
        """
        model = load(self.told, self.threads, self.slots)
        warm_up(model.size, model.crop, self.limits)
        for done in [self._pool.submit(model.warm_up) for _ in range(self.slots)]:
            done.result()
        self.model = model

    @property
    def ready(self) -> bool:
        """Whether a load balancer should send requests."""
        return self.model is not None and not self.draining

    def close(self) -> None:
        """End the threads; what still waits is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def closed(self) -> Problem | None:
        """Return why no request is let in now, or None."""
        if self.model is None:
            return busy("The model is still being loaded.")
        if self.in_flight >= self.limits.max_in_flight:
            return busy(f"{self.limits.max_in_flight} requests are being answered already.")
        return None

    async def run(self, job: Callable[[Model], Result], gone: Callable[[], Any]) -> Result:
        """Run a job on the next free thread.

        Args:
            job: everything that costs CPU.
            gone: an awaitable that ends when the client has hung up.

        Raises:
            Problem: what the job raises; 503 when the door is full or the deadline passes; 499 when the client is gone.
        """
        refusal = self.closed()
        if refusal or self.model is None:
            raise refusal or busy("The model is still being loaded.")
        model, submitted = self.model, time.perf_counter()

        def timed() -> Result | Problem:
            self.metrics.stage("wait", time.perf_counter() - submitted)
            try:
                return job(model)
            except Problem as problem:
                # Without what it was raised from: those frames hold the body, in a circle that only the collector ends.
                return Problem(problem.status, problem.detail, problem.headers)
            except MemoryError:
                return no_memory()

        self.in_flight += 1
        loop = asyncio.get_running_loop()
        future: Future[Result | Problem] = self._pool.submit(timed)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended before this job
                loop.call_soon_threadsafe(self._left)

        future.add_done_callback(ended)
        answer = asyncio.ensure_future(asyncio.wrap_future(future))
        watch = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({answer, watch}, timeout=self.limits.deadline, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                result = answer.result()
                if isinstance(result, Problem):
                    raise result
                return result
            future.cancel()  # only if it has not begun; the door counts it until it ends
            if watch.done():
                raise Problem(CLIENT_GONE, "The client hung up.")
            raise busy(f"No answer within {self.limits.deadline:g} seconds.")
        finally:
            for task in (watch, answer):
                task.cancel()

    def _left(self) -> None:
        self.in_flight -= 1

    def classify(self, model: Model, kind: str, header: str, body: bytes) -> tuple[np.ndarray, str]:
        """Return the logits [B, C] of the images in a body, and what the log says about them; blocks.

        Raises:
            Problem: 400, 413, 415 or 422.
        """
        start = time.perf_counter()
        files = bodies.images(kind, header, body, self.limits.max_images)
        opened = open_all(files, self.limits)
        rows, told, decoding = [], [], 0.0
        while opened:  # one by one: a batch costs as much an image, and holds all of them in memory
            before = time.perf_counter()
            picture = decode(opened.pop(0), model.size, model.crop)
            decoding += time.perf_counter() - before
            rows.append(model.engine(picture.pixels[None]))
            told.append(picture.told)
        whole = time.perf_counter() - start
        self.metrics.stage("decode", decoding)
        self.metrics.stage("infer", whole - decoding)
        self.metrics.images(len(files))
        summary = told[0] if len(told) == 1 else f"{len(told)} images"
        return np.concatenate(rows), f"{summary} decode={1000 * decoding:.1f}ms infer={1000 * (whole - decoding):.1f}ms"
