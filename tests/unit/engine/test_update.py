"""What one step and one evaluation are, compared with a formula: averaged weights,
seeds, logged means, host waits.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from waits import AT_POINTS, HOST, ONCE_AN_EPOCH, Reads

from kd.core.evaluation import Evaluator
from kd.core.types import State
from kd.engine.loop import evaluate, train
from kd.engine.run import Stopping
from kd.engine.snapshot import load_student

CASES = {
    "live": (),
    "averaged, clipped": ("optimizer.clip_grad_norm=1.0", "optimizer.ema_decay=0.9"),
    "micros": ("data.micro_batch=2",),
    "cached": ("teacher.cache.views=1",),
    "history": ("sifter.kind=history", "sifter.keep=0.5"),
    "random": ("sifter.kind=random", "sifter.keep=0.5"),
    "relative": ("sifter.kind=relative", "sifter.sift_delay=0", "sifter.beta_value=1"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_for_the_device_at_known_points_only(make, tmp_path, name):
    """At a log point, in an evaluation, with a checkpoint, and once an epoch; in no
    step.
    """
    folder = (f"teacher.cache.path={tmp_path / 'cache'}",) if name == "cached" else ()
    run = make("run.epochs=3", "run.every.log=100", *CASES[name], *folder).run
    with Reads() as reads:
        train(run)
    # of a batch that was not sent yet
    waits = {"history": ONCE_AN_EPOCH, "cached": {"types:take"}}.get(name, set())
    assert set(reads.found) - HOST == AT_POINTS | waits


def test_the_newest_of_equal_scores_is_kept_and_patience_counts_on(make):
    run = make("run.steps=1").run
    first, chosen = evaluate(run, State(), Stopping(run))
    second, again = evaluate(run, first, Stopping(run))
    assert (chosen, again) == (True, True)
    assert (second.best, first.no_better, second.no_better) == (first.best, 0, 1)


@pytest.mark.parametrize(
    ("images", "expected"), [(111, [0, 1, 3, 4]), (400, [0, 1, 4]), (0, [0, 1])]
)
def test_the_newest_within_a_standard_error_of_the_best_is_kept(make, images, expected):
    """The accuracies of a real run; sqrt(0.6306 * 0.3694 / images) is 0.0458 and
    0.0241; 0: it is not known.
    """
    scores = [0.5586, 0.6306, 0.5766, 0.5856, 0.6126]

    class Scripted(Evaluator):
        selection_metric = "accuracy"

        def __call__(self, student, stop=bool):
            return {"accuracy": scores[step]}

        def standard_error(self, value):
            return math.sqrt(value * (1 - value) / images) if images else 0.0

    run = replace(make("run.steps=1").run, evaluator=Scripted())
    state = State()
    kept_steps = []
    for step in range(5):
        state, chosen = evaluate(run, state, Stopping(run))
        kept_steps += [step] * chosen
    assert kept_steps == expected
    assert (state.best, state.no_better) == (0.6306, 3)


def averaged(run) -> torch.nn.Module:
    """Return a copy of the student with the averaged weights, put there by name."""
    student = copy.deepcopy(run.distillation.student)
    named = {**dict(student.named_parameters()), **dict(student.named_buffers())}
    with torch.no_grad():
        for name, tensor in run.average.average.items():
            named[name].copy_(tensor)
    return student


def test_evaluation_and_checkpoint_have_the_averaged_weights(make, tmp_path):
    run, store, _ = make(
        "run.steps=4",
        "optimizer.ema_decay=0.9",
        "optimizer.lr=0.03",
        folder=tmp_path / "run",
    )
    train(run)
    last = store.metrics("val")[-1]
    raw = run.evaluator(run.distillation.student)
    smooth = run.evaluator(averaged(run))
    column = (
        "student_kl"
        if "student_kl" in smooth
        else next(key for key in smooth if smooth[key] != raw[key])
    )
    assert last[column] == pytest.approx(smooth[column], rel=1e-6)
    assert last[column] != pytest.approx(raw[column], rel=1e-3)
    _, tensors, _ = store.restore()
    student = copy.deepcopy(run.distillation.student)
    load_student(student, tensors)  # what is scored at the end, and exported
    expected = averaged(run).state_dict()
    assert all(
        torch.equal(tensor, expected[name])
        for name, tensor in student.state_dict().items()
    )
    raw_state = run.distillation.student.state_dict()
    assert any(
        not torch.equal(tensor, raw_state[name])
        for name, tensor in student.state_dict().items()
    )
