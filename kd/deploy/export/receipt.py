"""The provenance of an export from teacher to graphs, its scores and licences.

It is stored in manifest.json, from which card, report and `kd verify` read it.
"""

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kd.core.intervals import Samples
from kd.core.references import reference_or_value
from kd.core.scores import samples_of
from kd.core.text import markdown_table
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
from kd.models.licences import NONE, UNKNOWN, covers_derived, licence_of
from kd.models.live_teacher import count_parameters
from kd.models.timm_folder import is_timm
from kd.setup.finished import MAP_DATASET
from kd.setup.recipe import Recipe

OWN = "student"  # in `scores`: the exported model
ALONE = "labels only"  # in `scores`: the same student without a teacher
NAMED = "by its name"  # a source: the weights belong to the model's name


def plain(name: str) -> str:
    """Escape a name as one line of plain Markdown: no HTML, no link, no heading."""
    line = "".join(
        character if character.isprintable() else "?"
        for character in " ".join(name.split())
    )
    return re.sub(r"([\\`*\[\]|#])", r"\\\1", html.escape(line, quote=False))


def plain_name(reference: str) -> str:
    """Return the name of a model on one line; for a local path only its last folder."""
    name = " ".join(str(reference).split()).replace("`", "'").removeprefix("local-dir:")
    path = Path(name)
    if not name.startswith(("/", "~")):
        return name
    return f"{path.parent.name}/{path.name}" if path.name == "export" else path.name


def run_licences(recipe: Recipe) -> dict[str, str]:
    """Return the licences of a run's data and weights; `UNKNOWN` if undeclared."""
    licences: dict[str, str] = {}
    for config_path, member in recipe.members.items():
        from_scratch = config_path in recipe.fits and not member.pretrained
        licence = licence_of(member.model, member.checkpoint, not from_scratch)
        undeclared = NONE if from_scratch else UNKNOWN
        licences[config_path] = licence or member.license or undeclared
    licences["data"] = recipe.data.license or UNKNOWN
    student = recipe.student
    first_weights = NONE
    if student.init == "pretrained":
        first_weights = licence_of(student.model, student.checkpoint, True) or UNKNOWN
    licences["student's first weights"] = first_weights
    return licences


def receipt(
    subject: Subject, artifacts: ExportArtifacts, folder: Path, license: str
) -> Manifest:
    """Return manifest.json's entries on the origin of the graphs in `folder`."""
    chain = export_chain(subject)
    entries: Manifest = {
        "chain": {
            **chain,
            "graphs": {name: sha256(folder / name) for name in artifacts.parity},
        },
        "licences": {**subject.licences, chain["student"]["is"]: license or UNKNOWN},
        "eager_ms": round(artifacts.eager_ms, 3),
        "about": about_claims(subject),
        "scores": export_scores(subject),
    }
    if artifacts.calibration:
        entries["calibration"] = artifacts.calibration
    return entries


def about_claims(subject: Subject) -> AboutClaims:
    """Return manifest.json's entries on the network and its training data."""
    recipe = subject.recipe
    student = subject.student
    return {
        "model": plain_name(reference_or_value(recipe.student.model)),
        "parameters": count_parameters(student.network),  # those of model.safetensors
        "library": "timm" if is_timm(student.network) else "pytorch",
        "losses": [loss.kind for loss in recipe.losses],
        "data": {"kind": recipe.data.kind, "hash": subject.data},
        "labels": list(subject.classes) if recipe.task.logits else [],
        "weights": subject.origin,
    }


def export_scores(subject: Subject) -> ScoreClaims:
    """Return manifest.json's entry on scores: of each model, and between models."""
    scores = subject.recipe.task.scores
    scored, alone = subject.scored
    row = subject.provenance["metrics"] if scored is None else scored.row
    metric = scores.own[0].key
    teachers = scores.of_teachers(row)
    if alone is None:
        baseline = max(subject.baseline, key=lambda values: values[metric], default={})
    else:
        baseline = alone.row
    samples = {**samples_of(scored, teachers, OWN), **samples_of(alone, (), ALONE)}
    models: dict[str, dict[str, ScoreOfModel]] = {}
    for name, values in {**teachers, OWN: row, ALONE: baseline}.items():
        if metric in values:
            of_model = samples.get(name, {})
            models[name] = {
                column.key: _score_claims(values[column.key], of_model.get(column.key))
                for column in scores.own
                if column.key in values
            }
    student = samples.pop(OWN, {})
    differences = {}
    for name, of_model in samples.items():
        if name in models and metric in of_model and metric in student:
            differences[name] = _difference_claims(student[metric], of_model[metric])
    return {
        "columns": scores.record(),
        "split": "val" if scored is None else scored.split,
        "images": 0 if scored is None else scored.images,
        "evaluations": 0 if scored is None else scored.evaluations,
        "models": models,
        "differences": differences,
        "pair": {column.key: row[column.key] for column in scores.pair_in(row)},
    }


def _score_claims(value: float, samples: Samples | None) -> ScoreOfModel:
    if samples is None:
        return {"value": value}
    if samples.right is None:
        return {"value": value, "interval": samples.interval()}
    return {"value": value, "images": len(samples.right)}


def _difference_claims(student: Samples, model: Samples) -> dict[str, Any]:
    if student.right is not None and model.right is not None:
        gained = int((student.right & ~model.right).sum())
        lost = int((model.right & ~student.right).sum())
        return {"gained": gained, "lost": lost, "images": len(student.right)}
    value, low, high = student.minus(model)
    return {"value": value, "interval": [low, high]}


def export_chain(subject: Subject) -> ChainClaims:
    """Return the chain from the teacher to the exported weights, without the graphs."""
    recipe = subject.recipe
    recorded = subject.made_from
    provenance = subject.provenance
    student: ChainStudent = {
        "is": "student" if recipe.losses else "teacher",
        "run": provenance["run"],
        "step": provenance["step"],
        "weights": provenance["digest"],
        "exported": digest(subject.student.network),
    }
    chain: ChainClaims = {"student": student}
    if recipe.members and recipe.losses:
        members = {
            config_path: {
                "name": plain_name(reference_or_value(member.model)),
                "source": _weights_source(recipe, config_path),
            }
            for config_path, member in recipe.members.items()
        }
        chain["teacher"] = {
            "members": members,
            "weights": recorded.get("teacher") or "",
        }
        chain["answers"] = recorded.get("answers") or {}
    return chain


def _weights_source(recipe: Recipe, config_path: str) -> str:
    member = recipe.members[config_path]
    if recipe.data.kind == MAP_DATASET:
        return "a module that was passed to kd.distill"
    if config_path in recipe.fits:
        return "fitted on the labels" + (
            " from pretrained weights" if member.pretrained else ""
        )
    if member.checkpoint:
        return f"the {packages.title(member.checkpoint)}"
    is_folder = Path(member.model.removeprefix("local-dir:")).is_dir()
    return f"kind {member.kind}, {'a folder' if is_folder else NAMED}"


def licence_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the table of licences, and a text per licence of derived models."""
    licences = {
        plain(source): plain(licence) for source, licence in facts["licences"].items()
    }
    rows = [
        {"what": source, "licence": licence} for source, licence in licences.items()
    ]
    lines = markdown_table(rows).split("\n")
    for source, licence in licences.items():
        if covers_derived(licence):
            text = (
                f"The licence of the {source} ({licence}) speaks of models that are"
                " made with its weights, as this one is: read it."
            )
            lines += ["", text]
    return lines
