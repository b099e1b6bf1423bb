"""The provenance of an export: teacher, stored outputs, student, graphs, comparisons
between them, and licences.

It is stored in manifest.json, from which card, report and `kd verify` read it.
"""

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kd.core.intervals import Samples
from kd.core.references import written
from kd.core.scores import samples_of
from kd.core.text import table
from kd.deploy.export.claims import (
    AboutClaims,
    ChainClaims,
    ChainStudent,
    Manifest,
    ScoreClaims,
    ScoreOfModel,
)
from kd.deploy.export.graphs import ExportArtifacts, Subject
from kd.files.manifest import sha256
from kd.models import packages
from kd.models.classifier import digest
from kd.models.licences import NONE, UNKNOWN, licence_of, reaches
from kd.models.live_teacher import count_parameters
from kd.models.timm_folder import is_timm
from kd.setup.finished import MAP_DATASET
from kd.setup.recipe import Recipe

OWN, ALONE = (
    "student",
    "labels only",
)  # models in `scores`: the exported one, and the same student without a teacher
NAMED = "by its name"  # a source: the weights belong to the model's name


def plain(text: str) -> str:
    """Escape a name as one line of plain Markdown: no HTML, no link, no heading."""
    line = "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
    return re.sub(r"([\\`*\[\]|#])", r"\\\1", html.escape(line, quote=False))


def plain_name(text: str) -> str:
    """Return the name of a model on one line; for a local path only its last folder."""
    name = " ".join(str(text).split()).replace("`", "'").removeprefix("local-dir:")
    place = Path(name)
    if not name.startswith(("/", "~")):
        return name
    return f"{place.parent.name}/{place.name}" if place.name == "export" else place.name


def licences(recipe: Recipe) -> dict[str, str]:
    """Return the licences of a run's data and weights; `UNKNOWN` if undeclared."""
    teachers, student, found = recipe.members, recipe.student, dict[str, str]()
    for config_path, one in teachers.items():
        fitted = config_path in recipe.fits
        own = licence_of(one.model, one.checkpoint, one.pretrained or not fitted)
        scratch = NONE if fitted and not one.pretrained else ""
        found[config_path] = own or one.license or scratch or UNKNOWN
    first = (
        licence_of(student.model, student.checkpoint, True) or UNKNOWN
        if student.init == "pretrained"
        else NONE
    )
    return {
        **found,
        "data": recipe.data.license or UNKNOWN,
        "student's first weights": first,
    }


def receipt(subject: Subject, made: ExportArtifacts, folder: Path, license: str) -> Manifest:
    """Return manifest.json's entries on the origin of the graphs in `folder`."""
    chain = export_chain(subject)
    entries: Manifest = {
        "chain": {
            **chain,
            "graphs": {name: sha256(folder / name) for name in made.parity},
        },
        "licences": {**subject.licences, chain["student"]["is"]: license or UNKNOWN},
        "eager_ms": round(made.eager_ms, 3),
        "about": about(subject),
        "scores": export_scores(subject),
    }
    if made.calibration:
        entries["calibration"] = made.calibration
    return entries


def about(subject: Subject) -> AboutClaims:
    """Return manifest.json's entries on the network and its training data."""
    recipe, student = subject.recipe, subject.student
    return {
        "model": plain_name(written(recipe.student.model)),
        "parameters": count_parameters(student.network),  # those of model.safetensors
        "library": "timm" if is_timm(student.network) else "pytorch",
        "losses": [loss.kind for loss in recipe.losses],
        "data": {"kind": recipe.data.kind, "hash": subject.data},
        "labels": list(subject.classes) if recipe.task.logits else [],
        "weights": subject.origin,
    }


def export_scores(subject: Subject) -> ScoreClaims:
    """Return manifest.json's entry on scores: of each model, and of the student against
    the others.
    """
    scores, (scored, alone) = subject.recipe.task.scores, subject.scored
    row = subject.provenance["metrics"] if scored is None else scored.row
    decides, teachers = scores.own[0].key, scores.of_teachers(row)
    baseline = (
        max(subject.baseline, key=lambda one: one[decides], default={})
        if alone is None
        else alone.row
    )
    known = {**teachers, OWN: row, ALONE: baseline}
    samples = {**samples_of(scored, teachers, OWN), **samples_of(alone, (), ALONE)}
    models = {
        name: {one.key: _score(values[one.key], samples.get(name, {}).get(one.key))
               for one in scores.own if one.key in values}
        for name, values in known.items() if decides in values
    }  # fmt: skip
    own, others = (
        samples.get(OWN, {}),
        {name: one for name, one in samples.items() if name != OWN and name in models},
    )
    return {
        "columns": scores.record(),
        "split": "val" if scored is None else scored.split,
        "images": 0 if scored is None else scored.images,
        "evaluations": 0 if scored is None else scored.evaluations,
        "models": models,
        "differences": {
            name: _difference(own[decides], one[decides])
            for name, one in others.items() if decides in one and decides in own
        },
        "pair": {column.key: row[column.key] for column in scores.pair_in(row)},
    }  # fmt: skip


def _score(value: float, samples: Samples | None) -> ScoreOfModel:
    if samples is None:
        return {"value": value}
    if samples.right is None:
        return {"value": value, "interval": samples.interval()}
    return {"value": value, "images": len(samples.right)}


def _difference(one: Samples, other: Samples) -> dict[str, Any]:
    if one.right is not None and other.right is not None:
        gained, lost = (
            int((one.right & ~other.right).sum()),
            int((other.right & ~one.right).sum()),
        )
        return {"gained": gained, "lost": lost, "images": len(one.right)}
    value, low, high = one.minus(other)
    return {"value": value, "interval": [low, high]}


def export_chain(subject: Subject) -> ChainClaims:
    """Return the chain from the teacher to the exported weights, without the graphs."""
    recipe, found, own = subject.recipe, subject.made_from, subject.provenance
    student: ChainStudent = {
        "is": "student" if recipe.losses else "teacher",
        "run": own["run"],
        "step": own["step"],
        "weights": own["digest"],
        "exported": digest(subject.student.network),
    }
    chain: ChainClaims = {"student": student}
    if recipe.members and recipe.losses:
        members = {
            config_path: {
                "name": plain_name(written(one.model)),
                "source": _source(recipe, config_path),
            }
            for config_path, one in recipe.members.items()
        }
        chain["teacher"] = {"members": members, "weights": found.get("teacher") or ""}
        chain["answers"] = found.get("answers") or {}
    return chain


def _source(recipe: Recipe, config_path: str) -> str:
    one = recipe.members[config_path]
    if recipe.data.kind == MAP_DATASET:
        return "a module that was passed to kd.distill"
    if config_path in recipe.fits:
        return "fitted on the labels" + (
            " from pretrained weights" if one.pretrained else ""
        )
    if one.checkpoint:
        return f"the {packages.title(one.checkpoint)}"
    return (
        f"kind {one.kind},"
        f" {'a folder' if Path(one.model.removeprefix('local-dir:')).is_dir() else NAMED}"
    )


def licence_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the table of licences, and one line per licence that covers derived
    models.
    """
    found = {plain(what): plain(licence) for what, licence in facts["licences"].items()}
    lines = table(
        [{"what": what, "licence": licence} for what, licence in found.items()]
    ).split("\n")
    reaching = [
        f"{what} ({licence})" for what, licence in found.items() if reaches(licence)
    ]
    told = (
        "The licence of the {} speaks of models that are made with its weights, as this"
        " one is: read it."
    )
    return [*lines, *(line for one in reaching for line in ("", told.format(one)))]
