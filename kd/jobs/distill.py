"""Train one student in a run folder, from where it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd.artifacts.run_dir import RunDir
from kd.contracts import Backend, Source, TeacherModel
from kd.engine.embedding import EmbeddingEvaluator
from kd.engine.loop import train as engine_train
from kd.engine.run import Run
from kd.engine.snapshot import agree
from kd.errors import DataError, ModelError, RunError
from kd.host import environment
from kd.jobs.folder import require_same
from kd.jobs.observe import Observer
from kd.jobs.signals import signals
from kd.models.classifier import Ensemble
from kd.models.teacher import LiveTeacher, count_parameters, is_on_meta
from kd.progress.console import NAMES, Console, embedding_text
from kd.progress.sifting import describe, describe_images, extremes, sheet
from kd.progress.trackers import Trackers
from kd.setup.build import build_run
from kd.setup.data import Data
from kd.setup.recipe import Recipe
from kd.text import percent


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


def distill(
    recipe: Recipe,
    data: Data,
    backend: Backend,
    teacher: TeacherModel | None,
    folder: RunDir,
    title: str,
    batch_size: int = 0,
    samples: bool = True,
) -> Result:
    """Train one student in an opened run folder, from where it stands.

    Args:
        recipe: what is trained.
        data: both splits.
        backend: set up.
        teacher: the loaded teacher, or None for labels alone.
        folder: of the run.
        title: what a person sees.
        batch_size: where `data.batch_size` is auto and another run has found it.
        samples: sample the machine while the run goes.
    """
    backend.barrier()  # rank 0 has opened the folder
    known = folder.manifest()
    require_same_folder(backend, known)
    names = recipe.run.trackers if backend.rank == 0 else ()
    trackers = Trackers(names, recipe.name, folder.path, recipe.shown)
    with Console(title, quiet=backend.rank != 0, trackers=trackers) as console:
        with Observer(recipe, backend, folder, console, samples) as observer:
            recorded = known.get("choices", {"batch_size": batch_size} if batch_size else {})
            built = build_run(recipe, data, backend, teacher, folder, console, recorded)
            run = observer.watch(built.run, built.facts["choices"])
            record(built.facts, run, data, teacher, folder, known, console, title)
            with run.span("evaluation"):
                folder.record(before=check_before(recipe, run, teacher, console))
            with signals.training():
                state = engine_train(replace(run, stop=signals.requested))
        observer.conclude(title)
        sifting = sifting_report(run, data, folder)
        told = memory(recipe.optimizer.zero, run, built.facts["choices"])
        console.info(f"{title}: {told}" if told else "")
        names = unreadable(data, run, known)
        if names:
            folder.record(unreadable=names)
            count = f"{len(names)} images" if len(names) > 1 else "1 image"
            console.info(f"{title}: {count} could not be decoded and had weight 0: {', '.join(names[:5])}")
    return Result(
        folder=folder.path,
        metrics=folder.best_row() if backend.rank == 0 else {},
        parameters=count_parameters(run.distillation.student),
        images_per_second=state.images / max(state.seconds, 1e-9),
        teacher_parameters=count_parameters(teacher) if teacher is not None else 0,
        sifting=sifting,
        batch_size=run.length.batch_size,
    )


def record(
    facts: dict[str, Any],
    run: Run,
    data: Data,
    teacher: TeacherModel | None,
    folder: RunDir,
    known: dict[str, Any],
    console: Console,
    title: str,
) -> None:
    """Write what the set-up found out into the manifest, and show what a person wants to know of it.

    Raises:
        RunError: the run was started with other data or with another teacher.
    """
    backend = run.backend
    facts |= {
        "world_size": backend.world_size,
        "machines": backend.world_size // backend.local_world_size,
        "images": len(data.train),
        "batch_size": run.length.batch_size,
        "backend": backend.kind,
        "classes": list(data.classes),
        "data": data.fingerprint,
        "environment": environment(),
    }
    if teacher is None or not is_on_meta(teacher):  # where another rank holds the weights, that one compares them
        facts["teacher"] = teacher.identity()["teacher"] if teacher is not None else None
    require_same("data", known, facts)
    require_same("teacher", known, facts)
    if known.get("choices"):
        facts["measured_ms"] = known.get("measured_ms", {})
    folder.record(**facts)
    console.info(f"{title}: {facts['batch']}; {', '.join(f'{k} {v}' for k, v in facts['choices'].items())}")
    if "batch_search" in facts:
        console.info(f"{title}: batch_size auto: {facts['batch_search']}")
    if "teacher_mib" in facts:
        rank, whole = facts["teacher_mib"]["rank"], facts["teacher_mib"]["whole"]
        console.info(f"teacher: {rank:.2f} of {whole:.2f} MiB on this rank, divided over {backend.world_size}")


def require_same_folder(backend: Backend, known: Mapping[str, Any]) -> None:
    """Require that all ranks read the same recorded choices: a rank that measures again would wait for the others.

    Raises:
        RunError: they do not; on all ranks.
    """
    choices = known.get("choices", {})
    if not agree(backend, json.dumps(choices, sort_keys=True)):
        found = "finds those of an earlier start" if choices else "finds none"
        raise RunError(
            "run.folder",
            f"the ranks do not read the same manifest.json; rank {backend.rank} {found}",
            "All ranks of a run share one run folder",
            "Put run.folder on a file system that all machines share, or copy rank 0's run folder to each",
        )


def memory(zero: bool, run: Run, choices: dict[str, str]) -> str:
    """Say what sharding and bfloat16 gave back on this rank, in MiB; "" on one rank without. All ranks must call it."""
    backend = run.backend
    held = backend.counters()["optimizer_mib"]
    whole = held
    if zero:
        whole = backend.reduce_sum(torch.tensor([held], device=backend.device)).item()
    text = f"optimizer state {held:.2f} MiB on this rank"
    if whole > held:
        text += f" of {whole:.2f} in all: ZeRO-1 over {backend.world_size} ranks gave back {whole - held:.2f}"
    if isinstance(run.teacher, LiveTeacher) and choices.get("teacher", "").startswith("bf16"):
        return f"{text}; teacher {run.teacher.mib:.2f} MiB in bfloat16, which gave back as much"
    return text if backend.world_size > 1 else ""


def unreadable(data: Data, run: Run, known: dict[str, Any]) -> list[str]:
    """List the images of both splits that any rank could not decode, now or in an earlier start. All ranks call it."""
    found = set(known.get("unreadable", []))
    for source, loader in ((data.train, run.loader), (data.val, run.evaluator.loader)):
        broken_N = torch.zeros(len(source), device=run.backend.device)
        broken_N[list(loader.unreadable)] = 1.0
        found |= {source.name(id) for id in run.backend.reduce_sum(broken_N).nonzero()[:, 0].tolist()}
    return sorted(found)


def check_before(recipe: Recipe, run: Run, teacher: TeacherModel | None, console: Console) -> dict[str, float]:
    """Score teachers and student before step 1, in the way of the student's evaluations; empty without a teacher."""
    least = recipe.teacher.min_accuracy
    if isinstance(run.evaluator, EmbeddingEvaluator):
        return check_embedding(least, run, console)
    if teacher is None or not recipe.reads.teacher_logits:
        return {}
    values = check_teacher(least, run, console)
    if isinstance(teacher, Ensemble) and run.evaluator.labelled:
        names = [recipe.teacher.model, *(member.model for member in recipe.teacher.also)]
        check_members(names, least, run, teacher, console)
    return values


def check_teacher(least: float, run: Run, console: Console) -> dict[str, float]:
    """Score the teacher before step 1: a wrong one must not be found out after a day."""
    values = run.evaluator(run.distillation.student)
    if not run.evaluator.labelled:
        console.info(
            f"teacher: no labels to score it with; the student agrees with it on {percent(values['agreement'])}"
        )
        return values
    score, name = run.evaluator.decides, NAMES[run.evaluator.decides]
    reached = values[f"teacher_{score}"]
    console.info(f"teacher: {name} {percent(reached)} on the validation split; student now {percent(values[score])}")
    _require("teacher", reached, least, run)
    return values


def check_embedding(least: float, run: Run, console: Console) -> dict[str, float]:
    """Score the vectors of teachers and student before step 1; `least` is for the first teacher, where it is set.

    Raises:
        ModelError: its neighbours are right less often.
    """
    values = run.evaluator(run.distillation.student)
    console.info("before step 1: " + embedding_text(values))
    if least > 0 and values.get("teacher_knn", 1.0) < least:
        raise ModelError(
            "teacher",
            f"the nearest neighbours of its vectors are right on {percent(values['teacher_knn'])} of the validation "
            "images",
            f"At least {percent(least)} (teacher.min_accuracy)",
            "Check that its weights were loaded",
        )
    return values


def check_members(names: Sequence[str], least: float, run: Run, teacher: Ensemble, console: Console) -> None:
    """Score each of several teachers alone: the average would hide one whose classes stand in another order."""
    whole: Any = run.evaluator
    for i, (name, member) in enumerate(zip(names, teacher.members, strict=True)):
        where = f"teacher.also[{i - 1}]" if i else "teacher"
        live = LiveTeacher(member, run.backend.device).validation()  # type: ignore[arg-type]
        one = whole.of(live)
        reached = one(run.distillation.student)[f"teacher_{whole.decides}"]
        console.info(f"{where}: '{name}' alone {percent(reached)}")
        _require(where, reached, least, run)


def _require(where: str, reached: float, least: float, run: Run) -> None:
    chance, score = run.evaluator.chance, run.evaluator.decides  # type: ignore[union-attr]
    least = least if least >= 0 else min(max(0.5, chance), 2 * chance)
    if reached < least:
        share = f"is right on {percent(reached)} of the validation images; guessing is right on {percent(chance)}"
        mean = f"has the {NAMES[score]} {percent(reached)} on the validation images; guessing has {percent(chance)}"
        raise ModelError(
            where,
            share if score == "accuracy" else mean,
            f"At least {percent(least)} (teacher.min_accuracy)",
            "Check that its classes stand in the data's order and that its weights were loaded",
        )


def sifting_report(run: Run, data: Data, folder: RunDir) -> str:
    """Return the sifting section of report.md and write the contact sheet; all ranks must call it.

    Empty where nothing was sifted. The images are shown where the sifter knows how often each was visited.
    """
    source, state = data.train, run.sifter.state_dict()
    epochs = folder.metrics("epoch") if run.backend.rank == 0 else []
    if all(row["trained"] > len(source) - run.length.batch_size for row in epochs):
        return ""
    text = describe(epochs, len(source), run.length.batch_size)
    if "visits" in state:
        text += "\n" + describe_images(state["visits"], state["mean"], data.labels(), source.classes, source.name)
        text += (
            f"\nBoth are pictured in `{write_sheet(folder.path / 'sifting.jpg', state, source)}`, the former first.\n"
        )
    return text


def write_sheet(path: Path, state: dict[str, Tensor], source: Source) -> Path:
    """Write the contact sheet; pictures that cannot be decoded are left out."""
    groups = []
    for ids in extremes(state["visits"], state["mean"]):
        pictures = []
        for id in ids:
            try:
                pictures.append(source.decode(id).image)
            except DataError:
                continue
        groups.append(pictures)
    sheet([group for group in groups if group]).save(path, quality=85)
    return path
