"""What a run will take, from a few measured steps: no weights are loaded and nothing is trained."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from kd.config.reads import build_task
from kd.config.schema import LossSection, TaskSection
from kd.core.contracts import Backend, Dataset, Teacher
from kd.core.errors import CorruptImage, DataError
from kd.core.host import cores
from kd.core.seeds import evenly_spaced
from kd.core.types import Dims
from kd.engine.criterion import Distillation
from kd.models.classifier import Classifier
from kd.models.teacher import NoTeacher
from kd.parts import registry
from kd.setup.data import Data
from kd.setup.loaders import BatchSplit, default_workers
from kd.setup.modes import Trial, Work, torch_mode, trial_images
from kd.setup.recipe import Recipe, StudentPlan, TeacherPlan, resolve
from kd.setup.student import apply_mode, build_criterion, build_distillation
from kd.setup.teacher import RANDOM, TeacherFactory, Teachers, load_teachers, teacher_mode

BUDGET_SECONDS, SLOW_MS = 3.0, 400.0
"""For timing the steps in turns, after one of each; a small step that takes longer is not repeated with more images."""
LOADED, LOADED_SECONDS = 16, 1.0
"""Images that are loaded to time loading, and after how long fewer are enough: their median moves by a few percent."""


HOPELESS_SECONDS, HOPELESS_RATIO = 0.5, 4.0
"""A candidate drops out that takes longer than both: on a processor without bfloat16 units one step in it can take as
long as thirty others, and should run once only."""

Name = TypeVar("Name", bound=Hashable)  # of a candidate: a text, a number or an execution mode


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds an image on this device, and where they were measured."""

    fixed: float  # of the student's step, whatever its size; milliseconds
    step: float  # Student's forward, backward and optimizer
    score: float  # Student's forward
    teacher: float  # teacher's forward; 0 without a teacher
    fit: float  # a training step of the teacher; 0 where it is not fitted
    load: float  # loading in one process; 0 where the images do not exist yet
    device: str
    precision: str


@dataclass(frozen=True, slots=True)
class Models:
    """Teachers and student of a configuration, as a run executes them; what can be has random weights."""

    teachers: Teachers
    live: Teacher
    distillation: Distillation

    @property
    def image_size(self) -> int:
        """Side of an image, pixels."""
        return self.teachers.data.plan.image_size


def random_models(teacher: TeacherPlan, student: StudentPlan, data: Data, backend: Backend) -> Models:
    """Build teachers and student. Teachers of timm get random weights, the others their own; nothing is compiled."""
    named = data.required_classes is not None  # else only its weights say how many classes it has
    random = {where: RANDOM for where, one in teacher.members.items() if one.kind == "timm" and named}
    teachers = load_teachers(teacher, data, random)
    fresh = replace(student, init="scratch", checkpoint="")
    distillation, model = build_distillation(fresh, teachers).to(backend.device), teachers.model
    apply_mode(torch_mode(student.precision, student.attention, False, distillation, backend), distillation, backend)
    live: Teacher = NoTeacher()
    if model is not None:
        mode = replace(teacher_mode(teacher, model, backend), compiled=False)
        whole = replace(teacher, shard=False, pipeline=0)
        live = TeacherFactory(whole, model, backend, data.plan.image_size)(mode)
    return Models(teachers, live, distillation)


def measure(
    teacher: TeacherPlan, student: StudentPlan, models: Models, split: BatchSplit, backend: Backend
) -> Measured:
    """Time steps as the run makes them, but for compilers. Images that do not exist are not made. One process."""
    distillation, live, size = models.distillation, models.live, models.image_size
    model, data = models.teachers.model, models.teachers.data
    count = trial_images(split.micro_batch, backend)
    few = max(1, count // 4)
    with ExitStack() as stack:
        small = stack.enter_context(Trial(distillation, live, backend, size, few))
        small.step()  # asks the teacher, whose outputs are kept
        if milliseconds(small.step) > SLOW_MS:
            count = few
        whole = stack.enter_context(Trial(distillation, live, backend, size, count))
        work: dict[str, Work] = {
            "few": partial(small.step, _adamw(distillation)),
            "step": partial(whole.step, _adamw(distillation)),
            "score": whole.score,
        }
        if model is not None:
            work["teacher"] = whole.ask
        if teacher.fits and isinstance(model, Classifier):
            fitted = _fitting(model, student, backend)
            training = stack.enter_context(Trial(fitted, NoTeacher(), backend, size, count))
            work["fit"] = partial(training.step, _adamw(fitted))
        table = fastest(work, rounds=2, budget_seconds=BUDGET_SECONDS, warm=True)[1]
    fixed, image = line_through(few, table["few"], count, table["step"])
    return Measured(
        fixed=fixed,
        step=image,
        score=table["score"] / count,
        teacher=table.get("teacher", 0.0) / count,
        fit=table.get("fit", 0.0) / count,
        load=_load_ms(data.views()[0]),
        device=torch.cuda.get_device_name() if backend.device.type == "cuda" else f"{cores()} CPU cores",
        precision="bfloat16" if backend.autocast_dtype is not None else "float32",
    )


def describe(found: Measured) -> str:
    """Return what was measured in words."""
    parts = [f"student {found.step:.3f}"]
    parts += [f"teacher {found.teacher:.3f}"] if found.teacher else []
    parts += [f"loading {found.load:.3f}"] if found.load else []
    return f"{', '.join(parts)} ms an image, {found.precision}, {found.device}"


def line_through(few: int, few_ms: float, count: int, count_ms: float) -> tuple[float, float]:
    """Return (fixed, per image) of the line through two measured sizes; a fixed part below 0 counts as none."""
    if count == few:
        return 0.0, count_ms / count
    image = (count_ms - few_ms) / (count - few)
    fixed = count_ms - count * image
    return (fixed, image) if image > 0 and fixed > 0 else (0.0, count_ms / count)


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a run takes on this device."""

    seconds: dict[str, float]  # by part of the run
    images_per_second: float  # of the distillation

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def estimate(
    recipe: Recipe, sizes: tuple[int, int], split: BatchSplit, backend: Backend, found: Measured, fits: int
) -> Estimate:
    """Return how long the run takes in one process: fitting, distilling, labels alone, evaluations.

    `sizes`: training and validation images. `fits`: how many teachers are fitted first.
    """
    loop, teacher, section, (num_images, num_val) = recipe.loop, recipe.teacher, recipe.data, sizes
    workers = default_workers(backend) if section.workers == "auto" else int(section.workers)
    images = loop.images(num_images)
    share = loop.teacher_images(num_images) / images if teacher.needed else 0.0
    fixed = found.fixed / split.micro_batch

    def seconds(count: float, compute: float) -> float:
        return count * _with_loading(compute, found.load, workers, backend) / 1000

    distilling = seconds(images, fixed + found.step + share * found.teacher)
    parts = {"fitting the teacher": 0.0, "distillation": distilling}
    for plan in list(teacher.fits.values())[:fits]:
        parts["fitting the teacher"] += seconds(resolve(plan).loop.images(num_images), found.fit)
    if recipe.baseline is not None:
        parts["labels only"] = seconds(images, fixed + found.step)
    runs, every = 2 if recipe.baseline is not None else 1, loop.length.every.evaluate
    between = every * split.batch_size if every else loop.epoch_images(num_images)
    times = runs * max(1.0, images / between) + 1  # one before step 1
    parts["evaluations"] = seconds(times * num_val, found.score) + num_val * found.teacher / 1000
    return Estimate({name: value for name, value in parts.items() if value}, images / distilling)


def _with_loading(compute: float, load: float, workers: int, backend: Backend) -> float:
    """Return the milliseconds of an image with its loading, which shares a CPU with the step, or goes on beside it."""
    if backend.device.type == "cpu":
        return compute + (load / cores() if workers else load)
    return max(compute, load / workers) if workers else compute + load


def _fitting(teacher: Classifier, student: StudentPlan, backend: Backend) -> Distillation:
    ce = LossSection(kind="ce", options=registry.default_options("losses", "ce"))  # bce costs as much
    criterion = build_criterion([ce], [Dims(teacher.num_classes, 0, 0)], student.seed)
    task = build_task(TaskSection(kind="single_label"))
    return Distillation(copy.deepcopy(teacher), criterion, task).to(backend.device)


def _adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])


def _load_ms(dataset: Dataset) -> float:
    try:
        return loading_ms(dataset)
    except DataError:  # not rendered or unpacked yet
        return 0.0


def loading_ms(dataset: Dataset) -> float:
    """Return the milliseconds of loading an image in this process, from evenly spaced ones; 0.0 where none can be read.

    Each is loaded twice and the second time counts: where there is a store, it comes out of the store.
    """
    start, times = time.perf_counter(), []
    for id in evenly_spaced(len(dataset), LOADED):
        try:
            if not dataset.load(id, 0).readable:
                continue
        except CorruptImage:
            continue  # data.on_corrupt decides where the run reads it
        before = time.perf_counter()
        dataset.load(id, 0)
        times.append(time.perf_counter() - before)
        if time.perf_counter() - start > LOADED_SECONDS and len(times) > 2:
            break
    return 1000 * sorted(times)[len(times) // 2] if times else 0.0


def fastest(
    candidates: Mapping[Name, Work],
    rounds: int = 4,
    budget_seconds: float = 20.0,
    margin: float = 0.0,
    warm: bool = False,
) -> tuple[Name, dict[Name, float]]:
    """Return the name of the fastest candidate and the median milliseconds of each.

    The candidates run in turns, so that a busy neighbour slows them alike; the first round only warms up. One measured
    round is enough where the budget is spent. The first candidate is the plain one; another wins where it is faster by
    the share `margin` in all rounds but one. `warm` runs each once beforehand: what compiles in its first call would
    otherwise drop out.
    """
    names = list(candidates)
    if len(names) == 1:
        return names[0], {}
    samples: dict[Name, list[float]] = {name: [] for name in names}
    racing = list(names)
    for name in names if warm else names[:1]:
        candidates[name]().sum().item()  # what is set up once is not measured
    start = time.perf_counter()
    for turn in range(rounds + 1):
        for name in racing:
            samples[name].append(seconds_of(candidates[name]))
        best = min(samples[name][-1] for name in racing)
        racing = [name for name in racing if samples[name][-1] < max(HOPELESS_SECONDS, HOPELESS_RATIO * best)]
        if turn > 0 and time.perf_counter() - start > budget_seconds:
            break
    measured = {name: times[1:] or times for name, times in samples.items()}
    medians = {name: round(1000 * statistics.median(times), 2) for name, times in measured.items()}
    return clear_winner(measured, margin), medians


def clear_winner(rounds: Mapping[Name, Sequence[float]], margin: float) -> Name:
    """Return which is faster than the first by a share `margin` in all rounds but one, by most; else the first."""
    plain = next(iter(rounds))
    if not margin:
        return min(rounds, key=lambda name: statistics.median(rounds[name]))
    shares = {}
    for name, times in rounds.items():
        shares[name] = sorted(mine / its for mine, its in zip(times, rounds[plain], strict=False))
        del shares[name][max(2, len(shares[name]) - 1) :]  # a neighbour may have been busy in one
    best = min(shares, key=lambda name: shares[name][-1])
    return best if shares[best][-1] <= 1 - margin else plain


def milliseconds(work: Work) -> float:
    """Return how long a piece of work takes, measured once after a warm-up."""
    work().sum().item()
    return 1000 * seconds_of(work)


def seconds_of(work: Work) -> float:
    """Return how long a piece of work takes, with waiting for the device."""
    before = time.perf_counter()
    work().sum().item()
    return time.perf_counter() - before
