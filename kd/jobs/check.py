"""Checks before a run trains: everything known without weights, and the quality of its
teachers.

A teacher sees kd's square crop; its own library may use the whole photograph, with
other outputs.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from kd.core.contracts import Backend
from kd.core.errors import ModelError
from kd.core.types import Outputs
from kd.data.views import Views
from kd.engine.criterion import StudentWithLoss
from kd.models.classifier import REORDERED, Pick, Preprocessing, feature_shapes
from kd.models.examination import FAILURES
from kd.models.live_teacher import LiveTeacher
from kd.setup.build_teacher import META, Teachers, load_teachers, pixels_of, readable
from kd.setup.data import BatchSplit, Data, open_sources, split_batch, train_transform
from kd.setup.recipe import Recipe, fit_folders, is_fitted
from kd.setup.student import build_distillation, require_images, student_spec

# share of equal top classes below which a teacher is refused, unless
# `teacher.min_accuracy` is 0
LEAST_EQUAL = 0.5


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Objects and findings of `check`."""

    data: Data  # the listed splits
    teachers: Teachers  # teachers without a checkpoint have no weights
    split: BatchSplit
    phases: Mapping[str, Recipe]  # the run as "distillation", and the fits before it
    modules: Mapping[
        str, StudentWithLoss
    ]  # the trained module of each, without weights
    cache: str  # size of the teacher's full cache; "" without a cache


def check(recipe: Recipe) -> CheckedRun:
    """Check everything that can be known before training, in seconds and without
    weights.

    Models are built on the meta device: no memory, no weights. Data is listed, and
    weights are located. Not checked here: the teacher's accuracy (`kd-train` scores it
    before step 1).
    """
    section, teacher = recipe.data, recipe.teacher
    train_transform(section.image_size, section.augment)
    if recipe.fits and teacher.fit.augment is not None:
        train_transform(section.image_size, teacher.fit.augment, "teacher.fit.augment")
    for name in recipe.config.run.trackers:
        from kd.jobs.progress.trackers import tracker_class  # only if some are named

        tracker_class(name)
    data = listed = open_sources(section)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    split = split_batch(section, ranks, len(data.train))
    folders = fit_folders(recipe, data.fingerprint).items()
    fits = {
        f"the fit of {config_path}": fit
        for config_path, (fit, target) in folders
        if not is_fitted(target)
    }
    alone = [
        (fit.data, "teacher.fit.batch_size") for fit in fits.values()
    ]  # these train on labelled images only
    alone += [(section, "data.batch_size")] if recipe.baseline is not None else []
    for own, key in alone:
        split_batch(
            own,
            ranks,
            len(data.with_labels().train),
            key,
            "labelled " if section.labels == "some" else "",
        )
    phases = {"distillation": recipe, **fits}
    for phase in (*fits.values(), recipe):
        if phase.student.kind == "timm":
            from kd.models.load_classifier import (
                require_weights,
            )  # not for an own network

            require_weights(student_spec(phase, data.classes))
    teachers = load_teachers(recipe, data, dict.fromkeys(recipe.fits, META))
    data, untaught = teachers.data, Teachers(None, teachers.data)
    modules = {}
    for name, phase in phases.items():
        micro_batch = split_batch(phase.data, ranks, len(data.train)).micro_batch
        taught = teachers if phase is recipe else untaught
        modules[name] = build_distillation(phase, taught, micro_batch, meta=True)
    require_images(split, modules["distillation"].criterion)
    cache = ""
    if recipe.read.teacher and teacher.cache.views and teachers.model is not None:
        from kd.setup.open_cache import cache_codec, price  # only if outputs are stored

        codec = cache_codec(
            recipe,
            len(data.classes),
            feature_shapes(teachers.model, data.plan.image_size),
        )
        cache = price(teacher.cache, codec, len(data.train))
    return CheckedRun(listed, teachers, split, phases, modules, cache)


# ------------------------------------------------------------------------------- a
# teacher under its own preprocessing


@dataclass(frozen=True, slots=True)
class TeacherComparison:
    """Findings on one teacher from validation images."""

    config_path: str  # config path of its section
    text: str
    values: dict[str, float]
    """`images`. If it has native preprocessing: `of_std`, the largest difference from
    its native outputs in standard deviations, and `equal`, the share of equal top
    classes. If it has more classes than the data: `kept`, the probability share of the
    data's classes.
    """


def compare_teachers(
    recipe: Recipe, teachers: Teachers, backend: Backend | None = None
) -> list[TeacherComparison]:
    """Compare each teacher with itself under its own preprocessing, except fitted and
    divided teachers.
    """
    if recipe.teacher.shard or recipe.teacher.pipeline:
        return []
    device = torch.device("cpu")
    if (
        backend is not None and not backend.facts.compiles
    ):  # else it would be compiled for each batch size
        device = backend.device
    members = zip(recipe.members, teachers.members, strict=False)
    shown = teachers.data.shown(teachers.data.val, on_corrupt="error")
    found = [
        _compare_teacher(config_path, one, recipe, shown, device)
        for config_path, one in members
        if config_path not in recipe.fits
    ]
    return [one for one in found if one.values]


@torch.inference_mode()
def _compare_teacher(
    config_path: str, member: Any, recipe: Recipe, shown: Views, device: torch.device
) -> TeacherComparison:
    own: Preprocessing | None = getattr(member, "preprocessing", None)
    if own is None and not any(isinstance(one, Pick) for one in member.modules()):
        return TeacherComparison(config_path, "", {})
    pictures, ids = readable(shown.source)
    model: Any = (
        LiveTeacher(member, device).validation().model
    )  # a copy on the device, as in an evaluation
    kept, fewer = list[float](), list[bool]()
    for pick in (one for one in model.modules() if isinstance(one, Pick)):
        pick.register_forward_pre_hook(
            lambda one, given: kept.append(
                given[0].float().softmax(1)[:, one.columns].sum(1).mean().item()
            )
        )
        pick.register_forward_hook(
            lambda one, given, out: fewer.extend(
                [True] * (given[0].shape[1] > out.shape[1])
            )
        )
    views = pixels_of(pictures, shown).to(device)
    ours = model(views, torch.tensor(ids)) if member.reads_ids else model(views)
    values, texts = {"images": float(len(ids))}, []
    if kept and recipe.task.logits == "softmax":
        values["kept"] = kept[0]
        text = (
            f"{kept[0]:.1%} of its probability belongs to the data's"
            f" {ours.logits.shape[1]} classes"
        )
        texts.append(text if fewer else REORDERED)
    if own is not None:
        ours_BC, home_BC = (
            _output_vectors(ours),
            _native_outputs(config_path, model, own, pictures, device),
        )
        spread = home_BC.std(correction=0).clamp_min(1e-12)
        values["of_std"] = ((ours_BC - home_BC).abs().max() / spread).item()
        said = (
            f"with the preprocessing of {own.library} its outputs on {len(ids)}"
            " validation images differ by at most "
        )
        said += f"{values['of_std']:.2g} of their standard deviation"
        if ours.logits.shape[1]:
            same = ours_BC.argmax(1) == home_BC.argmax(1)
            values["equal"] = same.float().mean().item()
            said += f"; the top class is the same on {int(same.sum())}"
        texts.append(said)
        if values.get("equal", 1.0) < LEAST_EQUAL and recipe.teacher.min_accuracy != 0:
            remedy = (
                "Set data.image_size and data.crop_pct nearer to those keys; with"
                " teacher.min_accuracy=0 it is "
            )
            allowed = f"The same on {LEAST_EQUAL:.0%} or more. It has {own.keys}"
            raise ModelError(
                f"{config_path}.model", said, allowed, f"{remedy}taken as it is"
            )
    return TeacherComparison(config_path, "; ".join(texts), values)


def _native_outputs(
    config_path: str,
    model: Any,
    own: Preprocessing,
    pictures: Sequence[Image.Image],
    device: torch.device,
) -> Tensor:
    weight, found = next(model.network.parameters()), []
    for picture in pictures:
        pixels = own.prepare(picture).to(device, weight.dtype)[None]
        try:
            found.append(_output_vectors(model.outputs(pixels)))
        except FAILURES as error:
            height, width = pixels.shape[2:]
            wrong = (
                f"fails on the {width}x{height} pixels that its own preprocessing makes"
                f" ({own.keys}): {error}"
            )
            raise ModelError(
                f"{config_path}.model", wrong, "", "Correct its preprocessing"
            ) from error
    return torch.cat(found)


def _output_vectors(outputs: Outputs) -> Tensor:
    """Return one vector per image: logits, else features (the mean of tokens)."""
    return (outputs.main if outputs.main.ndim == 2 else outputs.main.mean(1)).float()
