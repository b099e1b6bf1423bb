"""Everything that can be known before training, in seconds and without weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kd.config.schema import DataSection
from kd.core.contracts import TeacherModel
from kd.core.errors import DataError
from kd.engine.criterion import Distillation
from kd.jobs.memory import executed, held_bytes, step_bytes
from kd.models.classifier import feature_shapes
from kd.models.load import require_weights
from kd.models.teacher import FAILURES, count_parameters
from kd.setup.data import open_sources, train_transform
from kd.setup.home import compare
from kd.setup.loaders import split_batch
from kd.setup.recipe import Recipe, TeacherPlan, fit_folders, is_fitted
from kd.setup.student import build_criterion, build_student, dims_of, student_spec, tune
from kd.setup.teacher import META, Teachers, load_teachers


def check(recipe: Recipe, path: str = "given", answers: bool = False) -> str:
    """Check a recipe and describe the run; with `answers`, also ask its teachers about validation images
    and count the memory of a step.

    Models are built on the meta device: no memory, no weights. Data is really listed, and weights really looked for.
    Not checked here: the teacher's accuracy (`kd-train` scores it before step 1).
    """
    section, plan, student_plan = recipe.data, recipe.teacher, recipe.student
    train_transform(section.image_size, section.augment)
    for name in recipe.record.trackers:
        from kd.jobs.progress.trackers import find  # only where some are named

        find(name)
    data, num_ranks = open_sources(recipe.data), int(os.environ.get("WORLD_SIZE", "1"))
    split = split_batch(section, num_ranks, len(data.train))
    folders = fit_folders(plan, data.fingerprint).items()
    fits = {where: fit for where, (fit, target) in folders if not is_fitted(target)}
    for model in (*(fit.student for fit in fits.values()), student_plan):
        if model.kind == "timm":
            require_weights(student_spec(model, data.classes))
    teachers = load_teachers(plan, data, dict.fromkeys(plan.fits, META))
    data = teachers.data
    phases = {"distillation": recipe, **{f"the fit of {where}": fit for where, fit in fits.items()}}
    students, modules = [], {}
    for name, phase in phases.items():
        with torch.device("meta"):
            named = bool(phase.student.checkpoint)  # a file, which may not fit; other weights do
            students.append(build_student(phase.student, data.classes, section.image_size, weights=named))
        tune(phase.student, students[-1])
        told, losses = (teachers if phase is recipe else Teachers(None, data)), phase.student.losses
        shares = getattr(told.model, "shares", (1.0,))
        criterion = build_criterion(losses, dims_of(students[-1], told), phase.student.seed, shares)
        modules[name] = Distillation(students[-1], criterion, phase.student.task)
    student, loop = students[0], recipe.loop
    per_epoch = loop.epoch_images(len(data.train)) // split.batch_size
    steps = loop.length.steps or loop.length.epochs * per_epoch
    lines = [
        f"config    {path}: well-formed",
        f"data      {section.kind}: {len(data.train)} training and {len(data.val)} validation images, "
        + (f"{len(data.test)} test images, " if data.test is not None else "")
        + f"{len(data.classes)} classes, {section.image_size} px",
        *(f"          {note}" for note in data.notes),
        *_skew(data.labels()),
        *_unseen(data.labels(val=True), data.classes),
        f"student   {student_plan.model}: {_millions(student)}, images of {student.input_size} px, "
        f"init {student_plan.init}",
        *(_teacher(plan, where, model) for where, model in zip(plan.members, teachers.members, strict=True)),
        *(f"          {note}" for note in teachers.notes),
        *(f"          {text}" for text in (_answers(plan, teachers) if answers else ())),
        "losses    " + " + ".join(f"{term.weight:g} x {term.kind}" for term in student_plan.losses),
        f"batch     {split}",
        f"length    {steps} steps of {split.batch_size} images "
        f"({steps / per_epoch:.3g} {'epoch' if steps == per_epoch else 'epochs'})",
        *_store(section, (len(data.train), len(data.val))),
        *_cache(plan, teachers),
        f"backend   {recipe.backend.kind}, precision {recipe.backend.precision}, {num_ranks} process(es)",
        _memory(phases, modules, teachers, num_ranks, steps=answers),
    ]
    return "\n".join(lines)


def _skew(labels: torch.Tensor) -> list[str]:
    """Say which share of the images the largest classes have, where that is more than twice their own share."""
    counts = (labels > 0).sum(0) if labels.ndim == 2 else torch.bincount(labels[labels >= 0])
    sizes = counts.sort(descending=True).values
    most = -(-len(sizes) // 5)
    share = sizes[:most].sum().item() / max(1, int(sizes.sum()))
    if share <= 2 * most / max(1, len(sizes)):
        return []
    largest = f"the {most} largest have {100 * share:.0f} % of the images ({sizes[0]} to {sizes[most - 1]} each"
    return [f"classes   {largest}, the smallest {sizes[-1]}); see docs/faster.md, train on fewer images"]


def _unseen(labels: torch.Tensor, classes: Sequence[str]) -> list[str]:
    """Name the classes that validation says nothing about."""
    seen = set((labels > 0).any(0).nonzero()[:, 0].tolist() if labels.ndim == 2 else labels.tolist())
    missing = [name for label, name in enumerate(classes) if label not in seen]
    if not missing or seen <= {-1}:
        return []
    shown = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
    count = f"{len(missing)} of {len(classes)} classes"
    return [f"          no validation image: {count}, which accuracy does not cover: {shown}"]


def _store(section: DataSection, sizes: tuple[int, int]) -> list[str]:
    if section.store == "none":
        return []
    from kd.data.store import slot_bytes  # only where pixels are stored
    from kd.setup.store import keep_rules

    most = sum(slot_bytes(rule.most) * size for rule, size in zip(keep_rules(section), sizes, strict=True))
    return [f"store     {section.store}: at most {most / 2**30:.2f} GiB; estimated from images at the start"]


def _teacher(plan: TeacherPlan, where: str, model: TeacherModel) -> str:
    section = plan.members[where]
    if where in plan.fits:
        return f"teacher   {section.model}: {_millions(model)}, fitted for {section.fit.length} if not found"
    size = _millions(model) if model.runtime == "torch" else f"runs in {model.runtime}"
    return f"teacher   {section.model}: {size}; weights and classes fit the data"


def _answers(plan: TeacherPlan, teachers: Teachers) -> list[str]:
    try:
        return [one.text for one in compare(plan, teachers, torch.device("cpu"))]
    except DataError:
        return ["not asked: the images do not exist yet"]


def _cache(plan: TeacherPlan, teachers: Teachers) -> list[str]:
    if not (plan.needed and plan.cache.views and teachers.model is not None):
        return []
    from kd.setup.cache import cache_codec, price  # only where answers are stored

    data = teachers.data
    codec = cache_codec(plan, len(data.classes), feature_shapes(teachers.model, data.plan.image_size))
    return [f"cache     {price(plan.cache, codec, len(data.train))}"]


def _millions(model: Any) -> str:
    return f"{count_parameters(model) / 1e6:.2f} M parameters"


def _memory(
    phases: Mapping[str, Recipe], modules: Mapping[str, Distillation], teachers: Teachers, num_ranks: int, steps: bool
) -> str:
    """Say what the largest phase takes, and the others; `steps`: the peak of a step is counted, which takes seconds."""
    mib, model, section = {}, teachers.model, phases["distillation"].teacher
    torchs = [one for one in teachers.members if one.runtime == "torch"]
    width = 2 if executed(phases["distillation"], section.precision)[0] else 4
    frozen = sum(map(count_parameters, torchs)) * width / (num_ranks if section.shard or section.pipeline else 1)
    for name, recipe in phases.items():
        asked = name == "distillation"
        held = held_bytes(recipe, modules[name], num_ranks) + (frozen if asked else 0)
        step = 4 * sum(p.numel() for p in modules[name].parameters() if p.requires_grad)  # gradients
        if steps:
            images = split_batch(recipe.data, num_ranks, len(teachers.data.train)).micro_batch
            told = model if asked and len(torchs) == len(teachers.members) else None
            try:
                step = step_bytes(recipe, modules[name], told, images, num_ranks > 1)
            except FAILURES:  # a network whose shapes follow from values
                steps = False
        mib[name] = (held + step) / 2**20
    largest, *rest = sorted(mib.items(), key=lambda pair: -pair[1])
    others = "".join(f", {one:.0f} in {name}" for name, one in rest)
    what = "optimizer and the peak of a step" if steps else "gradients and optimizer; activations come on top"
    return f"memory    {largest[1]:.0f} MiB a rank in {largest[0]}{others}: weights, {what}"
