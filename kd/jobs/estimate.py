"""Estimate a run's time and cost from a few timed steps with random weights; nothing is
trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kd.config import instances
from kd.core.contracts import Backend, Sifter, Teacher
from kd.core.host import cores
from kd.core.text import clock, money
from kd.core.types import Batch, Costs, Outputs
from kd.engine.criterion import StudentWithLoss
from kd.jobs.stopwatch import FEWEST, Timing, time_loading, time_work
from kd.models.live_teacher import NoTeacher
from kd.setup.build import sifter_alone
from kd.setup.build_teacher import (
    RANDOM,
    TeacherFactory,
    Teachers,
    load_teachers,
    teacher_mode,
)
from kd.setup.data import BatchSplit, Data, split_batch, workers_of
from kd.setup.modes import Trial, Work, torch_mode
from kd.setup.recipe import Recipe, fit_folders, is_fitted, resolve
from kd.setup.student import apply_mode, build_distillation
from kd.study.paying import AIM

TEACHER = Costs(1.0, 0.0, 0.0, 0.0, False)  # number of views per image for the teacher


@dataclass(frozen=True, slots=True)
class Bench:
    """A configuration on this machine for timing in one process, with random weights
    where possible.
    """

    recipe: Recipe
    backend: Backend
    split: BatchSplit
    teachers: Teachers
    live: Teacher
    distillation: StudentWithLoss

    @classmethod
    def of(cls, recipe: Recipe, data: Data, backend: Backend) -> Bench:
        """Build teachers and student. Teachers from timm get random weights, others
        their own.
        """
        teacher = recipe.teacher
        named = (
            data.required_classes is not None
        )  # else only its weights have the number of classes
        random = {
            config_path: RANDOM
            for config_path, one in recipe.members.items()
            if one.kind == "timm" and named
        }
        teachers = load_teachers(recipe, data, random)
        module, live = build_untrained(recipe, teachers, backend), NoTeacher()
        mode = torch_mode(
            recipe.backend.precision, recipe.student.attention, False, module, backend
        )
        apply_mode(mode, module, backend)
        if teachers.model is not None:
            mode = replace(
                teacher_mode(teacher, teachers.model, backend), compiled=False
            )
            teacher = replace(teacher, shard=False, pipeline=0)
            live = TeacherFactory(
                teacher, teachers.model, backend, data.plan.image_size
            )(mode)
        return cls(
            recipe,
            backend,
            split_batch(data.plan, 1, len(data.train)),
            teachers,
            live,
            module,
        )

    def trial(
        self,
        images: int,
        module: StudentWithLoss,
        live: Teacher | None = None,
        size: int = 0,
    ) -> Trial:
        """Prepare steps of a student on `images`; without `live` its teacher costs the
        same for any number of them.
        """
        size = size or self.teachers.data.plan.image_size
        return Trial(
            module,
            live or partial(repeated_outputs, self.live),
            self.backend,
            size,
            images,
        )

    def planned(self, recipe: Recipe) -> PlannedRun:
        """Return the length of a run with its sifter: this run, its baseline, or its
        teacher's fit.
        """
        data, length = replace(self.teachers.data, plan=recipe.data), recipe.length
        split = split_batch(data.plan, 1, len(data.train))
        sifter = sifter_alone(recipe, data, split)
        *whole, last = length.plan_run(sifter)
        full = (
            last
            if recipe.config.sifter.kind == "none"
            else len(data.train) // split.batch_size
        )
        part = (length.steps - sum(whole)) / last if length.steps else 1.0
        less = max(1, full - min(*whole, last, full))
        sifted = sum((full - one) / less for one in whole) + part * (full - last) / less
        steps = length.steps or sum(whole) + last
        return PlannedRun(
            sifter, full * split.batch_size, len(whole) + part, sifted, steps
        )

    def costs(
        self, ms: Mapping[str, float], teacher: float = 0.0, wall: bool = True
    ) -> Costs:
        """Return the cost per image, given the teacher's milliseconds; on a CPU loading
        and step share cores.

        `wall`: in wall-clock time, to which workers add loading in parallel; else in
        CPU time.
        """
        on_cpu, workers = (
            self.backend.facts.cpu,
            workers_of(self.recipe.data, self.backend),
        )
        load = ms["load"] / (
            (max(1, workers) if not on_cpu else cores() if workers else 1)
            if wall
            else 1
        )
        return Costs(teacher, ms["score"], ms["step"], load, workers > 0 and not on_cpu)

    def teacher_share(self, run: PlannedRun) -> float:
        """Share of image visits with a teacher forward: with a cache, once per view."""
        stored = self.recipe.teacher.cache.num_views * len(self.teachers.data.train)
        return (
            (min(1.0, stored / run.cost(TEACHER)) if stored else 1.0)
            if self.recipe.read.teacher
            else 0.0
        )


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The length of a run."""

    sifter: Sifter
    images: int  # steps of an unsifted epoch
    epochs: float
    sifted: float  # of these
    steps: int

    def cost(self, costs: Costs) -> float:
        """Return the cost of the run."""
        return self.images * (
            (self.epochs - self.sifted) * costs.per_image()
            + self.sifted * self.sifter.cost(costs)
        )


def build_untrained(
    recipe: Recipe, teachers: Teachers, backend: Backend
) -> StudentWithLoss:
    """Build the student of a recipe, or the teacher of a fit, with random weights."""
    recipe = recipe.with_(
        student=replace(recipe.student, init="scratch", checkpoint="")
    )
    micro_batch = split_batch(recipe.data, 1, len(teachers.data.train)).micro_batch
    return build_distillation(recipe, teachers, micro_batch).to(backend.device)


def repeated_outputs(teacher: Teacher, batch: Batch) -> Outputs:
    """Return the outputs of a batch's first images, repeated: a step on any number
    costs its teacher the same.
    """
    rows = torch.arange(len(batch.image)) % FEWEST
    teacher_share = teacher(batch.take(rows.unique()))
    return teacher_share.map(
        lambda tensor: tensor.index_select(0, rows.to(tensor.device))
    )


PARTS = ("step", "small step", "score", "teacher", "fit", "load", "small load")
"""Of a run: the student's step and forward, the forward of its teacher, the step of
that one's fit, loading; `data.progressive` has small images.
"""


def measure(bench: Bench) -> dict[str, Timing]:
    """Time the `PARTS` of a run, without compilers."""
    data, size = bench.teachers.data, bench.recipe.data.progressive.size
    views = data.views()[0]
    with ExitStack() as stack:

        def stepping(module: StudentWithLoss, *more: Any) -> Callable[[int], Work]:
            optimizer = torch.optim.AdamW(
                [weight for weight in module.parameters() if weight.requires_grad]
            )
            return lambda images: partial(
                stack.enter_context(bench.trial(images, module, *more)).step, optimizer
            )

        makes: dict[str, Callable[[int], Work]] = {"step": stepping(bench.distillation)}
        makes["score"] = lambda images: (
            stack.enter_context(bench.trial(images, bench.distillation)).score
        )
        if bench.teachers.model is not None:
            makes["teacher"] = lambda images: (
                bench.trial(images, bench.distillation, bench.live).ask
            )
        if size:
            makes["small step"] = stepping(bench.distillation, None, size)
        for fit, _ in fit_folders(bench.recipe, data.fingerprint).values():
            makes["fit"] = stepping(
                build_untrained(fit, Teachers(None, data), bench.backend), NoTeacher()
            )
        micro = bench.split.micro_batch
        smallest = min(FEWEST, micro) if bench.backend.facts.cpu else micro
        parts = {name: time_work(make, micro, smallest) for name, make in makes.items()}
    parts |= {"load": time_loading(views)} | (
        {"small load": time_loading(views.small)} if views.small is not None else {}
    )
    return {name: parts.get(name, Timing()) for name in PARTS}


def phase_seconds(
    bench: Bench,
    run: PlannedRun,
    baseline: PlannedRun | None,
    ms: Mapping[str, float],
    wall: bool,
) -> tuple[float, dict[Path, float], float, float]:
    """Return the wall-clock or CPU seconds of distilling, of each fit by its folder, of
    the baseline; ms of a step.
    """
    until, costs = bench.recipe.data.progressive.until, partial(bench.costs, wall=wall)
    step, load = (
        (1 - until) * ms[name] + until * ms[f"small {name}"]
        for name in ("step", "load")
    )
    mean = {
        **ms,
        "step": step,
        "load": load + until * bench.teacher_share(run) * ms["load"],
    }  # the teacher reads whole views
    fits = {
        target: bench.plan_run(fit).cost(costs({**ms, "step": ms["fit"]})) / 1000
        for fit, target in fit_folders(
            bench.recipe, bench.teachers.data.fingerprint
        ).values()
    }
    alone = baseline.cost(costs(mean)) / 1000 if baseline is not None else 0.0
    return (
        run.cost(costs(mean, bench.teacher_share(run) * ms["teacher"])) / 1000,
        fits,
        alone,
        step,
    )


def estimate(bench: Bench, parts: Mapping[str, Timing]) -> list[str]:
    """Return lines: duration in one process, speed and cost of the run."""
    recipe, data, on_cpu = bench.recipe, bench.teachers.data, bench.backend.facts.cpu
    run, length, progressive = (
        bench.plan_run(recipe),
        recipe.length,
        recipe.data.progressive,
    )
    baseline = (
        bench.plan_run(resolve(recipe.baseline))
        if recipe.baseline is not None
        else None
    )
    ms = {name: part.ms for name, part in parts.items()}
    load, asking = ms["load"], bench.teacher_share(run) * ms["teacher"]
    distilling, fits, alone, step = phase_seconds(bench, run, baseline, ms, wall=True)
    alone_lines = []
    if baseline is not None:
        costs = {
            name: part.cpu_ms if on_cpu else part.ms for name, part in parts.items()
        }
        taught, fitting, labelled, _ = phase_seconds(
            bench, run, baseline, costs, wall=not on_cpu
        )
        longer, line = same_cost(
            taught + sum(fitting.values()),
            labelled,
            recipe.config.run.baseline_steps > 0,
        )
        alone *= longer
        alone_lines = [line]
    every = length.every.evaluate or run.steps / run.epochs
    times = 1 + sum(
        max(1.0, one.steps / every) for one in (run, baseline) if one is not None
    )  # one before step 1
    scoring = times * bench.costs(ms).per_image(forward=1.0, step=0.0) + ms["teacher"]
    seconds = {
        "fitting the teacher": sum(
            taken for target, taken in fits.items() if not is_fitted(target)
        ),
        "distillation": distilling,
        "labels only": alone,
        "evaluations": len(data.val) * scoring / 1000,
    }
    text, total = (
        ", ".join(f"{name} {clock(taken)}" for name, taken in seconds.items() if taken),
        sum(seconds.values()),
    )
    if asking:
        share = min(1.0, asking * run.cost(TEACHER) / 1000 / distilling)
        text += f"; the teacher takes {100 * share:.0f} % of the distillation"
    small = f"at {progressive.size} px, until {progressive.until:.0%}, student"
    shown = {"student": ms["step"], "teacher": ms["teacher"], "loading": load}
    shown |= {small: ms["small step"], "loading then": ms["small load"]}
    each = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if value)
    precision = "bfloat16" if bench.backend.autocast_dtype is not None else "float32"
    device = (
        torch.cuda.get_device_name()
        if bench.backend.facts.cuda
        else f"{cores()} CPU cores"
    )
    notes = "" if load else "; loading not measured, the images do not exist yet"
    micro, tried = bench.split.micro_batch, parts["step"].images
    notes += (
        f"; the student's step was timed on {tried} images, scaled to {micro}"
        if tried < micro
        else ""
    )
    lines = [
        f"time      about {clock(total)}: {text}",
        (
            f"speed     {run.steps * length.batch_size / distilling:.0f} images/s;"
            f" {each} ms per image, {precision}, {device}{notes}; another load of this"
            " machine changes it"
        ),
    ]
    lines += alone_lines
    name, machine = instances.find(recipe.config.price.instance) or ("", None)
    accelerated = machine is not None and machine.accelerators > 0
    if hourly := recipe.config.price.per_hour or instances.price_per_hour(
        recipe.config.price.instance
    ):
        known = f"about USD {money(hourly * total / 3600)}"
        if accelerated and on_cpu:
            known = (
                "not known: the times are those of this machine's CPU, not of an"
                " accelerator,"
            )
        lines.append(f"cost      {known} at USD {hourly:g} an hour")
    if load and accelerated:
        rate = (
            1000 / (step + asking) if bench.backend.facts.cuda else 0.0
        )  # a CPU says nothing about an accelerator
        lines += instances.plan(
            name, 1, round(load, 2), rate, usd=recipe.config.price.per_hour
        )
    return lines


def same_cost(cost: float, alone: float, fixed: bool) -> tuple[float, str]:
    """Return by how much longer than the run labels alone train, and a line on their
    cost; `alone`: of as many steps.

    `cost`: of fit and distillation. `fixed`: the number of steps is given by
    `run.baseline_steps`.
    """
    times = 1.0 if fixed else max(1.0, AIM * cost / alone)
    line = (
        f"baseline  labels alone cost at most {clock(times * alone)}, fit and"
        f" distillation {clock(cost)}"
    )
    line += ", counted in CPU or device time"
    return times, line + (
        "; without run.baseline_steps they get as much, for a verdict" if fixed else ""
    )
