"""NaN and infinity in images, losses and weights: named; or their steps are left out,
which is computed another way.
"""

import copy
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from pieces import timeless, without_clocks
from test_loop import read_rows
from timm.optim.muon import Muon
from torch import nn
from torch.nn import functional as F

import kd
from kd import config
from kd.core.errors import Interrupted, NonFiniteLoss
from kd.core.types import State
from kd.engine.diagnosis import Diverged
from kd.engine.loop import train
from kd.engine.meter import require_applied
from kd.jobs.train import train as run_job
from kd.study.report.report import report

SKIP = "optimizer.on_nonfinite=skip"
IMAGE = 5
BAD = (
    f"losses=[{{kind: outside.overflowing, image: {IMAGE}}}, {{kind: ce, weight: 0.5}}]"
)


@pytest.fixture(autouse=True)
def outside(monkeypatch) -> None:
    """Make the parts that are not kd's importable."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "distributed"))


def steps_with(run, image: int, epochs: int) -> list[int]:
    """Return the numbers of the steps that see an image, from 1."""
    plans = [
        run.sifter.plan(epoch, 0.0).ids.view(-1, run.length.batch_size)
        for epoch in range(epochs)
    ]
    return [number for number, ids in enumerate(torch.cat(plans), 1) if image in ids]


@pytest.mark.parametrize("workers", [0, 2])
def test_term_step_and_layer_are_named(make, workers):
    built = make("run.epochs=2", "run.every.log=4", BAD, f"data.workers={workers}")
    bad = steps_with(built.run, IMAGE, 2)
    before = {
        name: tensor.clone()
        for name, tensor in built.run.distillation.state_dict().items()
    }
    with pytest.raises(
        Diverged,
        match=rf"^losses: outside.overflowing, loss, grad_norm .* in step {bad[0]}; ",
    ) as caught:
        train(built.run)
    assert "first in loss term 'outside.overflowing'" in str(caught.value)
    assert "optimizer.on_nonfinite=skip" in caught.value.remedy
    assert before.keys() == built.run.distillation.state_dict().keys()
    assert all(
        tensor.isfinite().all()
        for tensor in built.run.distillation.state_dict().values()
    )


@pytest.mark.parametrize("config_path", ["head", "blocks.0.attn.qkv"])
def test_a_layer_whose_output_overflows_is_named(make, config_path):
    """Its weights are finite; the network has a parameter that it does not use."""
    built = make("run.epochs=1", "run.every.log=2")
    built.run.distillation.student.network.unused = nn.Parameter(torch.zeros(1))
    layer = built.run.distillation.student.network.get_submodule(config_path)
    with torch.no_grad():
        layer.weight.fill_(3e38)
        layer.bias.fill_(3e38)
    with pytest.raises(
        Diverged,
        match=rf"in steps 1 to 2; first in the output of layer 'network.{config_path}'",
    ):
        train(built.run)


@pytest.mark.parametrize("policy", ["optimizer.on_nonfinite=error", SKIP])
def test_a_weight_is_named_and_a_run_that_makes_no_good_step_ends(make, policy):
    built = make("run.steps=12", "run.every.log=4", "run.every.evaluate=12", policy)
    with torch.no_grad():
        built.run.distillation.student.network.head.weight[1, 2] = float("nan")
    steps = (
        "9 to 12; 12 steps in a row were skipped, 10 may be"
        if policy == SKIP
        else "1 to 4"
    )
    message = (
        rf"^losses: kl, loss, grad_norm became NaN or infinite in steps {steps}; first"
        r" in weight 'student.network.head"
    )
    with pytest.raises(NonFiniteLoss, match=message):
        train(built.run)
    rows = [
        (row["step"], row["skipped"], "loss" in row)
        for row in built.store.rows
        if row["kind"] == "train"
    ]
    assert rows == ([(4, 4.0, False), (8, 4.0, False)] if policy == SKIP else [])


def test_a_run_that_skips_more_than_half_of_its_steps_ends_with_an_error(
    make, tmp_path
):
    """All of 8 steps, which are fewer than may be skipped in a row; the same command
    says it again.
    """
    bad = f"losses=[{{kind: outside.overflowing, image: {IMAGE}}}]"
    for _ in range(2):
        built = make(
            "run.epochs=8",
            "data.batch_size=36",
            "run.every.log=3",
            bad,
            SKIP,
            folder=tmp_path / "run",
        )
        with pytest.raises(
            NonFiniteLoss,
            match=r"^optimizer\.on_nonfinite: 8 of 8 steps were skipped.*half.*lr",
        ):
            train(built.run)
        built.store.close()


@pytest.mark.parametrize("good", [3, 4])
def test_half_of_the_steps_may_be_skipped(good):
    state = State(step=4 + good, skipped_in_all=4)
    with (
        nullcontext()
        if good == 4
        else pytest.raises(NonFiniteLoss, match="4 of 7 steps")
    ):
        require_applied(state)


def test_the_reports_say_how_many_steps_were_skipped(settings, capfd):
    """One image in one step of each epoch; the baseline skips none."""
    bad = f"losses=[{{kind: outside.overflowing, image: {IMAGE}}}]"
    overrides = [
        "run.epochs=3",
        "data.batch_size=12",
        "run.every.log=2",
        "run.baseline=true",
    ]
    folder = run_job(config.load(settings, [*overrides, bad, SKIP])).folder
    line = "3 of 9 optimizer steps were skipped: their gradient was NaN or infinite."
    assert (folder / "report.md").read_text().count(line) == 1
    assert capfd.readouterr().out.count(line) == 1
    reported = report([folder], images=-1, trust=True)
    assert line in reported.summary
    assert re.search(
        r"steps were skipped</td>\s*<td[^>]*>3 of 9", reported.file.read_text()
    )


def small(seed: int) -> nn.Sequential:
    """A network with batch norm, whose statistics no optimizer holds."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 3),
    )


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("nan", [0, 4], ids=["first step", "later"])
def test_a_run_that_skips_is_the_plain_loop_that_skips(kind, nan):
    """An image of NaN; weights, state and batch norm's statistics as if its batch had
    not come.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(24, 3, 8, 8, generator=generator)
    teacher = small(1)
    student = small(2)
    images[4 * nan + 1, 0, 0, 0] = float("nan")
    items = [(image, i % 3) for i, image in enumerate(images)]
    batches = torch.utils.data.DataLoader(items, batch_size=4)  # taken as they come
    plain = copy.deepcopy(student)
    settings = {
        "kind": kind,
        "schedule": "constant",
        "warmup": 0,
        "weight_decay": 0,
        "lr": 0.01,
        "clip": 1.0,
    }
    distilled = kd.distill(
        teacher=teacher, student=student, train=batches, val=items[4 * nan + 4 :], epochs=1, batch_size=4,
        optimizer={**settings, "on_nonfinite": "skip"}, backend={"kind": "cpu"}, progress=False,
    )  # fmt: skip
    assert distilled.state.skipped == 0
    optimizers = {
        "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0, fused=True),
        "sgd": partial(
            torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True
        ),
        "muon": partial(
            Muon, lr=0.01, weight_decay=0, betas=(0.9, 0.999), nesterov=True
        ),
    }
    optimizer = optimizers[kind](plain.parameters())
    teacher.eval()
    for number, (image, _) in enumerate(batches):
        if number == nan:
            plain[1].num_batches_tracked += 1  # a count, no statistic
            continue
        with torch.no_grad():
            target = teacher(image).log_softmax(1)
        loss = (
            F.kl_div(
                plain(image).log_softmax(1), target, reduction="none", log_target=True
            )
            .sum(1)
            .mean()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(
            student.state_dict()[name], tensor, rtol=1e-6, atol=1e-7
        )


def test_a_run_that_skips_resumes_to_the_same_bits(make, tmp_path):
    """Sifted by its losses, averaged; stopped after each step in turn; begun with the
    policy `error`.
    """
    overrides = (
        "run.epochs=4",
        "run.every.log=1",
        BAD,
        "optimizer.ema_decay=0.9",
        "sifter.kind=history",
        "sifter.anneal=0",
    )
    uninterrupted = make(*overrides, SKIP, folder=tmp_path / "whole")
    final_state = train(uninterrupted.run)
    uninterrupted.store.close()
    rows = without_clocks(read_rows(tmp_path / "whole"))
    skipped = [row["step"] for row in rows if row["kind"] == "train" and row["skipped"]]
    assert len(skipped) > 1
    assert all("loss" not in row for row in rows if row.get("skipped"))
    assert all(
        tensor.isfinite().all()
        for name, tensor in uninterrupted.store.restore()[1].items()
        if not name.startswith("sifter.")
    )
    for at in (skipped[0] - 1, skipped[0], final_state.step - 1):
        folder = tmp_path / f"stopped {at}"
        calls = iter([False] * (at - 1) + [True])
        stopped = make(*overrides, SKIP, folder=folder)
        with pytest.raises(Interrupted):
            train(replace(stopped.run, stop=lambda calls=calls: next(calls, False)))
        stopped.store.close()
        resumed = make(*overrides, SKIP, folder=folder)
        assert timeless(train(resumed.run)) == timeless(final_state)
        resumed.store.close()
        expected = uninterrupted.store.restore()[1]
        tensors = resumed.store.restore()[1]
        assert all(
            torch.equal(expected[name].nan_to_num(7.0), tensors[name].nan_to_num(7.0))
            for name in expected
        )
        assert [
            row for row in without_clocks(read_rows(folder)) if row["kind"] == "val"
        ] == [r for r in rows if r["kind"] == "val"]


def test_the_image_with_nan_is_named_and_not_its_batch():
    torch.manual_seed(0)
    images = torch.randn(32, 3, 4, 4)
    images[21, 0, 1, 2] = float("nan")
    models = [nn.Sequential(nn.Flatten(), nn.Linear(48, 3)) for _ in range(2)]
    train = [(image, 0) for image in images]
    with pytest.raises(NonFiniteLoss, match=r"first in image 21\b"):
        kd.distill(
            teacher=models[0],
            student=models[1],
            train=train,
            val=train[:8],
            epochs=1,
            batch_size=16,
        )
