"""Estimate a run's time and cost from a few timed steps with random weights.

Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kd.config import instances
from kd.config.bill import Bill
from kd.core.contracts import Backend, Sifter, Teacher
from kd.core.facts import BackendFacts
from kd.core.host import cores
from kd.core.text import format_dollars, format_seconds
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

MakeWork = Callable[[int], Work]  # from a number of images
TEACHER = Costs(1.0, 0.0, 0.0, 0.0, False)  # number of views per image for the teacher


@dataclass(frozen=True, slots=True)
class Bench:
    """A configuration for timing in one process, with random weights where possible."""

    recipe: Recipe
    backend: Backend
    split: BatchSplit
    teachers: Teachers
    live: Teacher
    distillation: StudentWithLoss

    @classmethod
    def of(cls, recipe: Recipe, data: Data, backend: Backend) -> Bench:
        """Build teachers, those from timm with random weights, and the student."""
        random = {}
        # without class names only a teacher's weights tell their number
        if data.required_classes is not None:
            random = {
                config_path: RANDOM
                for config_path, member in recipe.members.items()
                if member.kind == "timm"
            }
        teachers = load_teachers(recipe, data, random)
        module = build_untrained(recipe, teachers, backend)
        mode = torch_mode(
            recipe.backend.precision, recipe.student.attention, False, module, backend
        )
        apply_mode(mode, module, backend)
        live: Teacher = NoTeacher()
        if teachers.model is not None:
            mode = teacher_mode(recipe.teacher, teachers.model, backend)
            section = replace(recipe.teacher, shard=False, pipeline=0)
            factory = TeacherFactory(
                section, teachers.model, backend, data.plan.image_size
            )
            live = factory(replace(mode, compiled=False))
        split = split_batch(data.plan, 1, len(data.train))
        return cls(recipe, backend, split, teachers, live, module)

    def trial(
        self,
        images: int,
        module: StudentWithLoss,
        live: Teacher | None = None,
        size: int = 0,
    ) -> Trial:
        """Prepare steps of a student on `images`.

        Without `live` its teacher costs the same for any number of them.
        """
        size = size or self.teachers.data.plan.image_size
        teacher = live or partial(repeated_outputs, self.live)
        return Trial(module, teacher, self.backend, size, images)

    def plan_run(self, recipe: Recipe) -> PlannedRun:
        """Return the length with its sifter of this run, its baseline, or a fit."""
        data = replace(self.teachers.data, plan=recipe.data)
        length = recipe.length
        split = split_batch(data.plan, 1, len(data.train))
        sifter = sifter_alone(recipe, data, split)
        *full_epochs, last = length.planned(sifter)
        unsifted = last
        if recipe.config.sifter.kind != "none":
            unsifted = len(data.train) // split.batch_size
        last_share = (length.steps - sum(full_epochs)) / last if length.steps else 1.0
        fewer = max(1, unsifted - min(*full_epochs, last, unsifted))
        sifted = (
            sum((unsifted - steps) / fewer for steps in full_epochs)
            + last_share * (unsifted - last) / fewer
        )
        return PlannedRun(
            sifter,
            unsifted * split.batch_size,
            len(full_epochs) + last_share,
            sifted,
            length.steps or sum(full_epochs) + last,
        )

    def costs(
        self, ms: Mapping[str, float], teacher: float = 0.0, wall: bool = True
    ) -> Costs:
        """Return the cost per image, given the teacher's milliseconds.

        `wall`: in wall-clock time, to which workers add loading in parallel (on a CPU
        loading and step share cores); else in CPU time.
        """
        on_cpu = self.backend.facts.cpu
        workers = workers_of(self.recipe.data, self.backend)
        parallel = 1
        if wall and workers:
            parallel = cores() if on_cpu else workers
        load = ms["load"] / parallel
        return Costs(teacher, ms["score"], ms["step"], load, workers > 0 and not on_cpu)

    def teacher_share(self, run: PlannedRun) -> float:
        """Return the share of image visits with a teacher forward.

        With a cache the teacher predicts each view once.
        """
        if not self.recipe.read.teacher:
            return 0.0
        stored = self.recipe.teacher.cache.num_views * len(self.teachers.data.train)
        return min(1.0, stored / run.cost(TEACHER)) if stored else 1.0


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Length of a run."""

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
    """Return the outputs of a batch's first images, repeated for all its images.

    So a step on any number of images costs its teacher the same.
    """
    rows = torch.arange(len(batch.image)) % FEWEST
    outputs = teacher(batch.take(rows.unique()))
    return outputs.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))


PARTS = ("step", "small step", "score", "teacher", "fit", "load", "small load")
"""Of a run: the student's step and forward, the forward of its teacher, the step of
that one's fit, loading; `data.progressive` has small images.
"""


def measure(bench: Bench) -> dict[str, Timing]:
    """Time the `PARTS` of a run, without compilers."""
    data = bench.teachers.data
    size = bench.recipe.data.progressive.size
    views = data.views()[0]
    with ExitStack() as stack:

        def stepping(module: StudentWithLoss, *live_and_size: Any) -> MakeWork:
            optimizer = torch.optim.AdamW(
                [weight for weight in module.parameters() if weight.requires_grad]
            )

            def make(images: int) -> Work:
                trial = stack.enter_context(bench.trial(images, module, *live_and_size))
                return partial(trial.step, optimizer)

            return make

        makes: dict[str, MakeWork] = {"step": stepping(bench.distillation)}
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
        timings = {
            name: time_work(make, micro, smallest) for name, make in makes.items()
        }
    timings["load"] = time_loading(views)
    if views.small is not None:
        timings["small load"] = time_loading(views.small)
    return {name: timings.get(name, Timing()) for name in PARTS}


class PhaseTimes(NamedTuple):
    """Wall-clock or CPU seconds of the phases of a run."""

    distillation: float
    fits: dict[Path, float]  # by the folder of the fit
    baseline: float
    step_ms: float  # ms of a step per image, with the small images of `progressive`


def phase_times(
    bench: Bench,
    run: PlannedRun,
    baseline: PlannedRun | None,
    ms: Mapping[str, float],
    wall: bool,
) -> PhaseTimes:
    """Return the times of the phases from the milliseconds of the `PARTS`."""
    until = bench.recipe.data.progressive.until
    costs = partial(bench.costs, wall=wall)
    step, load = (
        (1 - until) * ms[name] + until * ms[f"small {name}"]
        for name in ("step", "load")
    )
    # the teacher reads whole views
    load += until * bench.teacher_share(run) * ms["load"]
    mean = {**ms, "step": step, "load": load}
    folders = fit_folders(bench.recipe, bench.teachers.data.fingerprint)
    fits = {
        target: bench.plan_run(fit).cost(costs({**ms, "step": ms["fit"]})) / 1000
        for fit, target in folders.values()
    }
    teacher_ms = bench.teacher_share(run) * ms["teacher"]
    return PhaseTimes(
        run.cost(costs(mean, teacher_ms)) / 1000,
        fits,
        baseline.cost(costs(mean)) / 1000 if baseline is not None else 0.0,
        step,
    )


def estimate(bench: Bench, timings: Mapping[str, Timing]) -> list[str]:
    """Return lines: duration in one process, speed and cost of the run."""
    run = bench.plan_run(bench.recipe)
    seconds, step_ms, lines = _estimate_seconds(bench, run, timings)
    total = sum(seconds.values())
    text = ", ".join(
        f"{name} {format_seconds(duration)}"
        for name, duration in seconds.items()
        if duration
    )
    teacher_ms = bench.teacher_share(run) * timings["teacher"].ms
    if teacher_ms:
        teacher_seconds = teacher_ms * run.cost(TEACHER) / 1000
        share = min(1.0, teacher_seconds / seconds["distillation"])
        text += f"; the teacher takes {100 * share:.0f} % of the distillation"
    images = run.steps * bench.recipe.length.batch_size
    return [
        f"time      about {format_seconds(total)}: {text}",
        _speed_line(bench, timings, images / seconds["distillation"]),
        *lines,
        *_price_lines(bench, total, timings["load"].ms, step_ms + teacher_ms),
    ]


def _estimate_seconds(
    bench: Bench, run: PlannedRun, timings: Mapping[str, Timing]
) -> tuple[dict[str, float], float, list[str]]:
    """Return the seconds by phase, ms of a step, and a line on the baseline if any."""
    recipe = bench.recipe
    on_cpu = bench.backend.facts.cpu
    runs = [run]
    baseline = None
    if recipe.baseline is not None:
        baseline = bench.plan_run(resolve(recipe.baseline))
        runs.append(baseline)
    ms = {name: timing.ms for name, timing in timings.items()}
    times = phase_times(bench, run, baseline, ms, wall=True)
    labels_only = times.baseline
    lines = []
    if baseline is not None:
        cpu_ms = {name: timing.cpu_ms for name, timing in timings.items()}
        costs = phase_times(
            bench, run, baseline, cpu_ms if on_cpu else ms, wall=not on_cpu
        )
        longer, line = same_cost(
            costs.distillation + sum(costs.fits.values()),
            costs.baseline,
            recipe.config.run.baseline_steps > 0,
        )
        labels_only *= longer
        lines.append(line)
    every = recipe.length.every.evaluate or run.steps / run.epochs
    # one before step 1
    evaluations = 1 + sum(max(1.0, planned.steps / every) for planned in runs)
    scoring_ms = evaluations * bench.costs(ms).per_image(forward=1.0, step=0.0)
    scoring_ms += ms["teacher"]
    seconds = {
        "fitting the teacher": sum(
            duration for target, duration in times.fits.items() if not is_fitted(target)
        ),
        "distillation": times.distillation,
        "labels only": labels_only,
        "evaluations": len(bench.teachers.data.val) * scoring_ms / 1000,
    }
    return seconds, times.step_ms, lines


def _speed_line(
    bench: Bench, timings: Mapping[str, Timing], images_per_second: float
) -> str:
    progressive = bench.recipe.data.progressive
    small = f"at {progressive.size} px, until {progressive.until:.0%}, student"
    titles = {
        "student": "step",
        "teacher": "teacher",
        "loading": "load",
        small: "small step",
        "loading then": "small load",
    }
    each = ", ".join(
        f"{title} {timings[name].ms:.3f}"
        for title, name in titles.items()
        if timings[name].ms
    )
    precision = "bfloat16" if bench.backend.autocast_dtype is not None else "float32"
    notes = ""
    if not timings["load"].ms:
        notes = "; loading not measured, the images do not exist yet"
    micro = bench.split.micro_batch
    for title, name in {**titles, "fit": "fit"}.items():
        images = timings[name].images
        if "load" not in name and 0 < images < micro:
            notes += f"; {title} timed with {images} images of {micro:,}"
    return (
        f"speed     {images_per_second:.0f} images/s; {each} ms per image, {precision},"
        f" {_device_text(bench.backend)}{notes}; another load of this machine changes"
        " it"
    )


def _device_text(backend: Backend) -> str:
    if backend.facts.cuda:
        return torch.cuda.get_device_name()
    return f"{cores()} CPU cores"


def _price_lines(
    bench: Bench, seconds: float, load_ms: float, device_ms: float
) -> list[str]:
    """Return the cost of the run and, for an accelerator, the machine's plan."""
    facts = bench.backend.facts
    price = bench.recipe.config.price
    name, machine = instances.find_machine(price.instance) or ("", None)
    hourly = price.per_hour or instances.price_per_hour(price.instance)
    lines = []
    if hourly:
        measured_on = _device_text(bench.backend)
        cost = f"about USD {format_dollars(Bill(seconds / 3600, hourly).usd)}"
        condition = ""
        if machine is None:
            condition = f", if that is the price of this machine ({measured_on})"
        elif not _is_like(machine, facts):
            rented = f"{name} with {machine.vcpus} vCPUs"
            cost = f"not known: the time is that of {measured_on}, not of {rented},"
        elif machine.accelerators > 1:
            condition = f", with one process on its {machine.accelerators} accelerators"
        lines.append(f"cost      {cost} at USD {hourly:g} an hour{condition}")
    if load_ms and machine is not None and machine.accelerators:
        # a CPU says nothing about an accelerator
        rate = 1000 / device_ms if facts.cuda else 0.0
        lines += instances.core_plan(
            name, 1, round(load_ms, 2), rate, usd=price.per_hour
        )
    return lines


def _is_like(machine: instances.Instance, facts: BackendFacts) -> bool:
    """Return whether this machine has a rented one's cores, and as many GPUs.

    Other accelerators are not counted.
    """
    accelerators = 0 if facts.cpu else max(1, machine.accelerators)
    if facts.cuda:
        accelerators = torch.cuda.device_count()
    return (accelerators, cores()) == (machine.accelerators, machine.vcpus)


def same_cost(cost: float, alone: float, fixed: bool) -> tuple[float, str]:
    """Return how many times the run's length labels alone train, and a line on costs.

    `cost`: of fit and distillation. `alone`: of labels alone for as many steps.
    `fixed`: the number of steps is given by `run.baseline_steps`.
    """
    times = 1.0 if fixed else max(1.0, AIM * cost / alone)
    line = (
        f"baseline  labels alone cost at most {format_seconds(times * alone)}, fit and"
        f" distillation {format_seconds(cost)}, counted in CPU or device time"
    )
    if fixed:
        line += "; without run.baseline_steps they get as much, for a verdict"
    return times, line
