"""Examine a network from outside by questions, tried on two images before training.

kd-train, kd-teach, kd-cache, `kd.distill`, `kd.Distiller` and kd-export call `examine`.
A new question is a function in `QUESTIONS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kd.core.errors import KdError, ModelError, error_summary
from kd.models.examined import (
    ALONE,
    IMAGES,
    MIXED,
    SAME,
    SWAPPED,
    Examined,
    add_noise,
    full_precision,
    restored,
)

SMALL = 0.01
"""Root mean square below which a student's tensors get noise: a classifier of zeros, or
a LayerScale of 1e-5, hides what the layers before it do.
"""
RAISED = 0.1  # root mean square of that noise
DRAWS = 8
"""Random weights with which outputs must stay in 0..1: the logits of two labels are
there by chance in a quarter of the draws.
"""
FAILURES = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)
"""Exceptions that networks raise for images of a wrong size."""


class Fault(NamedTuple):
    """Say what is wrong with a network in the three sentences of an error."""

    wrong: str
    allowed: str
    remedy: str


def _weights_are_usable(network: Examined) -> Fault | None:
    model = network.model
    if any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
        remedy = "Run the module once on a batch of images before it is passed on"
        return Fault(
            "has lazy layers, whose weights do not exist yet",
            "Weights of known shapes",
            remedy,
        )
    if network.micro_batch and any(
        parameter.is_inference() for parameter in model.parameters()
    ):
        wrong = (
            "was made under torch.inference_mode(), so that its weights cannot be"
            " trained"
        )
        return Fault(
            wrong,
            "Weights that require a gradient",
            "Build it outside of inference_mode",
        )
    for name, tensor in model.named_parameters():
        if (
            not tensor.is_meta
            and tensor.is_floating_point()
            and not tensor.isfinite().all()
        ):
            return Fault(
                f"has NaN or infinity in '{name}'",
                "Finite weights",
                "Load other weights",
            )
    return None


def _one_row_per_image(network: Examined) -> Fault | None:
    for rows in (SAME, ALONE):
        outputs = network.together if rows is SAME else network.outputs(rows)
        for name, output in outputs.items():
            wrong_axes = output.ndim < 2 or (name == "logits" and output.ndim != 2)
            if wrong_axes or len(output) != len(rows):
                wrong = (
                    f"returns {name} of the shape {list(output.shape)} for a batch of"
                    f" {len(rows)}"
                )
                allowed = "Logits [images, classes], features [images, ...]"
                return Fault(
                    wrong,
                    allowed,
                    "Keep the batch's axis: squeeze() and flatten() may remove it",
                )
    return None


def _finite(network: Examined) -> Fault | None:
    outputs = () if network.micro_batch else network.together.values()
    if all(output.is_meta or bool(output.isfinite().all()) for output in outputs):
        return None
    return Fault("returns NaN or infinity", "Finite numbers", "Check its weights")


def _depends_on_one_image_alone(network: Examined) -> Fault | None:
    limit = network.limit
    if max(network.change(MIXED), network.change(ALONE)) <= limit:
        return None
    before = {name: tensor.clone() for name, tensor in network.model.named_buffers()}
    if (change := network.change(SAME)) > limit:
        buffers = [
            name
            for name, tensor in network.model.named_buffers()
            if not torch.equal(tensor, before[name])
        ]
        config_path = f" (its buffer '{buffers[0]}' changes)" if buffers else ""
        wrong = (
            f"returns other outputs when it gets the same images again, by {change:.2g}"
            f" of the largest{config_path}"
        )
        allowed = "In evaluation nothing is kept from earlier batches"
        return Fault(
            wrong, allowed, "Change buffers and attributes only if self.training"
        )
    if (change := network.change(SAME, seed=1)) > limit:
        wrong = (
            f"returns different outputs for the same pixels, by {change:.2g} of the"
            " largest: "
        )
        wrong += (
            "it draws random numbers in evaluation too, as ViTMAE does when it masks"
            " patches"
        )
        remedy = "Call dropout with training=self.training, or choose another network"
        return Fault(wrong, "In evaluation outputs depend on the pixels alone", remedy)
    allowed = "An image's outputs may depend on that image alone"
    if (change := network.change(SWAPPED)) > limit:
        wrong = (
            f"an image's outputs depend on its place in the batch, by {change:.2g} of"
            " the largest"
        )
        return Fault(wrong, allowed, "Put the batch first: batch_first=True")
    rows = ALONE if network.change(ALONE) > limit else MIXED
    size = "alone" if rows is ALONE else f"in a batch of {len(rows)}"
    wrong = (
        f"an image {size} has other outputs than in a batch of {IMAGES}, by"
        f" {network.change(rows):.2g} of the largest"
    )
    remedy = (
        "Look for an operation along the batch (dim 0): attention or a recurrent layer"
        " without batch_first=True, "
    )
    remedy += (
        "batch norm in training mode or with track_running_stats=False, softmax(0),"
        " mean(0), experts with a capacity"
    )
    return Fault(wrong, allowed, remedy)


def _logits(network: Examined) -> Fault | None:
    for training in (False, True) if network.micro_batch else (False,):
        network.model.train(training)
        try:
            if network.logits and _stays_in_0_to_1(network):
                remedy = (
                    "Leave out its last Softmax or Sigmoid; a teacher of kind torch may"
                    " set outputs: probabilities"
                )
                mode = " in training" if training else ""
                return Fault(
                    f"returns probabilities{mode}",
                    "Logits: the losses apply softmax or sigmoid",
                    remedy,
                )
        finally:
            network.model.eval()
    return None


def _stays_in_0_to_1(network: Examined) -> bool:
    """Return whether the outputs are within 0..1, and stay there with other weights."""
    for draw in range(DRAWS + 1):
        with restored(network.model, parameters=True):
            if draw:
                add_noise(network.model, 1.0, draw)
            logits = network.outputs().get("logits")
        if (
            logits is None
            or logits.is_meta
            or logits.shape[1] < 2
            or not ((logits >= 0) & (logits <= 1)).all()
        ):
            return False
    return True


def _trains_on_a_micro_batch(network: Examined) -> Fault | None:
    if not network.micro_batch:
        return None
    network.model.train()
    try:
        network.outputs(SAME[: network.micro_batch])
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        wrong = (
            "its batch norm gets one value per channel, from a micro-batch of"
            f" {network.micro_batch} image"
        )
        return Fault(
            wrong,
            "Two images or more, or a map larger than 1 x 1",
            "Raise the batch size",
        )
    finally:
        network.model.eval()
    return None


def _all_is_registered(network: Examined) -> Fault | None:
    registered = set(network.model.parameters())
    with torch.enable_grad():
        outputs = [
            output
            for output in network.outputs(ALONE).values()
            if output.grad_fn is not None
        ]
    unknown = [leaf for leaf in _gradient_leaves(outputs) if leaf not in registered]
    if not unknown:
        return None
    wrong = (
        f"computes with {len(unknown)} tensors that it does not list, the first of the"
        " shape "
    )
    wrong += f"{list(unknown[0].shape)}: they would be neither trained nor saved"
    return Fault(
        wrong,
        "Layers and parameters that module.parameters() lists",
        "Put layers into an nn.ModuleList",
    )


def _gradient_leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that backward of the outputs would give a gradient."""
    leaves: list[Tensor] = []
    waiting: list[Any] = [output.grad_fn for output in outputs]
    visited = set(waiting)
    while waiting:
        function = waiting.pop()
        if hasattr(function, "variable"):
            leaves.append(function.variable)
        following = {
            after for after, _ in function.next_functions if after is not None
        } - visited
        visited |= following
        waiting += following
    return leaves


QUESTIONS: Sequence[Callable[[Examined], Fault | None]] = (
    _one_row_per_image,
    _finite,
    _depends_on_one_image_alone,
    _trains_on_a_micro_batch,
    _logits,
    _all_is_registered,
)


def fails(config_path: str, name: str, size: int, error: Exception) -> ModelError:
    """Return the error for a model whose forward fails."""
    remedy = (
        f"Set data.image_size, {config_path}.input_size or {config_path}.args where it"
        " has them, or correct its preprocessing"
    )
    wrong = f"'{name}' fails on images of {size}x{size} pixels ({error_summary(error)})"
    return ModelError(
        f"{config_path}.model", wrong, "A model from square RGB images", remedy
    )


@torch.no_grad()
def examine(
    model: nn.Module,
    config_path: str,
    images: Tensor,
    logits: bool = True,
    micro_batch: int = 0,
    explain: Callable[[Exception], KdError] | None = None,
) -> dict[str, Tensor]:
    """Examine a network by all `QUESTIONS`; return its outputs for two images by name.

    Args:
        model: from images to `Outputs`; weights, buffers, modes and torch's random
            state are restored.
        config_path: config path or argument of its errors.
        images: [N, ...] as it will get them, N at least 1; the first two are used, the
            second as its negative.
        logits: its first output is for a softmax or sigmoid.
        micro_batch: images of a micro-batch for a network that will be trained; 0: its
            weights are final.
        explain: returns the error for a failed forward; None: the exception is raised.

    Raises:
        ModelError: a question found a fault.
    """
    last = images[min(1, len(images) - 1)]
    negative = last.amin() + last.amax() - last
    # an image's NaN is not its fault
    pair = torch.stack([images[0], negative]).nan_to_num()
    tensors = itertools.chain(model.parameters(), model.buffers())
    meta = any(tensor.is_meta for tensor in tensors)
    network = Examined(model, pair.to("meta") if meta else pair, logits, micro_batch)
    if (fault := _weights_are_usable(network)) is not None:
        raise ModelError(config_path, *fault)
    try:
        with restored(model, parameters=micro_batch > 0), full_precision():
            model.eval()
            if micro_batch:
                add_noise(model, RAISED, 0, below=SMALL)
            for question in QUESTIONS:
                if (fault := question(network)) is not None:
                    raise ModelError(config_path, *fault)
            return network.together
    except KdError:
        raise
    except Exception as error:  # a foreign module may raise anything
        if meta and (isinstance(error, NotImplementedError) or "meta" in str(error)):
            return {}  # an operator without a meta kernel; the run itself will show it
        if explain is None:
            raise
        raise explain(error) from error


def unused_parameters(module: nn.Module, loss: Callable[[], Tensor]) -> tuple[str, ...]:
    """Return the trainable parameters that get no gradient from a loss in training.

    They are given by name; all is restored.
    """
    with restored(module, parameters=False), torch.enable_grad():
        module.train()
        try:
            loss().backward()
            return tuple(
                name
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            )
        finally:
            module.zero_grad()


def require_apart(
    student: nn.Module, teachers: Mapping[str, nn.Module], config_path: str
) -> None:
    """Require that no tensor of a student lies in a teacher's memory.

    Training would change both.
    """

    def memory(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    named = itertools.chain(student.named_parameters(), student.named_buffers())
    owned = {memory(tensor): name for name, tensor in named}
    owned.pop(0, "")  # no memory: an empty tensor, or one on the meta device or on XLA
    for name, teacher in teachers.items():
        tensors = itertools.chain(teacher.parameters(), teacher.buffers())
        if shared := [owned[memory(t)] for t in tensors if memory(t) in owned]:
            wrong = (
                f"shares {len(shared)} tensors with {name}, such as '{shared[0]}':"
                f" training it would change {name}"
            )
            raise ModelError(
                config_path,
                wrong,
                "The student has tensors of its own",
                "Pass a copy: copy.deepcopy(module)",
            )
