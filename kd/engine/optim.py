"""Parameter groups, the learning rate schedule, averaged weights, frozen layers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from kd.core.types import State


def groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into a group with weight decay and one without."""
    # Without decay: vectors (biases, norms, layer scales), and parameters that match a
    # pattern of a timm model's `no_weight_decay` (position embeddings, class and
    # register tokens). An empty group, which ZeroRedundancyOptimizer does not accept,
    # is left out.
    decayed = []
    undecayed = []
    for module in modules:
        patterns = getattr(module, "no_weight_decay", set)()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                exempt = parameter.ndim <= 1 or _matches(name, patterns)
                (undecayed if exempt else decayed).append(parameter)
    both = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in both if group["params"]]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def scaled(
    groups: Iterable[dict[str, Any]], factors: Mapping[nn.Parameter, float]
) -> list[dict[str, Any]]:
    """Split groups by learning rate, which is `lr_scale` times a parameter's factor."""
    split = []
    for group in groups:
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            scale = group.get("lr_scale", 1.0) * factors.get(parameter, 1.0)
            by_scale.setdefault(scale, []).append(parameter)
        for scale, parameters in by_scale.items():
            split.append({**group, "params": parameters, "lr_scale": scale})
    return split


@dataclass(frozen=True, slots=True)
class Schedule:
    """Set the learning rate: linear warm-up, then cosine decay or a constant rate."""

    # arXiv:1608.03983, without restarts. Stateless: the rate is a function of the
    # progress, so checkpoints do not contain it.

    lr: float  # peak learning rate
    warmup: float  # length of the warm-up as a share of the run, 0 to 1
    min_lr: float  # final rate as a share of `lr`
    shape: str = "cosine"

    def factor(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        if self.shape == "constant":
            return 1.0
        after = min(1.0, (progress - self.warmup) / max(1e-12, 1 - self.warmup))
        return self.min_lr + (1 - self.min_lr) * (1 + math.cos(math.pi * after)) / 2

    def apply(self, optimizer: torch.optim.Optimizer, progress: float) -> float:
        """Set the rate of each group times its `lr_scale`; return the unscaled rate."""
        lr = self.lr * self.factor(progress)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr


STATISTICS = ("running_mean", "running_var")
"""Names of batch norm's statistics, the only buffers that are averaged beside the
parameters. Against copied ones (a CNN of 3 batch norms, 10 classes of noisy patterns, 5
seeds, learning rates 0.003 and 0.01), after 50 steps the loss was 3 and 6 % lower and
the accuracy 0.7 and 0.4 points lower; after 500 they were within 2 % and 0.03 points.
"""


class EMA:
    """Keep a moving average of a module's parameters and batch norm statistics.

    Any other buffer stays as it is: averaged vectors of a power iteration, indices or
    masks mean nothing.
    """

    # average <- decay * average + (1 - decay) * weight. The decay is at most (1 + step)
    # / (10 + step), so that the initial weights fade early. Cost: one foreach call per
    # step, and a float32 copy of the student.

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        # The parameters themselves, not state_dict(): ZeRO replaces their storage
        # later.
        named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for name in module.state_dict():
            if name.endswith(STATISTICS):
                named[name] = buffers[name]
        named = {
            name: tensor
            for name, tensor in named.items()
            if tensor.is_floating_point() or tensor.is_complex()
        }
        # a shared tensor (tied weights) has several names
        weights = {id(tensor): tensor for tensor in named.values()}
        averages = {key: tensor.detach().clone() for key, tensor in weights.items()}
        self._averages = [*averages.values()]
        self._weights = [*weights.values()]
        self.average = {name: averages[id(tensor)] for name, tensor in named.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimizer step number `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Load the average into the module, and restore the weights on exit."""
        copies = [weight.detach().clone() for weight in self._weights]
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, copies)

    @torch.no_grad()
    def apply(self) -> None:
        torch._foreach_copy_(self._weights, self._averages)

    def load(self, average: dict[str, Tensor]) -> None:
        torch._foreach_copy_(
            [*self.average.values()], [average[name] for name in self.average]
        )


class Frozen:
    """Freeze parameters and batch norm statistics for some epochs or the whole run."""

    # The frozen set is a function of the epoch, so checkpoints do not contain it. An
    # optimizer skips a parameter without a gradient: neither weight decay nor momentum
    # changes it. If only some epochs are frozen, gradients are computed and dropped,
    # because DDP reduces the parameters that it was built with.

    def __init__(
        self, network: nn.Module, patterns: Sequence[str], epochs: int
    ) -> None:
        """Freeze the parameters whose names match a pattern (fnmatch) for `epochs`."""
        # 0 epochs: the whole run, without computing gradients.
        self.network = network
        self.epochs = epochs
        named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        matching = {id(named[name]) for name in named if _matches(name, patterns)}
        self.names = {
            name
            for name, parameter in network.named_parameters()
            if id(parameter) in matching
        }
        self.norms: list[nn.Module] = []
        for module in network.modules():
            buffers = list(module.buffers(recurse=False))
            tensors = list(module.parameters(recurse=False)) or buffers
            if buffers and matching.issuperset(map(id, tensors)):
                self.norms.append(module)
        if not epochs:
            for parameter in self.parameters:
                parameter.requires_grad_(False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Look up the frozen parameters."""
        # each time: moving a network to an XLA device replaces them
        return [
            parameter
            for name, parameter in self.network.named_parameters()
            if name in self.names
        ]

    def holds(self, state: State) -> bool:
        """Return whether the step after this state is frozen."""
        return not self.epochs or state.epoch < self.epochs

    def statistics(self, state: State) -> list[Tensor]:
        """Return the buffers that stay frozen after this state."""
        if not self.holds(state):
            return []
        return [buffer for norm in self.norms for buffer in norm.buffers(recurse=False)]

    @contextmanager
    def held(self, state: State) -> Iterator[None]:
        if not self.holds(state):
            yield
            return
        for norm in self.norms:
            norm.training = False
        yield
        for norm in self.norms:
            norm.training = True
        for parameter in self.parameters:
            parameter.grad = None
