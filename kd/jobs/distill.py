"""Train one student in a run folder, from where it stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.core.scores import Scores
from kd.core.text import html_table
from kd.engine.loop import train
from kd.files.run_dir import RunDir
from kd.jobs.begin import begin, check_before
from kd.jobs.epilogue import conclude, epilogue, show_mistakes, sifting_report
from kd.jobs.observe import Observer
from kd.jobs.progress.console import Console
from kd.jobs.signals import signals
from kd.models.teacher import count_parameters
from kd.setup.build import Setting
from kd.setup.recipe import BASELINE, Recipe
from kd.study.report.summary import Trained, samples_of

if TYPE_CHECKING:
    from torch import nn

    from kd.deploy.export.export import WrittenExport
    from kd.jobs.progress.trackers import Trackers


@dataclass(frozen=True, slots=True, repr=False)
class Result(Trained):
    """What a finished run leaves."""

    report: str = ""

    def export(self, target: str | Path | None = None, **options: Any) -> WrittenExport:
        """Export the best student, as `kd-export` does; the code that the run names is run.

        `target` None: `export` in the run folder. `options`: fields of `kd.deploy.export.options`, such as `int8=True`.
        """
        from kd.deploy.export.export import ExportOptions, export  # most runs end without one

        return export(self.folder, Path(target) if target else None, ExportOptions(**options), trust=True)

    @property
    def student(self) -> nn.Module:
        """The best student, loaded from the run folder; the code that the run names is run."""
        from kd.setup.recipe import resolve
        from kd.study.finished import best_student, opened_run  # most runs end without one

        folder, stored = opened_run(self.folder, trust=True)
        plan = resolve(stored)
        return best_student(folder, plan.student, plan.data, folder.manifest()["classes"])[0]

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items() if isinstance(value, float))
        return f"Result(folder='{self.folder}', steps={self.steps}, parameters={self.parameters}, metrics: {scores})"

    def _repr_html_(self) -> str:
        """Return the scores as a table, for notebooks."""
        scores = Scores.read(RunDir(self.folder).manifest()["scores"])
        row = self.metrics if self.scored is None else self.scored.row
        teachers = scores.of_teachers(row)
        return html_table(scores.table({**teachers, "student": row}, samples_of(self.scored, teachers, "student")))


def distill(recipe: Recipe, setting: Setting, folder: RunDir, title: str, final: str = "test") -> Result:
    """Train one student in an opened run folder, from where it stands.

    Its teachers, their data and the backend are the `setting`; a person sees the `title`. `final`: on which images the
    best checkpoint is scored at the end: "test" (validation images where there are none), "val", or "": not scored.
    """
    backend, teachers, scores = setting.backend, setting.teachers, recipe.student.task.scores
    backend.barrier()  # rank 0 has opened the folder
    trackers = trackers_of(recipe, folder) if backend.rank == 0 and recipe.record.trackers else None
    with Console(title, quiet=backend.rank != 0, trackers=trackers, scores=scores) as console:
        with Observer(setting, recipe.loop, folder, console) as observer:
            built = begin(recipe, setting, folder, console, title)
            run = observer.watch(built.run)
            with run.span("evaluation"):
                folder.record(before=check_before(recipe.teacher, run, teachers, console))
            with signals.training():
                state = train(replace(run, stop=signals.requested))
        observer.conclude(title, timed=bool(final) and recipe.record.path.name != BASELINE)  # one table a command
        if trackers is not None:
            show_mistakes(trackers, recipe, run, state, teachers.data)
        sifting = sifting_report(run, teachers.data, folder)
        for line in epilogue(recipe, run, state, teachers.data, folder):
            console.info(f"{title}: {line}")
        scored = conclude(built, folder, final == "test") if final else None
        console.info(f"{title}: {scores.conclusion(scored)}" if scored is not None else "")
    home = folder.manifest().get("teacher_home", {})
    return Result(
        folder=folder.path,
        metrics=folder.best_row() if backend.rank == 0 else {},
        scored=scored,
        parameters=count_parameters(run.distillation.student),
        images_per_second=state.images / max(state.seconds, 1e-9),
        teacher_parameters=count_parameters(teachers.model) if teachers.model is not None else 0,
        sifting=sifting,
        at_home=tuple(f"{where}: {one['text']}" for where, one in home.items()),
        steps=state.step,
        skipped=state.skipped_in_all,
    )


def trackers_of(recipe: Recipe, folder: RunDir) -> Trackers:
    """Start the trackers that a run names."""
    from kd.jobs.progress.trackers import Trackers  # accelerate: only where some are named

    return Trackers(recipe.record.trackers, recipe.record.name, folder.path, recipe.record.shown)
