"""An export folder that is not what was exported is refused, in one line, before the
socket opens or at the load.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vnni import needs_vnni

import kd
from kd.core.errors import BadImage, ModelError
from kd.core.facts import Network
from kd.deploy.serve.model import _parse_output, describe, load
from kd.files.manifest import checksum
from kd.parts import registry


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "export"))


def test_a_manifest_is_read_as_written(exported):
    description = describe(exported)
    assert description.labels == ("apple", "fig", "pear")
    assert (description.name, description.size, description.crop) == ("tiny", 16, 1.0)
    assert (
        describe(exported, "model.int8.onnx").version == description.version + "-int8"
    )


def test_each_label_has_its_own_threshold_and_band():
    """In the order of the labels; manifest.json has sorted keys."""
    written = {
        "name": "logits",
        "thresholds": {"apple": {"threshold": 0.1}, "zebra": {"threshold": 0.9}},
        "defer": {
            "labels": {
                "apple": {"low": 0.0, "high": 0.2},
                "zebra": {"low": 0.7, "high": 1.0},
            }
        },
    }
    labels, output = _parse_output(written, {"label_names": ["zebra", "apple"]})
    assert (labels, output.thresholds) == (("zebra", "apple"), (0.9, 0.1))
    assert output.unsure == ((0.7, 1.0), (0.0, 0.2))
    config = {
        "label_names": ["zebra", "apple"],
        "problem_type": "multi_label_classification",
    }
    assert _parse_output(written, config)[1] == output
    with pytest.raises(ValueError, match=r"output\.thresholds is missing"):
        _parse_output({"name": "logits"}, config)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_picture_without_a_known_range_is_named(exported, mode):
    """It was "damaged or cut short"."""
    model = kd.load(exported)
    picture = Image.new("L", (20, 24), 90)
    with pytest.raises(
        BadImage,
        match=rf"^Image: The image has {mode} pixels, .*8 or 16 bits per channel\.",
    ):
        model(picture.convert(mode))
    assert model(picture.convert(mode), on_error="none") is None
    sixteen = Image.fromarray(np.asarray(picture).astype(np.uint16) * 257)
    assert sixteen.mode == "I;16"
    assert model(sixteen) == model(picture)


@pytest.mark.parametrize(
    "file", ["model.onnx", pytest.param("model.int8.onnx", marks=needs_vnni)]
)
def test_a_loaded_model_predicts(exported, file):
    model = load(describe(exported, file), 1, 1)
    model.warm_up()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 16, 16), np.uint8)
    together = model.engine(pixels)
    assert together.shape == (3, 3)
    assert np.allclose(
        together,
        np.concatenate([model.engine(image[None]) for image in pixels]),
        atol=0.05,
    )


def unsealed(folder: Path) -> dict:
    """Return the manifest of an export as older builds wrote it: without a checksum of
    its own.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    return manifest


def test_no_value_of_the_manifest_can_change(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    for key, value in {
        "version": "0",
        "name": "other",
        "input": {**manifest["input"], "size": 32},
    }.items():
        (copy / "manifest.json").write_text(json.dumps({**manifest, key: value}))
        with pytest.raises(
            ModelError,
            match=(
                r"manifest\.json' has changed since the export \(its checksum differs"
            ),
        ):
            describe(copy)
    (copy / "manifest.json").write_text(
        json.dumps({key: value for key, value in manifest.items() if key != "checksum"})
    )
    assert describe(copy).size == manifest["input"]["size"]


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_folder_that_is_no_export_is_refused(copy, name):
    (copy / name).unlink()
    with pytest.raises(
        ModelError,
        match=rf"is not an export: it has no {name}\. Name the folder that `kd-export",
    ):
        describe(copy)


def test_an_export_without_the_requested_graph_is_refused(copy):
    with pytest.raises(
        ModelError,
        match=(
            r"has no 'openvino.xml'.*There is model.int8.onnx, model.onnx.*--openvino"
        ),
    ):
        describe(copy, "openvino.xml")
    with pytest.raises(ModelError, match=r"has no '\.\./model\.onnx'"):
        describe(copy, "../model.onnx")


@pytest.mark.parametrize("name", ["model.onnx", "config.json"])
def test_a_changed_file_is_refused(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(
        ModelError, match=rf"{name}' (is not the file that was exported|is damaged)"
    ):
        load(describe(copy), 1, 1)


def test_an_invalid_graph_is_refused(copy):
    (copy / "model.onnx").write_bytes(b"no graph")
    manifest = unsealed(copy)
    manifest["files"]["model.onnx"]["sha256"] = hashlib.sha256(b"no graph").hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match=r"'model\.onnx' cannot be loaded"):
        load(describe(copy), 1, 1)


def test_labels_of_another_number_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    config["label_names"].append("quince")
    text = json.dumps(config).encode()
    (copy / "config.json").write_bytes(text)
    manifest = unsealed(copy)
    manifest["files"]["config.json"]["sha256"] = hashlib.sha256(text).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ModelError, match=r"returns \(1, 3\), but manifest\.json says 4 logits"
    ):
        load(describe(copy), 1, 1).warm_up()


def test_openvino_predicts_like_onnxruntime(exported, tmp_path):
    pytest.importorskip("openvino", reason="openvino is not installed")
    folder = Path(shutil.copytree(exported, tmp_path / "export"))
    network = Network(lambda _: None, folder / "model.onnx", lambda _: (), "logits")
    registry.exporter("openvino.xml").write(folder / "openvino.xml", network)
    manifest = unsealed(folder)
    for name in ("openvino.xml", "openvino.bin"):
        manifest["files"][name] = {
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()
        }
    del manifest["files"]["self_check.npz"]  # of the graphs that kd-export wrote
    (folder / "manifest.json").write_text(json.dumps(manifest))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 16, 16), np.uint8)
    expected = load(describe(folder), 1, 1).engine(pixels)
    engine = load(describe(folder, "openvino.xml"), 1, 2).engine
    logits = engine(pixels)
    assert np.abs(logits - expected).max() < 1e-4
    logits_before = logits.copy()
    engine(
        255 - pixels
    )  # the next call of the same thread leaves earlier outputs alone
    assert np.array_equal(logits, logits_before)


def test_an_export_from_before_a_key_is_served_as_it_was(copy):
    """Older exports have no `margin`: their JPEGs were decoded whole."""
    manifest = json.loads((copy / "manifest.json").read_text())
    assert manifest["input"].pop("margin") > 0
    manifest.pop("checksum")
    (copy / "manifest.json").write_text(
        json.dumps({**manifest, "checksum": checksum(manifest)})
    )
    assert describe(copy).margin == 0
