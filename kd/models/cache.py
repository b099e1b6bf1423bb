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
WAITING, WAITING_BYTES = (
    32,
    256 << 20,
)  # most batches, and bytes of outputs, that wait on the device for the next flush
READ_BYTES = 64 << 20  # bytes of records read at once when only their checksums matter
COSTS = (  # file in the folder: computing time of its outputs, one row per flush
    "costs.jsonl"
)


class Codec:
    """Codec of outputs and records [B, R]: named arrays of logits (all, or top K and
    the rest's mass) and features.
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
        """Lay out a record: `num_classes` C (0: no logits), `topk` K (0: all), shapes
        of `features` by name.
        """
        self.num_classes, self.topk, self.dtype = num_classes, topk, DTYPES[dtype]
        self.kind = getattr(torch, self.dtype.name)
        self.features = dict(features or {})
        fields: list[Any] = (
            [("logits", self.dtype, (topk or num_classes,))] if num_classes else []
        )
        if topk:
            fields += [
                ("classes", np.dtype(np.uint32), (topk,)),
                ("rest", np.dtype(np.float32)),
            ]
        self.of_logits = len(fields)
        fields += [(name, self.dtype, shape) for name, shape in self.features.items()]
        self.names = tuple(name for name, *_ in fields)
        self.record = np.dtype([*fields, ("crc", np.dtype(np.uint32))])

    def pack(self, outputs: Outputs) -> list[Tensor]:
        logits = self.compress(outputs.logits) if self.num_classes else []
        return [
            *logits,
            *(outputs.features[name].to(self.kind) for name in self.features),
        ]

    def unpack(self, parts: Sequence[Tensor]) -> Outputs:
        logits = (
            self.expand(parts[: self.of_logits])
            if self.num_classes
            else parts[0].new_zeros(len(parts[0]), 0)
        )
        return Outputs(
            logits, dict(zip(self.features, parts[self.of_logits :], strict=True))
        )

    def differences(
        self, parts: Sequence[Tensor], outputs: Outputs
    ) -> dict[str, tuple[float, float]]:
        """Return for each array the largest |stored - given| and the largest |given|;
        NaN if one is NaN.
        """
        found = {}
        if self.num_classes:
            largest = outputs.logits.float().abs().max().item()
            found["logits"] = (
                self.difference(parts[: self.of_logits], outputs.logits),
                largest,
            )
        for name, stored in zip(self.features, parts[self.of_logits :], strict=True):
            given = outputs.features[name].float()
            found[name] = (
                (given - stored.float()).abs().max().item(),
                given.abs().max().item(),
            )
        return found

    def compress(self, logits_BC: Tensor) -> list[Tensor]:
        if not self.topk:
            return [logits_BC.to(self.kind)]
        top = logits_BC.float().topk(self.topk)
        others_BC = logits_BC.float().scatter(1, top.indices, -math.inf)
        return [top.values.to(self.kind), top.indices, others_BC.logsumexp(-1)]

    def expand(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the logits [B, C] of records; dense ones in their stored dtype."""
        if not self.topk:
            return parts[0]
        values_BK, classes_BK, rest_B = parts
        others = self.num_classes - self.topk
        spread_BC = (
            (rest_B.float() - math.log(others)).unsqueeze(1).repeat(1, self.num_classes)
        )
        return spread_BC.scatter(1, classes_BK.long(), values_BK.float())

    def difference(self, parts: Sequence[Tensor], logits_BC: Tensor) -> float:
        """Return the largest |stored - given| of a logit, or of the log of the rest's
        mass; NaN if one is NaN.
        """
        if not self.topk:
            return (logits_BC.float() - parts[0].float()).abs().max().item()
        values_BK, classes_BK, rest_B = (
            parts[0].float(),
            parts[1].long(),
            parts[2].float(),
        )
        others_B = logits_BC.float().scatter(1, classes_BK, -math.inf).logsumexp(-1)
        kept = (logits_BC.float().gather(1, classes_BK) - values_BK).abs().max()
        return torch.maximum(kept, (others_B - rest_B).abs().max()).item()


class Store:
    """The files of a cache: `manifest.json` and `view_0000.logits`, ..., one per view;
    `.outputs` with features.
    """

    def __init__(
        self, folder: Path, codec: Codec, num_images: int, writable: bool
    ) -> None:
        self.folder, self.codec, self.num_images, self.writable = (
            folder,
            codec,
            num_images,
            writable,
        )
        self._stop = Stop(
            f"teacher.cache: '{folder}'",
            "Existing entries are used; the rest are computed live.",
        )
        self._views: dict[int, Records] = {}

    @property
    def stopped(self) -> str:  # reason why writing has ended; empty before that
        return self._stop.reason

    def read(self, view: int, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        try:
            opened = self._opened(view)
        except FileNotFoundError:
            return np.zeros(len(ids), self.codec.record), np.zeros(len(ids), bool)
        except OSError as error:
            raise disk_error(error, self._path(view), WHERE) from error
        size = self.codec.record.itemsize
        found = [opened.read(id) for id in ids]
        whole = np.array(
            [content is not None and len(content) == size for content in found], bool
        )
        content = bytearray().join(
            part if part and len(part) == size else bytes(size) for part in found
        )
        records = np.frombuffer(content, self.codec.record)
        return records, whole

    def parts(
        self, view: int, ids: Sequence[int], crc: Sequence[int] = ()
    ) -> tuple[list[Tensor], np.ndarray, int]:
        """Return the content of the records [B] for `Codec.expand`, and which are valid
        for these images, bool [B].
        """
        # Also return the number of records whose image has since changed, by the `crc`
        # of its encoded bytes (0: unknown).
        records, whole = self.read(view, ids)
        now = np.array(crc or [0] * len(ids), np.uint32)
        stale = whole & (now != records["crc"]) & (now != 0) & (records["crc"] != 0)
        return (
            [_tensor(records[name]) for name in self.codec.names],
            whole & ~stale,
            int(stale.sum()),
        )

    def write(
        self,
        view: int,
        ids: Sequence[int],
        parts: Sequence[np.ndarray],
        crc: Sequence[int],
    ) -> None:
        """Write records, with the CRC of each image's encoded bytes (0: unknown); warn
        once if the disk is full.
        """
        content = np.zeros(len(ids), self.codec.record)
        content["crc"] = crc
        for name, part in zip(self.codec.names, parts, strict=True):
            content[name] = part
        try:
            records = self._opened(view, os.O_CREAT)
        except OSError as error:
            return self._stop.set(error.strerror or str(error))
        for id, record in zip(ids, content, strict=True):
            records.write(id, record.tobytes())

    def spent(self, outputs: int, seconds: float) -> None:
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
        return np.flatnonzero(~self.whole(view, range(self.num_images)))

    def whole(self, view: int, ids: Sequence[int]) -> np.ndarray:
        """Return which images have a whole record, bool [B]; few records are in memory
        at a time.
        """
        count = max(1, min(4096, READ_BYTES // self.codec.record.itemsize))
        found = [
            self.read(view, ids[start : start + count])[1]
            for start in range(0, len(ids), count)
        ]
        return np.concatenate(found) if found else np.zeros(0, bool)

    def _path(self, view: int) -> Path:
        return (
            self.folder
            / f"view_{view:04d}.{'outputs' if self.codec.features else 'logits'}"
        )

    def _opened(self, view: int, flags: int = 0) -> Records:
        if view not in self._views:
            file = os.open(
                self._path(view),
                flags | (os.O_RDWR if self.writable else os.O_RDONLY),
                0o644,
            )
            self._views[view] = Records(
                file, self.codec.record.itemsize, self._stop, str(view)
            )
        return self._views[view]


class CachedTeacher:
    """Reads outputs from the store and runs the live teacher for missing ones. See
    `kd.core.contracts.Teacher`.
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
        """Put a store before a live teacher; `fixed_shape`: it is compiled, so it runs
        on whole micro-batches.
        """
        self.live, self.store, self.fixed_shape, self.on_cpu = (
            live,
            store,
            fixed_shape,
            on_cpu,
        )
        self._waiting: list[tuple[int, list[int], list[Tensor], list[int]]] = []
        self._bytes = 0
        self._outputs, self._seconds = (
            0,
            0.0,
        )  # images and CPU time since the last flush; only measured on a CPU
        self._warned: set[int] = set()

    @property
    def images(self) -> int:
        return self.live.images

    def lookup(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Look up each batch while it is on the host, where its ids can be read without
        a sync.
        """
        # A record of a changed image counts as missing; the number of such records is
        # logged once per view.
        changed, view = 0, 0
        try:
            for batch in batches:
                view, found, stale = batch.view, *self._found(batch)
                changed += stale
                yield found
        finally:
            if changed and (
                self.store.writable or view not in self._warned
            ):  # a written record is counted once
                self._warned.add(view)
                text = (
                    "teacher.cache: view %d: %d records are of images that have"
                    " changed; they are computed again"
                )
                log.warning(text, view, changed)

    def unanswered(self, view: int, ids: Tensor) -> Tensor:
        return torch.from_numpy(~self.store.whole(view, ids.tolist()))

    def _found(
        self, batch: Batch
    ) -> tuple[Batch, int]:  # with its stored outputs, and the number of changed images
        ids = batch.ids.tolist()
        parts, whole, stale = self.store.parts(batch.view, ids, batch.crc)
        outputs = self.store.codec.unpack(parts)
        wanted = (
            ~whole & (batch.weight > 0).numpy()
        )  # padding and unreadable images have weight 0
        missing = tuple((row, ids[row]) for row in np.flatnonzero(wanted).tolist())
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
        if not whole.all():
            gaps = torch.from_numpy(np.flatnonzero(~whole))
            outputs = outputs.map(lambda tensor: tensor.index_fill(0, gaps, 0))
        return replace(batch, teacher_outputs=TeacherOutputs(outputs, missing)), stale

    def stored(self, view: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the stored logits [B, C], and which images have them, bool [B]."""
        parts, whole, _ = self.store.parts(view, ids)
        return self.store.codec.unpack(parts).logits, torch.from_numpy(whole)

    def __call__(self, batch: Batch) -> Outputs:
        """Return float32 logits [B, C] and features, rounded as in records."""
        answer = batch.teacher_outputs
        if answer is None:
            return self.live(batch)
        known = answer.outputs.map(lambda tensor: tensor.float())
        if not answer.missing:
            return known
        places = torch.tensor([row for row, _ in answer.missing])
        rows = places.to(batch.image.device, non_blocking=True)
        whole = len(rows) == len(batch.ids) or self.fixed_shape
        bare = replace(batch, teacher_outputs=None)
        before = time.process_time()
        said = self.live(bare if whole else bare.take(places))
        if self.on_cpu:
            self._outputs, self._seconds = (
                self._outputs + len(rows),
                self._seconds + time.process_time() - before,
            )
        if whole and len(rows) < len(batch.ids):
            said = said.map(lambda tensor: tensor.index_select(0, rows))
        codec = self.store.codec
        parts = codec.pack(said)
        crc = [batch.crc[row] if batch.crc else 0 for row, _ in answer.missing]
        self._waiting.append((batch.view, [id for _, id in answer.missing], parts, crc))
        self._bytes += sum(part.nbytes for part in parts)
        if len(self._waiting) >= WAITING or self._bytes >= WAITING_BYTES:
            self.flush()
        kept = codec.unpack(parts).map(lambda tensor: tensor.float())
        features = {
            name: known.features[name].index_copy(0, rows, kept.features[name])
            for name in codec.features
        }
        return Outputs(known.logits.index_copy(0, rows, kept.logits), features)

    def flush(self) -> None:
        """Write the records that are still on the device; if another run is the writer,
        only check them.
        """
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        codec = self.store.codec
        for view, ids, parts, crc in waiting:
            arrays = [part.cpu().numpy() for part in parts]
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
            self.store.spent(self._outputs, self._seconds)
        self._outputs, self._seconds = 0, 0.0


def _tensor(part: np.ndarray) -> Tensor:
    return torch.from_numpy(
        part.astype(np.int64) if part.dtype == np.uint32 else np.ascontiguousarray(part)
    )


def open_store(
    folder: Path,
    identity: dict[str, Any],
    codec: Codec,
    num_images: int,
    writable: bool,
) -> Store:
    """Open a cache, or create it if `writable`. `identity`: the inputs of its records
    by name, JSON values.
    """
    open_folder(folder, {"format": FORMAT, **identity}, WHERE, writable)
    return Store(folder, codec, num_images, writable)


def owned(folder: Path) -> bool:
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
