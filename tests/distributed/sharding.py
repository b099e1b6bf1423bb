"""What a rank does in the test of sharded teachers: the whole and the sharded one answer for the same images."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from kd.core.types import Batch
from kd.models.load import load
from kd.models.spec import Spec
from kd.models.teacher import LiveTeacher, is_on_meta, on_meta
from kd.parts import registry

CLASSES = ("a", "b", "c")
VIT = {"patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
SWIN = {"patch_size": 2, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
# a transformer; one with batch norm, lists inside lists and uneven first dimensions; a convolutional one; one with
# buffers that no state_dict holds
CASES = {
    "vit": ("vit_tiny_patch16_224", VIT, False, 0, torch.float32),
    "vit in slices, with features": ("vit_tiny_patch16_224", VIT, True, 2, torch.float32),
    "vit, bf16": ("vit_tiny_patch16_224", VIT, False, 0, torch.bfloat16),
    "xcit": ("xcit_nano_12_p16_224", {"embed_dim": 36, "depth": 3, "num_heads": 4}, False, 3, torch.float32),
    "resnet": ("test_resnet", {}, True, 0, torch.float32),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, False, 0, torch.float32),
}


def main(argv: list[str]) -> None:
    module = registry.find("backends", "cpu", "test")
    backend = module.build(module.Options(threads=1), precision="fp32", timeout_seconds=20.0)
    backend.setup()
    facts = {}
    for name, (model, args, features, micro, dtype) in CASES.items():
        torch.manual_seed(0)
        whole = load(Spec("teacher", model, args, CLASSES), 32, ("pooled",) if features else ())
        _unsettle(whole)
        whole.to(memory_format=torch.contiguous_format)  # as FSDP2 keeps it; else the last bits differ
        given = whole if backend.rank == 0 else on_meta(whole)  # the others have no weights to begin with
        sharded = LiveTeacher(given, backend.device, dtype, micro, backend.shard)
        plain = LiveTeacher(whole, backend.device, dtype, micro)
        before = backend.counters()["teacher_mib"]
        equal = True
        for seed in range(3):
            image = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
            batch = Batch.of(image, torch.zeros(5, dtype=torch.int64))
            ours, expected = sharded(batch), plain(batch)
            equal &= torch.equal(ours.logits, expected.logits) and expected.logits.std().item() > 0
            if features:
                equal &= torch.equal(ours.features["pooled"], expected.features["pooled"])
        facts[name] = {
            "equal": equal,
            "on_meta": is_on_meta(given),
            "mib": before,
            "mib_after": backend.counters()["teacher_mib"],
            "whole_mib": plain.mib,
            "buffers_mib": sum(b.numel() * b.element_size() for b in plain.model.buffers()) / 2**20,
        }
    (Path(argv[0]) / f"{backend.rank}.json").write_text(json.dumps(facts))
    backend.close()


def _unsettle(model: nn.Module) -> None:
    """Move norms and their statistics off 1 and 0, so that a wrong one is seen."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(0.1 * torch.rand_like(tensor))
