"""Files of weights of any origin: what is taken, what is said of it, and what is
refused in one line that helps.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import sys
import warnings
from typing import Any

import authors as families
import numpy as np
import omegaconf
import pytest
import timm
import torch
import torchvision
from authors import CLASSES, FAMILIES, author_tensors, build_network
from pieces import slow
from safetensors.torch import save_file
from torch import nn

from kd.core.errors import ModelError
from kd.jobs.init.networks import pretrained_keys
from kd.models import checkpoints, fitting
from kd.models.load_classifier import load
from kd.models.recognize import identify
from kd.models.spec import Spec
from kd.parts import registry

NAME, ARGS = (
    "vit_tiny_patch16_224",
    {
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 1,
        "num_heads": 2,
        "img_size": 16,
    },
)
TWO = ("no", "yes")
SAMPLE = [
    "convnext_atto",
    "swin_tiny_patch4_window7_224",
    "vit_small_patch14_reg4_dinov2",
    "pvt_v2_b0",
    "regnetx_002",
]


def vit(classes: int = 5, seed: int = 0, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(NAME, **{**ARGS, **more}, num_classes=classes).eval()


def taken(
    path: object,
    classes=CLASSES,
    model=NAME,
    args=ARGS,
    size=16,
    config_path="teacher",
    **more: Any,
):
    spec = Spec(
        config_path,
        model,
        args,
        classes,
        str(path),
        exact_head=config_path == "teacher",
        **more,
    )
    return load(spec, size).eval()


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def refusal(path: object, *given: Any, **more: Any) -> str:
    with pytest.raises(ModelError) as caught:
        taken(path, *given, **more)
    assert not re.search(r"[\n\x1b]", str(caught.value))
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    """A function that saves something as a .pth file and returns its path."""

    def save(content: object, name: str = "a.pth") -> pathlib.Path:
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return save


# --------------------------------------------------------------------------------
# names of the authors


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else slow(name) for name in FAMILIES]
)
def test_a_file_with_its_authors_names_is_loaded_as_timm_loads_it(name, file):
    network, args = build_network(name), FAMILIES[name][0]
    path = file({"model": author_tensors(name, network)})
    overlay = {"file": str(path), "num_classes": len(CLASSES)}
    theirs = timm.create_model(
        name,
        pretrained=True,
        num_classes=len(CLASSES),
        pretrained_cfg_overlay=overlay,
        **args,
    ).eval()
    size = args.get("img_size", network.pretrained_cfg["input_size"][-1])
    made = taken(path, model=name, args=args, size=size)
    assert same(made.network, theirs)
    assert name.startswith("vit_base_patch16_clip") or same(
        network, theirs
    )  # CLIP's file has no bias
    ours = made.network.to(memory_format=torch.contiguous_format)
    pixels = torch.rand(1, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels), theirs(pixels), rtol=1e-6, atol=1e-6)
    assert bool(FAMILIES[name][1]) == any(
        "its authors'" in note for note in made.notes
    ) or name.startswith("cait")


def test_forty_families_at_least():
    assert len({timm.model_entrypoint(name).__module__ for name in FAMILIES}) >= 35
    assert len(FAMILIES) >= 40


@pytest.mark.parametrize("share", [12, slow(1)])
def test_the_filter_is_the_one_of_timm_s_own_loader(share, monkeypatch):
    """For a network of each module of timm, and each variant with a filter of
    its own.
    """
    called: list[Any] = []
    monkeypatch.setattr(
        timm.models._builder,
        "load_pretrained",
        lambda *_, filter_fn=None, **__: called.append(filter_fn),
    )
    modules = {
        timm.model_entrypoint(name).__module__: name for name in timm.list_models()
    }
    special = [
        "flexivit_small",
        "vit_base_patch16_siglip_224",
        "deit3_small_patch16_224",
        "gemma4_vit_167m_enc",
    ]
    for name in [*[*modules.values()][::share], *special]:
        called.clear()
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            timm.create_model(name, pretrained=True)
        theirs, options = (
            getattr(called[0], "func", called[0]),
            getattr(called[0], "keywords", {}),
        )
        found = fitting.family_filter(name)
        if timm.model_entrypoint(name).__module__.endswith("crossvit"):
            # it is made inside of a function; the test above compares what it does
            continue
        options = {key: value for key, value in options.items() if value != ""}
        assert (found[:2] if found else (None, {})) == (theirs, options), name


# --------------------------------------------------------------------------------
# wrappers, sets, prefixes


WRAPPERS = {
    "bare": (lambda raw, ema: raw, "raw"),
    "state_dict": (
        lambda raw, ema: {
            "epoch": 3,
            "state_dict": raw,
            "optimizer": {"state": {0: {"m": raw}}},
        },
        "raw",
    ),
    "nested": (lambda raw, ema: {"checkpoint": {"net": {"weights": raw}}}, "raw"),
    "timm": (
        lambda raw, ema: {"arch": "vit", "state_dict": raw, "state_dict_ema": ema},
        "averaged",
    ),
    "torchvision": (
        lambda raw, ema: {
            "model": raw,
            "model_ema": {
                "n_averaged": torch.tensor(7),
                **{f"module.{name}": one for name, one in ema.items()},
            },
        },
        "averaged",
    ),
    "ema_state_dict": (lambda raw, ema: {"ema_state_dict": ema}, "averaged"),
    "dino": (lambda raw, ema: {"student": raw, "teacher": ema}, "averaged"),
    "params_ema": (lambda raw, ema: {"params": raw, "params_ema": ema}, "averaged"),
    "one state_dict with both": (
        lambda raw, ema: {
            "state_dict": {
                **{f"student.{name}": one for name, one in raw.items()},
                **{f"teacher.{name}": one for name, one in ema.items()},
            }
        },
        "averaged",
    ),
    "lightning": (
        lambda raw, ema: {
            "state_dict": (
                {f"model.{name}": one for name, one in raw.items()}
                | {"criterion.weight": torch.ones(3)}
            ),
            "hyper_parameters": {"lr": np.float64(0.1), "root": pathlib.Path("a")},
        },
        "raw",
    ),
}
PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "model.",
    "backbone.",
    "encoder.",
    "net.",
    "student.",
    "teacher.",
    "visual.",
]
NESTED = [
    "module._orig_mod.",
    "_orig_mod.module.",
    "model.backbone.",
    "module.encoder.trunk.",
]


@pytest.mark.parametrize("prefix", PREFIXES + NESTED)
def test_wrappers_and_prefixes(prefix, file):
    raw, averaged = vit(), vit(seed=1)
    tensors = [
        {f"{prefix}{name}": one for name, one in each.state_dict().items()}
        for each in (raw, averaged)
    ]
    for wrapper, (wrap, expected) in WRAPPERS.items():
        made = taken(file(wrap(*tensors)))
        assert same(made.network, raw if expected == "raw" else averaged), wrapper
        said = " ".join(made.notes)
        for first in {*prefix.split(".")} - {
            "",
            "_orig_mod",
        }:  # a wrapper says nothing about the network
            assert f"{first}." in said, wrapper


def test_the_set_of_tensors_is_reported_and_selectable(file):
    raw, averaged = vit(), vit(seed=1)
    path = file(
        {
            "model": raw.state_dict(),
            "model_ema": averaged.state_dict(),
            "loss": {"centre": torch.ones(2)},
        }
    )
    told = taken(path).notes[0]
    assert (
        "the set 'model_ema'; ['model'] would fit too (teacher.weights: raw, or a name)"
        in told
    )
    for choice, expected in {"raw": raw, "model": raw, "model_ema": averaged}.items():
        assert same(taken(path, weights=choice).network, expected)
    text = refusal(path, weights="state_dict")
    assert text.startswith("teacher.weights: is 'state_dict', and")
    assert "by_name, by_order, raw, model, model_ema" in text
    other = file({"model": raw.state_dict(), "model_ema": vit(depth=2).state_dict()})
    assert same(taken(other).network, raw)  # the averaged ones are another network's
    assert "would fit" not in taken(other).notes[0]


def test_a_prefix_is_left_out_only_where_all_below_it_fits(file):
    network = vit()
    tensors = {
        f"backbone.{name}": one
        for name, one in network.state_dict().items()
        if not name.startswith("head")
    }
    path = file(
        {**tensors, "head.weight": network.head.weight, "head.bias": network.head.bias}
    )
    assert same(
        taken(path).network, network
    )  # as OpenMMLab's: the classifier stands outside
    path = file(
        {
            **tensors,
            "backbone.more.weight": torch.ones(2),
            **network.head.state_dict(prefix="head."),
        }
    )
    assert "the weights are not those of" in refusal(path)


# --------------------------------------------------------------------------------
# what lies beside


def test_values_beside_the_weights(file):
    values = {
        "metric": np.float64(0.9),
        "step": np.int64(3),
        "flag": np.bool_(True),
        "output": pathlib.Path("/tmp/run"),
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("x")),
    }
    network = vit()
    path = file({"model": network.state_dict(), **values})
    assert same(taken(path).network, network)
    # numpy before 2 and a Python on Windows write other names for the same
    data = path.read_bytes()
    assert b"numpy._core.multiarray" in data or b"numpy.core.multiarray" in data
    written = [(c if isinstance(c, tuple) else (c, "")) for c in checkpoints._RENAMED]
    assert {"numpy.core.multiarray.scalar", "pathlib.WindowsPath"} <= {
        name for _, name in written
    }


def test_old_formats_and_files_from_elsewhere(file, tmp_path):
    network = vit()
    torch.save(
        {"model": network.state_dict()},
        tmp_path / "old.pth",
        _use_new_zipfile_serialization=False,
    )
    assert same(taken(tmp_path / "old.pth").network, network)


def test_other_objects_are_named_and_the_line_rewrites_the_file(file):
    network = vit()
    for name, beside in {
        "omegaconf": omegaconf.OmegaConf.create({"lr": 1}),
        "counter": Held(network),
    }.items():
        path = file({"model": network.state_dict(), "cfg": beside}, f"{name}.pth")
        text = refusal(path)
        assert "objects of omegaconf." in text or "Held" in text
        follow(text)
        assert same(taken(path.with_suffix(".weights.pth")).network, network)


def test_a_pickled_module_and_a_torchscript_archive(file, tmp_path):
    network = vit()
    path = file({"epoch": 1, "model": network, "ema": None})
    text = refusal(path)
    assert "objects of timm." in text
    follow(text)
    assert same(taken(path.with_suffix(".weights.pth")).network, network)
    path = file(network, "whole.pth")
    follow(refusal(path))
    assert same(taken(path.with_suffix(".weights.pth")).network, network)
    small = nn.Sequential(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(small), tmp_path / "script.pt")
    text = refusal(tmp_path / "script.pt")
    assert "TorchScript archive" in text
    follow(text)
    held = checkpoints.read_weights(
        "teacher.checkpoint", str(tmp_path / "script.weights.pth")
    )
    assert torch.equal(held.sets["model"]["0.weight"], small[0].weight)


class Held:
    """An object of somebody else's training."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network


def follow(text: str) -> None:
    """Run the line that a message asks for."""
    code = re.search(r'python -c "(.*)"', text)
    assert code, text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code[1], {})


# --------------------------------------------------------------------------------
# torchvision's, transformers'


def theirs(name: str) -> tuple[nn.Module, str, dict[str, Any], int]:
    """Return a network of torchvision, timm's of the same, its arguments, and an
    image's side.
    """
    from torchvision.models import convnext, swin_transformer, vision_transformer

    torch.manual_seed(0)
    small = {"depths": (1, 1, 1, 1)}
    if name == "vit":
        made = vision_transformer.VisionTransformer(32, 8, 2, 2, 24, 96, num_classes=5)
        return made, "vit_tiny_patch16_224", {**ARGS, "depth": 2, "img_size": 32}, 32
    if name == "swin":
        made = swin_transformer.SwinTransformer(
            [4, 4], 16, [1, 1, 1, 1], [1, 2, 2, 2], [4, 4], num_classes=5
        )
        return (
            made,
            "swin_tiny_patch4_window7_224",
            {**families.SWIN, "img_size": 128},
            128,
        )
    if name == "convnext":
        widths = [8, 16, 24, 32]
        blocks = [
            convnext.CNBlockConfig(a, b, 1)
            for a, b in zip(widths, [*widths[1:], None], strict=True)
        ]
        return (
            convnext.ConvNeXt(blocks, num_classes=5),
            "convnext_tiny",
            {**small, "dims": widths},
            64,
        )
    timms = {"mobilenet_v2": "mobilenetv2_100", "mnasnet1_0": "mnasnet_100"}
    return (
        getattr(torchvision.models, name)(num_classes=5),
        timms.get(name, name),
        {},
        64,
    )


@pytest.mark.parametrize(
    "name",
    [
        "vit",
        "swin",
        "convnext",
        "efficientnet_b0",
        "mobilenet_v2",
        slow("mnasnet1_0"),
        slow("efficientnet_b2"),
    ],
)
def test_a_torchvision_file_predicts_like_torchvision(name, file):
    network, model, args, size = theirs(name)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand_like(tensor))
    made = taken(file(network.state_dict()), model=model, args=args, size=size)
    pixels = torch.rand(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(
            made.network(pixels), network.eval()(pixels), rtol=2e-5, atol=2e-5
        )
    assert "its names are torchvision's" in made.notes[0]


def test_a_network_of_torchvision_s_that_timm_lacks_is_named_with_the_section(file):
    network = torchvision.models.shufflenet_v2_x0_5(num_classes=5)
    mobile = torchvision.models.mobilenet_v3_small(num_classes=5)
    path = file(mobile.state_dict(), "mobilenet_v3_small-047dcff4.pth")
    text = refusal(path, model="mobilenetv3_small_100", args={})
    assert "names of torchvision" in text
    section = re.search(r"Write (teacher: {.*}),", text)
    assert section
    assert "torchvision.models:mobilenet_v3_small" in section[1]
    keys = omegaconf.OmegaConf.create(section[1])["teacher"]
    options = registry.default_options(
        "networks", "torch", mean=tuple(keys.mean), std=tuple(keys.std)
    )
    spec = Spec(
        "teacher", keys.model, {"num_classes": 5}, CLASSES, keys.checkpoint, task=task()
    )
    made = registry.build(
        "networks", keys.kind, options, "teacher", spec=spec, image_size=32, features=()
    )
    assert same(made.network.inner, mobile)
    assert "the weights are not those of" in refusal(
        file(network.state_dict()), model="resnet18", args={}
    )


def task() -> Any:
    from kd.parts.tasks.single_label import build

    return build(registry.default_options("tasks", "single_label"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ViT", "Dinov2", "Swin", "ConvNext"])
def test_a_file_of_transformers_without_its_folder_is_named(kind, tmp_path, file):
    hub = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    sizes = (
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2]}
        if kind == "Swin"
        else sizes
    )
    sizes = (
        {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
        if kind == "ConvNext"
        else sizes
    )
    model = getattr(hub, f"{kind}ForImageClassification")(
        getattr(hub, f"{kind}Config")(**sizes, num_labels=5)
    )
    assert "names of transformers" in refusal(
        file(model.state_dict(), "pytorch_model.bin")
    )
    text = refusal(tmp_path / "pytorch_model.bin")
    assert "teacher: {kind: transformers, model: FOLDER}" in text
    assert "config.json" in text


# --------------------------------------------------------------------------------
# grid, channels, classes


def test_grids_of_another_size_as_timm_resamples_them(file):
    large = {**families.SWIN, "img_size": 128, "window_size": 8}
    network = build_network("swin_tiny_patch4_window7_224", **large)
    path = file(author_tensors("swin_tiny_patch4_window7_224", network))
    overlay = {"file": str(path), "num_classes": 5}
    given: dict[str, Any] = {
        "model_name": "swin_tiny_patch4_window7_224",
        **families.SWIN,
        "num_classes": 5,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = timm.create_model(
            pretrained=True, pretrained_cfg_overlay=overlay, **given
        )
    made = taken(
        path, model="swin_tiny_patch4_window7_224", args=families.SWIN, size=64
    )
    assert same(made.network, theirs)
    path = file(vit(img_size=32, patch_size=16).state_dict())
    overlay = {"file": str(path), "num_classes": 5}
    theirs = timm.create_model(
        NAME, pretrained=True, num_classes=5, pretrained_cfg_overlay=overlay, **ARGS
    )
    assert same(taken(path).network, theirs)  # patches of 16 px became 8
    wide = file(vit(img_size=32).state_dict())
    assert "pos_embed (1, 17, 24) became (1, 5, 24)" in taken(wide).notes[0]


def test_a_grey_teacher_sees_the_grey_of_a_photograph(file):
    network = vit(in_chans=1)
    overlay = {"mean": [0.4, 0.4, 0.4], "std": [0.2, 0.2, 0.2]}
    made = taken(
        file(network.state_dict()),
        args={**ARGS, "in_chans": 1, "pretrained_cfg_overlay": overlay},
    )
    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    red, green, blue = image.double().unbind(1)
    grey = ((0.299 * red + 0.587 * green + 0.114 * blue) / 255 - 0.4) / 0.2
    with torch.no_grad():
        expected = network(grey[:, None].float())
        torch.testing.assert_close(made(image).logits, expected, rtol=1e-5, atol=1e-5)
    assert "it sees the grey" in made.notes[0]
    colour = (
        vit()
    )  # weights of three channels become those of one as timm's loader makes them
    path = file(colour.state_dict())
    made = taken(path, args={**ARGS, "in_chans": 1})
    summed = colour.patch_embed.proj.weight.sum(1, keepdim=True)
    torch.testing.assert_close(
        made.network.patch_embed.proj.weight.sum(1, keepdim=True), summed
    )


def test_one_logit_is_a_binary_teacher(file, tmp_path):
    network = vit(1)
    path = file(network.state_dict())
    made = taken(path, TWO, task=task())
    image = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        z = network(made.normalize(image))[:, 0]
        torch.testing.assert_close(made(image).logits.softmax(1)[:, 1], z.sigmoid())
        torch.testing.assert_close(made(image).logits[:, 0], torch.zeros(4))
    assert "'yes' has z" in made.notes[0]
    assert taken(path, None, task=task()).classes == ("class_0", "class_1")
    assert "has 1 classes, the data has 3" in refusal(
        path, ("a", "b", "c"), task=task()
    )


@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
def test_a_module_of_one_output_is_a_binary_teacher(outputs, monkeypatch):
    torch.manual_seed(0)
    inner = nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * 8 * 8, 1),
        *[nn.Sigmoid()] * (outputs == "probabilities"),
    )
    module = type(sys)("binary_module")
    module.make = lambda: inner
    monkeypatch.setitem(sys.modules, "binary_module", module)
    options = registry.default_options(
        "networks", "torch", mean=(0.5,) * 3, std=(0.5,) * 3, outputs=outputs
    )
    spec = Spec("teacher", "binary_module:make", {}, TWO, task=task(), exact_head=True)
    made = registry.build(
        "networks", "torch", options, "teacher", spec=spec, image_size=8, features=()
    )
    image = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        z = inner[1](made.normalize(image).flatten(1))[:, 0]
        torch.testing.assert_close(made(image).logits.softmax(1)[:, 1], z.sigmoid())


def test_a_file_without_a_classifier(file):
    tensors = {
        name: one
        for name, one in vit().state_dict().items()
        if not name.startswith("head")
    }
    text = refusal(file(tensors))
    assert "has no classifier" in text
    for way in (
        "teacher.pretrained=true with teacher.fit.epochs",
        "losses=[{kind: cosine}]",
    ):
        assert way in text
    assert "teacher.classes" not in text  # names of outputs that it does not have
    assert "has no classifier" in refusal(file(tensors), classes=None)
    assert not taken(file(tensors), config_path="student").network.head.weight.any()
    spec = Spec("teacher", NAME, ARGS, (), str(file(tensors)))
    assert load(spec, 16, ("pooled",)).num_classes == 0


# --------------------------------------------------------------------------------
# folders, formats


def test_folders_as_accelerate_and_transformers_divide_them(tmp_path, file):
    network = vit()
    tensors = {name: one.clone() for name, one in network.state_dict().items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same(taken(tmp_path).network, network)
    (tmp_path / "pytorch_model.bin").unlink()
    names = [*tensors]
    parts = {
        "model-00001-of-00002.safetensors": names[:7],
        "model-00002-of-00002.safetensors": names[7:],
    }
    for part, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps(
            {
                "weight_map": {
                    name: part for part, inside in parts.items() for name in inside
                }
            }
        )
    )
    for place in (tmp_path, index, *(tmp_path / part for part in parts)):
        assert same(taken(place).network, network), place
    index.unlink()
    assert same(taken(tmp_path).network, network)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    for place in (tmp_path, tmp_path / "model-00001-of-00002.safetensors"):
        assert "is one of 2 parts, of which 1 are in its folder" in refusal(place)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    for name, word in {
        "__0_0.distcp": "dcp_to_torch",
        "zero_to_fp32.py": "zero_to_fp32.py",
    }.items():
        (tmp_path / name).write_bytes(b"x")
        text = refusal(tmp_path)
        assert "has the weights in parts" in text
        assert word in text
        (tmp_path / name).unlink()
    assert "no file" in refusal(tmp_path)


LOOKALIKES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "text": (b"these are no weights\n" * 30, "no format that is known"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "git lfs pull",
    ),
    "page": (b"<!DOCTYPE html><html></html>", "a web page"),
    "keras": (b"\x89HDF\r\n\x1a\n" + bytes(600), "Keras"),
    "onnx": (b"\x08\x08\x12\x07pytorch" + bytes(600), "kind: onnx"),
    "gzip": (b"\x1f\x8b\x08" + bytes(600), "gunzip"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(600), "TensorFlow Lite"),
    "cut zip": (b"PK\x03\x04" + bytes(600), "cannot be read as weights"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_files_that_are_no_weights(name, ending, tmp_path):
    path = tmp_path / f"a{ending}"
    content, words = LOOKALIKES[name]
    path.write_bytes(content)
    text = refusal(path)
    assert text.startswith("teacher.checkpoint: ")
    assert words in text


OTHERS: dict[str, tuple[dict[str, torch.Size], str]] = {
    "adapter": (
        {"base_model.model.blocks.0.attn.qkv.lora_A.weight": (4, 24)},
        "merge_and_unload",
    ),
    "quantized": (
        {"conv.weight": (3, 3), "fc._packed_params.dtype": (1,)},
        "quantized",
    ),
    "a run of kd": (
        {"model.student.network.head.weight": (3, 3), "optimizer.0": (3,)},
        "kd export RUN",
    ),
    "detector": (
        {"backbone.body.conv1.weight": (3, 3), "rpn.head.conv.weight": (3, 3)},
        "detector",
    ),
    "clip": (
        {"visual.proj": (3, 3), "transformer.resblocks.0.attn.in_proj_weight": (3, 3)},
        "zero_shot",
    ),
    "transformers": (
        {"vit.embeddings.patch_embeddings.projection.weight": (3, 3, 8, 8)},
        "kind: transformers",
    ),
    "dinov2 of transformers": (
        {"embeddings.cls_token": (1, 1, 4), "layernorm.weight": (4,)},
        "kind: transformers",
    ),
    "torchvision": (
        {"features.0.0.weight": (3, 3), "classifier.1.weight": (3, 3)},
        "names of torchvision",
    ),
    "optimizer alone": ({}, "holds no tensors by name"),
    "another depth": (
        {f"blocks.{i}.norm1.weight": (24,) for i in range(9)},
        "the weights are not those of",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_lookalikes_are_named(name, file):
    shapes, words = OTHERS[name]
    content = {key: torch.zeros(shape) for key, shape in shapes.items()}
    text = refusal(
        file(
            content
            or {
                "optimizer": {"state": {0: {"step": torch.ones(3)}}, "param_groups": []}
            }
        )
    )
    assert text.startswith("teacher.checkpoint: ")
    assert words in text


@pytest.mark.parametrize("count", [101_000, slow(1_000_000)])
def test_more_tensors_than_any_network_has(count, tmp_path):
    header = {
        f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(count)
    }
    packed = json.dumps(header).encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + bytes(count))
    assert "holds" in refusal(path) or "not whole safetensors" in refusal(path)


def test_code_in_a_pickle_never_runs(tmp_path, file):
    class Evil:
        def __reduce__(self):
            return pathlib.Path.write_text, (tmp_path / "ran", "x")

    text = refusal(file({"model": vit().state_dict(), "a": Evil()}))
    assert "write_text" in text or "PosixPath" in text or "Path" in text
    assert not (tmp_path / "ran").exists()


# --------------------------------------------------------------------------------
# recognition


@pytest.mark.parametrize(
    "name",
    [
        "convnext_atto",
        "pvt_v2_b0",
        "regnetx_002",
        slow("fastvit_t8"),
        slow("hiera_tiny_224"),
    ],
)
def test_a_file_with_its_authors_names_is_recognized_by_its_own_name(name, file):
    path = file(
        {
            "state_dict_ema": author_tensors(
                name, timm.create_model(name, num_classes=7)
            )
        },
        f"{name}-best.pth",
    )
    found = identify("--teacher", path)
    assert (found.model, found.by_order) == (name, False)
    for words in (
        f"tensors of {name}",
        "7 classes",
        "its authors'",
        "by its file's name",
    ):
        assert words in found.why


def test_a_file_that_nobody_named_needs_a_name(file):
    path = file(
        timm.create_model("convnext_atto", num_classes=7).state_dict(), "mine.pth"
    )
    with pytest.raises(
        ModelError,
        match=r"--teacher: neither the name of '.*mine.pth' nor its trainer.*NAME=FILE",
    ):
        identify("--teacher", path)
    found = identify("--teacher", path, "convnext_atto")
    assert (found.model, found.by_order) == ("convnext_atto", False)
    assert "7 classes; known by you" in found.why
    with pytest.raises(
        ModelError,
        match=r"--teacher: the weights are not those of .resnet18. .*missing",
    ):
        identify("--teacher", path, "resnet18")


def test_a_file_is_recognized_by_what_its_trainer_wrote(file):
    """Twins have equal shapes: timm's trainer writes which of them it trained."""
    twins = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
    weights = timm.create_model(twins[1], num_classes=7).state_dict()
    for arch in twins:
        found = identify(
            "--teacher",
            file({"arch": arch, "state_dict": weights}, "model_best.pth.tar"),
        )
        assert found.model == arch
        assert "by what its trainer wrote" in found.why


def test_files_of_other_libraries_are_recognized(file):
    """timm takes some of them under a name of its own: the name is wanted first."""
    path = file(
        torchvision.models.swin_t(num_classes=5).state_dict(), "swin_t-704ceda3.pth"
    )
    with pytest.raises(ModelError, match="names of torchvision") as told:
        identify("--teacher", path)
    assert f"NAME={path}" in str(told.value)
    assert "{kind: torch, model: 'torchvision.models:swin_t'" in str(told.value)
    assert "()" not in str(told.value)
    assert (
        identify("--teacher", path, "swin_tiny_patch4_window7_224").model
        == "swin_tiny_patch4_window7_224"
    )
    with pytest.raises(ModelError, match=r"neither the name.*NAME=FILE"):
        identify(
            "--teacher", file(nn.Sequential(nn.Linear(3, 3)).state_dict(), "mine.pth")
        )


def test_a_file_that_is_not_there_is_no_unknown_network():
    for text in ("resnet18=nothere.pth", "nothere.pth"):
        with pytest.raises(ModelError, match=r"--teacher: no file 'nothere.pth'"):
            pretrained_keys("--teacher", text)
    with pytest.raises(ModelError, match="Did you mean 'resnet18'"):
        pretrained_keys("--teacher", "resnet1")


def test_order_without_counts_of_batches(file):
    """Older torch counted no batches."""
    whole = timm.create_model("resnet10t", num_classes=5)
    tensors = {
        n: t
        for n, t in whole.state_dict().items()
        if not n.endswith("num_batches_tracked")
    }
    path = file({f"layer_{i}": tensor for i, tensor in enumerate(tensors.values())})
    made = taken(path, model="resnet10t", args={}, weights="by_order")
    assert same(made.network, whole)


@pytest.mark.parametrize(
    ("args", "beside"),
    [
        ({"act_layer": "gelu"}, {"model_kwargs": {"act_layer": "gelu"}}),
        ({"global_pool": "max"}, {"gp": "max"}),
        ({"bn_eps": 0.1}, {"bn_eps": 0.1, "model": "test_efficientnet.r160_in1k"}),
    ],
)
def test_arguments_that_shapes_cannot_tell_are_those_of_the_trainer(args, beside, file):
    model = "test_efficientnet"
    whole = timm.create_model(model, num_classes=5, **args).eval()
    path = file(
        {
            "arch": model,
            "state_dict": whole.state_dict(),
            "args": argparse.Namespace(**beside),
        }
    )
    made = taken(path, model=model, args={}, size=64)
    pixels = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(made.network.eval()(pixels), whole(pixels))
    assert f"{next(iter(args))} that its trainer wrote" in made.notes[0]
    assert made.architecture["args"] == args
    plain = timm.create_model(model, num_classes=5).eval()
    plain.load_state_dict(whole.state_dict())
    with torch.no_grad():
        assert not torch.allclose(plain(pixels), whole(pixels))


def test_a_trainers_arguments_name_no_other_weights_and_no_other_network(
    file, tmp_path
):
    """A file is a stranger's: its arguments may name a file, weights to fetch, or be no
    arguments at all.
    """
    network = timm.create_model("resnet10t", num_classes=5)
    other = file(
        timm.create_model("resnet10t", num_classes=5).state_dict(), "other.pth"
    )
    hostile = {
        "checkpoint_path": str(other),
        "pretrained": True,
        "num_classes": 9,
        "img_size": 7,
    }
    for beside in (
        {"model_kwargs": hostile},
        {"model_kwargs": "x=1"},
        {"model_kwargs": [1, 2]},
    ):
        made = taken(
            file(
                {
                    "arch": "resnet10t",
                    "state_dict": network.state_dict(),
                    "args": beside,
                }
            ),
            model="resnet10t",
            args={},
        )
        assert same(made.network, network)
        assert made.architecture["args"] == {}
    foreign = {
        "state_dict": network.state_dict(),
        "args": {"model_kwargs": {"width": 3}},
    }
    for arch in ({}, {"arch": "resnet18"}):  # of another network, or of an unknown one
        assert same(
            taken(file({**arch, **foreign}), model="resnet10t", args={}).network,
            network,
        )


def test_a_part_of_a_network_and_an_encoder_with_its_decoder_are_named(file):
    tensors = vit().state_dict()
    part = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("blocks.0.mlp.")
    }
    assert "a part of the network" in refusal(file(part))
    encoder = {
        name: tensor for name, tensor in tensors.items() if not name.startswith("head.")
    }
    assert "the decoder of its pretraining" in refusal(
        file(encoder | {"decoder_embed.weight": torch.zeros(3, 48)})
    )


def test_a_student_starts_from_files_of_other_libraries(file):
    raw, averaged = vit(), vit(seed=1)
    path = file(
        {
            "model": {f"module.{n}": t for n, t in raw.state_dict().items()},
            "model_ema": averaged.state_dict(),
        }
    )
    made = taken(path, ("a", "b"), config_path="student")
    assert torch.equal(
        made.network.blocks[0].attn.qkv.weight, averaged.blocks[0].attn.qkv.weight
    )
    assert (
        "the set 'model_ema'; ['model'] would fit too (student.weights" in made.notes[0]
    )
    shutil.copy(
        path, path.with_suffix(".safetensors")
    )  # the content decides, not the name
    assert same(taken(path.with_suffix(".safetensors"), weights="raw").network, raw)


def test_the_log_and_the_manifest_say_what_was_taken(written, command, file, tmp_path):
    raw, averaged = vit(3), vit(3, seed=1)
    path = file(
        {"state_dict": raw.state_dict(), "state_dict_ema": averaged.state_dict()}
    )
    both = {"model": NAME, "args": ARGS, "checkpoint": str(path)}
    teacher = {**both, "min_accuracy": 0.0, "weights": "raw"}
    config = written(
        teacher=teacher,
        student={**both, "init": "pretrained"},
        run={"name": "said", "steps": 1},
    )
    answer = command("train", config)
    assert answer.code == 0, answer
    lines = {
        one.split(": ")[0]: one
        for one in (answer.out + answer.err).splitlines()
        if "a.pth" in one
    }
    assert "'state_dict'" in lines["teacher"]
    assert (
        "the set 'state_dict_ema'; ['state_dict'] would fit too (student.weights"
        in lines["student"]
    )
    manifest = json.loads(next(tmp_path.rglob("said/manifest.json")).read_text())
    assert "'state_dict'" in manifest["teacher_notes"][0]
    assert "'state_dict_ema'" in manifest["student_notes"][0]


def test_without_labels_the_spread_of_predictions_is_reported(written, command, file):
    """Nothing can prove that weights of the right shapes are the right ones; one that
    answers alike shows in it.
    """
    path = file(
        {name: torch.zeros_like(one) for name, one in vit(3).state_dict().items()}
    )
    teacher = {"model": NAME, "args": ARGS, "checkpoint": str(path)}
    answer = command(
        "train", written(teacher=teacher, data={"labels": "none"}, run={"steps": 1})
    )
    assert answer.code == 0, answer
    assert (
        "it predicts 1 of 3 classes, its logits have the standard deviation 0,"
        in answer.out + answer.err
    )
    assert "100% of the largest entropy" in answer.out + answer.err


QKV = "blocks.0.attn.qkv"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {
                f"{QKV}.base_layer.weight": f"{QKV}.weight",
                f"{QKV}.lora_A.default.weight": "",
            },
            "adapter.*merge_and_unload",
        ),
        (
            {f"{QKV}.weight": f"{QKV}.weight", f"{QKV}.weight_scale": ""},
            "quantized.*kind: onnx",
        ),
        (
            {f"{QKV}.weight_orig": f"{QKV}.weight", f"{QKV}.weight_mask": ""},
            r"pruned.*prune\.remove",
        ),
        (
            {f"{QKV}.parametrizations.weight.original0": f"{QKV}.weight"},
            "remove_parametrizations",
        ),
    ],
    ids=["adapter", "quantized", "pruned", "parametrized"],
)
def test_a_changed_form_of_the_right_network_is_named(change, words, file):
    """Most names are right: the model and its args are, so that correcting them would
    not help.
    """
    tensors = dict(vit().state_dict())
    for new, old in change.items():
        tensors[new] = tensors.pop(old) if old in tensors else torch.ones(4)
    text = refusal(file(tensors))
    assert re.search(words, text)
    assert "Give the name of the network that was trained, and its args" not in text


def test_parameters_without_statistics_are_named(file):
    network = timm.create_model("resnet10t", num_classes=5)
    text = refusal(
        file(dict(network.named_parameters())), model="resnet10t", args={}, size=32
    )
    assert "without the statistics of its batch norms" in text
    assert "state_dict()" in text


def test_a_trainers_record_of_the_network_is_reported(file):
    """Heads that are divided otherwise have equal shapes: nothing but this can tell."""
    beside = argparse.Namespace(model=NAME, model_kwargs={"num_heads": 3}, lr=0.1)
    told = taken(file({"state_dict": vit().state_dict(), "args": beside})).notes[-1]
    assert "num_heads" in told
    assert NAME in told
