"""Fill the teacher's cache ahead of training, or write it as a table for others."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kd.config import Config
from kd.core.contracts import Source
from kd.core.errors import ConfigError, ModelError, RunError
from kd.core.types import Outputs, Plan
from kd.data.batches import ask
from kd.data.loader import LocalLoader
from kd.jobs.opened import opened
from kd.jobs.teach import obtain_teachers
from kd.models.answer_table import AnswerTable, write
from kd.models.cache import CachedTeacher, Store
from kd.models.teacher import LiveTeacher, NoTeacher
from kd.setup.build import Setting, shown_split
from kd.setup.cache import open_cache
from kd.setup.loaders import loaders, split_batch
from kd.setup.recipe import Session, TeacherPlan, resolve
from kd.setup.teacher import choose_teacher

ROWS = 1024  # records that are read at once

log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class Cached:
    """What a cache holds after a job."""

    folder: str
    records: int
    missing: int
    computed: int  # images that the teacher's forward ran on
    seconds: float


@dataclass(frozen=True, slots=True)
class _Work:
    session: Session
    live: LiveTeacher | NoTeacher
    cache: CachedTeacher
    loader: LocalLoader
    timeout_seconds: float


def cache(settings: Config, export: str = "") -> Cached:
    """Fill the cache of a configuration, all views; what is whole already is not computed again.

    `export` is a .safetensors file into which all answers are written too, by the images' names.
    """
    count = settings.teacher.cache.views
    if not count or not settings.teacher.model:
        remedy = "Set teacher.cache.views=4, for example"
        raise ConfigError("teacher.cache.views", "there is nothing to cache", "A teacher, and 1 view or more", remedy)
    recipe, target = resolve(settings), _require_path(export) if export else None
    with opened(recipe, obtain_teachers) as run:
        work = _open(recipe.teacher, run.setting)
        store = work.cache.store
        _require_writable(store)
        start, before = time.perf_counter(), work.cache.images
        _fill(work, count)
        missing = sum(len(store.missing(view)) for view in range(count))
        if target is not None:
            _export(target, work, recipe.teacher, missing)
        return Cached(
            folder=str(store.folder),
            records=count * store.num_images - missing,
            missing=missing,
            computed=work.cache.images - before,
            seconds=time.perf_counter() - start,
        )


def _open(plan: TeacherPlan, setting: Setting) -> _Work:
    backend, model, data = setting.backend, setting.teachers.model, setting.teachers.data
    assert model is not None
    section = data.plan
    session = Session(backend, data, split_batch(section, backend.world_size, len(data.train)))
    report = choose_teacher(session, plan, model)
    if report.line and backend.rank == 0:
        log.info("teacher: %s", report.line)
    timeout_seconds = setting.machine.timeout_seconds
    loader, _ = loaders(data.views(), section, session.split, backend, timeout_seconds)
    return _Work(session, report.live, open_cache(plan, report, model, session), loader, timeout_seconds)


def _fill(work: _Work, views: int) -> None:
    """Compute what is missing, every rank its share, in the shapes of training."""
    cache, backend = work.cache, work.session.backend
    for view in range(views):
        ids = cache.store.missing(view).tolist()
        backend.barrier()  # every rank has read the same list before one writes
        if backend.rank == 0:
            log.info("cache: view %d: %d of %d images to compute", view, len(ids), cache.store.num_images)
        plan = _padded(ids, work.session.split.batch_size)
        for batch in backend.put(cache.lookup(work.loader.epoch(plan, view))):
            cache(batch)
            backend.end_step()
            _require_writable(cache.store)
        cache.flush()
        _require_writable(cache.store)
        backend.barrier()


def _require_writable(store: Store) -> None:
    where = "teacher.cache.path"
    if not store.writable:
        wrong = f"'{store.folder}' is being written by another run, or may not be written"
        raise RunError(where, wrong, "One writer at a time", "Wait until that run ends, or train: a run reads it")
    if store.stopped:
        remedy = "Free space and run the same command again: it goes on"
        raise RunError(where, f"'{store.folder}' takes no more ({store.stopped})", "", remedy)


def _padded(ids: Sequence[int], batch_size: int) -> Plan:
    """Return a plan of `ids`, padded with weight 0 to a multiple of the global batch."""
    padding = -len(ids) % batch_size
    every = torch.tensor([*ids, *[0] * padding], dtype=torch.int64)
    return Plan(every, torch.cat([torch.ones(len(ids)), torch.zeros(padding)]))


# ------------------------------------------------------------------------------------------------ a table for others


def _require_path(path: str) -> Path:
    """Return the file to write, before minutes are spent on the cache."""
    file = Path(path).expanduser()
    if file.suffix != ".safetensors" or not file.parent.is_dir():
        raise RunError("--export", f"'{path}' cannot be written", "A .safetensors file in a folder that exists", "")
    return file


def _export(path: Path, work: _Work, plan: TeacherPlan, missing: int) -> None:
    """Write the records of all views, and the teacher's answers for validation and test images.

    The table is held in memory: views x images x classes, as the cache keeps them.
    """
    backend, data, store = work.session.backend, work.session.data, work.cache.store
    if missing:
        wrong = f"{missing} of the records of {len(data.train)} images are missing: those images cannot be decoded"
        raise RunError("--export", wrong, "Every image has an answer", "Drop them from the data")
    if backend.world_size > 1:
        raise RunError("--export", "is written by one process", "", "Fill the cache on all ranks, then export on one")
    arrays = (["logits"] if store.codec.num_classes else []) + list(store.codec.features)
    if arrays not in (["logits"], ["pooled"]):
        wrong = f"the cache keeps {' and '.join(arrays)}"
        raise ModelError("--export", wrong, "Logits alone, or pooled features alone", "Change the losses")
    values = torch.stack([torch.cat(list(_stored(store, view))) for view in range(plan.cache.views)])
    held = [source for source in (data.val, data.test) if source is not None]
    answers = [_answers(work, source, work.live.validation(source is data.test)) for source in held]
    classes = list(data.classes) if plan.logits else []
    table = AnswerTable(
        meaning="logits" if arrays == ["logits"] else "embeddings",
        names=_names(data.train),
        values=values,
        classes=classes,
        val_names=[name for source in held for name in _names(source)],
        val_values=torch.cat(answers).to(values.dtype),
        made_for=data.images().shown(),
        problem_type=plan.task.problem_type if classes else "",
    )
    try:
        write(path, table)
    except OSError as error:
        raise RunError("--export", f"'{path}' cannot be written ({error.strerror or error})", "", "") from error


def _stored(store: Store, view: int) -> Iterator[Tensor]:
    for start in range(0, store.num_images, ROWS):
        parts, _, _ = store.parts(view, range(start, min(store.num_images, start + ROWS)))
        yield _only(store.codec.unpack(parts))


def _names(source: Source) -> list[str]:
    return [source.name(id) for id in range(len(source))]


def _answers(work: _Work, source: Source, live: LiveTeacher | NoTeacher) -> Tensor:
    split = shown_split(work.session, source, torch.arange(len(source)), work.timeout_seconds)
    batches = work.session.backend.put(split.loader.epoch(split.plan, 0))
    answers = ask(live, batches, work.session.backend.device)
    return torch.cat([_only(answer.outputs) for answer in answers])[: len(source)]


def _only(outputs: Outputs) -> Tensor:
    return outputs.logits if outputs.logits.shape[1] else outputs.features["pooled"]
