"""Run decoders on a Ray cluster, and assign calls to them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from kd.cluster.ray_cluster import check_versions, connect, decoding_versions
from kd.core.contracts import Dataset
from kd.core.errors import KdError
from kd.core.text import percent
from kd.core.types import TENSORS, Batch
from kd.data.loader import Fetch, Request

WHERE = "data.loader"
PACKAGES = ("torch", "timm")  # packages that transform an image, beside the decoders
AHEAD = 2  # pending calls per decoder, over all ranks
# seconds that a trainer waits for the first decoder: it imports torch and timm, which
# took 18 s where two cores had nine processes to run
START_SECONDS = 120.0
# share of a pass's images above which a line says that rank 0 made them: a single late
# call of a pass of a thousand images is less
NOTABLE_SHARE = 0.1

log = logging.getLogger("kd")


class Decoder:
    """Make parts of batches from the pool's datasets, one at a time, as a Ray actor."""

    def __init__(self, datasets: Sequence[Any], folder: str) -> None:
        """Start in the trainer's working folder if it exists here."""
        # `datasets` is one reference, kept by rank 0
        torch.set_num_threads(1)
        if os.path.isdir(folder):
            os.chdir(folder)
        self._fetch = [Fetch(dataset) for dataset in ray.get(datasets[0])]

    def ping(self) -> tuple[str, str, dict[str, str]]:
        """Return this host's id and address, and the versions that pixels depend on."""
        return (
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            decoding_versions(*PACKAGES),
        )

    def load(self, dataset: int, request: Request) -> dict[str, Any] | KdError:
        return pack(self._fetch[dataset][request])


def pack(batch: Batch | KdError) -> dict[str, Any] | KdError:
    """Return a batch as arrays, which Ray moves without pickling, or its error."""
    if isinstance(batch, KdError):
        return batch
    fields = ("view", "unreadable", "crc")
    return {
        **{name: getattr(batch, name).numpy() for name in TENSORS},
        **{name: getattr(batch, name) for name in fields},
    }


def unpack(chunks: Sequence[dict[str, Any]]) -> Batch:
    """Join the chunks of a micro-batch in new memory; their arrays may be read-only."""
    fields: dict[str, Any] = {"view": chunks[0]["view"]}
    for name in TENSORS:
        arrays = [chunk[name] for chunk in chunks]
        fields[name] = torch.from_numpy(np.concatenate(arrays))
    for name in ("unreadable", "crc"):
        fields[name] = tuple(chain.from_iterable(chunk[name] for chunk in chunks))
    return Batch(**fields)


@dataclass(eq=False)
class RemoteDecoder:
    """Hold what this rank knows of one decoder."""

    name: str
    actor: Any
    probe: Any = None  # its pending ping; None: it is trusted
    probed: float = 0.0
    calls: int = 0  # its pending calls from this rank
    host: str = ""  # Ray's id of its host; "": it has never responded
    address: str = ""

    def ping(self) -> None:
        """Trust it again once its ping has returned."""
        self.probe = self.actor.ping.remote()
        self.probed = time.monotonic()


class Unanswered(Exception):
    """A decoder's call failed or timed out; the text says which."""


class Call(NamedTuple):
    """Pair a request with its decoder; without one, this process does it."""

    request: Request
    slot: RemoteDecoder | None = None
    ref: Any = None


# the newest pool of this process; the next pool, after a teacher's fit, needs its CPUs
_owned: list[Pool] = []


class Pool:
    """Share the decoders of a cluster, one per CPU, among all ranks.

    Rank 0 starts them; they end with its process. A decoder gets calls once it has
    responded to a ping. If it fails or misses a deadline, all decoders of its host are
    pinged, and get calls again once they respond. Rank 0 alone logs that.
    """

    def __init__(
        self, datasets: Sequence[Dataset], rank: int, token: int, deadline: float
    ) -> None:
        """Connect to the cluster of RAY_ADDRESS, rank 0 first, with one `token`."""
        connect(WHERE)
        self.deadline = deadline
        self.slots: list[RemoteDecoder] = []
        self._prefix = f"{token}-"
        self._rank = rank
        self._turn = rank
        self._lock = threading.Lock()
        self._datasets = ray.put(list(datasets)) if rank == 0 else None
        self._silent: set[str] = set()  # addresses of hosts
        self._dropped: set[str] = set()  # names of decoders
        self._share_is_notable = False  # whether rank 0 made many images of a pass
        self._last_warning = ""
        if rank == 0:
            while _owned:
                _owned.pop().close()
            _owned.append(self)
        self.grow()

    def wait_for_decoders(self) -> None:
        """Wait for the first decoder, then for the others until the deadline.

        Call it on all ranks at once. The first one may take `START_SECONDS`.
        """
        probes = [slot.probe for slot in self.slots]
        started = []
        if probes:
            started, _ = ray.wait(probes, timeout=START_SECONDS)
        if started:
            count = len(probes)
            started, _ = ray.wait(probes, num_returns=count, timeout=self.deadline)
        if not started or len(started) < len(probes):
            self._warn(
                f"{len(started)} of {len(probes)} decoders have started; training"
                " begins without the others"
            )

    def report_share(self, share: float) -> None:
        """Log the share that rank 0 made of its images of a pass, if it has changed.

        A change is that it became notable, or no longer is.
        """
        is_notable = share > NOTABLE_SHARE
        if is_notable != self._share_is_notable:
            self._warn(f"rank 0 made {percent(share)} of its images of a pass itself")
        self._share_is_notable = is_notable

    def _warn(self, text: str) -> None:
        if self._rank == 0 and text != self._last_warning:
            log.warning("%s: %s", WHERE, text)
        self._last_warning = text

    def close(self) -> None:
        """End the decoders; this process then makes the batches itself."""
        with self._lock:
            self._datasets = None
            while self.slots:
                ray.kill(self.slots.pop().actor)

    def grow(self) -> None:
        """Start missing decoders, one per CPU (rank 0), or find the started ones."""
        with self._lock:
            if self._datasets is not None:
                cpus = int(ray.cluster_resources().get("CPU", 0))
                names = {f"{self._prefix}{number}" for number in range(cpus)}
            else:
                names = {
                    name
                    for name in ray.util.list_named_actors()
                    if name.startswith(self._prefix)
                }
            present = {slot.name for slot in self.slots}
            for name in sorted(names - present - self._dropped):
                with suppress(ValueError):  # it has just ended
                    slot = RemoteDecoder(name, self._actor(name))
                    self.slots.append(slot)
                    slot.ping()

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
        """Return the decoders that have responded."""
        waiting = [slot for slot in self.slots if slot.probe is not None]
        probes = [slot.probe for slot in waiting]
        answered = []
        if probes:
            answered, _ = ray.wait(probes, num_returns=len(probes), timeout=0)
        for slot in waiting:
            if slot.probe in answered:
                self._read_ping(slot)
            elif time.monotonic() - slot.probed > self.deadline:
                slot.ping()  # the first one may be lost with its host
        return [slot for slot in self.slots if slot.probe is None]

    def _read_ping(self, slot: RemoteDecoder) -> None:
        try:
            slot.host, slot.address, theirs = ray.get(slot.probe)
        except ActorDiedError as error:
            self.slots.remove(slot)
            reason = str(error).strip().splitlines()[-1]
            self._warn(f"a decoder has ended for good ({reason})")
            return
        except RayError:  # it is being started again
            if time.monotonic() - slot.probed > 1.0:
                slot.ping()
            return
        check_versions(WHERE, slot.address, theirs, decoding_versions(*PACKAGES))
        slot.probe = None
        if slot.address in self._silent:
            self._silent.remove(slot.address)
            self._warn(f"the host {slot.address} responds again")

    def send(self, dataset: int, request: Request) -> Call:
        """Give a request to the trusted decoder with the fewest calls."""
        # without one, this process does it
        with self._lock:
            trusted = self.trusted()
            if not trusted:
                return Call(request)
            # ties are broken in turn, and each rank begins at another decoder
            self._turn += 1
            begin = self._turn % len(trusted)
            slot = min(trusted[begin:] + trusted[:begin], key=lambda slot: slot.calls)
            slot.calls += 1
            return Call(request, slot, slot.actor.load.remote(dataset, request))

    def num_free(self, calls: int, ranks: int) -> int:
        """Return how many calls a rank may make beside its pending ones."""
        with self._lock:
            # one at a time if it must process them itself
            limit = max(1, AHEAD * len(self.trusted()) // ranks)
            return max(0, limit - calls)

    def get(self, call: Call) -> Any:
        """Return a decoder's result.

        Raises:
            Unanswered: It has failed or is late.
        """
        try:
            return ray.get(call.ref, timeout=self.deadline)
        except GetTimeoutError as error:
            reason = f"has not responded for {self.deadline:g} seconds"
            raise Unanswered(reason) from error
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
                decoder
                for decoder in self.slots
                if decoder is slot or decoder.host == slot.host
            ]
            for suspect in suspects:
                suspect.ping()
            if slot.address not in self._silent:
                self._silent.add(slot.address)
                self._warn(
                    f"the host {slot.address} {why}; its images are made elsewhere"
                )
            return suspects

    def drop(self, slot: RemoteDecoder, why: str) -> list[RemoteDecoder]:
        """Stop giving calls to a host's decoders; return them."""
        with self._lock:
            dropped = [decoder for decoder in self.slots if decoder.host == slot.host]
            for decoder in dropped:
                self.slots.remove(decoder)
                self._dropped.add(decoder.name)
            if dropped:
                self._warn(f"the host {slot.address} {why}; it gets no more calls")
            return dropped

    def resend(self, dataset: int, call: Call) -> Call:
        """Send a call to another decoder, unless its result has arrived."""
        if ray.wait([call.ref], timeout=0)[0]:
            return call
        self.forget([call])
        return self.send(dataset, call.request)
