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
from kd.core.host import environment, versions
from kd.core.references import written
from kd.core.types import Dims
from kd.deploy.export import graphs
from kd.deploy.export.card import card, loading
from kd.deploy.export.claims import InputClaims, Manifest, OutputClaims
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import ExportArtifacts, ReadImages, Subject
from kd.deploy.export.package import complete, new_export, refuse_other, seal
from kd.deploy.export.parity import validation_batches
from kd.deploy.export.receipt import licences, receipt
from kd.deploy.export.signature import sign
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
    """Export a run's best student or teacher to `target` (None: `export` or
    `export-teacher` in the run folder).

    `overrides`: `key=value` for the run's configuration, such as the data's present
    folder. `trust`: import modules and read paths named in the run's configuration.
    """
    options = options or ExportOptions()
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe = resolve(
        config.load(config.to_dict(stored), overrides) if overrides else stored
    )
    target = target or path / ("export-teacher" if teacher else "export")
    refuse_other(target)  # refuse before minutes of work
    options.require(recipe.task)
    vouched = Trust.of(trust, overrides, recipe.data)
    vouched.check_models({"student": recipe.student})
    if options.any_graph:  # graphs are compared on images
        vouched.check_folder(recipe.data)
    subject = read_subject(folder, recipe, vouched, options.index)
    return write(
        teacher_subject(subject, folder, vouched) if teacher else subject, target, options
    )


def read_subject(folder: RunDir, recipe: Recipe, vouched: Trust, index: bool) -> Subject:
    """Read the best student of a run; with `index` also its projector into the
    teacher's space.
    """
    manifest = folder.manifest()
    if "classes" not in manifest:
        raise RunError(
            "run",
            f"'{folder.path}' has no manifest.json",
            "",
            "Train it first: `kd-train CONFIG`",
        )
    classes, data = manifest["classes"], manifest.get("data", "not recorded")
    expected = manifest.get("data") or ("" if vouched.images else "not recorded")
    student, provenance = best_student(folder, recipe, classes)
    if index:
        student.project = learned_projector(folder, recipe.losses, len(recipe.members))
    alone = folder.alone()
    return Subject(
        recipe=recipe,
        student=student,
        classes=classes,
        data=data,
        provenance=provenance,
        baseline=alone.metrics("val"),
        scored=(folder.scored(), alone.scored()),
        origin=_origin(recipe.student),
        made_from={key: manifest.get(key) for key in ("teacher", "answers")},
        licences=licences(recipe),
        images=partial(_images, recipe.data, recipe.backend, classes, expected),
    )


def teacher_subject(subject: Subject, folder: RunDir, vouched: Trust) -> Subject:
    """Return the source of the teacher's export, given the student's."""
    recipe, task = subject.recipe, subject.recipe.task
    kinds = [one.kind for one in recipe.members.values()]
    if not kinds:
        raise ModelError(
            "--teacher",
            "the run has no teacher: it learned labels alone",
            "",
            "Name another run",
        )
    if len(kinds) > 1:
        remedy = "Name a run with one of them, or export that model by a run of its own"
        raise ModelError(
            "--teacher",
            f"the run averages {len(kinds)} teachers, which do not make one graph",
            "",
            remedy,
        )
    vouched.check_folder(recipe.data)
    vouched.check_models(recipe.members)
    model = load_fitted(recipe, open_sources(recipe.data)).model
    if not isinstance(model, Classifier):
        wrong = (
            f"a teacher of kind '{kinds[0]}' is no network of torch, which an export is"
            " written from"
        )
        raise ModelError(
            "--teacher",
            wrong,
            "Kinds timm, torch and zero_shot",
            "Run it with its own library",
        )
    if task.logits and not model.num_classes:
        wrong = (
            "the run's losses read the teacher's features alone, so that it was loaded"
            " without classes"
        )
        raise ModelError(
            "--teacher", wrong, "", "Export it by a run whose losses read its logits"
        )
    last = subject.scored[0]
    own = task.scores.of_teachers(folder.best_row() if last is None else last.row).get(
        "teacher", {}
    )
    scored = (
        replace(last, row=own, samples=last.of("teacher")) if last is not None else None
    )
    alone = recipe.with_(
        run=replace(recipe.config.run, name=f"{recipe.name}-teacher"),
        student=replace(recipe.student, model=recipe.teacher.model),
        teacher=replace(recipe.teacher, model=""),
        losses=(),
    )
    fitted = (
        "fitted on the labels of the same data"
        if recipe.fits
        else f"as `teacher.kind={kinds[0]}` loads it"
    )
    provenance = {
        **subject.provenance,
        "step": 0,
        "metrics": own,
        "digest": digest(model.network),
    }
    origin = f"the teacher of the run {subject.provenance['run']}, {fitted}"
    stated = {
        "data": subject.licences["data"],
        "teacher's weights": subject.licences["teacher"],
    }
    more = {
        "origin": origin,
        "baseline": (),
        "scored": (scored, None),
        "made_from": {},
        "licences": stated,
    }
    return replace(subject, recipe=alone, student=model, provenance=provenance, **more)


@contextmanager
def _images(
    plan: DataPlan, section: BackendSection, classes: Sequence[str], expected: str
) -> Iterator[ReadImages]:
    with distributed(section) as backend:
        data = open_data(plan, backend, fill=False)
        if (data.classes and list(data.classes) != list(classes)) or (
            expected and data.fingerprint != expected
        ):
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
    """Write a student with its graphs, manifest and card; if one of them is refused,
    nothing is left.
    """
    options.require(subject.recipe.task)
    with new_export(target) as draft:
        made = graphs.write(
            subject, draft, options, partial(_write_weights, subject, draft)
        )
        facts = _write_weights(subject, draft, made)
        facts |= receipt(subject, made, draft, options.license)
        as_read = json.loads(
            json.dumps(facts, sort_keys=True)
        )  # so that the card can be generated again
        (draft / "README.md").write_text(card(as_read), encoding="utf-8")
        seal(draft, facts)
        if options.sign is not None:
            sign(draft, options.sign)
    return WrittenExport(
        target,
        made.lines,
        loading(str(target), is_timm(subject.student.network)),
        facts,
    )


def _write_weights(subject: Subject, draft: Path, made: ExportArtifacts) -> Manifest:
    """Write weights, config.json and kd.json, which serving needs; return the facts for
    manifest.json.
    """
    student, recipe = subject.student, subject.recipe
    task, section = recipe.task, recipe.data
    provenance = {**subject.provenance, "digest": digest(student.network)}
    if made.calibration:
        provenance["calibration"] = made.calibration
    classes = subject.classes if task.logits else ()
    content, weights = export_files(
        student, classes, section.crop_pct, task.problem_type
    )
    facts: Manifest = {
        "format": FORMAT,
        "name": recipe.name,
        "version": (
            provenance["digest"][:DIGITS]
            + ("-index" if student.project is not None else "")
        ),
        "input": input_claims(student, section),
        "output": output_claims(student, made),
        "parity": made.parity,
        "validation": made.validation,
        "environment": _environment(),
    }
    if made.variants:
        facts["variants"] = made.variants
    if made.accepted:
        facts["pick"], facts["accepted"] = made.accepted["file"], made.accepted
    if made.cascade:
        facts["pick"], facts["cascade"] = made.cascade["file"], made.cascade
    if made.self_check:
        facts["self_check"] = made.self_check
    complete(draft, content, weights, provenance, facts)
    return facts


def _origin(section: StudentSection) -> str:
    if section.checkpoint:
        return f"started from the {packages.title(section.checkpoint)}"
    if section.init == "pretrained":
        return f"started from the pretrained `{written(section.model)}`"
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


def output_claims(student: Classifier, made: ExportArtifacts) -> OutputClaims:
    """Return manifest.json's entry on what the graphs return."""
    width = student.num_classes or student.num_features
    entry: OutputClaims = {
        "name": runtimes.LOGITS,
        "layout": f"float32 [batch, {width}]",
        "width": width,
    }
    if made.thresholds:
        entry["thresholds"] = made.thresholds
    if made.defer:
        entry["defer"] = made.defer
    if not student.num_classes:
        entry["name"], entry["layout"] = (
            runtimes.EMBEDDING,
            f"float32 [batch, {width}], each of length 1",
        )
    if student.project is not None:
        entry["space"] = "teacher"
    return entry


def _environment() -> dict[str, Any]:
    found = environment()
    found.pop("command")  # it contains the user's paths, and this file is published
    found["packages"] |= versions("onnx", "onnxscript", "onnxruntime", "openvino")
    return found


def learned_projector(
    folder: RunDir, losses: Sequence[LossSection], teachers: int
) -> torch.nn.Module:
    """Return the chosen checkpoint's learned projector from the student's pooled
    features to its first teacher's.
    """
    _, tensors, _ = folder.best()
    number = 0
    for i, (section, facts) in enumerate(zip(losses, loss_facts(losses), strict=True)):
        prefix = f"model.criterion.terms.{number}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        if section.weight and facts.projects:
            teacher, student = own["project.weight"].shape
            dims = Dims(2, student, teacher)
            term: Any = registry.build(
                "losses", section.kind, section.options, f"losses[{i}]", dims=dims
            )
            term.load_state_dict(own)
            return term.project
        number += teachers if facts.features else 1
    wrong = "no loss of this run maps the student's vectors into the teacher's space"
    raise RunError(
        "--index",
        wrong,
        "An embedding student with the loss `cosine`",
        "Train it with {kind: cosine}",
    )
