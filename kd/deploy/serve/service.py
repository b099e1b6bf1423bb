"""Admission control and worker threads, between the event loop and the model.

The event loop only moves bytes. All CPU work of a request is one job on one of `slots`
threads, so there are never more jobs than cores (measured in docs/deploy.md).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from kd.deploy.serve.bodies import decompress, images, parse_top
from kd.deploy.serve.cascade import load_pair
from kd.deploy.serve.decoding import check_together
from kd.deploy.serve.limits import Limits, Problem, busy, hung_up, no_memory
from kd.deploy.serve.metrics import Metrics
from kd.deploy.serve.model import Description, LoadedGraph, Prediction
from kd.deploy.serve.responses import MODEL, SECOND
from kd.deploy.serve.self_check import SelfCheckError
from kd.deploy.shift import ShiftWatch

Result = TypeVar("Result")
log = logging.getLogger("kd.serve")


class Service:
    """A model, its worker threads, and the limit on concurrent requests.

    `second`: see `describe_pair`.
    """

    def __init__(
        self,
        description: Description,
        limits: Limits,
        slots: int,
        threads: int,
        second: Description | None = None,
    ) -> None:
        self.description = description
        self.limits = limits
        self.slots = slots
        self.threads = threads
        self.second = second
        passed_on = description.passed_on if second else None
        self.metrics = Metrics(description.name, description.version, self, passed_on)
        self.watch: ShiftWatch | None = None
        if description.reference:
            self.watch = ShiftWatch(description.reference)
            self.metrics.watch_shift(self.watch)
        self.model: LoadedGraph | None = None
        # reason for refusing requests while `model` is None
        self.reason = "The model is still being loaded."
        self.draining = False
        self.in_flight = 0  # jobs in progress or waiting
        self.receiving = 0  # requests whose bodies arrive
        self.buffered = 0  # bytes of bodies in memory
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="kd-slot")

    def load(self) -> None:
        """Load the model, warm up every thread, and run the self-check; this blocks."""
        model = load_pair(self.description, self.second, self.threads, self.slots)
        list(self._pool.map(model.warm_up, [3] * self.slots))  # waits for all
        try:
            passed = model.check_itself(self._pool.map)
        except SelfCheckError as error:
            self.metrics.self_check(False)
            self.reason = f"{error}"
            log.error("not ready: %s", error)
            return
        if passed is not None:
            self.metrics.self_check(passed)
        self.model = model
        if not self.draining:
            log.info("ready")

    @property
    def ready(self) -> bool:
        """Whether a load balancer should send requests."""
        return self.model is not None and not self.draining

    @property
    def in_progress(self) -> int:
        """Requests that were accepted and not answered yet."""
        return self.receiving + self.in_flight

    def close(self) -> None:
        """Stop the threads and drop jobs that have not started."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def admission_error(self) -> Problem | None:
        """Return a 503 if the limit of requests is reached, else None."""
        if self.model is None:
            return busy(self.reason)
        if self.in_flight >= self.limits.max_in_flight:
            limit = self.limits.max_in_flight
            return busy(f"{limit} requests are in progress already.")
        return None

    async def run(
        self, job: Callable[[LoadedGraph], Result], disconnected: Callable[[], Any]
    ) -> Result:
        """Run a job (all CPU work of a request) on the next free thread.

        Raises the job's Problem, 503 if there are too many or it is late, and 400 if
        the client left. A request that times out counts as in flight until its job is
        done. `disconnected()` completes when the client has gone.
        """
        if error := self.admission_error():
            raise error
        self.in_flight += 1
        loop = asyncio.get_running_loop()
        future = self._pool.submit(self._timed, job, time.perf_counter())

        def release(_: object) -> None:
            # RuntimeError: the server stopped before this job finished, and the event
            # loop is closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._release)

        future.add_done_callback(release)
        answer = asyncio.wrap_future(future)
        watch = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait(
                {answer, watch},
                timeout=self.limits.deadline,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer.done():
                result = answer.result()
                if isinstance(result, Problem):
                    raise result
                return result
            future.cancel()  # works only if the job has not started
            if watch.done():
                raise hung_up()
            raise busy(f"No response within {self.limits.deadline:g} seconds.")
        finally:
            for task in (watch, answer):
                task.cancel()

    def _timed(
        self, job: Callable[[LoadedGraph], Result], submitted: float
    ) -> Result | Problem:
        self.metrics.stage("wait", time.perf_counter() - submitted)
        assert self.model is not None
        try:
            return job(self.model)
        except Problem as problem:
            return problem.copy()
        except MemoryError:
            return no_memory()

    def _release(self) -> None:
        self.in_flight -= 1

    def classify(
        self,
        model: LoadedGraph,
        kind: str,
        header: str,
        body: bytes,
        gzip: bool = False,
        tops: Sequence[str] = (),
    ) -> tuple[list[Prediction], str]:
        """Return the predictions for a body's images, and a summary for the log.

        `tops`: the values of `top` in the query.
        """
        start = time.perf_counter()
        if gzip:
            body = decompress(body, self.limits.max_body)
        sent = images(kind, header, body, self.limits.max_images)
        top = parse_top([*tops, sent.top] if sent.top else tops)
        count = len(sent.files)
        opened = []
        for i, data in enumerate(sent.files):
            with sent.of(i):
                opened.append(model.open(data, self.limits))
        check_together(opened, self.limits)
        summary = opened[0].summary if count == 1 else f"{count} images"
        predictions = []
        # One at a time: on a CPU a batch is no faster per image and takes more memory.
        for i in range(count):
            with sent.of(i):
                predictions.append(model.predict(opened.pop(0), top))
        decoding = sum(prediction.decode_seconds for prediction in predictions)
        inference = time.perf_counter() - start - decoding
        self.metrics.stage("decode", decoding)
        self.metrics.stage("infer", inference)
        passed_on = sum(
            prediction.row.get(MODEL) == SECOND for prediction in predictions
        )
        self.metrics.images(count, passed_on)
        if passed_on:
            summary += f" passed_on={passed_on}"
        summary += f" decode={1000 * decoding:.1f}ms infer={1000 * inference:.1f}ms"
        return predictions, summary
