"""The teacher is run once: its logits, kept on the disk, are a Teacher too.

Raw logits, so that loss and temperature can change later. One file a view, one record an image: the logits, then a
checksum. A record that was torn by a crash, or never written, fails its checksum and is computed (again).

Legend: B images of a batch, C classes, K logits kept of each image, R bytes of a record.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from kd.contracts import Teacher
from kd.errors import ModelError, RunError
from kd.types import Batch, Outputs, TeacherOutputs

FORMAT = 1
MANIFEST = "manifest.json"
BEGINNING = 10.0
"""Seconds that a reader waits for the manifest of a cache whose writer has only just begun it."""
DENSE_CLASSES = 1024
"""Up to here every logit is kept."""
TOPK = 64
DTYPES = {"fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
WAITING = 32
"""Batches whose logits may wait on the device for the next flush."""


class Codec:
    """Logits [B, C] <-> records [B, R]: all of them, or the K highest and the mass of the rest.

    With K < C the rest are rebuilt equal to each other, with their true total mass: the probabilities of the top K, at
    temperature 1, are exact (up to the dtype).
    """

    def __init__(self, num_classes: int, dtype: str, topk: int) -> None:
        self.num_classes, self.topk, self.dtype = num_classes, topk, DTYPES[dtype]
        fields: list[Any] = [("logits", self.dtype, (topk or num_classes,))]
        if topk:
            fields += [("classes", np.dtype(np.uint32), (topk,)), ("rest", np.dtype(np.float32))]
        self.record = np.dtype([*fields, ("checksum", np.dtype(np.uint32))])

    def compress(self, logits_BC: Tensor) -> list[Tensor]:
        """Return what a record keeps, on the device of the logits."""
        kind = torch.float16 if self.dtype == np.float16 else torch.float32
        if not self.topk:
            return [logits_BC.to(kind)]
        top = logits_BC.float().topk(self.topk)
        others_BC = logits_BC.float().scatter(1, top.indices, -math.inf)
        return [top.values.to(kind), top.indices, others_BC.logsumexp(-1)]

    def expand(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the logits [B, C] that a record stands for; dense ones in their stored dtype."""
        if not self.topk:
            return parts[0]
        values_BK, classes_BK, rest_B = parts
        others = self.num_classes - self.topk
        spread_BC = (rest_B.float() - math.log(others)).unsqueeze(1).repeat(1, self.num_classes)
        return spread_BC.scatter(1, classes_BK.long(), values_BK.float())


class Store:
    """The files of a cache: `manifest.json` and `view_0000.logits`, ..., one a view."""

    def __init__(self, folder: Path, codec: Codec, num_images: int, writable: bool) -> None:
        self.folder, self.codec, self.num_images, self.writable = folder, codec, num_images, writable
        self.stopped = ""
        """Why nothing is written any more."""
        self._views: dict[int, tuple[int, np.ndarray]] = {}

    def read(self, view: int, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return records [B] and which of them are whole, bool [B]."""
        found = self._mapped(view)
        if found is None:
            return np.zeros(len(ids), self.codec.record), np.zeros(len(ids), bool)
        records = found[np.asarray(ids)]
        sums = checksums(records, view, ids)
        return records, sums == records["checksum"]

    def write(self, view: int, ids: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        """Write records, one write each: a reader sees the old one, the new one, or a torn one that it refuses.

        Where the disk is full, say so once and write no more (`stopped`); what is written stays good.
        """
        if self.stopped:
            return
        records = np.zeros(len(ids), self.codec.record)
        for name, part in zip(self.codec.record.names or (), parts, strict=False):
            records[name] = part
        records["checksum"] = checksums(records, view, ids)
        try:
            file = self._opened(view)
            for id, record in zip(ids, records, strict=True):
                os.pwrite(file, record.tobytes(), id * self.codec.record.itemsize)
        except OSError as error:
            self.stopped = error.strerror or str(error)
            told = (
                f"'{self.folder}' takes no more ({self.stopped}). It is used as it is, the teacher answers for the rest"
            )
            print(f"teacher.cache: {told}.", file=sys.stderr, flush=True)

    def missing(self, view: int) -> np.ndarray:
        """Return the ids that have no whole record, ascending."""
        gaps = []
        for start in range(0, self.num_images, 4096):
            ids = range(start, min(self.num_images, start + 4096))
            gaps.append(np.asarray(ids)[~self.read(view, ids)[1]])
        return np.concatenate(gaps)

    def _path(self, view: int) -> Path:
        return self.folder / f"view_{view:04d}.logits"

    def _opened(self, view: int) -> int:
        """Return the descriptor of a view's file, which is made at full length (sparse) where it is new."""
        if view not in self._views:
            file = os.open(self._path(view), (os.O_RDWR | os.O_CREAT) if self.writable else os.O_RDONLY, 0o644)
            size = self.num_images * self.codec.record.itemsize
            if self.writable and os.fstat(file).st_size < size:
                os.ftruncate(file, size)
            mapped = mmap.mmap(file, size, access=mmap.ACCESS_READ)
            self._views[view] = file, np.frombuffer(mapped, self.codec.record)
        return self._views[view][0]

    def _mapped(self, view: int) -> np.ndarray | None:
        """Return the records of a view; None where there are none, or its writer has not made the file long enough."""
        if view not in self._views:
            size = self.num_images * self.codec.record.itemsize
            try:
                if self._path(view).stat().st_size < size and not self.writable:
                    return None
                self._opened(view)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise _unusable(self._path(view), error) from error
        return self._views[view][1]


def checksums(records: np.ndarray, view: int, ids: Sequence[int]) -> np.ndarray:
    """Return the CRC-32 of each record's content, seeded with its place: a record in another's place is not whole.

    A record of zeros, as in a hole of a sparse file, never passes.
    """
    size = records.dtype.itemsize
    rows = np.ascontiguousarray(records).view(np.uint8).reshape(len(ids), size)[:, : size - 4]
    seeds = (zlib.crc32(b"%d:%d" % (view, id)) for id in ids)
    return np.fromiter((zlib.crc32(row, seed) or 1 for row, seed in zip(rows, seeds, strict=True)), np.uint32, len(ids))


class CachedTeacher:
    """Answer from the store, and from the live teacher for what is missing. See `kd.contracts.Teacher`.

    What a record says is what the student is given, in the step that writes it too, so that filling as training goes
    and filling ahead are one run. To the bit, where the teacher's bits do not depend on an image's neighbours: a batch
    of hits and misses runs it on the misses alone, and some BLAS kernels round a smaller batch otherwise.
    """

    def __init__(self, live: Teacher, store: Store, fixed_shape: bool = False) -> None:
        """Put a store before a live teacher.

        Args:
            live: asked for missing images.
            store: opened; read-only where another run owns it.
            fixed_shape: run the live teacher on whole micro-batches only (a compiler would make a graph a shape).
        """
        self.live, self.store, self.fixed_shape = live, store, fixed_shape
        self._waiting: list[tuple[int, list[int], list[Tensor]]] = []

    @property
    def images(self) -> int:
        """How many images the live teacher's forward has run on."""
        return self.live.images

    def lookup(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Look each batch up while it is still on the host, where its ids can be read without waiting."""
        for batch in batches:
            ids = batch.ids.tolist()
            records, whole = self.store.read(batch.view, ids)
            names = [name for name in records.dtype.names or () if name != "checksum"]
            logits = self.store.codec.expand([_tensor(records[name]) for name in names])
            wanted = ~whole & (batch.weight > 0).numpy()  # padding and unreadable images weigh nothing
            missing = tuple((row, ids[row]) for row in np.flatnonzero(wanted).tolist())
            if not whole.all():
                logits[torch.from_numpy(~whole)] = 0
            yield replace(batch, teacher_outputs=TeacherOutputs(Outputs(logits), missing))

    def __call__(self, batch: Batch) -> Outputs:
        """Return float32 logits [B, C]."""
        answer = batch.teacher_outputs
        if answer is None:
            return self.live(batch)
        if not answer.missing:
            return Outputs(answer.outputs.logits.float())
        places = torch.tensor([row for row, _ in answer.missing])
        rows = places.to(batch.image.device, non_blocking=True)
        whole = len(rows) == len(batch.ids) or self.fixed_shape
        bare = replace(batch, teacher_outputs=None)
        said = self.live(bare if whole else bare.take(places)).logits
        parts = self.store.codec.compress(said.index_select(0, rows) if whole and len(rows) < len(said) else said)
        if self.store.writable:
            self._waiting.append((batch.view, [id for _, id in answer.missing], parts))
            if len(self._waiting) >= WAITING:
                self.flush()
        logits = answer.outputs.logits.float()
        return Outputs(logits.index_copy(0, rows, self.store.codec.expand(parts).float()))

    def flush(self) -> None:
        """Write the records that are still on the device."""
        for view, ids, parts in self._waiting:
            self.store.write(view, ids, [part.cpu().numpy() for part in parts])
        self._waiting = []


def _tensor(part: np.ndarray) -> Tensor:
    return torch.from_numpy(part.astype(np.int64) if part.dtype == np.uint32 else np.ascontiguousarray(part))


def open_store(folder: Path, identity: dict[str, Any], codec: Codec, num_images: int, writable: bool) -> Store:
    """Open a cache, or begin one; what it was made from must be what this run would make it from.

    Args:
        folder: of the cache.
        identity: what the logits depend on, by name; JSON values.
        codec: how logits become records.
        num_images: of the training split.
        writable: begin it where it does not exist, and write records.

    Raises:
        ModelError: the cache was made from something else; the field is named.
        RunError: the folder cannot be read or written, or its manifest is damaged.
    """
    identity = {"format": FORMAT, **identity}
    found = _manifest(folder, identity, writable)
    for name in identity | found:
        if found.get(name) != identity.get(name):
            raise ModelError(
                "teacher.cache.path",
                f"'{folder}' was made with another {name} ({_short(found.get(name))}; "
                f"this run has {_short(identity.get(name))})",
                "A cache answers for the teacher, transform, data and seed it was made from",
                "Choose another teacher.cache.path, or leave it empty: each gets its own folder then",
            )
    return Store(folder, codec, num_images, writable)


def _manifest(folder: Path, identity: dict[str, Any], writable: bool) -> dict[str, Any]:
    """Return what a cache was made from; write it where there is none yet."""
    file, patience = folder / MANIFEST, time.monotonic() + BEGINNING
    try:
        if not file.is_file() and writable:
            draft = folder / f".manifest.{os.getpid()}"
            folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(identity, indent=2) + "\n")
            os.replace(draft, file)
        while not file.is_file() and time.monotonic() < patience:
            time.sleep(0.05)
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        remedy = f"Remove the folder '{folder}': it is filled again, as training goes or by kd-cache"
        raise RunError("teacher.cache.path", f"'{file}' is damaged ({error})", "", remedy) from error


def owned(folder: Path) -> bool:
    """Make this process the one writer of a cache until it ends; return whether it is.

    It is not where another run writes, nor where there is a cache that this user may only read.

    Raises:
        RunError: there is no cache and none can be begun, or the file system has no locks.
    """
    if folder in _locks:
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        if (folder / MANIFEST).is_file():
            return False
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            return False
        wrong = f"'{folder}' lies on a file system without locks ({error.strerror or error})"
        raise RunError("teacher.cache.path", wrong, "One writer at a time", "Choose a path on another one") from error
    os.register_at_fork(after_in_child=file.close)  # a data worker that outlives its trainer must not hold the cache
    _locks[folder] = file
    return True


_locks: dict[Path, IO[str]] = {}


def _unusable(path: Path, error: OSError) -> RunError:
    wrong = f"'{path}' cannot be used ({error.strerror or error})"
    return RunError("teacher.cache.path", wrong, "", "Choose a folder that you may write, or free space on its disk")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
