"""The live teacher: precision, attention kernel, compiler and runtime of its frozen forward, measured or as asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from kd.config import Config
from kd.contracts import Backend, Source, Teacher
from kd.data.transforms import Evaluate
from kd.errors import ConfigError, DataError, KdError, MissingExtra
from kd.models.classifier import compile_forward, set_attention
from kd.models.ensemble import Ensemble, TeacherModel
from kd.models.quantize import quantize
from kd.models.runtime import RUNTIMES, Exported
from kd.models.teacher import LiveTeacher, NoTeacher
from kd.start.kernels import (
    QUANTIZED,
    Effort,
    Kernel,
    Table,
    challenge,
    demanded,
    images_of,
    in_stages,
    options,
    trial_batch,
)
from kd.types import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GPUS, COMPILERS = ("cuda", "smddp"), ("xla", "neuron")
"""Backends on NVIDIA GPUs; backends that compile everything by themselves."""
PLAIN = ("fp32+fused", "fp32+unfused")
"""Torch in float32: nothing to compare."""
LOOKED_AT = 16
"""Validation images on which a teacher is compared with itself in float32."""


@dataclass(frozen=True, slots=True)
class Taught:
    """What was found out about the live teacher."""

    table: Table = field(default_factory=dict)
    """Milliseconds of each candidate."""
    told: str = ""
    """What was taken, why, and how far its logits are from torch float32's; empty where that is plain float32."""
    error: dict[str, float] = field(default_factory=dict)
    """Against torch float32: the largest |difference| of a logit (`largest`), the same as a share of the logits'
    standard deviation (`of_std`), and `images`; empty where nothing was compared."""


def choose_teacher(
    config: Config,
    model: TeacherModel | None,
    pictures: Source,
    micro: int,
    backend: Backend,
    choices: dict[str, str],
    images: int = 0,
) -> tuple[Teacher, Taught]:
    """Build the live teacher as configured, with the fastest frozen forward where that is left open.

    Args:
        config: of the run.
        model: the loaded teacher, or None.
        pictures: what its logits are compared on.
        micro: images of a micro-batch.
        backend: where it runs.
        choices: what was chosen before; completed.
        images: how many this rank will ask of it; with none, no compiler and no runtime is tried.

    Raises:
        KdError: what is asked for by name, or was chosen when the run began, cannot be run here.
    """
    if model is None:
        return NoTeacher(), Taught()
    forge, batch, pinned = Forge(config, model, backend), trial_batch(config, micro, backend), choices.get("teacher")

    def work(name: str) -> Callable[[], torch.Tensor]:
        live = forge(name)
        return lambda: live(batch).logits

    table, told, asked = {}, "", pinned or asked_for(config)
    if asked:
        name = asked
    else:
        stages = options(config.teacher.precision, config.teacher.attention, None, backend.fixed_mode, model)
        name, table = in_stages(*stages, work, backend)
        if config.teacher.compile == "on":
            name += "+compiled"
        else:
            effort = Effort(images, len(batch.label), table.get(name, 0.0))
            name, more, told = challenge(name, rivals(config, name, model, backend), work, effort, backend)
            table |= more
    if Kernel.parse(name).remade:
        demanded(lambda: work(name)(), f"teacher.{Kernel.parse(name).key}", f"'{name}' is asked for")
    live, choices["teacher"] = forge(name), name
    error: dict[str, float] = {}
    if not pinned and name not in PLAIN:
        error, said = compared(config, live, forge, pictures, backend)
        told = f"{told or name}; {said}"
    live.images = 0
    return live, Taught(table, told, error)


def asked_for(config: Config) -> str:
    """Return the kernel outside torch that a configuration asks for by name; "" where torch or auto is named."""
    section = config.teacher
    runtime = section.runtime
    if runtime == "auto" and section.precision == "int8" and config.backend.kind == "cpu":
        runtime = "onnxruntime"
    return str(Kernel("int8" if section.precision == "int8" else "fp32", runtime)) if runtime in RUNTIMES else ""


def rivals(config: Config, best: str, model: TeacherModel, backend: Backend) -> list[str]:
    """Return the names of what may race against the best kernel of plain torch."""
    section = config.teacher
    if section.shard or section.pipeline or backend.fixed_mode:
        return []
    names = []
    exact = section.precision in ("auto", "fp32") and not getattr(model, "with_features", False)
    if section.runtime == "auto" and backend.kind == "cpu" and exact:
        names = [str(Kernel("fp32", runtime)) for runtime in RUNTIMES if installed(runtime)]
    return [*names, f"{best}+compiled"] if section.compile == "auto" else names


class Forge:
    """Make the live teacher that a kernel's name stands for; what takes seconds to make is made once."""

    def __init__(self, config: Config, model: TeacherModel, backend: Backend) -> None:
        self.config, self.model, self.backend = config, model, backend
        self._kept: dict[str, LiveTeacher] = {}

    def __call__(self, name: str) -> LiveTeacher:
        """Return the live teacher."""
        kernel = Kernel.parse(name)
        if not kernel.remade:
            return self._made(kernel, None)
        if name not in self._kept:
            self._kept[name] = self._made(kernel, partial(remade, kernel, self.config.data.image_size))
        return self._kept[name]

    def _made(self, kernel: Kernel, remake: Callable[[Any], nn.Module] | None) -> LiveTeacher:
        section, backend = self.config.teacher, self.backend
        # On a GPU the quantizers' kernels take bfloat16 beside the quantized numbers.
        wide = kernel.exported or backend.device.type == "cpu"
        dtype = DTYPES.get(kernel.precision, torch.float32 if wide else torch.bfloat16)
        place = backend.shard if section.shard else None
        stages = backend.pipeline if section.pipeline else None
        live = LiveTeacher(self.model, backend.device, dtype, section.micro_batch, place, stages, remake)
        set_attention(live.model, kernel.how == "fused")
        return live


def remade(kernel: Kernel, size: int, frozen: Any) -> nn.Module:
    """Return what runs instead of a frozen teacher in plain torch, for images of `size` pixels."""
    if kernel.exported:
        joined, int8 = isinstance(frozen, Ensemble), kernel.precision == "int8"
        graphs: Any = [Exported(one, size, kernel.how, int8) for one in (frozen.members if joined else [frozen])]
        return Ensemble(graphs, frozen.shares) if joined else graphs[0]
    if kernel.quantized:
        quantize(frozen, kernel.precision)
    return compile_forward(frozen) if kernel.compiled else frozen


def asked_of_teacher(config: Config, num_images: int, batch_size: int, world_size: int) -> int:
    """Return of how many images at most one rank asks the teacher in the whole run."""
    whole, views = images_of(config, num_images, batch_size, world_size), config.teacher.cache.views
    return min(whole, views * num_images // world_size) if views else whole


def found_of_teacher(config: Config, live: Teacher, taught: Taught, backend: Backend) -> dict[str, Any]:
    """Return what the manifest says of the live teacher besides its kernel, where there is something to say."""
    facts: dict[str, Any] = {"teacher_error": taught.error} if taught.error else {}
    if isinstance(live, LiveTeacher) and (config.teacher.shard or config.teacher.pipeline):
        facts["teacher_mib"] = {"whole": live.mib, "rank": backend.counters()["teacher_mib"]}
    return facts


# ------------------------------------------------------------------------------------------------ the logit error


def compared(
    config: Config, live: LiveTeacher, forge: Forge, pictures: Source, backend: Backend
) -> tuple[dict[str, float], str]:
    """Return how far a teacher's logits are from its own in torch float32, in numbers and in words."""
    if config.teacher.shard or config.teacher.pipeline or backend.fixed_mode:
        return {}, "its logits were not compared with float32's"  # that would divide, or compile, another teacher
    batch = Batch.of(validation_images(config, pictures), torch.zeros(0, dtype=torch.int64)).to(backend.device)
    reference_BC, said_BC = forge(PLAIN[1])(batch).logits, live(batch).logits
    largest = (said_BC - reference_BC).abs().max().item()
    spread = max(reference_BC.std(correction=0).item(), 1e-12)  # 0 where a teacher says the same of everything
    error = {"largest": largest, "of_std": largest / spread, "images": len(batch.image)}
    return error, (
        f"its logits differ from torch float32's by {largest:.2g} at most, {error['of_std']:.2g} of their standard "
        f"deviation ({len(batch.image)} validation images)"
    )


def validation_images(config: Config, source: Source) -> torch.Tensor:
    """Return uint8 [N, 3, S, S]: N images from all over the validation split as evaluation shows them.

    Raises:
        DataError: none of those looked at can be decoded.
    """
    show = Evaluate(config.data.image_size, config.data.eval_crop)
    count, found, broken = min(LOOKED_AT, len(source)), [], None
    for id in (number * len(source) // count for number in range(count)):
        try:
            found.append(np.asarray(show(source.decode(id), Random(0))).transpose(2, 0, 1))
        except DataError as error:  # data.on_corrupt decides what becomes of it where the run reads it
            broken = error
    if not found and broken is not None:
        raise broken
    return torch.from_numpy(np.stack(found))


# ------------------------------------------------------------------------------------------------ what cannot be


def refusals(config: Config, features: bool) -> Iterator[KdError]:
    """Yield what a configuration asks of the live teacher, or of a compiler, and cannot have.

    Args:
        config: the configuration; its backend's kind is resolved.
        features: whether a loss needs the teacher's features.
    """
    kind = config.backend.kind
    for section, where in ((config.teacher, "teacher"), (config.student, "student")):
        if section.compile == "on" and kind in COMPILERS:
            wrong = f"is on, but backend '{kind}' compiles by itself"
            yield ConfigError(f"{where}.compile", wrong, "auto or off", f"Set {where}.compile=auto")
    if not config.teacher.model:
        return
    yield from _undivided(config)
    yield from _graphs(config, features)
    yield from _quantized(config, features)


def _undivided(config: Config) -> Iterator[KdError]:
    section = config.teacher
    if not (section.shard or section.pipeline):
        return
    named = {"runtime": section.runtime in RUNTIMES, "precision": section.precision in QUANTIZED}
    for key, on in {**named, "compile": section.compile == "on"}.items():
        if on:
            wrong = f"is {getattr(section, key)}, but the teacher is divided over ranks, which plain torch does"
            remedy = f"Set teacher.{key}=auto, or leave teacher.shard and teacher.pipeline out"
            yield ConfigError(f"teacher.{key}", wrong, "", remedy)
    if section.cache.views:
        wrong = "asks the teacher for other images on each rank, but a divided teacher needs all ranks to ask together"
        allowed = "A cache, or teacher.shard / teacher.pipeline"
        yield ConfigError("teacher.cache.views", wrong, allowed, "Leave one of them out")


def _graphs(config: Config, features: bool) -> Iterator[KdError]:
    section, where, kind = config.teacher, "teacher.runtime", config.backend.kind
    runtime = section.runtime
    if runtime not in RUNTIMES:
        return
    if kind != "cpu":
        allowed, wrong = (
            "onnxruntime and openvino run on backend.kind=cpu",
            f"is {runtime}, but the backend is '{kind}'",
        )
        yield ConfigError(where, wrong, allowed, "Set teacher.runtime=torch")
    if features:
        wrong = f"is {runtime}, but a loss needs the teacher's features, and an exported graph returns logits alone"
        yield ConfigError(where, wrong, "torch, or losses of logits", "Set teacher.runtime=torch")
    if section.compile == "on":
        wrong = f"is {runtime}, but teacher.compile is on, and torch.compile is torch's"
        yield ConfigError(where, wrong, "One of the two", "Set teacher.compile=auto or teacher.runtime=torch")
    precisions = ("auto", "fp32", "int8") if runtime == "onnxruntime" else ("auto", "fp32")
    if section.precision not in precisions:
        wrong = f"is {section.precision}, which kd does not run on {runtime}"
        remedy = "Set teacher.precision=auto, or another teacher.runtime"
        yield ConfigError("teacher.precision", wrong, f"On {runtime}: {', '.join(precisions)}", remedy)
    if not installed(runtime):
        extra = "kd[openvino]" if runtime == "openvino" else runtime
        remedy = f"pip install '{extra}', or set teacher.runtime=torch"
        yield MissingExtra(where, f"is {runtime}, which is not installed", "", remedy)


def _quantized(config: Config, features: bool) -> Iterator[KdError]:
    section, where, kind = config.teacher, "teacher.precision", config.backend.kind
    if section.precision not in QUANTIZED or section.runtime in RUNTIMES:
        return
    backends = GPUS if section.precision == "fp8" else ("cpu", *GPUS)
    if kind not in backends:
        allowed = f"{section.precision} goes with backends {', '.join(backends)}"
        wrong = f"is {section.precision}, which backend '{kind}' does not have"
        yield ConfigError(where, wrong, allowed, "Set teacher.precision=auto")
    elif asked_for(config):
        if features or section.compile == "on":
            why = "a loss needs the teacher's features" if features else "teacher.compile is on"
            wrong = f"is int8, which on a CPU runs as a graph of onnxruntime, but {why}"
            yield ConfigError(
                where, wrong, "torch has int8 too, many times slower on a CPU", "Set teacher.runtime=torch"
            )
    elif not installed("torchao"):
        remedy = "pip install 'kd[quantize]', or set teacher.precision=auto"
        yield MissingExtra(where, f"is {section.precision}, for which torch needs torchao", "", remedy)


def installed(package: str) -> bool:
    """Return whether a package can be found; nothing is imported."""
    return importlib.util.find_spec(package) is not None
