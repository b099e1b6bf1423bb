"""The engine from Python: `kd.distill` against a loop written by hand, and the examples
as a user runs them.
"""

import copy
import json
import random
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from torch.utils.data import SubsetRandomSampler as Part

import kd
from kd.core.errors import ConfigError, KdError
from kd.core.types import Dims, SiftContext
from kd.data.map_dataset import MapDataset
from kd.engine.criterion import Criterion, Term
from kd.jobs.api.arguments import training_labels
from kd.parts.sifters.none import Everything
from kd.setup.student import loss_term

EXAMPLES = Path(__file__).parents[3] / "examples"
DIMS = Dims(3, 0, 0, labels=lambda: torch.arange(3))
CPU = {"kind": "cpu", "precision": "fp32", "threads": 1}


def network(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, width), nn.GELU(), nn.Linear(width, 3)
    )


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, 3, 2, 2, generator=generator)
    return TensorDataset(image, image.mean((2, 3)).argmax(1))


def by_hand(
    teacher: nn.Module, student: nn.Module, train: TensorDataset, epochs: int
) -> nn.Module:
    """Distill without kd's engine: its order of images, its schedule, plain torch for
    the rest.
    """
    image, label = train.tensors
    decayed = [p for p in student.parameters() if p.ndim > 1]
    undecayed = [p for p in student.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": 0.05},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    sifter = Everything(SiftContext.alone(label, 16))
    steps = epochs * (len(train) // 16)
    order = torch.cat(
        [sifter.plan(epoch, epoch / epochs).ids for epoch in range(epochs)]
    )
    for step in range(steps):
        ids = order[16 * step : 16 * step + 16]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2  # a constant schedule without warm-up
        with torch.no_grad():
            target = F.log_softmax(teacher(image[ids]) / 2, 1)
        logits = student(image[ids])
        kl = (
            F.kl_div(
                F.log_softmax(logits / 2, 1),
                target,
                reduction="batchmean",
                log_target=True,
            )
            * 4
        )
        (kl + 0.5 * F.cross_entropy(logits, label[ids])).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return student


def distill(
    teacher: nn.Module, student: nn.Module, train: object, **changes: object
) -> kd.Distilled:
    return kd.distill(
        **{
            "teacher": teacher,
            "student": student,
            "train": train,
            "val": data(33, 9),
            "losses": [
                {"kind": "kl", "temperature": 2.0},
                {"kind": "ce", "weight": 0.5},
            ],
            "epochs": 3,
            "batch_size": 16,
            "optimizer": {"lr": 1e-2, "schedule": "constant", "warmup_ratio": 0.0},
            "backend": CPU,
            "progress": False,
            **changes,
        }
    )


def test_distill_is_the_loop_that_one_would_write_by_hand():
    teacher = network(16, 1)
    student = network(4, 2)
    train = data(70, 3)
    expected = by_hand(teacher, copy.deepcopy(student), train, epochs=3)
    distill(teacher, student, train)
    for name, weight in student.state_dict().items():
        # the two sum the same loss in another order (per image, then the mean)
        torch.testing.assert_close(
            weight, expected.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name
        )


def test_distill_leaves_the_teacher_alone_and_reports_both_models():
    teacher = network(16, 1)
    student = network(4, 2)
    before = copy.deepcopy(teacher.state_dict())
    result = distill(teacher.train(), student, data(70, 3))
    assert all(
        torch.equal(before[name], weight)
        for name, weight in teacher.state_dict().items()
    )
    assert teacher.training
    assert all(parameter.requires_grad for parameter in teacher.parameters())
    assert result.student is student
    image, label = data(33, 9).tensors
    with torch.no_grad():
        accuracy = (student(image).argmax(1) == label).float().mean().item()
        agreement = (
            (student(image).argmax(1) == teacher(image).argmax(1)).float().mean().item()
        )
    assert result.metrics["accuracy"] == pytest.approx(accuracy)
    assert result.metrics["agreement"] == pytest.approx(agreement)
    assert result.state.step == 12


def test_several_teachers_are_the_average_of_their_probabilities():
    first = network(8, 1)
    second = network(5, 2)

    class Average(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return (first(image).softmax(1) / 2 + second(image).softmax(1) / 2).log()

    student = network(6, 3)
    train = data(70, 4)
    expected = by_hand(Average(), copy.deepcopy(student), train, epochs=3)
    distill([first, second], student, train)
    for name, weight in student.state_dict().items():
        torch.testing.assert_close(
            weight, expected.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name
        )


def test_distill_takes_a_dataloader_as_it_comes():
    teacher = network(16, 1)
    train = data(70, 3)
    shuffled = network(4, 2)
    ordered = network(4, 2)
    distill(teacher, shuffled, DataLoader(train, batch_size=16), epochs=1)
    image, _ = train.tensors
    in_order = TensorDataset(image[:64], train.tensors[1][:64])
    order = iter(DataLoader(in_order, batch_size=16))
    distill(teacher, ordered, DataLoader(in_order, batch_size=16), epochs=1)
    assert len(next(order)[0]) == 16
    assert all(
        torch.equal(a, b)
        for a, b in zip(shuffled.parameters(), ordered.parameters(), strict=True)
    )


class Uncounted(Sampler):
    """A sampler of five images that does not say how many it draws."""

    def __iter__(self):
        return iter(range(5))


def test_the_sampler_of_a_dataloader_says_how_long_an_epoch_is():
    """It may draw a part of the dataset, or more than all of it; the run must end and
    see as many images.
    """
    items = data(70, 3)
    for sampler in (
        Part(range(40)),
        RandomSampler(items, replacement=True, num_samples=160),
    ):
        steps = len(sampler) // 16
        batches = BatchSampler(sampler, 16, True)
        for loader in (
            DataLoader(items, 16, sampler=sampler),
            DataLoader(items, batch_sampler=batches),
        ):
            assert (
                distill(network(16, 1), network(4, 2), loader, epochs=3).state.step
                == 3 * steps
            )
    with pytest.raises(
        KdError, match=r"^train: its DataLoader ends before the 3. whole batch of 35"
    ):
        distill(
            network(16, 1), network(4, 2), DataLoader(items, 2, sampler=Uncounted())
        )
    with pytest.raises(KdError, match=r"^train: has 70 images, and a batch 100"):
        distill(network(16, 1), network(4, 2), DataLoader(items, 100))


class Noisy(Dataset):
    """A dataset whose transform draws from torch's global generator."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, 2, 2) + id, id % 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_draws_from_global_generators_is_pure(workers: int):
    student = network(4, 2)
    torch.manual_seed(workers)  # must not matter
    distill(network(16, 1), student, Noisy(), workers=workers, epochs=3)
    reference = network(4, 2)
    distill(network(16, 1), reference, Noisy(), epochs=3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(student.parameters(), reference.parameters(), strict=True)
    )


def test_a_dataset_may_keep_the_number_of_its_classes_in_their_place():
    items = data(40, 3)
    items.classes = 3  # type: ignore[attr-defined]
    result = distill(network(16, 1), network(4, 2), items, epochs=1)
    assert result.classes == ["class_0", "class_1", "class_2"]


def test_ema_hands_back_the_average():
    plain = network(4, 2)
    averaged = network(4, 2)
    distill(network(16, 1), plain, data(70, 3))
    result = distill(
        network(16, 1), averaged, data(70, 3), optimizer={"lr": 1e-2, "ema_decay": 0.9}
    )
    assert not torch.equal(plain[1].weight, averaged[1].weight)
    image, label = data(33, 9).tensors
    with torch.no_grad():
        assert result.metrics["accuracy"] == pytest.approx(
            (averaged(image).argmax(1) == label).float().mean().item()
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": [{"kind": "kll"}]}, r"^losses\[0\]: is 'kll'.*Did you mean 'kl'"),
        (
            {"losses": [{"kind": "kl", "temp": 1}]},
            r"^losses\[0\]\['temp'\]: no such key",
        ),
        ({"optimizer": {"lrr": 1}}, r"^optimizer\['lrr'\]: no such key"),
        (
            {"losses": "dist", "batch_size": 2},
            r"^batch_size: gives 'dist' micro-batches of 2, .* 3 or more",
        ),
        (
            {"losses": Criterion([loss_term("dist")]), "batch_size": 1},
            r"^batch_size: gives 'dist' micro-batches of 1",
        ),
        ({"sifter": "histry"}, r"^sifter: is 'histry'.*Did you mean 'history'"),
        ({"epochs": 0}, r"^epochs: is 0"),
        ({"workers": -1}, r"^workers: is -1"),
        (
            {"batch_size": 71},
            (
                r"^batch_size: is 71, but the training split has 70 images.*Set"
                r" batch_size=70"
            ),
        ),
        ({"losses": [{"kind": "cosine"}]}, r"feature"),
        (
            {"epochs": 0, "optimizer": {"lr": -1}},
            r"^epochs: is 0.*\noptimizer\['lr'\]: is -1",
        ),
        ({"losses": None}, r"^losses\[0\]: is None. A section"),
        (
            {"optimizer": "sdg"},
            r"^optimizer\['kind'\]: is 'sdg'. Allowed: one of adamw, sgd, muon",
        ),
        ({"backend": "gpu"}, r"^backend: is 'gpu'"),
    ],
)
def test_a_mistake_is_one_line(changes: dict, message: str):
    with pytest.raises(KdError, match=message):
        distill(network(16, 1), network(4, 2), data(70, 3), **changes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("images", "options"),
    [
        (100, {"batch_size": 64, "drop_last": True}),
        (100, {"batch_size": 64}),
        (100, {"batch_size": 128, "drop_last": True}),
        (100, {"batch_size": 64, "shuffle": True}),
        (40, {"batch_size": 16, "sampler": Part(range(40))}),
        (40, {"batch_sampler": BatchSampler(Part(range(40)), 16, True)}),
        (5, {"batch_size": 16, "sampler": Uncounted()}),
    ],
    ids=[
        "dropped last",
        "short last",
        "no whole batch",
        "shuffled",
        "a part",
        "batches of a part",
        "uncounted",
    ],
)
def test_every_image_that_a_validation_loader_draws_is_scored(workers, images, options):
    """Sorted by class: the last batch, which `drop_last` leaves out, is another class
    than the others.
    """
    image, label = data(100, 9).tensors
    order = label.argsort()
    items = TensorDataset(image[order], label[order])
    student = network(4, 2)
    loader = DataLoader(items, num_workers=workers, **options)
    result = distill(
        network(16, 1),
        student,
        data(70, 3),
        val=loader,
        epochs=2,
        optimizer={"lr": 1e-9},
    )
    with torch.no_grad():
        right = student(image[order]).argmax(1) == label[order]
    for row in (row for row in result.rows if row["kind"] == "val"):
        assert row["accuracy"] == pytest.approx(right[:images].float().mean().item())


def test_a_dataloader_cannot_be_sifted_by_id():
    class Remembering(Everything):
        pass

    with pytest.raises(ConfigError, match="ids"):
        distill(
            network(16, 1),
            network(4, 2),
            DataLoader(data(70, 3), batch_size=16),
            sifter=Remembering(SiftContext.alone(torch.zeros(64), 16)),
        )


@pytest.mark.parametrize(
    ("name", "check"),
    [("own_modules", lambda r: r > 0.6), ("plain_loop", lambda r: r < 1.0)],
)
@pytest.mark.slow
def test_the_examples_run(name: str, check: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "own_modules", raising=False)
    assert check(runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]())  # type: ignore[operator]


class Said:
    """What other libraries return."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Wrapped(nn.Module):
    """Return the logits as another library does."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.inner = inner
        self.form = form

    def forward(self, image: torch.Tensor) -> object:
        logits = self.inner(image)
        return {
            "tuple": (logits, None),
            "object": Said(logits),
            "dict": {"logits": logits},
        }[self.form]


class Alone(Dataset):
    """Images without labels."""

    def __init__(self, items: TensorDataset) -> None:
        self.image = items.tensors[0]

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, id: int) -> torch.Tensor:
        return self.image[id]


@pytest.mark.parametrize("form", ["tuple", "object", "dict"])
def test_a_module_may_return_its_logits_in_any_form(form: str):
    train = data(40, 3)
    teacher = network(16, 1)
    plain = network(4, 2)
    wrapped = network(4, 2)
    distill(teacher, plain, train)
    distill(Wrapped(teacher, form), Wrapped(wrapped, form), train)
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True)
    )


def test_images_alone_are_distilled_like_labelled_ones():
    train = data(40, 3)
    teacher = network(16, 1)
    losses = [{"kind": "kl", "temperature": 2.0}]
    labelled = network(4, 2)
    unlabelled = network(4, 2)
    batches = network(4, 2)
    distill(teacher, labelled, train, losses=losses)
    result = distill(
        teacher,
        unlabelled,
        Alone(train),
        val=Alone(data(33, 9)),
        losses=losses,
        labels="none",
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(labelled.parameters(), unlabelled.parameters(), strict=True)
    )
    assert {"agreement", "kl", "agreement_ece"} <= result.metrics.keys()
    assert "accuracy" not in result.metrics
    assert result._repr_html_().startswith("<p>Student against its teacher: agreement")
    loader = DataLoader(Alone(train), batch_size=16)
    again = distill(
        teacher, batches, loader, val=Alone(data(33, 9)), losses=losses, labels="none"
    )
    assert "agreement" in again.metrics


@pytest.mark.parametrize("batches", [False, True])
def test_some_labels_are_skipped(batches):
    train = data(40, 3)
    train.tensors[1][::2] = -1
    items = DataLoader(train, batch_size=16) if batches else train
    result = distill(network(16, 1), network(4, 2), items, labels="some")
    assert 0 < result.rows[0]["ce"] < 3


def test_the_training_accuracy_is_that_of_the_labelled_images():
    train = data(40, 3)
    student = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    train.tensors[1][::2] = -1
    with torch.no_grad():  # it is always right
        student[1].weight.copy_(torch.eye(3).repeat_interleave(4, 1))
        student[1].bias.zero_()
    result = distill(
        network(16, 1), student, train, labels="some", optimizer={"lr": 1e-9}
    )
    assert [
        row["accuracy"] for row in result.rows if row["kind"] == "train"
    ] == pytest.approx([1.0] * 3)


def test_a_criterion_reads_the_labels_that_are_there():
    train = data(40, 3)
    student = network(4, 2)
    explicit = network(4, 2)
    train.tensors[1][::2] = -1
    terms = Criterion([loss_term("kl", temperature=2.0), loss_term("ce", 0.5)])
    distill(network(16, 1), student, train, labels="some")
    distill(network(16, 1), explicit, train, labels="some", losses=terms)
    assert all(
        torch.equal(a, b)
        for a, b in zip(student.parameters(), explicit.parameters(), strict=True)
    )
    with pytest.raises(
        ConfigError, match=r"^losses: 'ce' learns from labels, but labels='none'"
    ):
        distill(network(16, 1), explicit, train, labels="none", losses=terms)


def test_a_sifter_that_waits_longer_than_the_run_says_so(capsys):
    distill(
        network(16, 1), network(4, 2), data(40, 3), sifter="relative", progress=True
    )
    message = (
        "sifter 'relative' waits for 1000 steps and the run has 6: everything is"
        " visited. Lower sifter['sift_delay']"
    )
    assert message in capsys.readouterr().out


class Drawing(Alone):
    """A dataset whose transform draws from all three global generators."""

    def __getitem__(self, id: int) -> torch.Tensor:
        noise = [random.random(), np.random.random(), torch.rand(()).item()]
        return super().__getitem__(id) + torch.tensor(noise)[:, None, None]


@pytest.mark.parametrize("fails", [False, True])
def test_an_item_is_pure_and_leaves_the_programs_generators_as_they_were(fails):
    items = MapDataset(Drawing(data(4, 3)), 0, labels="none")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    expected = [random.random(), np.random.random(), torch.rand(()).item()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    if fails:
        with pytest.raises(IndexError):
            items.load(99, 0)
    else:
        view = items.load(1, 0)
        other_view = items.load(1, 1)
        again = items.load(1, 0)
        assert torch.equal(view.pixels, again.pixels)
        assert (
            (view.pixels - other_view.pixels).abs().amax((1, 2)) > 0
        ).all()  # each generator was seeded by the view
    assert [random.random(), np.random.random(), torch.rand(()).item()] == expected


@pytest.mark.parametrize(
    "targets",
    [torch.eye(4), [[0], [1, 2], [], [0]], [0, 1, 2, 1], ["fig", "pea", "oat", "fig"]],
)
def test_targets_of_any_kind_are_part_of_the_fingerprint(targets):
    items = Alone(data(4, 3))
    items.targets = targets  # type: ignore[attr-defined]
    first = MapDataset(items, 0, labels="none").fingerprint()
    assert MapDataset(items, 0, labels="none").fingerprint() == first
    items.targets = [*targets[:2], targets[0], targets[3]]  # type: ignore[attr-defined]
    assert MapDataset(items, 0, labels="none").fingerprint() != first


@pytest.mark.parametrize("form", ["items", "targets", "batches"])
def test_class_weights_count_the_labels_that_are_there(form):
    train = data(40, 3)
    train.targets = train.tensors[1] if form == "targets" else None
    items = DataLoader(train, batch_size=16) if form == "batches" else train
    assert torch.equal(training_labels(items, "all", 3), train.tensors[1])
    losses = [{"kind": "ce", "class_weights": "balanced"}]
    plain, weighted = (
        distill(network(16, 1), network(4, 2), items, losses=each)
        for each in ("ce", losses)
    )
    assert plain.rows[0]["ce"] != weighted.rows[0]["ce"]
    # torchvision's targets are those before the transform.
    train.target_transform = lambda label: label
    train.targets = 2 - train.tensors[1]
    assert torch.equal(training_labels(train, "all", 3), train.tensors[1])
    train.targets = None
    with pytest.raises(
        ConfigError,
        match=r"^losses\[\]\['class_weights'\]: has 'class_7', which is no class",
    ):
        distill(
            network(16, 1),
            network(4, 2),
            items,
            losses=[{"kind": "ce", "class_weights": {"class_7": 2}}],
        )
    train.tensors[1][3] = 7
    with pytest.raises(KdError, match=r"^train: .* has the label 7"):
        distill(network(16, 1), network(4, 2), items, losses=losses)


def test_a_folder_resumes(tmp_path: Path):
    train = data(70, 3)
    teacher = network(16, 1)
    uninterrupted = network(4, 2)
    resumed = network(4, 2)
    expected = distill(
        teacher, uninterrupted, train, folder=tmp_path / "whole", sifter="history"
    )
    first = distill(teacher, resumed, train, folder=tmp_path / "cut", sifter="history")
    newest = max((tmp_path / "cut" / "checkpoints").iterdir())
    shutil.rmtree(newest)
    again = network(4, 5)
    resumed_result = distill(
        teacher, again, train, folder=tmp_path / "cut", sifter="history"
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(uninterrupted.parameters(), again.parameters(), strict=True)
    )
    assert resumed_result.state.step == expected.state.step == first.state.step
    assert [row["step"] for row in resumed_result.rows] == [
        row["step"] for row in expected.rows
    ]
    finished = network(4, 7)
    assert (
        distill(
            teacher, finished, train, folder=tmp_path / "cut", sifter="history"
        ).metrics
        == resumed_result.metrics
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(uninterrupted.parameters(), finished.parameters(), strict=True)
    )


def test_a_folder_holds_one_run(tmp_path: Path):
    train = data(40, 3)
    teacher = network(16, 1)
    distill(teacher, network(4, 2), train, folder=tmp_path / "run")
    with pytest.raises(KdError, match=r"^folder: .*differs in optimizer\['lr'\]"):
        distill(
            teacher,
            network(4, 2),
            train,
            folder=tmp_path / "run",
            optimizer={"lr": 0.1},
        )
    with pytest.raises(KdError, match=r"^folder: .*another teacher"):
        distill(network(16, 9), network(4, 2), train, folder=tmp_path / "run")
    with pytest.raises(KdError, match=r"^folder: .*another student"):
        distill(teacher, network(5, 2), train, folder=tmp_path / "run")
    with pytest.raises(KdError, match=r"^folder: .*another data"):  # of the same length
        distill(teacher, network(4, 2), data(40, 4), folder=tmp_path / "run")
    with pytest.raises(KdError, match=r"^folder: .*another data"):
        distill(teacher, network(4, 2), train, folder=tmp_path / "run", val=data(33, 4))
    assert (
        distill(teacher, network(4, 2), train, folder=tmp_path / "run").state.step == 6
    )
    with pytest.raises(ConfigError, match=r"^folder: is set, but a DataLoader"):
        distill(
            teacher, network(4, 2), DataLoader(train, 16), folder=tmp_path / "other"
        )


def test_a_folder_holds_one_criterion(tmp_path: Path):
    def go(*terms: Term) -> None:
        distill(
            network(16, 1),
            network(4, 2),
            data(40, 3),
            folder=tmp_path,
            losses=Criterion(terms),
        )

    kl = loss_term("kl", temperature=2.0)
    weighted = loss_term("ce", class_weights=[1, 2, 3], dims=DIMS)
    go(kl, weighted)
    go(loss_term("kl", temperature=2.0), weighted)
    combinations = (
        loss_term("ce", class_weights=[1, 2, 4], dims=DIMS),
        loss_term("ce", 2.0, class_weights=[1, 2, 3], dims=DIMS),
    )
    for terms in (
        (kl,),
        (loss_term("kl", temperature=3.0), weighted),
        *((kl, losses) for losses in combinations),
    ):
        with pytest.raises(KdError, match=r"^folder: .*another criterion"):
            go(*terms)


def alike(label: int) -> TensorDataset:
    return TensorDataset(torch.zeros(40, 3, 2, 2), torch.full((40,), label))


def linear(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width))


class Endless(IterableDataset):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield torch.zeros(3, 2, 2), 0


def cast(items: TensorDataset, dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(items.tensors[0].to(dtype), items.tensors[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_teacher_in_half_precision_is_that_teacher(dtype: torch.dtype):
    """transformers 5 loads a checkpoint in the dtype in which it was saved."""
    teacher = network(16, 1).to(dtype)
    train = data(70, 3)
    from_float = network(4, 2)
    from_half = network(4, 2)
    distill(copy.deepcopy(teacher).float(), from_float, train)
    result = distill(teacher, from_half, train)
    assert all(
        torch.equal(a, b)
        for a, b in zip(from_float.parameters(), from_half.parameters(), strict=True)
    )
    assert teacher[1].weight.dtype == dtype
    both = distill([teacher, network(16, 1)], network(4, 2), train)
    assert both.metrics["teacher_accuracy"] == pytest.approx(
        result.metrics["teacher_accuracy"], abs=0.1
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"train": cast(data(40, 3), torch.float64)},
        {"train": [(image, float(label)) for image, label in data(40, 3)]},
        *(
            {"losses": losses}
            for losses in ("ce", {"kind": "ce"}, ["ce"], ({"kind": "ce"},))
        ),
    ],
)
def test_images_in_float64_labels_as_floats_and_a_loss_by_its_name(changes: dict):
    expected = network(4, 2)
    student = network(4, 2)
    distill(network(16, 1), expected, data(40, 3), losses=[{"kind": "ce"}])
    distill(
        network(16, 1),
        student,
        **{"train": data(40, 3), "losses": [{"kind": "ce"}], **changes},
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(expected.parameters(), student.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"teacher": linear(10)},
            r"teacher: returns 10 classes, the student 3\. Both must be equal",
        ),
        (
            {"teacher": [linear(3), linear(4)]},
            r"teacher\[1\]: returns 4 classes, the student 3",
        ),
        (
            {"student": nn.Conv2d(3, 3, 1)},
            r"student: returns logits of the shape \[2, 3, 2, 2\]",
        ),
        (
            {"train": Alone(data(40, 3))},
            r"train: item \d+ is not \(image, label\).*labels='none'",
        ),
        (
            {"train": DataLoader(Alone(data(40, 3)), 16)},
            r"train: batch 0 is not \(image, label\)",
        ),
        ({"train": alike(-1)}, r"train: item \d+ has the label -1"),
        ({"val": alike(3)}, r"val: item \d+ has the label 3.*to 2"),
        (
            {"labels": "none"},
            r"losses\[1\]: 'ce' learns from labels, but labels='none'",
        ),
        ({"labels": "few"}, r"labels: is 'few'.*sets"),
        ({"teacher": "resnet18"}, r"teacher: is str.*nn\.Module"),
        ({"teacher": []}, r"teacher: is an empty list"),
        ({"student": None}, r"student: is NoneType"),
        (
            {"student": linear(3).bfloat16()},
            r"student: has weights in bfloat16.*student\.float",
        ),
        (
            {"student": linear(3).requires_grad_(False)},
            r"student: has no parameter that requires a gradient",
        ),
        (
            {"student": nn.Sequential(nn.Flatten(), nn.Linear(27, 3))},
            r"student: fails on .* float32 \[3, 2, 2\]",
        ),
        (
            {"teacher": nn.Sequential(nn.Flatten(), nn.Linear(27, 3))},
            r"teacher: fails on .*RuntimeError",
        ),
        (
            {"train": cast(data(40, 3), torch.uint8)},
            r"student: fails on .* uint8 .*image\.float\(\) / 255",
        ),
        ({"train": Endless()}, r"train: is Endless, which has no length"),
        ({"train": DataLoader(Endless(), 16)}, r"train: is Endless"),
        ({"train": iter([])}, r"train: is list_iterator"),
        ({"train": data(0, 3)}, r"train: is empty"),
        ({"val": data(0, 3)}, r"val: is empty"),
        (
            {"train": [(image, 1.7) for image, _ in data(40, 3)]},
            r"train: item \d+ has the label 1\.7.*Whole numbers",
        ),
        (
            {"train": DataLoader([(image, 1.7) for image, _ in data(40, 3)], 16)},
            r"train: batch 0 has the label 1\.7",
        ),
        (
            {"train": [(image, "fig") for image, _ in data(40, 3)]},
            r"train: item \d+ .*A label is a number",
        ),
        (
            {"train": [(image, [0, 1, 0]) for image, _ in data(40, 3)]},
            r"train: item \d+ has a label of shape \[3\]",
        ),
        (
            {"train": [(torch.zeros(3, 2 + i % 2, 2), 0) for i in range(40)]},
            r"train: image \d+ has the shape",
        ),
    ],
)
def test_models_and_data_that_do_not_fit_are_one_line(changes: dict, message: str):
    arguments = {
        "teacher": network(16, 1),
        "student": network(4, 2),
        "train": data(40, 3),
        **changes,
    }
    with pytest.raises(KdError, match=f"^{message}") as caught:
        distill(
            arguments.pop("teacher"),
            arguments.pop("student"),
            arguments.pop("train"),
            **arguments,
        )
    assert "\n" not in str(caught.value)


def test_label_sets_are_distilled_and_scored_by_their_precision():
    image, _ = data(64, 1).tensors
    items = TensorDataset(image, (image.mean((2, 3)) > 0).long())
    terms = [{"kind": "binary_kl"}, {"kind": "bce"}]
    arguments = {
        "teacher": [network(16, 1), network(16, 2)],
        "train": items,
        "val": items,
        "backend": CPU,
        "progress": False,
    }
    result = kd.distill(
        **arguments,
        student=network(8, 3),
        losses=terms,
        labels="sets",
        epochs=8,
        optimizer={"lr": 1e-2},
    )
    maps = [row["map"] for row in result.rows if row["kind"] == "val"]
    assert maps[-1] > maps[0]
    assert {"f1_macro", "agreement", "teacher_map"} <= result.metrics.keys()
    for labels, losses, words in (
        (
            "sets",
            [{"kind": "kl"}],
            "'kl' reads logits by a softmax, but images have several labels",
        ),
        (
            "all",
            terms,
            "'binary_kl' reads logits by a sigmoid, but an image has one label",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            kd.distill(**arguments, student=network(8, 3), losses=losses, labels=labels)
    wrong = TensorDataset(image, torch.zeros(64, 2))
    with pytest.raises(KdError, match="3 numbers"):
        kd.distill(
            **{**arguments, "train": wrong},
            student=network(8, 3),
            losses=terms,
            labels="sets",
        )


MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def photographs(count: int, seed: int, size: int = 8) -> list[tuple[torch.Tensor, int]]:
    """Return normalized 8-bit pixels; the label is the brightest channel."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (count, 3, size, size), generator=generator)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (MEAN, STD))
    labels = levels.float().mean((2, 3)).argmax(1).tolist()
    return list(zip((levels / 255 - mean) / std, labels, strict=True))


def convolutional(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 3),
    )


@pytest.fixture
def distilled(tmp_path: Path) -> kd.Distilled:
    """A student of `convolutional`, with a run folder."""
    train = photographs(48, 1)
    val = photographs(24, 2)
    return distill(
        convolutional(8, 1),
        convolutional(4, 2),
        train,
        val=val,
        epochs=1,
        folder=tmp_path / "run",
    )


def test_a_folder_is_a_run_that_kd_report_reads(
    distilled, tmp_path: Path, command, refused
):
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (settings["data"]["kind"], settings["data"]["images"]) == (
        "kd.data.map_dataset",
        "float32 [3, 8, 8]",
    )
    assert settings["data"]["image_size"] == 8
    assert [settings[model]["model"] for model in ("teacher", "student")] == [
        "Sequential",
        "Sequential",
    ]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["classes"] == ["class_0", "class_1", "class_2"]
    assert {
        "decides",
        "task",
        "scores",
        "data",
        "backend",
        "environment",
    } <= manifest.keys()
    assert command("report", tmp_path / "run").code == 0
    assert "3 classes" in (tmp_path / "run" / "report.html").read_text()
    for name in ("evaluate", "export"):
        assert "was written by kd.distill" in refused(name, tmp_path / "run")
    assert "<td>student</td>" in distilled._repr_html_()


def test_a_network_of_ones_own_reaches_the_endpoint(distilled, tmp_path: Path):
    from kd.deploy.serve.model import describe, load

    folder = distilled.export(
        tmp_path / "export", MEAN, STD, classes=["red", "green", "blue"]
    ).folder
    model = load(describe(folder), threads=1, slots=1)
    assert (model.labels, model.size) == (("red", "green", "blue"), 8)
    images = torch.stack([image for image, _ in photographs(24, 2)])
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (MEAN, STD))
    levels = ((images * std + mean) * 255).round().to(torch.uint8)
    with torch.no_grad():
        expected = distilled.student(images)
    torch.testing.assert_close(
        torch.from_numpy(model.engine(levels.numpy())), expected, atol=1e-4, rtol=1e-4
    )
    again = convolutional(4, 9)
    again.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.parameters(), distilled.student.parameters(), strict=True)
    )
    card = (folder / "README.md").read_text()
    assert "load_state_dict" in card
    assert "timm" not in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": (0.5, 0.5, 0.5)}, r"mean: .*grey level"),
        ({"std": (0.3, 0.3, 0.3)}, r"mean: .*grey level"),
        ({"std": (0.0, 0.3, 0.3)}, r"mean: .*three numbers"),
        (
            {"classes": ["red", "green"]},
            r"classes: names 2 classes, but the student returns 3",
        ),
    ],
)
def test_an_export_with_other_outputs_is_refused(
    distilled, tmp_path: Path, changes: dict, message: str
):
    with pytest.raises(ConfigError, match=f"(?i)^{message}"):
        distilled.export(
            tmp_path / "export", **{"mean": MEAN, "std": STD, "onnx": False, **changes}
        )
    assert not (tmp_path / "export").exists()


def test_training_images_need_no_whole_grey_levels(tmp_path: Path):
    """The ladder to int8 finds ranges on them: an erased patch has the mean, and a crop
    may be smaller than `val`'s.
    """
    from kd.jobs.api.result import Pixels

    train = photographs(48, 1, size=6)
    val = photographs(24, 2)
    train = [
        (torch.cat([image[:, :3], torch.zeros(3, 3, 6)], 1), label)
        for image, label in train
    ]
    result = distill(convolutional(8, 1), convolutional(4, 2), train, val=val, epochs=1)
    pixels = Pixels(result.arguments, MEAN, STD)
    (images, labels), *_ = pixels.batches(4, training=True)
    assert (images.shape, str(images.dtype), len(labels)) == ((4, 3, 8, 8), "uint8", 4)
    assert images[:, :, -1, -1].tolist() == [[round(255 * mean) for mean in MEAN]] * 4


def test_images_that_no_endpoint_has_are_not_exported(tmp_path: Path):
    wide = [(torch.zeros(3, 2, 4), 0) for _ in range(16)]
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
    result = distill(teacher, copy.deepcopy(teacher), wide, val=wide, epochs=1)
    with pytest.raises(ConfigError, match=r"^val: has images float32 \[3, 2, 4\]"):
        result.export(tmp_path / "export", MEAN, STD)
