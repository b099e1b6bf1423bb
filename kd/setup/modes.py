"""Execution modes of a model, and trial steps on noise.

Modes are configured, or chosen by facts of the machine (`auto`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from kd.config.schema import QUANTIZED, RUNTIMES
from kd.core.contracts import Backend
from kd.core.errors import KdError, ModelError, error_summary
from kd.core.ranks import numbers_of_rank_0
from kd.core.types import Batch, Outputs
from kd.engine.criterion import StudentWithLoss
from kd.models.classifier import count_attention

log = logging.getLogger("kd")

Work = Callable[[], torch.Tensor]  # does the work once and returns a tensor to sync on


@dataclass(frozen=True, slots=True)
class ExecutionMode:
    """Describe how a model is executed.

    The manifest records its text: `fp32+fused`, `bf16+unfused+compiled`,
    `int8+onnxruntime`.
    """

    precision: str
    kernel: str  # torch's attention kernel, or the runtime of an exported graph
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.precision}+{self.kernel}{'+compiled' if self.compiled else ''}"

    @property
    def exported(self) -> bool:
        return self.kernel in RUNTIMES

    @property
    def numerics(self) -> str:
        """Return the part of the mode that belongs to the cache's identity.

        Modes with equal `numerics` give equal logits up to rounding.
        """
        if self.precision in QUANTIZED:
            return f"{self.precision}+{self.kernel}"
        return self.precision

    @property
    def rebuilt(self) -> bool:
        """Return whether building it takes more than moving weights."""
        return self.exported or self.compiled


def convolution_shares(model: Any) -> tuple[float, float]:
    """Return the shares of convolutions and of depthwise ones in a network's cost.

    The cost is its number of multiplications; a share is 0 to 1.

    Counted by torch in a forward of a 64 x 64 RGB image; both are 0 if the network does
    not accept it. A depthwise convolution has as many groups as channels.
    """
    from torch.utils.flop_counter import FlopCounterMode  # only if the result decides

    def count_depthwise(module: nn.Conv2d, _: Any, output: torch.Tensor) -> None:
        nonlocal depthwise
        depthwise += 2 * output.numel() * module.weight[0].numel()

    weight = next(model.parameters(), None)
    if weight is None:
        return 0.0, 0.0
    depthwise = 0
    training = model.training
    hooks = [
        layer.register_forward_hook(count_depthwise)
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1
    ]
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8, device=weight.device)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(images)
    except Exception:  # an own network for other images: not counted
        return 0.0, 0.0
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    # a lookup, for instance, has none
    counts = counter.get_flop_counts().get("Global", {})
    total = max(1, sum(counts.values()))
    return counts.get(torch.ops.aten.convolution, 0) / total, depthwise / total


def torch_mode(
    precision: str, attention: str, compiled: bool, module: Any, backend: Backend
) -> ExecutionMode:
    """Return the mode of a module in torch.

    `auto` is chosen by machine and network, on rank 0 for all ranks.
    """
    auto_precision, auto_kernel = backend.auto_mode.split("+")
    trained = hasattr(module, "student")
    network = module.student if trained else module
    pays = (
        precision == "auto"
        and auto_precision == "bf16"
        and backend.bf16_pays(partial(convolution_shares, network), trained)
    )
    [pays] = numbers_of_rank_0(backend, [pays])
    if precision == "auto":
        precision = "bf16" if pays else "fp32"
    if attention == "auto":  # without attention layers there is one kernel
        attention = auto_kernel if count_attention(module) else "unfused"
    return ExecutionMode(precision, attention, compiled)


def require_mode(work: Work, config_path: str, mode: ExecutionMode) -> None:
    """Try a requested mode once.

    If compiling fails, try again without earlier libraries.
    """
    wrong = f"'{mode}' is requested"
    allowed = "A mode that this machine and this model support"
    remedy = f"Set {config_path}={'off' if mode.compiled else 'auto'} in a new run"
    try:
        try:
            work().sum().item()
        except KdError:
            raise
        except Exception as error:
            if not mode.compiled:
                raise
            # only where a compiler is used
            from kd.models.compiled import clear_libraries

            log.warning(
                f"{config_path}: {short_message(error)}. The compiled library is"
                " removed and compiled again."
            )
            clear_libraries()
            work().sum().item()
    except KdError as error:
        if error.config_path.startswith("teacher."):
            raise
        raise type(error)(
            config_path, f"{wrong}, but {error.wrong}", allowed, remedy
        ) from error
    except Exception as error:  # compilers and runtimes raise many types
        raise ModelError(
            config_path, f"{wrong}, but {short_message(error)}", allowed, remedy
        ) from error


def short_message(error: Any) -> str:
    """Return the message of an error, short enough for one line."""
    return error.wrong if isinstance(error, KdError) else error_summary(error)


class Trial:
    """Run training steps on noise like the loop's.

    Its exit restores gradients, statistics and training mode.
    """

    def __init__(
        self,
        distillation: StudentWithLoss,
        teacher: Callable[..., Outputs],
        backend: Backend,
        image_size: int,
        images: int,
    ) -> None:
        """Prepare steps; nothing is computed yet."""
        self.distillation = distillation
        self.teacher = teacher
        self.backend = backend
        self.image_size = image_size
        self.images = images
        self._training = distillation.training
        self._buffers: dict[str, torch.Tensor] | None = None

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._buffers is not None:
            self.distillation.train(self._training).zero_grad()
            for name, buffer in self.distillation.named_buffers():
                buffer.copy_(self._buffers[name])

    def _begin(self, training: bool) -> None:
        if self._buffers is None:
            self._buffers = {
                name: buffer.clone()
                for name, buffer in self.distillation.named_buffers()
            }
        self.distillation.train(training)

    @cached_property
    def batch(self) -> Batch:
        student: Any = self.distillation.student
        labels = self.distillation.task.no_labels(self.images, student.num_classes)
        return noise_batch(self.images, self.image_size, self.backend, labels)

    @cached_property
    def outputs(self) -> Outputs:
        return self.teacher(self.batch)

    def ask(self) -> torch.Tensor:
        return self.teacher(self.batch).main

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Run the student's forward and backward; return the loss.

        The optimizer's step follows if an optimizer is given.
        """
        self._begin(training=True)
        with self.backend.autocast():
            _, scores = self.distillation(self.batch, self.outputs)
        loss = scores["loss"].mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        self.distillation.zero_grad()
        self.backend.end_step()
        return loss.detach()

    def score(self) -> torch.Tensor:
        """Run the student's forward as in a scoring pass; return the losses [B]."""
        self._begin(training=False)
        with torch.no_grad(), self.backend.autocast():
            loss = self.distillation(self.batch, self.outputs)[1]["loss"]
        self.backend.end_step()
        return loss


def noise_batch(
    images: int, size: int, backend: Backend, labels: torch.Tensor | None = None
) -> Batch:
    """Make a batch of noise, uint8 [images, 3, size, size].

    Labels default to class 0.
    """
    image = torch.randint(256, (images, 3, size, size), dtype=torch.uint8)
    if labels is None:
        labels = torch.zeros(images, dtype=torch.int64)
    return Batch.of(image.to(backend.device), labels.to(backend.device))
