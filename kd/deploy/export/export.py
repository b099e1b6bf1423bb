"""Export the best student of a run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kd import config
from kd.config.reads import loss_facts
from kd.config.schema import BackendSection, DataSection, LossSection, StudentSection
from kd.core.errors import ModelError, RunError
from kd.core.host import environment, package_versions
from kd.core.references import reference_or_value
from kd.core.types import Dims
from kd.deploy.export.card import card, loading
from kd.deploy.export.claims import InputClaims, Manifest, OutputClaims
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import ExportArtifacts, ReadImages, Subject
from kd.deploy.export.package import complete, new_export, refuse_other, seal
from kd.deploy.export.parity import validation_batches
from kd.deploy.export.receipt import receipt, run_licences
from kd.deploy.export.signature import sign
from kd.deploy.export.value_table import label_values, recorded_values
from kd.deploy.export.write_graphs import write_graphs
from kd.files.manifest import DIGITS
from kd.files.pixels import MARGIN
from kd.files.run_dir import RunDir
from kd.models import packages, runtimes
from kd.models.classifier import Classifier, digest
from kd.models.timm_folder import export_files, is_timm
from kd.parts import registry
from kd.setup.build import distributed
from kd.setup.build_teacher import load_fitted
from kd.setup.data import open_data, open_sources
from kd.setup.data_plan import DataPlan
from kd.setup.finished import Trust, opened_run, require_files
from kd.setup.recipe import Recipe, resolve
from kd.setup.student import best_student

# version of manifest.json, raised with every change of the card or of a key's meaning
FORMAT = 2


@dataclass(frozen=True, slots=True)
class WrittenExport:
    """The written export."""

    folder: Path
    lines: Sequence[str]  # one line per graph
    load: str  # Python that loads the student
    manifest: Mapping[str, Any]  # content of manifest.json, without files and checksum


def export(
    path: Path,
    target: Path | None = None,
    options: ExportOptions | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
    teacher: bool = False,
) -> WrittenExport:
    """Export a run's best student or its teacher.

    Args:
        path: the run folder.
        target: the folder to write; None: `export` or `export-teacher` in the run.
        options: see `ExportOptions`.
        overrides: `key=value` for the run's configuration, such as the data's present
            folder.
        trust: import modules and read paths that the run's configuration names.
        teacher: export the teacher instead of the student.

    Returns:
        What was written.
    """
    options = options or ExportOptions()
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    if overrides:
        stored = config.load(config.to_dict(stored), overrides)
    recipe = resolve(stored)
    target = target or path / ("export-teacher" if teacher else "export")
    refuse_other(target)  # refuse before minutes of work
    options.require(recipe.task)
    vouched = Trust.of(trust, overrides, recipe.data)
    vouched.check_models({"student": recipe.student})
    if options.any_graph:  # graphs are compared on images
        vouched.check_folder(recipe.data)
    subject = read_subject(folder, recipe, vouched, options.index)
    if teacher:
        subject = teacher_subject(subject, folder, vouched)
    return write(subject, target, options)


def read_subject(
    folder: RunDir, recipe: Recipe, vouched: Trust, index: bool
) -> Subject:
    """Read the best student of a run.

    `index`: also its projector into the teacher's space.
    """
    manifest = folder.manifest()
    if "classes" not in manifest:
        raise RunError(
            "run",
            f"'{folder.path}' has no manifest.json",
            "",
            "Train it first: `kd-train CONFIG`",
        )
    classes = manifest["classes"]
    expected = manifest.get("data") or ("" if vouched.images else "not recorded")
    student, provenance = best_student(folder, recipe, classes)
    if index:
        student.project = learned_projector(folder, recipe.losses, len(recipe.members))
    baseline = folder.baseline()
    return Subject(
        recipe=recipe,
        student=student,
        classes=classes,
        data=manifest.get("data", "not recorded"),
        provenance=provenance,
        baseline=baseline.metrics("val"),
        scored=(folder.scored(), baseline.scored()),
        origin=_weights_origin(recipe.student),
        made_from={key: manifest.get(key) for key in ("teacher", "answers")},
        licences=run_licences(recipe),
        images=partial(_open_images, recipe.data, recipe.backend, classes, expected),
    )


def teacher_subject(subject: Subject, folder: RunDir, vouched: Trust) -> Subject:
    """Return the source of the teacher's export, given the student's."""
    recipe = subject.recipe
    kinds = [member.kind for member in recipe.members.values()]
    if not kinds:
        wrong = "the run has no teacher: it learned labels alone"
        raise ModelError("--teacher", wrong, "", "Name another run")
    if len(kinds) > 1:
        wrong = f"the run averages {len(kinds)} teachers, which do not make one graph"
        remedy = "Name a run with one of them, or export that model by a run of its own"
        raise ModelError("--teacher", wrong, "", remedy)
    vouched.check_folder(recipe.data)
    vouched.check_models(recipe.members)
    model = load_fitted(recipe, open_sources(recipe.data)).model
    if not isinstance(model, Classifier):
        wrong = (
            f"a teacher of kind '{kinds[0]}' is no network of torch, which an export is"
            " written from"
        )
        allowed = "Kinds timm, torch and zero_shot"
        raise ModelError("--teacher", wrong, allowed, "Run it with its own library")
    if recipe.task.logits and not model.num_classes:
        wrong = (
            "the run's losses read the teacher's features alone, so that it was loaded"
            " without classes"
        )
        remedy = "Export it by a run whose losses read its logits"
        raise ModelError("--teacher", wrong, "", remedy)
    scored = subject.scored[0]
    row = folder.best_row() if scored is None else scored.row
    metrics = recipe.task.scores.of_teachers(row).get("teacher", {})
    if scored is not None:
        scored = replace(scored, row=metrics, samples=scored.of("teacher"))
    fitted = (
        "fitted on the labels of the same data"
        if recipe.fits
        else f"as `teacher.kind={kinds[0]}` loads it"
    )
    return replace(
        subject,
        recipe=recipe.with_(
            run=replace(recipe.config.run, name=f"{recipe.name}-teacher"),
            student=replace(recipe.student, model=recipe.teacher.model),
            teacher=replace(recipe.teacher, model=""),
            losses=(),
        ),
        student=model,
        provenance={
            **subject.provenance,
            "step": 0,
            "metrics": metrics,
            "digest": digest(model.network),
        },
        origin=f"the teacher of the run {subject.provenance['run']}, {fitted}",
        baseline=(),
        scored=(scored, None),
        made_from={},
        licences={
            "data": subject.licences["data"],
            "teacher's weights": subject.licences["teacher"],
        },
    )


@contextmanager
def _open_images(
    plan: DataPlan, section: BackendSection, classes: Sequence[str], expected: str
) -> Iterator[ReadImages]:
    with distributed(section) as backend:
        data = open_data(plan, backend, fill=False)
        other_classes = data.classes and list(data.classes) != list(classes)
        if other_classes or (expected and data.fingerprint != expected):
            wrong = (
                "the data differs from the run's training data (another content hash)"
            )
            remedy = "Restore it, or name where it lies: kd-export RUN data.root=FOLDER"
            raise RunError(
                "data",
                wrong,
                "Graphs are compared on the run's own validation split",
                remedy,
            )
        yield partial(validation_batches, data)


def write(subject: Subject, target: Path, options: ExportOptions) -> WrittenExport:
    """Write a student with its graphs, manifest and card, or nothing at all."""
    options.require(subject.recipe.task)
    values, value_lines = label_values(options.values, target, subject)
    subject = replace(subject, values=values)
    replaced = _file_names(target)
    with new_export(target) as draft:
        write_weights = partial(_write_weights, subject, draft)
        artifacts = write_graphs(subject, draft, options, write_weights)
        facts = write_weights(artifacts)
        facts |= receipt(subject, artifacts, draft, options.license)
        # as a reader will parse it, so that the card can be generated again
        parsed = json.loads(json.dumps(facts, sort_keys=True))
        (draft / "README.md").write_text(card(parsed), encoding="utf-8")
        seal(draft, facts)
        if options.sign is not None:
            sign(draft, options.sign)
    load = loading(str(target), is_timm(subject.student.network))
    lines = [*artifacts.lines, *value_lines]
    if removed := sorted(replaced - _file_names(target)):
        lines.append(f"removed with the replaced export: {', '.join(removed)}")
    return WrittenExport(target, lines, load, facts)


def _file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


def _write_weights(
    subject: Subject, draft: Path, artifacts: ExportArtifacts
) -> Manifest:
    """Write the files that serving needs, and return the facts for manifest.json."""
    student = subject.student
    recipe = subject.recipe
    provenance = {**subject.provenance, "digest": digest(student.network)}
    if artifacts.calibration:
        provenance["calibration"] = artifacts.calibration
    classes = subject.classes if recipe.task.logits else ()
    content, weights = export_files(
        student, classes, recipe.data.crop_pct, recipe.task.problem_type
    )
    version = provenance["digest"][:DIGITS]
    if student.project is not None:
        version += "-index"
    facts: Manifest = {
        "format": FORMAT,
        "name": recipe.name,
        "version": version,
        "input": input_claims(student, recipe.data),
        "output": output_claims(student, artifacts),
        "parity": artifacts.parity,
        "validation": artifacts.validation,
        "environment": _environment(),
    }
    if subject.values:
        facts["output"]["values"] = recorded_values(subject.values)
    if artifacts.variants:
        facts["variants"] = artifacts.variants
    if artifacts.accepted:
        facts["pick"] = artifacts.accepted["file"]
        facts["accepted"] = artifacts.accepted
    if artifacts.cascade:
        facts["pick"] = artifacts.cascade["file"]
        facts["cascade"] = artifacts.cascade
    if artifacts.self_check:
        facts["self_check"] = artifacts.self_check
    complete(draft, content, weights, provenance, facts)
    return facts


def _weights_origin(section: StudentSection) -> str:
    if section.checkpoint:
        return f"started from the {packages.title(section.checkpoint)}"
    if section.init == "pretrained":
        return f"started from the pretrained `{reference_or_value(section.model)}`"
    return "trained from random initial weights"


def input_claims(student: Classifier, section: DataSection) -> InputClaims:
    """Return manifest.json's entry on the images that the graphs take."""
    size = section.image_size
    entry: InputClaims = {
        "name": "image",
        "layout": f"uint8 [batch, 3, {size}, {size}], RGB",
        "size": size,
        "crop": section.crop_pct,
        "margin": MARGIN,
        "network_size": student.input_size or size,
    }
    if section.bits != 16:
        entry["bits"] = section.bits
    return entry


def output_claims(student: Classifier, artifacts: ExportArtifacts) -> OutputClaims:
    """Return manifest.json's entry on what the graphs return."""
    width = student.num_classes or student.num_features
    entry: OutputClaims = {
        "name": runtimes.LOGITS,
        "layout": f"float32 [batch, {width}]",
        "width": width,
    }
    if artifacts.thresholds:
        entry["thresholds"] = artifacts.thresholds
    if artifacts.defer:
        entry["defer"] = artifacts.defer
    if not student.num_classes:
        entry["name"] = runtimes.EMBEDDING
        entry["layout"] += ", each of length 1"
    if student.project is not None:
        entry["space"] = "teacher"
    return entry


def _environment() -> dict[str, Any]:
    facts = environment()
    facts.pop("command")  # it contains the user's paths, and this file is published
    facts["packages"] |= package_versions(
        "onnx", "onnxscript", "onnxruntime", "openvino"
    )
    return facts


def learned_projector(
    folder: RunDir, losses: Sequence[LossSection], teachers: int
) -> torch.nn.Module:
    """Return the map from the student's pooled features to its first teacher's.

    It is the chosen checkpoint's.
    """
    _, tensors, _ = folder.best()
    number = 0
    for i, (section, facts) in enumerate(zip(losses, loss_facts(losses), strict=True)):
        if section.weight and facts.projects:
            prefix = f"model.criterion.terms.{number}."
            weights = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            teacher, student = weights["project.weight"].shape
            dims = Dims(2, student, teacher)
            term: Any = registry.build(
                "losses", section.kind, section.options, f"losses[{i}]", dims=dims
            )
            term.load_state_dict(weights)
            return term.project
        number += teachers if facts.features else 1
    wrong = "no loss of this run maps the student's vectors into the teacher's space"
    raise RunError(
        "--index",
        wrong,
        "An embedding student with the loss `cosine`",
        "Train it with {kind: cosine}",
    )
