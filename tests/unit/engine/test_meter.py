"""Numbers of a window and an epoch, and what one rank computes for all. Runs of real
ranks: tests/distributed.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from pieces import Ranks

from kd.core.errors import Interrupted
from kd.core.types import Plan, State
from kd.engine import meter
from kd.engine.loop import evaluate_and_checkpoint
from kd.engine.run import Stopping
from kd.engine.snapshot import average_buffers
from kd.jobs.distill import reused_outputs

NORM = (
    "student.model=xcit_nano_12_p8_224",
    "student.args={embed_dim: 24, depth: 2, num_heads: 2, cls_attn_layers: 1}",
)
FROZEN = ("student.tuning.freeze=[patch_embed.*]", "student.tuning.freeze_epochs=1")


def test_cpu_seconds_are_those_of_all_ranks(make, monkeypatch):
    """Each of three ranks needs two seconds for a window."""
    built = make()
    clock = iter((5.0, 7.0))
    monkeypatch.setattr(meter, "cpu_seconds", lambda: next(clock))
    window = meter.Meter(
        replace(built.run, backend=Ranks(built.run.backend, 3)), State(cpu_seconds=10.0)
    )
    window.add(
        {"loss": torch.tensor(1.0)}, State(), Plan(torch.arange(8), torch.ones(8))
    )
    after = window.flush(State(step=1, images=8, cpu_seconds=10.0), 0.1)
    assert after.cpu_seconds == built.store.rows[-1]["cpu_seconds"] == 16.0


@pytest.mark.parametrize(("labelled", "logged"), [(0.5, 0.75), (0.0, None)])
def test_the_accuracy_of_a_window_is_that_of_the_labelled_images_of_all_ranks(
    make, labelled, logged
):
    """Unlabelled images counted as wrong. This rank has labels for some of its images,
    the other one for none.
    """
    built = make()
    window = meter.Meter(
        replace(
            built.run, backend=Ranks(built.run.backend, 2, lambda tensor: tensor / 2)
        ),
        State(),
    )
    values = {
        "accuracy": torch.tensor(0.75 * labelled),
        "labelled": torch.tensor(labelled),
    }
    window.add(values, State(), Plan(torch.arange(8), torch.ones(8)))
    window.flush(State(step=1, images=8), 0.1)
    assert built.store.rows[-1].get("accuracy") == logged
    assert "labelled" not in built.store.rows[-1]


@pytest.mark.parametrize("frozen", [(), FROZEN], ids=["plain", "frozen"])
def test_statistics_and_their_averages_become_the_mean_of_the_ranks(make, frozen):
    """The other rank's values are larger by 1. No parameter changes, and no frozen
    statistic.
    """
    run = make(*NORM, *frozen, "optimizer.ema_decay=0.9").run
    run = replace(run, backend=Ranks(run.backend, 2, lambda tensor: tensor + 0.5))
    states = []
    for _ in range(2):
        student = run.distillation.student.state_dict() | {
            f"average.{n}": t for n, t in run.average.average.items()
        }
        states.append({name: tensor.clone() for name, tensor in student.items()})
        average_buffers(run, State())
    before, after = states
    buffers = {
        name for name in before if name.endswith(("running_mean", "running_var"))
    }
    frozen_buffers = {name for name in buffers if frozen and "patch_embed" in name}
    assert {name.startswith("average.") for name in buffers - frozen_buffers} == {
        True,
        False,
    }
    assert bool(frozen_buffers) == bool(frozen)
    for name in before:
        expected = (
            before[name] + 0.5 if name in buffers - frozen_buffers else before[name]
        )
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("due", ["evaluation", "checkpoint", "stop"])
def test_a_checkpoint_has_the_mean_statistics_of_the_ranks_whyever_it_is_written(
    make, tmp_path, due
):
    """The other rank's values are larger by 1."""
    built = make(*NORM, folder=tmp_path / "run")
    run = replace(
        built.run, backend=Ranks(built.run.backend, 2, lambda tensor: tensor + 0.5)
    )
    expected = {
        n: t + 0.5 for n, t in run.distillation.named_buffers() if "running_" in n
    }
    stop = Stopping(run)
    stop.agreed = due == "stop"
    with pytest.raises(Interrupted) if stop.agreed else nullcontext():
        evaluate_and_checkpoint(
            run, State(step=1), stop, due == "evaluation", due == "checkpoint"
        )
    _, tensors, _ = built.store.restore()
    built.store.close()
    restored = {name: tensors[f"model.{name}"] for name in expected}
    torch.testing.assert_close(restored, expected, rtol=0, atol=1e-6)


def test_outputs_of_any_rank_are_none_that_were_at_hand(make, tmp_path):
    """Two ranks: each of them ran the teacher on half of the images, and a row has the
    images of both.
    """
    built = make(
        f"teacher.cache.path={tmp_path / 'cache'}",
        "teacher.cache.views=1",
        folder=tmp_path / "run",
    )
    run = replace(built.run, backend=Ranks(built.run.backend, 2))
    window = meter.Meter(run, State())
    built.run.teacher.live.images += 16
    window.add(
        {"loss": torch.tensor(1.0)}, State(), Plan(torch.arange(8), torch.ones(8))
    )
    window.flush(State(step=1, images=32), 0.1)
    assert built.store.metrics("train")[-1]["teacher_images"] == 32.0
    assert (
        reused_outputs(32, run, State(step=1, images=32), built.store)["outputs"] == 0
    )
    assert (
        reused_outputs(48, run, State(step=2, images=64), built.store)["outputs"] == 16
    )


def test_the_effective_sample_size_of_an_epoch_is_kishs(make):
    """(sum of w)^2 / sum of w^2, of weights 1, 2 and 3."""
    built = make()
    meter.Meter(built.run, State()).log_epoch(
        State(), Plan(torch.arange(3), torch.tensor([1.0, 2.0, 3.0])), 1
    )
    row = built.store.rows[-1]
    assert (row["candidates"], row["trained"]) == (3.0, 8.0)
    assert row["effective"] == pytest.approx(36 / 14)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([4], "in step 4"),
        ([4, 5, 6], "in steps 4 to 6"),
        ([4, 6, 9], "in steps 4, 6, 9"),
    ],
)
def test_steps_that_diverged_are_named(steps, text):
    error = meter.diverged(
        ["kl", "ce"], steps, (State(), Plan(torch.arange(3), torch.ones(3)))
    )
    assert f"kl, ce became NaN or infinite {text}." in str(error)
    assert error.config_path == "losses"
