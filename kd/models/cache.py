"""The teacher's cache: its outputs, stored on disk, act as a Teacher.

Raw logits and features are stored, so loss and temperature can change later. Each view
has a file, and each image a record of named arrays (`kd.files.records.Records`).
Outputs without a whole record are computed again.

Legend: B images of a batch, C classes, K logits kept of each image, R bytes of a
record.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from kd.core.contracts import Teacher
from kd.core.errors import ModelError
from kd.core.types import Batch, Outputs, TeacherOutputs
from kd.files.records import Records, Stop
from kd.files.storage import (
    MANIFEST,
    append_rows,
    disk_error,
    lock,
    log,
    open_folder,
    read_rows,
)

FORMAT = 3  # raised with every change of a record; a cache of another format is rebuilt
WHERE = "teacher.cache.path"
DENSE_CLASSES = 1024  # classes up to which every logit is stored
TOPK = 64
"""Logits stored for more classes, with the mass of the rest: 256 bytes per image
instead of 2 per class.
"""
DTYPES = {"fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
WAITING = 32  # most batches that wait on the device for the next flush
WAITING_BYTES = 256 << 20  # most bytes of their outputs
READ_BYTES = 64 << 20  # bytes of records read at once when only their checksums matter
# file in the folder: computing time of its outputs, one row per flush
COSTS = "costs.jsonl"


class Codec:
    """Convert outputs to records [B, R] of named arrays, and back.

    The arrays are the logits (all, or the top K and the mass of the rest) and features.
    """

    # With K < C the other logits are restored as equal values with their true total
    # mass, so the probabilities of the top K at temperature 1 are exact (up to the
    # dtype).

    def __init__(
        self,
        num_classes: int,
        dtype: str,
        topk: int,
        features: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Lay out a record.

        `num_classes` C (0: no logits), `topk` K (0: all), shapes of `features` by name.
        """
        self.num_classes = num_classes
        self.topk = topk
        self.dtype = DTYPES[dtype]
        self.torch_dtype = getattr(torch, self.dtype.name)
        self.features = dict(features or {})
        fields: list[Any] = (
            [("logits", self.dtype, (topk or num_classes,))] if num_classes else []
        )
        if topk:
            fields += [
                ("classes", np.dtype(np.uint32), (topk,)),
                ("rest", np.dtype(np.float32)),
            ]
        self.num_logit_arrays = len(fields)
        fields += [(name, self.dtype, shape) for name, shape in self.features.items()]
        self.names = tuple(name for name, *_ in fields)
        self.record = np.dtype([*fields, ("crc", np.dtype(np.uint32))])

    def pack(self, outputs: Outputs) -> list[Tensor]:
        logits = self.compress(outputs.logits) if self.num_classes else []
        return [
            *logits,
            *(outputs.features[name].to(self.torch_dtype) for name in self.features),
        ]

    def unpack(self, arrays: Sequence[Tensor]) -> Outputs:
        if self.num_classes:
            logits = self.expand(arrays[: self.num_logit_arrays])
        else:
            logits = arrays[0].new_zeros(len(arrays[0]), 0)
        features = zip(self.features, arrays[self.num_logit_arrays :], strict=True)
        return Outputs(logits, dict(features))

    def differences(
        self, arrays: Sequence[Tensor], outputs: Outputs
    ) -> dict[str, tuple[float, float]]:
        """Return each array's largest |stored - computed| and largest |computed|.

        A value is NaN if one of the numbers is NaN.
        """
        split = self.num_logit_arrays
        differences = {}
        if self.num_classes:
            differences["logits"] = (
                self.difference(arrays[:split], outputs.logits),
                outputs.logits.float().abs().max().item(),
            )
        for name, stored in zip(self.features, arrays[split:], strict=True):
            computed = outputs.features[name].float()
            differences[name] = (
                (computed - stored.float()).abs().max().item(),
                computed.abs().max().item(),
            )
        return differences

    def compress(self, logits_BC: Tensor) -> list[Tensor]:
        if not self.topk:
            return [logits_BC.to(self.torch_dtype)]
        top = logits_BC.float().topk(self.topk)
        remaining_BC = logits_BC.float().scatter(1, top.indices, -math.inf)
        rest_B = remaining_BC.logsumexp(-1)
        return [top.values.to(self.torch_dtype), top.indices, rest_B]

    def expand(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return the logits [B, C] of records; dense ones in their stored dtype."""
        if not self.topk:
            return arrays[0]
        values_BK, classes_BK, rest_B = arrays
        each_B = rest_B.float() - math.log(self.num_classes - self.topk)
        spread_BC = each_B.unsqueeze(1).repeat(1, self.num_classes)
        return spread_BC.scatter(1, classes_BK.long(), values_BK.float())

    def difference(self, arrays: Sequence[Tensor], logits_BC: Tensor) -> float:
        """Return the largest |stored - computed| of a logit or of the rest's log mass.

        It is NaN if one of the numbers is NaN.
        """
        if not self.topk:
            return (logits_BC.float() - arrays[0].float()).abs().max().item()
        values_BK = arrays[0].float()
        classes_BK = arrays[1].long()
        rest_B = arrays[2].float()
        now_B = logits_BC.float().scatter(1, classes_BK, -math.inf).logsumexp(-1)
        top_difference = (
            (logits_BC.float().gather(1, classes_BK) - values_BK).abs().max()
        )
        return torch.maximum(top_difference, (now_B - rest_B).abs().max()).item()


class Store:
    """Read and write the files of a cache.

    `manifest.json` and `view_0000.logits`, ..., one per view; `.outputs` with features.
    """

    def __init__(
        self, folder: Path, codec: Codec, num_images: int, writable: bool
    ) -> None:
        self.folder = folder
        self.codec = codec
        self.num_images = num_images
        self.writable = writable
        self._stop = Stop(
            f"teacher.cache: '{folder}'",
            "Existing entries are used; the rest are computed live.",
        )
        self._views: dict[int, Records] = {}

    @property
    def stopped(self) -> str:  # reason why writing has ended; empty before that
        return self._stop.reason

    def read(self, view: int, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return records [B], and which of them are complete, bool [B]."""
        try:
            opened = self._opened(view)
        except FileNotFoundError:
            return np.zeros(len(ids), self.codec.record), np.zeros(len(ids), bool)
        except OSError as error:
            raise disk_error(error, self._path(view), WHERE) from error
        size = self.codec.record.itemsize
        contents = [opened.read(id) or b"" for id in ids]
        complete = [len(content) == size for content in contents]
        joined = bytearray().join(
            content if len(content) == size else bytes(size) for content in contents
        )
        return np.frombuffer(joined, self.codec.record), np.array(complete, bool)

    def read_arrays(
        self, view: int, ids: Sequence[int], crc: Sequence[int] = ()
    ) -> tuple[list[Tensor], np.ndarray, int]:
        """Return arrays [B] for `Codec.expand` and which records are valid, bool."""
        # Also return the number of records whose image has since changed, by the `crc`
        # of its encoded bytes (0: unknown).
        records, complete = self.read(view, ids)
        recorded = records["crc"]
        current = np.array(crc or [0] * len(ids), np.uint32)
        stale = complete & (current != recorded) & (current != 0) & (recorded != 0)
        arrays = [_widened(records[name]) for name in self.codec.names]
        return arrays, complete & ~stale, int(stale.sum())

    def write(
        self,
        view: int,
        ids: Sequence[int],
        arrays: Sequence[np.ndarray],
        crc: Sequence[int],
    ) -> None:
        """Write records; warn once if the disk is full.

        `crc` is that of each image's encoded bytes (0: unknown).
        """
        content = np.zeros(len(ids), self.codec.record)
        content["crc"] = crc
        for name, array in zip(self.codec.names, arrays, strict=True):
            content[name] = array
        try:
            records = self._opened(view, os.O_CREAT)
        except OSError as error:
            return self._stop.set(error.strerror or str(error))
        for id, record in zip(ids, content, strict=True):
            records.write(id, record.tobytes())

    def record_cost(self, outputs: int, seconds: float) -> None:
        """Record the CPU time of computing outputs of this cache."""
        with suppress(OSError):  # `write` reports a full disk
            append_rows(
                self.folder / COSTS,
                {"outputs": outputs, "cpu_seconds": round(seconds, 4)},
            )

    def seconds_each(self) -> float | None:
        """Return the mean recorded CPU time per output; None if none was recorded."""
        rows = read_rows(self.folder / COSTS, last=None)
        outputs = sum(row["outputs"] for row in rows)
        return sum(row["cpu_seconds"] for row in rows) / outputs if outputs else None

    def missing(self, view: int) -> np.ndarray:  # ids, ascending
        return np.flatnonzero(~self.have_records(view, range(self.num_images)))

    def have_records(self, view: int, ids: Sequence[int]) -> np.ndarray:
        """Return which images have a complete record, bool [B].

        Few records are in memory at a time.
        """
        count = max(1, min(4096, READ_BYTES // self.codec.record.itemsize))
        chunks = [
            self.read(view, ids[start : start + count])[1]
            for start in range(0, len(ids), count)
        ]
        return np.concatenate(chunks) if chunks else np.zeros(0, bool)

    def _path(self, view: int) -> Path:
        ending = "outputs" if self.codec.features else "logits"
        return self.folder / f"view_{view:04d}.{ending}"

    def _opened(self, view: int, flags: int = 0) -> Records:
        if view not in self._views:
            access = os.O_RDWR if self.writable else os.O_RDONLY
            file = os.open(self._path(view), flags | access, 0o644)
            self._views[view] = Records(
                file, self.codec.record.itemsize, self._stop, str(view)
            )
        return self._views[view]


class CachedTeacher:
    """Read outputs from the store, and run the live teacher for missing ones.

    See `kd.core.contracts.Teacher`.
    """

    # The student gets the record's (rounded) values even in the step that writes it. So
    # filling the cache during training and ahead of it give the same run, bit for bit
    # if the teacher's outputs do not depend on the batch size.

    def __init__(
        self,
        live: Teacher,
        store: Store,
        fixed_shape: bool = False,
        on_cpu: bool = True,
    ) -> None:
        """Put a store before a live teacher.

        `fixed_shape`: it is compiled, so it runs on whole micro-batches.
        """
        self.live = live
        self.store = store
        self.fixed_shape = fixed_shape
        self.on_cpu = on_cpu
        self._waiting: list[tuple[int, list[int], list[Tensor], list[int]]] = []
        self._bytes = 0
        # images and CPU time since the last flush; only measured on a CPU
        self._outputs = 0
        self._seconds = 0.0
        self._warned: set[int] = set()

    @property
    def images(self) -> int:
        return self.live.images

    def lookup(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Look up each batch while it is on the host, where its ids need no sync."""
        # A record of a changed image counts as missing; the number of such records is
        # logged once per view.
        changed = 0
        view = 0
        try:
            for batch in batches:
                view = batch.view
                answered, stale = self._with_stored_outputs(batch)
                changed += stale
                yield answered
        finally:
            # a written record is counted once
            if changed and (self.store.writable or view not in self._warned):
                self._warned.add(view)
                log.warning(
                    "teacher.cache: view %d: %d records are of images that have"
                    " changed; they are computed again",
                    view,
                    changed,
                )

    def unanswered(self, view: int, ids: Tensor) -> Tensor:
        return torch.from_numpy(~self.store.have_records(view, ids.tolist()))

    def _with_stored_outputs(self, batch: Batch) -> tuple[Batch, int]:
        """Add stored outputs to a batch; also return the number of changed images."""
        ids = batch.ids.tolist()
        arrays, valid, stale = self.store.read_arrays(batch.view, ids, batch.crc)
        outputs = self.store.codec.unpack(arrays)
        # padding and unreadable images have weight 0
        needed = ~valid & (batch.weight > 0).numpy()
        missing = tuple((row, ids[row]) for row in np.flatnonzero(needed).tolist())
        if missing and batch.small and batch.full_size is None:
            wrong = (
                f"'{self.store.folder}', view {batch.view}: image {missing[0][1]} has"
                " changed since its record"
            )
            allowed = (
                "Records of the images as they are, while data.progressive shows small"
                " ones"
            )
            raise ModelError(WHERE, wrong, allowed, "Compute them again with kd-cache")
        if not valid.all():
            gaps = torch.from_numpy(np.flatnonzero(~valid))
            outputs = outputs.map(lambda tensor: tensor.index_fill(0, gaps, 0))
        return replace(batch, teacher_outputs=TeacherOutputs(outputs, missing)), stale

    def stored(self, view: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the stored logits [B, C], and which images have them, bool [B]."""
        arrays, valid, _ = self.store.read_arrays(view, ids)
        return self.store.codec.unpack(arrays).logits, torch.from_numpy(valid)

    def __call__(self, batch: Batch) -> Outputs:
        """Return float32 logits [B, C] and features, rounded as in records."""
        answer = batch.teacher_outputs
        if answer is None:
            return self.live(batch)
        stored = answer.outputs.map(lambda tensor: tensor.float())
        if not answer.missing:
            return stored
        places = torch.tensor([row for row, _ in answer.missing])
        rows = places.to(batch.image.device, non_blocking=True)
        all_images = len(rows) == len(batch.ids) or self.fixed_shape
        bare = replace(batch, teacher_outputs=None)
        before = time.process_time()
        outputs = self.live(bare if all_images else bare.take(places))
        if self.on_cpu:
            self._outputs += len(rows)
            self._seconds = self._seconds + time.process_time() - before
        if all_images and len(rows) < len(batch.ids):
            outputs = outputs.map(lambda tensor: tensor.index_select(0, rows))
        codec = self.store.codec
        arrays = codec.pack(outputs)
        ids = [id for _, id in answer.missing]
        crc = [batch.crc[row] if batch.crc else 0 for row, _ in answer.missing]
        self._waiting.append((batch.view, ids, arrays, crc))
        self._bytes += sum(array.nbytes for array in arrays)
        if len(self._waiting) >= WAITING or self._bytes >= WAITING_BYTES:
            self.flush()
        rounded = codec.unpack(arrays).map(lambda tensor: tensor.float())
        features = {
            name: stored.features[name].index_copy(0, rows, rounded.features[name])
            for name in codec.features
        }
        return Outputs(stored.logits.index_copy(0, rows, rounded.logits), features)

    def flush(self) -> None:
        """Write the records that are still on the device.

        If another run is the writer, they are only checked.
        """
        waiting = self._waiting
        self._waiting = []
        self._bytes = 0
        codec = self.store.codec
        for view, ids, tensors, crc in waiting:
            arrays = [tensor.cpu().numpy() for tensor in tensors]
            for name, array in zip(codec.names, arrays, strict=True):
                if not np.isfinite(array).all():
                    wrong = (
                        f"the teacher's '{name}' holds values that are not finite as"
                        f" {array.dtype}"
                    )
                    half = codec.dtype == np.float16
                    remedy = (
                        "Set teacher.cache.dtype=fp32, or"
                        if half
                        else "Correct the teacher, or set"
                    )
                    allowed = "Up to 65504 in float16" if half else "Finite numbers"
                    raise ModelError(
                        "teacher.cache.dtype",
                        wrong,
                        allowed,
                        f"{remedy} teacher.precision=fp32",
                    )
            if self.store.writable:
                self.store.write(view, ids, arrays, crc)
        if self.store.writable and self._outputs:
            self.store.record_cost(self._outputs, self._seconds)
        self._outputs = 0
        self._seconds = 0.0


def _widened(array: np.ndarray) -> Tensor:
    """Return an array as a tensor; uint32 as int64, by which torch can index."""
    if array.dtype == np.uint32:
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(array))


def open_store(
    folder: Path,
    identity: dict[str, Any],
    codec: Codec,
    num_images: int,
    writable: bool,
) -> Store:
    """Open a cache, or create it if `writable`.

    `identity` holds the inputs of its records by name, as JSON values.
    """
    open_folder(folder, {"format": FORMAT, **identity}, WHERE, writable)
    return Store(folder, codec, num_images, writable)


def claim_writer(folder: Path) -> bool:
    """Try to make this process the only writer of a cache; return whether it is."""
    # It is not if another run writes there, or if the user may only read the cache.
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
