"""Decoders on the hosts of a Ray cluster: the actor, and the pool that monitors actors
and assigns calls.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from kd.cluster.ray_cluster import check_versions, connect, decoding_versions
from kd.core.contracts import Dataset
from kd.core.errors import KdError
from kd.core.types import TENSORS, Batch
from kd.data.loader import Fetch, Request

WHERE = "data.loader"
PACKAGES = ("torch", "timm")  # packages that transform an image, beside the decoders
AHEAD = 2  # pending calls per decoder, over all ranks

log = logging.getLogger("kd")


class Decoder:
    """Class of the Ray actors: makes parts of batches, one at a time, from its pool's
    datasets.
    """

    def __init__(self, datasets: Sequence[Any], folder: str) -> None:
        """Start in the trainer's working folder if it exists here. `datasets`: one
        reference, kept by rank 0.
        """
        torch.set_num_threads(1)
        if os.path.isdir(folder):
            os.chdir(folder)
        self._fetch = [Fetch(dataset) for dataset in ray.get(datasets[0])]

    def ping(self) -> tuple[str, str, dict[str, str]]:
        """Return the id and the address of this host, and the versions that pixels
        depend on.
        """
        return (
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            decoding_versions(*PACKAGES),
        )

    def load(self, dataset: int, request: Request) -> dict[str, Any] | KdError:
        return pack(self._fetch[dataset][request])


def pack(batch: Batch | KdError) -> dict[str, Any] | KdError:
    """Return a batch as arrays, which Ray moves without pickling; return an error as a
    value.
    """
    if isinstance(batch, KdError):
        return batch
    arrays = {name: getattr(batch, name).numpy() for name in TENSORS}
    return {
        **arrays,
        "view": batch.view,
        "unreadable": batch.unreadable,
        "crc": batch.crc,
    }


def unpack(parts: Sequence[dict[str, Any]]) -> Batch:
    """Join the parts of a micro-batch in new memory; their arrays may be read-only."""
    fields: dict[str, Any] = {
        n: torch.from_numpy(np.concatenate([part[n] for part in parts]))
        for n in TENSORS
    }
    fields |= {
        n: tuple(value for part in parts for value in part[n])
        for n in ("unreadable", "crc")
    }
    return Batch(**fields, view=parts[0]["view"])


@dataclass(eq=False)
class RemoteDecoder:
    """One decoder as this rank sees it."""

    name: str
    actor: Any
    probe: Any = None  # its pending ping; None: it is trusted
    probed: float = 0.0
    calls: int = 0  # its pending calls from this rank
    host: str = ""  # Ray's id of its host; "": it has never responded
    address: str = ""

    def ping(self) -> None:
        """Trust it again once its ping has returned."""
        self.probe, self.probed = self.actor.ping.remote(), time.monotonic()


class Unanswered(Exception):
    """A decoder's call failed or timed out; the text says which."""


class Call(NamedTuple):
    """A request and its decoder; no decoder: this process."""

    request: Request
    slot: RemoteDecoder | None = None
    ref: Any = None


_owned: list[
    Pool
] = []  # the newest pool of this process; the next pool, after a teacher's fit, needs its CPUs


class Pool:
    """The decoders of a cluster, one per CPU, shared by all ranks. Rank 0 starts them;
    they end with its process.

    A decoder gets calls once it has responded to a ping; a new pool waits for all of
    them. If it fails or misses a deadline, all decoders of its host are pinged, and get
    calls again once they respond.
    """

    def __init__(
        self, datasets: Sequence[Dataset], rank: int, token: int, deadline: float
    ) -> None:
        """Connect to the cluster of RAY_ADDRESS, rank 0 first; all ranks have the same
        `token`.
        """
        connect(WHERE)
        self.deadline, self.slots = deadline, list[RemoteDecoder]()
        self._prefix, self._turn, self._lock = f"{token}-", rank, threading.Lock()
        self._datasets = ray.put(list(datasets)) if rank == 0 else None
        self._silent, self._dropped = set[str](), set[str]()
        if rank == 0:
            while _owned:
                _owned.pop().close()
            _owned.append(self)
        self.grow()
        probes = [slot.probe for slot in self.slots]
        late = (
            ray.wait(probes, num_returns=len(probes), timeout=deadline)[1]
            if probes
            else []
        )
        if late or not probes:
            missing = (
                f"{len(late)} of {len(probes)} decoders have not responded for"
                f" {deadline:g} seconds"
            )
            log.warning(
                "%s: %s; until they do, the trainers make their images", WHERE, missing
            )

    def close(self) -> None:
        """End the decoders; this process then makes the batches itself."""
        with self._lock:
            self._datasets = None
            while self.slots:
                ray.kill(self.slots.pop().actor)

    def grow(self) -> None:
        """Start a decoder on each CPU without one (rank 0), or find those that rank 0
        started.
        """
        with self._lock:
            if self._datasets is not None:
                names = [
                    f"{self._prefix}{number}"
                    for number in range(int(ray.cluster_resources().get("CPU", 0)))
                ]
            else:
                names = [
                    name
                    for name in ray.util.list_named_actors()
                    if name.startswith(self._prefix)
                ]
            for name in sorted(
                set(names) - {slot.name for slot in self.slots} - self._dropped
            ):
                with suppress(ValueError):  # it has just ended
                    self.slots.append(RemoteDecoder(name, self._actor(name)))
                    self.slots[-1].ping()

    def _actor(self, name: str) -> Any:
        if self._datasets is None:
            return ray.get_actor(name)
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": -1}
        return (
            ray.remote(Decoder)
            .options(name=name, **options)
            .remote([self._datasets], os.getcwd())
        )

    def trusted(self) -> list[RemoteDecoder]:
        waiting = [slot for slot in self.slots if slot.probe is not None]
        probes = [slot.probe for slot in waiting]
        answered = (
            ray.wait(probes, num_returns=len(probes), timeout=0)[0] if probes else []
        )
        for slot in waiting:
            if slot.probe in answered:
                self._answered(slot)
            elif time.monotonic() - slot.probed > self.deadline:
                slot.ping()  # the first one may be lost with its host
        return [slot for slot in self.slots if slot.probe is None]

    def _answered(self, slot: RemoteDecoder) -> None:
        try:
            slot.host, slot.address, theirs = ray.get(slot.probe)
        except ActorDiedError as error:
            self.slots.remove(slot)
            log.warning(
                "%s: a decoder has ended for good (%s)",
                WHERE,
                str(error).strip().splitlines()[-1],
            )
            return
        except RayError:  # it is being started again
            if time.monotonic() - slot.probed > 1.0:
                slot.ping()
            return
        check_versions(WHERE, slot.address, theirs, decoding_versions(*PACKAGES))
        slot.probe = None
        if slot.address in self._silent:
            self._silent.remove(slot.address)
            log.warning("%s: the host %s responds again", WHERE, slot.address)

    def send(self, dataset: int, request: Request) -> Call:
        """Give a request to the trusted decoder with the fewest calls, else to this
        process.
        """
        with self._lock:
            trusted = self.trusted()
            if not trusted:
                return Call(request)
            self._turn += (
                1  # ties are broken in turn, and each rank begins at another decoder
            )
            slot = min(
                enumerate(trusted),
                key=lambda pair: (pair[1].calls, (pair[0] - self._turn) % len(trusted)),
            )[1]
            slot.calls += 1
            return Call(request, slot, slot.actor.load.remote(dataset, request))

    def room(self, calls: int, ranks: int) -> int:
        """Return how many more calls a rank may make: one at a time if it must process
        them itself.
        """
        with self._lock:
            return max(0, max(1, AHEAD * len(self.trusted()) // ranks) - calls)

    def get(self, call: Call) -> Any:
        """Return a decoder's result; `Unanswered` if it fails or is late."""
        try:
            return ray.get(call.ref, timeout=self.deadline)
        except GetTimeoutError as error:
            raise Unanswered(
                f"has not responded for {self.deadline:g} seconds"
            ) from error
        except RayError as error:
            raise Unanswered(f"has failed ({type(error).__name__})") from error
        finally:
            self.forget([call])

    def forget(self, calls: Iterable[Call]) -> None:
        with self._lock:
            for call in calls:
                if call.slot is not None:
                    call.slot.calls -= 1

    def suspect(self, slot: RemoteDecoder, why: str) -> list[RemoteDecoder]:
        """Distrust all decoders of a host until they respond to a ping; return them."""
        with self._lock:
            suspects = [
                other
                for other in self.slots
                if other is slot or other.host == slot.host
            ]
            for other in suspects:
                other.ping()
            if slot.address not in self._silent:
                self._silent.add(slot.address)
                log.warning(
                    "%s: the host %s %s; its images are made elsewhere",
                    WHERE,
                    slot.address,
                    why,
                )
            return suspects

    def drop(self, slot: RemoteDecoder, why: str) -> list[RemoteDecoder]:
        """Stop giving calls to a host's decoders; return them."""
        with self._lock:
            dropped = [other for other in self.slots if other.host == slot.host]
            for other in dropped:
                self.slots.remove(other)
                self._dropped.add(other.name)
            if dropped:
                log.warning(
                    "%s: the host %s %s; it gets no more calls",
                    WHERE,
                    slot.address,
                    why,
                )
            return dropped

    def again(self, dataset: int, call: Call) -> Call:
        """Send a suspected decoder's call to another decoder, unless its result has
        arrived.
        """
        if ray.wait([call.ref], timeout=0)[0]:
            return call
        self.forget([call])
        return self.send(dataset, call.request)
