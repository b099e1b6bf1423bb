"""A frozen module cut into stages, one a rank (torch.distributed.pipelining, forward only): every image passes all.

Every rank has images of its own. They are brought together, run through the stages as one micro-batch a rank, and each
rank takes its answers from what the last stage sends to all: world collectives and neighbours' sends only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from kd.errors import BackendError
from kd.types import Outputs

Broadcast = Callable[[Tensor, int], None]
"""(tensor, source rank): overwrite the tensor with the source's, in place."""


class Pipelined(nn.Module):
    """Answer like the whole module; holds one stage of it. Built at the first batch, whose size it then keeps."""

    def __init__(self, module: nn.Module, device: torch.device, rank: int, world_size: int, send: Broadcast) -> None:
        """Cut a module.

        Args:
            module: maps images to Outputs; frozen, on the CPU of every rank. Its repeated blocks are where it is cut.
            device: where the stage runs.
            rank: number of this process and of its stage.
            world_size: number of stages.
            send: for world broadcasts.

        Raises:
            BackendError: it has too few blocks.
        """
        super().__init__()
        self.stage: nn.Module = _Flat(module)
        self.device, self.rank, self.world_size, self.send = device, rank, world_size, send
        self.cuts = {name: SplitPoint.BEGINNING for name in cut_points(self.stage, world_size)}
        self.size = 0
        self._schedule: Any = None
        self._widths: list[int] = []

    def forward(self, image: Tensor) -> Outputs:
        """Return what the whole module says of images [B, ...]; B may differ from call to call, not between ranks."""
        if self._schedule is None:
            self._build(image)
        parts = []
        for piece in image.split(self.size):
            padding = piece[:1].expand(self.size - len(piece), *piece.shape[1:])
            parts.append([answer[: len(piece)] for answer in self._run(torch.cat([piece, padding]))])
        logits, *pooled = (torch.cat(answers) for answers in zip(*parts, strict=True))
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
        """Return this rank's part of the answers to the images of all ranks."""
        gathered = []
        for source in range(self.world_size):
            images = image.contiguous() if source == self.rank else torch.empty_like(image)
            self.send(images, source)
            gathered.append(images)
        answers = self._schedule.eval(*([torch.cat(gathered)] if self.rank == 0 else []))
        last, found = self.world_size - 1, []
        mine = [] if self.rank != last else list(answers) if isinstance(answers, (tuple, list)) else [answers]
        if not self._widths:
            widths = torch.tensor([answer.shape[1] for answer in mine] + [0] * (2 - len(mine)), device=self.device)
            self.send(widths, last)
            self._widths = [int(width) for width in widths.tolist() if width]
        for number, width in enumerate(self._widths):
            shape = (self.world_size * self.size, width)
            answer = mine[number].contiguous() if mine else torch.empty(shape, device=self.device)
            self.send(answer, last)
            found.append(answer[self.rank * self.size : (self.rank + 1) * self.size])
        return found


class _Flat(nn.Module):
    """Logits, and features where there are any, as float32 tensors; blocks hand on contiguous ones, as sends need."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for container in _chains(module):
            for block in container:
                block.register_forward_hook(_contiguous)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(image)
        return tuple(answer.float() for answer in (outputs.logits, *outputs.features.values()))


def _contiguous(block: nn.Module, given: Any, answer: Any) -> Any:
    return answer.contiguous() if isinstance(answer, Tensor) else answer


def _chains(module: nn.Module) -> list[nn.Sequential | nn.ModuleList]:
    """Return the outermost lists of modules of one class: a network's blocks, or its stages of blocks."""
    found: list[nn.Sequential | nn.ModuleList] = []
    for child in module.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 1 and len({type(c) for c in child}) == 1:
            found.append(child)
        else:
            found.extend(_chains(child))
    return found


def cut_points(module: nn.Module, stages: int) -> list[str]:
    """Return the names of the blocks that begin a stage, so that stages hold about equally many parameters.

    Raises:
        BackendError: the module has too few blocks.
    """
    names = {id(child): name for name, child in module.named_modules()}
    begins = {f"{names[id(block)]}.": 0 for chain in _chains(module) for block in list(chain)[1:]}
    before, total = dict.fromkeys(begins, -1), 0
    for name, parameter in module.named_parameters():
        for block in begins:
            if name.startswith(block) and before[block] < 0:
                before[block] = total
        total += parameter.numel()
    known = {block.removesuffix("."): at for block, at in before.items() if at >= 0}
    chosen: list[str] = []
    for stage in range(1, stages):
        left = [name for name in known if name not in chosen]
        if not left:
            wrong = f"is {stages}, but the teacher can be cut at {len(known)} places only"
            remedy = "Set teacher.pipeline=0; teacher.shard divides any model"
            raise BackendError("teacher.pipeline", wrong, "Cuts lie between blocks of one class in a list", remedy)
        chosen.append(min(left, key=lambda name: abs(known[name] - total * stage / stages)))
    return chosen
