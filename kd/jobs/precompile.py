"""`kd-train CONFIG --compile-only`: make every graph of the run and write nothing, for `neuron_parallel_compile`."""

from __future__ import annotations

from dataclasses import replace

from kd.artifacts.memory import Memory
from kd.config import Config
from kd.config.schema import Cache
from kd.contracts import Backend
from kd.engine.precompile import precompile
from kd.jobs.check import check
from kd.jobs.teach import merge_teachers, split_teachers, teacher_config
from kd.jobs.train import labels_only
from kd.models.classifier import TeacherModel
from kd.report.console import Console
from kd.setup.build import build_run, distributed, needed_by
from kd.setup.data import Data, fixed_batch, open_data
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
    check(settings)
    views = replace(settings.data, views=settings.data.views or settings.teacher.cache.views)
    settings = replace(settings, data=views, teacher=replace(settings.teacher, cache=Cache()))
    lines = []
    with distributed(settings.backend) as backend:
        data = open_data(settings.data, settings.run.folder, backend, fill=False)
        for title, run, teacher in _runs(settings, data, backend):
            built = build_run(run, data, backend, teacher, Memory(), Console(title, quiet=True))
            steps = precompile(built.run)
            counts = {k: v for k, v in backend.counters().items() if k in ("compiles", "executions")}
            told = ", ".join(f"{name} so far {count:.0f}" for name, count in counts.items())
            lines.append(f"{title}: {steps} steps, 2 evaluations{'; ' if told else ''}{told}")
    return "\n".join([*lines, "nothing was kept: no run folder, no checkpoint"])


def _runs(settings: Config, data: Data, backend: Backend) -> list[tuple[str, Config, TeacherModel | None]]:
    """List what `kd-train` would train: the teacher, the student, the student on labels alone."""
    section, found, models = settings.teacher, [], []
    if section.model:
        if section.shard or section.pipeline:
            backend.check_divided(section.pipeline)
        features, classes, size = "pooled" in needed_by(settings.losses), data.train.classes, settings.data.image_size
        for where, alone in split_teachers(section):
            if section.fit.epochs and not alone.checkpoint:
                plan = teacher_config(settings, alone)
                found.append((where, plan, None))
                models.append(build_student(plan.student, settings.run.seed, classes, size, features))
            else:
                models.append(load_teacher(alone, classes, size, features, where=where))
    found.append((settings.run.name, settings, merge_teachers(section, models) if models else None))
    if settings.run.baseline:
        alone = labels_only(settings, fixed_batch(settings.data))
        found.append((f"{settings.run.name} (labels only)", alone, None))
    return found
