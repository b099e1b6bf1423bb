"""What the teacher's cache costs to read and to fill: milliseconds a batch, beside a step of a small student.

Run: python benchmarks/cache.py [--images 75750] [--classes 101] [--batch 64] [--size 224]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from _record import write
from kd.core.types import Batch, Outputs
from kd.engine.criterion import Criterion, Distillation
from kd.models.cache import CachedTeacher, Codec, open_store
from kd.models.classifier import set_attention
from kd.models.load import Spec, load
from kd.models.teacher import NoTeacher
from kd.parts.losses.kl import KL
from kd.parts.tasks.single_label import SingleLabel

STUDENT = "vit_tiny_patch16_224"


def main() -> None:
    """Measure reading, writing and the step in turns; write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=75750)
    parser.add_argument("--classes", type=int, default=101)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    torch.manual_seed(0)
    student = load(Spec("student", STUDENT, {}, [str(i) for i in range(given.classes)]), given.size)
    set_attention(student, False)
    module = Distillation(student, Criterion([("kl", 1.0, KL(temperature=2.0))]), SingleLabel())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder), {}, Codec(given.classes, "fp16", 0), given.images, True)
        teacher = CachedTeacher(NoTeacher(), store)
        for turn in range(given.rounds):
            ids = torch.randperm(given.images)[: given.batch]
            image = torch.randint(256, (given.batch, 3, given.size, given.size), dtype=torch.uint8)
            batch = Batch.of(image, torch.zeros(given.batch, dtype=torch.int64), ids)
            logits = torch.randn(given.batch, given.classes)
            start = time.perf_counter()
            store.write(0, ids.tolist(), [part.numpy() for part in store.codec.compress(logits)], [0] * given.batch)
            wrote = time.perf_counter()
            found = next(teacher.lookup([batch]))
            answer = teacher(found)
            read = time.perf_counter()
            assert torch.equal(answer.logits, logits.half().float())
            module(batch, Outputs(answer.logits))[1]["loss"].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stepped = time.perf_counter()
            times = {"write": wrote - start, "read": read - wrote, "step": stepped - read}
            rows += [{"round": turn, "which": n, "ms": round(1000 * t, 4)} for n, t in times.items() if turn]
    median = {n: statistics.median(row["ms"] for row in rows if row["which"] == n) for n in ("write", "read", "step")}
    print(
        f"batch {given.batch}: write {median['write']:.2f} ms, read {median['read']:.2f} ms, "
        f"student step {median['step']:.0f} ms; reading is {100 * median['read'] / median['step']:.2f} % of the step"
    )
    write("cache", " ".join(["python benchmarks/cache.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
