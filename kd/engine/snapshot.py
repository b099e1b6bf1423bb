"""Save and restore a run: weights, averages, optimizer and sifter.

No random state, and never the teacher.
"""

import torch
from torch import Tensor, nn

from kd.core.errors import ModelError, NonFiniteLoss, RunError, first_sentence
from kd.core.ranks import differing_ranks
from kd.core.types import State
from kd.engine.criterion import StudentWithLoss
from kd.engine.meter import AFTER_DIVERGING
from kd.engine.run import Run
from kd.files.checkpoint import crc32

LOADABLE = "A new network must load the state that a checkpoint holds"


@torch.no_grad()
def average_buffers(run: Run, state: State) -> None:
    """Average the batch norm statistics over the ranks."""
    # Each rank gathers them from its own images, but an evaluation or a checkpoint must
    # not depend on the rank. Buffers without checkpoint and frozen ones are not
    # averaged: a mean of three equal numbers may have other bits.
    if run.backend.world_size == 1:
        return
    student = run.distillation.student
    frozen = run.distillation.frozen
    still = frozen.statistics(state) if frozen is not None else []
    still_ids = set(map(id, still))
    moving_names = {
        name
        for name, tensor in student.state_dict(keep_vars=True).items()
        if id(tensor) not in still_ids
    }
    named = {
        name: tensor
        for name, tensor in student.named_buffers()
        if name in moving_names and tensor.is_floating_point()
    }
    tensors = list(named.values())
    if run.average is not None:
        tensors += [
            run.average.average[name] for name in named if name in run.average.average
        ]
    if not tensors:
        return
    flat = run.backend.reduce_mean(torch.cat([tensor.flatten() for tensor in tensors]))
    means = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))


def snapshot(run: Run, state: State, best: bool) -> None:
    """Write a checkpoint. All ranks must call it: a sharded optimizer is gathered."""
    weights = run.distillation.state_dict()
    # equal on all ranks
    flags = torch.stack([tensor.isfinite().all() for tensor in weights.values()])
    finite = flags.tolist()
    if not all(finite):
        name = list(weights)[finite.index(False)]
        wrong = (
            f"the student's '{name}' became NaN or infinite in step {state.step} or"
            " before"
        )
        raise NonFiniteLoss(
            "optimizer", wrong, "All weights must stay finite", AFTER_DIVERGING
        )
    optimizer = run.backend.optimizer_state(run.optimizer)
    sifter = run.sifter.state_dict()
    if run.backend.rank == 0:
        tensors = weights_of(run)
        for name, value in sifter.items():
            tensors[f"sifter.{name}"] = value
        for index, entries in optimizer["state"].items():
            for name, value in entries.items():
                if not isinstance(value, bool):  # muon's shapes
                    tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
        info = {"optimizer_groups": optimizer["param_groups"]}
        run.store.checkpoint(state, tensors, info, best)
    run.backend.barrier()


def restore(run: Run) -> State:
    """Load the newest checkpoint on every rank; a fresh run starts at `State()`."""
    checkpoint = run.store.restore()
    # a new run loads what it will save
    state, tensors, info = checkpoint or (State(), weights_of(run), {})
    content = ""
    # about a second for 1 GB
    if checkpoint is not None and run.backend.world_size > 1:
        checksums = sorted((name, crc32(tensor)) for name, tensor in tensors.items())
        content = f"{state} {checksums}"
    if differing_ranks(run.backend, content):
        present = "none" if checkpoint is None else f"one of step {state.step}"
        wrong = (
            f"the ranks do not find the same checkpoint; rank {run.backend.rank} finds"
            f" {present}"
        )
        remedy = (
            "Put run.folder on a file system that all machines share, or copy rank 0's"
            " run folder to each"
        )
        raise RunError(
            "run.folder", wrong, "All ranks resume from one run folder", remedy
        )
    try:
        run.distillation.load_state_dict(tensors_below("model.", tensors))
    # names or shapes differ: the file is unchanged, so the code has changed, or is
    # wrong
    except RuntimeError as error:
        wrong = (
            f"the checkpoint of step {state.step} does not fit the student's network"
            f" ({first_sentence(error)})"
        )
        remedy = "Undo the last change of its code, or correct it and start a new run"
        raise RunError("student.model", wrong, LOADABLE, remedy) from error
    if checkpoint is None:
        return state
    if run.average is not None:
        run.average.load(tensors_below("average.", tensors))
    run.sifter.load_state_dict(tensors_below("sifter.", tensors))
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors_below("optimizer.", tensors).items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = value
    saved = {"state": entries, "param_groups": info["optimizer_groups"]}
    run.backend.load_optimizer_state(run.optimizer, saved)
    return state


def weights_of(run: Run) -> dict[str, Tensor]:
    """Return the tensors of student, losses and averages by name in a checkpoint."""
    tensors = {}
    for name, value in run.distillation.state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"model.{name}"] = value
    if run.average is not None:
        for name, value in run.average.average.items():
            tensors[f"average.{name}"] = value
    return tensors


def shapes_of(run: Run) -> set[tuple[str, torch.Size]]:
    """Return the names and shapes of the student's and the losses' state."""
    return {
        (name, tensor.shape) for name, tensor in run.distillation.state_dict().items()
    }


def require_same_shapes(run: Run, before: set[tuple[str, torch.Size]]) -> None:
    """Require that a step has changed no name and no shape of the state."""
    # a new network could not load it
    for name, _ in before ^ shapes_of(run):
        wrong = (
            f"a training step makes '{name.removeprefix('student.network.')}' of its"
            " state, or its shape, anew"
        )
        raise ModelError(
            "student.model",
            wrong,
            LOADABLE,
            "Register it in __init__, or with persistent=False",
        )


def load_distillation(
    distillation: StudentWithLoss, tensors: dict[str, Tensor]
) -> None:
    """Load a checkpoint's weights of losses and student, averaged ones first."""
    distillation.load_state_dict(tensors_below("model.", tensors))
    load_student(distillation.student, tensors)


def load_student(student: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load a checkpoint's weights of the student, averaged ones first."""
    student.load_state_dict(
        tensors_below("model.student.", tensors) | tensors_below("average.", tensors)
    )


def tensors_below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {
        name[len(prefix) :]: value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
