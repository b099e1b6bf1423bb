"""The same engine from Python: `kd.train` for a configuration, `kd.distill` for modules
and datasets of your own.
"""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kd import config
from kd.config import Config
from kd.core.contracts import Backend, Sifter
from kd.core.errors import ConfigError
from kd.core.evaluation import Evaluation, Split
from kd.core.host import environment
from kd.core.types import Dims
from kd.data.loader import evaluation_plan
from kd.engine.criterion import Criterion, StudentWithLoss
from kd.engine.loop import train as engine_train
from kd.engine.monitor.timeline import Timeline
from kd.engine.run import Run
from kd.files.run_dir import Memory, RunDir
from kd.jobs.api.arguments import (
    Arguments,
    batch_size_of,
    examine_models,
    criterion_fingerprint,
    translate_config_keys,
    training_labels,
    map_style,
    name_arguments,
)
from kd.jobs.api.result import Distilled, Result
from kd.jobs.distill import require_same
from kd.jobs.observe import span_clock, time_table
from kd.jobs.progress.console import Console
from kd.jobs.train import open_run
from kd.jobs.train import train as train_job
from kd.models.classifier import Ensemble
from kd.models.live_teacher import LiveTeacher
from kd.setup.build import distributed, settings_of, sift_context, sifter_of
from kd.setup.data import split_batch
from kd.setup.recipe import Recipe, Record
from kd.setup.student import build_criterion, note_unused, require_images


def train(settings: str | Path | Config | dict[str, Any], *overrides: str) -> Result:
    """Run a configuration, as `kd-train` does.

    Args:
        settings: a YAML file, its contents, or a loaded Config.
        overrides: `key=value`, as on the command line.

    Returns:
        The run: its folder, the metrics of its chosen checkpoint, its report.

    Raises:
        KdError: anything that the user can fix, in one line.
    """
    values = config.to_dict(settings) if isinstance(settings, Config) else settings
    return Result.of(train_job(config.load(values, overrides)))


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Give torch's and Python's global generators their state again at the end."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(state)


@name_arguments()
@_preserve_random_state()
def distill(
    *,
    teacher: nn.Module | Sequence[nn.Module],
    student: nn.Module,
    train: Any,
    val: Any,
    losses: (
        str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | Criterion
    ) = "kl",
    sifter: str | Mapping[str, Any] | Sifter = "none",
    epochs: int | str = 10,
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
    """Distill any module into any other on a map-style dataset.

    Both models get the dataset's images unchanged; the caller normalizes. A model
    returns logits [B, C] as a tensor, as the first item of a tuple, or in an object
    with `.logits` or `.pooler_output`.

    Args:
        teacher: maps images [B, ...] to logits; a frozen copy is used. Several: their
            probabilities are averaged.
        student: maps the same images to logits; trained in place.
        train: a map-style dataset of (image tensor, label), or a DataLoader of such
            batches, taken as it comes, but for a last batch that is not full.
        val: the same, for evaluation; of a DataLoader, all images that its sampler
            draws at the start.
        losses: terms as in a configuration, `{"kind": "kl", "weight": 1.0,
            "temperature": 4.0}`, or a Criterion.
        sifter: a name, a section as in a configuration, or a Sifter. A DataLoader has
            no ids: `none` only.
        epochs: passes over the data; "auto": by the number of images and the device.
        steps: optimizer steps instead; 0: `epochs` decides.
        batch_size: images per optimizer step; a DataLoader brings its own.
        optimizer: keys of the `optimizer` section.
        backend: keys of the `backend` section; `precision: auto` means fp32 here.
        workers: processes that load a map-style dataset.
        seed: of order, views and dropout; the models' weights are the caller's.
        progress: print progress.
        labels: "all"; "some": loss terms on labels skip images with the label -1;
            "none": the datasets hold images alone, or labels that are not read, and the
            student is compared with the teacher; "sets": a label is 0 or 1 for each
            class, for the losses bce and binary_kl.
        folder: checkpoints and metrics are written there after each epoch; called
            again, `distill` resumes from it.

    Returns:
        The run: `student`, the module that was passed in; `metrics`, its last
            validation row; `rows`, all of them; `folder`; and `export`.

    Raises:
        ConfigError: an unknown key, loss or sifter, a bad value, models with different
            classes.
        DataError: an item is no image with a label.
        RunError: `folder` holds another run.
    """
    teachers: Any = teacher if isinstance(teacher, (list, tuple)) else [teacher]
    arguments = Arguments(
        teachers,
        student,
        train,
        map_style("val", val),
        losses,
        sifter,
        labels,
        workers,
        seed,
    )
    images = arguments.images()
    size, length = batch_size_of(train, batch_size), {"epochs": epochs, "steps": steps}
    recipe = arguments.recipe(
        images[0], size, run=length, optimizer=optimizer or {}, backend=backend or {}
    )
    if isinstance(train, DataLoader) and folder is not None:
        remedy = "Pass train.dataset instead of the DataLoader, or no folder"
        raise ConfigError(
            "folder",
            "is set, but a DataLoader shuffles anew when it resumes",
            "",
            remedy,
        )
    with (
        distributed(recipe.backend) as world,
        Console(
            "distill", not progress or world.rank != 0, scores=recipe.task.scores
        ) as console,
        _open_sink(recipe.record, folder, world.rank) as sink,
    ):
        run, classes = _assemble_run(recipe, arguments, images, world, sink, console)
        own = (
            sink.path / f"timeline_{world.rank}.jsonl"
            if isinstance(sink, RunDir)
            else None
        )
        start = sink.step() if isinstance(sink, RunDir) else 0
        with Timeline(
            span_clock(world.facts), own, start, world.communication_ms
        ) as timeline:
            state = engine_train(
                replace(run, span=timeline.span, window=timeline.window)
            )
        for line in time_table("distill", timeline):
            console.info(line)
        if run.average is not None:
            run.average.apply()
        world.barrier()  # wait until rank 0 has written its rows
        rows = sink.rows() if isinstance(sink, RunDir) else sink.rows
    metrics = [row for row in rows if row["kind"] == "val"][-1]
    data = (
        sink.manifest()["data"] if isinstance(sink, RunDir) and world.rank == 0 else ""
    )
    config_path = Path(folder) if folder is not None else None
    return Distilled(
        student, metrics, rows, state, config_path, arguments, recipe, classes, data
    )


def _open_sink(
    record: Record, folder: str | Path | None, rank: int
) -> AbstractContextManager[Memory | RunDir]:
    return (
        nullcontext(Memory())
        if folder is None
        else open_run(replace(record, path=Path(folder)), rank)
    )


def _build_criterion(recipe: Recipe, arguments: Arguments, dims: Dims) -> Criterion:
    """Return the caller's terms, or those of the recipe, for the share of the training
    images with a label.
    """
    assert dims.labels is not None
    labelled = (
        (dims.labels() >= 0).float().mean().item()
        if arguments.labels == "some"
        else 1.0
    )
    if not isinstance(arguments.losses, Criterion):
        return build_criterion(recipe.losses, [dims], recipe.seed, labelled=labelled)
    criterion = copy.copy(arguments.losses)
    criterion.labelled = min(criterion.labelled, labelled)
    return criterion


def _assemble_run(
    recipe: Recipe,
    arguments: Arguments,
    images: Tensor,
    world: Backend,
    sink: Memory | RunDir,
    console: Console,
) -> tuple[Run, list[str]]:
    """Assemble a run and return it with the class names; the examination on `images`
    gives their number.
    """
    section, task, seed = recipe.data, recipe.task, recipe.seed
    micro_batch, images = (
        section.batch_size // world.world_size,
        images.to(world.device),
    )
    models, num_classes = examine_models(arguments, images, micro_batch, world.device)
    classes = arguments.classes(num_classes)
    batch_size, train, labels, (student, *teachers) = (
        section.batch_size,
        arguments.train,
        arguments.labels,
        models,
    )
    train_loader, num_images = arguments.loader("train", batch_size, num_classes, world)
    val_loader, num_val = arguments.loader("val", batch_size, num_classes, world)
    data = (
        arguments.fingerprint(world)
        if isinstance(sink, RunDir) or world.world_size > 1
        else ""
    )
    split = split_batch(section, world.world_size, num_images)
    model: Any = (
        Ensemble(teachers, [1.0] * len(teachers), task.average)
        if len(teachers) > 1
        else teachers[0]
    )
    live = LiveTeacher(model, world.device, inference=world.facts.inference)
    sifter, known = (
        arguments.sifter,
        partial(training_labels, train, labels, num_classes),
    )
    dims = Dims(num_classes, 0, 0, classes=tuple(classes), labels=known)
    criterion = _build_criterion(recipe, arguments, dims)
    require_images(split, criterion)
    distillation = StudentWithLoss(student, criterion, task).to(world.device)
    for note in note_unused(distillation, images, [dims]):
        console.info(f"student: {note}")
    if isinstance(sifter, (str, Mapping)):
        known = known if labels != "none" else partial(torch.full, (num_images,), -1)
        context = sift_context(num_images, known, world, split, seed)
        sifter, line = sifter_of(recipe, context)
        console.info(translate_config_keys(line))
    val = Split(val_loader, evaluation_plan(num_val, batch_size))
    evaluation = Evaluation(
        world,
        val,
        live,
        num_classes,
        labelled=labels != "none",
        partly=labels == "some",
    )
    if isinstance(sink, RunDir):
        shapes = {
            name: list(getattr(value, "shape", ()))
            for name, value in student.network.state_dict().items()
        }
        facts = {
            "teacher": model.identity()["teacher"],
            "student": shapes,
            "data": data,
        }
        facts["criterion"] = criterion_fingerprint(criterion)
        for key in facts:
            require_same(key, sink.manifest(), facts)
        world.barrier()  # wait until every rank has read the manifest
        sink.record(
            **facts,
            images=len(train),
            classes=classes,
            decides=task.scores.selection_metric(labels != "none").key,
            task=task.name,
            scores=task.scores.record(),
            batch=str(batch_size),
            batch_size=batch_size,
            backend=world.kind,
            world_size=world.world_size,
            machines=world.world_size // world.local_world_size,
            environment=environment(),
        )
    run = Run(
        accumulate=split.accumulate,
        teacher=live,
        loader=train_loader,
        sifter=sifter,
        evaluator=task.evaluator(evaluation),
        store=sink,
        logger=console,
        **settings_of(recipe, distillation, world),
    )
    return run, classes
