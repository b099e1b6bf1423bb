"""What the engine costs: its step against a bare hand-written one, same models, same batches, in turns.

Run: python benchmarks/step.py [--steps 30] [--size 64] [--batch 64]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from _record import write
from kd.core.types import Batch, State
from kd.engine.criterion import Criterion
from kd.engine.loop import update
from kd.files.run_dir import Memory
from kd.jobs.progress.console import Console
from kd.models.classifier import Classifier, set_attention
from kd.models.load import Spec, load
from kd.models.teacher import LiveTeacher
from kd.parts.losses.ce import CE
from kd.parts.losses.kl import KL
from kd.setup.build import Results, distributed

CLASSES = [str(i) for i in range(12)]


def models(size: int) -> tuple[Classifier, Classifier]:
    """Return a teacher and a student for `size` px."""
    patch = {"patch_size": size // 8}
    torch.manual_seed(0)
    big = Spec("teacher", "vit_tiny_patch16_224", {**patch, "embed_dim": 256, "depth": 8, "num_heads": 4}, CLASSES)
    small = Spec("student", "vit_tiny_patch16_224", {**patch, "embed_dim": 96, "depth": 4, "num_heads": 3}, CLASSES)
    pair = load(big, size), load(small, size)
    for model in pair:
        set_attention(model, fused=False)
    return pair


class Logits(nn.Module):
    """A classifier as `kd.distill` takes modules: images to logits."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Normalize and classify uint8 images."""
        return self.model(image).logits


def bare(teacher: Classifier, student: Classifier, batches: list[Batch]) -> Callable[[int], None]:
    """Return a step as one would write it by hand."""
    frozen = LiveTeacher(teacher, torch.device("cpu")).model
    student = copy.deepcopy(student).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, fused=True)

    def step(i: int) -> None:
        batch = batches[i % len(batches)]
        with torch.inference_mode():
            target = frozen(batch.image).logits
        target = target.clone()
        logits = student(batch.image).logits
        kl = F.kl_div(
            (logits / 2).log_softmax(-1), (target / 2).log_softmax(-1), reduction="batchmean", log_target=True
        )
        (4 * kl + 0.3 * F.cross_entropy(logits, batch.label)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def engine(teacher: Classifier, student: Classifier, batches: list[Batch]) -> Callable[[int], None]:
    """Return the engine's step, with its per-image terms, seeds, schedule and metrics."""
    from kd import api
    from kd.core.seeds import seed_from
    from kd.engine.meter import Meter

    criterion = Criterion([("kl", 1.0, KL(temperature=2.0)), ("ce", 0.3, CE(label_smoothing=0.0))])
    data = TensorDataset(batches[0].image.float(), batches[0].label)
    pair = Logits(teacher), Logits(copy.deepcopy(student))
    arguments = api.Arguments([pair[0]], pair[1], data, data, criterion, "none", "all", 0, 0)
    image, own = arguments.image(), {"kind": "cpu", "precision": "fp32"}
    length = {"epochs": 1, "steps": 10**6}
    recipe = arguments.recipe(image, len(data), run=length, optimizer={"lr": 1e-3}, backend=own)
    world = distributed(recipe.backend).__enter__()
    models = api._models(arguments, image, world)
    run = api._run(recipe, arguments, models, Results(Memory(), Console("", quiet=True)), world)
    run.distillation.train()
    state, meter, plan = State(), Meter(run, State()), run.sifter.plan(0, 0.0)

    def step(i: int) -> None:
        run.backend.seed(seed_from(0, "step", i, 0))
        run.schedule.apply(run.optimizer, 0.5)
        meter.add(update(run, [batches[i % len(batches)]], state), state, plan)
        run.logger.step(state, 0.5)

    return step


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    teacher, student = models(given.size)
    shape = (given.batch, 3, given.size, given.size)
    batches = [
        Batch.of(torch.randint(256, shape, dtype=torch.uint8), torch.randint(12, (given.batch,))) for _ in range(4)
    ]
    steps = {"bare": bare(teacher, student, batches), "engine": engine(teacher, student, batches)}
    rows = []
    for i in range(given.steps + 3):
        for name in steps if i % 2 else reversed(steps):
            start, worked = time.perf_counter(), time.process_time()
            steps[name](i)
            wall, cpu = time.perf_counter() - start, time.process_time() - worked
            if i >= 3:
                rows.append({"step": i - 3, "which": name, "ms": round(1000 * wall, 3), "cpu_ms": round(1000 * cpu, 3)})
    for kind in ("ms", "cpu_ms"):
        times = {name: [r[kind] for r in rows if r["which"] == name] for name in steps}
        bare_ms, engine_ms = (statistics.median(times[name]) for name in ("bare", "engine"))
        ratio = statistics.median(a / b for a, b in zip(times["engine"], times["bare"], strict=True))
        print(f"{kind}: bare {bare_ms:.1f}, engine {engine_ms:.1f}, median of paired ratios {ratio:.3f}")
    write("step", " ".join(["python benchmarks/step.py", *sys.argv[1:]]), rows)


if __name__ == "__main__":
    main()
