"""Execution modes of a model, as configured or (auto) by facts of the machine; trial
steps on noise.
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
    """How a model is executed. The manifest records its text: `fp32+fused`,
    `bf16+unfused+compiled`, `int8+onnxruntime`.
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
        """Part of the cache's identity: modes with equal `numerics` give equal logits
        up to rounding.
        """
        return (
            f"{self.precision}+{self.kernel}"
            if self.precision in QUANTIZED
            else self.precision
        )

    @property
    def rebuilt(self) -> bool:
        """Whether building it takes more than moving weights."""
        return self.exported or self.compiled


def made_of(model: Any) -> tuple[float, float]:
    """Return which shares of a network's multiplications are in convolutions, and in
    depthwise ones, 0 to 1.

    Counted by torch in a forward of a 64 x 64 RGB image; both are 0 if the network does
    not accept it. A depthwise convolution has as many groups as channels.
    """
    from torch.utils.flop_counter import FlopCounterMode  # only if the result decides

    def note(module: nn.Conv2d, given: Any, output: torch.Tensor) -> None:
        depthwise.append(2 * output.numel() * module.weight[0].numel())

    weight = next(iter(model.parameters()), None)
    if weight is None:
        return 0.0, 0.0
    training, depthwise = model.training, [0]
    convolutions = [
        one
        for one in model.modules()
        if isinstance(one, nn.Conv2d) and one.groups == one.in_channels > 1
    ]
    hooks = [one.register_forward_hook(note) for one in convolutions]
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(
                torch.zeros(2, 3, 64, 64, dtype=torch.uint8, device=weight.device)
            )
    except Exception:  # an own network for other images: not counted
        return 0.0, 0.0
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    counts = counter.get_flop_counts().get(
        "Global", {}
    )  # a lookup, for instance, has none
    total = max(1, sum(counts.values()))
    return counts.get(torch.ops.aten.convolution, 0) / total, sum(depthwise) / total


def torch_mode(
    precision: str, attention: str, compiled: bool, module: Any, backend: Backend
) -> ExecutionMode:
    """Return the mode of a module in torch; `auto`: chosen by machine and network, on
    rank 0 for all ranks.
    """
    own_precision, own_kernel = backend.auto_mode.split("+")
    network, trained = getattr(module, "student", module), hasattr(module, "student")
    pays = (
        precision == "auto"
        and own_precision == "bf16"
        and backend.bf16_pays(partial(made_of, network), trained)
    )
    [pays] = numbers_of_rank_0(backend, [pays])
    precision = ("bf16" if pays else "fp32") if precision == "auto" else precision
    if attention == "auto":  # without attention layers there is one kernel
        attention = own_kernel if count_attention(module) else "unfused"
    return ExecutionMode(precision, attention, compiled)


def require(work: Work, config_path: str, mode: ExecutionMode) -> None:
    """Try a requested mode once; if compiling fails, try again without earlier
    libraries.
    """
    wrong, allowed = (
        f"'{mode}' is requested",
        "A mode that this machine and this model support",
    )
    remedy = f"Set {config_path}={'off' if mode.compiled else 'auto'} in a new run"
    try:
        try:
            work().sum().item()
        except KdError:
            raise
        except Exception as error:
            if not mode.compiled:
                raise
            from kd.models.compiled import (
                clear_libraries,
            )  # only where a compiler is used

            log.warning(
                f"{config_path}: {in_short(error)}. The compiled library is removed and"
                " compiled again."
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
            config_path, f"{wrong}, but {in_short(error)}", allowed, remedy
        ) from error


def in_short(error: Any) -> str:
    """Return the message of an error, short enough for one line."""
    return error.wrong if isinstance(error, KdError) else error_summary(error)


class Trial:
    """Training steps on noise like the loop's; its exit restores gradients, statistics
    and training mode.
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
        self.distillation, self.teacher, self.backend = distillation, teacher, backend
        self.image_size, self.images = image_size, images
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
        return noise(self.images, self.image_size, self.backend, labels)

    @cached_property
    def outputs(self) -> Outputs:
        return self.teacher(self.batch)

    def ask(self) -> torch.Tensor:
        return self.teacher(self.batch).main

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Run the student's forward and backward, and the optimizer's step if given;
        return the loss.
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


def noise(
    images: int, size: int, backend: Backend, labels: torch.Tensor | None = None
) -> Batch:
    """Make a batch of noise, uint8 [images, 3, size, size]; labels default to
    class 0.
    """
    image = torch.randint(256, (images, 3, size, size), dtype=torch.uint8).to(
        backend.device
    )
    labels = torch.zeros(images, dtype=torch.int64) if labels is None else labels
    return Batch.of(image, labels.to(image.device))
