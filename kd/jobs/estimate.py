"""Estimate a run's time and cost from a few timed steps with random weights; nothing is trained."""

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
from kd.config.schema import LossSection, SifterSection, TaskSection
from kd.core.contracts import Backend, Dataset, Sifter, Teacher
from kd.core.errors import CorruptImage, DataError
from kd.core.host import cores
from kd.core.seeds import evenly_spaced
from kd.core.text import clock, money
from kd.core.types import Costs, Dims
from kd.engine.criterion import StudentWithLoss
from kd.models.classifier import Classifier
from kd.models.live_teacher import NoTeacher
from kd.parts import registry
from kd.setup.build import sifter_alone
from kd.setup.build_teacher import RANDOM, TeacherFactory, Teachers, load_teachers, teacher_mode
from kd.setup.data import BatchSplit, Data, split_batch, workers_of
from kd.setup.modes import Trial, Work, torch_mode
from kd.setup.recipe import Recipe, fit_folders, is_fitted, resolve
from kd.setup.student import apply_mode, build_criterion, build_distillation

BUDGET_SECONDS = 3.0  # seconds for timing a run's steps in turns, after one of each
CPU_TRIAL, QUICK_MS = 16, 50.0
"""Images per trial on a CPU: enough to keep all cores busy. Faster models, and all models on an accelerator, are timed
with a whole micro-batch; else a step's fixed overhead would count too much."""
LOADED, LOADED_SECONDS = 16, 1.0
"""Images for timing loading, and seconds after which fewer are enough: their median varies by a few percent."""
HOPELESS_SECONDS, HOPELESS_RATIO = 0.5, 4.0
"""A candidate is dropped if it takes longer than both: without bfloat16 units one bf16 step can take as long as thirty
others."""

TEACHER = Costs(1.0, 0.0, 0.0, 0.0, False)  # number of views per image for the teacher

Name = TypeVar("Name", bound=Hashable)  # name of a candidate: a text, a number or an execution mode


@dataclass(frozen=True, slots=True)
class Bench:
    """A configuration on this machine for timing in one process, with random weights where possible."""

    recipe: Recipe
    backend: Backend
    split: BatchSplit
    teachers: Teachers
    live: Teacher
    distillation: StudentWithLoss
    images: int = CPU_TRIAL  # images per trial

    @classmethod
    def of(cls, recipe: Recipe, data: Data, backend: Backend) -> Bench:
        """Build teachers and student. Teachers from timm get random weights, others their own."""
        teacher, student = recipe.teacher, recipe.student
        named = data.required_classes is not None  # else only its weights have the number of classes
        random = {where: RANDOM for where, one in teacher.members.items() if one.kind == "timm" and named}
        teachers = load_teachers(teacher, data, random)
        fresh = replace(student, init="scratch", checkpoint="")
        split = split_batch(data.plan, 1, len(data.train))
        module, live = build_distillation(fresh, teachers, split.micro_batch).to(backend.device), NoTeacher()
        apply_mode(torch_mode(recipe.backend.precision, student.attention, False, module, backend), module, backend)
        if teachers.model is not None:
            whole = replace(teacher, shard=False, pipeline=0)
            mode = replace(teacher_mode(teacher, teachers.model, backend), compiled=False)
            live = TeacherFactory(whole, teachers.model, backend, data.plan.image_size)(mode)
        bench = cls(recipe, backend, split, teachers, live, module, min(CPU_TRIAL, split.micro_batch))
        if backend.facts.cpu:
            with bench.trial() as trial:
                asking = milliseconds(trial.ask) if teachers.model is not None else 0.0
                if asking + milliseconds(trial.step) > QUICK_MS:
                    return bench
        return replace(bench, images=split.micro_batch)

    def trial(self, module: StudentWithLoss | None = None, live: Teacher | None = None, size: int = 0) -> Trial:
        size = size or self.teachers.data.plan.image_size
        return Trial(module or self.distillation, live or self.live, self.backend, size, self.images)

    @property
    def workers(self) -> int:
        return workers_of(self.recipe.data, self.backend)

    def planned(self, recipe: Recipe) -> Planned:
        """Return the length of a run with its sifter: this run, its baseline, or its teacher's fit."""
        data, loop = replace(self.teachers.data, plan=recipe.data), recipe.loop
        split = split_batch(data.plan, 1, len(data.train))
        sifter = sifter_alone(loop, data, split)
        full = sifter_alone(
            replace(loop, sifter=SifterSection(options=registry.default_options("sifters", "none"))), data, split
        ).steps(0, 0.0)
        *whole, last = loop.length.planned(sifter)
        part = (loop.length.steps - sum(whole)) / last if loop.length.steps else 1.0
        less = max(1, full - min(*whole, last, full))
        sifted = sum((full - one) / less for one in whole) + part * (full - last) / less
        return Planned(sifter, full * split.batch_size, len(whole) + part, sifted)

    def steps(self, recipe: Recipe) -> int:
        length = recipe.loop.length
        return length.steps or sum(length.planned(self.planned(recipe).sifter))

    def costs(self, ms: Mapping[str, float], teacher: float = 0.0) -> Costs:
        """Return the cost per image, given the teacher's milliseconds; on a CPU loading and step share cores."""
        on_cpu, workers = self.backend.facts.cpu, self.workers
        load = ms["load"] / (max(1, workers) if not on_cpu else cores() if workers else 1)
        return Costs(teacher, ms["score"], ms["step"], load, workers > 0 and not on_cpu)

    def asking(self, run: Planned) -> float:
        """Share of image visits with a teacher forward: with a cache, once per view."""
        teacher, stored = self.recipe.teacher, self.recipe.teacher.cache.views * len(self.teachers.data.train)
        return (min(1.0, stored / run.cost(TEACHER)) if stored else 1.0) if teacher.needed else 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """The length of a run."""

    sifter: Sifter
    images: int  # steps of an unsifted epoch
    epochs: float
    sifted: float  # of these

    def cost(self, costs: Costs) -> float:
        """Return the cost of the run."""
        return self.images * ((self.epochs - self.sifted) * costs.per_image() + self.sifted * self.sifter.cost(costs))


def measure(bench: Bench) -> dict[str, float]:
    """Time the run's steps, without compilers; return milliseconds per image by part of the run.

    Parts: `step` and `score` of the student, `teacher`, `fit` of a teacher, `load` in one process; 0: not part of the
    run, or its images do not exist yet. `small step` and `small load` are for `data.progressive`.
    """
    model, plan, size = bench.teachers.model, bench.recipe, bench.recipe.data.progressive.size
    with ExitStack() as stack:
        trial = stack.enter_context(bench.trial())
        work: dict[str, Work] = {"step": partial(trial.step, _adamw(bench.distillation)), "score": trial.score}
        if model is not None:
            work["teacher"] = trial.ask
        if size:
            work["small step"] = partial(stack.enter_context(bench.trial(size=size)).step, _adamw(bench.distillation))
        if plan.teacher.fits and isinstance(model, Classifier):
            ce = LossSection(kind="ce", options=registry.default_options("losses", "ce"))  # bce takes the same time
            criterion = build_criterion([ce], [Dims(model.num_classes, 0, 0)], plan.loop.seed)
            task = build_task(TaskSection(kind="single_label"))
            fitted = StudentWithLoss(copy.deepcopy(model), criterion, task).to(bench.backend.device)
            work["fit"] = partial(stack.enter_context(bench.trial(fitted, NoTeacher())).step, _adamw(fitted))
        table = fastest(work, 0.0, rounds=2, budget_seconds=BUDGET_SECONDS)[1]
    ms = {name: table.get(name, 0.0) / bench.images for name in ("step", "small step", "score", "teacher", "fit")}
    shown = bench.teachers.data.views()[0]
    return {**ms, "load": loading_ms(shown), "small load": loading_ms(shown.small) if shown.small is not None else 0.0}


def estimate(bench: Bench, ms: Mapping[str, float]) -> list[str]:
    """Return lines: duration in one process, speed and cost of the run."""
    recipe, data, backend = bench.recipe, bench.teachers.data, bench.backend
    run, load, length, until = bench.planned(recipe), ms["load"], recipe.loop.length, recipe.data.progressive.until
    asking = bench.asking(run) * ms["teacher"]
    mean = {**ms, "step": (1 - until) * ms["step"] + until * ms["small step"]}
    mean["load"] = (1 - until) * load + until * (ms["small load"] + bench.asking(run) * load)  # teacher: whole views
    distilling = run.cost(bench.costs(mean, asking)) / 1000
    fits = {
        target: bench.planned(fit).cost(bench.costs({**ms, "step": ms["fit"]})) / 1000
        for fit, target in fit_folders(recipe.teacher, data.fingerprint).values()
    }
    steps, alone, fewer = bench.steps(recipe), 0.0, 0
    if recipe.baseline is not None:
        baseline = resolve(recipe.baseline)
        alone, fewer = bench.planned(baseline).cost(bench.costs(mean)) / 1000, bench.steps(baseline)
    every = length.every.evaluate or steps / run.epochs
    times = max(1.0, steps / every) + (max(1.0, fewer / every) if alone else 0) + 1  # one before step 1
    scoring = times * bench.costs(ms).per_image(forward=1.0, step=0.0) + ms["teacher"]
    parts = {
        "fitting the teacher": sum(taken for target, taken in fits.items() if not is_fitted(target)),
        "distillation": distilling,
        "labels only": alone,
        "evaluations": len(data.val) * scoring / 1000,
    }
    text, total = ", ".join(f"{name} {clock(taken)}" for name, taken in parts.items() if taken), sum(parts.values())
    if asking:
        share = min(1.0, asking * run.cost(TEACHER) / 1000 / distilling)
        text += f"; the teacher takes {100 * share:.0f} % of the distillation"
    small = f"at {recipe.data.progressive.size} px, until {until:.0%}, student"
    shown = {"student": ms["step"], "teacher": ms["teacher"], "loading": load}
    shown |= {small: ms["small step"], "loading then": ms["small load"]}
    each = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if value)
    precision = "bfloat16" if backend.autocast_dtype is not None else "float32"
    device = torch.cuda.get_device_name() if backend.facts.cuda else f"{cores()} CPU cores"
    unknown = "" if load else "; loading not measured, the images do not exist yet"
    lines = [
        f"time      about {clock(total)}: {text}",
        f"speed     {steps * length.batch_size / distilling:.0f} images/s; {each} ms per image, {precision}, "
        f"{device}{unknown}; another load of this machine changes it",
    ]
    if alone and distilling:
        lines += same_cost(sum(fits.values()) + distilling, alone, fewer)
    if hourly := recipe.price.per_hour or instances.price_per_hour(recipe.price.instance):
        lines.append(f"cost      about USD {money(hourly * total / 3600)} at USD {hourly:g} an hour")
    if load and (rented := instances.find(recipe.price.instance)) and rented[1].accelerators:
        rate = 1000 / (mean["step"] + asking) if backend.facts.cuda else 0.0  # a CPU says nothing about an accelerator
        lines += instances.plan(rented[0], 1, round(load, 2), rate, usd=recipe.price.per_hour)
    return lines


def same_cost(cost: float, alone: float, steps: int) -> list[str]:
    """Return the key that gives labels alone the time of fit and distillation; nothing if the times are close."""
    if 0.9 * cost <= alone <= 1.1 * cost:
        return []
    key = f"run.baseline_steps={math.ceil(steps * cost / alone)}"
    return [f"baseline  labels alone take {clock(alone)} of {clock(cost)}; {key} gives a verdict at equal cost"]


def _adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])


def loading_ms(dataset: Dataset) -> float:
    """Return the median milliseconds of loading an image in this process; 0.0 if none can be read."""
    start, times = time.perf_counter(), []
    for id in evenly_spaced(len(dataset), LOADED):
        try:
            if not dataset.load(id, 0).readable:
                continue
            before = time.perf_counter()
            dataset.load(id, 0)
        except CorruptImage:
            continue  # data.on_corrupt decides in the run
        except DataError:  # not rendered or unpacked yet
            return 0.0
        times.append(time.perf_counter() - before)
        if time.perf_counter() - start > LOADED_SECONDS and len(times) > 2:
            break
    return 1000 * sorted(times)[len(times) // 2] if times else 0.0


def fastest(
    candidates: Mapping[Name, Work], margin: float, rounds: int = 4, budget_seconds: float = 20.0
) -> tuple[Name, dict[Name, float]]:
    """Time candidates after a warm-up of each; return the name of the fastest and all median milliseconds.

    The candidates run in turns, so other load slows them alike; rounds end when the budget is spent. The first
    candidate is the baseline; another wins if it is faster by the share `margin` in all rounds but one.
    """
    names = list(candidates)
    if len(names) == 1:
        return names[0], {}
    samples: dict[Name, list[float]] = {name: [] for name in names}
    racing = list(names)
    for work in candidates.values():
        work().sum().item()  # one-time set-up is not measured
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
    """Return the fastest candidate that beats the first by `margin` in all rounds but one; else the first."""
    plain = next(iter(rounds))
    shares = {}
    for name, times in rounds.items():
        shares[name] = sorted(mine / its for mine, its in zip(times, rounds[plain], strict=False))
        del shares[name][max(2, len(shares[name]) - 1) :]  # other load may have disturbed one round
    best = min(shares, key=lambda name: shares[name][-1])
    return best if shares[best][-1] <= 1 - margin else plain


def milliseconds(work: Work) -> float:
    """Return the time of some work, measured once after a warm-up."""
    work().sum().item()
    return 1000 * seconds_of(work)


def seconds_of(work: Work) -> float:
    """Return the time of some work, including the device sync."""
    before = time.perf_counter()
    work().sum().item()
    return time.perf_counter() - before
