"""Train one student in a run folder, from where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kd.core.contracts import Source
from kd.core.errors import ModelError
from kd.core.host import environment
from kd.core.scores import Scores
from kd.core.text import html_table
from kd.core.types import State
from kd.engine.loop import train as engine_train
from kd.engine.run import Run
from kd.files.run_dir import RunDir
from kd.jobs.final import conclude
from kd.jobs.folder import require_same
from kd.jobs.observe import Observer
from kd.jobs.progress.console import Console
from kd.jobs.signals import signals
from kd.models.classifier import Ensemble
from kd.models.teacher import LiveTeacher, count_parameters, is_on_meta
from kd.setup.build import Results, Setting, build_run
from kd.setup.home import compare
from kd.setup.recipe import BASELINE, Recipe, TeacherPlan
from kd.setup.teacher import Teachers
from kd.study.report.summary import Trained, samples_of, skipped_text

if TYPE_CHECKING:
    from kd.deploy.export.subject import WrittenExport


@dataclass(frozen=True, slots=True)
class Result(Trained):
    """What a finished run leaves."""

    report: str = ""

    def export(self, target: str | Path | None = None, **options: Any) -> WrittenExport:
        """Export the best student, as `kd-export` does; the code that the run names is run.

        `target` None: `export` in the run folder. `options`: fields of `kd.deploy.export.options`, such as `int8=True`.
        """
        from kd.deploy.export.export import ExportOptions, export  # most runs end without one

        return export(self.folder, Path(target) if target else None, ExportOptions.of(**options), trust=True)

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
    backend, model, data = setting.backend, setting.teachers.model, setting.teachers.data
    backend.barrier()  # rank 0 has opened the folder
    known = folder.manifest()
    names, scores = recipe.record.trackers if backend.rank == 0 else (), recipe.student.task.scores
    trackers = None
    if names:
        from kd.jobs.progress.trackers import Trackers  # only where some are named

        trackers = Trackers(names, recipe.record.name, folder.path, recipe.record.shown)
    with Console(title, quiet=backend.rank != 0, trackers=trackers, scores=scores) as console:
        with Observer(setting, recipe.loop, folder, console) as observer:
            results = Results(folder, console)
            compare_home(recipe.teacher, setting, folder, console)
            built = build_run(recipe.teacher, recipe.student, recipe.loop, setting, results)
            run = observer.watch(built.run)
            facts = built.facts | facts_of(run, setting)
            require_same("data", known, facts)
            require_same("teacher", known, facts)
            folder.record(**facts)
            announce(facts, known, setting, console, title)
            console.info(f"{title}: resumes from step {step:,}" if (step := folder.step()) else "")
            with run.span("evaluation"):
                folder.record(before=check_before(recipe.teacher, run, setting.teachers, console))
            with signals.training():
                state = engine_train(replace(run, stop=signals.requested))
        observer.conclude(title, timed=bool(final) and recipe.record.path.name != BASELINE)  # one table a command
        for line in (skipped_text(state.skipped_in_all, state.step), patience_text(run, state)):
            console.info(f"{title}: {line}" if line else "")
        if trackers is not None and data.labelled and recipe.student.task.logits == "softmax":
            from kd.study.answers import mistakes  # only where a tracker shows them

            with run.average.applied() if run.average is not None else nullcontext():
                found = mistakes(run.distillation.student.eval(), data.views()[1], data.classes, backend.device)
            trackers.pictures(state.step, found)
        sifting = sifting_report(run, data.train, data.labels, folder)
        saved = memory(recipe.loop.optimizer.zero, run, facts["modes"])
        console.info(f"{title}: {saved}" if saved else "")
        broken = unreadable((data.train, data.val), run, known)
        if broken:
            folder.record(unreadable=broken)
            count = f"{len(broken)} images" if len(broken) > 1 else "1 image"
            console.info(f"{title}: {count} could not be decoded and had weight 0: {', '.join(broken[:5])}")
        scored = conclude(built, folder, final == "test") if final else None
        if scored is not None:
            console.info(f"{title}: {scores.conclusion(scored)}")
    return Result(
        folder=folder.path,
        metrics=folder.best_row() if backend.rank == 0 else {},
        scored=scored,
        parameters=count_parameters(run.distillation.student),
        images_per_second=state.images / max(state.seconds, 1e-9),
        teacher_parameters=count_parameters(model) if model is not None else 0,
        sifting=sifting,
        at_home=tuple(f"{where}: {one['text']}" for where, one in folder.manifest().get("teacher_home", {}).items()),
        steps=state.step,
        skipped=state.skipped_in_all,
    )


def facts_of(run: Run, setting: Setting) -> dict[str, Any]:
    """Return what the manifest holds of data, teacher and machine."""
    backend, teacher, data = run.backend, setting.teachers.model, setting.teachers.data
    facts: dict[str, Any] = {
        "world_size": backend.world_size,
        "machines": backend.world_size // backend.local_world_size,
        "images": len(data.train),
        "batch_size": run.length.batch_size,
        "backend": backend.kind,
        "classes": list(data.classes),
        "data": data.fingerprint,
        "test": data.test.fingerprint if data.test is not None else "",
        "environment": environment(),
        "date": date.today().isoformat(),
        "parameters": {"student": count_parameters(run.distillation.student)},
    }
    if teacher is not None:
        facts["parameters"]["teacher"] = count_parameters(teacher)
    if teacher is None or not is_on_meta(teacher):  # where another rank holds the weights, that one compares them
        facts["teacher"] = teacher.identity()["teacher"] if teacher is not None else None
    return facts


def announce(
    facts: Mapping[str, Any], known: Mapping[str, Any], setting: Setting, console: Console, title: str
) -> None:
    """Show what the set-up found out; `known` is what an earlier start recorded."""
    modes = ", ".join(f"{name} {mode}" for name, mode in facts["modes"].items())
    threads = f", threads {facts['threads']}" if facts["threads"] else ""
    console.info(f"{title}: {facts['batch']}; {modes}{threads}")
    for name, before in known.get("modes", {}).items():
        now = facts["modes"].get(name)
        if now != before:
            key = "teacher.precision" if name == "teacher" else "backend.precision"
            text = f"{name}: {now} from here on, {before} at the last start: `auto` follows the machine"
            console.info(f"{text}. {key} names one")
    for note in setting.teachers.notes:
        console.info(f"teacher: {note}")
    if "teacher_mib" in facts:
        rank, total = facts["teacher_mib"]["rank"], facts["teacher_mib"]["whole"]
        console.info(f"teacher: {rank:.2f} of {total:.2f} MiB on this rank, divided over {setting.backend.world_size}")


def compare_home(plan: TeacherPlan, setting: Setting, folder: RunDir, console: Console) -> None:
    """Show and record, at the first start, how the teachers' answers differ from those at home."""
    if "teacher_home" not in folder.manifest():
        compared = compare(plan, setting.teachers, setting.backend.device)
        for one in compared:
            console.info(f"{one.where}: {one.text}")
        folder.record(teacher_home={one.where: {**one.values, "text": one.text} for one in compared})


def memory(zero: bool, run: Run, modes: dict[str, str]) -> str:
    """Say what sharding and bfloat16 gave back on this rank, in MiB; "" on one rank without. All ranks must call it."""
    backend = run.backend
    held = backend.counters()["optimizer_mib"]
    whole = held
    if zero:
        whole = backend.reduce_sum(torch.tensor([held], device=backend.device)).item()
    text = f"optimizer state {held:.2f} MiB on this rank"
    if whole > held:
        text += f" of {whole:.2f} in all: ZeRO-1 over {backend.world_size} ranks gave back {whole - held:.2f}"
    if isinstance(run.teacher, LiveTeacher) and modes.get("teacher", "").startswith("bf16"):
        return f"{text}; teacher {run.teacher.mib:.2f} MiB in bfloat16, which gave back as much"
    return text if backend.world_size > 1 else ""


def patience_text(run: Run, state: State) -> str:
    """Say that a run ended because it did not get better; "" where it did not."""
    if not run.length.gave_up(state):
        return ""
    best = f"{run.evaluator.decides} {state.best:.4g}"
    return f"ended after step {state.step}: {state.no_better} evaluations in a row were no better than {best}"


def unreadable(splits: tuple[Source, Source], run: Run, known: Mapping[str, Any]) -> list[str]:
    """List the images of both splits that any rank could not decode, now or in an earlier start. All ranks call it."""
    found = set(known.get("unreadable", []))
    for source, loader in zip(splits, (run.loader, run.evaluator.loader), strict=True):
        broken_N = torch.zeros(len(source), device=run.backend.device)
        broken_N[list(loader.unreadable)] = 1.0
        found |= {source.name(id) for id in run.backend.reduce_sum(broken_N).nonzero()[:, 0].tolist()}
    return sorted(found)


def check_before(plan: TeacherPlan, run: Run, teachers: Teachers, console: Console) -> dict[str, float]:
    """Score teachers and student before step 1: a wrong teacher must not be found out after a day.

    Return the validation row; empty without a teacher that can be scored.
    """
    if teachers.model is None or (plan.task.logits and not plan.logits):
        return {}
    row, scores = run.evaluator(run.distillation.student), plan.task.scores
    if not run.evaluator.labelled:
        console.info(f"teacher: no labels to score it with; before step 1 the student has {scores.text(row)}")
        return row
    column, alone = scores.own[0], {}
    for where, values in zip(plan.members, scores.of_teachers(row).values(), strict=False):
        alone[where] = values[column.key]
    if isinstance(teachers.model, Ensemble) and plan.task.logits:
        reached = f"{column.title} {column.text(alone['teacher'])} on the validation split, averaged"
        require_teacher("teacher", alone["teacher"], plan, run)
        alone = score_alone(plan, run, teachers.model)
    else:
        reached = f"{column.title} {column.text(alone['teacher'])} on the validation split"
    console.info(f"teacher: {reached}; student now {column.text(row[column.key])}")
    for where, value in alone.items():
        if len(alone) > 1:
            console.info(f"{where}: '{plan.members[where].model}' alone {column.text(value)}")
        require_teacher(where, value, plan, run)
    return row


def score_alone(plan: TeacherPlan, run: Run, several: Ensemble) -> dict[str, float]:
    """Return the score of each of several teachers: the average would hide one whose classes have another order."""
    found, key = {}, f"teacher_{run.evaluator.decides}"
    for where, member in zip(plan.members, several.members, strict=True):
        live = LiveTeacher(member, run.backend.device).validation()  # type: ignore[arg-type]
        found[where] = run.evaluator.of(live)(run.distillation.student)[key]
    return found


def require_teacher(where: str, reached: float, plan: TeacherPlan, run: Run) -> None:
    """Require a teacher to be better than one that guesses."""
    chance, column = run.evaluator.chance, plan.task.scores.own[0]
    least = plan.section.min_accuracy
    least = least if least >= 0 else min(max(0.5, chance), 2 * chance)
    if reached < least:
        guessing = f"; guessing has {column.text(chance)}" if chance else ""
        wrong = f"has the {column.title} {column.text(reached)} on the validation images{guessing}"
        remedy = "Check that its classes stand in the data's order and that its weights were loaded"
        raise ModelError(where, wrong, f"At least {column.text(least)} (teacher.min_accuracy)", remedy)


def sifting_report(run: Run, source: Source, labels: Callable[[], Tensor], folder: RunDir) -> str:
    """Return the sifting section of report.md and write the contact sheet; all ranks must call it.

    Empty where nothing was sifted. The images are shown where the sifter knows how often each was visited.
    """
    state = run.sifter.state_dict()
    epochs = folder.metrics("epoch") if run.backend.rank == 0 else []
    if all(row["trained"] > len(source) - run.length.batch_size for row in epochs):
        return ""
    from kd.study.report.sifting import report  # draws pictures: only where something was sifted

    return report(epochs, state, source, labels, run.length.batch_size, folder.path / "sifting.jpg")
