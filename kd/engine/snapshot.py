"""Save and restore a run: weights, averages, optimizer, sifter. No random state, and never the teacher."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from kd.core.errors import NonFiniteLoss, RunError
from kd.core.ranks import differing
from kd.core.types import State
from kd.engine.meter import AFTER_DIVERGING
from kd.engine.run import Run


@torch.no_grad()
def average_buffers(run: Run, state: State) -> None:
    """Average the batch norm statistics over the ranks."""
    # Each rank gathers them from its own images, but an evaluation or a checkpoint must not depend on the rank. Buffers
    # without checkpoint and frozen ones are not averaged: a mean of three equal numbers may have other bits.
    if run.backend.world_size == 1:
        return
    student, frozen = run.distillation.student, run.distillation.frozen
    still = {id(tensor) for tensor in frozen.statistics(state)} if frozen is not None else set()
    saved = {name for name, tensor in student.state_dict(keep_vars=True).items() if id(tensor) not in still}
    named = {name: tensor for name, tensor in student.named_buffers() if name in saved and tensor.is_floating_point()}
    tensors = list(named.values())
    if run.average is not None:
        tensors += [run.average.average[name] for name in named]
    if not tensors:
        return
    mean = run.backend.reduce_mean(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, part in zip(tensors, mean.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def snapshot(run: Run, state: State, best: bool) -> None:
    """Write a checkpoint. All ranks must call it: a sharded optimizer is gathered."""
    weights = {name: tensor for name, tensor in run.distillation.state_dict().items() if tensor.is_floating_point()}
    finite = torch.stack([tensor.isfinite().all() for tensor in weights.values()]).tolist()  # equal on all ranks
    if not all(finite):
        name = list(weights)[finite.index(False)]
        wrong = f"the student's '{name}' became NaN or infinite in step {state.step} or before"
        raise NonFiniteLoss("optimizer", wrong, "All weights must stay finite", AFTER_DIVERGING)
    optimizer, sifter = run.backend.optimizer_state(run.optimizer), run.sifter.state_dict()
    if run.backend.rank == 0:
        tensors = {f"model.{name}": value for name, value in run.distillation.state_dict().items()}
        if run.average is not None:
            tensors |= {f"average.{name}": value for name, value in run.average.average.items()}
        tensors |= {f"sifter.{name}": value for name, value in sifter.items()}
        info = {"optimizer_groups": optimizer["param_groups"]}
        for index, entries in optimizer["state"].items():
            kept = {name: value for name, value in entries.items() if not isinstance(value, bool)}  # muon's shapes
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in kept.items()}
        run.store.checkpoint(state, tensors, info, best)
    run.backend.barrier()


def restore(run: Run) -> State:
    """Load the newest checkpoint into the run's parts on every rank; a fresh run starts at State()."""
    found = run.store.restore()
    content = f"{found[0]} {checksum(found[1])}" if found is not None and run.backend.world_size > 1 else ""
    if differing(run.backend, content):
        own = f"one of step {found[0].step}" if found is not None else "none"
        wrong = f"the ranks do not find the same checkpoint; rank {run.backend.rank} finds {own}"
        remedy = "Put run.folder on a file system that all machines share, or copy rank 0's run folder to each"
        raise RunError("run.folder", wrong, "All ranks resume from one run folder", remedy)
    if found is None:
        return State()
    state, tensors, info = found
    try:
        run.distillation.load_state_dict(_under("model.", tensors))
    except RuntimeError as error:  # names or shapes differ: the file is unchanged, so the code has changed
        wrong = f"the checkpoint of step {state.step} does not fit the student's network, whose code has changed since"
        raise RunError("student.model", wrong, "", "Undo the change, or start a new run") from error
    if run.average is not None:
        run.average.load(_under("average.", tensors))
    run.sifter.load_state_dict(_under("sifter.", tensors))
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in _under("optimizer.", tensors).items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = value
    saved = {"state": entries, "param_groups": info["optimizer_groups"]}
    run.backend.load_optimizer_state(run.optimizer, saved)
    return state


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a CRC-32 of tensors on the CPU: names, shapes, dtypes, bits. About a second for 1 GB."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), total)
        total = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return total
