"""The loop against a plain PyTorch loop, against itself divided otherwise, and against
itself after a kill.
"""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from pieces import slow, timeless, without_clocks
from torch.nn import functional as F

from kd.core.errors import Interrupted, NonFiniteLoss, RunError
from kd.core.every import Intervals
from kd.core.facts import LossFacts
from kd.core.seeds import seed_from
from kd.core.types import Batch, Dims, Outputs, State
from kd.engine.criterion import Criterion
from kd.engine.loop import advance, train
from kd.engine.monitor.timeline import Timeline
from kd.engine.run import RunLength
from kd.parts.losses import ce, kl
from kd.setup.student import loss_term


class Stop(Exception):
    """Stands for the kill: raised in the middle of a run."""


class StopAfter:
    """A logger that ends a run after so many steps, before their checkpoint is
    written.
    """

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, state: State, progress: float) -> None:
        if state.step == self.at:
            raise Stop

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        pass

    def info(self, text: str) -> None:
        pass


def weights(run) -> dict[str, torch.Tensor]:
    tensors = {
        name: tensor.clone() for name, tensor in run.distillation.state_dict().items()
    }
    if run.average is not None:
        tensors |= {
            f"average.{name}": tensor.clone()
            for name, tensor in run.average.average.items()
        }
    return tensors


def rows_of(built, kind: str) -> list[dict]:
    return [row for row in built.store.rows if row["kind"] == kind]


def killed_and_resumed(make, step: int, folder, *overrides: str):
    """Kill a run after a step, resume it to its end; return what resumed, and its last
    state.
    """
    killed = make(*overrides, folder=folder, logger=StopAfter(step))
    with pytest.raises(Stop):
        train(killed.run)
    killed.store.close()
    resumed = make(*overrides, folder=folder)
    state = train(resumed.run)
    resumed.store.close()
    return resumed, state


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize(
    "overrides",
    [[], ["optimizer.kind=sgd", "optimizer.lr=0.1"], ["optimizer.clip_grad_norm=0"]],
    ids=str,
)
def test_it_is_a_plain_loop(make, overrides):
    """Bit for bit: the batches of the run's loader, its start weights, and nothing else
    of the engine.
    """
    ours = make("run.steps=5", "run.every.log=1", *overrides)
    plain = make("run.steps=5", *overrides).run
    train(ours.run)

    student = plain.distillation.student
    teacher = plain.teacher
    student.train()
    sgd = "optimizer.kind=sgd" in overrides
    peak = 0.1 if sgd else 2e-3
    network = student.network
    decayed = [
        p
        for n, p in network.named_parameters()
        if p.ndim > 1 and n not in ("pos_embed", "cls_token")
    ]
    undecayed = [
        p
        for n, p in network.named_parameters()
        if p.ndim <= 1 or n in ("pos_embed", "cls_token")
    ]
    groups = [
        {"params": decayed, "weight_decay": 0.05},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    optimizer = (
        torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True, fused=True)
        if sgd
        else torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), fused=True)
    )
    losses = []
    norms = []
    batches = [
        b
        for epoch in range(2)
        for b in plain.loader.epoch(plain.sifter.plan(epoch, epoch / 2), epoch)
    ]
    for step, batch in enumerate(batches[:5]):
        for group in optimizer.param_groups:
            group["lr"] = plain.schedule.factor((step + 0.5) / 5) * peak
        loss_B = F.kl_div(
            F.log_softmax(student(batch.image).logits, 1),
            F.log_softmax(teacher(batch).logits, 1),
            reduction="none",
            log_target=True,
        ).sum(1)
        loss_B.mean().backward()
        limit = float("inf") if "optimizer.clip_grad_norm=0" in overrides else 1.0
        norms.append(torch.nn.utils.clip_grad_norm_(decayed + undecayed, limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_B.mean().item())
    rows = rows_of(ours, "train")
    assert [row["loss"] for row in rows] == losses
    assert [row["grad_norm"] for row in rows] == norms
    assert same(ours.run.distillation.student.state_dict(), student.state_dict())


def test_a_step_of_muon_makes_the_gradient_orthogonal(make):
    """Of a matrix: 0.2 lr sqrt(longer side) U V' of the gradient U S V'
    (arXiv:2502.16982, eq. 2 and 4).

    Of eight images it has few large singular values, and the iterations, in bfloat16,
    leave the small ones small.
    """
    keys = (
        "run.steps=1",
        "optimizer.lr=0.01",
        "optimizer.warmup_ratio=0",
        "optimizer.weight_decay=0",
        "optimizer.clip_grad_norm=0",
    )
    runs = (
        make(*keys, "optimizer.kind=muon"),
        make(*keys, "optimizer.kind=sgd", "optimizer.momentum=0"),
    )
    before = weights(runs[0].run)
    steps = []
    for built in runs:
        train(built.run)
        lr = 0.01 * built.run.schedule.factor(0.5)
        steps.append(
            {
                name: (before[name] - tensor) / lr
                for name, tensor in weights(built.run).items()
            }
        )
    name = next(name for name in before if name.endswith("blocks.0.mlp.fc1.weight"))
    turned, gradient = (step[name].double() for step in steps)
    u, values, v = torch.linalg.svd(gradient, full_matrices=False)
    assert values[2] < values[0] / 2
    turned = u[:, :3].T @ turned @ v[:3].T / (0.2 * max(gradient.shape) ** 0.5)
    torch.testing.assert_close(
        turned, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.2
    )


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batches_sum_to_the_whole_batch(make, micro):
    # a clipped gradient has lost its length
    same_step = (
        "run.steps=1",
        "optimizer.kind=sgd",
        "optimizer.clip_grad_norm=0",
    )
    undivided = make(*same_step)
    divided = make(*same_step, f"data.micro_batch={micro}")
    assert divided.run.accumulate == 8 // micro
    before = weights(undivided.run)
    for built in (undivided, divided):
        train(built.run)
    for name in ("loss", "accuracy", "grad_norm"):
        assert divided.store.rows[0][name] == pytest.approx(
            undivided.store.rows[0][name], rel=1e-4
        )
    for name, tensor in weights(divided.run).items():
        step = tensor - before[name]
        expected = weights(undivided.run)[name] - before[name]
        torch.testing.assert_close(
            step, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item() + 1e-9
        )


def test_the_rows_are_means_over_their_window(make):
    often = make("run.every.log=1", "run.epochs=1")
    seldom = make("run.every.log=4", "run.epochs=1")
    for built in (often, seldom):
        train(built.run)
    every_row = rows_of(often, "train")
    (window,) = rows_of(seldom, "train")
    assert (len(every_row), window["step"]) == (4, 4)
    for name in ("loss", "kl", "accuracy", "grad_norm"):
        assert window[name] == pytest.approx(
            sum(row[name] for row in every_row) / 4, rel=1e-6
        )
    assert window["lr"] == every_row[-1]["lr"]
    assert every_row[0]["loss"] != every_row[1]["loss"]


def test_a_seed_decides_every_bit(make):
    runs = [make("run.epochs=1", *overrides) for overrides in ([], [], ["run.seed=1"])]
    for built in runs:
        train(built.run)
    assert same(weights(runs[0].run), weights(runs[1].run))
    assert without_clocks(runs[0].store.rows) == without_clocks(runs[1].store.rows)
    assert not same(weights(runs[0].run), weights(runs[2].run))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_step_and_rank_has_a_seed_of_its_own(make, rank):
    run = make("run.steps=3").run
    seeds = []
    run.backend.rank = rank
    run.module.register_forward_pre_hook(lambda *_: seeds.append(torch.initial_seed()))
    train(run)
    assert seeds == [seed_from(run.seed, "step", step, rank) for step in range(3)]


def test_the_first_step_is_averaged_as_step_1(make):
    run = make("run.steps=1", "optimizer.ema_decay=0.9").run
    before = {name: tensor.clone() for name, tensor in run.average.average.items()}
    train(run)
    after = run.distillation.student.state_dict()
    decay = 2 / 11  # (1 + 1) / (10 + 1), below 0.9
    for name, average in run.average.average.items():
        torch.testing.assert_close(
            average, decay * before[name] + (1 - decay) * after[name]
        )


@pytest.mark.parametrize(
    ("steps", "evaluated"), [(1, [1]), (4, [4]), (5, [4, 5]), (9, [4, 8, 9])]
)
def test_a_run_of_steps_ends_there_and_is_evaluated(make, steps, evaluated):
    built = make(f"run.steps={steps}")
    state = train(built.run)
    assert (state.step, state.images) == (steps, 8 * steps)
    assert [row["step"] for row in rows_of(built, "val")] == evaluated
    assert built.store.rows[-1]["step"] == steps


def test_rows_and_evaluations_come_every_n_steps(make):
    built = make("run.epochs=2", "run.every.log=3", "run.every.evaluate=5")
    train(built.run)
    assert [row["step"] for row in rows_of(built, "val")] == [5, 8]
    assert [row["step"] for row in rows_of(built, "train")] == [
        3,
        5,
        6,
        8,
    ]


def test_progress_runs_from_0_to_1_in_the_middle_of_steps():
    by_epoch = RunLength(2, 0, 8, 0, Intervals())
    state = State()
    progress = []
    while not by_epoch.finished(state):
        progress.append(by_epoch.progress(state, 4))
        state = advance(state, 8, 4)
    assert progress == pytest.approx([(i + 0.5) / 8 for i in range(8)])
    assert (state.step, state.epoch, state.step_in_epoch, state.images) == (8, 2, 0, 64)
    by_step = replace(by_epoch, steps=5)
    assert [by_step.progress(State(step=s), 4) for s in range(6)] == pytest.approx(
        [0.1, 0.3, 0.5, 0.7, 0.9, 1.0]
    )


def test_a_sifted_epoch_still_ends_where_the_schedule_ends():
    """Fewer steps an epoch: progress is a share of the epochs, not of steps that never
    come.
    """
    length = RunLength(4, 0, 8, 0, Intervals())
    state = State()
    last = 0.0
    for steps_in_epoch in (4, 2, 1, 3):
        for _ in range(steps_in_epoch):
            assert length.progress(state, steps_in_epoch) > last
            last = length.progress(state, steps_in_epoch)
            state = advance(state, 8, steps_in_epoch)
    assert length.finished(state)
    assert last == pytest.approx(1 - 0.5 / 12)


@pytest.mark.parametrize(
    ("views", "expected"), [(0, [0, 1, 2, 3, 4]), (2, [0, 1, 0, 1, 0]), (1, [0] * 5)]
)
def test_views_repeat_after_their_number(views, expected):
    assert [
        RunLength(1, 0, 1, views, Intervals()).view(epoch) for epoch in range(5)
    ] == expected


def test_the_loop_marks_what_it_does(make):
    """A listener sees every part of a step, in order; it changes no bit of the run."""
    spans = []

    @contextmanager
    def span(name):
        spans.append(name)
        yield

    overrides = (
        "run.steps=2",
        "run.every.log=1",
        "data.batch_size=8",
        "data.micro_batch=4",
    )
    heard = make(*overrides)
    alone = make(*overrides)
    timed = make(*overrides)
    train(replace(heard.run, span=span))
    train(alone.run)
    with Timeline() as timeline:
        train(replace(timed.run, span=timeline.span, window=timeline.window))
    micro = ["teacher", "forward", "backward", "sifting"]
    step = ["data", *micro, *micro, "optimizer", "wait"]
    assert spans == ["sifting", *step, *step, "evaluation", "checkpoint"]
    assert without_clocks(heard.store.rows) == without_clocks(alone.store.rows)
    assert without_clocks(timed.store.rows) == without_clocks(alone.store.rows)
    assert same(weights(timed.run), weights(alone.run))
    assert timeline.finished_steps == 2


RUNS = {
    "plain": (),
    "averaged": ("optimizer.ema_decay=0.9", "run.every.checkpoint=3"),
    "mixed, in steps": (
        "data.augment.mixup=0.8",
        "run.steps=7",
        "run.every.checkpoint=2",
        "run.every.evaluate=3",
    ),
    "sgd, in micros, with a projector": (
        "optimizer.kind=sgd",
        "data.micro_batch=4",
        "losses=[{kind: cosine}, {kind: kl}]",
        "run.every.checkpoint=1",
        "student.args.proj_drop_rate=0.3",
    ),
    "frozen for an epoch, rates of layers": (
        "student.model=xcit_nano_12_p8_224",
        (
            "student.args={embed_dim: 24, depth: 2, num_heads: 2, cls_attn_layers: 1,"
            " drop_path_rate: 0.3}"
        ),
        (
            "student.tuning={layer_decay: 0.75, head_lr_scale: 4, freeze:"
            " [patch_embed.*, blocks.0.*], freeze_epochs: 1}"
        ),
        "optimizer.ema_decay=0.9",
        "run.every.checkpoint=2",
    ),
    "ended by patience": (
        "run.epochs=9",
        "optimizer.lr=1e-12",
        "run.patience=2",
        "run.every.evaluate=3",
        "run.every.checkpoint=2",
    ),
    "balanced, erased, patches dropped": (
        "data.balance=0.7",
        "data.augment.erase=0.5",
        "student.args.patch_drop_rate=0.5",
        "losses=[{kind: kl}, {kind: ce, class_weights: balanced}]",
        "run.every.checkpoint=1",
    ),
}


QUICK = ("mixed, in steps", "ended by patience", "balanced, erased, patches dropped")


@pytest.mark.parametrize(
    ("name", "apart"),
    [(name, 3) if name in QUICK else slow(name, 3) for name in RUNS]
    + [slow(name, 1) for name in RUNS],
)
def test_a_run_that_was_killed_is_the_run_that_was_not(make, tmp_path, name, apart):
    overrides = RUNS[name]
    uninterrupted = make(*overrides, folder=tmp_path / "whole")
    final_state = train(uninterrupted.run)
    rows = read_rows(tmp_path / "whole")
    uninterrupted.store.close()
    for at in range(min(apart, 2), final_state.step + 1, apart):
        folder = tmp_path / f"killed {at}"
        resumed, state = killed_and_resumed(make, at, folder, *overrides)
        assert timeless(state) == timeless(final_state)
        assert same(weights(resumed.run), weights(uninterrupted.run)), at
        assert without_clocks(read_rows(folder)) == without_clocks(rows)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_run_that_was_killed_is_the_run_that_was_not(make, tmp_path):
    """Evaluated with averaged weights, at another batch size than it is trained, which
    no graph may remember.
    """
    overrides = (
        "teacher.compile=on",
        "student.compile=on",
        "optimizer.ema_decay=0.9",
        "run.every.checkpoint=3",
    )
    uninterrupted = make(*overrides, folder=tmp_path / "whole")
    final_state = train(uninterrupted.run)
    uninterrupted.store.close()
    resumed, state = killed_and_resumed(make, 5, tmp_path / "killed", *overrides)
    assert timeless(state) == timeless(final_state)
    assert same(weights(resumed.run), weights(uninterrupted.run))
    assert without_clocks(read_rows(tmp_path / "killed")) == without_clocks(
        read_rows(tmp_path / "whole")
    )


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("averaged", (3, 5)),
        ("mixed, in steps", (4, 11)),
        slow("averaged", (0, 6, 9)),
        slow("mixed, in steps", (1, 7)),
    ],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(
    make, tmp_path, name, stops
):
    """It is asked at the end of each step and before each batch of an evaluation;
    `stops` counts these calls.
    """
    overrides = (*RUNS[name], "data.eval_batch=5")
    uninterrupted = make(*overrides, folder=tmp_path / "whole")
    final_state = train(uninterrupted.run)
    uninterrupted.store.close()
    for number in stops:
        folder = tmp_path / f"stopped {number}"
        calls = iter([False] * number + [True])
        stopped = make(*overrides, folder=folder)
        with pytest.raises(Interrupted):
            train(replace(stopped.run, stop=lambda calls=calls: next(calls, False)))
        stopped.store.close()
        resumed = make(*overrides, folder=folder)
        state = train(resumed.run)
        resumed.store.close()
        assert timeless(state) == timeless(final_state)
        assert same(weights(resumed.run), weights(uninterrupted.run)), number
        rows = [
            [row for row in read_rows(f) if row["kind"] == "val"]
            for f in (folder, tmp_path / "whole")
        ]
        assert without_clocks(rows[0]) == without_clocks(rows[1])


def test_an_evaluation_that_is_given_up_twice_is_made_in_the_end(make, tmp_path):
    calls = iter([False] * 4 + [True])  # four steps, then the evaluation's first batch
    for stop in (lambda: next(calls, False), lambda: True):
        built = make("run.epochs=1", folder=tmp_path / "run")
        with pytest.raises(
            Interrupted, match="stopped after step 4 and wrote a checkpoint"
        ):
            train(replace(built.run, stop=stop))
        built.store.close()
        assert [row["kind"] for row in read_rows(tmp_path / "run")] == [
            "train",
            "train",
            "epoch",
        ]
    built = make("run.epochs=1", folder=tmp_path / "run")
    state = train(built.run)
    built.store.close()
    assert (state.step, state.unevaluated) == (4, False)
    (row,) = (row for row in read_rows(tmp_path / "run") if row["kind"] == "val")
    assert state.best == row["accuracy"] == built.store.best()[0].best


def read_rows(folder) -> list[dict]:
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_checkpoint_of_other_code_is_refused_in_one_line(make, tmp_path):
    built = make("run.epochs=1", folder=tmp_path / "run")
    train(built.run)
    built.store.close()
    changed = make("run.epochs=2", folder=tmp_path / "run")
    # as if the file of the model were edited
    changed.run.distillation.student.network.head = torch.nn.Linear(7, 3)
    with pytest.raises(
        RunError,
        match=(
            r"student.model: the checkpoint of step \d+ does not fit .* start a new run"
        ),
    ):
        train(changed.run)
    changed.store.close()


def test_a_checkpoint_knows_nothing_of_the_teacher(make, tmp_path):
    built = make(
        "run.epochs=1",
        "losses=[{kind: cosine}]",
        "optimizer.ema_decay=0.9",
        folder=tmp_path / "run",
    )
    live = built.run.teacher.model
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    train(built.run)
    _, tensors, _ = built.store.restore()
    built.store.close()
    assert {name.partition(".")[0] for name in tensors} == {
        "model",
        "average",
        "optimizer",
    }
    assert {
        ".".join(name.split(".")[:2]) for name in tensors if name.startswith("model.")
    } == {
        "model.student",
        "model.criterion",
    }
    shapes = {tuple(t.shape) for t in live.network.state_dict().values() if t.ndim > 1}
    assert not shapes & {
        tuple(t.shape) for n, t in tensors.items() if n.startswith("model.student")
    } - {(1, 5, 24)}
    assert all(
        torch.equal(before[name], tensor) for name, tensor in live.state_dict().items()
    )
    assert not live.training
    assert all(p.grad is None and not p.requires_grad for p in live.parameters())


@pytest.mark.parametrize("lr", [1e30, 1e39])
def test_divergence_stops_and_the_last_checkpoint_is_finite(make, tmp_path, lr):
    overrides = (
        "run.epochs=3",
        "run.every.log=3",
        "run.every.checkpoint=1",
        "optimizer.warmup_ratio=0.5",
    )
    built = make(f"optimizer.lr={lr}", *overrides, folder=tmp_path / "run")
    with pytest.raises(
        NonFiniteLoss, match=r"became NaN or infinite in steps? \d+"
    ) as caught:
        train(built.run)
    assert "Choose another run.name with a lower optimizer.lr" in str(caught.value)
    restored = built.store.restore()
    built.store.close()
    if restored is not None:
        floats = [
            tensor for tensor in restored[1].values() if tensor.is_floating_point()
        ]
        assert all(tensor.isfinite().all() for tensor in floats)


def batch(weight: list[float]) -> Batch:
    label = torch.tensor([0, 1, 2])
    return replace(
        Batch.of(torch.zeros(3, 3, 1, 1), label), weight=torch.tensor(weight)
    )


def test_the_criterion_sums_its_weighted_terms():
    dims = Dims(3, 0, 0)
    terms = [ce.build(ce.Options(), dims), kl.build(kl.Options(temperature=2.0), dims)]
    criterion = Criterion(
        [
            loss_term("ce", 0.3),
            loss_term("kl", 2.0, temperature=2.0),
            loss_term("kl", 0.0),
        ]
    )
    student = Outputs(torch.randn(3, 3))
    teacher = Outputs(torch.randn(3, 3))
    scores = criterion(student, teacher, batch([1.0, 0.0, 2.5]))
    assert list(scores) == ["ce", "kl", "kl_2", "per_image", "loss"]
    ce_term, kl_term = (
        term(student, teacher, batch([1.0, 1.0, 1.0])) for term in terms
    )
    torch.testing.assert_close(scores["ce"], ce_term)
    torch.testing.assert_close(scores["per_image"], 0.3 * ce_term + 2.0 * kl_term)
    torch.testing.assert_close(
        scores["loss"], torch.tensor([1.0, 0.0, 2.5]) * (0.3 * ce_term + 2.0 * kl_term)
    )
    reads_labels = LossFacts(labels=True, logits="softmax")
    reads_teacher = LossFacts(teacher=True, logits="softmax")
    assert [term.facts for term in criterion.all] == [
        reads_labels,
        reads_teacher,
        reads_teacher,
    ]


def test_the_agreement_is_the_cosine_of_the_projected_student_with_its_first_teacher():
    """As its column says: similarities of `cckd`, tokens and other teachers are not
    mixed in.
    """
    dims = Dims(3, 4, 4)
    features = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    near, another, second = (
        loss_term("cosine", weight, dims) for weight in (0.25, 0.5, 1.0)
    )
    alike = loss_term("cckd", 1.5, dims)
    far = replace(loss_term("cckd", 1.5, dims), teacher=1)
    student, single = (
        Outputs(torch.zeros(5, 3), {"pooled": pooled}) for pooled in features[:2]
    )
    two_teachers = Outputs(
        single.logits, {"pooled": features[1], "pooled.1": features[2]}
    )
    project = near.loss.project
    projected = features[0] @ project.weight.T + project.bias
    target = features[1]
    lengths = projected.norm(dim=1) * target.norm(dim=1)
    criterion = Criterion(
        [alike, loss_term("kl", 2.0), near, another, replace(second, teacher=1)]
    )
    torch.testing.assert_close(
        criterion.agreement(student, two_teachers),
        (projected * target).sum(1) / lengths,
    )
    unprojected = Criterion([alike, far, loss_term("cckd", 0.0, dims)])
    torch.testing.assert_close(
        unprojected.agreement(student, two_teachers),
        alike.loss.agreement(student, single),
    )


@pytest.mark.parametrize(
    ("length", "expected"),
    [({"epochs": 4, "steps": 0}, 0.5), ({"epochs": 0, "steps": 40}, 17 / 40)],
)
def test_the_share_that_was_done_when_an_epoch_began_is_the_same_in_its_middle(
    length, expected
):
    """A sifter that plans by it makes the same plan when a run resumes inside the
    epoch.
    """
    run = RunLength(batch_size=8, views=0, every=Intervals(), **length)
    for inside in (0, 3):
        assert run.share(
            State(step=17 + inside, epoch=2, step_in_epoch=inside)
        ) == pytest.approx(expected)


def test_a_run_that_patience_ends_leaves_its_last_step(make, tmp_path):
    """Its last evaluation is no better, and no checkpoint is due: the averaged weights
    of the end would be lost.
    """
    built = make(
        "run.epochs=9",
        "optimizer.lr=1e-12",
        "run.patience=2",
        "run.every.evaluate=3",
        "run.every.checkpoint=1000",
        folder=tmp_path / "run",
    )
    state = train(built.run)
    assert built.run.length.gave_up(state)
    assert built.store.step() == state.step == 9
    built.store.close()
