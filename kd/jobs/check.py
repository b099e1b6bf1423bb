"""`kd-train CONFIG --check`: everything that can be known before training, in seconds and without weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from kd import build
from kd.config import Config
from kd.data.store import slot_bytes
from kd.jobs._teachers import each, together
from kd.models.classifier import Classifier
from kd.models.load import Spec, load
from kd.models.teacher import count_parameters
from kd.report.trackers import check as check_trackers
from kd.start.batch import BatchSplit, arithmetic
from kd.start.loading import augmentation, kept
from kd.types import Dims


def check(settings: Config, path: str = "given") -> str:
    """Check a configuration and describe the run.

    Models are built on the meta device: no memory, no weights. Listing the data is real; nothing is decoded.
    Not checked here: the teacher's accuracy (`kd-train` scores it before step 1) and whether a batch fits.

    Raises:
        KdError: what `kd-train` would stop at.
    """
    required = build.needs(settings)
    augmentation(settings)
    check_trackers(settings.run.trackers)
    data = build.data(settings)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    auto = settings.data.batch_size == "auto"
    split = None if auto else arithmetic(settings, world_size, len(data.train))
    features = "features" in required
    classes, size = data.train.classes, settings.data.image_size
    student = _meta(Spec("student", settings.student.model, settings.student.args, classes), size, features)
    lines = [
        f"config    {path}: well-formed",
        f"data      {settings.data.kind}: {len(data.train)} training and {len(data.val)} validation images, "
        f"{len(classes)} classes, {size} px",
        f"student   {settings.student.model}: {_millions(student)}, init {settings.student.init}",
    ]
    teacher = None
    if settings.teacher.model:
        found = [_teacher(where, alone, classes, size, features) for where, alone in each(settings)]
        lines += [line for _, line in found]
        teacher = together(settings, [model for model, _ in found])
    dims = Dims(len(classes), student.num_features, teacher.num_features if teacher is not None else 0)
    build.criterion(settings, dims)
    lines.append("losses    " + " + ".join(f"{term.weight:g} x {term.kind}" for term in settings.losses))
    lines += _length(settings, split, len(data.train))
    lines += _store(settings, data)
    lines += [
        f"backend   {settings.backend.kind}, precision {settings.backend.precision}, {world_size} process(es)",
        f"memory    {_state_mib(settings, student, world_size):.0f} MiB a rank for weights, gradients and optimizer; "
        "activations come on top",
        "time      not measured here: `kd-train` prints images/s and the time left from the first steps on",
    ]
    return "\n".join(lines)


def _length(settings: Config, split: BatchSplit | None, num_images: int) -> list[str]:
    if split is None:
        whole = f"{settings.run.steps} steps" if settings.run.steps else f"{settings.run.epochs} epochs"
        return ["batch     auto: as many images as fit into memory, found when the run starts", f"length    {whole}"]
    per_epoch = num_images // split.batch_size
    steps = settings.run.steps or settings.run.epochs * per_epoch
    return [
        f"batch     {split}",
        f"length    {steps} steps of {split.batch_size} images ({steps / per_epoch:.3g} epochs)",
    ]


def _store(settings: Config, data: build.Data) -> list[str]:
    if settings.data.store == "none":
        return []
    most = [
        slot_bytes(rule.most) * len(source) for rule, source in zip(kept(settings), (data.train, data.val), strict=True)
    ]
    return [f"store     {settings.data.store}: at most {sum(most) / 2**30:.2f} GiB; estimated from images at the start"]


def _teacher(where: str, settings: Config, classes: Sequence[str], size: int, features: bool) -> tuple[Classifier, str]:
    section = settings.teacher
    if section.checkpoint or not section.fit.epochs:
        model = build.teacher_model(settings, classes, features, where=where)  # its weights are what must be checked
        return model, f"teacher   {section.model}: {_millions(model)}, weights and classes fit the data"
    model = _meta(Spec(where, section.model, section.args, classes), size, features)
    return model, f"teacher   {section.model}: {_millions(model)}, fitted for {section.fit.epochs} epochs if not found"


def _meta(spec: Spec, size: int, features: bool) -> Classifier:
    with torch.device("meta"):
        return load(replace(spec, pretrained=False), size, features)


def _millions(model: Classifier) -> str:
    return f"{count_parameters(model) / 1e6:.2f} M parameters"


def _state_mib(settings: Config, student: Classifier, world_size: int) -> float:
    moments = 2 if settings.optimizer.kind == "adamw" else 1
    shared = world_size if settings.optimizer.zero else 1
    floats = 2 + moments / shared + (1 if settings.optimizer.ema else 0)
    return count_parameters(student) * 4 * floats / 2**20
