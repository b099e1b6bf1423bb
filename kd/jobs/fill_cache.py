"""Fill the teacher's cache ahead of training, or export it as a table."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd.config import Config
from kd.core.contracts import Source
from kd.core.errors import ConfigError, ModelError, RunError
from kd.core.types import Outputs, Plan
from kd.data.loader import LocalLoader
from kd.jobs.train import obtain_teachers, open_job
from kd.models.answer_table import AnswerTable, write
from kd.models.cache import CachedTeacher, Store
from kd.models.inference import predict
from kd.setup.build import shown_split
from kd.setup.build_teacher import Setting, choose_teacher
from kd.setup.data import loaders
from kd.setup.open_cache import open_cache
from kd.setup.recipe import resolve

ROWS = 1024  # records read at once

log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """Content of a cache after a job."""

    folder: str
    records: int
    missing: int
    computed: int  # images predicted by the teacher
    seconds: float


def cache(settings: Config, export: str = "") -> CacheSummary:
    """Fill all views of a configuration's cache; `export`: a .safetensors file for the
    outputs by image name.
    """
    recipe, file = resolve(settings), Path(export).expanduser()
    count = recipe.teacher.cache.num_views
    if not count or not settings.teacher.model:
        remedy = "Set teacher.cache.views=4, for example"
        raise ConfigError(
            "teacher.cache.views",
            "there is nothing to cache",
            "A teacher, and 1 view or more",
            remedy,
        )
    if export and (
        file.suffix != ".safetensors" or not file.parent.is_dir()
    ):  # refuse before minutes of work
        raise RunError(
            "--export",
            f"'{export}' cannot be written",
            "A .safetensors file in a folder that exists",
            "",
        )
    with open_job(recipe, obtain_teachers) as (setting, _):
        backend, data = setting.backend, setting.data
        report = choose_teacher(setting)
        if report.line and backend.rank == 0:
            log.info("teacher: %s", report.line)
        once = replace(
            data.plan, views=0
        )  # each view is used once here, so none is kept in memory
        loader, _ = loaders(
            data.views(), once, setting.split, backend, recipe.backend.timeout_seconds
        )
        cached = open_cache(report, setting)
        store, start, before = cached.store, time.perf_counter(), cached.images
        _require_writable(store)
        for view in range(count):
            _fill_view(cached, view, loader, setting)
        missing = sum(len(store.missing(view)) for view in range(count))
        if export:
            _export_table(file, cached, setting)
        return CacheSummary(
            folder=str(store.folder),
            records=count * store.num_images - missing,
            missing=missing,
            computed=cached.images - before,
            seconds=time.perf_counter() - start,
        )


def _fill_view(
    cached: CachedTeacher, view: int, loader: LocalLoader, setting: Setting
) -> None:
    """Compute the missing records of a view, divided over the ranks, in training's
    batch shapes.
    """
    backend, store = setting.backend, cached.store
    ids = store.missing(view).tolist()
    backend.barrier()  # every rank must read the same list before one writes
    if backend.rank == 0:
        log.info(
            "cache: view %d: %d of %d images to compute",
            view,
            len(ids),
            store.num_images,
        )
    padding = (
        -len(ids) % setting.split.batch_size
    )  # padding with weight 0 to a multiple of the global batch
    weights = torch.cat([torch.ones(len(ids)), torch.zeros(padding)])
    plan = Plan(torch.tensor([*ids, *[0] * padding], dtype=torch.int64), weights)
    for batch in backend.put(cached.lookup(loader.epoch(plan, view))):
        cached(batch)
        backend.end_step()
        _require_writable(store)
    cached.flush()
    _require_writable(store)
    backend.barrier()


def _require_writable(store: Store) -> None:
    config_path = "teacher.cache.path"
    if not store.writable:
        wrong = (
            f"'{store.folder}' is being written by another run, or may not be written"
        )
        raise RunError(
            config_path,
            wrong,
            "One writer at a time",
            "Wait until that run ends, or train: a run reads it",
        )
    if store.stopped:
        remedy = "Free space and run the same command again: it goes on"
        raise RunError(
            config_path,
            f"'{store.folder}' cannot be written ({store.stopped})",
            "",
            remedy,
        )


# --------------------------------------------------------------------------------
# export as a table


def _export_table(path: Path, cached: CachedTeacher, setting: Setting) -> None:
    """Write the records of all views, and the outputs for validation and test images;
    memory holds all of them.
    """
    recipe, backend, data, store = (
        setting.recipe,
        setting.backend,
        setting.data,
        cached.store,
    )
    views = range(recipe.teacher.cache.num_views)
    if missing := sum(len(store.missing(view)) for view in views):
        wrong = (
            f"{missing} of the records of {len(data.train)} images are missing: those"
            " images cannot be decoded"
        )
        raise RunError(
            "--export", wrong, "Outputs for every image", "Drop them from the data"
        )
    if backend.world_size > 1:
        raise RunError(
            "--export",
            "is written by one process",
            "",
            "Fill the cache on all ranks, then export on one",
        )
    arrays = (["logits"] if store.codec.num_classes else []) + list(
        store.codec.features
    )
    if arrays not in (["logits"], ["pooled"]):
        wrong = f"the cache keeps {' and '.join(arrays)}"
        raise ModelError(
            "--export",
            wrong,
            "Logits alone, or pooled features alone",
            "Change the losses",
        )

    def stored(view: int) -> Iterator[Tensor]:
        for start in range(0, store.num_images, ROWS):
            parts, _, _ = store.parts(
                view, range(start, min(store.num_images, start + ROWS))
            )
            yield _output_array(store.codec.unpack(parts))

    def answers(source: Source) -> Tensor:
        live: Any = cached.live
        split = shown_split(setting, source, torch.arange(len(source)))
        batches = backend.put(split.loader.epoch(split.plan, 0))
        found = [
            _output_array(one.outputs)
            for one in predict(
                live.validation(source is data.test), batches, backend.device
            )
        ]
        return torch.cat(found)[: len(source)]

    values = torch.stack([torch.cat(list(stored(view))) for view in views])
    held = [source for source in (data.val, data.test) if source is not None]
    classes = list(data.classes) if recipe.read.teacher_logits else []
    table = AnswerTable(
        meaning="logits" if arrays == ["logits"] else "embeddings",
        names=_image_names(data.train),
        values=values,
        classes=classes,
        val_names=[name for source in held for name in _image_names(source)],
        val_values=torch.cat([answers(source) for source in held]).to(values.dtype),
        made_for=data.images().shown(),
        problem_type=recipe.task.problem_type if classes else "",
    )
    try:
        write(path, table)
    except OSError as error:
        raise RunError(
            "--export",
            f"'{path}' cannot be written ({error.strerror or error})",
            "",
            "",
        ) from error


def _image_names(source: Source) -> list[str]:
    return [source.name(id) for id in range(len(source))]


def _output_array(outputs: Outputs) -> Tensor:
    return outputs.logits if outputs.logits.shape[1] else outputs.features["pooled"]
