"""Run the same engine from Python.

`kd.train` takes a configuration, `kd.distill` modules and datasets of your own,
`kd.Distiller` the batches of your own loop.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from kd.core.types import Dims, SiftContext, State
from kd.data.loader import evaluation_plan
from kd.engine.criterion import Criterion, StudentWithLoss
from kd.engine.loop import train as engine_train
from kd.engine.monitor.timeline import Timeline
from kd.engine.run import Run
from kd.files.run_dir import Memory, RunDir
from kd.jobs.api.arguments import (
    Arguments,
    Losses,
    batch_size_of,
    criterion_fingerprint,
    examine_models,
    map_style,
    name_arguments,
    preserve_random_state,
    training_labels,
    translate_config_keys,
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


@name_arguments()
@preserve_random_state()
def distill(
    *,
    teacher: nn.Module | Sequence[nn.Module],
    student: nn.Module,
    train: Any,
    val: Any,
    losses: Losses = "kl",
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
    recipe = arguments.recipe(
        images[0],
        batch_size_of(train, batch_size),
        run={"epochs": epochs, "steps": steps},
        optimizer=optimizer or {},
        backend=backend or {},
    )
    if isinstance(train, DataLoader) and folder is not None:
        wrong = "is set, but a DataLoader shuffles anew when it resumes"
        remedy = "Pass train.dataset instead of the DataLoader, or no folder"
        raise ConfigError("folder", wrong, "", remedy)
    with (
        distributed(recipe.backend) as world,
        Console(
            "distill", not progress or world.rank != 0, scores=recipe.task.scores
        ) as console,
        _open_sink(recipe.record, folder, world.rank) as sink,
    ):
        run, classes = _assemble_run(recipe, arguments, images, world, sink, console)
        state = _train_timed(run, world, sink, console)
        rows = sink.rows() if isinstance(sink, RunDir) else sink.rows
        data = ""
        if isinstance(sink, RunDir) and world.rank == 0:
            data = sink.manifest()["data"]
    return Distilled(
        student,
        [row for row in rows if row["kind"] == "val"][-1],
        rows,
        state,
        Path(folder) if folder is not None else None,
        arguments,
        recipe,
        classes,
        data,
    )


def _train_timed(
    run: Run, world: Backend, sink: Memory | RunDir, console: Console
) -> State:
    """Train, print where the time went, and apply averaged weights."""
    timeline_file = None
    first_step = 0
    if isinstance(sink, RunDir):
        timeline_file = sink.path / f"timeline_{world.rank}.jsonl"
        first_step = sink.step()
    with Timeline(
        span_clock(world.facts), timeline_file, first_step, world.communication_ms
    ) as timeline:
        state = engine_train(replace(run, span=timeline.span, window=timeline.window))
    for line in time_table("distill", timeline):
        console.info(line)
    if run.average is not None:
        run.average.apply()
    world.barrier()  # wait until rank 0 has written its rows
    return state


def _open_sink(
    record: Record, folder: str | Path | None, rank: int
) -> AbstractContextManager[Memory | RunDir]:
    if folder is None:
        return nullcontext(Memory())
    return open_run(replace(record, path=Path(folder)), rank)


def _build_criterion(recipe: Recipe, arguments: Arguments, dims: Dims) -> Criterion:
    """Return the caller's terms, or the recipe's, for the labelled share of images."""
    assert dims.labels is not None
    labelled = 1.0
    if arguments.labels == "some":
        labelled = (dims.labels() >= 0).float().mean().item()
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
    """Assemble a run and return it with the class names.

    The examination on `images` gives the number of classes.
    """
    batch_size = recipe.data.batch_size
    labels = arguments.labels
    images = images.to(world.device)
    (student, *teachers), num_classes = examine_models(
        arguments, images, batch_size // world.world_size
    )
    classes = arguments.classes(num_classes)
    train_loader, num_images = arguments.loader("train", batch_size, num_classes, world)
    val_loader, num_val = arguments.loader("val", batch_size, num_classes, world)
    data = ""
    if isinstance(sink, RunDir) or world.world_size > 1:
        data = arguments.fingerprint(world)
    split = split_batch(recipe.data, world.world_size, num_images)
    teacher: Any = teachers[0]
    if len(teachers) > 1:
        teacher = Ensemble(teachers, [1.0] * len(teachers), recipe.task.average)
    live = LiveTeacher(teacher, world.device, inference=world.facts.inference)
    read_labels = partial(training_labels, arguments.train, labels, num_classes)
    dims = Dims(num_classes, 0, 0, classes=tuple(classes), labels=read_labels)
    criterion = _build_criterion(recipe, arguments, dims)
    require_images(split, criterion)
    distillation = StudentWithLoss(student, criterion, recipe.task).to(world.device)
    for note in note_unused(distillation, images, [dims]):
        console.info(f"student: {note}")
    context = sift_context(num_images, read_labels, world, split, recipe.seed)
    sifter = _build_sifter(recipe, arguments, context, console)
    evaluation = Evaluation(
        world,
        Split(val_loader, evaluation_plan(num_val, batch_size)),
        live,
        num_classes,
        labelled=labels != "none",
        partly=labels == "some",
    )
    if isinstance(sink, RunDir):
        contents = {
            "teacher": teacher.identity()["teacher"],
            "student": _weight_shapes(student.network),
            "data": data,
            "criterion": criterion_fingerprint(criterion),
        }
        _record_run(sink, contents, recipe, arguments, classes, world)
    run = Run(
        accumulate=split.accumulate,
        teacher=live,
        loader=train_loader,
        sifter=sifter,
        evaluator=recipe.task.evaluator(evaluation),
        store=sink,
        logger=console,
        **settings_of(recipe, distillation, world),
    )
    return run, classes


def _build_sifter(
    recipe: Recipe, arguments: Arguments, context: SiftContext, console: Console
) -> Sifter:
    """Return the caller's sifter, or build the recipe's and describe it."""
    if not isinstance(arguments.sifter, (str, Mapping)):
        return arguments.sifter
    if arguments.labels == "none":
        unlabelled = partial(torch.full, (context.num_images,), -1)
        context = replace(context, labels=unlabelled)
    sifter, line = sifter_of(recipe, context)
    console.info(translate_config_keys(line))
    return sifter


def _weight_shapes(network: nn.Module) -> dict[str, list[int]]:
    return {
        name: list(getattr(value, "shape", ()))
        for name, value in network.state_dict().items()
    }


def _record_run(
    sink: RunDir,
    contents: dict[str, Any],
    recipe: Recipe,
    arguments: Arguments,
    classes: list[str],
    world: Backend,
) -> None:
    """Record a run in its folder; refuse a folder of a run with other contents."""
    for key in contents:
        require_same(key, sink.manifest(), contents)
    world.barrier()  # wait until every rank has read the manifest
    scores = recipe.task.scores
    sink.record(
        **contents,
        images=len(arguments.train),
        classes=classes,
        decides=scores.selection_metric(arguments.labels != "none").key,
        task=recipe.task.name,
        scores=scores.record(),
        batch=str(recipe.data.batch_size),
        lr=recipe.lr,
        batch_size=recipe.data.batch_size,
        backend=world.kind,
        world_size=world.world_size,
        machines=world.world_size // world.local_world_size,
        environment=environment(),
    )
