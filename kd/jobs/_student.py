"""Train one student in a run folder, from where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kd import build, config
from kd.artifacts import manifest
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.contracts import Backend
from kd.engine.evaluate import Evaluator
from kd.engine.loop import train as engine_train
from kd.engine.run import Run
from kd.errors import ModelError
from kd.jobs._folder import flatten, require_same
from kd.jobs._sifting import report as sifting_report
from kd.jobs._teachers import each
from kd.models.ensemble import Ensemble, TeacherModel
from kd.models.load import digest
from kd.models.teacher import LiveTeacher, count_parameters, is_on_meta
from kd.report.console import Console, percent
from kd.report.trackers import Trackers


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
    sifting: str = ""
    """What the sifter did, as Markdown."""
    batch_size: int = 0
    """Images of an optimizer step, as configured or as found."""
    baseline: Result | None = None
    report: str = ""


def distil(
    settings: Config, data: build.Data, backend: Backend, teacher: TeacherModel | None, folder: RunDir, title: str
) -> Result:
    """Train one student in an opened run folder, from where it stands."""
    known = folder.manifest()
    flat = flatten(config.to_dict(settings))
    trackers = Trackers(settings.run.trackers if backend.rank == 0 else (), settings.run.name, folder.path, flat)
    with Console(title, quiet=backend.rank != 0, trackers=trackers) as console:
        pinned = known.get("choices", {})
        run, facts = build.run(settings, data, backend, teacher, folder, console, pinned)
        facts |= {
            "world_size": backend.world_size,
            "backend": backend.kind,
            "classes": list(data.train.classes),
            "data": data.fingerprint,
            "environment": manifest.environment(),
        }
        if teacher is None or not is_on_meta(teacher):  # where another rank holds the weights, that one compares them
            facts["teacher"] = digest(teacher.network) if teacher is not None else None
        require_same("data", known, facts)
        require_same("teacher", known, facts)
        if pinned:
            facts["measured_ms"] = known.get("measured_ms", {})
        folder.record(**facts)
        console.say(f"{title}: {facts['batch']}; {', '.join(f'{k} {v}' for k, v in facts['choices'].items())}")
        if "batch_search" in facts:
            console.say(f"{title}: batch_size auto: {facts['batch_search']}")
        if "teacher_mib" in facts:
            rank, whole = facts["teacher_mib"]["rank"], facts["teacher_mib"]["whole"]
            console.say(f"teacher: {rank:.2f} of {whole:.2f} MiB on this rank, divided over {backend.world_size}")
        if teacher is not None:
            check_teacher(settings, run, console)
        if isinstance(teacher, Ensemble):
            check_members(settings, run, teacher, console)
        state = engine_train(run)
        sifting = sifting_report(run, data.train, folder)
        console.say(f"{title}: {memory(settings, run, facts)}")
        names = unreadable(data, run, known)
        if names:
            folder.record(unreadable=names)
            console.say(f"{title}: {len(names)} images could not be decoded and had weight 0: {', '.join(names[:5])}")
    return Result(
        folder=folder.path,
        metrics=folder.best_row() if backend.rank == 0 else {},
        parameters=count_parameters(run.distillation.student),
        images_per_second=state.images / max(state.seconds, 1e-9),
        teacher_parameters=count_parameters(teacher) if teacher is not None else 0,
        sifting=sifting,
        batch_size=run.length.batch_size,
    )


def memory(settings: Config, run: Run, facts: dict[str, Any]) -> str:
    """Say what sharding and bfloat16 gave back on this rank, in MiB. All ranks must call it."""
    backend = run.backend
    held = backend.counters()["optimizer_mib"]
    whole = held
    if settings.optimizer.zero:
        whole = backend.reduce_sum(torch.tensor([held], device=backend.device)).item()
    text = f"optimizer state {held:.2f} MiB on this rank"
    if whole > held:
        text += f" of {whole:.2f} in all: ZeRO-1 over {backend.world_size} ranks gave back {whole - held:.2f}"
    if isinstance(run.teacher, LiveTeacher) and facts["choices"].get("teacher", "").startswith("bf16"):
        text += f"; teacher {run.teacher.mib:.2f} MiB in bfloat16, which gave back as much"
    return text


def unreadable(data: build.Data, run: Run, known: dict[str, Any]) -> list[str]:
    """List the images of both splits that this rank could not decode, in this start or in an earlier one."""
    both = ((data.train, run.loader), (data.val, run.evaluator.loader))
    found = {source.name(id) for source, loader in both for id in loader.unreadable}
    return sorted(found | set(known.get("unreadable", [])))


def check_teacher(settings: Config, run: Run, console: Console) -> None:
    """Score the teacher before step 1: a wrong one must not be found out after a day."""
    values = run.evaluator(run.distillation.student)
    accuracy = values["teacher_accuracy"]
    console.say(
        f"teacher: accuracy {percent(accuracy)} on the validation split; student now {percent(values['accuracy'])}"
    )
    _require("teacher", accuracy, settings, run)


def check_members(settings: Config, run: Run, teacher: Ensemble, console: Console) -> None:
    """Score each of several teachers alone: the average would hide one whose classes stand in another order."""
    whole = run.evaluator
    for (where, alone), member in zip(each(settings), teacher.members, strict=True):
        live = LiveTeacher(member, run.backend.device)  # type: ignore[arg-type]
        one = Evaluator(run.backend, whole.loader, whole.plan, live, True, whole.num_classes)
        accuracy = one(run.distillation.student)["teacher_accuracy"]
        console.say(f"{where}: '{alone.teacher.model}' alone {percent(accuracy)}")
        _require(where, accuracy, settings, run)


def _require(where: str, accuracy: float, settings: Config, run: Run) -> None:
    chance = 1 / run.evaluator.num_classes
    least = settings.teacher.min_accuracy if settings.teacher.min_accuracy >= 0 else min(0.5, 2 * chance)
    if accuracy < least:
        raise ModelError(
            where,
            f"is right on {percent(accuracy)} of the validation images; guessing is right on {percent(chance)}",
            f"At least {percent(least)} (teacher.min_accuracy)",
            "Check that its classes stand in the data's order and that its weights were loaded",
        )
