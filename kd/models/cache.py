"""The teacher is run once: its logits, kept on a disk, are a Teacher too.

Raw logits are kept, so that loss and temperature can change later. There is one file a view and one record an image
(`kd.storage.Records`). Logits without a whole record are computed (again).

Legend: B images of a batch, C classes, K logits kept of each image, R bytes of a record.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from kd.contracts import Teacher
from kd.storage import MANIFEST, Records, Stop, disk_error, lock, open_folder
from kd.types import Batch, Outputs, TeacherOutputs

FORMAT = 2
WHERE = "teacher.cache.path"
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
        self.record = np.dtype(fields)

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

    def difference(self, parts: Sequence[Tensor], logits_BC: Tensor) -> float:
        """Return the largest |stored - given| of a logit, or of the log of the rest's mass; NaN if one is NaN."""
        if not self.topk:
            return (logits_BC.float() - parts[0].float()).abs().max().item()
        values_BK, classes_BK, rest_B = parts[0].float(), parts[1].long(), parts[2].float()
        others_B = logits_BC.float().scatter(1, classes_BK, -math.inf).logsumexp(-1)
        kept = (logits_BC.float().gather(1, classes_BK) - values_BK).abs().max()
        return torch.maximum(kept, (others_B - rest_B).abs().max()).item()


class Store:
    """The files of a cache: `manifest.json` and `view_0000.logits`, ..., one a view."""

    def __init__(self, folder: Path, codec: Codec, num_images: int, writable: bool) -> None:
        self.folder, self.codec, self.num_images, self.writable = folder, codec, num_images, writable
        self._stop = Stop(f"teacher.cache: '{folder}'", "It is used as it is, the teacher answers for the rest.")
        self._views: dict[int, Records] = {}

    @property
    def stopped(self) -> str:
        """Why nothing is written any more; empty before that."""
        return self._stop.reason

    def read(self, view: int, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return records [B] and which of them are whole, bool [B].

        Raises:
            RunError: the view's file cannot be opened.
        """
        try:
            records = self._opened(view)
        except FileNotFoundError:
            return np.zeros(len(ids), self.codec.record), np.zeros(len(ids), bool)
        except OSError as error:
            raise disk_error(error, self._path(view), WHERE) from error
        size = self.codec.record.itemsize
        found = [records.read(id) for id in ids]
        whole = np.array([content is not None and len(content) == size for content in found], bool)
        content = bytearray().join(part if part and len(part) == size else bytes(size) for part in found)
        return np.frombuffer(content, self.codec.record), whole

    def parts(self, view: int, ids: Sequence[int]) -> tuple[list[Tensor], np.ndarray]:
        """Return what the records [B] hold, as `Codec.expand` takes it, and which of them are whole, bool [B]."""
        records, whole = self.read(view, ids)
        return [_tensor(records[name]) for name in records.dtype.names or ()], whole

    def write(self, view: int, ids: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        """Write records. If the disk is full, warn once and write no more (`stopped`); what is written stays good."""
        content = np.zeros(len(ids), self.codec.record)
        for name, part in zip(self.codec.record.names or (), parts, strict=True):
            content[name] = part
        try:
            records = self._opened(view, os.O_CREAT)
        except OSError as error:
            return self._stop.set(error.strerror or str(error))
        for id, record in zip(ids, content, strict=True):
            records.write(id, record.tobytes())

    def missing(self, view: int) -> np.ndarray:
        """Return the ids that have no whole record, ascending."""
        gaps = []
        for start in range(0, self.num_images, 4096):
            ids = range(start, min(self.num_images, start + 4096))
            gaps.append(np.asarray(ids)[~self.read(view, ids)[1]])
        return np.concatenate(gaps)

    def _path(self, view: int) -> Path:
        return self.folder / f"view_{view:04d}.logits"

    def _opened(self, view: int, flags: int = 0) -> Records:
        if view not in self._views:
            file = os.open(self._path(view), flags | (os.O_RDWR if self.writable else os.O_RDONLY), 0o644)
            self._views[view] = Records(file, self.codec.record.itemsize, self._stop, str(view))
        return self._views[view]


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
            parts, whole = self.store.parts(batch.view, ids)
            logits = self.store.codec.expand(parts)
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
    """Open a cache, or begin it if `writable`. `identity`: what its logits depend on, by name; JSON values.

    Raises:
        RunError: the cache was made from something else (the field is named), cannot be used, or is damaged.
    """
    open_folder(folder, {"format": FORMAT, **identity}, WHERE, writable)
    return Store(folder, codec, num_images, writable)


def owned(folder: Path) -> bool:
    """Make this process the one writer of a cache until it ends; return whether it is.

    It is not if another run writes there, nor if there is a cache that this user may only read.

    Raises:
        RunError: there is no cache and none can be begun, or the file system has no locks.
    """
    if folder not in _locks:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = lock(folder / ".lock", WHERE)
        except OSError as error:
            if (folder / MANIFEST).is_file():
                return False
            raise disk_error(error, folder, WHERE) from error
        if file is not None:
            _locks[folder] = file
    return folder in _locks


_locks: dict[Path, IO[str]] = {}
