"""The frozen teacher: loaded, executed in the mode that is fastest here or asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from kd import parts
from kd.config.schema import RUNTIMES, TeacherSection
from kd.config.validate import installed
from kd.contracts import Backend, TeacherModel
from kd.errors import CorruptImage, ModelError
from kd.models.classifier import Ensemble, compile_forward, set_attention
from kd.models.load import Images, Spec
from kd.models.runtimes import Exported
from kd.models.teacher import LiveTeacher, NoTeacher, quantize
from kd.setup.data import Data, evenly_spaced
from kd.setup.modes import ExecutionMode, Workload, choose_plain, compare, require
from kd.setup.recipe import Session
from kd.setup.trial import Table, Work, noise, trial_images
from kd.types import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLAIN = ("fp32+fused", "fp32+unfused")
"""Torch in float32: nothing to compare."""
COMPARED = 16
"""Validation images on which a teacher is compared with itself in float32."""


def load_teacher(
    section: TeacherSection,
    classes: Sequence[str] | None,
    image_size: int,
    features: Collection[str] = (),
    folder: str = "",
    on_meta: bool = False,
    where: str = "teacher",
    images: Images | None = None,
    logits: bool = True,
    sigmoid: bool = False,
) -> TeacherModel:
    """Load one teacher with its weights; its classes must be the data's.

    Args:
        section: of the configuration; of several teachers, the first is loaded.
        classes: class names in the data's order; None: it has no labels, and the teacher's are taken. Empty: no
            classifier is needed.
        image_size: of the data, pixels.
        features: that a loss needs, by name.
        folder: an export folder (a fitted teacher) to load instead of `teacher.model`.
        on_meta: build it without weights, on the meta device: another rank has them.
        where: its config path, for messages.
        images: that it is asked about, for a teacher that answers by name.
        logits: whether a loss reads them; False: it is loaded without a classifier, for its features.
        sigmoid: whether the losses read each logit as the answer to its class alone.
    """
    kind, options, own = section.kind, section.options, not section.checkpoint
    spec = Spec(where, section.model, section.args, classes, section.checkpoint, own, True, images, logits, sigmoid)
    if folder:
        spec = Spec(where, folder, {}, classes, pretrained=True, exact_head=True, logits=logits, sigmoid=sigmoid)
    context: Any = {"image_size": image_size, "features": features}
    if not on_meta:
        model = parts.build("teachers", kind, options, f"{where}.kind", spec=spec, **context)
        _check_execution(section, model, where)
        return model
    spec = replace(spec, checkpoint="", pretrained=False, exact_head=False)
    with torch.device("meta"):
        return parts.build("teachers", kind, options, f"{where}.kind", spec=spec, **context)


def _check_execution(section: TeacherSection, model: TeacherModel, where: str) -> None:
    """Refuse ways to run a model that is not torch's: it runs as it is.

    Raises:
        ModelError: naming the key.
    """
    if not model.runs_in:
        return
    asked = {
        "attention": section.attention != "auto",
        "precision": section.precision not in ("auto", "fp32"),
        "runtime": section.runtime not in ("auto", "torch"),
        "compile": section.compile == "on",
    }
    for key, on in asked.items():
        if on:
            wrong = f"is {getattr(section, key)}, but {where} is of kind '{section.kind}' and runs in {model.runs_in}"
            remedy = f"Leave teacher.{key} out"
            raise ModelError(f"teacher.{key}", wrong, "It goes with a model of torch", remedy)


@dataclass(frozen=True, slots=True)
class TeacherReport:
    """The live teacher, and what was found out about it."""

    live: LiveTeacher | NoTeacher
    mode: str = ""
    """Its execution mode, as text; "" without a teacher."""
    table: Table = field(default_factory=dict)
    """Milliseconds of each candidate."""
    summary: str = ""
    """What was taken, why, and how far its logits are from torch float32's; "" where that is plain float32."""
    error: dict[str, float] = field(default_factory=dict)
    """Against torch float32: the largest |difference| of a logit (`largest`), the same as a share of the logits'
    standard deviation (`of_std`), and `images`; empty where nothing was compared."""


def choose_teacher(
    session: Session, section: TeacherSection, model: TeacherModel | None, images: int, recorded: str
) -> TeacherReport:
    """Build the live teacher as configured, with the fastest frozen forward where that is left open.

    Args:
        session: the backend, the sizes, and validation images to compare logits on.
        section: of the configuration.
        model: the loaded teacher, or None.
        images: how many this rank will ask of it; with none, no compiler and no runtime is tried.
        recorded: the mode of an earlier start of this run, or "".

    Raises:
        KdError: what is asked for by name, or was chosen when the run began, cannot be run here.
    """
    if model is None:
        return TeacherReport(NoTeacher())
    backend, size = session.backend, session.image_size
    factory = TeacherFactory(section, model, backend, size)
    batch = noise(trial_images(session.split.micro_batch, backend), size, backend)

    def work(name: str) -> Work:
        live = factory(name)
        return lambda: live(batch).main

    table, summary, name = {}, "", recorded or named_mode(section, backend) or (PLAIN[1] if model.runs_in else "")
    if not name:
        name, table = choose_plain(section.precision, section.attention, model, work, backend)
        if section.compile == "on":
            name += "+compiled"
        else:
            workload = Workload(images, len(batch.label), table.get(name, 0.0))
            others = candidates(section, name, model, backend)
            name, more, summary = compare(name, others, work, workload, backend)
            table |= more
    mode = ExecutionMode.parse(name)
    if mode.rebuilt:
        require(lambda: work(name)(), f"teacher.{mode.key}", f"'{name}' is asked for")
    live, error = factory(name), {}
    if not recorded and name not in PLAIN:
        error, text = logit_error(live, factory, session)
        summary = f"{summary or name}; {text}"
    live.images = 0
    return TeacherReport(live, name, table, summary, error)


def named_mode(section: TeacherSection, backend: Backend) -> str:
    """Return the mode outside torch that a configuration asks for by name; "" where torch or auto is named."""
    runtime = section.exported(cpu=backend.device.type == "cpu")
    precision = "fp32" if section.precision == "auto" else section.precision
    return str(ExecutionMode(precision, runtime)) if runtime else ""


def candidates(section: TeacherSection, best: str, model: TeacherModel, backend: Backend) -> list[str]:
    """Return the names of the forms that may be compared with the best mode in plain torch."""
    if section.shard or section.pipeline or backend.fixed_mode:
        return []
    names = []
    logits_alone = not getattr(model, "features", ())
    if section.runtime == "auto" and backend.device.type == "cpu" and logits_alone:
        modes = [*(ExecutionMode("fp32", runtime) for runtime in RUNTIMES), ExecutionMode("bf16", "openvino")]
        asked = ("fp32", "bf16") if section.precision == "auto" else (section.precision,)
        names = [str(mode) for mode in modes if installed(mode.backend) and mode.precision in asked]
    return [*names, f"{best}+compiled"] if section.compile == "auto" else names


class TeacherFactory:
    """Make the live teacher that a mode's name stands for; what takes seconds to make is made once."""

    def __init__(self, section: TeacherSection, model: TeacherModel, backend: Backend, image_size: int) -> None:
        self.section, self.model, self.backend, self.image_size = section, model, backend, image_size
        self._kept: dict[str, LiveTeacher] = {}

    def __call__(self, name: str) -> LiveTeacher:
        """Return the live teacher."""
        mode = ExecutionMode.parse(name)
        if not mode.rebuilt:
            return self._make(mode)
        if name not in self._kept:
            self._kept[name] = self._make(mode)
        return self._kept[name]

    def _make(self, mode: ExecutionMode) -> LiveTeacher:
        section, backend = self.section, self.backend
        # On a GPU the quantizers' kernels take bfloat16 beside the quantized numbers.
        other = torch.float32 if backend.device.type == "cpu" else torch.bfloat16
        dtype = torch.float32 if mode.exported else DTYPES.get(mode.precision, other)
        place = backend.shard if section.shard else None
        stages = backend.pipeline if section.pipeline else None
        change = partial(rebuild, mode, self.image_size) if mode.rebuilt else None
        live = LiveTeacher(self.model, backend.device, dtype, section.micro_batch, place, stages, change)
        set_attention(live.model, mode.backend == "fused")
        return live


def rebuild(mode: ExecutionMode, size: int, frozen: Any) -> nn.Module:
    """Return what runs instead of a frozen teacher in plain torch, for images of `size` pixels."""
    if mode.exported:
        joined = isinstance(frozen, Ensemble)
        members: Any = frozen.members if joined else [frozen]
        graphs: Any = [Exported(one, size, mode.backend, mode.precision) for one in members]
        return Ensemble(graphs, frozen.shares, frozen.sigmoid) if joined else graphs[0]
    if mode.quantized:
        quantize(frozen, mode.precision)
    return compile_forward(frozen) if mode.compiled else frozen


def logit_error(live: LiveTeacher, factory: TeacherFactory, session: Session) -> tuple[dict[str, float], str]:
    """Return how far a teacher's logits are from its own in torch float32, in numbers and in words."""
    if factory.section.shard or factory.section.pipeline or session.backend.fixed_mode:
        return {}, "its logits were not compared with float32's"  # that would divide, or compile, another teacher
    images = validation_images(session.data)
    batch = Batch.of(images, torch.zeros(0, dtype=torch.int64)).to(session.backend.device)
    reference_BC, logits_BC = factory(PLAIN[1])(batch).main, live(batch).main
    largest = (logits_BC - reference_BC).abs().max().item()
    spread = max(reference_BC.std(correction=0).item(), 1e-12)  # 0 where a teacher answers alike everywhere
    error = {"largest": largest, "of_std": largest / spread, "images": len(images)}
    return error, (
        f"its logits differ from torch float32's by {largest:.2g} at most, {error['of_std']:.2g} of their standard "
        f"deviation ({len(images)} validation images)"
    )


def validation_images(data: Data) -> torch.Tensor:
    """Return uint8 [N, 3, S, S]: images from all over the validation split as evaluation shows them.

    Raises:
        CorruptImage: none of those looked at can be decoded.
    """
    show, found, broken = data.evaluate(), [], None
    for id in evenly_spaced(len(data.val), COMPARED):
        try:
            found.append(np.asarray(show(data.val.decode(id).image, Random(0))).transpose(2, 0, 1))
        except CorruptImage as error:  # data.on_corrupt decides where the run reads it
            broken = error
    if not found and broken is not None:
        raise broken
    return torch.from_numpy(np.stack(found))
