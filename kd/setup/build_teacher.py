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
from kd.models.examined import IMAGES
from kd.models.examined import noise as random_images
from kd.models.live_teacher import LiveTeacher, NoTeacher, is_on_meta
from kd.models.spec import Spec
from kd.parts import registry
from kd.setup.data import BatchSplit, Data, split_batch
from kd.setup.modes import ExecutionMode, noise, require, torch_mode
from kd.setup.recipe import Recipe, fit_folders, is_fitted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLAIN = ExecutionMode("fp32", "unfused")  # reference mode for comparisons
COMPARED, PROBED = 16, 64
"""Validation images for comparing a teacher with itself: under its own preprocessing,
and in float32. Four forwards of 16 images take four seconds for a ViT-B.
"""
LARGEST_ERROR = 0.05
"""Largest logit error in bfloat16 on `PROBED` images that `precision: auto` accepts, as
a share of the logits' standard deviation. On 1,000 pictures of food_mini at 64 px it
was 1.2 to 2.3 times that of 64 of them (medians of 200 draws; of 16, 1.3 to 3.9 times),
for 13 networks of timm: XCiT, ViT, ResNet, ConvNeXt, MobileNet and EfficientNet with
random and fitted weights. So it stays near 0.1. Ten had 0.011 to 0.040 on 64; three,
from 0.050 to 0.16, are refused and had 0.058 to 0.24 on all. A network that does not
tolerate bfloat16 had 0.31.
"""
REAL, RANDOM, META = "real", "random", "meta"
"""Weights of a teacher: its own; random (only the cost matters); none, on the meta
device.
"""


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a run as one model, and the data with its classes."""

    model: TeacherModel | None  # None: the run trains on labels alone
    data: Data
    members: Sequence[TeacherModel] = ()  # the single teachers

    @property
    def notes(self) -> list[str]:
        """Notes about them for the user, one per line."""
        notes = [
            note
            for model in self.members
            if isinstance(model, HasWarnings)
            for note in model.notes
        ]
        given = self.data.plan.image_size
        for own in (getattr(model, "input_size", 0) or given for model in self.members):
            times = f"{(own / given) ** 2:.2g} times the arithmetic"
            notes += (
                [f"it runs at its own {own} px on images of {given} px: {times}"]
                if own != given
                else []
            )
        return notes


@dataclass(frozen=True, slots=True)
class Setting:
    """The session of a run: its recipe, its teachers with their data, and the backend
    after setup.
    """

    recipe: Recipe
    teachers: Teachers
    backend: Backend

    @property
    def data(self) -> Data:
        return self.teachers.data

    @property
    def split(self) -> BatchSplit:
        return split_batch(
            self.data.plan, self.backend.world_size, len(self.data.train)
        )


def load_teachers(
    recipe: Recipe, data: Data, weights: Mapping[str, str | Path]
) -> Teachers:
    """Load all teachers of a run. Their classes must equal the data's, or define them
    for unlabelled images.

    `weights` of each teacher, by its config path: `REAL`, `RANDOM`, `META`, or the
    export folder of a fitted one.
    """
    models: list[TeacherModel] = []
    for config_path, section in recipe.members.items():
        models.append(
            _load(config_path, section, recipe, data, weights.get(config_path, REAL))
        )
        if not data.labelled:
            data = replace(
                data, teacher_classes=tuple(models[0].classes)
            )  # other teachers must have the same classes
    if len(models) < 2:
        return Teachers(models[0] if models else None, data, models)
    weights_of = [1.0, *(one.weight for one in recipe.teacher.also)]
    return Teachers(Ensemble(models, weights_of, recipe.task.average), data, models)


def load_fitted(recipe: Recipe, data: Data) -> Teachers:
    """Load the teachers of a finished run, which are not fitted again."""
    weights: dict[str, str | Path] = {}
    for config_path, (_, target) in fit_folders(recipe, data.fingerprint).items():
        weights[config_path] = target
        if not is_fitted(target):
            raise RunError(
                config_path,
                f"the fitted teacher is not at '{target}'",
                "",
                "Run in the folder of kd-train",
            )
    return load_teachers(recipe, data, weights)


def _load(
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
        own = (
            section.kind != "timm"
        )  # for such a network the folder has only the weights
        found = (
            {"checkpoint": str(weights)}
            if own
            else {"model": str(weights), "args": {}, "checkpoint": ""}
        )
        spec = replace(spec, **found, pretrained=True, weights="by_name")
    elif weights != REAL:
        free = config_path in recipe.fits and not section.pretrained
        spec = replace(
            spec, checkpoint="", pretrained=False, exact_head=False, free_size=free
        )
    made: Any = {
        "spec": spec,
        "image_size": data.plan.image_size,
        "features": recipe.read.features,
    }
    with torch.device("meta") if weights == META else torch.device("cpu"):
        model = registry.build(
            "networks", section.kind, section.options, f"{config_path}.kind", **made
        )
    if weights == REAL:
        _check_execution(section, model, config_path)
        if not model.reads_ids:
            size = getattr(model, "input_size", 0) or data.plan.image_size
            explain = partial(fails, config_path, section.model, size)
            examine(
                model,
                f"{config_path}.model",
                sample(data),
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
    for key, on in refused.items():
        if on:
            wrong = (
                f"is {getattr(section, key)}, but {config_path} is of kind '{section.kind}'"
                f" and runs in {model.runtime}"
            )
            remedy = f"Leave teacher.{key} out"
            raise ModelError(
                f"teacher.{key}", wrong, "It goes with a model of torch", remedy
            )


@dataclass(frozen=True, slots=True)
class TeacherReport:
    """The live teacher and findings about it."""

    live: LiveTeacher | NoTeacher
    mode: ExecutionMode | None = None  # execution mode; None without a teacher
    error: dict[str, Any] = field(default_factory=dict)
    """Difference from torch float32: the largest |difference| of a logit (`largest`),
    also as a share of the logits' standard deviation (`of_std`), and the number of
    `images`; empty if not compared. `refused`: the measured mode, if it was refused.
    """
    line: str = ""  # decision and measured values as text


def choose_teacher(setting: Setting) -> TeacherReport:
    """Build the live teacher as configured. All ranks must call this.

    `precision: auto` is the machine's (`Backend.auto_mode`), or float32 if the
    teacher's logits would differ by more than `LARGEST_ERROR` or cannot be compared.
    """
    section, backend, model = (
        setting.recipe.teacher,
        setting.backend,
        setting.teachers.model,
    )
    size = setting.data.plan.image_size
    if model is None:
        return TeacherReport(NoTeacher())
    factory, mode = (
        TeacherFactory(section, model, backend, size),
        teacher_mode(section, model, backend),
    )
    error, line = {}, ""
    if section.precision == "auto" and mode.precision == "bf16":
        try:
            error, line = logit_error(replace(mode, compiled=False), factory, setting)
        except (
            Exception
        ) as failure:  # an operator without bfloat16, such as a Fourier transform
            line = f"{mode}; its forward fails ({error_summary(failure)})"
        near = error.get("of_std", math.inf) <= LARGEST_ERROR
        [near] = numbers_of_rank_0(
            backend, [near]
        )  # last bits may differ on another machine
        if not near:
            exact, error = (
                replace(mode, precision="fp32"),
                {
                    **error,
                    "refused": str(mode),
                },
            )
            line = (
                f"{exact}: in {mode}, {line.partition('; ')[2]}; {LARGEST_ERROR:g} is"
                " allowed"
            )
            mode = exact
    if mode.rebuilt:
        batch = noise(setting.split.micro_batch, size, backend)
        key = "teacher.runtime" if mode.exported else "teacher.compile"
        require(lambda: factory(mode)(batch).main, key, mode)
    live = factory(mode)
    if (
        section.pipeline
    ):  # it is split at its first batch; each rank's part is recorded before step 1
        live(noise(setting.split.micro_batch, size, backend))
    if mode.rebuilt or (mode.precision != "fp32" and not (error or line)):
        error, line = logit_error(mode, factory, setting)
    live.images = 0
    return TeacherReport(live, mode, error, line)


def teacher_mode(
    section: TeacherSection, model: TeacherModel, backend: Backend
) -> ExecutionMode:
    """Return the mode that a configuration names, or that `auto` means on this
    machine.
    """
    if model.runtime != "torch":
        return PLAIN
    runtime, precision = section.exported(cpu=backend.facts.cpu), section.precision
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
        self.plan, self.model, self.backend, self.image_size = (
            plan,
            model,
            backend,
            image_size,
        )
        self._rebuilt: dict[ExecutionMode, LiveTeacher] = {}

    def __call__(self, mode: ExecutionMode) -> LiveTeacher:
        live = self._rebuilt.get(mode) or self.on(self.backend.device, mode)
        if mode.rebuilt:
            self._rebuilt[mode] = live
        return live

    def on(self, device: torch.device, mode: ExecutionMode) -> LiveTeacher:
        plan, backend = self.plan, self.backend
        dtype = torch.float32 if mode.exported else DTYPES[mode.precision]
        shard = backend.shard if plan.shard else None
        stages = backend.pipeline if plan.pipeline else None
        change = partial(rebuild, mode, self.image_size) if mode.rebuilt else None
        live = LiveTeacher(
            self.model,
            device,
            dtype,
            plan.micro_batch,
            shard,
            stages,
            change,
            backend.facts.inference,
        )
        set_attention(live.model, mode.kernel == "fused")
        return live


def rebuild(mode: ExecutionMode, size: int, frozen: Any) -> nn.Module:
    """Return the conversion of a frozen teacher for its mode (compiled or exported),
    for images of `size` pixels.
    """
    if not mode.exported:
        from kd.models.compiled import compile_forward  # only if a compiler is used

        return compile_forward(frozen)
    from kd.models.runtimes import Exported  # only if a graph replaces torch

    if isinstance(frozen, Ensemble):
        graphs = [
            Exported(one, size, mode.kernel, mode.precision)  # type: ignore[arg-type]
            for one in frozen.members
        ]
        return Ensemble(graphs, frozen.shares, frozen.average)
    return Exported(frozen, size, mode.kernel, mode.precision)


def logit_error(
    mode: ExecutionMode, factory: TeacherFactory, setting: Setting
) -> tuple[dict[str, Any], str]:
    """Return the error of a teacher's logits relative to torch float32, in numbers and
    in words.
    """
    backend = setting.backend
    if factory.plan.shard or factory.plan.pipeline:
        return (
            {},
            f"{mode}; its logits were not compared with float32's",
        )  # this would need a second divided teacher
    alone = backend.facts.compiles  # on the CPU: 16 images would need another graph
    device = torch.device("cpu") if alone else backend.device
    live = factory.on(device, mode) if alone else factory(mode)
    shown = setting.data.shown(setting.data.val)
    images = pixels_of(readable(shown.source, PROBED)[0], shown)
    batch = Batch.of(images, torch.zeros(0, dtype=torch.int64)).to(device)
    reference_BC, logits_BC = factory.on(device, PLAIN)(batch).main, live(batch).main
    largest = (logits_BC - reference_BC).abs().max().item()
    spread = max(
        reference_BC.std(correction=0).item(), 1e-12
    )  # 0 for a constant teacher
    error = {"largest": largest, "of_std": largest / spread, "images": len(images)}
    return (
        error,
        (
            f"{mode}; its logits differ from torch float32's by {largest:.2g} at most,"
            f" {error['of_std']:.2g} of their standard deviation ({len(images)}"
            " validation images)"
        ),
    )


@torch.no_grad()
def spread_text(teachers: Teachers) -> str:
    """Describe a teacher's predictions on validation images, to show wrong weights; ""
    if it fails.
    """
    model, shown = teachers.model, teachers.data.shown(teachers.data.val)
    if not isinstance(model, Classifier) or is_on_meta(model):
        return ""
    images = pixels_of(readable(shown.source)[0], shown).to(model.scale.device)  # type: ignore[arg-type]
    logits_BC = model.eval()(images).logits.float()
    if (count := logits_BC.shape[1]) < 2:
        return ""
    several = len(logits_BC.argmax(1).unique())
    entropy = torch.distributions.Categorical(
        logits=logits_BC
    ).entropy().mean().item() / np.log(count)
    told = (
        f"{several} of {count} classes, its logits have the standard deviation"
        f" {logits_BC.std().item():.2g}"
    )
    return (
        f"; on {len(logits_BC)} images it predicts {told}, its probabilities"
        f" {entropy:.0%} of the largest entropy"
    )


def pixels_of(pictures: Sequence[Image.Image], shown: Views) -> torch.Tensor:
    """Return pictures in evaluation's view, uint8 [N, 3, S, S]."""
    views = [
        np.asarray(shown.transform(one, Random(0))).transpose(2, 0, 1)
        for one in pictures
    ]
    return torch.from_numpy(np.stack(views))


def sample(data: Data) -> torch.Tensor:
    """Return validation images for an examination, uint8 [N, 3, S, S]; noise if they do
    not exist yet.
    """
    shown = data.shown(data.val)
    try:
        return pixels_of(readable(shown.source, IMAGES)[0], shown)
    except NotPrepared:
        return random_images(data.plan.image_size)


def readable(
    source: Source, count: int = COMPARED
) -> tuple[list[Image.Image], list[int]]:
    """Return up to `count` evenly spaced images of a split, unchanged, and
    their ids.
    """
    found, ids, broken = [], [], None
    for id in evenly_spaced(len(source), count):
        try:
            found.append(source.decode(id).image)
            ids.append(id)
        except CorruptImage as error:  # data.on_corrupt decides in the run
            broken = error
    if not found and broken is not None:
        raise broken
    return found, ids
