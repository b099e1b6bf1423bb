"""An embedding student from a configuration to an endpoint: trained, reported,
evaluated, exported, served.
"""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from serving import Running


def test_incompatible_options_are_refused_before_the_run(written, command):
    answer = command(
        "train",
        written(losses=[{"kind": "tokens"}], teacher={"cache": {"views": 2}}),
        "--check",
    )
    assert answer.code == 0, answer
    # 4 tokens and the pooled vector of 48 float16 numbers, and 12 bytes of checksums
    assert (
        "cache     0.0354 MB for 2 views of 36 images, 0.492 kB each (pooled [48],"
        " tokens [4, 48])" in answer.out
    )


def test_report_manifest_and_card_say_what_decided(embedded, command):
    manifest = json.loads((embedded / "manifest.json").read_text())
    rows = [
        json.loads(line)
        for line in (embedded / "metrics.jsonl").read_text().splitlines()
    ]
    best = max(
        (row for row in reversed(rows) if row["kind"] == "val"),
        key=lambda row: row["knn"],
    )
    assert manifest["decides"] == "knn"
    report = (embedded / "report.md").read_text()
    assert f"| student, distilled | {100 * best['knn']:.1f} % (" in " ".join(
        report.split()
    )
    assert f"agreement {best['agreement']:.4f} (mean cosine" in report
    assert (
        "Chosen from the evaluations on the validation split by nearest neighbours"
        in report
    )
    card = (embedded / "export" / "README.md").read_text()
    assert "pipeline_tag: image-feature-extraction" in card
    assert "Output: a vector of 24 numbers" in card
    assert f"| this student | {100 * best['knn']:.1f} % (" in " ".join(card.split())
    evaluated = command("evaluate", embedded)
    assert evaluated.code == 0, evaluated
    assert f"{best['agreement']:.4f}" in evaluated.out


def test_the_graph_returns_timms_vector_with_length_1(embedded):
    export = embedded / "export"
    network = timm.create_model(f"local-dir:{export}", pretrained=True).eval()
    mean, std = (
        torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1)
        for key in ("mean", "std")
    )
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 16, 16), np.uint8)
    session = onnxruntime.InferenceSession(
        export / "model.onnx", providers=["CPUExecutionProvider"]
    )
    assert [output.name for output in session.get_outputs()] == ["embedding"]
    (vectors,) = session.run(None, {"image": images})
    with torch.no_grad():
        plain = network((torch.from_numpy(images) / 255 - mean) / std).numpy()
    assert network.num_classes == 0
    np.testing.assert_allclose(
        vectors, plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-5
    )
    manifest = json.loads((export / "manifest.json").read_text())
    assert manifest["output"] == {
        "name": "embedding",
        "layout": "float32 [batch, 24], each of length 1",
        "width": 24,
    }
    assert "label_names" not in manifest["parity"]["model.onnx"]
    names = (export / "model.safetensors").read_bytes()[:5000]
    assert b"project" not in names  # what the losses learned is not exported
    assert b"head." not in names


def test_a_folder_of_images_becomes_vectors(
    embedded, photos, command, refused, tmp_path
):
    export = embedded / "export"
    target = tmp_path / "vectors.jsonl"
    answer = command("predict", export, photos / "val/fig", "--to", target)
    assert answer.code == 0, answer
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == 4
    assert all(
        np.linalg.norm(row["embedding"]) == pytest.approx(1, abs=1e-5) for row in rows
    )
    assert "has no place for the vectors" in refused(
        "predict", export, photos / "val/fig", "--to", tmp_path / "a.csv"
    )


def test_the_endpoint_returns_the_vector(embedded, photos):
    photo = next((photos / "val/fig").glob("*.jpg")).read_bytes()
    export = embedded / "export"
    pixels = np.asarray(Image.open(io.BytesIO(photo)).resize((16, 16)))
    with Running(export) as server:
        (prediction,) = server.post(photo).json["predictions"]
        session = onnxruntime.InferenceSession(
            export / "model.onnx", providers=["CPUExecutionProvider"]
        )
        (vector,) = session.run(
            ["embedding"], {"image": pixels.transpose(2, 0, 1)[None]}
        )[0]
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(
            prediction["embedding"], vector, atol=1e-3
        )  # the server decodes as kd does, not as here
        rows = server.post(photo, accept="text/csv").body.decode()
        assert [float(value) for value in next(csv.reader([rows]))] == prediction[
            "embedding"
        ]
        assert server.get("/").status == 404
        assert server.stop() == 0
