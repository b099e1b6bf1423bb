"""`kd-train CONFIG --check`: everything that can be known before training, in seconds and without weights."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from kd import instances
from kd.config.schema import OptimizerSection, RunSection, TeacherSection
from kd.config.validate import Reads
from kd.contracts import TeacherModel
from kd.data.store import slot_bytes
from kd.errors import CorruptImage, DataError
from kd.jobs.teach import fit_place, is_fitted, merge_teachers
from kd.models.classifier import Classifier, feature_shapes
from kd.models.load import Images, Spec, load
from kd.models.teacher import count_parameters
from kd.progress.trackers import check as check_trackers
from kd.setup.build import distributed
from kd.setup.cache import codec, price
from kd.setup.data import BatchSplit, Data, keep_rules, open_sources, split_batch, train_transform
from kd.setup.estimate import describe, estimate, measure
from kd.setup.recipe import Recipe
from kd.setup.student import build_criterion, sizes
from kd.setup.teacher import load_teacher
from kd.text import clock, money

LOOK_SECONDS, MOST_LOOKED = 5.0, 100_000
"""How long, and how many images at most, `--check` decodes to find damaged ones."""


def check(recipe: Recipe, path: str = "given", timed: bool = False) -> str:
    """Check a recipe and describe the run.

    Models are built on the meta device: no memory, no weights. Listing the data is real; images are decoded if `timed`.
    Not checked here: the teacher's accuracy (`kd-train` scores it before step 1) and whether a batch fits.

    Args:
        recipe: of the run.
        path: of its configuration, to show.
        timed: also time a few steps with random weights, say how long the run takes, and look for damaged images.

    Raises:
        KdError: what `kd-train` would stop at.
    """
    section, size, reads = recipe.data, recipe.data.image_size, recipe.reads
    train_transform(size, section.augment)
    check_trackers(recipe.run.trackers)
    data = open_sources(section)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    split = None if section.batch_size == "auto" else split_batch(section, world_size, len(data.train))
    found, images = [], data.images(recipe.seed, recipe.views)
    for where, one in recipe.teachers.items():
        found.append(_teacher(where, one, data, images, reads))
        data = data.with_classes(found[0][0].classes)
    classes = data.classes
    answers = classes if reads.student_logits else ()
    spec = Spec("student", recipe.student.model, recipe.student.args, answers, logits=reads.student_logits)
    student = _on_meta(spec, size, reads.features)
    lines = [
        f"config    {path}: well-formed",
        f"data      {section.kind}: {len(data.train)} training and {len(data.val)} validation images, "
        f"{len(classes)} classes, {size} px",
        *_skew(data),
        *_unseen(data),
        f"student   {recipe.student.model}: {_millions(student)}, init {recipe.student.init}",
    ]
    teacher = None
    if found:
        lines += [line for _, line in found]
        teacher = merge_teachers(recipe.teacher, [model for model, _ in found], reads.sigmoid)
    dims = sizes(len(classes), student, teacher, size)
    build_criterion(recipe.losses, dims, recipe.seed, getattr(teacher, "shares", (1.0,)))
    lines.append("losses    " + " + ".join(f"{term.weight:g} x {term.kind}" for term in recipe.losses))
    lines += _length(recipe.run, split, len(data.train))
    lines += _store(data)
    if teacher is not None and recipe.teacher.cache.views and "teacher" in recipe.needs:
        answers = len(classes) if reads.teacher_logits else 0
        kept = codec(recipe.teacher, answers, feature_shapes(teacher, size), reads.sigmoid)
        lines.append(f"cache     {price(recipe.teacher, kept, len(data.train))}")
    lines += [
        f"backend   {recipe.backend.kind}, precision {recipe.backend.precision}, {world_size} process(es)",
        f"memory    {_state_mib(recipe.optimizer, student, world_size):.0f} MiB a rank for weights, gradients and "
        "optimizer; activations come on top",
        *(_images(data, section.on_corrupt) if timed else []),
        *(_time(recipe, data, split) if timed else []),
    ]
    return "\n".join(lines)


def _skew(data: Data) -> list[str]:
    """Say which share of the images the largest classes have, where that is more than twice their own share."""
    labels = data.labels()
    counts = (labels > 0).sum(0) if labels.ndim == 2 else torch.bincount(labels[labels >= 0])
    sizes = counts.sort(descending=True).values
    most = -(-len(sizes) // 5)
    share = sizes[:most].sum().item() / max(1, int(sizes.sum()))
    if share <= 2 * most / max(1, len(sizes)):
        return []
    told = f"the {most} largest have {100 * share:.0f} % of the images ({sizes[0]} to {sizes[most - 1]} each"
    return [f"classes   {told}, the smallest {sizes[-1]}); see docs/sifting.md, when to use it"]


def _time(recipe: Recipe, data: Data, split: BatchSplit | None) -> list[str]:
    """Say how long the run takes and what it costs, from a few steps made here."""
    if split is None or split.world_size > 1:
        why = "data.batch_size is auto" if split is None else "only one process measures; kd-plan knows several"
        return [f"time      not measured: {why}"]
    with distributed(recipe.backend) as backend:
        found = measure(recipe, data, split, backend, fitting=True)
        fits = sum(not is_fitted(fit_place(fit, data.fingerprint)[1]) for fit in recipe.fits.values())
        guess = estimate(recipe, data, split, backend, found, fits)
    parts = ", ".join(f"{name} {clock(seconds)}" for name, seconds in guess.seconds.items())
    told = describe(found) + ("" if found.load else "; loading not measured, the images do not exist yet")
    lines = [
        f"time      about {clock(guess.total)}: {parts}",
        f"speed     {guess.images_per_second:.0f} images/s; {told}; another load of this machine changes it",
    ]
    hourly = recipe.price.per_hour or getattr(instances.find(recipe.price.instance), "per_hour", 0.0)
    if hourly:
        lines.append(f"cost      about USD {money(hourly * guess.total / 3600)} at USD {hourly:g} an hour")
    return lines


def _unseen(data: Data) -> list[str]:
    """Name the classes that validation says nothing about."""
    labels = data.labels(val=True)
    seen = set((labels > 0).any(0).nonzero()[:, 0].tolist() if labels.ndim == 2 else labels.tolist())
    missing = [name for label, name in enumerate(data.classes) if label not in seen]
    if not missing or seen <= {-1}:
        return []
    shown = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
    count = f"{len(missing)} of {len(data.classes)} classes"
    return [f"          no validation image: {count}, which accuracy does not cover: {shown}"]


def _images(data: Data, on_corrupt: str) -> list[str]:
    """Decode images in random order, all if the time suffices, and say how many are damaged.

    Raises:
        CorruptImage: an image is damaged, and kd-train would stop at it.
    """
    first_val, total = len(data.train), len(data.train) + len(data.val)
    damaged: list[CorruptImage] = []
    looked, end = 0, time.monotonic() + LOOK_SECONDS
    for id in random.Random(0).sample(range(total), min(total, MOST_LOOKED)):
        try:
            data.train.decode(id) if id < first_val else data.val.decode(id - first_val)
        except CorruptImage as error:
            damaged.append(error)
        except DataError:
            return []  # not rendered or unpacked yet
        looked += 1
        if time.monotonic() > end:
            break
    of = f"{looked} of {total}" if looked < total else f"all {looked}"
    if not damaged:
        return [f"images    decoded {of}: none is damaged"]
    first = damaged[0]
    if on_corrupt == "error":
        more = f"; {len(damaged)} damaged images among {of}" if len(damaged) > 1 else ""
        raise CorruptImage(first.where, first.wrong + more, first.allowed, first.remedy)
    return [f"images    decoded {of}: {len(damaged)} damaged, to be skipped; {first.wrong}"]


def _length(section: RunSection, split: BatchSplit | None, num_images: int) -> list[str]:
    if split is None:
        whole = f"{section.steps} steps" if section.steps else f"{section.epochs} epochs"
        return ["batch     auto: as many images as fit into memory, found when the run starts", f"length    {whole}"]
    per_epoch = num_images // split.batch_size
    steps = section.steps or section.epochs * per_epoch
    return [
        f"batch     {split}",
        f"length    {steps} steps of {split.batch_size} images ({steps / per_epoch:.3g} epochs)",
    ]


def _store(data: Data) -> list[str]:
    if data.section.store == "none":
        return []
    most = [
        slot_bytes(rule.most) * len(source)
        for rule, source in zip(keep_rules(data.section), (data.train, data.val), strict=True)
    ]
    return [f"store     {data.section.store}: at most {sum(most) / 2**30:.2f} GiB; estimated from images at the start"]


def _teacher(where: str, section: TeacherSection, data: Data, images: Images, reads: Reads) -> tuple[TeacherModel, str]:
    size, logits = data.section.image_size, reads.teacher_logits
    if section.checkpoint or not section.fitted:  # its weights are what must be checked
        asked: Any = {"where": where, "images": images, "logits": logits, "sigmoid": reads.sigmoid}
        model = load_teacher(section, data.asked, size, reads.features, **asked)
        held = f"runs in {model.runs_in}" if model.runs_in else _millions(model)
        return model, f"teacher   {section.model}: {held}; weights and classes fit the data"
    spec = Spec(where, section.model, section.args, data.classes, logits=logits)
    model = _on_meta(spec, size, reads.features)
    return model, f"teacher   {section.model}: {_millions(model)}, fitted for {section.fit.epochs} epochs if not found"


def _on_meta(spec: Spec, size: int, features: Collection[str]) -> Classifier:
    with torch.device("meta"):
        return load(replace(spec, pretrained=False), size, features)


def _millions(model: Any) -> str:
    return f"{count_parameters(model) / 1e6:.2f} M parameters"


def _state_mib(section: OptimizerSection, student: Classifier, world_size: int) -> float:
    moments = 2 if section.kind == "adamw" else 1
    shared = world_size if section.zero else 1
    floats = 2 + moments / shared + (1 if section.ema else 0)
    return count_parameters(student) * 4 * floats / 2**20
