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

from kd import config, parts
from kd.artifacts.memory import Memory
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.contracts import Backend, Loader, Sifter
from kd.data.loader import LocalLoader, evaluation_plan
from kd.data.map_dataset import BatchLoader, MapDataset
from kd.engine.criterion import Criterion, Distillation
from kd.engine.loop import train as engine_train
from kd.engine.run import Run
from kd.errors import ConfigError
from kd.evaluation import Evaluation, Split
from kd.jobs.distill import Result
from kd.jobs.folder import different_keys, require_same
from kd.jobs.observe import clock_of, where_the_time_went
from kd.jobs.train import train as train_job
from kd.models.classifier import Ensemble, LogitsModel
from kd.models.teacher import LiveTeacher
from kd.monitor.timeline import Timeline
from kd.progress.console import Console
from kd.setup.build import Parts, Results, assemble, distributed, run_length
from kd.setup.gate import sift_context
from kd.setup.loaders import fixed_batch, split_batch
from kd.setup.recipe import Recipe, Record, flatten, resolve
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
    arguments = Arguments(train, val, losses, sifter, labels, workers)
    recipe = arguments.recipe(
        run={"epochs": epochs, "steps": steps, "seed": seed},
        batch_size=getattr(train, "batch_size", None) or batch_size if isinstance(train, DataLoader) else batch_size,
        optimizer=optimizer or {},
        backend=backend or {},
    )
    if isinstance(train, DataLoader) and folder is not None:
        remedy = "Pass train.dataset instead of the DataLoader, or no folder"
        raise ConfigError("folder", "is set, but a DataLoader shuffles anew when it resumes", "", remedy)
    if isinstance(train, DataLoader) and (recipe.loop.sifter.kind != "none" or not isinstance(sifter, (str, Mapping))):
        remedy = "Pass train.dataset instead of the DataLoader"
        raise ConfigError("sifter", "needs ids, and a DataLoader has none", "A map-style dataset has", remedy)
    with (
        distributed(recipe.backend) as world,
        Console("distill", not progress or world.rank != 0, scores=recipe.student.task.scores) as console,
        _sink(folder, recipe.record, world) as sink,
    ):
        models = _models(teacher, student, arguments, seed, world)
        run = _run(recipe, arguments, models, Results(sink, console), world)
        own = sink.path / f"timeline_{world.rank}.jsonl" if isinstance(sink, RunDir) else None
        start = sink.step() if isinstance(sink, RunDir) else 0
        facts = parts.facts("backends", recipe.backend.kind, recipe.backend.options, "backend.kind")
        with Timeline(clock_of(facts, world.device), own, start, world.communication_ms) as timeline:
            state = engine_train(replace(run, span=timeline.span, window=timeline.window))
        for line in where_the_time_went("distill", timeline):
            console.info(line)
        if run.average is not None:
            run.average.apply()
        world.barrier()  # rank 0 has written its rows
        rows = sink.rows() if isinstance(sink, RunDir) else sink.rows
    return Distilled(student, [row for row in rows if row["kind"] == "val"][-1], rows, state)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `distill` that are objects, or may be."""

    train: Any
    val: Any
    losses: Sequence[Mapping[str, Any]] | Criterion
    sifter: str | Mapping[str, Any] | Sifter
    labels: str
    """"all", "some", "none" or "sets"."""
    workers: int

    def recipe(
        self, run: Mapping[str, Any], batch_size: int, optimizer: Mapping[str, Any], backend: Mapping[str, Any]
    ) -> Recipe:
        """Check the arguments with the schema of a configuration, so that both say the same of the same mistake."""
        losses: Any = self.losses
        if isinstance(losses, Criterion):  # a loss of kd that reads logits as it does
            losses = [{"kind": "binary_kl" if any(one.logits == "sigmoid" for one in losses.needs) else "kl"}]
        sets, sifter = self.labels == "sets", self.sifter
        sifter = {"kind": sifter} if isinstance(sifter, str) else dict(sifter) if isinstance(sifter, Mapping) else {}
        data = {"kind": "kd.data.map_dataset", "label": "set" if sets else "class", "batch_size": batch_size}
        settings = config.load(
            {
                "run": {"name": "distill", **run},
                "data": {**data, "labels": "all" if sets else self.labels},
                "teacher": {"model": "given"},
                "student": {"model": "given"},
                "losses": [dict(term) for term in losses],
                "sifter": sifter,
                "optimizer": dict(optimizer),
                "backend": dict(backend),
            }
        )
        return resolve(settings)


@dataclass(frozen=True, slots=True)
class Models:
    """Teachers and student, wrapped."""

    teachers: Sequence[LogitsModel]
    student: LogitsModel
    num_classes: int


@contextmanager
def _sink(folder: str | Path | None, record: Record, world: Backend) -> Iterator[Memory | RunDir]:
    """Yield where rows and checkpoints go; a folder is held against other processes meanwhile."""
    if folder is None:
        yield Memory()
        return
    own = RunDir(Path(folder), world.rank)
    differences: list[str] = []
    if own.stored_config() is not None:
        stored = flatten(config.to_dict(config.load(own.config_file, here=False)))
        differences = different_keys(stored, record.shown)
    own.open(record.yaml, differences)
    try:
        yield own
    finally:
        own.close()


def _models(teacher: Any, student: nn.Module, arguments: Arguments, seed: int, world: Backend) -> Models:
    modules = [teacher] if isinstance(teacher, nn.Module) else list(teacher)
    wheres = [f"teacher[{i}]" for i in range(len(modules))] if len(modules) > 1 else ["teacher"]
    teachers = [LogitsModel(one, where) for one, where in zip(modules, wheres, strict=True)]
    model = LogitsModel(student, "student")
    return Models(teachers, model, _num_classes([model, *teachers], arguments, seed, world))


def _run(recipe: Recipe, arguments: Arguments, models: Models, results: Results, world: Backend) -> Run:
    section, task, seed, num_classes = recipe.data.section, recipe.student.task, recipe.loop.seed, models.num_classes
    batch_size, train, labels = fixed_batch(section), arguments.train, arguments.labels
    val_batch = getattr(arguments.val, "batch_size", None) or batch_size
    train_loader, num_images = _loader("train", arguments, batch_size, seed, num_classes, world)
    val_loader, num_val = _loader("val", arguments, val_batch, seed, num_classes, world)
    split = split_batch(section, world.world_size, num_images)
    several, shares = len(models.teachers) > 1, [1.0] * len(models.teachers)
    model: Any = Ensemble(models.teachers, shares, task.average) if several else models.teachers[0]
    live, criterion, sifter = LiveTeacher(model, world.device), arguments.losses, arguments.sifter
    if not isinstance(criterion, Criterion):
        labelled = (_labels(train) >= 0).float().mean().item() if labels == "some" else 1.0
        criterion = build_criterion(recipe.student.losses, [Dims(num_classes, 0, 0)], seed, labelled=labelled)
    distillation = Distillation(models.student, criterion, task).to(world.device)
    if isinstance(sifter, (str, Mapping)):
        known = partial(_labels, train) if labels != "none" else partial(torch.full, (num_images,), -1)
        context = sift_context(num_images, known, world, split, seed)
        kind, options = recipe.loop.sifter.kind, recipe.loop.sifter.options
        sifter = parts.build("sifters", kind, options, "sifter", context=context)
    if isinstance(results.store, RunDir):
        shapes = {name: list(tensor.shape) for name, tensor in models.student.network.state_dict().items()}
        facts = {"teacher": model.identity()["teacher"], "images": [num_images, num_val], "student": shapes}
        for key in facts:
            require_same(key, results.store.manifest(), facts)
        world.barrier()  # every rank has read the manifest before it is written
        results.store.record(**facts)
    val = Split(val_loader, evaluation_plan(num_val, val_batch))
    evaluator = task.evaluator(Evaluation(world, val, live, num_classes, labelled=labels != "none"))
    made = Parts(distillation, live, train_loader, sifter, evaluator)
    return assemble(recipe.loop, run_length(recipe.loop, split, section.views), world, made, results)


def _loader(
    where: str, arguments: Arguments, batch_size: int, seed: int, num_classes: int, world: Backend
) -> tuple[Loader, int]:
    items, labels = getattr(arguments, where), arguments.labels
    if isinstance(items, DataLoader):
        if world.world_size > 1:
            remedy = "Pass the dataset: kd divides it over the ranks"
            raise ConfigError(where, "a DataLoader does not know the ranks", "A map-style dataset", remedy)
        num_images = len(items.dataset) // batch_size * batch_size  # type: ignore[arg-type]
        return BatchLoader(items, batch_size, where, labels, num_classes), num_images
    dataset = MapDataset(items, seed, where, labels, num_classes)
    return LocalLoader(dataset, batch_size, 1, world.rank, world.world_size, arguments.workers), len(dataset)


def _labels(items: Any) -> torch.Tensor:
    """Return the class of every item; `targets`, where a dataset has them, spare reading the images."""
    targets = getattr(items, "targets", None)
    return torch.as_tensor(targets if targets is not None else [int(items[i][1]) for i in range(len(items))])


def _num_classes(models: Sequence[LogitsModel], arguments: Arguments, seed: int, world: Backend) -> int:
    """Ask all models, the student first, about one image, and return the number of their classes.

    Raises:
        ConfigError: it is not the same for all.
    """
    items, labels = arguments.train, arguments.labels
    if isinstance(items, DataLoader):
        size = items.batch_size or 1
        image = next(BatchLoader(items, size, "train", labels).epoch(evaluation_plan(size, size), 0)).image[:1]
    else:
        image = MapDataset(items, seed, "train", labels).load(0, 0).pixels[None]
    image, found = image.to(world.device), {}
    for one in models:
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
