"""`--check`: which keys would make a run faster on this machine, timed in turns, as YAML to paste."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from kd.config.schema import RUNTIMES, TeacherSection
from kd.config.validate import installed
from kd.core.contracts import Backend, TeacherModel
from kd.core.facts import BackendFacts
from kd.core.types import Costs
from kd.jobs.estimate import Measured, Models, fastest, seconds_of
from kd.models.classifier import count_attention
from kd.parts import registry
from kd.setup.build import sift_context
from kd.setup.loaders import BatchSplit, default_workers
from kd.setup.modes import ExecutionMode, Trial, Work, in_short, noise, torch_mode, trial_images
from kd.setup.recipe import LoopPlan, Recipe, StudentPlan
from kd.setup.student import apply_mode
from kd.setup.teacher import TeacherFactory, teacher_mode

FORM_SECONDS = {"compiled": 60.0, **dict.fromkeys(RUNTIMES, 15.0)}
"""What a compiled or exported form costs at each start of a run. Training steps of nine networks compile in 29 to 203 s
on one busy core (`benchmarks/compile_*.csv`); a ViT-S is exported in 9 s, and a session is added."""
WORTH = 4.0
"""Such a form is timed where its work in the run is this many times its cost: it must then save a quarter to pay."""
MARGIN = 0.05
"""Share of the time that a candidate must save in all turns but one: less is within what a neighbour does to them."""


Stage = Callable[[ExecutionMode], Sequence[ExecutionMode]]
"""Returns what is compared with the best mode so far."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What timing a few candidates found."""

    lines: tuple[str, ...] = ()
    """`key: value   # reason` of the keys that would pay; empty where none does."""
    failed: tuple[str, ...] = ()
    """Candidates that cannot be run here, and why."""


def advise(
    recipe: Recipe, models: Models, split: BatchSplit, backend: Backend, facts: BackendFacts, found: Measured
) -> list[str]:
    """Time other ways to run the same configuration, and return lines for a person. One process.

    A key that the configuration sets to something else than `auto` or `off` is left as it is.
    """
    loop, count, num_images = recipe.loop, trial_images(split.micro_batch, backend), len(models.teachers.data.train)
    images, asked = loop.images(num_images), 0
    if recipe.teacher.needed:
        asked = loop.teacher_images(num_images)
    fixed = found.fixed / split.micro_batch
    made = [
        compare_teachers(recipe.teacher, models, backend, count, asked * found.teacher / 1000),
        compare_students(recipe.student, models, backend, count, images * (fixed + found.step) / 1000),
    ]
    if facts.cpu and not facts.threads:
        made.append(compare_threads(loop, models, backend, count))
    lines = [line for one in made for line in one.lines]
    head = f"keys      nothing else that was timed in turns on {count} images is {100 * MARGIN:.0f} % faster here"
    if lines:
        head = f"keys      faster here, timed in turns on {count} images; paste what follows at the end of the file"
    sifted = [f"sifter    {describe_sifter(recipe, models, split, backend, found)}"] if _sifts(loop) else []
    return [head, *lines, *(f"          {text}" for one in made for text in one.failed), *sifted]


def compare_teachers(section: TeacherSection, models: Models, backend: Backend, count: int, seconds: float) -> Compared:
    """Time the teacher's forward in other modes; `seconds` is what the run gives to it."""
    model = models.teachers.model
    if model is None or model.runtime != "torch" or backend.compiles or section.exported(cpu=True):
        return Compared()
    rule = replace(teacher_mode(section, model, backend), compiled=False)
    forms: list[ExecutionMode] = []
    if not (section.shard or section.pipeline) and section.compile == "off":
        forms = exported_forms(section, model, backend)
    factory = TeacherFactory(section, model, backend, models.image_size)
    batch = noise(count, models.image_size, backend)
    stages = torch_stages(section.precision, section.attention, count_attention(model))
    stages += [lambda best: [*forms, replace(best, compiled=True)]] if section.compile == "off" else []

    def work(mode: ExecutionMode) -> Work:
        live = factory(mode)
        return lambda: live(batch).main

    return _compared(rule, stages, work, seconds, "teacher")


def compare_students(plan: StudentPlan, models: Models, backend: Backend, count: int, seconds: float) -> Compared:
    """Time the student's training step in other modes; `seconds` is what the run gives to it."""
    distillation = models.distillation
    if backend.compiles:
        return Compared()
    rule = torch_mode(plan.precision, plan.attention, False, distillation, backend)
    stages = torch_stages(plan.precision, plan.attention, count_attention(distillation))
    stages += [lambda best: [replace(best, compiled=True)]] if plan.compile == "off" else []
    with ExitStack() as stack:

        def work(mode: ExecutionMode) -> Work:
            module = copy.deepcopy(distillation) if mode.compiled else distillation  # compiling cannot be undone
            trial = stack.enter_context(Trial(module, models.live, backend, models.image_size, count))

            def step() -> torch.Tensor:
                apply_mode(mode, module, backend)
                return trial.step()

            return step

        found = _compared(rule, stages, work, seconds, "student")
    apply_mode(rule, distillation, backend)
    return found


def compare_threads(loop: LoopPlan, models: Models, backend: Backend, count: int) -> Compared:
    """Time a step with all threads, half of them, a quarter, ... 1."""
    most = torch.get_num_threads()
    candidates = [most]
    while candidates[-1] > 1:
        candidates.append(candidates[-1] // 2)
    with Trial(models.distillation, models.live, backend, models.image_size, count) as trial:

        def work(threads: int) -> Work:
            def step() -> torch.Tensor:
                torch.set_num_threads(threads)
                if models.teachers.model is not None and loop.teacher_share > 0.5:  # what most steps do
                    trial.ask()
                return trial.step()

            return step

        try:
            best, table = fastest({number: work(number) for number in candidates}, margin=MARGIN)
        finally:
            torch.set_num_threads(most)
    if best == most:
        return Compared()
    return Compared((f"backend.threads: {best}   # {table[most] / table[best]:.2f} times {most} threads",))


def torch_stages(precision: str, attention: str, layers: int) -> list[Stage]:
    """Return what keys at `auto` leave open in torch, one key a stage; `layers` have two attention kernels."""
    stages: list[Stage] = []
    if precision == "auto":
        stages.append(lambda best: [replace(best, precision=one) for one in ("fp32", "bf16")])
    if attention == "auto" and layers:
        stages.append(lambda best: [replace(best, kernel=one) for one in ("unfused", "fused")])
    return stages


def exported_forms(section: TeacherSection, model: TeacherModel, backend: Backend) -> list[ExecutionMode]:
    """Return the graphs that may be compared with torch."""
    if section.runtime != "auto" or backend.device.type != "cpu" or getattr(model, "features", ()):
        return []
    modes = [*(ExecutionMode("fp32", runtime) for runtime in RUNTIMES), ExecutionMode("bf16", "openvino")]
    precisions = ("fp32", "bf16") if section.precision == "auto" else (section.precision,)
    return [mode for mode in modes if installed(mode.kernel) and mode.precision in precisions]


def _compared(
    rule: ExecutionMode,
    stages: Sequence[Stage],
    work: Callable[[ExecutionMode], Work],
    seconds: float,
    section: str,
) -> Compared:
    """Compare the best mode so far with those of each stage in turn, so that every key that is advised pays by itself.

    `seconds` of the run are this work: a compiled or exported form must save more of them than it costs a start.
    """
    best, lines, failed = rule, [], []
    for stage in stages:
        runs, costs = {best: work(best)}, {best: 0.0}
        for mode in stage(best):
            cost = FORM_SECONDS["compiled" if mode.compiled else mode.kernel] if mode.rebuilt else 0.0
            if mode == best or seconds < WORTH * cost:
                continue
            try:
                made = work(mode)
                costs[mode] = max(cost, seconds_of(made)) if mode.rebuilt else 0.0
                runs[mode] = made
            except Exception as error:  # compilers, exporters and runtimes fail in their own ways
                failed.append(f"{section}: {mode} cannot be run here ({in_short(error)})")
        winner, table = fastest(runs, margin=MARGIN)
        if winner != best and seconds * (1 - table[winner] / table[best]) > costs[winner]:
            reason = f"{section}: {winner} is {table[best] / table[winner]:.2f} times as fast as {best}"
            reason += f", after {costs[winner]:.0f} s at each start" if costs[winner] else ""
            lines += [f"{key}: {value}   # {reason}" for key, value in _keys(section, best, winner).items()]
            best = winner
    return Compared(tuple(lines), tuple(failed))


def _keys(section: str, rule: ExecutionMode, best: ExecutionMode) -> dict[str, str]:
    """Return the keys that turn one mode into another, as YAML."""
    keys = {}
    if best.precision != rule.precision:
        keys["teacher.precision" if section == "teacher" else "backend.precision"] = best.precision
    if best.kernel != rule.kernel:
        keys[f"{section}.{'runtime' if best.exported else 'attention'}"] = best.kernel
    if best.compiled:
        keys[f"{section}.compile"] = '"on"'
    return keys


def _sifts(loop: LoopPlan) -> bool:
    return loop.sifter.kind != "none"


def describe_sifter(recipe: Recipe, models: Models, split: BatchSplit, backend: Backend, found: Measured) -> str:
    """Return what the sifter of a run saves or costs, from the measured parts of a step."""
    section, data, workers = recipe.loop.sifter, models.teachers.data, recipe.data.workers
    count = default_workers(backend) if workers == "auto" else int(workers)
    step = found.step + found.fixed / split.micro_batch
    costs = Costs(recipe.loop.teacher_share * found.teacher, found.score, step, found.load / max(1, count), count > 0)
    context = sift_context(len(data.train), data.labels, backend, split, recipe.loop.seed)
    sifter = registry.build("sifters", section.kind, section.options, "sifter.kind", context=context)
    return saving(section.kind, sifter.cost(costs), costs)


def saving(kind: str, sifted: float, costs: Costs) -> str:
    """Say what a sifter saves or costs; `sifted` is the cost of a sifted epoch, ms an image."""
    share = 1 - sifted / costs.per_image()
    measured = (
        f"teacher {costs.teacher:.2f}, student forward {costs.forward:.2f}, step {costs.step:.2f}, "
        f"loading {costs.load:.2f} ms an image"
    )
    if share > 0:
        saves = f"'{kind}' saves {100 * share:.0f} % of a sifted epoch's time ({measured})"
        return f"{saves}. So do fewer epochs: compare with sifter.kind=none and {1 - share:.2f} of them"
    return f"'{kind}' makes a sifted epoch {-100 * share:.0f} % longer ({measured}). Set sifter.kind=none"
