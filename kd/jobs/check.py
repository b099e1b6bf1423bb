"""Check a run before it trains: its parts without weights, and its teachers' outputs.

A teacher sees kd's square crop; its own library may use the whole image, with other
outputs.
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
from kd.setup.build_teacher import (
    META,
    Teachers,
    load_teachers,
    pixels_of,
    readable_images,
)
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
    # the trained module of each phase, without weights
    modules: Mapping[str, StudentWithLoss]
    cache: str  # size of the teacher's full cache; "" without a cache


def check(recipe: Recipe) -> CheckedRun:
    """Check everything that needs no weights, in seconds, before training.

    Models are built on the meta device: no memory, no weights. Data is listed, and
    weights are located. Not checked here: the teacher's accuracy (`kd-train` scores it
    before step 1).
    """
    section = recipe.data
    teacher = recipe.teacher
    train_transform(section.image_size, section.augment)
    if recipe.fits and teacher.fit.augment is not None:
        train_transform(section.image_size, teacher.fit.augment, "teacher.fit.augment")
    for name in recipe.config.run.trackers:
        from kd.jobs.progress.trackers import tracker_class  # only if some are named

        tracker_class(name)
    listed = open_sources(section)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    split = split_batch(section, ranks, len(listed.train))
    fits = {
        f"the fit of {config_path}": fit
        for config_path, (fit, target) in fit_folders(
            recipe, listed.fingerprint
        ).items()
        if not is_fitted(target)
    }
    # these train on labelled images only
    on_labels = [(fit.data, "teacher.fit.batch_size") for fit in fits.values()]
    if recipe.baseline is not None:
        on_labels.append((section, "data.batch_size"))
    for plan, key in on_labels:
        split_batch(
            plan,
            ranks,
            len(listed.with_labels().train),
            key,
            "labelled " if section.labels == "some" else "",
        )
    for phase in (*fits.values(), recipe):
        if phase.student.kind == "timm":
            # not for an own network
            from kd.models.load_classifier import require_weights

            require_weights(student_spec(phase, listed.classes))
    teachers = load_teachers(recipe, listed, dict.fromkeys(recipe.fits, META))
    data = teachers.data
    phases = {"distillation": recipe, **fits}
    modules = {}
    for name, phase in phases.items():
        micro_batch = split_batch(phase.data, ranks, len(data.train)).micro_batch
        phase_teachers = teachers if phase is recipe else Teachers(None, data)
        modules[name] = build_distillation(
            phase, phase_teachers, micro_batch, meta=True
        )
    require_images(split, modules["distillation"].criterion)
    cache = ""
    if recipe.read.teacher and teacher.cache.views and teachers.model is not None:
        from kd.setup.open_cache import cache_codec, price  # only if outputs are stored

        shapes = feature_shapes(teachers.model, data.plan.image_size)
        codec = cache_codec(recipe, len(data.classes), shapes)
        cache = price(teacher.cache, codec, len(data.train))
    return CheckedRun(listed, teachers, split, phases, modules, cache)


# --------------------------------------------------------------------------------
# a teacher under its own preprocessing


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
    """Compare each teacher with itself under its own preprocessing.

    Fitted and divided teachers are left out.
    """
    if recipe.teacher.shard or recipe.teacher.pipeline:
        return []
    device = torch.device("cpu")
    # a compiling backend would compile a teacher for each batch size
    if backend is not None and not backend.facts.compiles:
        device = backend.device
    members = zip(recipe.members, teachers.members, strict=False)
    views = teachers.data.evaluation_views(teachers.data.val, on_corrupt="error")
    comparisons = [
        _compare_teacher(config_path, member, recipe, views, device)
        for config_path, member in members
        if config_path not in recipe.fits
    ]
    return [comparison for comparison in comparisons if comparison.values]


@torch.inference_mode()
def _compare_teacher(
    config_path: str, member: Any, recipe: Recipe, views: Views, device: torch.device
) -> TeacherComparison:
    native: Preprocessing | None = getattr(member, "preprocessing", None)
    if native is None and not any(isinstance(m, Pick) for m in member.modules()):
        return TeacherComparison(config_path, "", {})
    images, ids = readable_images(views.source)
    # a copy on the device, as in an evaluation
    model: Any = LiveTeacher(member, device).validation().model
    picks = _observe_picks(model)
    pixels = pixels_of(images, views).to(device)
    outputs = model(pixels, torch.tensor(ids)) if member.reads_ids else model(pixels)
    values = {"images": float(len(ids))}
    texts = []
    if picks and recipe.task.logits == "softmax":
        values["kept"] = picks[0][0]
        text = (
            f"{picks[0][0]:.1%} of its probability belongs to the data's"
            f" {outputs.logits.shape[1]} classes"
        )
        texts.append(text if any(drops for _, drops in picks) else REORDERED)
    if native is not None:
        ours_BC = _output_vectors(outputs)
        native_BC = _native_outputs(config_path, model, native, images, device)
        spread = native_BC.std(correction=0).clamp_min(1e-12)
        values["of_std"] = ((ours_BC - native_BC).abs().max() / spread).item()
        text = (
            f"with the preprocessing of {native.library} its outputs on {len(ids)}"
            f" validation images differ by at most {values['of_std']:.2g} of their"
            " standard deviation"
        )
        if outputs.logits.shape[1]:
            same = ours_BC.argmax(1) == native_BC.argmax(1)
            values["equal"] = same.float().mean().item()
            text += f"; the top class is the same on {int(same.sum())}"
        texts.append(text)
        if values.get("equal", 1.0) < LEAST_EQUAL and recipe.teacher.min_accuracy != 0:
            allowed = f"The same on {LEAST_EQUAL:.0%} or more. It has {native.keys}"
            remedy = (
                "Set data.image_size and data.crop_pct nearer to those keys; with"
                " teacher.min_accuracy=0 it is taken as it is"
            )
            raise ModelError(f"{config_path}.model", text, allowed, remedy)
    return TeacherComparison(config_path, "; ".join(texts), values)


def _observe_picks(model: Any) -> list[tuple[float, bool]]:
    """Record of each `Pick` the kept probability, and whether it drops classes."""
    picks: list[tuple[float, bool]] = []

    def record_pick(pick: Any, inputs: tuple[Tensor], logits: Tensor) -> None:
        probabilities = inputs[0].float().softmax(1)
        share = probabilities[:, pick.columns].sum(1).mean().item()
        picks.append((share, inputs[0].shape[1] > logits.shape[1]))

    for module in model.modules():
        if isinstance(module, Pick):
            module.register_forward_hook(record_pick)
    return picks


def _native_outputs(
    config_path: str,
    model: Any,
    native: Preprocessing,
    images: Sequence[Image.Image],
    device: torch.device,
) -> Tensor:
    weight = next(model.network.parameters())
    vectors = []
    for image in images:
        pixels = native.prepare(image).to(device, weight.dtype)[None]
        try:
            vectors.append(_output_vectors(model.outputs(pixels)))
        except FAILURES as error:
            height, width = pixels.shape[2:]
            wrong = (
                f"fails on the {width}x{height} pixels that its own preprocessing makes"
                f" ({native.keys}): {error}"
            )
            raise ModelError(
                f"{config_path}.model", wrong, "", "Correct its preprocessing"
            ) from error
    return torch.cat(vectors)


def _output_vectors(outputs: Outputs) -> Tensor:
    """Return one vector per image: logits, else features (the mean of tokens)."""
    return (outputs.main if outputs.main.ndim == 2 else outputs.main.mean(1)).float()
