"""What a run will take, from a few steps that are timed with random weights; nothing is trained."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from kd.config import instances
from kd.config.reads import build_task
from kd.config.schema import LossSection, TaskSection
from kd.core.contracts import Backend, Dataset, Teacher
from kd.core.errors import CorruptImage, DataError
from kd.core.host import cores
from kd.core.seeds import evenly_spaced
from kd.core.text import clock, money
from kd.core.types import Dims
from kd.engine.criterion import Distillation
from kd.models.classifier import Classifier
from kd.models.teacher import NoTeacher
from kd.parts import registry
from kd.setup.data import BatchSplit, Data, split_batch, workers_of
from kd.setup.modes import Trial, Work, torch_mode
from kd.setup.recipe import Recipe, fit_folders, is_fitted
from kd.setup.student import apply_mode, build_criterion, build_distillation
from kd.setup.teacher import RANDOM, TeacherFactory, Teachers, load_teachers, teacher_mode

BUDGET_SECONDS = 3.0  # for timing the steps of a run in turns, after one of each
CPU_TRIAL, QUICK_MS = 16, 50.0
"""Images of a trial on a CPU, where all cores are busy with them. Models that take less time for so many are timed with
a whole micro-batch, as any on an accelerator: what a step takes whatever its size would else count too much."""
LOADED, LOADED_SECONDS = 16, 1.0
"""Images that are loaded to time loading, and after how long fewer are enough: their median moves by a few percent."""
HOPELESS_SECONDS, HOPELESS_RATIO = 0.5, 4.0
"""A candidate drops out that takes longer than both: on a processor without bfloat16 units one step in it can take as
long as thirty others."""

Name = TypeVar("Name", bound=Hashable)  # of a candidate: a text, a number or an execution mode


@dataclass(frozen=True, slots=True)
class Bench:
    """A configuration on this machine, to be timed in one process; what can be has random weights."""

    recipe: Recipe
    backend: Backend
    split: BatchSplit
    teachers: Teachers
    live: Teacher
    distillation: Distillation
    images: int = CPU_TRIAL  # of a trial

    @classmethod
    def of(cls, recipe: Recipe, data: Data, backend: Backend) -> Bench:
        """Build teachers and student. Teachers of timm get random weights, the others their own."""
        teacher, student = recipe.teacher, recipe.student
        named = data.required_classes is not None  # else only its weights say how many classes it has
        random = {where: RANDOM for where, one in teacher.members.items() if one.kind == "timm" and named}
        teachers = load_teachers(teacher, data, random)
        fresh = replace(student, init="scratch", checkpoint="")
        module, live = build_distillation(fresh, teachers).to(backend.device), NoTeacher()
        apply_mode(torch_mode(recipe.backend.precision, student.attention, False, module, backend), module, backend)
        if teachers.model is not None:
            whole = replace(teacher, shard=False, pipeline=0)
            mode = replace(teacher_mode(teacher, teachers.model, backend), compiled=False)
            live = TeacherFactory(whole, teachers.model, backend, data.plan.image_size)(mode)
        split = split_batch(data.plan, 1, len(data.train))
        bench = cls(recipe, backend, split, teachers, live, module, min(CPU_TRIAL, split.micro_batch))
        if backend.device.type == "cpu":
            with bench.trial() as trial:
                asking = milliseconds(trial.ask) if teachers.model is not None else 0.0
                if asking + milliseconds(trial.step) > QUICK_MS:
                    return bench
        return replace(bench, images=split.micro_batch)

    def trial(self, module: Distillation | None = None, live: Teacher | None = None) -> Trial:
        size = self.teachers.data.plan.image_size
        return Trial(module or self.distillation, live or self.live, self.backend, size, self.images)

    @property
    def workers(self) -> int:
        return workers_of(self.recipe.data, self.backend)

    @property
    def asked(self) -> int:
        """Images that the teacher's forward runs on in the run."""
        teacher, num_images = self.recipe.teacher, len(self.teachers.data.train)
        visits = run_images(self.recipe, num_images) if teacher.needed else 0
        return min(visits, teacher.cache.views * num_images) if teacher.cache.views else visits

    @property
    def teacher_share(self) -> float:
        """Share of the epochs in which the teacher's forward runs: with a cache, only while it fills."""
        views, length = self.recipe.teacher.cache.views, self.recipe.loop.length
        return min(1.0, views / length.epochs) if views and not length.steps else 1.0


def epoch_images(recipe: Recipe, num_images: int) -> int:
    """Return how many images an epoch draws, where nothing is sifted: all, or those of `data.balance`."""
    balance, batch_size = recipe.data.balance, recipe.data.batch_size
    if not balance:
        return num_images
    return min(max(1, round(balance * num_images / batch_size)), num_images // batch_size) * batch_size


def run_images(recipe: Recipe, num_images: int) -> int:
    """Return how many images a run trains on, all ranks together, where nothing is sifted."""
    length = recipe.loop.length
    return length.steps * length.batch_size if length.steps else length.epochs * epoch_images(recipe, num_images)


def measure(bench: Bench) -> dict[str, float]:
    """Time steps as the run makes them, but for compilers; return the milliseconds of an image by part of the run.

    `step` and `score` of the student, `teacher`, `fit` of a teacher, `load` in one process; 0: not part of the run, or
    its images do not exist yet.
    """
    model, plan = bench.teachers.model, bench.recipe
    with ExitStack() as stack:
        trial = stack.enter_context(bench.trial())
        work: dict[str, Work] = {"step": partial(trial.step, _adamw(bench.distillation)), "score": trial.score}
        if model is not None:
            work["teacher"] = trial.ask
        if plan.teacher.fits and isinstance(model, Classifier):
            ce = LossSection(kind="ce", options=registry.default_options("losses", "ce"))  # bce costs as much
            criterion = build_criterion([ce], [Dims(model.num_classes, 0, 0)], plan.loop.seed)
            task = build_task(TaskSection(kind="single_label"))
            fitted = Distillation(copy.deepcopy(model), criterion, task).to(bench.backend.device)
            work["fit"] = partial(stack.enter_context(bench.trial(fitted, NoTeacher())).step, _adamw(fitted))
        table = fastest(work, 0.0, rounds=2, budget_seconds=BUDGET_SECONDS)[1]
    ms = {name: table.get(name, 0.0) / bench.images for name in ("step", "score", "teacher", "fit")}
    return {**ms, "load": loading_ms(bench.teachers.data.views()[0])}


def estimate(bench: Bench, ms: Mapping[str, float]) -> list[str]:
    """Return lines: how long the run takes in one process, how fast it is, and what it costs."""
    recipe, data, backend = bench.recipe, bench.teachers.data, bench.backend
    loop, num_images, on_cpu = recipe.loop, len(data.train), backend.device.type == "cpu"
    images, load, workers = run_images(recipe, num_images), ms["load"], bench.workers

    def seconds(count: float, compute: float) -> float:
        """Return the time of images with their loading, which shares a CPU with the step, or goes on beside it."""
        if on_cpu:
            return count * (compute + (load / cores() if workers else load)) / 1000
        return count * (max(compute, load / workers) if workers else compute + load) / 1000

    length = recipe.baseline.run.steps * loop.length.batch_size if recipe.baseline is not None else 0
    alone = seconds(length or images, ms["step"])
    distilling = seconds(images, ms["step"] + bench.asked / images * ms["teacher"])
    fits = {
        target: seconds(run_images(fit, num_images), ms["fit"])
        for fit, target in fit_folders(recipe.teacher, data.fingerprint).values()
    }
    every, runs = loop.length.every.evaluate, 2 if recipe.baseline is not None else 1
    between = every * bench.split.batch_size if every else epoch_images(recipe, num_images)
    times = runs * max(1.0, images / between) + 1  # one before step 1
    parts = {
        "fitting the teacher": sum(taken for target, taken in fits.items() if not is_fitted(target)),
        "distillation": distilling,
        "labels only": alone if recipe.baseline is not None else 0.0,
        "evaluations": seconds(times * len(data.val), ms["score"]) + len(data.val) * ms["teacher"] / 1000,
    }
    text, total = ", ".join(f"{name} {clock(taken)}" for name, taken in parts.items() if taken), sum(parts.values())
    if asking := bench.asked * ms["teacher"] / 1000:
        text += f"; the teacher takes {100 * min(1.0, asking / distilling):.0f} % of the distillation"
    shown = {"student": ms["step"], "teacher": ms["teacher"], "loading": load}
    each = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if value)
    precision = "bfloat16" if backend.autocast_dtype is not None else "float32"
    device = torch.cuda.get_device_name() if backend.device.type == "cuda" else f"{cores()} CPU cores"
    unknown = "" if load else "; loading not measured, the images do not exist yet"
    lines = [
        f"time      about {clock(total)}: {text}",
        f"speed     {images / distilling:.0f} images/s; {each} ms an image, {precision}, {device}{unknown}; "
        "another load of this machine changes it",
    ]
    if recipe.baseline is not None and distilling:
        lines += same_cost(sum(fits.values()) + distilling, alone, round((length or images) / loop.length.batch_size))
    if hourly := recipe.price.per_hour or instances.price_per_hour(recipe.price.instance):
        lines.append(f"cost      about USD {money(hourly * total / 3600)} at USD {hourly:g} an hour")
    return lines


def same_cost(cost: float, alone: float, steps: int) -> list[str]:
    """Return the key with which labels alone take as long as fit and distillation; none where they nearly do."""
    if 0.9 * cost <= alone <= 1.1 * cost:
        return []
    key = f"run.baseline_steps={math.ceil(steps * cost / alone)}"
    return [f"baseline  labels alone take {clock(alone)} of {clock(cost)}; {key} gives a verdict at equal cost"]


def _adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])


def loading_ms(dataset: Dataset) -> float:
    """Return the milliseconds of loading an image again in this process, of a few; 0.0 where none can be read."""
    start, times = time.perf_counter(), []
    for id in evenly_spaced(len(dataset), LOADED):
        try:
            if not dataset.load(id, 0).readable:
                continue
            before = time.perf_counter()
            dataset.load(id, 0)
        except CorruptImage:
            continue  # data.on_corrupt decides where the run reads it
        except DataError:  # not rendered or unpacked yet
            return 0.0
        times.append(time.perf_counter() - before)
        if time.perf_counter() - start > LOADED_SECONDS and len(times) > 2:
            break
    return 1000 * sorted(times)[len(times) // 2] if times else 0.0


def fastest(
    candidates: Mapping[Name, Work], margin: float, rounds: int = 4, budget_seconds: float = 20.0
) -> tuple[Name, dict[Name, float]]:
    """Return the name of the fastest candidate and the median milliseconds of each, after one run of each.

    The candidates run in turns, so that a busy neighbour slows them alike; fewer where the budget is spent. The first
    one is the plain one; another wins where it is faster by the share `margin` in all rounds but one.
    """
    names = list(candidates)
    if len(names) == 1:
        return names[0], {}
    samples: dict[Name, list[float]] = {name: [] for name in names}
    racing = list(names)
    for work in candidates.values():
        work().sum().item()  # what is set up once is not measured
    start = time.perf_counter()
    for _ in range(rounds):
        for name in racing:
            samples[name].append(seconds_of(candidates[name]))
        best = min(samples[name][-1] for name in racing)
        racing = [name for name in racing if samples[name][-1] < max(HOPELESS_SECONDS, HOPELESS_RATIO * best)]
        if time.perf_counter() - start > budget_seconds:
            break
    medians = {name: round(1000 * statistics.median(times), 2) for name, times in samples.items()}
    return clear_winner(samples, margin), medians


def clear_winner(rounds: Mapping[Name, Sequence[float]], margin: float) -> Name:
    """Return which is faster than the first by a share `margin` in all rounds but one, by most; else the first."""
    plain = next(iter(rounds))
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
