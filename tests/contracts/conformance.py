"""One rank of the backends' conformance suite; the tests compare the files that the
ranks write.

`main([kind, options as JSON, folder, task])`. A backend that this machine lacks exits
with code 77 and the reason.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kd.core.errors import KdError
from kd.parts import registry

CANNOT = 77
STEPS = 6
ROWS = 12
LR = 1e-2


def main(argv: list[str]) -> int:
    kind, options, folder, task = argv
    torch.set_num_threads(1)
    module = registry.find("backends", kind, "backend.kind")
    try:
        backend = module.build(
            module.Options(**json.loads(options)),
            precision="fp32",
            timeout_seconds=15.0,
        )
    except KdError as error:
        print(error)
        return CANNOT
    backend.setup()
    facts = {"train": train, "resume": resume, "lose": lose}[task](
        backend, Path(folder)
    )
    library = sys.modules.get(
        "smdistributed.dataparallel.torch.torch_smddp"
    ) or sys.modules.get("torch_neuronx")
    facts["operations"] = dict(library.OPERATIONS) if library else {}
    if task == "train" and hasattr(library, "SHAPES"):
        old_shapes = set(library.SHAPES)
        ours(backend, zero=False)
        facts["compiled_again"] = [str(shape) for shape in library.SHAPES - old_shapes]
    (Path(folder) / f"{task}_{backend.world_size}_{backend.rank}.json").write_text(
        json.dumps(facts)
    )
    if task != "lose":
        backend.close()
    return 0


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def shares(step: int, backend: Any, micros: int) -> Iterator[Tensor]:
    """Yield this rank's micro-batches of a step; the rows of a step are the same on any
    number of ranks.
    """
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    size = ROWS // (micros * backend.world_size)
    for micro in range(micros):
        first = (micro * backend.world_size + backend.rank) * size
        yield rows[first : first + size].to(backend.device)


def backward(backend: Any, module: nn.Module, step: int, micros: int) -> None:
    batches = list(shares(step, backend, micros))
    for i, rows in enumerate(batches):
        hold = i + 1 < len(batches)
        with (
            backend.no_sync(module) if hold else torch.enable_grad(),
            backend.autocast(),
        ):
            (module(rows).square().mean() / micros).backward()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def ours(
    backend: Any, zero: bool, micros: int = 1, cls: Any = torch.optim.AdamW
) -> tuple[nn.Module, Any]:
    """Train with the contract's methods; the ranks start with different weights, which
    `wrap` must make equal.
    """
    model = network(backend.rank).to(backend.device)
    module = backend.wrap(model)
    optimizer = backend.optimizer(groups(model), cls, zero, lr=LR)
    for step in range(STEPS):
        backward(backend, module, step, micros)
        backend.step(optimizer, 0.5)
        backend.end_step()
    return model, optimizer


def by_hand(backend: Any) -> nn.Module:
    """Train without kd: DDP and AdamW as in PyTorch's documentation."""
    model = network(0).to(backend.device)
    module = model
    if backend.world_size > 1:
        devices = [backend.device.index] if backend.device.index is not None else None
        module = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    optimizer = torch.optim.AdamW(groups(model), lr=LR)
    for step in range(STEPS):
        module(next(shares(step, backend, 1))).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(backend: Any, folder: Path) -> dict[str, Any]:
    models: dict[str, nn.Module] = {"hand": by_hand(backend)}
    models["plain"], plain = ours(backend, zero=False)
    whole_mib = backend.counters()["optimizer_mib"]
    states = {"plain": backend.optimizer_state(plain)}
    try:
        models["zero"], optimizer = ours(backend, zero=True)
        mib = backend.counters()["optimizer_mib"]
        states["zero"] = backend.optimizer_state(optimizer)
    except KdError as error:
        print(error)  # a backend may refuse ZeRO
        mib = whole_mib
    models["two micros"], _ = ours(backend, zero=False, micros=2)
    models["sgd"], _ = ours(backend, zero=False, cls=torch.optim.SGD)
    models["sgd, two micros"], _ = ours(
        backend, zero=False, micros=2, cls=torch.optim.SGD
    )
    if backend.rank == 0:
        save_file(
            flat(models, states), folder / f"train_{backend.world_size}.safetensors"
        )
        (folder / "groups.json").write_text(json.dumps(states["plain"]["param_groups"]))
    mean = backend.reduce_mean(
        torch.full((3,), float(backend.rank), device=backend.device)
    )
    values = torch.full((2,), float(backend.rank + 5), device=backend.device)
    backend.broadcast_([values])
    backend.barrier()
    return {
        "rank": backend.rank,
        "world_size": backend.world_size,
        "digests": {name: digest(model) for name, model in models.items()},
        "state_is_empty": {name: not state for name, state in states.items()},
        "mib": mib,
        "whole_mib": whole_mib,
        "sum": backend.reduce_sum(torch.ones(1, device=backend.device)).item(),
        "mean": mean.tolist(),
        "broadcast": values.tolist(),
    }


def resume(backend: Any, folder: Path) -> dict[str, Any]:
    """Load the two-rank run's state in this world, return it, and make one more step;
    ZeRO's where it is allowed.
    """
    saved = load_file(folder / "train_2.safetensors")
    name = "zero" if any(key.startswith("model/zero/") for key in saved) else "plain"
    model = network(0).to(backend.device)
    module = backend.wrap(model)
    optimizer = backend.optimizer(
        groups(model), torch.optim.AdamW, name == "zero", lr=LR
    )
    start = f"model/{name}/"
    model.load_state_dict(
        {
            key.removeprefix(start): value
            for key, value in saved.items()
            if key.startswith(start)
        }
    )
    state: dict[int, dict[str, Tensor]] = {}
    for path, value in saved.items():
        if path.startswith(f"state/{name}/"):
            _, _, index, key = path.split("/")
            state.setdefault(int(index), {})[key] = value
    backend.load_optimizer_state(
        optimizer,
        {
            "state": state,
            "param_groups": json.loads((folder / "groups.json").read_text()),
        },
    )
    returned = backend.optimizer_state(optimizer)
    copied = (
        flat({}, {name: returned}) if returned else {}
    )  # a state dict refers to the live tensors
    backward(backend, module, STEPS, 1)
    backend.step(optimizer, 0.5)
    if backend.rank == 0:
        save_file(
            {**flat({name: model}, {}), **copied},
            folder / f"resume_{backend.world_size}.safetensors",
        )
    return {
        "digest": digest(model),
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def lose(backend: Any, folder: Path) -> dict[str, Any]:
    """End the last rank; the others must raise a readable error before the deadline."""
    if backend.rank == backend.world_size - 1:
        os._exit(9)
    try:
        for _ in range(10_000):
            backend.reduce_sum(torch.ones(1, device=backend.device)).item()
        explained: KdError | None = None
    except RuntimeError as error:
        explained = backend.explain(error)
    foreign = backend.explain(RuntimeError("shape mismatch"))
    return {
        "text": str(explained),
        "kind": type(explained).__name__,
        "foreign": foreign,
    }


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.detach().cpu().numpy().tobytes())
    return sha.hexdigest()


def flat(
    models: dict[str, nn.Module], states: dict[str, dict[str, Any]]
) -> dict[str, Tensor]:
    """Return weights and optimizer states by name."""
    tensors = {
        f"model/{name}/{key}": value
        for name, model in models.items()
        for key, value in model.state_dict().items()
    }
    for name, state in states.items():
        for index, entries in state["state"].items():
            tensors |= {
                f"state/{name}/{index}/{key}": value for key, value in entries.items()
            }
    return {
        name: value.detach().cpu().contiguous().clone()
        for name, value in tensors.items()
    }
