"""What the commands do: teach, train, evaluate, export. Each is config -> build -> engine -> artifacts -> report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kd import build, config
from kd.artifacts import manifest
from kd.artifacts.export import export as write_export
from kd.artifacts.files import write_text
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.contracts import Backend
from kd.engine.loop import train as engine_train
from kd.engine.run import Run
from kd.errors import ConfigError, ModelError, RunError
from kd.models.classifier import Classifier
from kd.models.load import digest, export_files
from kd.models.teacher import count_parameters
from kd.report.console import Console, percent, table
from kd.report.trackers import listeners
from kd.schema import Every, OptimizerSection, RunSection, SifterSection, StudentSection, TeacherSection

# Keys that may differ when a run is entered again: they change what is shown and how fast, not what is computed.
FREE = ("run.name", "run.folder", "run.keep", "run.trackers", "run.every.", "data.workers", "backend.timeout_seconds")


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished run leaves."""

    folder: Path
    metrics: dict[str, float]
    """The validation row of the best checkpoint."""
    parameters: int
    images_per_second: float
    """Over all of the training so far, evaluation left out."""
    teacher_parameters: int = 0
    baseline: Result | None = None
    report: str = ""


@contextmanager
def world(settings: Config) -> Iterator[Backend]:
    """Set the backend up and take it down again."""
    backend = build.backend(settings)
    backend.setup()
    try:
        yield backend
    finally:
        backend.close()


def train(settings: Config) -> Result:
    """Run a configuration: fit the teacher if needed, distil, train the baseline if asked, write the report.

    Raises:
        KdError: anything that the user can repair, in one line.
    """
    build.needs(settings)
    with world(settings) as backend:
        data = prepared(settings, backend)
        build.arithmetic(settings, backend.world_size, len(data.train))
        folder = RunDir(Path(settings.run.folder) / settings.run.name, backend.rank, settings.run.keep)
        enter(folder, settings)
        try:
            teacher = obtain_teacher(settings, data, backend)
            result = distil(settings, data, backend, teacher, folder, settings.run.name)
            if settings.run.baseline:
                alone = labels_alone(settings)
                inner = RunDir(folder.path / "labels_only", backend.rank, settings.run.keep)
                enter(inner, alone)
                baseline = distil(alone, data, backend, None, inner, f"{settings.run.name} (labels only)")
                inner.close()
                result = replace(result, baseline=baseline)
            result = replace(result, report=report(settings, result))
            if backend.rank == 0:
                write_text(folder.path / "report.md", result.report)
        finally:
            folder.close()
    return result


def teach(settings: Config) -> Path:
    """Fit the teacher of a configuration, or find it fitted; return its folder.

    Raises:
        ConfigError: the config does not say how to fit one.
    """
    if not settings.teacher.fit.epochs:
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", "Say for how long to fit the teacher")
    with world(settings) as backend:
        return fit_teacher(settings, prepared(settings, backend), backend)


def prepared(settings: Config, backend: Backend) -> build.Data:
    """List the data and let rank 0 make what does not exist yet."""
    data = build.data(settings)
    if backend.rank == 0:
        data.train.prepare()
        data.val.prepare()
    backend.barrier()
    return data


def enter(folder: RunDir, settings: Config) -> None:
    """Open a run folder for this configuration, or say what differs."""
    stored = folder.stored_config()
    differences = different_keys(config.load(_parse(stored)), settings) if stored else []
    folder.open(config.dump(settings), differences)


def _parse(text: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[return-value]


def different_keys(stored: Config, settings: Config) -> list[str]:
    """List `key (stored -> now)` wherever two configurations compute different things."""
    old, new = flatten(config.to_dict(stored)), flatten(config.to_dict(settings))
    keys = [k for k in sorted(old.keys() | new.keys()) if not k.startswith(FREE)]
    return [f"{k} ({old.get(k)} -> {new.get(k)})" for k in keys if old.get(k) != new.get(k)]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as {"section.key": value}."""
    if isinstance(value, dict) and value:
        pairs = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{prefix}.{i}", item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    return {name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()}


# ------------------------------------------------------------------------------------------------- the student


def distil(
    settings: Config, data: build.Data, backend: Backend, teacher: Classifier | None, folder: RunDir, title: str
) -> Result:
    """Train one student in an opened run folder, from where it stands."""
    known = folder.manifest()
    flat = flatten(config.to_dict(settings))
    trackers = listeners(settings.run.trackers, settings.run.name, folder.path, flat) if backend.rank == 0 else []
    with Console(title, quiet=backend.rank != 0, listeners=trackers) as console:
        pinned = known.get("choices", {})
        run, facts = build.run(settings, data, backend, teacher, folder, console, pinned)
        facts |= {
            "world_size": backend.world_size,
            "backend": backend.kind,
            "classes": list(data.train.classes),
            "data": data.fingerprint,
            "teacher": digest(teacher.network) if teacher is not None else None,
            "surroundings": manifest.surroundings(),
        }
        require_same("data", known, facts)
        require_same("teacher", known, facts)
        folder.record(**facts)
        console.say(f"{title}: {facts['batch']}; {', '.join(f'{k} {v}' for k, v in facts['choices'].items())}")
        if teacher is not None:
            check_teacher(settings, run, console)
        state = engine_train(run)
        unreadable = sorted(run.loader.unreadable) if hasattr(run.loader, "unreadable") else []
        if unreadable:
            names = [data.train.name(id) for id in unreadable]
            folder.record(unreadable=names)
            console.say(f"{title}: {len(names)} images could not be decoded and had weight 0: {', '.join(names[:5])}")
    rows = folder.metrics("val") if backend.rank == 0 else []
    return Result(
        folder=folder.path,
        metrics=max(rows, key=lambda row: row["accuracy"]) if rows else {},
        parameters=count_parameters(run.distillation.student),
        images_per_second=state.images / max(state.seconds, 1e-9),
        teacher_parameters=count_parameters(teacher) if teacher is not None else 0,
    )


def require_same(key: str, known: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to go on with a run on other data or with another teacher."""
    if key in known and known[key] != facts[key]:
        raise RunError(
            "run.name",
            f"this run was started with another {key} (its content hash differs)",
            "A run goes on with what it began with",
            "Choose another run.name, or restore what was there",
        )


def check_teacher(settings: Config, run: Run, console: Console) -> None:
    """Score the teacher before step 1: a wrong one must not be found out after a day."""
    values = run.evaluator(run.distillation.student)
    accuracy, chance = values["teacher_accuracy"], 1 / run.evaluator.num_classes
    console.say(f"teacher: accuracy {percent(accuracy)} on the validation split; student now {percent(values['accuracy'])}")
    least = settings.teacher.min_accuracy if settings.teacher.min_accuracy >= 0 else min(0.5, 2 * chance)
    if accuracy < least:
        raise ModelError(
            "teacher",
            f"is right on {percent(accuracy)} of the validation images; guessing is right on {percent(chance)}",
            f"At least {percent(least)} (teacher.min_accuracy)",
            "Check that its classes stand in the data's order and that its weights were loaded",
        )


def labels_alone(settings: Config) -> Config:
    """Return the same run without its teacher: same student, steps, batches and views; cross-entropy only."""
    init = settings.student.init
    if init == "teacher":
        raise ConfigError(
            "run.baseline",
            "is true, but student.init is 'teacher'",
            "The labels-only student must not know the teacher",
            "Set student.init=scratch or run.baseline=false",
        )
    (ce,) = config.load({**_minimal(), "losses": [{"kind": "ce"}]}).losses
    return replace(
        settings,
        run=replace(settings.run, baseline=False),
        teacher=TeacherSection(),
        losses=(ce,),
        sifter=SifterSection(options=_options("sifters", "none")),
    )


def _minimal() -> dict[str, Any]:
    return {"data": {"kind": "imagefolder", "root": "."}, "student": {"model": "x"}}


def _options(folder: str, kind: str) -> Any:
    from kd import parts

    return parts.options_type(folder, kind, folder)()


# ------------------------------------------------------------------------------------------------- the teacher


def obtain_teacher(settings: Config, data: build.Data, backend: Backend) -> Classifier | None:
    """Load the teacher; fit it first where the config says so and there is no checkpoint."""
    section = settings.teacher
    if not section.model:
        return None
    features = "features" in build.needs(settings)
    folder = ""
    if section.fit.epochs and not section.checkpoint:
        folder = str(fit_teacher(settings, data, backend))
    return build.teacher_model(settings, data.train.classes, features, folder)


def fit_teacher(settings: Config, data: build.Data, backend: Backend) -> Path:
    """Fit the teacher on the labels and keep its best epoch; one fitted before from the same content is reused.

    Returns:
        An export folder, named by a hash of everything that the weights depend on.
    """
    plan = teacher_run(settings)
    text = json.dumps([v for k, v in sorted(flatten(config.to_dict(plan)).items()) if not k.startswith(FREE)], default=str)
    key = hashlib.sha256((text + data.fingerprint).encode()).hexdigest()[:12]
    name = f"{Path(settings.teacher.model).name.replace(':', '_')}-{key}"
    plan = replace(plan, run=replace(plan.run, name=name))
    folder = RunDir(Path(plan.run.folder) / name, backend.rank, plan.run.keep)
    target = folder.path / "export"
    if (target / "model.safetensors").is_file():
        if backend.rank == 0:
            print(f"teacher: reusing '{target}'", flush=True)
        return target
    enter(folder, plan)
    distil(plan, data, backend, None, folder, "teacher")
    if backend.rank == 0:
        export_run(folder, plan, target, data.train.classes)
    backend.barrier()
    folder.close()
    return target


def teacher_run(settings: Config) -> Config:
    """Return the run that fits the teacher: the teacher as a student of the labels."""
    section, fit = settings.teacher, settings.teacher.fit
    smooth = {"kind": "ce", "label_smoothing": fit.label_smoothing}
    (ce,) = config.load({**_minimal(), "losses": [smooth]}).losses
    return Config(
        run=RunSection(
            folder=fit.folder,
            seed=settings.run.seed,
            epochs=fit.epochs,
            every=Every(log=settings.run.every.log, evaluate=fit.evaluate),
            keep=1,
        ),
        data=replace(settings.data, batch_size=fit.batch_size or settings.data.batch_size),
        student=StudentSection(
            model=section.model,
            args=section.args,
            init="pretrained" if section.pretrained else "scratch",
            attention=section.attention,
        ),
        losses=(ce,),
        sifter=SifterSection(options=_options("sifters", "none")),
        optimizer=OptimizerSection(lr=fit.lr, weight_decay=fit.weight_decay, warmup=fit.warmup),
        backend=settings.backend,
    )


# ------------------------------------------------------------------------------------- after the training


def export_run(folder: RunDir, settings: Config, target: Path, classes: Sequence[str]) -> None:
    """Write the best checkpoint's student (its averaged weights where there are any) as a timm folder."""
    state, tensors, _ = folder.best()
    student = build.student_model(replace_init(settings), classes, False)
    load_student(student, tensors)
    rows = [row for row in folder.metrics("val") if row["step"] == state.step]
    provenance = {
        "kd": manifest.surroundings()["packages"]["kd"],
        "step": state.step,
        "metrics": rows[-1] if rows else {},
        "run": settings.run.name,
        "digest": digest(student.network),
        "eval_crop": settings.data.eval_crop,
    }
    content, weights = export_files(student.network, classes, settings.data.eval_crop)
    write_export(target, content, weights, provenance)


def replace_init(settings: Config) -> Config:
    """Return the config with a student built from nothing, for weights that are loaded right afterwards."""
    return replace(settings, student=replace(settings.student, init="scratch", checkpoint=""))


def load_student(student: Classifier, tensors: dict[str, torch.Tensor]) -> None:
    """Load the student's weights of a checkpoint, averaged ones first."""
    prefix = "average." if any(name.startswith("average.") for name in tensors) else "model.student."
    student.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})


def opened_run(path: Path) -> tuple[RunDir, Config]:
    """Open a finished or interrupted run folder for reading.

    Raises:
        RunError: it is not a run folder.
    """
    folder = RunDir(path)
    stored = folder.stored_config()
    if stored is None:
        remedy = "Point at runs/NAME, the folder that `kd-train` wrote"
        raise RunError("run", f"'{path}' is not a run folder: it has no config.yaml", "", remedy)
    return folder, config.load(_parse(stored))


def export(path: Path, target: Path | None = None) -> Path:
    """Export the best student of a run folder; return the folder written.

    Raises:
        RunError: no run folder, no checkpoint, or the disk is full.
    """
    folder, settings = opened_run(path)
    classes = folder.manifest().get("classes")
    if not classes:
        raise RunError("run", f"'{path}' has no manifest.json", "", "Train it first: `kd-train CONFIG`")
    target = target or path / "export"
    export_run(folder, settings, target, classes)
    return target


def evaluate(path: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Evaluate the best student of a run folder, its teacher and their agreement, on the validation split."""
    folder, stored = opened_run(path)
    settings = config.load(config.to_dict(stored), overrides)
    with world(settings) as backend:
        data = prepared(settings, backend)
        teacher = obtain_teacher(settings, data, backend)
        run, _ = build.run(settings, data, backend, teacher, folder, Console("", quiet=True), folder.manifest()["choices"])
        load_student(run.distillation.student, folder.best()[1])  # type: ignore[arg-type]
        return run.evaluator(run.distillation.student)


def report(settings: Config, result: Result) -> str:
    """Return the table of a run as Markdown, and what to type next."""
    if not result.metrics:
        return ""
    rows = []
    if "teacher_accuracy" in result.metrics:
        rows.append(_row("teacher", result.metrics, result.teacher_parameters, None, "teacher_"))
    rows.append(_row("student, distilled" if rows else "student", result.metrics, result.parameters, result.images_per_second))
    if result.baseline is not None:
        alone = result.baseline
        rows.append(_row("student, labels only", alone.metrics, alone.parameters, alone.images_per_second))
    lines = [f"# {settings.run.name}", "", table(rows), ""]
    if "agreement" in result.metrics:
        lines += [f"Student and teacher agree on {percent(result.metrics['agreement'])} of the validation images.", ""]
    lines += [
        f"Best of the evaluations on the validation split; seed {settings.run.seed}; run folder `{result.folder}`.",
        "",
        f"Next: `kd-export {result.folder}` writes a folder that timm loads.",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, values: dict[str, float], parameters: int, speed: float | None, prefix: str = "") -> dict[str, str]:
    return {
        "model": name,
        "accuracy": percent(values[f"{prefix}accuracy"]),
        "top-5": percent(values[f"{prefix}top5"]),
        "calibration error": percent(values[f"{prefix}ece"]),
        "parameters": f"{parameters / 1e6:.2f} M",
        "training images/s": f"{speed:.0f}" if speed else "-",
    }


__all__ = ["Result", "evaluate", "export", "teach", "train"]
