"""What a rank does in the tests of divided teachers: the whole and the divided one
answer for the same images.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kd.core.errors import BackendError
from kd.core.types import Batch
from kd.models.live_teacher import LiveTeacher, is_on_meta, on_meta
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts import registry

VIT = {"patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
SWIN = {
    "patch_size": 2,
    "embed_dim": 24,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
}
# a transformer; one with batch norm, lists inside lists and uneven first dimensions; a
# convolutional one; one with buffers that no state_dict holds
CASES = {
    "vit": ("vit_tiny_patch16_224", VIT, False, 0, torch.float32),
    "vit in slices, with features": (
        "vit_tiny_patch16_224",
        VIT,
        True,
        2,
        torch.float32,
    ),
    "vit, bf16": ("vit_tiny_patch16_224", VIT, False, 0, torch.bfloat16),
    "xcit": (
        "xcit_nano_12_p16_224",
        {"embed_dim": 36, "depth": 3, "num_heads": 4},
        False,
        3,
        torch.float32,
    ),
    "resnet": ("test_resnet", {}, True, 0, torch.float32),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, False, 0, torch.float32),
}


def main(argv: list[str]) -> None:
    division, folder = argv
    module = registry.find("backends", "cpu", "test")
    backend = module.build(
        module.Options(threads=1), precision="fp32", timeout_seconds=20.0
    )
    backend.setup()
    if division == "cut":
        backend.check_divided(backend.world_size)
    facts = {
        name: {"cut": cut, "shared": shared}[division](backend, *case)
        for name, case in CASES.items()
    }
    (Path(folder) / f"{backend.rank}.json").write_text(json.dumps(facts))
    backend.close()


def teacher(model: str, args: dict, features: bool) -> torch.nn.Module:
    """Return one whose norms and their statistics are not 1 and 0, so that a wrong one
    is seen.
    """
    torch.manual_seed(0)
    network = load(
        Spec("teacher", model, args, ("a", "b", "c")),
        32,
        ("pooled",) if features else (),
    )
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers()]:
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(0.1 * torch.rand_like(tensor))
    return network


def answers(model, count: int, seed: int) -> dict[str, torch.Tensor]:
    image = torch.randint(
        256,
        (count, 3, 32, 32),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    outputs = model(Batch.of(image, torch.zeros(count, dtype=torch.int64)))
    return {"logits": outputs.logits, **outputs.features}


def cut(
    backend, model: str, args: dict, features: bool, micro: int, dtype: torch.dtype
) -> Any:
    network = teacher(model, args, features)
    try:
        divided = LiveTeacher(
            network, backend.device, dtype, micro, pipeline=backend.pipeline
        )
    except BackendError as error:
        return str(error)
    plain = LiveTeacher(network, backend.device, dtype, micro)
    worst = 0.0
    spread = 0.0
    for number, count in enumerate(
        (5, 5, 12, 3)
    ):  # other images on each rank, other numbers from call to call
        ours, expected = (
            answers(model, count, 100 * backend.rank + number)
            for model in (divided, plain)
        )
        worst = max(
            [
                worst,
                *((ours[name] - expected[name]).abs().max().item() for name in ours),
            ]
        )
        spread = max(spread, expected["logits"].std(0).max().item())
    return {
        "worst": worst,
        "spread": spread,
        "mib": backend.counters()["teacher_mib"],
        "whole_mib": plain.mib,
    }


def shared(
    backend, model: str, args: dict, features: bool, micro: int, dtype: torch.dtype
) -> Any:
    network = teacher(model, args, features)
    network.to(
        memory_format=torch.contiguous_format
    )  # as FSDP2 keeps it; else the last bits differ
    started = (
        network if backend.rank == 0 else on_meta(network)
    )  # the others have no weights to begin with
    sharded = LiveTeacher(started, backend.device, dtype, micro, backend.shard)
    plain = LiveTeacher(network, backend.device, dtype, micro)
    before = backend.counters()["teacher_mib"]
    equal = True
    for seed in range(3):
        ours = answers(sharded, 5, seed)
        expected = answers(plain, 5, seed)
        equal &= (
            all(torch.equal(ours[name], expected[name]) for name in ours)
            and expected["logits"].std().item() > 0
        )
    return {
        "equal": equal,
        "on_meta": is_on_meta(started),
        "mib": before,
        "mib_after": backend.counters()["teacher_mib"],
        "whole_mib": plain.mib,
        "buffers_mib": (
            sum(b.numel() * b.element_size() for b in plain.model.buffers()) / 2**20
        ),
    }
