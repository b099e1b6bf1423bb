"""`kd-train CONFIG --check`: estimated time, and keys that make the run faster."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kd.config.schema import RUNTIMES, TeacherSection
from kd.core.contracts import Backend, TeacherModel
from kd.core.host import command_seconds, cores, installed, peak_mib
from kd.core.types import Costs
from kd.jobs.description import described
from kd.jobs.estimate import TEACHER, Bench, estimate, measure
from kd.jobs.scan_images import scan
from kd.jobs.stopwatch import MARGIN, Timed, fastest, seconds_of
from kd.models.classifier import count_attention
from kd.setup.build import distributed
from kd.setup.build_teacher import TeacherFactory, teacher_mode
from kd.setup.data import open_sources
from kd.setup.modes import ExecutionMode, Work, in_short, noise, torch_mode
from kd.setup.recipe import Recipe
from kd.setup.student import apply_mode
from kd.study.sifting import sifting_text

FORM_SECONDS = {"compiled": 60.0, **dict.fromkeys(RUNTIMES, 15.0)}
"""Seconds that a compiled or exported form costs at each start. Training steps of nine networks compile in 29 to 203 s
on one busy core (`results/speed/compile_*.csv`); exporting a ViT-S takes 9 s, plus a session."""
CHECK_SECONDS = 150.0  # age of the command at which such a form must be ready, or it is not tried
WORTH = 4.0
"""Time such a form only if the run's work on it is this many times its start-up cost; it pays if it saves a quarter."""
MOST_SECONDS = 4.0
"""Seconds of a step and the teacher above which settings are not compared, which repeats both dozens of times."""
LATER_MIB = 100
"""MiB that evaluation, checkpoints, export and report add to the first steps (`results/speed/forecast_*.csv`)."""


class Found(NamedTuple):
    """Results of a comparison."""

    keys: list[str]  # lines `key: value   # reason` for settings that pay
    failed: list[str]  # modes that cannot run here, and why
    works: tuple[Work, ...] = ()  # (baseline, best); empty if nothing was compared


def forecast(recipe: Recipe, path: str = "given", everything: bool = False) -> str:
    """Check a recipe, look for damaged images, and time a few steps.

    `everything`: look at all images, search repeated ones too, and time the settings that are left open.
    """
    (checked, counted), data = described(recipe, path, answers=True), open_sources(recipe.data)
    most = data.plan.max_skipped if data.plan.on_corrupt == "skip" else -1.0
    lines = [*checked, *scan(data.splits, most, recipe.path, everything, data.plan.bits)]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "\n".join([*lines, "time      not measured: only one process measures"])
    with distributed(recipe.backend) as backend:
        bench = Bench.of(recipe, data, backend)
        parts = measure(bench)
        peak, on_cpu = peak_mib() + LATER_MIB, backend.facts.cpu
        if on_cpu:
            peak += counted * (1 - parts["step"].images / bench.split.micro_batch)
        told, own = f"memory    {peak:.0f} MiB at the peak of the process", checked[-1].removeprefix("memory    ")
        lines[len(checked) - 1] = f"{told}, including {own}" if on_cpu else f"{told}; of the device {own}"
        lines += [*estimate(bench, parts), *sifting(bench, parts)]
        return "\n".join([*lines, *(advise(bench, parts) if everything else [])])


def advise(bench: Bench, parts: Mapping[str, Timed]) -> list[str]:
    """Time the alternatives left open by keys at `auto` and `off`; return lines of text."""
    facts, run = bench.backend.facts, bench.planned(bench.recipe)
    step, teacher = parts["step"], parts["teacher"]
    seconds = (step.ms * step.images + teacher.ms * teacher.images) / 1000
    if seconds > MOST_SECONDS:
        return [f"keys      not compared: already a step of {step.images} images takes {seconds:.1f} s"]
    with ExitStack() as stack:
        asked = bench.asked(run) * run.cost(TEACHER) * teacher.ms / 1000
        trained = run.cost(Costs(0.0, 0.0, step.ms, 0.0, False)) / 1000
        made = (
            []
            if facts.compiles
            else [
                compare_teachers(bench, asked, teacher.images),
                compare_students(bench, trained, step.images, stack),
            ]
        )
        timed = [one.works for one in (made if bench.asked(run) > 0.5 else made[1:]) if one.works]  # most steps
        plain, best = ([works[i] for works in timed] for i in (0, -1))
        lines, most = [line for one in made for line in one.keys], torch.get_num_threads()
        stack.callback(torch.set_num_threads, most)
        threads, more = compare_threads(most, best) if timed and facts.cpu and facts.threads == 0 else (most, [])
        lines += more
        if len(lines) > 1 and timed:
            times = fastest({"plain": stepping(most, plain), "all": stepping(threads, best)})[1]
            lines = [*lines, f"# all of these together: {times:.2f} times as fast"] if times > 1 else []
    load = f"timed in turns, steps of {step.images} images, a load of {os.getloadavg()[0]:.1f} on {cores()} cores"
    head = f"keys      no other setting is {100 * MARGIN:.0f} % faster here, {load}"
    if lines:
        head = f"keys      faster here, {load}; paste what follows at the end of the file"
    return [head, *lines, *(f"          {text}" for one in made for text in one.failed)]


def compare_teachers(bench: Bench, seconds: float, images: int) -> Found:
    """Time the teacher's forward of `images` in other modes; `seconds`: its time in the run."""
    section, model, backend = bench.recipe.teacher, bench.teachers.model, bench.backend
    if model is None or model.runtime != "torch" or section.exported(cpu=True):
        return Found([], [])
    stages = torch_stages(section.precision, section.attention, count_attention(model))
    if section.compile == "off":
        stages.append([*exported_forms(section, model, backend), {"compiled": True}])
    size = bench.teachers.data.plan.image_size
    factory, batch = TeacherFactory(section, model, backend, size), noise(images, size, backend)

    def work(mode: ExecutionMode) -> Work:
        live = factory(mode)
        return lambda: live(batch).main

    return compared(replace(teacher_mode(section, model, backend), compiled=False), stages, work, seconds, "teacher")


def compare_students(bench: Bench, seconds: float, images: int, stack: ExitStack) -> Found:
    """Time the student's training step of `images` in other modes; `seconds`: its time in the run."""
    section, distillation, backend = bench.recipe.student, bench.distillation, bench.backend
    precision = bench.recipe.backend.precision
    rule = torch_mode(precision, section.attention, False, distillation, backend)
    stages = torch_stages(precision, section.attention, count_attention(distillation))
    stages += [[{"compiled": True}]] if section.compile == "off" else []
    stack.callback(apply_mode, rule, distillation, backend)

    def work(mode: ExecutionMode) -> Work:
        module = copy.deepcopy(distillation) if mode.compiled else distillation  # compiling cannot be undone
        trial = stack.enter_context(bench.trial(images, module))

        def step() -> torch.Tensor:
            apply_mode(mode, module, backend)
            return trial.step()

        return step

    return compared(rule, stages, work, seconds, "student")


def compare_threads(most: int, works: Sequence[Work]) -> tuple[int, list[str]]:
    """Time a step in the best modes with all threads, half of them, a quarter, ... 1."""
    candidates = {most >> halved: stepping(most >> halved, works) for halved in range(most.bit_length())}
    number, times = fastest(candidates)
    line = f"backend.threads: {number}   # {times:.2f} times as fast as {most} threads"
    return number, [line] if number != most else []


def stepping(threads: int, works: Sequence[Work]) -> Work:
    """Return a function that runs a step on `threads` threads."""

    def step() -> torch.Tensor:
        torch.set_num_threads(threads)
        return [work() for work in works][-1]

    return step


def torch_stages(precision: str, attention: str, layers: int) -> list[list[dict[str, Any]]]:
    """Return the torch modes left open by keys at `auto`, one stage per key; `layers`: number of attention layers."""
    precisions = [{"precision": one} for one in ("fp32", "bf16") if precision == "auto"]
    kernels = [{"kernel": one} for one in ("unfused", "fused") if attention == "auto" and layers]
    return [stage for stage in (precisions, kernels) if stage]


def exported_forms(section: TeacherSection, model: TeacherModel, backend: Backend) -> list[dict[str, Any]]:
    """Return the graphs that may be compared with torch."""
    divided = section.shard or section.pipeline
    if divided or section.runtime != "auto" or not backend.facts.cpu or getattr(model, "features", ()):
        return []
    forms = [*(("fp32", runtime) for runtime in RUNTIMES), ("bf16", "openvino")]
    allowed = ("fp32", "bf16") if section.precision == "auto" else (section.precision,)
    return [{"precision": p, "kernel": runtime} for p, runtime in forms if installed(runtime) and p in allowed]


def compared(
    best: ExecutionMode,
    stages: Sequence[Sequence[Mapping[str, Any]]],
    work: Callable[[ExecutionMode], Work],
    seconds: float,
    section: str,
) -> Found:
    """Compare the best mode so far with each stage's changes in turn, so that each advised key pays by itself.

    `seconds`: this work's time in the run; a compiled or exported form must save more than its start-up cost.
    """
    lines, failed = [], []
    plain = fast = work(best)
    for stage in stages:
        runs, costs = {best: fast}, {best: 0.0}
        for mode in (replace(best, **change) for change in stage):
            cost = FORM_SECONDS["compiled" if mode.compiled else mode.kernel] if mode.rebuilt else 0.0
            late = cost and command_seconds() + cost > CHECK_SECONDS
            if mode == best or late or seconds < WORTH * cost:
                continue
            try:
                made = work(mode)
                costs[mode] = max(cost, seconds_of(made)) if mode.rebuilt else 0.0
                runs[mode] = made
            except Exception as error:  # compilers, exporters and runtimes raise many types
                failed.append(f"{section}: {mode} cannot be run here ({in_short(error)})")
        winner, times = fastest(runs)
        if winner != best and seconds * (1 - 1 / times) > costs[winner]:
            reason = f"{section}: {winner} is {times:.2f} times as fast as {best}"
            reason += f", after {costs[winner]:.0f} s at each start" if costs[winner] else ""
            keys = {}
            if winner.precision != best.precision:
                keys["teacher.precision" if section == "teacher" else "backend.precision"] = winner.precision
            if winner.kernel != best.kernel:
                keys[f"{section}.{'runtime' if winner.exported else 'attention'}"] = winner.kernel
            if winner.compiled:
                keys[f"{section}.compile"] = '"on"'
            lines += [f"{key}: {value}   # {reason}" for key, value in keys.items()]
            best, fast = winner, runs[winner]
    return Found(lines, failed, (plain, fast))


def sifting(bench: Bench, parts: Mapping[str, Timed]) -> list[str]:
    """Return a line on what the sifter of a run saves or costs, from the measured parts of a step."""
    run, ms = bench.planned(bench.recipe), {name: part.ms for name, part in parts.items()}
    if not run.sifted:
        return []
    views = bench.recipe.teacher.cache.num_views
    warm = bench.costs(ms, 0.0 if 0 < views < run.epochs else bench.asked(run) * ms["teacher"])
    measured = (
        f"teacher {warm.teacher:.2f}, student forward {warm.forward:.2f}, step {warm.step:.2f}, "
        f"loading {warm.load:.2f} ms per image"
    )
    kind, ratio = bench.recipe.config.sifter.kind, run.sifter.cost(warm) / warm.per_image()
    return [f"sifter    '{kind}' ({measured}): {sifting_text(ratio, run.epochs - run.sifted, run.sifted)}"]
