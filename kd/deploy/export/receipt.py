"""Where an export comes from: teacher, answers, student, graphs, what was compared between them, and the licences.

manifest.json holds it; the card and `kd verify` draw it from there.
"""

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kd.core.text import table, written
from kd.deploy.export.graphs import Made, Subject
from kd.files.manifest import sha256
from kd.models.licences import NONE, UNKNOWN, licence_of, reaches
from kd.setup.cache import CHECKED
from kd.setup.recipe import Recipe
from kd.study.finished import MAP_DATASET

DIGITS = 12  # of a hash that a person reads


def plain(text: str) -> str:
    """Return a name as one line of Markdown that shows it and does nothing: no HTML, no link, no heading."""
    line = "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
    return re.sub(r"([\\`*\[\]|#])", r"\\\1", html.escape(line, quote=False))


def plain_name(text: str) -> str:
    """Return the name of a model on one line; of a path on this machine its last folder alone."""
    name = " ".join(str(text).split()).replace("`", "'").removeprefix("local-dir:")
    place = Path(name)
    if not name.startswith(("/", "~")):
        return name
    return f"{place.parent.name}/{place.name}" if place.name == "export" else place.name


def licences(recipe: Recipe) -> dict[str, str]:
    """Return the licences of what a run learned from, `UNKNOWN` where nobody wrote one down."""
    teachers, student, found = recipe.teacher.members, recipe.student, dict[str, str]()
    for where, one in teachers.items():
        fitted = where in recipe.teacher.fits
        own = licence_of(one.model, one.checkpoint, one.pretrained or not fitted)
        scratch = NONE if fitted and not one.pretrained else ""
        found[where] = own or one.license or scratch or UNKNOWN
    first = licence_of(student.model, student.checkpoint, True) or UNKNOWN if student.init == "pretrained" else NONE
    return {**found, "data": recipe.data.license or UNKNOWN, "student's first weights": first}


def receipt(subject: Subject, made: Made, folder: Path, digest: str, license: str) -> dict[str, Any]:
    """Return what manifest.json says of where the graphs in `folder` come from; `digest` of the weights beside them."""
    recipe, found, own = subject.recipe, subject.made_from, subject.provenance
    chain: dict[str, Any] = {}
    if recipe.teacher.members and subject.recipe.student.losses:
        names = [plain_name(written(one.model)) for one in recipe.teacher.members.values()]
        chain["teacher"] = {"name": ", ".join(names), "source": _source(recipe), "weights": found.get("teacher") or ""}
        chain["answers"] = found.get("answers") or {}
    step = {"is": "student" if recipe.student.losses else "teacher", "run": own["run"], "step": own["step"]}
    chain["student"] = {**step, "weights": own["digest"], "exported": digest}
    chain["graphs"] = {name: sha256(folder / name) for name in made.parity}
    chain["against_teacher"] = recipe.student.task.scores.against_teacher(own["metrics"])
    stated = {**subject.licences, chain["student"]["is"]: license or UNKNOWN}
    calibrated = {"calibration": made.calibration} if made.calibration else {}
    return {"chain": chain, "licences": stated, "eager_ms": round(made.eager_ms, 3), **calibrated}


def _source(recipe: Recipe) -> str:
    where, one = next(iter(recipe.teacher.members.items()))
    if recipe.data.kind == MAP_DATASET:
        return "a module that was passed to kd.distill"
    if where in recipe.teacher.fits:
        return "fitted on the labels" + (" from pretrained weights" if one.pretrained else "")
    if one.checkpoint:
        return f"the file {Path(one.checkpoint).name}"
    return f"kind {one.kind}, {'a folder' if Path(one.model.removeprefix('local-dir:')).is_dir() else 'by its name'}"


def chain_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the chain as a tree, with what was compared at each arrow."""
    chain, lines = facts["chain"], list[str]()
    if teacher := chain.get("teacher"):
        answers = chain["answers"]
        lines += [f"teacher  {teacher['name']} ({teacher['source']}), weights {_short(teacher['weights'])}"]
        if answers:
            lines += [f"  | compared: {CHECKED} stored answers, computed again whenever a run opened them"]
            lines += [f"answers  {answers['count']} in the cache {_short(answers['cache'])}"]
        else:
            lines += ["  | compared: nothing, since the teacher was asked as the run went", "answers  not stored"]
        lines += [f"  | compared: {chain['against_teacher'] or 'no score against the teacher is recorded'}"]
    own = chain["student"]
    lines += [f"{own['is']}  run {own['run']}, step {own['step']}, weights {_short(own['weights'])}"]
    if own["weights"] != own["exported"]:
        by = facts.get("calibration", {}).get("temperature", 0)
        lines += [f"  | compared: its logits, divided by {by:.3g}", f"calibrated  weights {_short(own['exported'])}"]
    for name, digest in chain["graphs"].items():
        one = facts["parity"][name]
        same = f"the same answer on {one['same_top1']} of " if "same_top1" in one else ""
        lines += [f"  | compared: {same}{one['images']} images, largest difference {one['max_difference']:.1e}"]
        lines += [f"graph  {name} {_short(digest)}"]
    return ["".join(one if one.isprintable() else "?" for one in line.replace("`", "'")) for line in lines]


def licence_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the table of the licences, and a line for each that speaks of derived models."""
    found = {plain(what): plain(licence) for what, licence in facts["licences"].items()}
    lines = table([{"what": what, "licence": licence} for what, licence in found.items()]).split("\n")
    reaching = [f"{what} ({licence})" for what, licence in found.items() if reaches(licence)]
    told = "The licence of the {} speaks of models that are made with its weights, as this one is: read it."
    return [*lines, *(line for one in reaching for line in ("", told.format(one)))]


def _short(digest: str) -> str:
    return digest[:DIGITS] or UNKNOWN
