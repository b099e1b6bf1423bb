"""Where an export comes from: teacher, answers, student, graphs, what was compared between them, and the licences.

manifest.json holds it; card, report and `kd verify` draw it from there.
"""

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kd.core.text import table, written
from kd.deploy.export.graphs import Made, Subject
from kd.files.manifest import sha256
from kd.models import packages
from kd.models.licences import NONE, UNKNOWN, licence_of, reaches
from kd.setup.recipe import Recipe
from kd.study.finished import MAP_DATASET

NAMED = "by its name"  # a source: the weights came with the name of the model


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
        members = {
            where: {"name": plain_name(written(one.model)), "source": _source(recipe, where)}
            for where, one in recipe.teacher.members.items()
        }
        chain["teacher"] = {"members": members, "weights": found.get("teacher") or ""}
        chain["answers"] = found.get("answers") or {}
    step = {"is": "student" if recipe.student.losses else "teacher", "run": own["run"], "step": own["step"]}
    chain["student"] = {**step, "weights": own["digest"], "exported": digest}
    chain["graphs"] = {name: sha256(folder / name) for name in made.parity}
    chain["against_teacher"] = recipe.student.task.scores.against_teacher(own["metrics"], "validation")
    stated = {**subject.licences, chain["student"]["is"]: license or UNKNOWN}
    calibrated = {"calibration": made.calibration} if made.calibration else {}
    return {"chain": chain, "licences": stated, "eager_ms": round(made.eager_ms, 3), **calibrated}


def _source(recipe: Recipe, where: str) -> str:
    one = recipe.teacher.members[where]
    if recipe.data.kind == MAP_DATASET:
        return "a module that was passed to kd.distill"
    if where in recipe.teacher.fits:
        return "fitted on the labels" + (" from pretrained weights" if one.pretrained else "")
    if one.checkpoint:
        return f"the {packages.title(one.checkpoint)}"
    return f"kind {one.kind}, {'a folder' if Path(one.model.removeprefix('local-dir:')).is_dir() else NAMED}"


def licence_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the table of the licences, and a line for each that speaks of derived models."""
    found = {plain(what): plain(licence) for what, licence in facts["licences"].items()}
    lines = table([{"what": what, "licence": licence} for what, licence in found.items()]).split("\n")
    reaching = [f"{what} ({licence})" for what, licence in found.items() if reaches(licence)]
    told = "The licence of the {} speaks of models that are made with its weights, as this one is: read it."
    return [*lines, *(line for one in reaching for line in ("", told.format(one)))]
