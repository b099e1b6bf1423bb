"""Load the frozen teacher and choose how it is executed on this machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from kd.config.schema import TeacherSection
from kd.core.contracts import Backend, HasWarnings, Source, TeacherModel
from kd.core.errors import (
    CorruptImage,
    ModelError,
    NotPrepared,
    RunError,
    error_summary,
)
from kd.core.ranks import numbers_of_rank_0
from kd.core.seeds import evenly_spaced
from kd.core.types import Batch
from kd.data.views import Views
from kd.models.classifier import Classifier, Ensemble, set_attention
from kd.models.examination import examine, fails
from kd.models.examined import IMAGES, noise_images
from kd.models.live_teacher import LiveTeacher, NoTeacher, is_on_meta
from kd.models.spec import Spec
from kd.parts import registry
from kd.setup.data import BatchSplit, Data, split_batch
from kd.setup.modes import ExecutionMode, noise_batch, require_mode, torch_mode
from kd.setup.recipe import Recipe, fit_folders, is_fitted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLAIN = ExecutionMode("fp32", "unfused")  # reference mode for comparisons
COMPARED = 16
"""Validation images for comparing a teacher with itself under its own preprocessing.
Four forwards of 16 images take four seconds for a ViT-B.
"""
PROBED = 64  # validation images for comparing a teacher with itself in float32
LARGEST_ERROR = 0.05
"""Largest logit error in bfloat16 on `PROBED` images that `precision: auto` accepts, as
a share of the logits' standard deviation. On 1,000 pictures of food_mini at 64 px it
was 1.2 to 2.3 times that of 64 of them (medians of 200 draws; of 16, 1.3 to 3.9 times),
for 13 networks of timm: XCiT, ViT, ResNet, ConvNeXt, MobileNet and EfficientNet with
random and fitted weights. So it stays near 0.1. Ten had 0.011 to 0.040 on 64; three,
from 0.050 to 0.16, are refused and had 0.058 to 0.24 on all. A network that does not
tolerate bfloat16 had 0.31.
"""
REAL = "real"
RANDOM = "random"
META = "meta"
"""Weights of a teacher: its own; random (only the cost matters); none, on the meta
device.
"""


@dataclass(frozen=True, slots=True)
class Teachers:
    """Hold the teachers of a run as one model, and the data with its classes."""

    model: TeacherModel | None  # None: the run trains on labels alone
    data: Data
    members: Sequence[TeacherModel] = ()  # the single teachers

    @property
    def notes(self) -> list[str]:
        """Return notes about them for the user, one per line."""
        notes = [
            note
            for model in self.members
            if isinstance(model, HasWarnings)
            for note in model.notes
        ]
        side = self.data.plan.image_size
        for model in self.members:
            input_size = getattr(model, "input_size", 0) or side
            if input_size != side:
                notes.append(
                    f"it runs at its own {input_size} px on images of {side} px:"
                    f" {(input_size / side) ** 2:.2g} times the arithmetic"
                )
        return notes


@dataclass(frozen=True, slots=True)
class RunContext:
    """Hold a run's recipe, teachers with their data, and the backend after setup."""

    recipe: Recipe
    teachers: Teachers
    backend: Backend

    @property
    def data(self) -> Data:
        return self.teachers.data

    @property
    def split(self) -> BatchSplit:
        data = self.data
        return split_batch(data.plan, self.backend.world_size, len(data.train))


def load_teachers(
    recipe: Recipe, data: Data, weights: Mapping[str, str | Path]
) -> Teachers:
    """Load all teachers of a run.

    Their classes must equal the data's, or define them for unlabelled images.

    `weights` of each teacher, by its config path: `REAL`, `RANDOM`, `META`, or the
    export folder of a fitted one.
    """
    models: list[TeacherModel] = []
    for config_path, section in recipe.members.items():
        source = weights.get(config_path, REAL)
        models.append(_load_teacher(config_path, section, recipe, data, source))
        if not data.labelled:
            # other teachers must have the same classes
            data = replace(data, teacher_classes=tuple(models[0].classes))
    if len(models) < 2:
        return Teachers(models[0] if models else None, data, models)
    shares = [1.0, *(section.weight for section in recipe.teacher.also)]
    return Teachers(Ensemble(models, shares, recipe.task.average), data, models)


def load_fitted(recipe: Recipe, data: Data) -> Teachers:
    """Load the teachers of a finished run, which are not fitted again."""
    weights: dict[str, str | Path] = {}
    for config_path, (_, folder) in fit_folders(recipe, data.fingerprint).items():
        weights[config_path] = folder
        if not is_fitted(folder):
            raise RunError(
                config_path,
                f"the fitted teacher is not at '{folder}'",
                "",
                "Run in the folder of kd-train",
            )
    return load_teachers(recipe, data, weights)


def _load_teacher(
    config_path: str,
    section: TeacherSection,
    recipe: Recipe,
    data: Data,
    weights: str | Path,
) -> TeacherModel:
    classes = data.required_classes if recipe.read.teacher_logits else ()
    spec = Spec(
        config_path=config_path,
        model=section.model,
        args=section.args,
        classes=classes,
        checkpoint=section.checkpoint,
        weights=section.weights,
        pretrained=not section.checkpoint,
        exact_head=True,
        images=data.images(),
        task=recipe.task,
    )
    if isinstance(weights, Path):
        spec = replace(spec, pretrained=True, weights="by_name")
        if section.kind == "timm":
            spec = replace(spec, model=str(weights), args={}, checkpoint="")
        else:  # the folder has only the weights
            spec = replace(spec, checkpoint=str(weights))
    elif weights != REAL:
        free = config_path in recipe.fits and not section.pretrained
        spec = replace(
            spec, checkpoint="", pretrained=False, exact_head=False, free_size=free
        )
    with torch.device("meta" if weights == META else "cpu"):
        model = registry.build(
            "networks",
            section.kind,
            section.options,
            f"{config_path}.kind",
            spec=spec,
            image_size=data.plan.image_size,
            features=recipe.read.features,
        )
    if weights == REAL:
        _check_execution(section, model, config_path)
        if not model.reads_ids:
            size = getattr(model, "input_size", 0) or data.plan.image_size
            explain = partial(fails, config_path, section.model, size)
            examine(
                model,
                f"{config_path}.model",
                sample_images(data),
                recipe.read.teacher_logits,
                explain=explain,
            )  # type: ignore[arg-type]
    return model


def _check_execution(
    section: TeacherSection, model: TeacherModel, config_path: str
) -> None:
    """Refuse execution options for a model that does not run in torch."""
    if model.runtime == "torch":
        return
    refused = {
        "attention": section.attention != "auto",
        "precision": section.precision not in ("auto", "fp32"),
        "runtime": section.runtime not in ("auto", "torch"),
        "compile": section.compile == "on",
    }
    for key, is_set in refused.items():
        if is_set:
            wrong = (
                f"is {getattr(section, key)}, but {config_path} is of kind"
                f" '{section.kind}' and runs in {model.runtime}"
            )
            raise ModelError(
                f"teacher.{key}",
                wrong,
                "It goes with a model of torch",
                f"Leave teacher.{key} out",
            )


@dataclass(frozen=True, slots=True)
class TeacherReport:
    """Hold the live teacher and findings about it."""

    live: LiveTeacher | NoTeacher
    mode: ExecutionMode | None = None  # execution mode; None without a teacher
    error: dict[str, Any] = field(default_factory=dict)
    """Difference from torch float32: the largest |difference| of a logit (`largest`),
    also as a share of the logits' standard deviation (`of_std`), and the number of
    `images`; empty if not compared. `refused`: the measured mode, if it was refused.
    """
    line: str = ""  # decision and measured values as text


def choose_teacher(context: RunContext) -> TeacherReport:
    """Build the live teacher as configured. All ranks must call this.

    `precision: auto` is the machine's (`Backend.auto_mode`), or float32 if the
    teacher's logits would differ by more than `LARGEST_ERROR` or cannot be compared.
    """
    section = context.recipe.teacher
    backend = context.backend
    model = context.teachers.model
    size = context.data.plan.image_size
    if model is None:
        return TeacherReport(NoTeacher())
    factory = TeacherFactory(section, model, backend, size)
    mode = teacher_mode(section, model, backend)
    error: dict[str, Any] = {}
    line = ""
    if section.precision == "auto" and mode.precision == "bf16":
        mode, error, line = _checked_bf16(mode, factory, context)
    if mode.rebuilt:
        batch = noise_batch(context.split.micro_batch, size, backend)
        key = "teacher.runtime" if mode.exported else "teacher.compile"
        require_mode(lambda: factory(mode)(batch).main, key, mode)
    live = factory(mode)
    # it is split at its first batch; each rank's part is recorded before step 1
    if section.pipeline:
        live(noise_batch(context.split.micro_batch, size, backend))
    if mode.rebuilt or (mode.precision != "fp32" and not (error or line)):
        error, line = logit_error(mode, factory, context)
    live.images = 0
    return TeacherReport(live, mode, error, line)


def teacher_mode(
    section: TeacherSection, model: TeacherModel, backend: Backend
) -> ExecutionMode:
    """Return the mode that a configuration names, or that `auto` means here."""
    if model.runtime != "torch":
        return PLAIN
    runtime = section.exported(cpu=backend.facts.cpu)
    precision = section.precision
    if precision == "auto" and (runtime or section.shard or section.pipeline):
        # a divided teacher is not compared with itself: that would need a second
        # divided copy
        precision = "fp32"
    if runtime:
        return ExecutionMode(precision, runtime)
    return torch_mode(
        precision, section.attention, section.compile == "on", model, backend
    )


class TeacherFactory:
    """Build the live teacher of a mode; slow conversions are done once."""

    def __init__(
        self,
        plan: TeacherSection,
        model: TeacherModel,
        backend: Backend,
        image_size: int,
    ) -> None:
        self.plan = plan
        self.model = model
        self.backend = backend
        self.image_size = image_size
        self._rebuilt: dict[ExecutionMode, LiveTeacher] = {}

    def __call__(self, mode: ExecutionMode) -> LiveTeacher:
        """Return the teacher for a mode; a compiled or exported one is kept."""
        if not mode.rebuilt:
            return self.build_on(self.backend.device, mode)
        if mode not in self._rebuilt:
            self._rebuilt[mode] = self.build_on(self.backend.device, mode)
        return self._rebuilt[mode]

    def build_on(self, device: torch.device, mode: ExecutionMode) -> LiveTeacher:
        """Build the teacher of a mode on a device."""
        plan = self.plan
        backend = self.backend
        live = LiveTeacher(
            self.model,
            device,
            dtype=torch.float32 if mode.exported else DTYPES[mode.precision],
            micro_batch=plan.micro_batch,
            shard=backend.shard if plan.shard else None,
            pipeline=backend.pipeline if plan.pipeline else None,
            remake=partial(rebuild, mode, self.image_size) if mode.rebuilt else None,
            inference=backend.facts.inference,
        )
        set_attention(live.model, mode.kernel == "fused")
        return live


def rebuild(mode: ExecutionMode, size: int, frozen: Any) -> nn.Module:
    """Return the conversion of a frozen teacher for its mode.

    It is compiled or exported, for images of `size` pixels.
    """
    if not mode.exported:
        from kd.models.compiled import compile_forward  # only if a compiler is used

        return compile_forward(frozen)
    from kd.models.runtimes import Exported  # only if a graph replaces torch

    if isinstance(frozen, Ensemble):
        graphs = [
            Exported(member, size, mode.kernel, mode.precision)  # type: ignore[arg-type]
            for member in frozen.members
        ]
        return Ensemble(graphs, frozen.shares, frozen.average)
    return Exported(frozen, size, mode.kernel, mode.precision)


def logit_error(
    mode: ExecutionMode, factory: TeacherFactory, context: RunContext
) -> tuple[dict[str, Any], str]:
    """Return the error of a teacher's logits relative to torch float32.

    It is given in numbers and in words.
    """
    backend = context.backend
    # a comparison would need a second divided teacher
    if factory.plan.shard or factory.plan.pipeline:
        return {}, f"{mode}; its logits were not compared with float32's"
    device = backend.device
    if backend.facts.compiles:  # 16 images would need another graph there
        device = torch.device("cpu")
        live = factory.build_on(device, mode)
    else:
        live = factory(mode)
    views = context.data.evaluation_views(context.data.val)
    images = pixels_of(readable_images(views.source, PROBED)[0], views)
    batch = Batch.of(images, torch.zeros(0, dtype=torch.int64)).to(device)
    reference_BC = factory.build_on(device, PLAIN)(batch).main
    logits_BC = live(batch).main
    largest = (logits_BC - reference_BC).abs().max().item()
    # 0 for a constant teacher
    spread = max(reference_BC.std(correction=0).item(), 1e-12)
    of_std = largest / spread
    line = (
        f"{mode}; its logits differ from torch float32's by {largest:.2g} at most,"
        f" {of_std:.2g} of their standard deviation ({len(images)} validation images)"
    )
    return {"largest": largest, "of_std": of_std, "images": len(images)}, line


def _checked_bf16(
    mode: ExecutionMode, factory: TeacherFactory, context: RunContext
) -> tuple[ExecutionMode, dict[str, Any], str]:
    """Return a bfloat16 mode, or float32 if it changes the logits too much.

    Also return the measured error, in numbers and in words.
    """
    error: dict[str, Any] = {}
    try:
        error, line = logit_error(replace(mode, compiled=False), factory, context)
    # an operator without bfloat16, such as a Fourier transform
    except Exception as failure:
        line = f"{mode}; its forward fails ({error_summary(failure)})"
    near = error.get("of_std", math.inf) <= LARGEST_ERROR
    # last bits may differ on another machine
    [near] = numbers_of_rank_0(context.backend, [near])
    if near:
        return mode, error, line
    exact = replace(mode, precision="fp32")
    line = (
        f"{exact}: in {mode}, {line.partition('; ')[2]}; {LARGEST_ERROR:g} is allowed"
    )
    return exact, {**error, "refused": str(mode)}, line


@torch.no_grad()
def spread_text(teachers: Teachers) -> str:
    """Describe a teacher's predictions on validation images; "" if it has none.

    They show wrong weights.
    """
    model = teachers.model
    if not isinstance(model, Classifier) or is_on_meta(model):
        return ""
    views = teachers.data.evaluation_views(teachers.data.val)
    images = pixels_of(readable_images(views.source)[0], views)
    logits_BC = model.eval()(images.to(model.scale.device)).logits.float()  # type: ignore[arg-type]
    count = logits_BC.shape[1]
    if count < 2:
        return ""
    predicted = len(logits_BC.argmax(1).unique())
    entropy_B = torch.distributions.Categorical(logits=logits_BC).entropy()
    share = entropy_B.mean().item() / np.log(count)
    return (
        f"; on {len(logits_BC)} images it predicts {predicted} of {count} classes, its"
        f" logits have the standard deviation {logits_BC.std().item():.2g}, its"
        f" probabilities {share:.0%} of the largest entropy"
    )


def pixels_of(images: Sequence[Image.Image], views: Views) -> torch.Tensor:
    """Return images in evaluation's view, uint8 [N, 3, S, S]."""
    pixels = [
        np.asarray(views.transform(image, Random(0))).transpose(2, 0, 1)
        for image in images
    ]
    return torch.from_numpy(np.stack(pixels))


def sample_images(data: Data) -> torch.Tensor:
    """Return validation images for an examination, uint8 [N, 3, S, S].

    They are noise if the images do not exist yet.
    """
    views = data.evaluation_views(data.val)
    try:
        return pixels_of(readable_images(views.source, IMAGES)[0], views)
    except NotPrepared:
        return noise_images(data.plan.image_size)


def readable_images(
    source: Source, count: int = COMPARED
) -> tuple[list[Image.Image], list[int]]:
    """Return up to `count` evenly spaced images of a split, as read, and their ids."""
    images = []
    ids = []
    broken = None
    for id in evenly_spaced(len(source), count):
        try:
            images.append(source.decode(id).image)
            ids.append(id)
        except CorruptImage as error:  # data.on_corrupt decides in the run
            broken = error
    if not images and broken is not None:
        raise broken
    return images, ids
