"""The user's loss per sample is evaluated without side effects on the training."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kd.sifting.batch import SiftingBatch
from kd.sifting.config import LossImplementationNotProvidedException
from kd.sifting.formats import to_device


class Loss:
    """Derive from this class and implement `loss`, the loss per sample."""

    def loss(
        self,
        model: nn.Module,
        transformed_batch: SiftingBatch,
        original_batch: Any = None,
    ) -> Tensor:
        """Return one loss per sample, float [B], with `reduction="none"`.

        Args:
            model: the loader's model.
            transformed_batch: the batch after `batch_transforms`.
            original_batch: the batch of the original loader, on the model's device.
        """
        raise _not_implemented(self)


LossMethod = Callable[[nn.Module, SiftingBatch, Any], Tensor]


def method_of(loss_impl: Any) -> LossMethod:
    """Return the `loss` method of a user's object.

    The object need not derive from `Loss`.

    Read from the class, because Amazon's example sets an attribute of that name:
    `self.loss = CrossEntropyLoss()`.
    """
    if loss_impl is None or isinstance(loss_impl, type):
        wrong = "is missing"
        if loss_impl is not None:
            wrong = f"is the class {loss_impl.__name__}, not an instance"
        allowed = "It must be an object of a class derived from kd.sifting.Loss"
        raise LossImplementationNotProvidedException(
            "loss_impl", wrong, allowed, "Pass loss_impl=MyLoss()"
        )
    method = getattr(type(loss_impl), "loss", None)
    if not callable(method) or method is Loss.loss:
        raise _not_implemented(loss_impl)
    return cast("LossMethod", partial(method, loss_impl))


def _not_implemented(loss_impl: Any) -> LossImplementationNotProvidedException:
    wrong = f"{type(loss_impl).__name__} does not implement loss()"
    allowed = (
        "loss(self, model, transformed_batch, original_batch) must return one value per"
        " sample"
    )
    remedy = (
        "Write it as a method; an attribute of that name set in __init__ is not used"
    )
    return LossImplementationNotProvidedException("loss_impl", wrong, allowed, remedy)


def losses_of(
    method: LossMethod, model: nn.Module, sifting: SiftingBatch, original: Any
) -> Tensor:
    """Return the losses [B] of a batch by the current model.

    The model is in evaluation mode, and no gradients are computed.
    """
    device = device_of(model)
    with _scoring_mode(model, device):
        losses = method(model, sifting, to_device(original, device))
    size = len(sifting)
    if (
        not isinstance(losses, Tensor)
        or losses.numel() != size
        or (losses.ndim and len(losses) != size)
    ):
        returned: Any = type(losses).__name__
        if isinstance(losses, Tensor):
            returned = list(losses.shape)
        wrong = f"loss() returned {returned} for {size} samples"
        allowed = f"One value per sample is needed: [{size}]"
        remedy = (
            'Use reduction="none", and the mean over the other dimensions of a sample'
        )
        raise LossImplementationNotProvidedException(
            "loss_impl", wrong, allowed, remedy
        )
    return losses.detach().reshape(size)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


@contextmanager
def _scoring_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch to evaluation mode.

    On exit each submodule's mode and the random states are restored.

    DDP's broadcast of buffers in the forward pass is switched off: ranks may score
    different numbers of batches, and a rank that broadcasts alone would hang. torch
    documents no switch for it after construction; the attribute was checked in torch
    2.15.
    """
    modes = [(module, module.training) for module in model.modules()]
    synced = [
        (module, module.require_forward_param_sync)
        for module, _ in modes
        if isinstance(module, DistributedDataParallel)
    ]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, device_type="cuda"), torch.no_grad():
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
            # Inside the user's autocast, the training step would reuse weights that
            # were cast without gradients.
            torch.clear_autocast_cache()
