"""The examination of a network from outside: what its outputs depend on, tried on two images before anything trains.

kd-train, kd-teach, kd-cache, `kd.distill` and kd-export call `examine`. A new question is a function in `QUESTIONS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kd.core.errors import KdError, ModelError, named
from kd.core.evaluation import Task

IMAGES = 2
"""Images of an examination: one may change the other's outputs. The second is shown as its negative, so that even two
photographs of one scene differ much."""
EXACT, INEXACT = 1e-3, 0.2
"""Largest change of an output, as a share of the largest |output|, if images are repeated, change places, or one is
alone. 30 networks of timm and transformers in float32: at most 2.6e-6; faults in small untrained networks: 0.0044 to 1.
Inexact, for an image alone: int8 whose scale is that of the batch (a dynamic int8 ViT-Tiny had 0.072) and weights of 16
bits (`examination_*.csv`)."""
SMALL, RAISED = 0.01, 0.1
"""A student's tensors below the first root mean square get noise of the second: a classifier of zeros, or a LayerScale
of 1e-5, hides what the layers before it do."""
DRAWS = 8
"""Random weights with which outputs must stay probabilities: the logits of two labels are in 0..1 by chance in a
quarter of the draws."""


def noise(size: int) -> Tensor:
    """Return random images, uint8 [2, 3, size, size], where the data's do not exist yet."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (IMAGES, 3, size, size), generator=generator, dtype=torch.uint8)


class Fault(NamedTuple):
    """What is wrong with a network: the three sentences of an error."""

    wrong: str
    allowed: str
    remedy: str


@dataclass
class Examined:
    """A network in evaluation mode, and its outputs for two images as questions read them."""

    model: Any  # returns `kd.core.types.Outputs`
    images: Tensor  # [2, ...]; on the meta device only shapes are known
    task: Task | None = None  # None: no question about the meaning of its logits
    micro_batch: int = 0  # images of a micro-batch in training; 0: it is not trained

    def outputs(self, images: Tensor) -> dict[str, Tensor]:
        """Return logits and features by name, each [B, ...]."""
        found = self.model(images)
        if not found.logits.numel() and not found.features:  # an embedding model
            return {"features": self.model.answer(images)}
        return {"logits": found.logits, **found.features}

    @cached_property
    def together(self) -> dict[str, Tensor]:
        return self.outputs(self.images)

    @cached_property
    def again(self) -> dict[str, Tensor]:
        return self.outputs(self.images)

    @cached_property
    def swapped(self) -> dict[str, Tensor]:
        """The outputs of the images in the other order, put back into the first order."""
        return {name: output.flip(0) for name, output in self.outputs(self.images.flip(0)).items()}

    @cached_property
    def alone(self) -> dict[str, Tensor]:
        """The outputs of the first image in a batch of one."""
        return self.outputs(self.images[:1])

    @property
    def exact(self) -> bool:
        """Whether it computes in float32 throughout."""
        if getattr(self.model, "runtime", "torch") != "torch":
            return False
        short = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in self.model.parameters())
        return not short and not any(".quantized" in type(module).__module__ for module in self.model.modules())

    def change(self, others: Mapping[str, Tensor]) -> float:
        """Return the largest change of an output from `together`, as a share of the largest |output|; 0 if unknown."""
        changes = [0.0]
        for name, other in others.items():
            output = self.together[name][: len(other)].float()
            if output.numel() and not output.is_meta and output.isfinite().all():
                share = (output - other).abs().max() / output.abs().max().clamp_min(1e-30)
                changes.append(share.nan_to_num(nan=float("inf")).item())
        return max(changes)


def _one_row_per_image(network: Examined) -> Fault | None:
    for images, outputs in ((IMAGES, network.together), (1, network.alone)):
        for name, output in outputs.items():
            if output.ndim < 2 or len(output) != images or (name == "logits" and output.ndim != 2):
                wrong = f"returns {name} of the shape {list(output.shape)} for a batch of {images}"
                remedy = "Keep the batch's axis: write flatten(1) in place of squeeze() or flatten()"
                return Fault(wrong, "Logits [images, classes], features [images, ...]", remedy)
    return None


def _finite(network: Examined) -> Fault | None:
    outputs = () if network.micro_batch else network.together.values()
    if all(output.is_meta or bool(output.isfinite().all()) for output in outputs):
        return None
    return Fault("returns NaN or infinity", "Finite numbers", "Check its weights")


def _repeatable(network: Examined) -> Fault | None:
    if network.change(network.swapped) <= EXACT or (change := network.change(network.again)) <= EXACT:
        return None
    wrong = f"returns different outputs for the same pixels, by {change:.2g} of the largest: "
    wrong += "it draws random numbers in evaluation too, as ViTMAE does when it masks patches"
    remedy = "Call dropout with training=self.training, or choose another network"
    return Fault(wrong, "A model whose outputs depend on pixels alone", remedy)


def _same_at_any_place(network: Examined) -> Fault | None:
    if (change := network.change(network.swapped)) <= EXACT:
        return None
    wrong = f"an image's outputs depend on its place in the batch, by {change:.2g} of the largest"
    return Fault(wrong, "A model that sees each image by itself", "Put the batch first: batch_first=True")


def _same_alone(network: Examined) -> Fault | None:
    if (change := network.change(network.alone)) <= (EXACT if network.exact else INEXACT):
        return None
    wrong = f"an image alone has other outputs than in a batch of {IMAGES}, by {change:.2g} of the largest"
    remedy = "Set batch_first=True in attention and recurrent layers, and track_running_stats=True in batch norm"
    return Fault(wrong, "A model that sees each image by itself", remedy)


def _logits(network: Examined) -> Fault | None:
    task, logits = network.task, network.together.get("logits")
    if task is None or logits is None or logits.is_meta or logits.shape[1] < 2:
        return None
    if not task.are_probabilities(logits.float()):
        return None
    for seed in range(DRAWS):
        with changed(network.model, 1.0, seed):
            drawn = network.outputs(network.images)["logits"]
        if not task.are_probabilities(drawn.float()):
            return None
    remedy = "Leave out its last Softmax or Sigmoid; with kind: torch or onnx, outputs: probabilities is another way"
    return Fault("returns probabilities", "Logits: the losses apply the softmax or sigmoid", remedy)


def _trains_on_a_micro_batch(network: Examined) -> Fault | None:
    if not network.micro_batch:
        return None
    network.model.train()
    try:
        network.model(network.images[: network.micro_batch])
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        wrong = f"its batch norm gets one value per channel, from a micro-batch of {network.micro_batch} image"
        return Fault(wrong, "Two images or more, or a map larger than 1 x 1", "Raise the batch size")
    finally:
        network.model.eval()
    return None


QUESTIONS: Sequence[Callable[[Examined], Fault | None]] = (
    _one_row_per_image,
    _finite,
    _repeatable,
    _same_at_any_place,
    _same_alone,
    _logits,
    _trains_on_a_micro_batch,
)
FAILURES = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)
"""Exceptions that networks raise for images of a wrong size."""


def fails(where: str, name: str, size: int, error: Exception) -> ModelError:
    """Return the error for a model whose forward fails."""
    remedy = f"Set data.image_size, {where}.input_size or {where}.args where it has them, or correct its preprocessing"
    wrong = f"'{name}' fails on images of {size}x{size} pixels ({named(error)})"
    return ModelError(f"{where}.model", wrong, "A model from square RGB images", remedy)


@torch.no_grad()
def examine(
    model: nn.Module,
    where: str,
    images: Tensor,
    task: Task | None = None,
    micro_batch: int = 0,
    explain: Callable[[Exception], KdError] | None = None,
) -> dict[str, Tensor]:
    """Ask a network every question of `QUESTIONS`; return its outputs for the images by name.

    Args:
        model: from images to `Outputs`; weights, buffers and mode are restored.
        where: config path or argument of its errors.
        images: [N, ...] as it will get them, N at least 1; the first two are used, the second as its negative.
        task: meaning of its logits; None: not asked.
        micro_batch: images of a micro-batch for a network that will be trained; 0: its weights are final.
        explain: returns the error for a failed forward; None: the exception is raised.

    Raises:
        ModelError: a question found a fault.
    """
    last = images[min(1, len(images) - 1)]
    pair = torch.stack([images[0], last.amin() + last.amax() - last])
    meta = any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))
    network = Examined(model, pair.to("meta") if meta else pair, task, micro_batch)
    training = model.training
    model.eval()
    trained = changed(model, RAISED, 0, below=SMALL) if micro_batch else nullcontext()
    try:
        with torch.random.fork_rng(devices=[]), full_precision(), trained:
            for question in QUESTIONS:
                if (fault := question(network)) is not None:
                    raise ModelError(where, *fault)
            return network.together
    except KdError:
        raise
    except Exception as error:  # a foreign module may raise anything
        if meta and (isinstance(error, NotImplementedError) or "meta" in str(error)):
            return {}  # an operator without a meta kernel; the run itself will show it
        if explain is None:
            raise
        raise explain(error) from error
    finally:
        model.train(training)


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices on a GPU in float32, not in TF32, whose rounding depends on the shapes."""
    switches: Sequence[Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


@contextmanager
def changed(model: nn.Module, noise: float, seed: int, below: float = float("inf")) -> Iterator[None]:
    """Add normal noise of deviation `noise` to parameters whose root mean square is less than `below`.

    At the end all parameters and buffers have their values again, bit by bit.
    """
    tensors = [tensor for tensor in itertools.chain(model.parameters(), model.buffers()) if not tensor.is_meta]
    saved = [tensor.detach().clone() for tensor in tensors]
    generator = torch.Generator().manual_seed(seed)
    try:
        for parameter in model.parameters():
            if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.detach().float().square().mean().sqrt() < below:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.detach().add_(noise * drawn.to(parameter.device, parameter.dtype))
        yield
    finally:
        for tensor, before in zip(tensors, saved, strict=True):
            tensor.detach().copy_(before)


def unused_parameters(module: nn.Module, loss: Callable[[], Tensor]) -> tuple[str, ...]:
    """Return the names of trainable parameters that get no gradient from a loss in training; all is restored."""
    training = module.training
    module.train()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), changed(module, 0.0, 0):
            loss().backward()
            return tuple(n for n, tensor in module.named_parameters() if tensor.requires_grad and tensor.grad is None)
    finally:
        module.zero_grad()
        module.train(training)


def require_apart(student: nn.Module, teachers: Mapping[str, nn.Module], where: str) -> None:
    """Require that no parameter or buffer of a student lies in a teacher's memory: training would change both."""

    def memory(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    tensors = itertools.chain(student.named_parameters(), student.named_buffers())
    owned = {memory(tensor): name for name, tensor in tensors}
    owned.pop(0, "")  # no memory: an empty tensor, or one on the meta device or on XLA
    for name, teacher in teachers.items():
        held = map(memory, itertools.chain(teacher.parameters(), teacher.buffers()))
        if shared := [owned[address] for address in held if address in owned]:
            wrong = f"shares {len(shared)} tensors with {name}, such as '{shared[0]}': training it would change {name}"
            raise ModelError(where, wrong, "Tensors of its own", "Give it a copy: copy.deepcopy(module)")
