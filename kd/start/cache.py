"""The teacher's cache of a configuration: what it depends on, where it lies, and who writes it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kd.config import Config
from kd.contracts import Backend, Source, Teacher
from kd.models.cache import DENSE_CLASSES, TOPK, CachedTeacher, Codec, open_store, owned
from kd.models.ensemble import TeacherModel
from kd.models.load import digest
from kd.start.kernels import Kernel
from kd.start.loading import kept
from kd.storage import hashed_folder


def cached(
    config: Config, source: Source, teacher: TeacherModel, live: Teacher, backend: Backend, kernel: Kernel
) -> CachedTeacher:
    """Put the cache of a configuration before the live teacher, which runs with `kernel`.

    One run writes a cache, the first that opens it; others that come meanwhile read it and compute what is missing.

    Raises:
        ModelError: the cache was made from something else; the field is named.
        RunError: its folder cannot be used.
    """
    classes = len(source.classes)
    topk = config.teacher.cache.topk if config.teacher.cache.topk >= 0 else (TOPK if classes > DENSE_CLASSES else 0)
    codec = Codec(classes, config.teacher.cache.dtype, topk if topk < classes else 0)
    made_from = identity(config, source, teacher, kernel.answers, codec)
    folder = place(config, made_from)
    mine = torch.tensor(1.0 if backend.rank == 0 and owned(folder) else 0.0, device=backend.device)
    writable = bool(backend.reduce_sum(mine).item())
    if backend.rank == 0 and not writable:
        told = f"'{folder}' has another writer, or may not be written: it is read, the teacher answers what is missing"
        print(f"teacher.cache: {told}.", flush=True)
    store = None
    for turn in (True, False):  # rank 0 begins the folder, then the others find it
        if turn == (backend.rank == 0):
            store = open_store(folder, made_from, codec, len(source), writable)
        backend.barrier()
    assert store is not None
    return CachedTeacher(live, store, fixed_shape=bool(backend.fixed_mode) or kernel.compiled)


def identity(config: Config, source: Source, teacher: TeacherModel, precision: str, codec: Codec) -> dict[str, Any]:
    """Return all that a record depends on, by name."""
    return {
        "teacher": digest(teacher.network),
        "input": teacher.input_spec,
        "precision": precision,
        "transform": {"image_size": config.data.image_size, **asdict(config.data.augment), **_shrunk(config)},
        "data": source.fingerprint,
        "images": len(source),
        "classes": list(source.classes),
        "seed": config.run.seed,
        "dtype": config.teacher.cache.dtype,
        "topk": codec.topk,
    }


def place(config: Config, made_from: dict[str, Any]) -> Path:
    """Return the folder of a cache: the one named, or one that only runs with the same identity come to."""
    if config.teacher.cache.path:
        return Path(config.teacher.cache.path)
    name = Path(config.teacher.model).name.replace(":", "_")
    return hashed_folder(Path(config.run.folder) / "caches", name, made_from)


def _shrunk(config: Config) -> dict[str, Any]:
    """Return what a store of decoded pixels changes in them; nothing without one."""
    section = config.data
    return {} if section.store == "none" else {"store": list(asdict(kept(config)[0]).values())}
