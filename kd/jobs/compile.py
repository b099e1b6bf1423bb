"""`kd-train CONFIG --compile-only`: make every graph of the run and write nothing, for `neuron_parallel_compile`."""

from __future__ import annotations

from dataclasses import replace

from kd import build
from kd.artifacts.memory import Memory
from kd.config import Config
from kd.contracts import Backend
from kd.engine.rehearse import rehearse
from kd.jobs._teachers import each, together
from kd.jobs._world import prepared, world
from kd.jobs.check import check
from kd.jobs.teach import teacher_run
from kd.jobs.train import labels_alone
from kd.models.ensemble import TeacherModel
from kd.report.console import Console
from kd.schema import Cache
from kd.start.batch import fixed_batch


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
    views = replace(settings.data, views=build.views(settings))
    settings = replace(settings, data=views, teacher=replace(settings.teacher, cache=Cache()))
    lines = []
    with world(settings) as backend:
        data = prepared(settings, backend, fill=False)
        for title, run, teacher in _runs(settings, data, backend):
            built, _ = build.run(run, data, backend, teacher, Memory(), Console(title, quiet=True))
            steps = rehearse(built)
            counts = {k: v for k, v in backend.counters().items() if k in ("compiles", "executions")}
            told = ", ".join(f"{name} so far {count:.0f}" for name, count in counts.items())
            lines.append(f"{title}: {steps} steps, 2 evaluations{'; ' if told else ''}{told}")
    return "\n".join([*lines, "nothing was kept: no run folder, no checkpoint"])


def _runs(settings: Config, data: build.Data, backend: Backend) -> list[tuple[str, Config, TeacherModel | None]]:
    """List what `kd-train` would train: the teacher, the student, the student on labels alone."""
    section, found = settings.teacher, []
    teacher = None
    if section.model:
        if section.shard or section.pipeline:
            backend.check_divided(section.pipeline)
        features, models = "features" in build.needs(settings), []
        for where, alone in each(settings):
            if section.fit.epochs and not alone.teacher.checkpoint:
                plan = teacher_run(alone)
                found.append((where, plan, None))
                models.append(build.student_model(plan, data.train.classes, features))
            else:
                models.append(build.teacher_model(alone, data.train.classes, features, where=where))
        teacher = together(settings, models)
    found.append((settings.run.name, settings, teacher))
    if settings.run.baseline:
        found.append((f"{settings.run.name} (labels only)", labels_alone(settings, fixed_batch(settings)), None))
    return found
