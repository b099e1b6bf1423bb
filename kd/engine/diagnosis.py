"""Locate the first NaN or infinity by replaying the failed step.

Regular steps check nothing. A step with a non-finite gradient changes no weight (see
`Backend.step`), so the replay starts from the same weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kd.core.seeds import seed_from
from kd.core.types import Batch
from kd.engine.meter import Diverged
from kd.engine.run import Run


def locate_nonfinite(run: Run, error: Diverged, micros: list[Batch]) -> Diverged:
    """Return the error with the first non-finite layer; all ranks must call it."""
    state, _ = error.at
    run.backend.seed(seed_from(run.seed, "step", state.step, run.backend.rank))
    run.distillation.train()
    with run.distillation.frozen_layers(state):
        layer = _first_nonfinite(run, micros)
    place = f"first in {layer}" if layer else "not in this rank's images"
    wrong = f"{error.wrong}; {place}"
    return type(error)(error.config_path, wrong, error.allowed, error.remedy)


def _first_nonfinite(run: Run, micros: list[Batch]) -> str:
    """Return the first non-finite tensor of a step by name, or "" if all are finite."""
    names: list[str] = []
    flags: list[Tensor] = []

    def note(name: str, value: object) -> None:
        if isinstance(value, Tensor):
            names.append(name)
            flags.append(value.detach().isfinite().all())

    trained = {}
    for name, tensor in run.distillation.named_parameters():
        note(f"weight '{name}'", tensor)
        if tensor.requires_grad:
            trained[name] = tensor
    for batch in micros:
        for id, image in zip(batch.ids.tolist(), batch.image, strict=True):
            note(f"image {id}", image)
        teacher = run.teacher(batch)
        note("the teacher's logits", teacher.logits)
        with _watched(run.distillation.student, note), run.backend.autocast():
            _, scores = run.distillation(batch, teacher)
        for name, score_B in scores.items():
            note(f"loss term '{name}'", score_B)
        gradients = torch.autograd.grad(
            scores["loss"].mean(), list(trained.values()), allow_unused=True
        )
        backward_order = reversed(list(zip(trained, gradients, strict=True)))
        for name, gradient in backward_order:
            note(f"the gradient of '{name}'", gradient)
    finite = torch.stack(flags).tolist()
    run.backend.end_step()
    return "" if all(finite) else names[finite.index(False)]


@contextmanager
def _watched(student: nn.Module, note: Callable[[str, object], None]) -> Iterator[None]:
    """Note all layers' outputs in order of computation, with compiled graphs off."""

    def watch(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: note(
            f"the output of layer '{name}'", output
        )

    leaves = [
        (name, module)
        for name, module in student.named_modules()
        if not list(module.children())
    ]
    hooks = [module.register_forward_hook(watch(name)) for name, module in leaves]
    # torch 2.4 has no set_stance
    compiled_call = student._compiled_call_impl
    student._compiled_call_impl = None
    try:
        yield
    finally:
        student._compiled_call_impl = compiled_call
        for hook in hooks:
            hook.remove()
