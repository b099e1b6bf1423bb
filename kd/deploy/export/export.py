"""Export the best student of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kd import config
from kd.config.schema import BackendSection, DataSection, StudentSection
from kd.core.errors import ConfigError, RunError
from kd.core.host import cores, environment, processor, versions
from kd.core.references import written
from kd.core.text import variant_rows
from kd.deploy.export import graphs, variants
from kd.deploy.export.card import WITH_TIMM, Card, render
from kd.deploy.export.graphs import Made
from kd.deploy.export.package import complete, new_export, refuse_other, seal
from kd.deploy.export.parity import shown_images
from kd.deploy.export.subject import Exported, Images, Options, Subject
from kd.deploy.export.teacher_subject import teacher_of
from kd.files.run_dir import RunDir
from kd.models import runtimes
from kd.models.classifier import Classifier, digest
from kd.models.teacher import count_parameters
from kd.models.timm_folder import export_files, is_timm
from kd.setup.build import distributed
from kd.setup.data import DataPlan, open_data
from kd.setup.recipe import BASELINE, resolve
from kd.study.finished import Trust, best_projector, best_student, opened_run, require_files


def export(
    path: Path,
    target: Path | None = None,
    options: Options | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
    teacher: bool = False,
) -> Exported:
    """Export the best student of a run folder, or its teacher.

    `target` None: `export` in the run folder, `export-teacher` for the teacher. `overrides`: `key=value` over the run's
    configuration, such as where its data lies now. `trust`: import modules that the run names, and read images wherever
    it says.
    """
    folder, settings = opened_run(path, trust)
    require_files(path, settings.data)
    recipe = resolve(config.load(config.to_dict(settings), overrides) if overrides else settings)
    manifest = folder.manifest()
    if not manifest.get("classes"):
        raise RunError("run", f"'{path}' has no manifest.json", "", "Train it first: `kd-train CONFIG`")
    options, section = options or Options(), recipe.data.section
    target = target or path / ("export-teacher" if teacher else "export")
    refuse_other(target)  # before minutes of work, not after
    vouched = Trust.of(trust, overrides, section)
    vouched.check_student(recipe.student)
    if options.onnx or options.pt2:  # they are compared on images
        vouched.check_folder(recipe.data)
    expected = manifest.get("data") or ("" if vouched.images else "not recorded")
    student, provenance = best_student(folder, recipe.student, section, manifest["classes"])
    if options.index:
        _check_index(student, options)
        student.project = best_projector(folder, recipe.student.losses, len(recipe.teacher.members))
    subject = Subject(
        recipe=recipe,
        student=student,
        classes=manifest["classes"],
        data=manifest.get("data", "not recorded"),
        provenance=provenance,
        baseline=RunDir(path / BASELINE).metrics("val"),
        scored=(folder.scored(), RunDir(path / BASELINE).scored()),
        origin=_origin(recipe.student.section, student),
        images=partial(_images, recipe.data, recipe.backend, manifest["classes"], expected),
    )
    return write(teacher_of(subject, folder, vouched) if teacher else subject, target, options)


def _check_index(student: Classifier, options: Options) -> None:
    if student.num_classes:
        wrong = "this student answers with classes, not with vectors"
        raise ConfigError("--index", wrong, "A run whose losses are all on features", "Leave out --index")
    if not options.onnx and not options.pt2:
        wrong = "maps the vectors in the graphs, and with --no-onnx there is none"
        raise ConfigError("--index", wrong, "", "Leave out --no-onnx")


@contextmanager
def _images(plan: DataPlan, section: BackendSection, classes: Sequence[str], expected: str) -> Iterator[Images]:
    with distributed(section) as backend:
        data = open_data(plan, backend, fill=False)
        if (data.classes and list(data.classes) != list(classes)) or (expected and data.fingerprint != expected):
            wrong = "the data is not what the run was trained on (its content hash differs)"
            remedy = "Restore it, or name where it lies: kd-export RUN data.root=FOLDER"
            raise RunError("data", wrong, "Graphs are compared on the run's own validation split", remedy)
        yield partial(shown_images, data)


def write(subject: Subject, target: Path, options: Options) -> Exported:
    """Write a student with its graphs, manifest and card; nothing is left where one of them is refused."""
    student, recipe, provenance = subject.student, subject.recipe, dict(subject.provenance)
    task, section = recipe.student.task, recipe.data.section
    if options.compare and not 1 <= options.threads <= cores():
        allowed = f"1 to {cores()}, which this process may use"
        raise ConfigError("--threads", f"is {options.threads}", allowed, "Measure where the endpoint will run")
    with new_export(target) as draft:
        made = graphs.write(subject, draft, options)
        if made.calibration:
            provenance |= {"digest": digest(student.network), "calibration": made.calibration}
        labels = subject.classes if task.logits else ()
        content, weights = export_files(student, labels, section.eval_crop, task.problem_type)
        facts = {
            "format": 1,
            "name": recipe.record.name,
            "version": provenance["digest"][:12] + ("-index" if student.project is not None else ""),
            "input": _input(student, section),
            "output": _output(student, made),
            "parity": made.parity,
            **({"int8": [asdict(rung) for rung in made.rungs]} if made.rungs else {}),
            "validation": made.validation,
            "environment": _environment(),
        }
        complete(draft, content, weights, provenance, facts)
        if options.compare:
            facts |= variants.compare(draft, made.qualities, made.image, options)
        timm_builds_it = is_timm(student.network)
        used = _commands(target.name, options.onnx, timm_builds_it)
        more = {"version": facts["version"], "variants": variant_rows(facts)}
        card = _card(subject, made, license=options.license, commands=used, **more)
        (draft / "README.md").write_text(render(card), encoding="utf-8")
        seal(draft, facts)
    return Exported(target, made.lines, _loading(str(target), timm_builds_it), facts)


def _card(subject: Subject, made: Made, **own: Any) -> Card:
    recipe, student = subject.recipe, subject.student
    section, task = recipe.data.section, recipe.student.task
    decides = task.scores.own[0].key
    return Card(
        name=recipe.record.name,
        student=written(recipe.student.section.model),
        student_parameters=count_parameters(student),
        teacher=written(recipe.teacher.section.model),
        losses=[loss.kind for loss in recipe.student.losses],
        data=f"{section.kind}, content hash {subject.data[:12]}",
        labels=subject.classes if task.logits else (),
        thresholds=made.thresholds,
        defer=made.defer,
        calibration=made.calibration,
        width=0 if task.logits else student.num_features,
        index=student.project is not None,
        metrics=subject.provenance["metrics"],
        baseline=max(subject.baseline, key=lambda row: row[decides], default={}),
        graphs=made.parity,
        eager_ms=made.eager_ms,
        processor=processor(),
        size=section.image_size,
        crop=section.eval_crop,
        weights_from=subject.origin,
        scores=task.scores,
        scored=subject.scored[0],
        baseline_scored=subject.scored[1],
        **own,
    )


def _commands(folder: str, onnx: bool, timm: bool) -> dict[str, str]:
    """Return how an export is used, by title."""
    found = {WITH_TIMM if timm else "In PyTorch, with the code of the network": _loading(folder, timm)}
    if onnx:
        found["As an endpoint, without torch"] = (
            f"kd-serve {folder}\ncurl --data-binary @image.jpg -H 'content-type: image/jpeg' localhost:8080/invocations"
        )
    return found


def _loading(folder: str, timm: bool) -> str:
    if timm:
        return f"timm.create_model('local-dir:{folder}', pretrained=True)"
    return f"network.load_state_dict(safetensors.torch.load_file('{folder}/model.safetensors'))"


def _origin(section: StudentSection, student: Classifier) -> str:
    if section.checkpoint:
        return f"started from the checkpoint '{Path(section.checkpoint).name}', whose licence kd does not know"
    if section.init == "pretrained":
        known = getattr(student.network, "pretrained_cfg", None) or {}
        licence = known.get("license", "not recorded")
        return f"started from timm's pretrained `{written(section.model)}`, licence: {licence}"
    return "trained from random initial weights"


def _input(student: Classifier, section: DataSection) -> dict[str, Any]:
    size = section.image_size
    return {
        "name": "image",
        "layout": f"uint8 [batch, 3, {size}, {size}], RGB",
        "size": size,
        "crop": section.eval_crop,
        "network_size": student.input_size or size,
    }


def _output(student: Classifier, made: Made) -> dict[str, Any]:
    if student.num_classes:
        more = {key: value for key, value in (("thresholds", made.thresholds), ("defer", made.defer)) if value}
        shape = f"float32 [batch, {student.num_classes}]"
        return {"name": runtimes.LOGITS, "layout": shape, "width": student.num_classes, **more}
    width = student.num_features
    space = {"space": "teacher"} if student.project is not None else {}
    layout = f"float32 [batch, {width}], each of length 1"
    return {"name": runtimes.EMBEDDING, "layout": layout, "width": width, **space}


def _environment() -> dict[str, Any]:
    found = environment()
    found.pop("command")  # it holds paths of whoever exported, and this file is published
    found["packages"] |= versions("onnx", "onnxscript", "onnxruntime", "openvino")
    return found
