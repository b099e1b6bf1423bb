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

from kd import build, config, jobs
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
from kd.models.classifier import LogitsModel
from kd.models.ensemble import Ensemble
from kd.models.teacher import LiveTeacher
from kd.optim.ema import EMA
from kd.optim.schedule import Schedule
from kd.parts import build as build_part
from kd.report.console import Console
from kd.start.batch import arithmetic, fixed_batch
from kd.start.sifter import population
from kd.types import Dims, State


def train(settings: str | Path | Config | dict[str, Any], *overrides: str) -> jobs.Result:
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
    return jobs.train(config.load(values, overrides))


@dataclass(frozen=True, slots=True)
class Distilled:
    """What `distill` returns."""

    student: nn.Module
    """The module that was passed in, trained in place; with `ema` it holds the averaged weights."""
    metrics: dict[str, float]
    """The last validation row."""
    rows: list[dict[str, Any]]
    """Every row of metrics, oldest first."""
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
    """Distil any module into any module on any map-style dataset.

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
    with jobs.world(settings) as world, Console("distill", quiet=not progress or world.rank != 0) as console:
        run, sink = _run(settings, teacher, student, train, val, losses, sifter, world, workers, console)
        state = engine_train(run)
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
    batch_size, seed = fixed_batch(settings), settings.run.seed
    train_loader, num_images = _loader(train, batch_size, world, workers, seed)
    val_loader, num_val = _loader(val, getattr(val, "batch_size", None) or batch_size, world, workers, seed)
    split = arithmetic(settings, world.world_size, num_images)
    given = [LogitsModel(teacher)] if isinstance(teacher, nn.Module) else [LogitsModel(one) for one in teacher]
    live = LiveTeacher(given[0] if len(given) == 1 else Ensemble(given, [1.0] * len(given)), world.device)
    model = LogitsModel(student)
    num_classes = _num_classes(model, val_loader, num_val, world)
    criterion = losses if isinstance(losses, Criterion) else build.criterion(settings, Dims(num_classes, 0, 0))
    distillation = Distillation(model, criterion).to(world.device)
    context = population(num_images, partial(_labels, train), world, split, seed)
    section = settings.optimizer
    own = not isinstance(sifter, (str, Mapping))
    sink = Memory()
    run = Run(
        seed=seed,
        length=build.length(settings, split),
        max_norm=section.clip,
        backend=world,
        module=world.wrap(distillation),
        distillation=distillation,
        teacher=live,
        loader=train_loader,
        sifter=sifter
        if own
        else build_part("sifters", settings.sifter.kind, settings.sifter.options, "sifter", population=context),
        optimizer=build.optimizer(settings, distillation, world),
        schedule=Schedule(section.lr, section.warmup, section.min_lr, section.schedule),
        average=EMA(model, section.ema) if section.ema else None,
        evaluator=Evaluator(
            world, val_loader, evaluation_plan(num_val, _eval_batch(val, batch_size, world)), live, True, num_classes
        ),
        sink=sink,
        watcher=console,
    )
    return run, sink


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


def _eval_batch(val: Any, batch_size: int, world: Backend) -> int:
    return getattr(val, "batch_size", None) or batch_size


def _num_classes(model: LogitsModel, loader: Loader, num_images: int, world: Backend) -> int:
    """Ask the student for its number of classes with one batch."""
    size = loader.batch_size  # type: ignore[attr-defined]
    batch = next(iter(world.put(loader.epoch(evaluation_plan(num_images, size), 0))))
    model.to(world.device).eval()
    with torch.no_grad():
        return model(batch.image[:1]).logits.shape[1]
