"""Stored teacher outputs under a loop that says which image and view it shows."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from kd.core.errors import DataError
from kd.core.types import Batch, Outputs
from kd.files.storage import log
from kd.models.cache import CachedTeacher, Store, claim_writer, open_store
from kd.models.live_teacher import LiveTeacher
from kd.setup.modes import ExecutionMode
from kd.setup.open_cache import (
    CHECKED,
    cache_codec,
    require_equal_records,
    stored_differences,
    tolerance,
)
from kd.setup.recipe import Recipe

HALF = (torch.bfloat16, torch.float16)


class StoredViews:
    """Return the teacher's outputs by (id, view), and run it for those not stored."""

    def __init__(
        self,
        live: LiveTeacher,
        recipe: Recipe,
        identity: dict[str, Any],
        num_classes: int,
    ) -> None:
        """Open the folder `teacher.cache.path`, or create it.

        Args:
            live: the frozen teacher on the images' device.
            recipe: of the cache's keys and the losses.
            identity: what the teacher's outputs depend on, JSON values.
            num_classes: C of its logits [B, C].

        Raises:
            RunError: the folder holds the outputs of another teacher.
        """
        cache = recipe.teacher.cache
        folder = Path(cache.path)
        codec = cache_codec(recipe, num_classes)
        writable = _may_write(folder)
        if not writable:
            text = "teacher.cache: '%s' is read only: it has another writer"
            log.info(text, folder)
        content = {**identity, "dtype": cache.dtype, "topk": codec.topk}
        content["num_classes"] = num_classes
        # the number of images is known to the loop alone
        store = open_store(folder, content, codec, 0, writable)
        # records of an earlier process are compared once with the teacher
        self.unchecked = any(folder.glob("view_*"))
        half = any(weight.dtype in HALF for weight in live.model.parameters())
        mode = ExecutionMode("bf16" if half else "fp32", "fused")
        on_cuda = any(weight.is_cuda for weight in live.model.parameters())
        self.tolerance = tolerance(mode, cache.dtype, on_cuda)
        self.cached = CachedTeacher(live, store, on_cpu=False)

    @property
    def store(self) -> Store:
        return self.cached.store

    def __call__(self, images: Tensor, ids: Any, view: int) -> Outputs:
        """Return float32 logits [B, C], rounded as in records, and store new ones.

        Args:
            images: [B, ...] on any device.
            ids: int64 >= 0 [B].
            view: a number >= 0.

        Raises:
            DataError: ids that are not whole numbers, or the first image has other
                pixels than its stored output was made from.
            ModelError: stored outputs are not the teacher's.
        """
        numbers = _whole_numbers(ids, len(images), view)
        _require_equal_duplicates(images, numbers)
        unlabelled = torch.full((len(images),), -1)
        batch = replace(Batch.of(images, unlabelled, numbers), view=view)
        self._require_equal_pixels(images[0], int(numbers[0]), view)
        if self.unchecked:
            self._compare(batch)
        [batch] = self.cached.lookup([batch])
        known = batch.teacher_outputs
        missing = known.missing if known is not None else ()
        if missing:
            rows = {row for row, _ in missing}
            crc = (
                _crc(images[row]) if row in rows else 0 for row in range(len(images))
            )
            batch = replace(batch, crc=tuple(crc))
        outputs = self.cached(batch.to(images.device))
        if missing:
            self.cached.flush()  # the next epoch finds it, and an ended process left it
        return outputs

    def _require_equal_pixels(self, image: Tensor, id: int, view: int) -> None:
        """Compare an image with the one that its record was made from, by checksum."""
        _, _, changed = self.store.read_arrays(view, [id], [_crc(image)])
        if changed:
            wrong = f"image {id} had other pixels when view {view} was stored"
            allowed = "The same id and view always have the same pixels"
            remedy = (
                "Draw its augmentation from (id, view), leave ids out for other images,"
                " or choose another cache"
            )
            raise DataError("view", wrong, allowed, remedy)

    def _compare(self, batch: Batch) -> None:
        """Compare a few stored outputs with the teacher's, if the batch has any."""
        few = torch.arange(min(CHECKED, len(batch.ids)))
        first = batch.to(batch.image.device).take(few)
        differences = stored_differences(self.store, self.cached.live, first)
        self.unchecked = not differences
        require_equal_records(
            self.store.folder, batch.view, differences, self.tolerance
        )


def _may_write(folder: Path) -> bool:
    """Return whether this process may write; if rank 0 may, all ranks do."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return claim_writer(folder)
    claimed = [distributed.get_rank() == 0 and claim_writer(folder)]
    distributed.broadcast_object_list(claimed)
    return claimed[0]


def _require_equal_duplicates(images: Tensor, ids: Tensor) -> None:
    """Refuse different images of one id in a batch; a sampler may repeat an image."""
    first_rows: dict[int, int] = {}
    for row, id in enumerate(ids.tolist()):
        first = first_rows.setdefault(id, row)
        if first != row and not torch.equal(images[first], images[row]):
            wrong = f"has {id} for different images of this batch"
            allowed = "A number for each image of the dataset"
            raise DataError("ids", wrong, allowed, "Pass the images' own numbers")


def _whole_numbers(ids: Sequence[int] | Tensor, count: int, view: int) -> Tensor:
    """Return ids as int64 [B] on the host."""
    numbers = torch.as_tensor(ids).cpu()
    exact = not (numbers.is_floating_point() or numbers.dtype == torch.bool)
    if not exact or numbers.shape != (count,) or (numbers < 0).any():
        wrong = f"is {numbers.dtype} {list(numbers.shape)} for {count} images"
        allowed = "A whole number >= 0 of each image"
        raise DataError("ids", wrong, allowed, "Number the images of the dataset")
    if not isinstance(view, int) or view < 0:
        allowed = "A whole number >= 0"
        raise DataError("view", f"is {view!r}", allowed, "Pass epoch % views")
    return numbers.long()


def _crc(image: Tensor) -> int:
    """Return the CRC-32 of an image's pixels."""
    pixels = image.detach().cpu().contiguous().flatten().view(torch.uint8)
    return zlib.crc32(pixels.numpy().data)
