"""An embedding student: a teacher without classes, live and cached, one and several;
neighbours and the probe.
"""

import math
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from kd.core.errors import ConfigError, DataError, ModelError
from kd.core.evaluation import Evaluation, Split
from kd.core.types import Batch, Dims, Outputs
from kd.data.loader import LocalLoader, Share, evaluation_plan
from kd.data.map_dataset import MapDataset
from kd.engine.criterion import Criterion
from kd.engine.loop import train
from kd.models.cache import Codec, Store
from kd.models.live_teacher import Uncached
from kd.parts.backends.cpu import CPU
from kd.parts.tasks import embedding
from kd.parts.tasks.embedding import STRENGTHS, nearest, ridge
from kd.setup.student import loss_term

LOSSES = "losses=[{kind: cosine}, {kind: tokens, weight: 0.5}, {kind: cckd}]"
LOG = "run.every.log=1"


def cached(folder, *overrides: str) -> list[str]:
    return ["teacher.cache.views=2", f"teacher.cache.path={folder}", *overrides]


def losses_of(setup) -> list[float]:
    return [row["loss"] for row in setup.store.rows if row["kind"] == "train"]


def taught(setup) -> float:
    """Return how many training images the teacher was asked for."""
    return sum(
        row["teacher_images"] for row in setup.store.rows if row["kind"] == "train"
    )


@torch.no_grad()
def mean_cosine(run) -> float:
    """Return the mean cosine of the projected student with its teacher on the
    validation images.
    """
    student = run.distillation.student.eval()
    val = run.evaluator.val
    cosines = []
    criterion = run.distillation.criterion
    project = criterion.terms[criterion.names.index("cosine")].project
    for batch in val.loader.epoch(val.plan, view=0):
        student_BD = project(student(batch.image).features["pooled"])
        teacher_BD = run.teacher(batch).features["pooled"]
        cosine = (
            (student_BD * teacher_BD).sum(1)
            / student_BD.norm(dim=1)
            / teacher_BD.norm(dim=1)
        )
        cosines += cosine[batch.weight > 0].tolist()
    return sum(cosines) / len(cosines)


def test_a_student_learns_the_vectors_of_a_teacher_without_classes(make):
    setup = make(LOSSES, LOG, "data.views=2", "run.epochs=3")
    student = setup.run.distillation.student
    criterion = setup.run.distillation.criterion
    before = setup.run.evaluator(student)
    state = train(setup.run)
    row = [row for row in setup.store.rows if row["kind"] == "val"][-1]
    assert student.num_classes == 0
    assert not list(student.network.get_classifier().parameters())
    assert criterion.names == ["cosine", "tokens", "cckd"]
    assert row["agreement"] > before["agreement"] + 0.1
    assert row["teacher_knn"] == before["teacher_knn"] > 0.6
    assert setup.run.evaluator.selection_metric == "knn"
    assert state.best == max(
        row["knn"] for row in setup.store.rows if row["kind"] == "val"
    )
    assert "accuracy" not in setup.store.rows[0]
    assert row["agreement"] == pytest.approx(mean_cosine(setup.run), abs=1e-5)


def test_a_cached_teacher_gives_what_the_live_one_gives_up_to_the_rounding(
    make, tmp_path
):
    live = make(LOSSES, LOG, "data.views=2")
    exact = make(LOSSES, LOG, *cached(tmp_path / "exact", "teacher.cache.dtype=fp32"))
    rounded = make(LOSSES, LOG, *cached(tmp_path / "rounded"))
    for setup in (live, exact, rounded):
        train(setup.run)
    assert losses_of(exact) == pytest.approx(losses_of(live), rel=1e-5)
    assert losses_of(rounded) == pytest.approx(losses_of(live), rel=2**-9)
    assert losses_of(rounded) != losses_of(live)
    assert taught(rounded) == 64
    again = make(LOSSES, LOG, *cached(tmp_path / "rounded"))
    train(again.run)
    assert losses_of(again) == losses_of(rounded)
    assert taught(again) == 0


def test_without_labels_agreement_decides(make):
    setup = make(LOSSES, "data.labels=none", "run.steps=4", "run.every.evaluate=2")
    state = train(setup.run)
    rows = [row for row in setup.store.rows if row["kind"] == "val"]
    assert [
        sorted(row.keys() - {"kind", "step", "epoch", "images", "seconds"})
        for row in rows
    ] == [["agreement"]] * 2
    assert setup.run.evaluator.selection_metric == "agreement"
    assert state.best == max(row["agreement"] for row in rows)


def test_each_of_several_teachers_has_its_own_projector(make, teacher, tmp_path):
    args = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
    }
    torch.manual_seed(1)
    network = timm.create_model(
        "vit_tiny_patch16_224", **args, num_classes=7
    )  # its 7 classes play no part
    save_file(network.state_dict(), tmp_path / "other.safetensors")
    args_yaml = ", ".join(f"{key}: {value}" for key, value in args.items())
    further_teacher = (
        f"model: vit_tiny_patch16_224, args: {{{args_yaml}}}, checkpoint:"
        f" {tmp_path}/other.safetensors, weight: 3"
    )
    keys = (
        "losses=[{kind: cosine}, {kind: tokens}]",
        f"teacher.also=[{{{further_teacher}}}]",
    )
    setup = make(*keys, LOG, *cached(tmp_path / "cache"))
    criterion = setup.run.distillation.criterion
    assert criterion.names == ["cosine", "cosine_2", "tokens", "tokens_2"]
    assert [term.weight for term in criterion.all] == [0.25, 0.75, 0.25, 0.75]
    assert [term.project.out_features for term in criterion.terms] == [48, 32, 48, 32]
    train(setup.run)
    values = setup.run.evaluator(setup.run.distillation.student)
    assert {"teacher_knn", "teacher_knn_2", "teacher_probe_2"} <= values.keys()
    live = make(*keys, LOG, "data.views=2")
    train(live.run)
    assert losses_of(setup) == pytest.approx(losses_of(live), rel=2**-9)


def test_a_classifier_may_learn_from_the_features_of_a_teacher_without_classes(make):
    setup = make("losses=[{kind: ce}, {kind: cosine}]", LOG, "run.steps=2")
    train(setup.run)
    row = setup.store.rows[-1]
    assert setup.run.distillation.student.num_classes == 3
    assert setup.run.evaluator.selection_metric == "accuracy"
    assert "accuracy" in row
    assert "teacher_accuracy" not in row


def test_a_cache_that_would_be_too_large_is_refused_before_it_is_begun(make, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^teacher\.cache\.max_gb: the cache would take .* MB .*tokens \[4, 48\]",
    ):
        make(LOSSES, *cached(tmp_path / "cache", "teacher.cache.max_gb=0.00001"))
    assert not (tmp_path / "cache").exists()


def test_records_of_another_teacher_are_refused(make, tmp_path):
    train(make(LOSSES, *cached(tmp_path)).run)
    codec = Codec(0, "fp16", 0, {"pooled": (48,), "tokens": (4, 48)})
    store = Store(tmp_path, codec, 36, writable=True)
    ids = store.have_records(0, range(36)).nonzero()[0].tolist()
    pooled, tokens = store.read_arrays(0, ids)[0]
    assert len(ids) == 32
    store.write(0, ids, [pooled.numpy(), tokens.numpy() + 1], [0] * len(ids))
    with pytest.raises(
        ModelError, match=r"^teacher\.cache\.path: .*value of 'tokens' differs by"
    ):
        make(LOSSES, *cached(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["run.baseline=true"],
            r"run\.baseline: is true, but the losses train an embedding model",
        ),
        (["teacher.pipeline=2"], r"teacher\.pipeline: passes logits"),
    ],
)
def test_options_incompatible_with_an_embedding_model_are_refused(
    make, overrides, message
):
    with pytest.raises(ConfigError, match=message):
        make(LOSSES, *overrides)


def test_a_record_holds_named_arrays():
    codec = Codec(3, "fp16", 0, {"pooled": (5,), "tokens": (2, 4), "pooled.1": (6,)})
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(7, *shape, generator=generator)  # noqa: E731
    outputs = Outputs(
        draw(3), {"pooled": draw(5), "tokens": draw(2, 4), "pooled.1": draw(6)}
    )
    unpacked = codec.unpack(codec.pack(outputs))
    assert unpacked.features.keys() == outputs.features.keys()
    assert torch.equal(
        unpacked.of(1).features["pooled"], outputs.features["pooled.1"].half()
    )
    assert torch.equal(
        unpacked.of(0).features["tokens"], outputs.features["tokens"].half()
    )
    assert (
        max(
            difference
            for difference, _ in codec.differences(
                codec.pack(outputs), outputs
            ).values()
        )
        < 2e-3
    )
    assert codec.record.itemsize == 2 * (3 + 5 + 8 + 6) + 4


def clusters(
    count: int, width: int = 8, classes: int = 3, spread: float = 0.6
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    label = torch.arange(count) % classes
    return (
        F.normalize(
            centres[label] + spread * torch.randn(count, width, generator=generator),
            dim=1,
        ),
        label,
    )


@pytest.mark.parametrize("count", [9, 60])
def test_neighbours_vote_as_the_formula_says(count):
    bank, label = clusters(count)
    asking, _ = clusters(7)
    expected = torch.zeros(7, 3, dtype=torch.float64)
    for i, query in enumerate(asking.double()):
        cosines = [
            (float(query @ neighbour), int(neighbour_label))
            for neighbour, neighbour_label in zip(bank.double(), label, strict=True)
        ]
        for cosine, neighbour_label in sorted(cosines, reverse=True)[:20]:
            expected[i, neighbour_label] += math.exp(cosine / 0.07)
    torch.testing.assert_close(
        nearest(bank, label, asking, 3).double(), expected, rtol=1e-4, atol=0
    )


def test_the_probe_is_the_ridge_that_predicts_best_what_it_has_not_seen():
    bank, label = clusters(30, spread=1.5)
    asking, _ = clusters(7)
    x = bank.double()
    y = F.one_hot(label, 3).double()
    scale = torch.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0))).mean()

    def fit(x: Tensor, y: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """Minimize the squared error and the penalty; the intercept is free."""
        ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
        penalty = torch.eye(x.shape[1] + 1, dtype=x.dtype) * strength * scale
        penalty[-1, -1] = 0
        solved = torch.linalg.solve(ones.T @ ones + penalty, ones.T @ y)
        return solved[:-1], solved[-1]

    def left_out(strength: float) -> float:
        errors = []
        for i in range(len(x)):
            without_i = torch.arange(len(x)) != i
            weights, bias = fit(x[without_i], y[without_i], strength)
            errors.append((x[i] @ weights + bias - y[i]).square().mean())
        return torch.stack(errors).mean().item()

    best = min(STRENGTHS, key=left_out)
    weights, bias = fit(x, y, best)
    assert best not in (STRENGTHS[0], STRENGTHS[-1])
    torch.testing.assert_close(
        ridge(bank, label, asking, 3),
        asking.double() @ weights + bias,
        rtol=1e-6,
        atol=1e-8,
    )


class Embeds(nn.Module):
    """Maps images to pooled vectors by one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(12, width)

    def forward(self, image: Tensor) -> Outputs:
        return Outputs(
            torch.zeros(len(image), 0),
            {"pooled": self.linear(image.flatten(1).float())},
        )


class Counted(Uncached):
    """A teacher that counts its batches."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.batches = 0

    def __call__(self, batch: Batch) -> Outputs:
        self.batches += 1
        return self.model(batch.image)


def test_an_evaluation_equals_whole_splits_and_queries_the_teacher_once():
    generator = torch.Generator().manual_seed(0)
    bank, val = (
        [
            (torch.randn(3, 2, 2, generator=generator) + i % 3, i % 3)
            for i in range(count)
        ]
        for count in (50, 23)
    )
    torch.manual_seed(0)
    student = Embeds(5)
    teacher = Counted(Embeds(7))
    criterion = Criterion([loss_term("cosine", dims=Dims(0, 5, 7))])
    queries, searched = (
        Split(
            LocalLoader(MapDataset(data, 0), Share(8, 1, 0, 1), 0),
            evaluation_plan(len(data), 8),
        )
        for data in (val, bank)
    )
    setting = Evaluation(
        CPU("fp32", 60, 1),
        queries,
        teacher,
        3,
        bank=lambda: searched,
        agreement=criterion.agreement,
        members=1,
    )
    evaluator = embedding.build(embedding.Options()).evaluator(setting)
    metrics = evaluator(student)
    assert evaluator(student) == metrics
    assert teacher.batches == 10  # 3 of the validation split, 7 of the bank
    other_teacher = Counted(Embeds(7))
    anew = embedding.build(embedding.Options()).evaluator(
        replace(setting, teacher=other_teacher)
    )
    # In an index of its own.
    assert evaluator.of(other_teacher)(student) == anew(student)
    with torch.no_grad():
        (bank_image, bank_label), (image, label) = (
            (
                torch.stack([image for image, _ in data]),
                torch.tensor([label for _, label in data]),
            )
            for data in (bank, val)
        )
        for prefix, model in (("", student), ("teacher_", teacher.model)):
            bank_vectors, new = (
                F.normalize(model(images).features["pooled"], dim=1)
                for images in (bank_image, image)
            )
            for kind, classify in (("knn", nearest), ("probe", ridge)):
                right = classify(bank_vectors, bank_label, new, 3).argmax(1) == label
                assert metrics[prefix + kind] == pytest.approx(
                    right.double().mean().item(), abs=1e-6
                )
        agreement = (
            criterion.agreement(student(image), teacher.model(image)).mean().item()
        )
    assert metrics["agreement"] == pytest.approx(agreement, abs=1e-6)
    assert metrics["knn"] == pytest.approx(
        evaluator.samples()["knn"].right.mean(), abs=1e-6
    )
    assert len(evaluator.samples()["teacher_probe"].right) == 23


@pytest.mark.parametrize(
    ("bank", "val", "words"),
    [(-1, 1, "none of the 9 training images"), (1, -1, "no image of the")],
)
def test_unlabelled_images_cannot_be_scored(bank, val, words):
    images = [[(torch.randn(3, 2, 2), label)] * 9 for label in (val, bank)]
    loaders = (
        LocalLoader(MapDataset(data, 0, labels="some"), Share(8, 1, 0, 1), 0)
        for data in images
    )
    queries, searched = (Split(loader, evaluation_plan(9, 8)) for loader in loaders)
    criterion = Criterion([loss_term("cosine", dims=Dims(0, 5, 7))])
    options = {"bank": lambda: searched, "agreement": criterion.agreement, "members": 1}
    setting = Evaluation(CPU("fp32", 60, 1), queries, Counted(Embeds(7)), 3, **options)
    with pytest.raises(DataError, match=rf"^data\.labels: {words}"):
        embedding.build(embedding.Options()).evaluator(setting)(Embeds(5))
