"""Locate the first NaN or infinity by replaying the failed step. Regular steps check
nothing.

A step with a non-finite gradient changes no weight (see `Backend.step`), so the replay
starts from the same weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from kd.core.seeds import seed_from
from kd.core.types import Batch
from kd.engine.meter import Diverged
from kd.engine.run import Run


def locate_nonfinite(run: Run, error: Diverged, micros: list[Batch]) -> Diverged:
    """Return the error, extended by the first non-finite layer on this rank. All ranks
    must call it.
    """
    run.backend.seed(seed_from(run.seed, "step", error.at[0].step, run.backend.rank))
    frozen = run.distillation.frozen
    run.distillation.train()
    with frozen.held(error.at[0]) if frozen is not None else nullcontext():
        first = _first(run, micros)
    text = (
        f"{error.wrong}; first in {first}"
        if first
        else f"{error.wrong}; not in this rank's images"
    )
    return type(error)(error.config_path, text, error.allowed, error.remedy)


def _first(run: Run, micros: list[Batch]) -> str:
    """Return the first non-finite weight, input, layer, term or gradient of a step; ""
    if all are finite.
    """
    found: list[tuple[str, Tensor]] = []

    def note(name: str, *values: object) -> None:
        found.extend(
            (name, value.detach().isfinite().all())
            for value in values
            if isinstance(value, Tensor)
        )

    named = dict(run.distillation.named_parameters())
    for name, tensor in named.items():
        note(f"weight '{name}'", tensor)
    trained = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
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
        for name, gradient in reversed(
            list(zip(trained, gradients, strict=True))
        ):  # in backward order
            note(f"the gradient of '{name}'", gradient)
    flags = torch.stack([flag for _, flag in found]).tolist()
    run.backend.end_step()
    return next(
        (name for (name, _), finite in zip(found, flags, strict=True) if not finite), ""
    )


@contextmanager
def _watched(student: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    """Record the outputs of all layers in this block in order of computation, with
    compiled graphs off.
    """

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
    compiled, student._compiled_call_impl = (
        student._compiled_call_impl,
        None,
    )  # torch 2.4 has no set_stance
    try:
        yield
    finally:
        student._compiled_call_impl = compiled
        for hook in hooks:
            hook.remove()
