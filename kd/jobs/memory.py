"""The memory of a run on one rank: weights, optimizer, and the peak of a step, counted without values."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kd.core.host import bf16_units
from kd.core.types import Batch, Outputs
from kd.engine.criterion import Distillation
from kd.models.classifier import set_attention
from kd.models.teacher import NoTeacher, count_parameters, on_meta
from kd.parts import registry
from kd.setup.recipe import Recipe


class Live(TorchDispatchMode):
    """The bytes of the tensors that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(tree_leaves(result))
        return result

    def note(self, tensors: Iterable[Any]) -> None:
        """Count the tensors among some values that were not counted yet."""
        storages = [one.untyped_storage() for one in tensors if isinstance(one, torch.Tensor)]
        for storage in (one for one in storages if one._cdata not in self._alive):
            self._alive.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())

    def _end(self, storage: int, size: int) -> None:
        self._alive.discard(storage)
        self.bytes -= size


def held_bytes(recipe: Recipe, distillation: Distillation, num_ranks: int) -> int:
    """Return what a student's weights, their average and its optimizer take; without gradients."""
    section = recipe.loop.optimizer
    moments = (2 if section.kind == "adamw" else 1) / (num_ranks if section.zero else 1)
    moving = sum(parameter.numel() for parameter in distillation.parameters() if parameter.requires_grad)
    average = count_parameters(distillation.student) if section.ema else 0
    return round(4 * (count_parameters(distillation) + average + moments * moving))


def step_bytes(recipe: Recipe, distillation: Distillation, teacher: Any, images: int, reduced: bool) -> int:
    """Return what a step of `images` takes at its peak, beside the weights; its gradients are part of it.

    Operators are the CPU's, on tensors that have shapes and no values; weights may be on the meta device. Not counted:
    what an operator needs inside, and what an allocator keeps. `teacher`: of torch, or None. `reduced`: gradients stay
    in the buckets of several ranks from step to step.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    logging.getLogger("torch._subclasses").setLevel(logging.CRITICAL)  # what cannot be counted is an exception too
    size, live, student, fake = (
        recipe.data.image_size,
        Live(),
        recipe.student,
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    half, fused = executed(recipe, student.precision, student.attention)
    module = on_meta(distillation, fake).train()
    set_attention(module, fused)
    live.note([*module.parameters(), *module.buffers()])
    if teacher is not None:
        low, fused = executed(recipe, recipe.teacher.precision, recipe.teacher.attention)
        teacher = on_meta(teacher, fake, torch.bfloat16 if low else None).eval()
        set_attention(teacher, fused)
        live.note([*teacher.parameters(), *teacher.buffers()])
    held = live.peak
    with fake, live:
        for parameter in module.parameters() if reduced else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        labels = student.task.no_labels(images, distillation.student.num_classes)  # type: ignore[arg-type]
        batch = Batch.of(torch.empty(images, 3, size, size, dtype=torch.uint8), labels)
        outputs = NoTeacher()(batch)
        if teacher is not None:
            with torch.no_grad():
                parts = [teacher(part) for part in batch.image.split(recipe.teacher.micro_batch or images)]
                outputs = Outputs.cat(parts).map(lambda tensor: tensor.float().clone())
            del parts
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = module(batch, outputs)[1]["loss"].mean()
        loss.backward()
    return live.peak - held


def executed(recipe: Recipe, precision: str = "auto", attention: str = "auto") -> tuple[bool, bool]:
    """Return (bfloat16, fused); `auto` as this machine's CPU means it, or a GPU."""
    cpu = registry.facts("backends", recipe.backend.kind, recipe.backend.options, "backend.kind").cpu
    half = precision == "bf16" or (precision == "auto" and (not cpu or bf16_units()))
    return half, attention == "fused" or (attention == "auto" and not cpu)
