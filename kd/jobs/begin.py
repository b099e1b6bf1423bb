"""Before step 1: build the run, refuse one that is another one, record what it is, score its teachers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from kd.core.errors import ModelError
from kd.core.host import environment
from kd.engine.run import Run
from kd.files.run_dir import RunDir
from kd.jobs.opened import require_same
from kd.jobs.progress.console import Console
from kd.models.classifier import Ensemble
from kd.models.teacher import LiveTeacher, count_parameters, is_on_meta
from kd.setup.build import Built, Results, Setting, build_run
from kd.setup.home import compare
from kd.setup.recipe import Recipe, TeacherPlan
from kd.setup.teacher import Teachers


def begin(recipe: Recipe, setting: Setting, folder: RunDir, console: Console, title: str) -> Built:
    """Build the run of an opened folder, record what it is made of, and say what its set-up found out."""
    known = folder.manifest()
    compare_home(recipe.teacher, setting, folder, console)
    built = build_run(recipe.teacher, recipe.student, recipe.loop, setting, Results(folder, console))
    facts = built.facts | facts_of(built.run, setting)
    require_same("data", known, facts)
    require_same("teacher", known, facts)
    folder.record(**facts)
    announce(facts, known, setting, console, title)
    console.info(f"{title}: resumes from step {step:,}" if (step := folder.step()) else "")
    return built


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
    if setting.teachers.notes:
        facts["teacher_notes"] = setting.teachers.notes
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
    least = plan.min_accuracy
    least = least if least >= 0 else min(max(0.5, chance), 2 * chance)
    if reached < least:
        guessing = f"; guessing has {column.text(chance)}" if chance else ""
        wrong = f"has the {column.title} {column.text(reached)} on the validation images{guessing}"
        remedy = "Check that its classes stand in the data's order and that its weights were loaded"
        raise ModelError(where, wrong, f"At least {column.text(least)} (teacher.min_accuracy)", remedy)
