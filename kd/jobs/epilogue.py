"""After the last step: what was skipped, saved, unreadable, sifted; what the student confuses; the last score."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from kd.core.contracts import Source
from kd.core.evaluation import Sampled
from kd.core.scores import Scored
from kd.core.types import State
from kd.engine.run import Run
from kd.files.run_dir import RunDir
from kd.models.teacher import LiveTeacher
from kd.setup.build import Built
from kd.setup.data import Data
from kd.setup.recipe import Recipe
from kd.setup.student import load_distillation
from kd.study.report.summary import skipped_text

if TYPE_CHECKING:
    from kd.jobs.progress.trackers import Trackers


def epilogue(recipe: Recipe, run: Run, state: State, data: Data, folder: RunDir) -> list[str]:
    """Return lines of what a run that has ended skipped, gave up, saved and could not read. All ranks must call it."""
    known = folder.manifest()
    lines = [skipped_text(state.skipped_in_all, state.step), patience_text(run, state)]
    lines.append(memory(recipe.loop.optimizer.zero, run, known.get("modes", {})))
    broken = unreadable((data.train, data.val), run, known)
    if broken:
        folder.record(unreadable=broken)
        count = f"{len(broken)} images" if len(broken) > 1 else "1 image"
        lines.append(f"{count} could not be decoded and had weight 0: {', '.join(broken[:5])}")
    return [line for line in lines if line]


def show_mistakes(trackers: Trackers, recipe: Recipe, run: Run, state: State, data: Data) -> None:
    """Show trackers the validation images that the student confuses; nothing without one class an image."""
    if not data.labelled or recipe.student.task.logits != "softmax":
        return
    from kd.study.answers import mistakes  # only where a tracker shows them

    with run.average.applied() if run.average is not None else nullcontext():
        student = run.distillation.student.eval()
        trackers.pictures(state.step, mistakes(student, data.views()[1], data.classes, run.backend.device))


def memory(zero: bool, run: Run, modes: dict[str, str]) -> str:
    """Say what sharding and bfloat16 gave back on this rank, in MiB; "" on one rank without. All ranks must call it."""
    backend = run.backend
    held = backend.counters()["optimizer_mib"]
    whole = held
    if zero:
        whole = backend.reduce_sum(torch.tensor([held], device=backend.device)).item()
    text = f"optimizer state {held:.2f} MiB on this rank"
    if whole > held:
        text += f" of {whole:.2f} in all: ZeRO-1 over {backend.world_size} ranks gave back {whole - held:.2f}"
    if isinstance(run.teacher, LiveTeacher) and modes.get("teacher", "").startswith("bf16"):
        return f"{text}; teacher {run.teacher.mib:.2f} MiB in bfloat16, which gave back as much"
    return text if backend.world_size > 1 else ""


def patience_text(run: Run, state: State) -> str:
    """Say that a run ended because it did not get better; "" where it did not."""
    if not run.length.gave_up(state):
        return ""
    best = f"{run.evaluator.decides} {state.best:.4g}"
    return f"ended after step {state.step}: {state.no_better} evaluations in a row were no better than {best}"


def unreadable(splits: tuple[Source, Source], run: Run, known: Mapping[str, Any]) -> list[str]:
    """List the images of both splits that any rank could not decode, now or in an earlier start. All ranks call it."""
    found = set(known.get("unreadable", []))
    for source, loader in zip(splits, (run.loader, run.evaluator.loader), strict=True):
        broken_N = torch.zeros(len(source), device=run.backend.device)
        broken_N[list(loader.unreadable)] = 1.0
        found |= {source.name(id) for id in run.backend.reduce_sum(broken_N).nonzero()[:, 0].tolist()}
    return sorted(found)


def sifting_report(run: Run, data: Data, folder: RunDir) -> str:
    """Return the sifting section of report.md and write the contact sheet; all ranks must call it.

    Empty where nothing was sifted. The images are shown where the sifter knows how often each was visited.
    """
    state, source = run.sifter.state_dict(), data.train
    epochs = folder.metrics("epoch") if run.backend.rank == 0 else []
    if all(row["trained"] > len(source) - run.length.batch_size for row in epochs):
        return ""
    from kd.study.report.sifting import report  # draws pictures: only where something was sifted

    return report(epochs, state, source, data.labels, run.length.batch_size, folder.path / "sifting.jpg")


@torch.no_grad()
def conclude(built: Built, folder: RunDir, test: bool = True) -> Scored | None:
    """Score the best checkpoint of a run that has ended and write scored.json; what was scored before is read.

    `test`: of the test images, where there are some. The student has the weights of that checkpoint afterwards. All
    ranks must call it. Rank 0 reads the folder; where it knows the score, the others return None.
    """
    backend, module = built.run.backend, built.run.distillation
    test = test and built.test is not None
    source = built.test if test and built.test is not None else built.val
    known, step, rows = None, 0, 0
    if backend.rank == 0:
        known = folder.scored()
        known = known if known is not None and known.data == source.fingerprint else None
    is_known = torch.tensor([float(known is not None)], device=backend.device)
    backend.broadcast_([is_known])
    if is_known.item():
        return known
    if backend.rank == 0:
        state, tensors, _ = folder.best()
        load_distillation(module, tensors)
        step, rows = state.step, len(folder.metrics("val"))
    backend.broadcast_([*module.parameters(), *module.buffers()])
    known = score(built, step, rows, test)
    if backend.rank == 0:
        folder.write_scored(known)
    return known


def score(built: Built, step: int, evaluations: int, test: bool) -> Scored:
    """Score the student as it is on the test images, or on the validation images. All ranks must call it."""
    evaluator, source = (built.test_evaluator(), built.test) if test else (built.run.evaluator, built.val)
    assert source is not None
    row = evaluator(built.run.distillation.student)
    samples = evaluator.samples() if isinstance(evaluator, Sampled) else {}
    right = samples[evaluator.decides].right if evaluator.decides in samples else None
    images = len(source) if right is None else len(right)
    return Scored("test" if test else "val", step, source.fingerprint, images, evaluations, row, samples)
