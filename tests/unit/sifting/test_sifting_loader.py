"""`SiftingDataloader` in a plain loop: its batches, its side effects, resuming,
metrics.
"""

import logging
import re
import runpy
import time
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from pieces import slow
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from kd.sifting import (
    ListBatch,
    Loss,
    LossImplementationNotProvidedException,
    RelativeProbabilisticSiftConfig,
    SiftingBatchTransform,
    SiftingDataloader,
    TensorBatch,
    UnsupportedDataFormatException,
)

EXAMPLES = Path(__file__).parents[3] / "examples"


def config(beta: float = 1.0, delay: int = 0, repeat: bool = False, length: int = 50):
    base = {"sift_delay": delay, "repeat_delay_per_epoch": repeat}
    return RelativeProbabilisticSiftConfig(beta, length, {"sift_config": base})


class OwnLoss(Loss):
    """A sample's loss is its first number, so that the expected choices can be computed
    by hand.
    """

    def __init__(self, shape: str = "flat"):
        self.shape = shape
        self.sizes = []

    def loss(self, model, transformed_batch, original_batch=None):
        values = original_batch[0][:, 0] + 0 * model(original_batch[0]).sum()
        self.sizes.append(len(values))
        return {
            "flat": values,
            "column": values[:, None],
            "mean": values.mean(),
            "float": 1.0,
        }[self.shape]


def data(count: int = 64) -> TensorDataset:
    ids = torch.arange(count)
    return TensorDataset(torch.stack([ids.float() / count, torch.ones(count)], 1), ids)


def sifting(
    loader=None, beta=1.0, loss=None, model=None, delay=0, repeat=False, **options
):
    if loader is None:
        loader = DataLoader(data(), batch_size=8)
    return SiftingDataloader(
        config(beta, delay, repeat),
        loader,
        model or nn.Linear(2, 1),
        loss or OwnLoss(),
        **options,
    )


def ids_of(loader) -> list[list[int]]:
    return [ids.tolist() for _, ids in loader]


def pending_ids(loader) -> list[int]:
    """The samples that wait to fill a batch."""
    pending = loader.state_dict()["pending"]
    return [] if pending is None else pending[1].tolist()


@pytest.mark.parametrize("pick", ["fixed", "bernoulli"])
@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0, 10.0])
def test_batches_are_full_and_the_remainder_goes_into_the_next_epoch(beta, pick):
    torch.manual_seed(0)
    loader = sifting(DataLoader(data(100), batch_size=8, shuffle=True), beta, pick=pick)
    epochs = [ids_of(loader) for _ in range(6)]
    assert {len(ids) for epoch in epochs for ids in epoch} == {8}
    trained = sum(len(ids) for epoch in epochs for ids in epoch)
    pending = len(pending_ids(loader))
    assert pending < 8
    assert loader.metrics["num_orig_samples_seen"] == 600
    assert loader.metrics["num_orig_samples_kept"] == trained + pending
    if pick == "fixed":
        assert trained + pending == int(600 / (1 + beta) + 1e-9)
    trained_ids = [id for epoch in epochs for ids in epoch for id in ids]
    counts = torch.bincount(torch.tensor(trained_ids), minlength=100)
    assert counts.max() <= 6  # no sample twice in an epoch
    assert counts[:50].sum() < counts[50:].sum()  # the higher half of the losses


def test_bernoulli_draws_each_sample_independently():
    order = DataLoader(
        data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    counts = [
        len(ids_of(sifting(order, pick="bernoulli", seed=seed))) for seed in range(30)
    ]
    assert len(set(counts)) > 1
    assert sum(counts) / 30 == pytest.approx(4, abs=0.5)


def test_the_delay_yields_all_samples_unscored():
    loss = OwnLoss()
    loader = sifting(loss=loss, delay=11)
    plain = ids_of(DataLoader(data(), batch_size=8))
    assert ids_of(loader) == plain
    assert loss.sizes == []
    second = ids_of(loader)
    assert second[:3] == plain[:3]
    assert loss.sizes == [8] * 5  # the five batches after the delay
    assert len(second) == 3 + 5 * 8 // 2 // 8
    ids_of(loader)
    assert len(loss.sizes) == 13


def test_the_delay_may_repeat_in_each_epoch():
    loss = OwnLoss()
    loader = sifting(loss=loss, delay=6, repeat=True)
    plain = ids_of(DataLoader(data(), batch_size=8))
    for epoch in range(3):
        assert ids_of(loader)[:6] == plain[:6]
        assert len(loss.sizes) == 2 * (epoch + 1)


class Noisy(nn.Module):
    """All side effects that a forward pass can have: batch norm's statistics, dropout's
    draws, modes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(2)
        self.frozen.eval()
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(
            self.training or torch.is_grad_enabled() or self.drop.training
        )
        return self.drop(self.frozen(self.norm(x))).sum(1)


class Random(Loss):
    def loss(self, model, transformed_batch, original_batch=None):
        torch.rand(5)
        return model(original_batch[0]) + torch.rand(len(original_batch[1]))


def test_scoring_has_no_side_effects():
    model = Noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    torch.manual_seed(3)
    list(loader)
    untouched = torch.get_rng_state()
    torch.manual_seed(3)
    batches = list(sifting(loader, loss=Random(), model=model))
    assert batches
    assert torch.equal(untouched, torch.get_rng_state())
    assert model.modes == [False] * 8
    assert [module.training for module in model.modules()] == modes
    assert all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_modes_are_restored_after_an_error_too():
    model = Noisy()

    class Broken(Loss):
        def loss(self, model, transformed_batch, original_batch=None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(iter(sifting(loss=Broken(), model=model)))
    assert model.training
    assert not model.frozen.training


def test_weights_get_their_gradients_inside_an_outer_autocast():
    model = nn.Linear(2, 1)
    with torch.autocast("cpu", torch.bfloat16):
        for x, _ in sifting(model=model):
            model(x).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("shape", ["mean", "float"])
def test_a_loss_without_one_value_per_sample_is_refused(shape):
    with pytest.raises(
        LossImplementationNotProvidedException, match='Use reduction="none"'
    ):
        next(iter(sifting(loss=OwnLoss(shape))))


def test_a_column_of_losses_is_accepted():
    assert ids_of(sifting(loss=OwnLoss("column"))) == ids_of(sifting())


def test_a_loss_need_not_derive_from_loss_and_may_be_hidden_by_an_attribute():
    class Documented:
        """As in Amazon's examples: no base class, and an attribute with the method's
        name.
        """

        def __init__(self):
            self.loss = nn.MSELoss(reduction="none")

        def loss(self, model, transformed_batch, original_batch=None):
            return self.loss(
                original_batch[0][:, 0], torch.zeros(len(original_batch[1]))
            )

    assert len(ids_of(sifting(loss=Documented()))) == 4


class Lists(SiftingBatchTransform):
    """The list transform of Amazon's documentation."""

    def transform(self, batch):
        return ListBatch(batch[0].tolist(), batch[-1].tolist())

    def reverse_transform(self, batch):
        return [torch.tensor(batch.inputs), torch.tensor(batch.labels)]


class Tensors(SiftingBatchTransform):
    """The tensor transform of Amazon's documentation."""

    def transform(self, batch):
        return TensorBatch(batch[0], batch[-1])

    def reverse_transform(self, batch):
        return [batch.inputs, batch.labels]


class Both(Loss):
    def loss(self, model, transformed_batch, original_batch=None):
        inputs, labels = transformed_batch
        assert torch.equal(torch.as_tensor(labels), original_batch[1])
        return torch.as_tensor(inputs)[:, 0]


@pytest.mark.parametrize("transform", [Lists, Tensors])
def test_batch_transforms_do_not_change_the_choice(transform):
    assert ids_of(sifting(loss=Both(), batch_transforms=transform())) == ids_of(
        sifting()
    )
    delayed = list(sifting(loss=Both(), batch_transforms=transform(), delay=1))
    assert [type(batch) for batch in delayed] == [list] * len(
        delayed
    )  # one form in the delay and after it


def test_a_transform_must_give_a_sifting_batch():
    class Wrong(Tensors):
        def transform(self, batch):
            return batch

    with pytest.raises(
        UnsupportedDataFormatException,
        match=r"transform\(\) returned a list.*SiftingBatch",
    ):
        next(iter(sifting(batch_transforms=Wrong())))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("beta", [0.1, 0.5, 3.0, 10.0])
@pytest.mark.parametrize(
    ("delay", "repeat"), [(0, False), (5, False), (20, False), (3, True), (40, True)]
)
def test_lengths_are_exact_before_an_epoch_begins(beta, delay, repeat, drop_last):
    loader = sifting(
        DataLoader(data(61), batch_size=4, drop_last=drop_last),
        beta,
        delay=delay,
        repeat=repeat,
    )
    promised = loader.epoch_lengths(5)
    for epoch in range(5):
        if not repeat and loader.steps < delay:
            with pytest.raises(TypeError, match="no length before sift_delay"):
                len(loader)
        else:
            assert len(loader) == promised[epoch]
        assert loader.epoch_lengths(5 - epoch) == promised[epoch:]
        batches = 0
        for _ in loader:
            batches += 1
            if batches in (1, 3):
                assert loader.epoch_lengths(5 - epoch) == promised[epoch:]
        assert batches == promised[epoch]


@pytest.mark.parametrize("rank", [0, 1])
def test_lengths_are_exact_with_accelerates_sampler_of_a_rank(rank):
    """It makes all batches full, so this rank reads more samples than its
    share of 61.
    """
    batches = BatchSampler(SequentialSampler(range(61)), batch_size=4, drop_last=False)
    shard = BatchSamplerShard(batches, num_processes=2, process_index=rank)
    loader = sifting(DataLoader(data(61), batch_sampler=shard), beta=0.7)
    promised = loader.epoch_lengths(3)
    assert [len(ids_of(loader)) for _ in range(3)] == promised
    assert loader.metrics["num_orig_samples_seen"] == 3 * 32


def test_an_epoch_without_a_batch_is_reported(caplog):
    assert ids_of(sifting(beta=10.0)) == []
    assert "no full batch of 8 kept samples; 5" in caplog.text


def test_lengths_that_are_not_known_are_not_told():
    with pytest.raises(TypeError):
        len(sifting(pick="bernoulli"))
    with pytest.raises(TypeError):
        len(sifting(iter([])))
    assert (
        len(list(sifting([[torch.rand(8, 2), torch.arange(8)]] * 4))) == 2
    )  # any iterable of batches


def train(
    steps: int,
    state: dict | None,
    epochs: int,
    pick: str,
    transform=None,
    delay: int = 2,
):
    """A loop with trained weights, dropout and a shuffled loader; return its samples
    and its state after `steps`.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Live(Loss):
        def loss(self, model, transformed_batch, original_batch=None):
            return (model(original_batch[0]).flatten() - original_batch[0][:, 0]) ** 2

    original = DataLoader(data(), batch_size=8, shuffle=True)
    loader = sifting(
        original,
        beta=0.7,
        loss=Live(),
        model=model,
        delay=delay,
        pick=pick,
        batch_transforms=transform,
    )
    begin = 0
    if state is not None:
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
        begin = state["epoch"]
        torch.set_rng_state(state["rng"])
    trained = []
    saved = None
    for epoch in range(begin, epochs):
        for x, ids in loader:
            optimizer.zero_grad()
            ((model(x).flatten() - x[:, 0]) ** 2).mean().backward()
            optimizer.step()
            trained.append((ids.tolist(), model[0].weight.detach().clone()))
            if len(trained) == steps:
                weights = {
                    name: value.clone() for name, value in model.state_dict().items()
                }
                rng = torch.get_rng_state()
                saved = {
                    "model": weights,
                    "loader": loader.state_dict(),
                    "epoch": epoch,
                    "rng": rng,
                }
    return trained, saved


@pytest.mark.parametrize("transform", [None, Tensors, Lists])
@pytest.mark.parametrize("pick", ["fixed", "bernoulli"])
@pytest.mark.parametrize("steps", [1, 4, 5, 9])
def test_a_run_resumes_bit_for_bit(steps, pick, transform, tmp_path):
    make = transform or (lambda: None)
    uninterrupted, saved = train(steps, None, 4, pick, make())
    assert len(uninterrupted) > steps + 4
    torch.save(saved, tmp_path / "state.pt")
    resumed, _ = train(
        0, torch.load(tmp_path / "state.pt", weights_only=True), 4, pick, make()
    )
    assert [ids for ids, _ in resumed] == [ids for ids, _ in uninterrupted[steps:]]
    assert all(
        torch.equal(weight, expected)
        for (_, weight), (_, expected) in zip(
            resumed, uninterrupted[steps:], strict=True
        )
    )


@pytest.mark.parametrize("steps", [2, 4])
def test_a_weighted_sampler_that_draws_images_twice(steps):
    """Each draw is a candidate of its own: the window has its loss once per draw, and
    the kept share stays exact.
    """
    weights = torch.tensor([8.0] * 4 + [0.25] * 60)

    def resampled():
        sampler = WeightedRandomSampler(
            weights.tolist(), 64, generator=torch.Generator().manual_seed(3)
        )
        return SiftingDataloader(
            config(length=128),
            DataLoader(data(), batch_size=8, sampler=sampler),
            nn.Linear(2, 1),
            OwnLoss(),
        )

    sampled = resampled().orig_dataloader
    drawn = [image for _ in range(2) for _, ids in sampled for image in ids.tolist()]
    loader = resampled()
    batches = iter(loader)
    head = [next(batches)[1].tolist() for _ in range(steps)]
    state = loader.state_dict()
    tail = [ids.tolist() for _, ids in batches] + ids_of(loader)
    assert len(set(drawn[:64])) < 40  # many came twice
    assert any(len(set(batch)) < 8 for batch in head + tail)
    assert (
        sum(map(len, head + tail)) + len(pending_ids(loader)) == 64
    )  # half of two epochs of 64 draws
    losses = loader.window.state_dict()["losses"].tolist()
    assert sorted(losses) == pytest.approx(sorted(id / 64 for id in drawn))
    again = resampled()
    again.load_state_dict(state)
    assert ids_of(again) + ids_of(again) == tail


@pytest.mark.parametrize("holder", ["loader", "sampler", "batch sampler"])
def test_a_generator_of_its_own_resumes_in_its_order(holder):
    def shuffled():
        generator = torch.Generator().manual_seed(5)
        items = data()
        sampler = RandomSampler(items, generator=generator)
        ways = {
            "loader": {"batch_size": 8, "shuffle": True, "generator": generator},
            "sampler": {"batch_size": 8, "sampler": sampler},
            "batch sampler": {
                "batch_sampler": BatchSampler(sampler, 8, drop_last=False)
            },
        }
        return sifting(DataLoader(items, **ways[holder]))

    loader = shuffled()
    ids_of(loader)
    batches = iter(loader)
    next(batches)
    resumed = shuffled()
    resumed.load_state_dict(loader.state_dict())
    assert ids_of(resumed) == [ids.tolist() for _, ids in batches]


def test_a_state_between_two_epochs_starts_an_epoch():
    loader = sifting()
    first = ids_of(loader)
    again = sifting()
    again.load_state_dict(loader.state_dict())
    assert ids_of(again) == ids_of(loader)
    assert len(first) == 4
    assert again.metrics["num_orig_samples_seen"] == 128


def test_a_fresh_state_leaves_no_samples_of_an_earlier_use():
    loader = sifting(beta=0.25)
    fresh = loader.state_dict()
    ids_of(loader)
    assert pending_ids(loader)
    loader.load_state_dict(fresh)
    assert pending_ids(loader) == []
    assert ids_of(loader) == ids_of(sifting(beta=0.25))


def test_an_aborted_epoch_keeps_the_pending_samples():
    loader = sifting(beta=0.25)  # 6 or 7 of 8 are kept
    next(iter(loader))
    pending = pending_ids(loader)
    assert pending
    assert ids_of(loader)[0][: len(pending)] == pending
    assert loader.metrics["num_orig_samples_kept"] == int(80 / 1.25)


def test_the_metrics_have_the_documented_names(caplog):
    caplog.set_level(logging.INFO, "kd.sifting")
    loader = sifting(log_batch_data=True)
    ids = ids_of(loader)
    timed = [
        "transform",
        "calculate_relevance_values",
        "should_sift",
        "sift",
        "accumulate",
        "reverse_transform",
    ]
    names = [
        "num_orig_samples_seen",
        "num_orig_samples_kept",
        "sifted_batch_creation_latency",
    ]
    names += [
        "Batch size for next sifted batch",
        "relevance_values",
        "relevance_values_kept",
    ]
    assert {*names, *(f"func:{name} latency" for name in timed)} <= set(loader.metrics)
    assert "num_orig_samples_kept: 32" in caplog.messages
    assert loader.metrics["relevance_values"] == pytest.approx(
        [i / 64 for i in range(56, 64)]
    )
    assert loader.metrics["relevance_values_kept"] == pytest.approx(
        [i / 64 for i in ids[-1][-4:]]
    )


@pytest.mark.parametrize(
    ("scoring", "training", "saves"), [(1.0, 4.0, True), (2.0, 2.0, False)]
)
def test_a_sifting_that_saves_nothing_is_a_warning(
    scoring, training, saves, caplog, monkeypatch
):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    caplog.set_level(logging.INFO, "kd.sifting")

    class Slow(OwnLoss):
        def loss(self, model, transformed_batch, original_batch=None):
            clock[0] += scoring
            return super().loss(model, transformed_batch, original_batch)

    rows = data(
        8 * 4 * 24
    )  # scoring and training are timed for 24 batches each (docs/faster.md); half are trained
    loader = sifting(DataLoader(rows, batch_size=8), loss=Slow())
    for _ in loader:
        clock[0] += training
    assert loader.metrics["predicted_saving"] == pytest.approx(
        1 - 0.5 - scoring / training
    )
    judged = [
        record for record in caplog.records if "of the time is saved" in record.message
    ]
    assert [record.levelname for record in judged] == ["INFO" if saves else "WARNING"]
    assert ("saves nothing" in judged[0].message) != saves
    assert "50.0% are kept" in judged[0].message


def test_other_attributes_are_those_of_the_original_loader():
    original = DataLoader(data(), batch_size=8)
    loader = sifting(original)
    assert loader.dataset is original.dataset
    assert loader.sampler is original.sampler
    with pytest.raises(AttributeError, match="no attribute 'set_epoch'"):
        loader.set_epoch(1)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        slow("sift_bert", ["--texts", "640", "--epochs", "3"]),
        slow("sift_vit", ["--images", "640", "--epochs", "3"]),
    ],
)
def test_the_examples_run(name, arguments, capsys):
    results = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments)
    assert list(results) == ["everything", "sifted"]
    assert results["everything"][2] == 1
    assert results["sifted"][2] == pytest.approx(
        1 / 3 + 2 / 3 / 3, abs=0.02
    )  # one epoch whole, then a third
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["everything", "sifted"]
    assert all(
        re.search(r"accuracy \d+\.\d%  kept \d+\.\d%  \d+\.\d s", line)
        for line in lines
    )
