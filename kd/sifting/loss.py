"""The user's loss a sample, and how it is evaluated without leaving a trace in the training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kd.sifting.batch import SiftingBatch, to_device
from kd.sifting.config import LossImplementationNotProvidedException


class Loss:
    """The loss of each sample, for sifting: derive from it and write `loss`."""

    def loss(self, model: nn.Module, transformed_batch: SiftingBatch, original_batch: Any = None) -> Tensor:
        """Return one loss a sample, float [B], with `reduction="none"`.

        Args:
            model: the model that was given to the loader.
            transformed_batch: the batch as `batch_transforms` made it.
            original_batch: the batch as the original loader gave it, on the model's device.
        """
        raise LossImplementationNotProvidedException(
            "loss_impl",
            f"{type(self).__name__} does not implement loss()",
            "loss(self, model, transformed_batch, original_batch) must return one value a sample",
            "Write it as a method; an attribute of that name set in __init__ does not count",
        )


LossMethod = Callable[[nn.Module, SiftingBatch, Any], Tensor]


def method_of(loss_impl: Any) -> LossMethod:
    """Return the `loss` method of a user's object, whether or not it derives from `Loss`.

    Taken from the class, because Amazon's own example hides it behind an attribute: `self.loss = CrossEntropyLoss()`.

    Raises:
        LossImplementationNotProvidedException: there is none.
    """
    if loss_impl is None or isinstance(loss_impl, type):
        wrong = "is missing" if loss_impl is None else f"is the class {loss_impl.__name__}, not an object of it"
        raise LossImplementationNotProvidedException(
            "loss_impl",
            wrong,
            "It must be an object of a class derived from kd.sifting.Loss",
            "Pass loss_impl=MyLoss()",
        )
    method = getattr(type(loss_impl), "loss", None)
    if not callable(method) or method is Loss.loss:
        Loss.loss(loss_impl, None, None)  # type: ignore[arg-type]
    return getattr(type(loss_impl), "loss").__get__(loss_impl)  # noqa: B009


def losses_of(method: LossMethod, model: nn.Module, sifting: SiftingBatch, original: Any) -> Tensor:
    """Return the losses [B] of a batch from the model as it is, in evaluation mode, without a gradient.

    Raises:
        LossImplementationNotProvidedException: not one value a sample.
    """
    device = device_of(model)
    with undisturbed(model, device):
        losses = method(model, sifting, to_device(original, device))
    size = len(sifting)
    if not isinstance(losses, Tensor) or losses.numel() != size or (losses.ndim and len(losses) != size):
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise LossImplementationNotProvidedException(
            "loss_impl",
            f"loss() returned {shape} for {size} samples",
            f"One value a sample is needed: [{size}]",
            'Use reduction="none", and the mean over whatever else one sample has',
        )
    return losses.detach().reshape(size)


def device_of(model: nn.Module) -> torch.device:
    """Return where the model lies."""
    tensor = next(model.parameters(), None)
    tensor = next(model.buffers(), None) if tensor is None else tensor
    return torch.device("cpu") if tensor is None else tensor.device


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate inside; afterwards each submodule's mode and the random states are what they were.

    DDP broadcasts its buffers in a forward pass. Scoring must not: ranks may score different numbers of batches, and
    one that broadcasts alone waits forever.
    """
    modes = [(module, module.training) for module in model.modules()]
    synced = [(m, m.require_forward_param_sync) for m, _ in modes if isinstance(m, DistributedDataParallel)]
    kind = device.type if device.type in ("cuda", "xpu") else "cuda"
    devices = [device.index or 0] if device.type == kind else []
    with torch.random.fork_rng(devices, device_type=kind), torch.no_grad():
        try:
            model.eval()
            for module, _ in synced:
                module.require_forward_param_sync = False
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, flag in synced:
                module.require_forward_param_sync = flag
            # Inside the user's autocast a weight cast without a gradient would be taken for the training step.
            torch.clear_autocast_cache()
