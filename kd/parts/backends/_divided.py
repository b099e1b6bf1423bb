"""Divide a frozen module over the ranks: in pipeline stages, or sharded with FSDP2.

Stages (forward only): each rank has one stage and its own images. All ranks' images are
gathered and run through the stages, one micro-batch per rank. The last stage broadcasts
the outputs, and each rank takes its rows. Only broadcasts and point-to-point sends are
used.

Shards: each rank keeps 1/ranks of each tensor and all-gathers one block at a time.
Nothing is pickled and no process group is created: rank 0 broadcasts one tensor at a
time in the default group.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, distribute_tensor

from kd.core.errors import BackendError
from kd.core.types import Outputs


class Pipelined(nn.Module):
    """Run one stage of a module, and return the outputs of all stages.

    It is traced at the first batch, whose size is then fixed.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.stage: nn.Module = _Flat(module)
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.cuts = {
            name: SplitPoint.BEGINNING
            for name in cut_points(self.stage, self.world_size)
        }
        self.size = 0
        self._schedule: Any = None
        self._widths: list[int] = []

    def forward(self, image: Tensor) -> Outputs:
        """Return the whole module's outputs for images [B, ...].

        B may differ between calls, but not between ranks.
        """
        if self._schedule is None:
            self._build(image)
        batches = []
        for images in image.split(self.size):
            padding = images[:1].expand(self.size - len(images), *images.shape[1:])
            outputs = self._run(torch.cat([images, padding]))
            batches.append([output[: len(images)] for output in outputs])
        logits, *pooled = (torch.cat(outputs) for outputs in zip(*batches, strict=True))
        return Outputs(logits, dict(zip(("pooled",), pooled, strict=False)))

    def _build(self, image: Tensor) -> None:
        self.size = len(image)
        with torch.inference_mode(False), torch.no_grad():
            example = torch.zeros(image.shape, dtype=image.dtype)
            pipe = pipeline(self.stage, mb_args=(example,), split_spec=self.cuts)
            stage = pipe.build_stage(self.rank, self.device)
        self.stage = stage.submod
        self._schedule = ScheduleGPipe(stage, n_microbatches=self.world_size)

    def _run(self, image: Tensor) -> list[Tensor]:
        gathered = []
        for source in range(self.world_size):
            images = (
                image.contiguous() if source == self.rank else torch.empty_like(image)
            )
            dist.broadcast(images, source)
            gathered.append(images)
        outputs = (
            self._schedule.eval(torch.cat(gathered))
            if self.rank == 0
            else self._schedule.eval()
        )
        last = self.world_size - 1
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        if not self._widths:
            sizes = [0, 0]
            if self.rank == last:
                sizes[: len(outputs)] = [output.shape[1] for output in outputs]
            widths = torch.tensor(sizes, device=self.device)
            dist.broadcast(widths, last)
            self._widths = [int(width) for width in widths.tolist() if width]
        own_outputs = []
        for number, width in enumerate(self._widths):
            if self.rank == last:
                output = outputs[number].contiguous()
            else:
                output = torch.empty(
                    (self.world_size * self.size, width), device=self.device
                )
            dist.broadcast(output, last)
            start = self.rank * self.size
            own_outputs.append(output[start : start + self.size])
        return own_outputs


class _Flat(nn.Module):
    """Return logits, and features if any, as float32 tensors."""

    # Blocks return contiguous tensors, as sends require.

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for block in chain.from_iterable(_block_lists(module)):
            block.register_forward_hook(
                lambda _, inputs, o: o.contiguous() if isinstance(o, Tensor) else o
            )

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(image)
        return tuple(
            output.float() for output in (outputs.logits, *outputs.features.values())
        )


def _block_lists(module: nn.Module) -> list[nn.Sequential | nn.ModuleList]:
    """Return the outermost lists of equal modules: a network's blocks or stages."""
    lists: list[nn.Sequential | nn.ModuleList] = []
    for child in module.children():
        if (
            isinstance(child, (nn.Sequential, nn.ModuleList))
            and len(child) > 1
            and len({type(block) for block in child}) == 1
        ):
            lists.append(child)
        else:
            lists.extend(_block_lists(child))
    return lists


def cut_points(module: nn.Module, stages: int) -> list[str]:
    """Return the names of the blocks that begin a stage.

    Stages have about equal numbers of parameters.
    """
    names = {id(child): name for name, child in module.named_modules()}
    blocks = [
        names[id(block)]
        for block_list in _block_lists(module)
        for block in list(block_list)[1:]
    ]
    starts: dict[str, int] = {}  # number of parameters before each block
    total = 0
    for name, parameter in module.named_parameters():
        for block in blocks:
            if name.startswith(f"{block}."):
                starts.setdefault(block, total)
        total += parameter.numel()
    chosen: list[str] = []
    for stage in range(1, stages):
        candidates = [name for name in starts if name not in chosen]
        if not candidates:
            wrong = (
                f"is {stages}, but the teacher can be cut at {len(starts)} places only"
            )
            allowed = "Stages begin between blocks of one class in a list"
            remedy = "Set teacher.pipeline=0; teacher.shard works for any model"
            raise BackendError("teacher.pipeline", wrong, allowed, remedy)
        distance = {
            name: abs(starts[name] - total * stage / stages) for name in candidates
        }
        chosen.append(min(candidates, key=distance.__getitem__))
    return chosen


SMALLEST_SHARE = 0.005
"""Share of all parameters; smaller blocks are gathered with their parent, since each
collective has a fixed cost.
"""


def shard(
    module: nn.Module, source: Mapping[str, Tensor], device: torch.device
) -> nn.Module:
    """Shard a frozen module over the ranks, in place, and load rank 0's tensors."""
    # The module is on the meta device; `source` has its parameters and buffers by name.
    # Only forward gathers parameters, so no other method may be called. Not handled: a
    # parameter shared by two blocks.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # FSDP2 takes no other
    for unit in [*_repeated_blocks(module), module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    module.to_empty(device=device)
    with torch.no_grad():
        for name, target in _named_tensors(module):
            if dist.get_rank() == 0:
                full = source[name].to(device, target.dtype).contiguous()
            else:
                full = torch.empty(target.shape, dtype=target.dtype, device=device)
            dist.broadcast(full, src=0)
            if isinstance(target, DTensor):
                # sharded locally, without a second collective
                sharded = distribute_tensor(
                    full, mesh, target.placements, src_data_rank=None
                )
                target.to_local().copy_(sharded.to_local())
            else:
                target.copy_(full)
    return module


def local_tensors(module: nn.Module) -> list[Tensor]:
    return [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for _, tensor in _named_tensors(module)
    ]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a network, inner ones first."""
    # A block is an element of a ModuleList or Sequential that holds another element of
    # its class. Those below SMALLEST_SHARE are not listed.
    smallest = SMALLEST_SHARE * sum(
        parameter.numel() for parameter in module.parameters()
    )
    blocks = []
    for container in module.modules():
        if not isinstance(container, (nn.Sequential, nn.ModuleList)):
            continue
        kinds = [type(child) for child in container]
        for child in container:
            size = sum(parameter.numel() for parameter in child.parameters())
            if kinds.count(type(child)) > 1 and size and size >= smallest:
                blocks.append(child)
    return blocks[::-1]  # modules() lists outer modules first
