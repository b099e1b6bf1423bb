"""What a rank does in the test of pipelined teachers: the whole and the cut one answer for the same images."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from sharding import CASES, CLASSES, _unsettle

from kd.core.errors import BackendError
from kd.core.types import Batch
from kd.models.load import load
from kd.models.spec import Spec
from kd.models.teacher import LiveTeacher
from kd.parts import registry


def main(argv: list[str]) -> None:
    module = registry.find("backends", "cpu", "test")
    backend = module.build(module.Options(threads=1), precision="fp32", timeout_seconds=20.0)
    backend.setup()
    backend.check_divided(backend.world_size)
    facts: dict[str, object] = {}
    for name, (model, args, features, micro, dtype) in CASES.items():
        torch.manual_seed(0)
        whole = load(Spec("teacher", model, args, CLASSES), 32, ("pooled",) if features else ())
        _unsettle(whole)
        try:
            cut = LiveTeacher(whole, backend.device, dtype, micro, pipeline=backend.pipeline)
        except BackendError as error:
            facts[name] = str(error)
            continue
        plain = LiveTeacher(whole, backend.device, dtype, micro)
        worst, spread = 0.0, 0.0
        for seed, count in enumerate((5, 5, 12, 3)):  # other images on each rank, other numbers from call to call
            noise = torch.Generator().manual_seed(100 * backend.rank + seed)
            image = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=noise)
            batch = Batch.of(image, torch.zeros(count, dtype=torch.int64))
            ours, expected = cut(batch), plain(batch)
            pairs = [(ours.logits, expected.logits)]
            if features:
                pairs.append((ours.features["pooled"], expected.features["pooled"]))
            worst = max([worst, *((a - b).abs().max().item() for a, b in pairs)])
            spread = max(spread, expected.logits.std(0).max().item())
        mib = backend.counters()["teacher_mib"]
        facts[name] = {"worst": worst, "spread": spread, "mib": mib, "whole_mib": plain.mib}
    (Path(argv[0]) / f"{backend.rank}.json").write_text(json.dumps(facts))
    backend.close()
