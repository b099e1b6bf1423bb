"""A frozen module split into pipeline stages, one per rank (torch.distributed.pipelining, forward only).

Each rank has its own images. All images are gathered and run through the stages, one micro-batch per rank. The last
stage broadcasts the outputs, of which each rank takes its rows. Only broadcasts and point-to-point sends are used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from kd.errors import BackendError
from kd.types import Outputs


class Pipelined(nn.Module):
    """One stage of a module, with the outputs of all stages. Traced at the first batch, whose size is then fixed."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Split a frozen module, which lies on the CPU of every rank, between repeated blocks."""
        super().__init__()
        self.stage: nn.Module = _Flat(module)
        self.device, self.rank, self.world_size = device, dist.get_rank(), dist.get_world_size()
        self.cuts = {name: SplitPoint.BEGINNING for name in cut_points(self.stage, self.world_size)}
        self.size = 0
        self._schedule: Any = None
        self._widths: list[int] = []

    def forward(self, image: Tensor) -> Outputs:
        """Return the whole module's outputs for images [B, ...]; B may differ between calls, not between ranks."""
        if self._schedule is None:
            self._build(image)
        parts = []
        for piece in image.split(self.size):
            padding = piece[:1].expand(self.size - len(piece), *piece.shape[1:])
            parts.append([output[: len(piece)] for output in self._run(torch.cat([piece, padding]))])
        logits, *pooled = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return Outputs(logits, dict(zip(("pooled",), pooled, strict=False)))

    def _build(self, image: Tensor) -> None:
        """Trace the module with a batch of this shape and keep this rank's stage."""
        self.size = len(image)
        with torch.inference_mode(False), torch.no_grad():
            example = torch.zeros(image.shape, dtype=image.dtype)
            pipe = pipeline(self.stage, mb_args=(example,), split_spec=self.cuts)
            stage = pipe.build_stage(self.rank, self.device)
        self.stage = stage.submod
        self._schedule = ScheduleGPipe(stage, n_microbatches=self.world_size)

    def _run(self, image: Tensor) -> list[Tensor]:
        """Run the images of all ranks; return the outputs of this rank's images."""
        gathered = []
        for source in range(self.world_size):
            images = image.contiguous() if source == self.rank else torch.empty_like(image)
            dist.broadcast(images, source)
            gathered.append(images)
        outputs = self._schedule.eval(torch.cat(gathered)) if self.rank == 0 else self._schedule.eval()
        last = self.world_size - 1
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        if not self._widths:
            own = [output.shape[1] for output in outputs] if self.rank == last else []
            widths = torch.tensor(own + [0] * (2 - len(own)), device=self.device)
            dist.broadcast(widths, last)
            self._widths = [int(width) for width in widths.tolist() if width]
        parts = []
        for number, width in enumerate(self._widths):
            if self.rank == last:
                output = outputs[number].contiguous()
            else:
                output = torch.empty((self.world_size * self.size, width), device=self.device)
            dist.broadcast(output, last)
            parts.append(output[self.rank * self.size : (self.rank + 1) * self.size])
        return parts


class _Flat(nn.Module):
    """Return logits, and features if any, as float32 tensors; blocks return contiguous tensors, as sends require."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for container in _chains(module):
            for block in container:
                block.register_forward_hook(_contiguous)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(image)
        return tuple(output.float() for output in (outputs.logits, *outputs.features.values()))


def _contiguous(block: nn.Module, inputs: Any, output: Any) -> Any:
    return output.contiguous() if isinstance(output, Tensor) else output


def _chains(module: nn.Module) -> list[nn.Sequential | nn.ModuleList]:
    """Return the outermost lists of modules of one class: a network's blocks, or its stages of blocks."""
    chains: list[nn.Sequential | nn.ModuleList] = []
    for child in module.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 1 and len({type(c) for c in child}) == 1:
            chains.append(child)
        else:
            chains.extend(_chains(child))
    return chains


def cut_points(module: nn.Module, stages: int) -> list[str]:
    """Return the names of the blocks that begin a stage, so that all stages have about equally many parameters."""
    names = {id(child): name for name, child in module.named_modules()}
    blocks = [names[id(block)] for chain in _chains(module) for block in list(chain)[1:]]
    starts: dict[str, int] = {}  # number of parameters before each block
    total = 0
    for name, parameter in module.named_parameters():
        for block in blocks:
            if name.startswith(f"{block}."):
                starts.setdefault(block, total)
        total += parameter.numel()
    chosen: list[str] = []
    for stage in range(1, stages):
        left = [name for name in starts if name not in chosen]
        if not left:
            wrong = f"is {stages}, but the teacher can be cut at {len(starts)} places only"
            remedy = "Set teacher.pipeline=0; teacher.shard works for any model"
            raise BackendError("teacher.pipeline", wrong, "Stages begin between blocks of one class in a list", remedy)
        chosen.append(min(left, key=lambda name: abs(starts[name] - total * stage / stages)))
    return chosen
