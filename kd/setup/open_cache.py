"""Open a run's teacher cache and check its records.

They must still equal the teacher's outputs.
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
    claim_writer,
    open_store,
)
from kd.models.classifier import feature_shapes
from kd.setup.build_teacher import RunContext, TeacherReport
from kd.setup.data import Data
from kd.setup.modes import ExecutionMode
from kd.setup.recipe import Recipe

CHECKED = 16  # records recomputed whenever a cache is opened
# ids searched first for these records: a large cache is not read as a whole
SEARCHED = 4096
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
    identity: dict[str, Any] = {
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
        identity["features"] = {
            name: list(shape) for name, shape in codec.features.items()
        }
    if recipe.task.logits not in ("", "softmax"):
        identity["outputs"] = recipe.task.logits
    if not codec.num_classes:  # labels and class names do not matter
        del identity["classes"]
    return identity


def cache_codec(
    recipe: Recipe,
    num_classes: int,
    features: Mapping[str, tuple[int, ...]] | None = None,
) -> Codec:
    """Return the codec for logits of `num_classes` classes and these features."""
    cache = recipe.teacher.cache
    classes = num_classes if recipe.read.teacher_logits else 0
    topk = cache.topk
    if topk < 0:
        topk = TOPK if classes > DENSE_CLASSES and recipe.task.keeps_topk else 0
    return Codec(classes, cache.dtype, topk if topk < classes else 0, features)


def price(cache: Cache, codec: Codec, num_images: int) -> str:
    """Describe the size of a full cache.

    ConfigError: it is beyond `max_gb`.
    """
    views = cache.num_views
    size = record_bytes(codec.record.itemsize)
    total = views * num_images * size / 1e9
    features = [f"{name} {list(shape)}" for name, shape in codec.features.items()]
    size_text = f"{total:.3g} GB" if total >= 1 else f"{1000 * total:.3g} MB"
    text = (
        f"{size_text} for {views} view{'s' if views > 1 else ''} of {num_images}"
        f" images, {size / 1e3:.3g} kB each ({', '.join(features) or 'logits'})"
    )
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
    """Return the largest allowed difference between stored and computed values.

    It is a share of the largest value.
    """
    if mode.precision in QUANTIZED:
        return QUANTIZED_TOLERANCE
    if mode.precision == "bf16":
        return BF16_TOLERANCE
    rounded = cuda and (
        torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    )
    return max(TF32_TOLERANCE if rounded else 0.0, TOLERANCE[dtype])


def open_cache(report: TeacherReport, context: RunContext) -> CachedTeacher:
    """Put the cache before the live teacher.

    The first run to open it writes; others read and compute the rest.
    """
    recipe = context.recipe
    backend = context.backend
    data = context.data
    mode = report.mode
    cache = recipe.teacher.cache
    model = context.teachers.model
    assert mode is not None
    assert model is not None
    codec = cache_codec(
        recipe, len(data.classes), feature_shapes(model, data.plan.image_size)
    )
    size = price(cache, codec, len(data.train))
    identity = cache_identity(recipe, model.identity(), mode, data, codec)
    folder = Path(cache.path)
    if not cache.path:
        name = Path(recipe.teacher.model).name.replace(":", "_")
        folder = hashed_folder(Path(data.plan.folder) / "caches", name, identity)
    [writable] = numbers_of_rank_0(
        backend, [backend.rank == 0 and claim_writer(folder)]
    )
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
            store = open_store(folder, identity, codec, len(data.train), bool(writable))
        backend.barrier()
    assert store is not None
    cached = CachedTeacher(
        report.live, store, backend.facts.compiles or mode.compiled, backend.facts.cpu
    )
    check_records(cached, context, tolerance(mode, cache.dtype, backend.facts.cuda))
    return cached


def check_records(cached: CachedTeacher, context: RunContext, tolerance: float) -> None:
    """Recompute a few records of view 0 and compare them.

    All ranks must call this; rank 0 computes, and all get the error.

    This detects changes that the identity does not record: other versions of timm,
    Pillow or a JPEG decoder. It costs one forward of `CHECKED` images (of a
    micro-batch, if batch shapes are compiled).
    """
    backend = context.backend
    store = cached.store
    ids = _recorded_ids(store) if backend.rank == 0 else []
    if cached.fixed_shape and ids:
        ids = [ids[i % len(ids)] for i in range(context.split.micro_batch)]
    differences = {name: (0.0, 0.0) for name in ("logits", *store.codec.features)}
    batch = _plain_batch(ids, context.data.views()[0])
    if batch is not None:
        differences |= stored_differences(store, cached.live, batch.to(backend.device))
    pairs = torch.tensor(list(differences.values()), device=backend.device)
    shared = backend.reduce_sum(pairs).tolist()
    shared_differences = dict(zip(differences, map(tuple, shared), strict=True))
    require_equal_records(store.folder, 0, shared_differences, tolerance)


def require_equal_records(
    folder: Path,
    view: int,
    differences: Mapping[str, tuple[float, float]],
    tolerance: float,
) -> None:
    """Require small `stored_differences`; `tolerance` is a share of the largest."""
    for name, (difference, largest) in differences.items():
        scale = max(1.0, largest) if name == "logits" else largest
        if not difference <= tolerance * scale:
            value = "logit" if name == "logits" else f"value of '{name}'"
            raise ModelError(
                "teacher.cache.path",
                f"'{folder}', view {view}: a stored {value} differs by"
                f" {difference:.3g} from what the teacher computes now",
                f"At most {tolerance:g} of the largest ({largest:.3g})",
                "Remove the folder, or choose another teacher.cache.path",
            )


def _recorded_ids(store: Store) -> list[int]:
    """Return the ids of a few images with a complete record of view 0."""
    ids = np.asarray(evenly_spaced(store.num_images, SEARCHED))
    ids = ids[store.have_records(0, ids.tolist())]
    if not len(ids) and store.num_images > SEARCHED:
        ids = np.setdiff1d(np.arange(store.num_images), store.missing(0))
    return ids[evenly_spaced(len(ids), CHECKED)].tolist()


def stored_differences(
    store: Store, live: Teacher, batch: Batch
) -> dict[str, tuple[float, float]]:
    """Return each array's largest |stored - live| of a batch, and largest value.

    Images without a valid record are left out.
    """
    arrays, valid, _ = store.read_arrays(batch.view, batch.ids.tolist(), batch.crc)
    rows = torch.from_numpy(valid) & (batch.weight > 0).cpu()
    if not rows.any():
        return {}
    outputs = live(batch).map(lambda tensor: tensor.float().cpu()[rows])
    return store.codec.differences([array[rows] for array in arrays], outputs)


def _plain_batch(ids: list[int], train: Dataset) -> Batch | None:
    """Return the training pixels of view 0, without images that cannot be read.

    The run handles those.
    """
    samples = {}
    for id in ids:
        with suppress(CorruptImage):
            sample = train.load(id, 0)
            if sample.readable:
                samples[id] = sample
    if not samples:
        return None
    pixels = torch.stack([sample.pixels for sample in samples.values()])
    labels = torch.full((len(samples),), -1)  # a teacher reads no labels
    batch = Batch.of(pixels, labels, torch.tensor([*samples]))
    return replace(batch, crc=tuple(sample.crc for sample in samples.values()))
