"""A teacher beside itself at home, some of its classes, weights as scripts save them,
vectors by name.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pieces import merged
from safetensors.torch import save_file
from torch import nn

import kd
from kd import config
from kd.core.errors import KdError, ModelError
from kd.jobs.check import compare_teachers
from kd.jobs.description import describe
from kd.models.spec import Spec
from kd.parts.networks._shared import select_classes
from kd.setup.build_teacher import load_teachers, pixels_of, readable_images
from kd.setup.data import open_sources
from kd.setup.recipe import resolve
from kd.study.report.report import report


def write_vit(folder: Path, names: list[str], **keys) -> Path:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    sizes |= {"image_size": 16, "patch_size": 8, "initializer_range": 0.5}
    torch.manual_seed(0)
    labels = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }
    ViTForImageClassification(ViTConfig(**sizes, **labels)).save_pretrained(folder)
    ViTImageProcessor(**{"size": {"height": 16, "width": 16}, **keys}).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def bare(settings):
    return {
        **settings,
        "teacher": {"precision": "fp32", "min_accuracy": 0.0},
        "run": {**settings["run"], "epochs": 1},
    }


def loaded(settings, section, **values):
    recipe = resolve(config.load(merged(settings, {"teacher": section, **values})))
    return recipe, load_teachers(recipe, open_sources(recipe.data), {})


def compared(settings, section, **values):
    recipe, teachers = loaded(settings, section, **values)
    return compare_teachers(recipe, teachers)


def test_a_run_shows_and_keeps_the_difference(bare, tmp_path, capfd):
    pytest.importorskip("transformers")
    folder = write_vit(tmp_path / "vit", ["apple", "fig", "pear"])
    teacher = {"kind": "transformers", "model": str(folder)}
    run = kd.train(merged(bare, {"teacher": teacher, "run": {"name": "home"}}))
    manifest = json.loads((run.folder / "manifest.json").read_text())
    found = manifest["teacher_home"]["teacher"]
    assert found["images"] == 13
    assert 0 < found["of_std"] < 10
    assert 0 <= found["equal"] <= 1
    assert (
        "with the preprocessing of transformers its outputs on 13 validation images"
        in found["text"]
    )
    said = capfd.readouterr()
    assert found["text"] in said.out + said.err
    assert f"Teacher: {found['text']}." in run.report
    report([run.folder], tmp_path / "page.html", images=4)
    assert (
        "same top class as the teacher under its own preprocessing"
        in (tmp_path / "page.html").read_text()
    )
    text = describe(
        resolve(config.load(merged(bare, {"teacher": teacher}))), answers=True
    )
    assert found["text"] in text


def test_a_square_at_the_model_s_size_is_the_same_as_at_home(bare, tmp_path):
    """Pixels that need no resize are those of the processor: what differs otherwise is
    size and crop alone.
    """
    pytest.importorskip("transformers")
    from PIL import Image

    for split in ("train", "val"):
        for name in ("apple", "fig", "pear"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(2):
                Image.effect_noise((16, 16), 50 + 20 * i).convert("RGB").save(
                    tmp_path / "photos" / split / name / f"{i}.png"
                )
    folder = write_vit(tmp_path / "vit", ["apple", "fig", "pear"])
    section = {"kind": "transformers", "model": str(folder)}
    (one,) = compared(
        bare, section, data={"root": str(tmp_path / "photos"), "batch_size": 2}
    )
    assert one.values["of_std"] < 1e-4
    assert one.values["equal"] == 1.0


def test_another_top_class_at_home_is_refused(bare, tmp_path, monkeypatch):
    """The key that crops half the photograph away is named; with min_accuracy=0 the
    teacher is taken as it is.
    """
    pytest.importorskip("transformers")
    import kd.jobs.check as home

    folder = write_vit(
        tmp_path / "vit", ["apple", "fig", "pear"], size={"height": 96, "width": 16}
    )
    content = json.loads((folder / "preprocessor_config.json").read_text())
    content |= {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 160},
    }
    content |= {"crop_size": {"height": 16, "width": 16}, "do_center_crop": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    section = {"kind": "transformers", "model": str(folder)}
    (one,) = compared(bare, section)
    assert one.values["of_std"] > 0.1
    monkeypatch.setattr(home, "LEAST_EQUAL", one.values["equal"] + 0.01)
    assert compared(bare, section)
    with pytest.raises(
        ModelError,
        match=(
            r"^teacher\.model: .*top class is the same on .*size .*160.*crop_size .*16"
        ),
    ):
        compared(bare, {**section, "min_accuracy": -1.0})


def test_a_folder_of_timm_is_compared_too(settings):
    (one,) = compared(settings, {})
    assert "with the preprocessing of timm" in one.text
    assert one.values["equal"] == 1.0


ANIMALS = ["cat", "apple", "dog", "Granny Smith", "fig", "pear", "emu"]


def spec(classes=("apple", "fig", "pear")):
    return Spec("teacher", "m", {}, classes)


@pytest.mark.parametrize(
    ("lines", "count", "own", "columns"),
    [
        (["apple", "fig", "pear"], 7, ANIMALS, [1, 4, 5]),
        (["Granny Smith", "fig", "pear"], 7, ANIMALS, [3, 4, 5]),
        (ANIMALS, 7, [], [1, 4, 5]),
        (ANIMALS, 7, ["x"] * 7, [1, 4, 5]),
        (["fig", "apple", "pear"], 7, ANIMALS, [1, 4, 5]),
        (["fig", "pear", "apple"], 3, [], [2, 0, 1]),
        (["fig", "pear", "apple"], 3, ["x", "y", "z"], [2, 0, 1]),
    ],
)
def test_some_of_a_teacher_s_classes(lines, count, own, columns, tmp_path):
    (tmp_path / "names.txt").write_text("\n".join(lines), encoding="utf-8-sig")
    classes, pick = select_classes(spec(), count, own, str(tmp_path / "names.txt"))
    assert classes == ("apple", "fig", "pear")
    assert pick(torch.arange(float(count))[None]).tolist() == [columns]


def test_a_teacher_s_own_names_decide_the_order():
    classes, pick = select_classes(spec(), 3, ["fig", "pear", "apple"], "")
    assert classes == ("apple", "fig", "pear")
    assert pick(torch.arange(3.0)[None]).tolist() == [[2, 0, 1]]
    with pytest.raises(
        ModelError, match=r"^student\.model: class 0 is 'fig'.* in another order"
    ):
        select_classes(
            replace(spec(), config_path="student"), 3, ["fig", "pear", "apple"], ""
        )


@pytest.mark.parametrize(
    ("lines", "own", "message"),
    [
        (
            None,
            ANIMALS,
            r"teacher\.model: has 7 classes, the data has 3.*teacher\.classes",
        ),
        (
            ["emu", "apple", "pear"],
            ANIMALS,
            r"teacher\.classes: class 1 is 'apple', the data's is 'fig'",
        ),
        (["apple", "fig"], ANIMALS, r"teacher\.classes: has 2 classes, the data has 3"),
        (
            ["apple", "fig", "plum"],
            ANIMALS,
            r"teacher\.classes: names 3 classes.*'plum' is not one of its own",
        ),
        (
            ["apple", "fig", "pear"],
            [*ANIMALS[:-1], "fig"],
            r"teacher\.classes: 'fig' is the name of two",
        ),
    ],
)
def test_classes_that_do_not_fit(lines, own, message, tmp_path):
    file = ""
    if lines is not None:
        file = str(tmp_path / "names.txt")
        Path(file).write_text("\n".join(lines))
    with pytest.raises(ModelError, match=f"^{message}"):
        select_classes(spec(), 7, own, file)


def test_the_probability_share_of_the_datas_classes_is_shown(bare, tmp_path):
    pytest.importorskip("transformers")
    folder = write_vit(tmp_path / "vit", ANIMALS)
    (tmp_path / "names.txt").write_text("Granny Smith\nfig\npear\n")
    section = {
        "kind": "transformers",
        "model": str(folder),
        "classes": str(tmp_path / "names.txt"),
    }
    recipe, teachers = loaded(bare, section)
    (one,) = compare_teachers(recipe, teachers)
    alone = loaded(
        merged(bare, {"data": {"labels": "none"}}), {**section, "classes": ""}
    )[1].model
    shown = teachers.data.evaluation_views(teachers.data.val)
    images = pixels_of(readable_images(shown.source)[0], shown)
    with torch.no_grad():
        logits = alone(images).logits
        picked = teachers.model(images).logits
    torch.testing.assert_close(picked, logits[:, [3, 4, 5]])
    assert one.values["kept"] == pytest.approx(
        logits.softmax(1)[:, [3, 4, 5]].sum(1).mean().item(), rel=1e-4
    )
    assert "of its probability belongs to the data's 3 classes" in one.text


MODULE = """
import torch
from torch import nn

def network(half=False):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    return made.half() if half else made

class Means(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))

class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x.mean((2, 3)), 0.5, training=True)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "home_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "home_module", raising=False)
    section = {
        "kind": "torch",
        "model": "home_module:network",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    yield section
    sys.modules.pop("home_module", None)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
        lambda state: {
            f"module._orig_mod.{name}": tensor for name, tensor in state.items()
        },
        lambda state: {
            f"_orig_mod.module.{name}": tensor for name, tensor in state.items()
        },
        lambda state: {"model_ema": state, "epoch": 3},
        lambda state: {"net": state},
        lambda state: {
            "state_dict": state,
            "args": argparse.Namespace(lr=0.1, name="run"),
        },
        lambda state: {
            "model": {f"module.{name}": tensor for name, tensor in state.items()},
            "optimizer": {"lr": 1},
        },
    ],
)
def test_weights_as_training_scripts_save_them(wrap, bare, mine, tmp_path):
    state = {"1.weight": torch.randn(3, 768), "1.bias": torch.randn(3)}
    torch.save(wrap(state), tmp_path / "weights.pth")
    model = loaded(bare, {**mine, "checkpoint": str(tmp_path / "weights.pth")})[1].model
    assert torch.equal(model.network.inner[1].weight, state["1.weight"])


def test_a_half_precision_module_equals_itself_in_float32(bare, mine):
    """It was a traceback: float pixels for half weights."""
    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    half, whole = (
        loaded(bare, {**mine, "args": {"half": half}})[1].model
        for half in (True, False)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            half(image).logits, whole(image).logits, rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input_size": 20},
            r"teacher\.model: 'home_module:network' fails on images of 20x20 pixels",
        ),
        (
            {"model": "home_module:Drops"},
            r"teacher\.model: returns different outputs for the same pixels",
        ),
        ({"mean": [123.675, 116.28, 103.53]}, r"teacher\.mean: is \[123\.675.*0\.\.1"),
        ({"std": [58.4, 57.1, 57.4]}, r"teacher\.mean: is .*std is \[58\.4.*0\.\.1"),
    ],
)
def test_a_module_that_does_not_fit_is_one_line(change, message, bare, mine):
    with pytest.raises(KdError, match=f"^{message}") as caught:
        loaded(bare, {**mine, **change})
    assert "\n" not in str(caught.value)


@pytest.fixture
def clip(tmp_path):
    pytest.importorskip("transformers")
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    text = {
        **sizes,
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    ).save_pretrained(tmp_path / "clip")
    CLIPImageProcessor(crop_size=16, size={"shortest_edge": 16}).save_pretrained(
        tmp_path / "clip"
    )
    return {
        "kind": "zero_shot",
        "model": str(tmp_path / "clip"),
        "vectors": str(tmp_path / "vectors.safetensors"),
    }


def write_vectors(section, names, vectors):
    save_file(
        {"vectors": vectors},
        section["vectors"],
        {"classes": json.dumps(names)} if names else None,
    )


def test_vectors_are_found_by_the_names_of_their_classes(bare, clip, tmp_path):
    """In another order than `classes` they were accepted, and every class was
    misnamed.
    """
    vectors = torch.randn(4, 8)
    write_vectors(clip, ["pear", "plum", "apple", "fig"], vectors)
    (tmp_path / "classes.txt").write_text("apple\nfig\npear\n", encoding="utf-8-sig")
    for section in (clip, {**clip, "classes": str(tmp_path / "classes.txt")}):
        model = loaded(bare, section)[1].model
        expected = nn.functional.normalize(vectors[[2, 3, 0]], dim=1)
        assert list(model.classes) == ["apple", "fig", "pear"]
        torch.testing.assert_close(model.network.vectors, expected)


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        (["pear", "plum", "apple"], lambda v: v, "has no vector of the class 'fig'"),
        (
            ["pear", "pear", "apple", "fig"],
            lambda v: v,
            "has two vectors of the class 'pear'",
        ),
        (
            ["pear", "fig", "apple"],
            lambda v: v * torch.tensor([[1.0], [0.0], [1.0]]),
            "zeros",
        ),
    ],
)
def test_vectors_that_do_not_fit(names, change, message, bare, clip):
    write_vectors(clip, names, change(torch.randn(len(names), 8)))
    with pytest.raises(ModelError, match=rf"^teacher\.vectors: .*{message}"):
        loaded(bare, clip)


def test_the_processor_s_own_defaults_hold_for_zero_shot_too(bare, clip):
    write_vectors(clip, ["apple", "fig", "pear"], torch.randn(3, 8))
    file = Path(clip["model"]) / "preprocessor_config.json"
    content = {
        key: value
        for key, value in json.loads(file.read_text()).items()
        if key not in ("image_mean", "image_std")
    }
    before = loaded(bare, clip)[1].model.identity()
    file.write_text(json.dumps(content))
    assert loaded(bare, clip)[1].model.identity() == before
