"""The same engine from Python: `kd.train` for a configuration, `kd.distill` for modules and datasets of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from kd import config
from kd.artifacts.memory import Memory
from kd.config import Config
from kd.contracts import Backend, Loader, Sifter
from kd.data.loader import LocalLoader, evaluation_plan
from kd.data.map_dataset import BatchLoader, MapDataset
from kd.engine.criterion import Criterion, Distillation
from kd.engine.evaluate import Evaluator
from kd.engine.loop import train as engine_train
from kd.engine.run import Run
from kd.errors import ConfigError
from kd.jobs._distill import Result
from kd.jobs._observe import clock_of, where_the_time_went
from kd.jobs.train import train as train_job
from kd.models.classifier import Ensemble, LogitsModel
from kd.models.teacher import LiveTeacher
from kd.monitor.timeline import Timeline
from kd.parts import build as build_part
from kd.report.console import Console
from kd.setup.build import assemble, distributed, run_length
from kd.setup.data import fixed_batch, split_batch
from kd.setup.gate import sift_context
from kd.setup.student import build_criterion
from kd.types import Dims, State


def train(settings: str | Path | Config | dict[str, Any], *overrides: str) -> Result:
    """Run a configuration, as `kd-train` does.

    Args:
        settings: a YAML file, its contents, or a loaded Config.
        overrides: `key=value`, as on the command line.

    Returns:
        The run: its folder, the metrics of its best checkpoint, its report.

    Raises:
        KdError: anything that the user can repair, in one line.
    """
    values = config.to_dict(settings) if isinstance(settings, Config) else settings
    return train_job(config.load(values, overrides))


@dataclass(frozen=True, slots=True)
class Distilled:
    """What `distill` returns."""

    student: nn.Module
    """The module that was passed in, trained in place; with `ema` it holds the averaged weights."""
    metrics: dict[str, float]
    """The last validation row."""
    rows: list[dict[str, Any]]
    """Every row of metrics, oldest first; training rows say where the time went."""
    state: State


def distill(
    *,
    teacher: nn.Module | Sequence[nn.Module],
    student: nn.Module,
    train: Any,
    val: Any,
    losses: Sequence[Mapping[str, Any]] | Criterion = ({"kind": "kl"},),
    sifter: str | Mapping[str, Any] | Sifter = "none",
    epochs: int = 10,
    steps: int = 0,
    batch_size: int = 64,
    optimizer: Mapping[str, Any] | None = None,
    backend: Mapping[str, Any] | None = None,
    workers: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> Distilled:
    """Distill any module into any module on any map-style dataset.

    Both models get the very images that the dataset returns; normalization is the caller's.

    Args:
        teacher: maps images [B, ...] to logits [B, C]; a frozen copy of it is used. Several: their probabilities are
            averaged.
        student: maps the same images to logits [B, C]; trained in place.
        train: a map-style dataset of (image tensor, label), or a DataLoader of such batches, taken as it comes.
        val: the same, for evaluation; a DataLoader must not shuffle.
        losses: terms as in a configuration, `{"kind": "kl", "weight": 1.0, "temperature": 4.0}`, or a Criterion.
        sifter: a name, a section as in a configuration, or a Sifter. A DataLoader has no ids: `none` only.
        epochs: passes over the data.
        steps: optimizer steps instead; 0: `epochs` decides.
        batch_size: images per optimizer step; a DataLoader brings its own.
        optimizer: keys of the `optimizer` section.
        backend: keys of the `backend` section; `precision: auto` means fp32 here.
        workers: processes that load a map-style dataset.
        seed: of order, views and dropout; the models' weights are the caller's.
        progress: print progress.

    Raises:
        ConfigError: an unknown key, loss or sifter, a bad value.
    """
    settings = _settings(losses, sifter, epochs, steps, batch_size, optimizer, backend, seed)
    if isinstance(train, DataLoader):
        if settings.sifter.kind != "none" or not isinstance(sifter, (str, Mapping)):
            remedy = "Pass train.dataset instead of the DataLoader"
            raise ConfigError("sifter", "needs ids, and a DataLoader has none", "A map-style dataset has", remedy)
        settings = replace(settings, data=replace(settings.data, batch_size=train.batch_size or batch_size))
    with distributed(settings.backend) as world, Console("distill", quiet=not progress or world.rank != 0) as console:
        run, sink = _run(settings, teacher, student, train, val, losses, sifter, world, workers, console)
        with Timeline(clock_of(settings.backend.kind, world.device), communication=world.communication_ms) as timeline:
            state = engine_train(replace(run, span=timeline.span, window=timeline.window))
        for line in where_the_time_went("distill", timeline):
            console.info(line)
        if run.average is not None:
            run.average.apply()
    rows = [row for row in sink.rows if row["kind"] == "val"]
    return Distilled(student, rows[-1], sink.rows, state)


def _settings(
    losses: Any,
    sifter: Any,
    epochs: int,
    steps: int,
    batch_size: int,
    optimizer: Mapping[str, Any] | None,
    backend: Mapping[str, Any] | None,
    seed: int,
) -> Config:
    """Check the arguments with the schema of a configuration, so that both say the same of the same mistake."""
    section = {"kind": sifter} if isinstance(sifter, str) else dict(sifter) if isinstance(sifter, Mapping) else {}
    return config.load(
        {
            "run": {"name": "distill", "epochs": epochs, "steps": steps, "seed": seed},
            "data": {"kind": "imagefolder", "root": ".", "batch_size": batch_size},
            "teacher": {"model": "given"},
            "student": {"model": "given"},
            "losses": [{"kind": "kl"}] if isinstance(losses, Criterion) else [dict(term) for term in losses],
            "sifter": section,
            "optimizer": dict(optimizer or {}),
            "backend": dict(backend or {}),
        }
    )


def _run(
    settings: Config,
    teacher: nn.Module | Sequence[nn.Module],
    student: nn.Module,
    train: Any,
    val: Any,
    losses: Any,
    sifter: Any,
    world: Backend,
    workers: int,
    console: Console,
) -> tuple[Run, Memory]:
    batch_size, seed = fixed_batch(settings.data), settings.run.seed
    train_loader, num_images = _loader(train, batch_size, world, workers, seed)
    val_loader, num_val = _loader(val, getattr(val, "batch_size", None) or batch_size, world, workers, seed)
    split = split_batch(settings.data, world.world_size, num_images)
    given = [LogitsModel(teacher)] if isinstance(teacher, nn.Module) else [LogitsModel(one) for one in teacher]
    live = LiveTeacher(given[0] if len(given) == 1 else Ensemble(given, [1.0] * len(given)), world.device)
    model = LogitsModel(student)
    num_classes = _num_classes(model, val_loader, num_val, world)
    criterion = (
        losses if isinstance(losses, Criterion) else build_criterion(settings.losses, [Dims(num_classes, 0, 0)], seed)
    )
    distillation = Distillation(model, criterion).to(world.device)
    if isinstance(sifter, (str, Mapping)):
        context = sift_context(num_images, partial(_labels, train), world, split, seed)
        section = settings.sifter
        sifter = build_part("sifters", section.kind, section.options, "sifter", context=context)
    sink, length = Memory(), run_length(settings.run, split, settings.data.views)
    plan = evaluation_plan(num_val, getattr(val, "batch_size", None) or batch_size)
    evaluator = Evaluator(world, val_loader, plan, live, True, num_classes)
    parts = (distillation, live, train_loader, sifter, evaluator, sink, console)
    return assemble(settings.optimizer, seed, length, world, *parts), sink


def _loader(items: Any, batch_size: int, world: Backend, workers: int, seed: int) -> tuple[Loader, int]:
    if isinstance(items, DataLoader):
        if world.world_size > 1:
            remedy = "Pass the dataset: kd divides it over the ranks"
            raise ConfigError("train", "a DataLoader does not know the ranks", "A map-style dataset", remedy)
        return BatchLoader(items, batch_size), len(items.dataset) // batch_size * batch_size  # type: ignore[arg-type]
    dataset = MapDataset(items, seed)
    return LocalLoader(dataset, batch_size, 1, world.rank, world.world_size, workers), len(dataset)


def _labels(items: Any) -> torch.Tensor:
    """Return the class of every item; `targets`, where a dataset has them, spare reading the images."""
    targets = getattr(items, "targets", None)
    return torch.as_tensor(targets if targets is not None else [int(items[i][1]) for i in range(len(items))])


def _num_classes(model: LogitsModel, loader: Loader, num_images: int, world: Backend) -> int:
    """Ask the student for its number of classes with one batch."""
    size = loader.batch_size  # type: ignore[attr-defined]
    batch = next(iter(world.put(loader.epoch(evaluation_plan(num_images, size), 0))))
    model.to(world.device).eval()
    with torch.no_grad():
        return model(batch.image[:1]).logits.shape[1]
