"""The last score of a run: of its best checkpoint, once, on images on which nothing was chosen where there are some."""

from __future__ import annotations

import torch

from kd.core.evaluation import Sampled
from kd.core.scores import Scored
from kd.files.run_dir import RunDir
from kd.setup.build import Built
from kd.setup.student import load_distillation


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
