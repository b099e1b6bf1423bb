"""Runs of the loop with a sifter: counts, schedule, resume to the bit, and what the log
says of an epoch.
"""

import pytest
import torch
from pieces import slow
from test_loop import (
    killed_and_resumed,
    read_rows,
    rows_of,
    same,
    weights,
    without_clocks,
)

from kd.core.errors import ModelError
from kd.engine.loop import train
from kd.engine.run import Scoring

RELATIVE = ("sifter.kind=relative", "sifter.sift_delay=3")
SIFTERS = {
    "history": ("sifter.kind=history", "sifter.keep=0.5"),
    "random": ("sifter.kind=random", "sifter.keep=0.5"),
    "teacher": ("sifter.kind=teacher", "sifter.keep=0.5", "teacher.cache.views=2"),
    "relative": (*RELATIVE, "sifter.beta_value=0.5"),
    "relative, in micros": (*RELATIVE, "data.micro_batch=4", "sifter.beta_value=2"),
    "relative, delayed in each epoch": (
        *RELATIVE,
        "sifter.repeat_delay_per_epoch=true",
        "sifter.sift_delay=1",
    ),
}
QUICK = ("history", "relative, in micros")  # before and after a batch is made


@pytest.mark.parametrize(
    "name", [sifter if sifter in QUICK else slow(sifter) for sifter in SIFTERS]
)
def test_a_sifted_run_that_was_killed_is_the_run_that_was_not(make, tmp_path, name):
    overrides = (
        "run.epochs=4",
        "run.every.checkpoint=1",
        "student.args.proj_drop_rate=0.3",
        *SIFTERS[name],
    )
    cache = "teacher.cache.path={}/cache"  # each run fills its own
    uninterrupted = make(
        *overrides, cache.format(tmp_path / "whole"), folder=tmp_path / "whole"
    )
    final_state = train(uninterrupted.run)
    expected = without_clocks(read_rows(tmp_path / "whole"))
    uninterrupted.store.close()
    for at in range(2, final_state.step, 3):
        folder = tmp_path / f"killed {at}"
        resumed, _ = killed_and_resumed(
            make, at, folder, *overrides, cache.format(folder)
        )
        assert same(weights(resumed.run), weights(uninterrupted.run)), at
        # an answer is asked for again where a resumed epoch scores again what was
        # waiting
        uncounted = [
            [{k: v for k, v in row.items() if k != "teacher_images"} for row in metrics]
            for metrics in (without_clocks(read_rows(folder)), expected)
        ]
        assert uncounted[0] == uncounted[1]


@pytest.mark.parametrize("name", SIFTERS)
def test_the_schedule_decays_to_its_end_and_the_epochs_are_logged(make, name):
    built = make("run.epochs=6", "run.every.log=1", *SIFTERS[name])
    state = train(built.run)
    assert state.epoch == 6
    rates = [row["lr"] for row in rows_of(built, "train")]
    assert rates[-1] < 0.02 * max(rates)
    epochs = rows_of(built, "epoch")
    assert sum(row["trained"] for row in epochs) == state.images
    assert sum(row["trained"] for row in epochs) < 6 * 32
    for row in epochs:
        assert row["effective"] <= row["candidates"]


def test_the_teacher_runs_once_on_what_is_scored(make):
    keys = ("sifter.kind=relative", "sifter.sift_delay=0", "sifter.beta_value=1")
    built = make("run.epochs=3", *keys)
    state = train(built.run)
    assert state.images == 3 * 16
    # every candidate, not again in the step
    assert sum(row["teacher_images"] for row in rows_of(built, "train")) == 3 * 32


def test_the_step_reuses_the_scoring_passs_teacher_outputs(make, steady):
    """Kept images carry the scoring pass's logits; asked again, the teacher would say
    the same.
    """
    keys = (
        "sifter.kind=relative",
        "sifter.sift_delay=0",
        "data.batch_size=12",
        f"teacher.model={steady}",
    )
    plain = make(*keys)
    queried = make(*keys)
    teacher = queried.run.teacher
    compared = []

    class Again:
        images = 0
        lookup = teacher.lookup
        flush = teacher.flush

        def __call__(self, batch):
            if batch.teacher_outputs is not None:
                compared.append(
                    (teacher(batch).logits, teacher._forward(batch)[0].logits)
                )
            return teacher(batch)

    object.__setattr__(queried.run, "teacher", Again())
    train(plain.run)
    train(queried.run)
    assert compared
    for stored, live in compared:
        torch.testing.assert_close(stored, live, rtol=1e-5, atol=1e-6)
    assert same(weights(plain.run), weights(queried.run))


def test_scoring_leaves_the_student_as_it_was(make):
    """Batch norm's statistics and dropout's draws are those of training alone: beta
    near 0 keeps all but scores all.
    """
    args = "{embed_dim: 32, depth: 1, num_heads: 2, cls_attn_layers: 1}"
    norm = ("student.model=xcit_nano_12_p8_224", f"student.args={args}")
    sifted = make(
        *norm, "sifter.kind=relative", "sifter.sift_delay=0", "sifter.beta_value=0.01"
    )
    plain = make(*norm)
    assert sifted.run.sifter.plan(0, 0.0).steps == 3
    before = {
        name: tensor.clone()
        for name, tensor in sifted.run.distillation.state_dict().items()
    }
    plan = plain.run.sifter.plan(0, 0.0)
    batch = next(iter(plain.run.loader.epoch(plan, 0)))
    sifted.run.distillation.train()
    torch.manual_seed(5)
    Scoring(sifted.run)([batch])
    draw = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(draw, torch.rand(1))
    assert sifted.run.distillation.training
    assert same(before, sifted.run.distillation.state_dict())


def test_the_scoring_pass_may_see_images_of_half_the_size(make):
    built = make(
        *RELATIVE,
        "sifter.shrink=2",
        "student.args.dynamic_img_size=true",
        "run.epochs=4",
    )
    shapes: list[torch.Size] = []
    hook = built.run.distillation.student.network.register_forward_pre_hook(
        lambda _, inputs: shapes.append(inputs[0].shape)
    )
    state = train(built.run)
    hook.remove()
    side = max(shape[-1] for shape in shapes)
    assert {shape[-1] for shape in shapes} == {side, side // 2}
    assert state.images < 4 * 32


def test_a_student_of_one_size_is_not_scored_on_smaller_images(make):
    built = make(*RELATIVE, "sifter.shrink=2")
    with pytest.raises(
        ModelError,
        match=(
            r"sifter\.shrink: is 2, but the student takes no smaller images \(Input"
            r" height"
        ),
    ):
        train(built.run)
