"""The last score of a run: of its best checkpoint, once, on images on which nothing was chosen where there are some."""

from __future__ import annotations

from kd.artifacts.run_dir import RunDir
from kd.evaluation import Sampled
from kd.scores import Scored
from kd.setup.build import Built
from kd.setup.data import Data
from kd.setup.student import load_distillation


def conclude(built: Built, data: Data, folder: RunDir) -> Scored:
    """Score the best checkpoint of a run that has ended and write scored.json; what was scored before is read.

    The student has the weights of that checkpoint afterwards. All ranks must call it.
    """
    backend, source = built.run.backend, data.val if data.test is None else data.test
    backend.barrier()  # rank 0 has written the last checkpoint
    known = folder.scored()
    if known is not None and known.data == source.fingerprint:
        return known
    state, tensors, _ = folder.best()
    load_distillation(built.run.distillation, tensors)
    known = score(built, data, state.step, len(folder.metrics("val")), data.test is not None)
    if backend.rank == 0:
        folder.write_scored(known)
    return known


def score(built: Built, data: Data, step: int, evaluations: int, test: bool) -> Scored:
    """Score the student as it is on the test images, or on the validation images. All ranks must call it."""
    evaluator, source = (built.test(), data.test) if test else (built.run.evaluator, data.val)
    assert source is not None
    row = evaluator(built.run.distillation.student)
    samples = evaluator.samples() if isinstance(evaluator, Sampled) else {}
    right = samples[evaluator.decides].right if evaluator.decides in samples else None
    images = len(source) if right is None else len(right)
    return Scored("test" if test else "val", step, source.fingerprint, images, evaluations, row, samples)
