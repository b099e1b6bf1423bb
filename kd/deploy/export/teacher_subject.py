"""The teacher of a run in place of its student, so that its export can answer where the student is not sure."""

from __future__ import annotations

from dataclasses import replace

from kd.core.errors import ModelError
from kd.deploy.export.subject import Subject
from kd.files.run_dir import RunDir
from kd.models.classifier import Classifier, digest
from kd.setup.data import open_sources
from kd.setup.teacher import load_fitted
from kd.study.finished import Trust

WHERE = "--teacher"


def teacher_of(subject: Subject, folder: RunDir, vouched: Trust) -> Subject:
    """Return what is exported of a run's teacher, from what is exported of its student."""
    recipe, task = subject.recipe, subject.recipe.student.task
    plan, kinds = recipe.teacher, [one.kind for one in recipe.teacher.members.values()]
    if not kinds:
        raise ModelError(WHERE, "the run has no teacher: it learned labels alone", "", "Name another run")
    if len(kinds) > 1:
        remedy = "Name a run with one of them, or export that model by a run of its own"
        raise ModelError(WHERE, f"the run averages {len(kinds)} teachers, which are no one graph", "", remedy)
    vouched.check_folder(recipe.data)
    vouched.check_teacher(plan)
    model = load_fitted(plan, open_sources(recipe.data)).model
    if not isinstance(model, Classifier):
        wrong = f"a teacher of kind '{kinds[0]}' is no network of torch, which an export is written from"
        raise ModelError(WHERE, wrong, "Kinds timm, torch and zero_shot", "Ask it by itself, beside kd-predict")
    if task.logits and not model.num_classes:
        wrong = "the run's losses read the teacher's features alone, so that it was loaded without classes"
        raise ModelError(WHERE, wrong, "", "Export it by a run whose losses read its logits")
    last = subject.scored[0]
    own = task.scores.of_teachers(folder.best_row() if last is None else last.row).get("teacher", {})
    scored = replace(last, row=own, samples=last.of("teacher")) if last is not None else None
    section = replace(recipe.student.section, model=plan.section.model)
    alone = replace(
        recipe,
        record=replace(recipe.record, name=f"{recipe.record.name}-teacher"),
        student=replace(recipe.student, section=section, losses=()),
        teacher=replace(plan, section=replace(plan.section, model="")),
    )
    fitted = "fitted on the labels of the same data" if plan.fits else f"as `teacher.kind={kinds[0]}` loads it"
    provenance = {**subject.provenance, "step": 0, "metrics": own, "digest": digest(model.network)}
    origin = f"the teacher of the run {subject.provenance['run']}, {fitted}"
    more = {"origin": origin, "baseline": (), "scored": (scored, None)}
    return replace(subject, recipe=alone, student=model, provenance=provenance, **more)
