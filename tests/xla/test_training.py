"""The same numbers as on the CPU backend, and a graph that is compiled once."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
import torch

pytestmark = pytest.mark.slow  # compiling
STEPS = 20


def difference(first, second, prefix: str) -> float:
    """Return the largest difference of any tensor below a prefix."""
    names = [name for name in first if name.startswith(prefix)]
    assert names
    return max(
        (first[name].double() - second[name].double()).abs().max().item()
        for name in names
    )


@pytest.mark.parametrize(
    "clip", ["optimizer.clip_grad_norm=1", "optimizer.clip_grad_norm=0"]
)
def test_the_run_is_the_cpu_backends_run(plain, clip):
    cpu = plain("cpu", clip)
    xla = plain("xla", clip)
    assert len(cpu.losses()) == STEPS
    assert xla.losses() == pytest.approx(cpu.losses(), rel=1e-5)
    norms = [[row["grad_norm"] for row in run.rows()] for run in (cpu, xla)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert xla.losses()[-1] < 0.6 * xla.losses()[0]
    values = [run.rows("val")[-1] for run in (cpu, xla)]
    assert values[1]["nll"] == pytest.approx(values[0]["nll"], rel=1e-5)
    assert values[1]["accuracy"] == values[0]["accuracy"]
    # AdamW turns the rounding noise of the key bias, whose gradient is 0 in theory,
    # into steps; hence not closer
    assert difference(cpu.checkpoint(), xla.checkpoint(), "model.") < 1e-4
    assert cpu.checkpoint().keys() == xla.checkpoint().keys()


def test_the_graph_is_compiled_once_and_executed_once_a_step(train):
    # with dropout, three epochs between two rows, and the seed and learning rate of
    # every step
    run = train("xla", "run.steps=36", "run.every.log=9", "run.every.evaluate=36", "run.every.checkpoint=36",
                "student.args.drop_rate=0.1", "optimizer.ema_decay=0.9")  # fmt: skip
    rows = run.rows()
    assert [row["step"] for row in rows] == [9, 18, 27, 36]
    compiles = [row["compiles"] for row in rows]
    assert (
        compiles[1:] == [compiles[1]] * 3
    )  # all warming up was done in the first rows
    executions = [
        after["executions"] - before["executions"]
        for before, after in itertools.pairwise(rows[1:])
    ]
    assert executions == [9 + 1, 9 + 1]  # the steps and the reading of the row


@pytest.mark.parametrize(
    "sifter",
    [
        pytest.param(
            ("sifter.kind=history", "sifter.keep=0.7", "sifter.anneal=0"), id="history"
        ),
        pytest.param(
            ("sifter.kind=relative", "sifter.sift_delay=0", "sifter.beta_value=1"),
            id="relative",
        ),
        pytest.param(("sifter.kind=none", "teacher.cache.views=2"), id="cache"),
    ],
)
def test_sifting_and_the_cache_compile_nothing_after_the_warm_up(
    train, tmp_path, sifter
):
    # plans that change, scoring passes, batches put together of others, hits and misses
    # of the cache min_lr: where the learning rate ends so low that 1 - lr * decay
    # rounds to 1, torch_xla makes a constant of it
    cached = f"teacher.cache.path={tmp_path / 'cache'}"
    run = train("xla", "run.steps=48", "run.every.log=12", "run.every.evaluate=48", "run.every.checkpoint=48",
                "optimizer.min_lr_ratio=0.01", cached, *sifter)  # fmt: skip
    rows = run.rows()
    assert [row["step"] for row in rows] == [12, 24, 36, 48]
    assert [row["compiles"] for row in rows[1:]] == [rows[1]["compiles"]] * 3


def test_evaluations_compile_twice_and_no_more(train):
    # the first asks the teacher, the later ones remember it
    run = train(
        "xla",
        "run.steps=16",
        "run.every.log=4",
        "run.every.evaluate=4",
        "run.every.checkpoint=4",
    )
    compiles = [row["compiles"] for row in run.rows()]
    assert compiles[2:] == [compiles[2]] * 2


def test_torch_xlas_zero_is_adamw(plain):
    for clip in ("optimizer.clip_grad_norm=1", "optimizer.clip_grad_norm=0"):
        adamw = plain("xla", clip)
        sharded = plain("xla", clip, "optimizer.zero=true")
        assert sharded.losses() == pytest.approx(adamw.losses(), rel=1e-5)
        norms = [[row["grad_norm"] for row in run.rows()] for run in (adamw, sharded)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
        assert adamw.checkpoint().keys() == sharded.checkpoint().keys()
        assert difference(adamw.checkpoint(), sharded.checkpoint(), "optimizer.") < 1e-3


@pytest.mark.parametrize("zero", ["optimizer.zero=false", "optimizer.zero=true"])
def test_a_run_resumes_to_the_same_bits(train, plain, tmp_path, zero):
    undisturbed = plain(
        "xla", "optimizer.clip_grad_norm=1", *([zero] if zero.endswith("true") else [])
    )
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}")
    resumed = train("xla", "optimizer.clip_grad_norm=1", zero, folder=tmp_path / "run")
    expected = undisturbed.checkpoint()
    tensors = resumed.checkpoint()
    assert expected.keys() == tensors.keys()
    assert [
        name for name in expected if not torch.equal(expected[name], tensors[name])
    ] == []


def test_bfloat16_autocast_is_the_cpus(plain):
    bf16 = "backend.precision=bf16"
    cpu = plain("cpu", bf16)
    xla = plain("xla", bf16)
    exact = plain("xla", "optimizer.clip_grad_norm=1")
    assert xla.losses() == pytest.approx(cpu.losses(), rel=0.02)
    assert xla.losses() != pytest.approx(
        exact.losses(), rel=1e-5
    )  # it does compute in bfloat16


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(clip):
    """Neither weights nor moments, in the first step or later. AdamW counts its steps
    on the host, which goes on.
    """
    from kd.parts.backends.xla import Options, build

    backend = build(Options(), "fp32", 5.0)
    backend.setup()

    def stepped(gradients):
        weight = torch.nn.Parameter(torch.ones(4, 3, device=backend.device))
        optimizer = backend.optimizer(
            [{"params": [weight]}], torch.optim.AdamW, False, lr=0.1
        )
        for gradient in gradients:
            weight.grad = torch.full((4, 3), gradient, device=backend.device)
            assert bool(backend.step(optimizer, clip).isfinite()) == math.isfinite(
                gradient
            )
            backend.end_step()
        state = backend.optimizer_state(optimizer)["state"][0]
        return [
            weight.detach().cpu(),
            *(value for name, value in state.items() if name != "step"),
        ]

    assert all(map(torch.equal, stepped([math.nan]), stepped([])))
    assert all(map(torch.equal, stepped([0.5, math.inf]), stepped([0.5])))
    assert not torch.equal(stepped([0.5, 0.5])[0], stepped([0.5])[0])
