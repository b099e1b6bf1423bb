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
STEPS, ROWS = 6, 12
LR = 1e-2


def main(argv: list[str]) -> int:
    kind, options, folder, task = argv
    torch.set_num_threads(1)
    module = registry.find("backends", kind, "backend.kind")
    try:
        made = module.build(
            module.Options(**json.loads(options)),
            precision="fp32",
            timeout_seconds=15.0,
        )
    except KdError as error:
        print(error)
        return CANNOT
    made.setup()
    facts = {"train": train, "resume": resume, "lose": lose}[task](made, Path(folder))
    library = sys.modules.get(
        "smdistributed.dataparallel.torch.torch_smddp"
    ) or sys.modules.get("torch_neuronx")
    facts["operations"] = dict(library.OPERATIONS) if library else {}
    if task == "train" and hasattr(library, "SHAPES"):
        known = set(library.SHAPES)
        ours(made, zero=False)
        facts["compiled_again"] = [str(shape) for shape in library.SHAPES - known]
    (Path(folder) / f"{task}_{made.world_size}_{made.rank}.json").write_text(
        json.dumps(facts)
    )
    if task != "lose":
        made.close()
    return 0


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def shares(step: int, made: Any, micros: int) -> Iterator[Tensor]:
    """Yield this rank's micro-batches of a step; the rows of a step are the same on any
    number of ranks.
    """
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    size = ROWS // (micros * made.world_size)
    for micro in range(micros):
        first = (micro * made.world_size + made.rank) * size
        yield rows[first : first + size].to(made.device)


def backward(made: Any, module: nn.Module, step: int, micros: int) -> None:
    batches = list(shares(step, made, micros))
    for i, rows in enumerate(batches):
        hold = i + 1 < len(batches)
        with made.no_sync(module) if hold else torch.enable_grad(), made.autocast():
            (module(rows).square().mean() / micros).backward()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def ours(
    made: Any, zero: bool, micros: int = 1, cls: Any = torch.optim.AdamW
) -> tuple[nn.Module, Any]:
    """Train with the contract's methods; the ranks start with different weights, which
    `wrap` must make equal.
    """
    model = network(made.rank).to(made.device)
    module = made.wrap(model)
    optimizer = made.optimizer(groups(model), cls, zero, lr=LR)
    for step in range(STEPS):
        backward(made, module, step, micros)
        made.step(optimizer, 0.5)
        made.end_step()
    return model, optimizer


def by_hand(made: Any) -> nn.Module:
    """Train without kd: DDP and AdamW as in PyTorch's documentation."""
    model = network(0).to(made.device)
    module = model
    if made.world_size > 1:
        devices = [made.device.index] if made.device.index is not None else None
        module = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    optimizer = torch.optim.AdamW(groups(model), lr=LR)
    for step in range(STEPS):
        module(next(shares(step, made, 1))).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(made: Any, folder: Path) -> dict[str, Any]:
    models: dict[str, nn.Module] = {"hand": by_hand(made)}
    models["plain"], plain = ours(made, zero=False)
    whole_mib = made.counters()["optimizer_mib"]
    states = {"plain": made.optimizer_state(plain)}
    try:
        models["zero"], optimizer = ours(made, zero=True)
        mib = made.counters()["optimizer_mib"]
        states["zero"] = made.optimizer_state(optimizer)
    except KdError as error:
        print(error)  # a backend may refuse ZeRO
        mib = whole_mib
    models["two micros"], _ = ours(made, zero=False, micros=2)
    models["sgd"], _ = ours(made, zero=False, cls=torch.optim.SGD)
    models["sgd, two micros"], _ = ours(made, zero=False, micros=2, cls=torch.optim.SGD)
    if made.rank == 0:
        save_file(flat(models, states), folder / f"train_{made.world_size}.safetensors")
        (folder / "groups.json").write_text(json.dumps(states["plain"]["param_groups"]))
    mean = made.reduce_mean(torch.full((3,), float(made.rank), device=made.device))
    own = torch.full((2,), float(made.rank + 5), device=made.device)
    made.broadcast_([own])
    made.barrier()
    return {
        "rank": made.rank,
        "world_size": made.world_size,
        "digests": {name: digest(model) for name, model in models.items()},
        "state_is_empty": {name: not state for name, state in states.items()},
        "mib": mib,
        "whole_mib": whole_mib,
        "sum": made.reduce_sum(torch.ones(1, device=made.device)).item(),
        "mean": mean.tolist(),
        "broadcast": own.tolist(),
    }


def resume(made: Any, folder: Path) -> dict[str, Any]:
    """Load the two-rank run's state in this world, return it, and make one more step;
    ZeRO's where it is allowed.
    """
    saved = load_file(folder / "train_2.safetensors")
    name = "zero" if any(key.startswith("model/zero/") for key in saved) else "plain"
    model = network(0).to(made.device)
    module = made.wrap(model)
    optimizer = made.optimizer(groups(model), torch.optim.AdamW, name == "zero", lr=LR)
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
    made.load_optimizer_state(
        optimizer,
        {
            "state": state,
            "param_groups": json.loads((folder / "groups.json").read_text()),
        },
    )
    returned = made.optimizer_state(optimizer)
    copied = (
        flat({}, {name: returned}) if returned else {}
    )  # a state dict refers to the live tensors
    backward(made, module, STEPS, 1)
    made.step(optimizer, 0.5)
    if made.rank == 0:
        save_file(
            {**flat({name: model}, {}), **copied},
            folder / f"resume_{made.world_size}.safetensors",
        )
    return {
        "digest": digest(model),
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def lose(made: Any, folder: Path) -> dict[str, Any]:
    """End the last rank; the others must raise a readable error before the deadline."""
    if made.rank == made.world_size - 1:
        os._exit(9)
    try:
        for _ in range(10_000):
            made.reduce_sum(torch.ones(1, device=made.device)).item()
        explained: KdError | None = None
    except RuntimeError as error:
        explained = made.explain(error)
    foreign = made.explain(RuntimeError("shape mismatch"))
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
