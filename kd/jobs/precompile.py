"""`kd-train CONFIG --compile-only`: make every graph of the run and write nothing, for `neuron_parallel_compile`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kd.artifacts.memory import Memory
from kd.config import Config
from kd.config.schema import Cache
from kd.contracts import Backend, TeacherModel
from kd.engine.precompile import precompile
from kd.jobs.check import check
from kd.jobs.teach import merge_teachers
from kd.progress.console import Console
from kd.setup.build import build_run, distributed
from kd.setup.data import Data, open_data
from kd.setup.recipe import Recipe
from kd.setup.student import build_student
from kd.setup.teacher import load_teacher


def compile_only(settings: Config) -> str:
    """Make a few steps, two evaluations and a checkpoint's gathering of each run that the configuration holds.

    No run folder, no checkpoint, no fitted teacher: one that would be fitted has random weights here, since a graph
    does not depend on them. Data that a dataset renders or unpacks is written.

    Returns:
        What was done, for a person.

    Raises:
        KdError: what `kd-train` would stop at before step 1.
    """
    views = replace(settings.data, views=settings.data.views or settings.teacher.cache.views)
    settings = replace(settings, data=views, teacher=replace(settings.teacher, cache=Cache()))
    recipe, lines = Recipe(settings), []
    check(recipe)
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, recipe.run.folder, backend, fill=False)
        for title, run, teacher, named in _runs(recipe, data, backend):
            built = build_run(run, named, backend, teacher, Memory(), Console(title, quiet=True))
            steps = precompile(built.run)
            counts = {k: v for k, v in backend.counters().items() if k in ("compiles", "executions")}
            counted = ", ".join(f"{name} so far {count:.0f}" for name, count in counts.items())
            lines.append(f"{title}: {steps} steps, 2 evaluations{'; ' if counted else ''}{counted}")
    return "\n".join([*lines, "nothing was kept: no run folder, no checkpoint"])


def _runs(recipe: Recipe, data: Data, backend: Backend) -> list[tuple[str, Recipe, TeacherModel | None, Data]]:
    """List what `kd-train` would train: the teacher, the student, the student on labels alone."""
    section, models = recipe.teacher, []
    if section.shard or section.pipeline:
        backend.check_divided(section.pipeline)
    reads, size, images = recipe.reads, recipe.data.image_size, data.images(recipe.seed, recipe.views)
    fits = {where: Recipe(fit) for where, fit in recipe.fits.items()}
    for where, alone in recipe.teachers.items():
        if where in fits:
            answers = data.classes if reads.teacher_logits else ()
            models.append(build_student(fits[where].student, recipe.seed, answers, size, reads.features))
        else:
            given: Any = {"where": where, "images": images, "logits": reads.teacher_logits, "sigmoid": reads.sigmoid}
            models.append(load_teacher(alone, data.asked, size, reads.features, **given))
        data = data.with_classes(models[0].classes)
    teacher = merge_teachers(section, models, reads.sigmoid) if models else None
    baseline = [Recipe(recipe.baseline)] if recipe.baseline is not None else []
    return [
        *((where, fit, None, data) for where, fit in fits.items()),
        (recipe.name, recipe, teacher, data),
        *((f"{recipe.name} (labels only)", alone, None, data) for alone in baseline),
    ]
