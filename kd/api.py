"""The same engine from Python: `kd.train` for a configuration, `kd.distill` for modules and datasets of your own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from kd import config
from kd.artifacts.memory import Memory
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.config.validate import reads
from kd.contracts import Backend, Loader, Sifter
from kd.data.loader import LocalLoader, evaluation_plan
from kd.data.map_dataset import BatchLoader, MapDataset
from kd.engine.criterion import Criterion, Distillation
from kd.engine.evaluate import Evaluator
from kd.engine.label_sets import LabelSetEvaluator
from kd.engine.loop import train as engine_train
from kd.engine.run import Run
from kd.errors import ConfigError
from kd.jobs.distill import Result
from kd.jobs.folder import different_keys, require_same
from kd.jobs.observe import clock_of, where_the_time_went
from kd.jobs.train import train as train_job
from kd.models.classifier import Ensemble, LogitsModel
from kd.models.teacher import LiveTeacher
from kd.monitor.timeline import Timeline
from kd.parts import build as build_part
from kd.progress.console import Console
from kd.setup.build import assemble, distributed, run_length
from kd.setup.data import fixed_batch, split_batch
from kd.setup.gate import sift_context
from kd.setup.recipe import flatten
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
    labels: str = "all",
    folder: str | Path | None = None,
) -> Distilled:
    """Distill any module into any module on any map-style dataset.

    Both models get the very images that the dataset returns; normalization is the caller's. A model returns its logits
    [B, C] as a tensor, as the first of a tuple, or in an object with `.logits` or `.pooler_output`.

    Args:
        teacher: maps images [B, ...] to logits; a frozen copy of it is used. Several: their probabilities are averaged.
        student: maps the same images to logits; trained in place.
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
        labels: "all"; "some": loss terms on labels skip images with the label -1; "none": the datasets hold images
            alone, or labels that are not read, and the student is compared with the teacher; "sets": a label is 0 or 1
            for each class, for the losses bce and binary_kl.
        folder: checkpoints and metrics are written there after each epoch; called again, `distill` resumes from it.

    Raises:
        ConfigError: an unknown key, loss or sifter, a bad value, models that answer with different classes.
        DataError: an item is no image with a label.
        RunError: `folder` holds another run.
    """
    settings = _settings(losses, sifter, epochs, steps, batch_size, optimizer, backend, seed, labels)
    if isinstance(train, DataLoader):
        if folder is not None:
            remedy = "Pass train.dataset instead of the DataLoader, or no folder"
            raise ConfigError("folder", "is set, but a DataLoader shuffles anew when it resumes", "", remedy)
        if settings.sifter.kind != "none" or not isinstance(sifter, (str, Mapping)):
            remedy = "Pass train.dataset instead of the DataLoader"
            raise ConfigError("sifter", "needs ids, and a DataLoader has none", "A map-style dataset has", remedy)
        settings = replace(settings, data=replace(settings.data, batch_size=train.batch_size or batch_size))
    with (
        distributed(settings.backend) as world,
        Console("distill", quiet=not progress or world.rank != 0) as console,
        _sink(folder, settings, world) as sink,
    ):
        run = _run(settings, teacher, student, train, val, losses, sifter, world, workers, sink, console)
        own = sink.path / f"timeline_{world.rank}.jsonl" if isinstance(sink, RunDir) else None
        start = sink.step() if isinstance(sink, RunDir) else 0
        clock = clock_of(settings.backend.kind, world.device)
        with Timeline(clock, own, start, world.communication_ms) as timeline:
            state = engine_train(replace(run, span=timeline.span, window=timeline.window))
        for line in where_the_time_went("distill", timeline):
            console.info(line)
        if run.average is not None:
            run.average.apply()
        world.barrier()  # rank 0 has written its rows
        rows = sink.rows() if isinstance(sink, RunDir) else sink.rows
    return Distilled(student, [row for row in rows if row["kind"] == "val"][-1], rows, state)


@contextmanager
def _sink(folder: str | Path | None, settings: Config, world: Backend) -> Iterator[Memory | RunDir]:
    """Yield where rows and checkpoints go; a folder is held against other processes meanwhile."""
    if folder is None:
        yield Memory()
        return
    kept = RunDir(Path(folder), world.rank)
    differences: list[str] = []
    if kept.stored_config() is not None:
        both = (config.load(kept.config_file, here=False), settings)
        differences = different_keys(*(flatten(config.to_dict(one)) for one in both))
    kept.open(config.dump(settings), differences)
    try:
        yield kept
    finally:
        kept.close()


def _settings(
    losses: Any,
    sifter: Any,
    epochs: int,
    steps: int,
    batch_size: int,
    optimizer: Mapping[str, Any] | None,
    backend: Mapping[str, Any] | None,
    seed: int,
    labels: str,
) -> Config:
    """Check the arguments with the schema of a configuration, so that both say the same of the same mistake."""
    stand_in: dict[str, Any] = {"kind": "imagefolder", "labels": labels}
    if labels == "sets":
        stand_in = {"kind": "multilabel", "labels": "all", "train_labels": "given", "val_labels": "given"}
    own = "binary_kl" if isinstance(losses, Criterion) and "sigmoid" in losses.needs else "kl"
    section = {"kind": sifter} if isinstance(sifter, str) else dict(sifter) if isinstance(sifter, Mapping) else {}
    return config.load(
        {
            "run": {"name": "distill", "epochs": epochs, "steps": steps, "seed": seed},
            "data": {**stand_in, "root": ".", "batch_size": batch_size},
            "teacher": {"model": "given"},
            "student": {"model": "given"},
            "losses": [{"kind": own}] if isinstance(losses, Criterion) else [dict(term) for term in losses],
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
    sink: Memory | RunDir,
    console: Console,
) -> Run:
    batch_size, seed, sets = fixed_batch(settings.data), settings.run.seed, settings.data.kind == "multilabel"
    labels, sigmoid = "sets" if sets else settings.data.labels, reads(settings.losses).sigmoid
    val_batch = getattr(val, "batch_size", None) or batch_size
    modules = [teacher] if isinstance(teacher, nn.Module) else list(teacher)
    given = [LogitsModel(one, f"teacher[{i}]" if len(modules) > 1 else "teacher") for i, one in enumerate(modules)]
    model = LogitsModel(student, "student")
    num_classes = _num_classes(given, model, train, seed, world, labels)
    train_loader, num_images = _loader("train", train, batch_size, world, workers, seed, labels, num_classes)
    val_loader, num_val = _loader("val", val, val_batch, world, workers, seed, labels, num_classes)
    split = split_batch(settings.data, world.world_size, num_images)
    whole = given[0] if len(given) == 1 else Ensemble(given, [1.0] * len(given), sigmoid)
    live = LiveTeacher(whole, world.device)
    criterion = losses
    if not isinstance(losses, Criterion):
        labelled = (_labels(train) >= 0).float().mean().item() if labels == "some" else 1.0
        dims = [Dims(num_classes, 0, 0)]
        criterion = build_criterion(settings.losses, dims, seed, labelled=labelled)
    distillation = Distillation(model, criterion).to(world.device)
    if isinstance(sifter, (str, Mapping)):
        known = partial(_labels, train) if labels != "none" else partial(torch.full, (num_images,), -1)
        context = sift_context(num_images, known, world, split, seed)
        section = settings.sifter
        sifter = build_part("sifters", section.kind, section.options, "sifter", context=context)
    if isinstance(sink, RunDir):
        shapes = {name: list(tensor.shape) for name, tensor in student.state_dict().items()}
        facts = {"teacher": whole.identity()["teacher"], "images": [num_images, num_val], "student": shapes}
        for key in facts:
            require_same(key, sink.manifest(), facts)
        world.barrier()  # every rank has read the manifest before it is written
        sink.record(**facts)
    length = run_length(settings.run, split, settings.data.views)
    plan = evaluation_plan(num_val, val_batch)
    kind = LabelSetEvaluator if sigmoid else Evaluator
    evaluator = kind(world, val_loader, plan, live, True, num_classes, labels != "none")
    parts = (distillation, live, train_loader, sifter, evaluator, sink, console)
    return assemble(settings.optimizer, seed, length, world, *parts)


def _loader(
    where: str, items: Any, batch_size: int, world: Backend, workers: int, seed: int, labels: str, num_classes: int
) -> tuple[Loader, int]:
    if isinstance(items, DataLoader):
        if world.world_size > 1:
            remedy = "Pass the dataset: kd divides it over the ranks"
            raise ConfigError(where, "a DataLoader does not know the ranks", "A map-style dataset", remedy)
        whole = len(items.dataset) // batch_size * batch_size  # type: ignore[arg-type]
        return BatchLoader(items, batch_size, where, labels, num_classes), whole
    dataset = MapDataset(items, seed, where, labels, num_classes)
    return LocalLoader(dataset, batch_size, 1, world.rank, world.world_size, workers), len(dataset)


def _labels(items: Any) -> torch.Tensor:
    """Return the class of every item; `targets`, where a dataset has them, spare reading the images."""
    targets = getattr(items, "targets", None)
    return torch.as_tensor(targets if targets is not None else [int(items[i][1]) for i in range(len(items))])


def _num_classes(
    teachers: Sequence[LogitsModel], student: LogitsModel, items: Any, seed: int, world: Backend, labels: str
) -> int:
    """Ask all models about one image, and return the number of their classes.

    Raises:
        ConfigError: it is not the same for all.
    """
    if isinstance(items, DataLoader):
        size = items.batch_size or 1
        image = next(BatchLoader(items, size, "train", labels).epoch(evaluation_plan(size, size), 0)).image[:1]
    else:
        image = MapDataset(items, seed, "train", labels).load(0, 0).pixels[None]
    image, found = image.to(world.device), {}
    for one in (student, *teachers):
        training = one.training
        with torch.no_grad():
            shape = one.to(world.device).eval()(image).logits.shape
        one.train(training)
        if len(shape) != 2:
            raise ConfigError(one.where, f"returns the shape {list(shape)} for one image", "Logits [1, C]", "Wrap it")
        found[one.where] = shape[1]
    for where, count in found.items():
        if count != found["student"]:
            wrong = f"answers with {count} classes, the student with {found['student']}"
            raise ConfigError(where, wrong, "Both must be equal, in the same order", "Change the last layer of one")
    return found["student"]
