"""Open a run's teacher cache and check that its records still equal the teacher's
outputs.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.config.schema import QUANTIZED, Cache
from kd.core.contracts import Dataset, Teacher
from kd.core.errors import ConfigError, CorruptImage, ModelError
from kd.core.ranks import numbers_of_rank_0
from kd.core.seeds import evenly_spaced
from kd.core.types import Batch
from kd.files.records import record_bytes
from kd.files.storage import hashed_folder, log
from kd.models.cache import (
    DENSE_CLASSES,
    TOPK,
    CachedTeacher,
    Codec,
    Store,
    open_store,
    owned,
)
from kd.models.classifier import feature_shapes
from kd.setup.build_teacher import Setting, TeacherReport
from kd.setup.data import Data
from kd.setup.modes import ExecutionMode
from kd.setup.recipe import Recipe

CHECKED = 16  # records recomputed whenever a cache is opened
SEARCHED = (
    4096  # ids searched first for these records: a large cache is not read as a whole
)
TOLERANCE = {"fp16": 2e-3, "fp32": 1e-4}
"""Largest difference as a share of the largest logit: rounding, and the effect of
another batch shape.
"""
BF16_TOLERANCE = 0.05
"""Tolerance in bfloat16: the two attention kernels differ by 0.014 on
untrained ViTs.
"""
TF32_TOLERANCE = 0.01
"""Tolerance with TensorFloat-32 (10 bits): the batch shape decides which products are
rounded.
"""
QUANTIZED_TOLERANCE = 0.1
"""Tolerance of a quantized teacher: an image's activation scale depends on the rest of
its batch.
"""


def cache_identity(
    recipe: Recipe, model: dict[str, Any], mode: ExecutionMode, data: Data, codec: Codec
) -> dict[str, Any]:
    """Return everything that the stored outputs depend on, by name; JSON values."""
    made_from: dict[str, Any] = {
        **model,
        "precision": mode.numerics,
        "transform": data.transform(),
        "data": data.train.fingerprint,
        "images": len(data.train),
        "classes": list(data.classes),
        "seed": data.plan.seed,
        "dtype": recipe.teacher.cache.dtype,
        "topk": codec.topk,
    }
    if codec.features:
        made_from["features"] = {
            name: list(shape) for name, shape in codec.features.items()
        }
    if recipe.task.logits not in ("", "softmax"):
        made_from["outputs"] = recipe.task.logits
    if not codec.num_classes:  # labels and class names do not matter
        del made_from["classes"]
    return made_from


def cache_codec(
    recipe: Recipe,
    num_classes: int,
    features: Mapping[str, tuple[int, ...]] | None = None,
) -> Codec:
    """Return the codec for logits of `num_classes` classes and features of these
    shapes.
    """
    cache, classes = (
        recipe.teacher.cache,
        (num_classes if recipe.read.teacher_logits else 0),
    )
    topk = (
        cache.topk
        if cache.topk >= 0
        else (TOPK if classes > DENSE_CLASSES and recipe.task.keeps_topk else 0)
    )
    return Codec(classes, cache.dtype, topk if topk < classes else 0, features)


def price(cache: Cache, codec: Codec, num_images: int) -> str:
    """Describe the size of a full cache; ConfigError: beyond `max_gb`."""
    views, size = cache.num_views, record_bytes(codec.record.itemsize)
    total = views * num_images * size / 1e9
    arrays = (
        ", ".join(f"{name} {list(shape)}" for name, shape in codec.features.items())
        or "logits"
    )
    shown = f"{views} view{'s' if views > 1 else ''} of {num_images} images"
    size_text = f"{total:.3g} GB" if total >= 1 else f"{1000 * total:.3g} MB"
    text = f"{size_text} for {shown}, {size / 1e3:.3g} kB each ({arrays})"
    if total > cache.max_gb:
        remedy = (
            "Raise teacher.cache.max_gb, keep fewer views, or set teacher.cache.views=0"
            " to run the teacher live"
        )
        allowed = f"At most {cache.max_gb:g} GB (teacher.cache.max_gb)"
        raise ConfigError(
            "teacher.cache.max_gb", f"the cache would take {text}", allowed, remedy
        )
    return text


def tolerance(mode: ExecutionMode, dtype: str, cuda: bool) -> float:
    """Return the largest allowed difference between stored and computed values, as a
    share of the largest.
    """
    if mode.precision in QUANTIZED:
        return QUANTIZED_TOLERANCE
    if mode.precision == "bf16":
        return BF16_TOLERANCE
    rounded = cuda and (
        torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    )
    return max(TF32_TOLERANCE if rounded else 0.0, TOLERANCE[dtype])


def open_cache(report: TeacherReport, setting: Setting) -> CachedTeacher:
    """Put the cache before the live teacher. The first run to open it writes; others
    read and compute the rest.
    """
    recipe, backend, data, mode = (
        setting.recipe,
        setting.backend,
        setting.data,
        report.mode,
    )
    cache, model = recipe.teacher.cache, setting.teachers.model
    assert mode is not None
    assert model is not None
    codec = cache_codec(
        recipe, len(data.classes), feature_shapes(model, data.plan.image_size)
    )
    size = price(cache, codec, len(data.train))
    made_from = cache_identity(recipe, model.identity(), mode, data, codec)
    name, path = Path(recipe.teacher.model).name.replace(":", "_"), cache.path
    folder = (
        Path(path)
        if path
        else hashed_folder(Path(data.plan.folder) / "caches", name, made_from)
    )
    [writable] = numbers_of_rank_0(backend, [backend.rank == 0 and owned(folder)])
    if backend.rank == 0 and not writable:
        log.info(
            "teacher.cache: '%s' has another writer or may not be written; it is read"
            " only.",
            folder,
        )
    if backend.rank == 0 and codec.features:
        log.info("teacher.cache: %s", size)
    store = None
    for turn in (True, False):  # rank 0 creates the folder, then the others find it
        if turn == (backend.rank == 0):
            store = open_store(
                folder, made_from, codec, len(data.train), bool(writable)
            )
        backend.barrier()
    assert store is not None
    cached = CachedTeacher(
        report.live, store, backend.facts.compiles or mode.compiled, backend.facts.cpu
    )
    check_records(cached, setting, tolerance(mode, cache.dtype, backend.facts.cuda))
    return cached


def check_records(cached: CachedTeacher, setting: Setting, tolerance: float) -> None:
    """Recompute a few records of view 0 and compare. All ranks must call this; rank 0
    computes, all get the error.

    This detects changes that the identity does not record: other versions of timm,
    Pillow or a JPEG decoder. It costs one forward of `CHECKED` images (of a
    micro-batch, if batch shapes are compiled).
    """
    backend, found = (
        setting.backend,
        {name: (0.0, 0.0) for name in ("logits", *cached.store.codec.features)},
    )
    ids, store = [], cached.store
    if backend.rank == 0:  # with a whole record of view 0
        every = np.asarray(evenly_spaced(store.num_images, SEARCHED))
        every = every[store.whole(0, every.tolist())]
        if not len(every) and store.num_images > SEARCHED:
            every = np.setdiff1d(np.arange(store.num_images), store.missing(0))
        ids = every[evenly_spaced(len(every), CHECKED)].tolist()
    if cached.fixed_shape:
        ids = (
            [ids[number % len(ids)] for number in range(setting.split.micro_batch)]
            if ids
            else []
        )
    batch = _batch(ids, setting.data.views()[0])
    if batch is not None:
        found |= compare(store, cached.live, batch.to(backend.device))
    shared = backend.reduce_sum(
        torch.tensor(list(found.values()), device=backend.device)
    ).tolist()
    for name, (difference, largest) in zip(found, shared, strict=True):
        if not difference <= tolerance * (
            max(1.0, largest) if name == "logits" else largest
        ):
            what = "logit" if name == "logits" else f"value of '{name}'"
            wrong = (
                f"'{store.folder}', view 0: a stored {what} differs by {difference:.3g}"
                " from what the teacher "
            )
            allowed = f"At most {tolerance:g} of the largest ({largest:.3g})"
            remedy = "Remove the folder, or choose another teacher.cache.path"
            raise ModelError(
                "teacher.cache.path", f"{wrong}computes now", allowed, remedy
            )


def compare(
    store: Store, live: Teacher, batch: Batch
) -> dict[str, tuple[float, float]]:
    """Return for each stored array the largest |stored - live| of a batch's known
    images, and the largest value.
    """
    parts, complete, _ = store.parts(batch.view, batch.ids.tolist(), batch.crc)
    rows = torch.from_numpy(complete) & (batch.weight > 0).cpu()
    if not rows.any():
        return {}
    outputs = live(batch).map(lambda tensor: tensor.float().cpu()[rows])
    return store.codec.differences([part[rows] for part in parts], outputs)


def _batch(ids: list[int], train: Dataset) -> Batch | None:
    """Return the training pixels of view 0, without images that cannot be read; the run
    handles those.
    """
    read = {}
    for id in ids:
        with suppress(CorruptImage):
            if (sample := train.load(id, 0)).readable:
                read[id] = sample
    if not read:
        return None
    pixels, unknown = (
        torch.stack([sample.pixels for sample in read.values()]),
        torch.full((len(read),), -1),
    )
    batch = Batch.of(
        pixels, unknown, torch.tensor([*read])
    )  # a teacher reads no labels
    return replace(batch, crc=tuple(sample.crc for sample in read.values()))
