"""Images without labels, or with some: what is listed, what is learned, what is
measured.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from pieces import merged, paint, tiny
from safetensors.torch import load_file

import kd
from kd import config
from kd.core.errors import ConfigError, DataError, KdError, ModelError
from kd.core.types import Batch, Outputs
from kd.engine.criterion import Criterion
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts import registry
from kd.setup.build import build_backend
from kd.setup.data import open_data, open_sources
from kd.setup.recipe import resolve
from kd.setup.student import loss_term


def dataset(kind, split="train", labels="all", **options):
    built_options = registry.default_options("datasets", kind, **options)
    label_options = {} if labels == "all" else {"labels": labels}
    return registry.build(
        "datasets",
        kind,
        built_options,
        "data.kind",
        split=split,
        classes=None,
        **label_options,
    )


@pytest.fixture(scope="module")
def loose(tmp_path_factory):
    """A folder of images, nested as it comes: none lies in the folder of a class."""
    root = tmp_path_factory.mktemp("loose")
    paint(root / "made", (8, 8, 8), seed=3)
    for number, path in enumerate(sorted((root / "made").rglob("*.jpg"))):
        folder = root / ("all" if number % 2 else "all/deep/er")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(path, folder / f"{number:02d}.jpg")
    shutil.rmtree(root / "made")
    return root / "all"


def test_a_folder_of_images_is_read_as_it_comes(loose):
    folder = {"root": str(loose), "val_fraction": 0.25}
    train, val = (
        dataset("imagefolder", split, "none", **folder) for split in ("train", "val")
    )
    assert (len(train), len(val)) == (18, 6)
    assert {train.label(id) for id in range(18)} == {-1}
    assert train.classes == val.classes == ()
    assert not {train.name(id) for id in range(18)} & {val.name(id) for id in range(6)}
    with pytest.raises(DataError, match=r"^data\.root: .*outside any class folder"):
        dataset("imagefolder", **folder)


def test_a_term_on_labels_is_the_mean_over_labelled_images():
    torch.manual_seed(0)
    logits = torch.randn(8, 3, requires_grad=True)
    teacher_logits = torch.randn(8, 3)
    label = torch.tensor([0, -1, 2, -1, 1, 1, -1, -1])
    has_label = label >= 0
    terms = [loss_term("ce", 0.5, label_smoothing=0.1), loss_term("kl", 2.0)]
    criterion = Criterion(terms, labelled=0.5)
    scores = criterion(
        Outputs(logits), Outputs(teacher_logits), Batch.of(torch.zeros(8), label)
    )
    loss = scores["loss"].mean()
    log = logits.double().log_softmax(1)
    expected_ce = torch.nn.functional.cross_entropy(
        logits[has_label].double(), label[has_label], label_smoothing=0.1
    )
    target = teacher_logits.double().log_softmax(1)
    expected = 0.5 * expected_ce + 2.0 * (target.exp() * (target - log)).sum(1).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    assert scores["ce"][~has_label].abs().max() == 0
    relabelled = label.clone()
    relabelled[~has_label] = (
        1  # the gradient must not depend on what stands for no label
    )
    masked = Criterion(terms)(
        Outputs(logits), Outputs(teacher_logits), Batch.of(torch.zeros(8), relabelled)
    )
    assert masked["ce"][~has_label].abs().min() > 0


def test_a_mixed_image_counts_where_both_labels_are_known():
    batch = Batch(
        torch.arange(3),
        torch.zeros(3),
        torch.tensor([0, 0, -1]),
        torch.tensor([1, -1, 1]),
        torch.full((3,), 0.7),
        torch.ones(3),
    )
    scores = Criterion([loss_term("ce")], labelled=1 / 3)(
        Outputs(torch.zeros(3, 2)), Outputs(torch.zeros(3, 0)), batch
    )
    torch.testing.assert_close(
        scores["ce"], torch.tensor([3 * np.log(2), 0.0, 0.0], dtype=torch.float32)
    )


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_the_share_of_known_labels_counts_the_partners_of_mixed_images(
    settings, probability
):
    changed = {
        "labels": "some",
        "unlabelled": "fig",
        "augment": {"mixup": 1.0, "mix_probability": probability},
    }
    data = open_sources(resolve(config.load(merged(settings, {"data": changed}))).data)
    views = data.views()[0]
    samples = [
        views.load(id, view) for id in range(len(data.train)) for view in range(40)
    ]
    both_known = [min(sample.label, sample.partner_label) >= 0 for sample in samples]
    assert data.labelled_share() == pytest.approx(np.mean(both_known), abs=0.06)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["losses=[{kind: kl}, {kind: ce}]"],
            r"losses\[1\]\.kind: 'ce' learns from labels, but data\.labels=none",
        ),
        (["losses=[{kind: dkd}]"], r"losses\[0\]\.kind: 'dkd' learns from labels"),
        (["run.baseline=true"], r"run\.baseline: needs labels"),
        (["teacher.min_accuracy=0.5"], r"teacher\.min_accuracy: needs labels"),
        (["teacher.fit.epochs=2"], r"teacher\.fit\.epochs: needs labels"),
        (["data.balance=0.5"], r"data\.labels: is none, but data\.balance"),
    ],
)
def test_options_that_need_labels_are_refused_without(settings, overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        config.load(merged(settings, {"data": {"labels": "none"}}), overrides)


def student(run):
    newest = max((run.folder / "checkpoints").iterdir())
    tensors = load_file(newest / "tensors.safetensors")
    return {
        name: tensor for name, tensor in tensors.items() if name.startswith("model.")
    }


def test_without_labels_the_student_is_the_same(settings, photos):
    """The teacher's classes, sifting, cache, resume and report: the weights are those
    of the labelled run.
    """
    common = {
        "teacher": {"cache": {"views": 2}},
        "sifter": {"kind": "history", "keep": 0.6},
    }
    bare = merged(settings, common)
    labelled = kd.train(merged(bare, {"run": {"name": "known"}}))
    none = merged(bare, {"run": {"name": "none"}, "data": {"labels": "none"}})
    blind = kd.train(none, "run.every.checkpoint=4")
    expected = student(labelled)
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in student(blind).items()
    )
    assert blind.metrics["agreement"] == labelled.metrics["agreement"]
    assert "accuracy" not in blind.metrics
    assert (
        f"agreement {100 * blind.metrics['agreement']:.1f} % (same prediction as the"
        " teacher)" in blind.report
    )
    manifest = json.loads((blind.folder / "manifest.json").read_text())
    assert manifest["classes"] == ["apple", "fig", "pear"]  # of the teacher's folder
    for folder in sorted((blind.folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    resumed = kd.train(none, "run.every.checkpoint=4")
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in student(resumed).items()
    )


@pytest.mark.parametrize("store", ["none", "ram", "disk"])
def test_those_with_a_label_are_the_same_images_in_a_store(settings, store):
    """What a baseline and a teacher's fit read: the labelled images alone, each with
    its own label.
    """
    overrides = ("data.labels=some", "data.labels_per_class=3", f"data.store={store}")
    recipe = resolve(config.load(settings, overrides))
    data = open_data(recipe.data, build_backend(recipe.backend))
    labelled = data.with_labels()
    views = labelled.views()[0]
    labels = [labelled.train.label(id) for id in range(len(labelled.train))]
    assert sorted(labels) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(views) == len(labelled.train) == 9
    for id in range(9):
        numbers = [
            number
            for number in range(len(data.train))
            if data.train.name(number) == labelled.train.name(id)
        ]
        assert data.train.label(numbers[0]) == labels[id]
        assert views.source.name(id) == labelled.train.name(id)
        pixels = np.asarray(views.source.decode(id).image)
        assert np.array_equal(
            pixels, np.asarray(data.views()[0].source.decode(numbers[0]).image)
        )


def test_a_checkpoint_alone_numbers_its_classes(teacher, tmp_path):
    shutil.copy(teacher / "model.safetensors", tmp_path / "alone.safetensors")
    spec = Spec(
        "teacher",
        **vit(),
        classes=None,
        checkpoint=str(tmp_path / "alone.safetensors"),
        exact_head=True,
    )
    model = load(spec, 16)
    assert list(model.classes) == ["class_0", "class_1", "class_2"]
    assert load(replace(spec, checkpoint=str(teacher)), 16).classes == (
        "apple",
        "fig",
        "pear",
    )
    with pytest.raises(
        ModelError,
        match=r"^teacher\.checkpoint: .*names no classes, and neither does the data",
    ):
        load(replace(spec, checkpoint=""), 16)


def vit():
    """The architecture of the fixture `teacher`."""
    architecture = tiny(2, 48)
    return {"model": architecture["model"], "args": architecture["args"]}


def test_food_mini_withholds_its_labels():
    labelled, none = (
        dataset("food_mini", labels=labels, train_images=2, val_images=1)
        for labels in ("all", "none")
    )
    assert [none.name(id) for id in range(len(none))] == [
        labelled.name(id) for id in range(len(labelled))
    ]
    assert {none.label(id) for id in range(len(none))} == {-1}
    assert none.fingerprint != labelled.fingerprint
    settings = {
        "data": {
            "kind": "food_mini",
            "labels": "some",
            "train_images": 6,
            "labels_per_class": 2,
            "batch_size": 4,
        }
    }
    data = open_sources(
        resolve(
            config.load(
                {
                    **settings,
                    "student": {"model": "resnet10t"},
                    "losses": [{"kind": "ce"}],
                }
            )
        ).data
    )
    assert len(data.train) == 12 * 6
    # -1: without one
    assert (
        np.bincount([data.train.label(id) + 1 for id in range(72)]).tolist()
        == [48] + [2] * 12
    )
    assert min(data.val.label(id) for id in range(len(data.val))) == 0


def test_rows_of_a_table_may_have_no_label(tmp_path):
    hub = pytest.importorskip("datasets")
    from PIL import Image

    image = Image.new("RGB", (8, 8))
    features = hub.Features(
        {"image": hub.Image(), "label": hub.ClassLabel(names=["a", "b"])}
    )
    table = hub.Dataset.from_dict(
        {"image": [image] * 4, "label": [0, 1, -1, 1]}, features=features
    )
    hub.DatasetDict({"train": table, "validation": table}).save_to_disk(
        tmp_path / "rows"
    )
    for labels, expected in (("some", [0, 1, -1, 1]), ("none", [-1] * 4)):
        rows = dataset("hf", labels=labels, path=str(tmp_path / "rows"))
        assert [rows.label(id) for id in range(4)] == expected


def test_an_evaluation_needs_a_labelled_image(settings, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    for name in ("apple", "fig"):
        shutil.rmtree(tmp_path / f"photos/val/{name}")
    (tmp_path / "photos/val/pear").rename(tmp_path / "photos/val/unlabelled")
    changed = merged(
        settings, {"data": {"labels": "some", "root": str(tmp_path / "photos")}}
    )
    with pytest.raises(
        KdError, match=r"^data\.root: the split 'val' has no labelled image"
    ):
        open_sources(resolve(config.load(changed)).data)
