"""Fill the teacher's cache ahead of training, and compare it with the teacher."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kd.config import Config
from kd.contracts import Backend
from kd.data.loader import LocalLoader
from kd.errors import ConfigError, ModelError, RunError
from kd.jobs.answers_table import Described, complete, export_answers, require_path
from kd.jobs.teach import obtain_teachers
from kd.models.cache import CachedTeacher, Store
from kd.models.teacher import LiveTeacher, NoTeacher
from kd.setup.batch import provisional_batch
from kd.setup.build import distributed
from kd.setup.cache import compare, open_cache, require_close, tolerance
from kd.setup.data import Data, open_data
from kd.setup.loaders import loaders, split_batch
from kd.setup.recipe import Session, TeacherPlan, resolve
from kd.setup.teacher import Teachers, choose_teacher
from kd.types import Plan

SAMPLE = 256
"""Records of each view that a verification computes again."""

log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class Cached:
    """What a cache holds after a job."""

    folder: str
    records: int
    missing: int
    computed: int
    """Images that the teacher's forward ran on."""
    seconds: float
    difference: float = 0.0
    """Largest |computed - stored| of the sample; 0 where nothing was compared."""


@dataclass(frozen=True, slots=True)
class _Parts:
    backend: Backend
    live: LiveTeacher | NoTeacher
    cache: CachedTeacher
    loader: LocalLoader
    val_loader: LocalLoader
    data: Data
    described: Described
    """What the exported table says about itself."""
    batch_size: int
    tolerance: float
    """Of a stored value, as a share of the largest."""


def cache(settings: Config, verify: bool = False, export: str = "") -> Cached:
    """Fill the cache of a configuration, all views; what is whole already is not computed again.

    Raises:
        ConfigError: no teacher, or no views to cache.
        ModelError: a verified record differs from the teacher's logits.
        RunError: the cache cannot be written.
    """
    count = settings.teacher.cache.views
    if not count or not settings.teacher.model:
        remedy = "Set teacher.cache.views=4, for example"
        raise ConfigError("teacher.cache.views", "there is nothing to cache", "A teacher, and 1 view or more", remedy)
    recipe, target = resolve(settings), require_path(export) if export else None
    with distributed(recipe.backend) as backend:
        teachers = obtain_teachers(recipe.teacher, open_data(recipe.data, backend), backend)
        parts = _parts(recipe.teacher, teachers, backend, recipe.backend.timeout_seconds)
        if not verify:
            _require_writable(parts.cache.store)
        start, before = time.perf_counter(), parts.cache.images
        difference = _verify(parts, count) if verify else _fill(parts, count)
        store = parts.cache.store
        missing = sum(len(store.missing(view)) for view in range(count))
        if target is not None:
            complete(parts.data.train, missing)
            export_answers(target, store, parts.live.validation(), backend, parts.val_loader, parts.described)
        done = Cached(
            folder=str(store.folder),
            records=count * store.num_images - missing,
            missing=missing,
            computed=parts.cache.images - before,
            seconds=time.perf_counter() - start,
            difference=difference,
        )
    if difference < 0:
        raise ModelError("teacher.cache.path", f"'{done.folder}' holds no whole record yet", "", "Fill it first")
    return done


def _parts(plan: TeacherPlan, teachers: Teachers, backend: Backend, timeout_seconds: float) -> _Parts:
    model, data = teachers.model, teachers.data
    assert model is not None
    section = data.section
    size = provisional_batch(len(data.train), backend) if section.batch_size == "auto" else 0
    session = Session(backend, data, split_batch(section, backend.world_size, len(data.train), size))
    images = plan.section.cache.views * len(data.train) // backend.world_size
    report = choose_teacher(session, plan.section, model, images, None)
    assert report.chosen is not None
    if report.chosen.summary and backend.rank == 0:
        log.info("teacher: %s", report.chosen.summary)
    loader, val_loader = loaders(data.views(), section, session.split, backend, timeout_seconds)
    classes = data.classes if plan.logits else ()
    return _Parts(
        backend=backend,
        live=report.live,
        cache=open_cache(plan, report, model, session),
        loader=loader,
        val_loader=val_loader,
        data=data,
        described=Described(
            data.images(), classes, plan.section.cache.views, plan.task.problem_type if classes else ""
        ),
        batch_size=session.split.batch_size,
        tolerance=tolerance(report.chosen.mode, plan.section.cache.dtype, backend.device),
    )


def _fill(parts: _Parts, views: int) -> float:
    """Compute what is missing, every rank its share, in the shapes of training."""
    for view in range(views):
        ids = parts.cache.store.missing(view).tolist()
        parts.backend.barrier()  # every rank has read the same list before one writes
        if parts.backend.rank == 0:
            log.info("cache: view %d: %d of %d images to compute", view, len(ids), parts.cache.store.num_images)
        plan = _padded(ids, parts.batch_size)
        for batch in parts.backend.put(parts.cache.lookup(parts.loader.epoch(plan, view))):
            parts.cache(batch)
            parts.backend.end_step()
            _require_writable(parts.cache.store)
        parts.cache.flush()
        _require_writable(parts.cache.store)
        parts.backend.barrier()
    return 0.0


def _require_writable(store: Store) -> None:
    where = "teacher.cache.path"
    if not store.writable:
        wrong = f"'{store.folder}' is being written by another run, or may not be written"
        raise RunError(where, wrong, "One writer at a time", "Wait until that run ends, or train: a run reads it")
    if store.stopped:
        remedy = "Free space and run the same command again: it goes on"
        raise RunError(where, f"'{store.folder}' takes no more ({store.stopped})", "", remedy)


def _verify(parts: _Parts, views: int) -> float:
    """Return the largest difference of a sample; -1 where there is nothing to compare.

    Raises:
        ModelError: it is larger than rounding explains.
    """
    worst = -1.0
    for view in range(views):
        gaps = set(parts.cache.store.missing(view).tolist())
        whole = [id for id in range(parts.cache.store.num_images) if id not in gaps]
        chosen = sorted(random.Random(view).sample(whole, min(SAMPLE, len(whole))))
        for batch in parts.backend.put(parts.loader.epoch(_padded(chosen, parts.batch_size), view)):
            found = compare(parts.cache.store, parts.live, batch)
            require_close(parts.cache.store, view, found, parts.tolerance)
            worst = max([worst, *(difference for difference, _ in found.values())])
    return worst


def _padded(ids: Sequence[int], batch_size: int) -> Plan:
    """Return a plan of `ids`, padded with weight 0 to a multiple of the global batch."""
    padding = -len(ids) % batch_size
    every = torch.tensor([*ids, *[0] * padding], dtype=torch.int64)
    return Plan(every, torch.cat([torch.ones(len(ids)), torch.zeros(padding)]))
