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
from kd.models.answer_table import AnswerTable, augmentations, write_answers
from kd.models.cache import CachedTeacher, Store
from kd.models.inference import predict
from kd.setup.build import shown_split
from kd.setup.build_teacher import RunContext, choose_teacher
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
    """Fill all views of a configuration's cache.

    `export`: a .safetensors file for the outputs by image name; "": none.
    """
    recipe = resolve(settings)
    num_views = recipe.teacher.cache.num_views
    if not num_views or not settings.teacher.model:
        raise ConfigError(
            "teacher.cache.views",
            "there is nothing to cache",
            "A teacher, and 1 view or more",
            "Set teacher.cache.views=4, for example",
        )
    file = Path(export).expanduser()
    # refuse before minutes of work
    if export and (file.suffix != ".safetensors" or not file.parent.is_dir()):
        allowed = "A .safetensors file in a folder that exists"
        raise RunError("--export", f"'{export}' cannot be written", allowed, "")
    with open_job(recipe, obtain_teachers) as (setting, _):
        backend = setting.backend
        data = setting.data
        report = choose_teacher(setting)
        if report.line and backend.rank == 0:
            log.info("teacher: %s", report.line)
        # each view is used once here, so none is kept in memory
        plan = replace(data.plan, views=0)
        loader, _ = loaders(
            data.views(), plan, setting.split, backend, recipe.backend.timeout_seconds
        )
        cached = open_cache(report, setting)
        store = cached.store
        start = time.perf_counter()
        computed_before = cached.images
        _require_writable(store)
        for view in range(num_views):
            _fill_view(cached, view, loader, setting)
        missing = _num_missing(store, num_views)
        if export:
            _export_table(file, cached, setting)
        return CacheSummary(
            folder=str(store.folder),
            records=num_views * store.num_images - missing,
            missing=missing,
            computed=cached.images - computed_before,
            seconds=time.perf_counter() - start,
        )


def _num_missing(store: Store, num_views: int) -> int:
    return sum(len(store.missing(view)) for view in range(num_views))


def _fill_view(
    cached: CachedTeacher, view: int, loader: LocalLoader, setting: RunContext
) -> None:
    """Compute the missing records of a view, in training's batch shapes."""
    backend = setting.backend
    store = cached.store
    ids = store.missing(view).tolist()
    backend.barrier()  # every rank must read the same list before one writes
    if backend.rank == 0:
        log.info(
            "cache: view %d: %d of %d images to compute",
            view,
            len(ids),
            store.num_images,
        )
    # padding with weight 0 to a multiple of the global batch
    padding = -len(ids) % setting.split.batch_size
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
        remedy = "Wait until that run ends, or train: a run reads it"
        raise RunError(config_path, wrong, "One writer at a time", remedy)
    if store.stopped:
        wrong = f"'{store.folder}' cannot be written ({store.stopped})"
        remedy = "Free space and run the same command again: it goes on"
        raise RunError(config_path, wrong, "", remedy)


# --------------------------------------------------------------------------------
# export as a table


def _export_table(path: Path, cached: CachedTeacher, setting: RunContext) -> None:
    """Write the records of all views, and the outputs for validation and test images.

    Memory holds all of them.
    """
    recipe = setting.recipe
    data = setting.data
    store = cached.store
    num_views = recipe.teacher.cache.num_views
    _require_exportable(setting, store, num_views)
    values = torch.stack(
        [torch.cat(list(_stored_outputs(store, view))) for view in range(num_views)]
    )
    splits = [source for source in (data.val, data.test) if source is not None]
    val_values = torch.cat(
        [_predict_split(setting, cached, source) for source in splits]
    )
    classes = list(data.classes) if recipe.read.teacher_logits else []
    images = data.images()
    table = AnswerTable(
        meaning="logits" if store.codec.num_classes else "embeddings",
        names=_image_names(data.train),
        values=values,
        classes=classes,
        val_names=[name for source in splits for name in _image_names(source)],
        val_values=val_values.to(values.dtype),
        made_for=images.pixel_facts() if augmentations(images.transform) else {},
        problem_type=recipe.task.problem_type if classes else "",
    )
    try:
        write_answers(path, table)
    except OSError as error:
        wrong = f"'{path}' cannot be written ({error.strerror or error})"
        raise RunError("--export", wrong, "", "") from error


def _require_exportable(setting: RunContext, store: Store, num_views: int) -> None:
    """Require a complete cache of one array, in one process."""
    if missing := _num_missing(store, num_views):
        wrong = (
            f"{missing} of the records of {len(setting.data.train)} images are missing:"
            " those images cannot be decoded"
        )
        remedy = "Drop them from the data"
        raise RunError("--export", wrong, "Outputs for every image", remedy)
    if setting.backend.world_size > 1:
        remedy = "Fill the cache on all ranks, then export on one"
        raise RunError("--export", "is written by one process", "", remedy)
    arrays = ["logits"] if store.codec.num_classes else []
    arrays += store.codec.features
    if arrays not in (["logits"], ["pooled"]):
        wrong = f"the cache keeps {' and '.join(arrays)}"
        allowed = "Logits alone, or pooled features alone"
        raise ModelError("--export", wrong, allowed, "Change the losses")


def _stored_outputs(store: Store, view: int) -> Iterator[Tensor]:
    for start in range(0, store.num_images, ROWS):
        ids = range(start, min(store.num_images, start + ROWS))
        arrays, _, _ = store.read_arrays(view, ids)
        yield _output_array(store.codec.unpack(arrays))


def _predict_split(
    setting: RunContext, cached: CachedTeacher, source: Source
) -> Tensor:
    """Return the teacher's outputs for the images of a validation or test split."""
    live: Any = cached.live
    backend = setting.backend
    split = shown_split(setting, source, torch.arange(len(source)))
    batches = backend.put(split.loader.epoch(split.plan, 0))
    teacher = live.validation(source is setting.data.test)
    outputs = [
        _output_array(prediction.outputs)
        for prediction in predict(teacher, batches, backend.device)
    ]
    return torch.cat(outputs)[: len(source)]


def _image_names(source: Source) -> list[str]:
    return [source.name(id) for id in range(len(source))]


def _output_array(outputs: Outputs) -> Tensor:
    return outputs.logits if outputs.logits.shape[1] else outputs.features["pooled"]
