"""Run the frozen teacher outside of DDP and checkpoints.

It is in eval mode and inference mode, and has its own precision.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kd.core.contracts import TeacherModel
from kd.core.types import Batch, Outputs

Place = Callable[[nn.Module, Mapping[str, Tensor]], nn.Module]
"""(module on the meta device, rank 0's tensors by name) -> the module, sharded over the
ranks, with weights.
"""


class Uncached:
    """Provide default methods for a teacher without stored outputs.

    See `kd.core.contracts.Teacher`.
    """

    images = 0

    def lookup(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        yield from batches

    def unanswered(self, view: int, ids: Tensor) -> Tensor:
        return torch.ones(len(ids), dtype=torch.bool)

    def flush(self) -> None: ...

    def validation(self, test: bool = False) -> Any:
        """Return the teacher for validation or test images.

        It is itself if it reads pixels.
        """
        return self


class LiveTeacher(Uncached):
    """Run the teacher's forward for each batch. See `kd.core.contracts.Teacher`."""

    # Not an nn.Module, so the run's `.train()`, DDP and `state_dict()` do not include
    # it.

    def __init__(
        self,
        model: TeacherModel,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        micro_batch: int = 0,
        shard: Place | None = None,
        pipeline: Callable[[nn.Module], nn.Module] | None = None,
        remake: Callable[[Any], nn.Module] | None = None,
        inference: bool = True,
    ) -> None:
        """Freeze a copy of `model` on `device`; normalization stays float32.

        `micro_batch` 0: the whole batch at once.
        """
        # `shard` shards the model over the ranks (only rank 0 needs weights);
        # `pipeline` splits it into stages. With either, all ranks must call the teacher
        # equally often. `remake`, allowed with neither, converts the frozen model on
        # its device. `inference`: the device supports torch's inference mode.
        self.frozen = torch.inference_mode if inference else torch.no_grad
        frozen: Any = on_meta(model) if shard is not None else copy.deepcopy(model)
        self.reads_ids = model.reads_ids
        frozen.eval().requires_grad_(False)
        frozen.network.to(dtype)
        tensors = itertools.chain(frozen.parameters(), frozen.buffers())
        self.mib = sum(t.numel() * t.element_size() for t in tensors) / 2**20
        """Size of the whole teacher in MiB, before `remake`."""
        if shard is not None:
            source: Any = model
            named = itertools.chain(source.named_parameters(), source.named_buffers())
            shard(frozen, dict(named))
        if shard is None and pipeline is None:
            frozen = frozen.to(device)
        self.model: nn.Module = pipeline(frozen) if pipeline is not None else frozen
        if remake is not None:
            self.model = remake(self.model)
        self.micro_batch = micro_batch
        # its outputs cannot be cached
        self.divided = shard is not None or pipeline is not None

    def validation(self, test: bool = False) -> LiveTeacher:
        if not self.reads_ids:
            return self
        teacher = copy.copy(self)
        teacher.model = self.model.validation(test)  # type: ignore[operator]
        return teacher

    def _forward(self, batch: Batch) -> list[Outputs]:
        image = batch.image if batch.full_size is None else batch.full_size
        size = self.micro_batch or batch.image.shape[0]
        inputs: Any = [image.split(size)]
        if self.reads_ids:
            inputs += [batch.ids.split(size), itertools.repeat(batch.view)]
        with self.frozen(), torch.autocast(image.device.type, enabled=False):
            return [self.model(*micro) for micro in zip(*inputs, strict=False)]

    def __call__(self, batch: Batch) -> Outputs:
        """Return float32 logits [B, C] and features that autograd can save."""
        computed = batch.teacher_outputs  # from a scoring pass
        if computed is not None and not computed.missing:
            return computed.outputs
        self.images += batch.image.shape[0]
        outputs = Outputs.cat(self._forward(batch))
        return outputs.map(lambda tensor: tensor.float().clone())


class NoTeacher(Uncached):
    """Stand for the teacher of a run on labels alone.

    Its logits have width 0; no loss reads them.
    """

    def __call__(self, batch: Batch) -> Outputs:
        return Outputs(torch.zeros(batch.image.shape[0], 0, device=batch.image.device))

    def unanswered(self, view: int, ids: Tensor) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.bool)


def on_meta(model: Any, fake: Any = None, network: torch.dtype | None = None) -> Any:
    """Return a copy of a model on the meta device without copying tensors.

    `network` is the dtype of its weights there.

    `fake`: a FakeTensorMode, whose tensors replace them on the CPU.
    """
    cast: set[int] = set()
    if network is not None:
        cast = {id(tensor) for tensor in model.network.parameters()}
    copies: dict[int, Tensor] = {}
    with fake or nullcontext():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            dtype = network if id(tensor) in cast else tensor.dtype
            empty = torch.empty_like(
                tensor, device="cpu" if fake else "meta", dtype=dtype
            )
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
            copies[id(tensor)] = empty
    return copy.deepcopy(model, copies)


def is_on_meta(model: Any) -> bool:
    """Return whether a model is on the meta device, without weights."""
    return any(parameter.is_meta for parameter in model.parameters())


def count_parameters(model: Any) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
