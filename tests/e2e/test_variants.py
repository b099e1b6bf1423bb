"""`kd-export --compare`, `--accept` and `--index`: what is measured, what is accepted,
and who loads it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from safetensors.torch import load_file
from subjects import measure_briefly
from torch.nn import functional as F

from kd.deploy.serve.model import describe
from kd.files.run_dir import RunDir


@pytest.fixture
def brief(monkeypatch) -> None:
    """Measure briefly, and as where OpenVINO is not installed."""
    measure_briefly(monkeypatch)


@pytest.mark.usefixtures("brief")
def test_a_comparison_writes_a_table_and_a_pick(distilled, command, tmp_path):
    target = tmp_path / "student"
    answer = command(
        "export", distilled, "--to", target, "--compare", "--accept", "drop<=20"
    )
    assert answer.code == 0, answer
    assert (
        "left out: openvino.xml, because openvino is not installed: pip install"
        " 'PATH/kd[openvino]'" in answer.out
    )
    manifest = json.loads((target / "manifest.json").read_text())
    assert set(manifest["variants"]) == {"model.onnx", "model.int8.onnx"}
    assert describe(target).file == manifest["pick"]
    assert (
        'accepted "drop<=20": model.onnx with drop 0, on 1 threads, which kd-serve now'
        " loads" in answer.out
    )
    parity = manifest["parity"]
    for name, measured in manifest["variants"].items():
        speed = measured["speed"]["1"]
        assert (
            0 < parity[name]["cpu_ms"] < speed["p50_ms"] <= speed["p99_ms"]
        )  # a client waits for the graph, and more
        assert speed["memory_mb"] > 30
        assert measured["bytes"] == manifest["files"][name]["bytes"]
        assert (measured["score"], measured["images"]) == (parity[name]["accuracy"], 13)
        assert measured["interval"][0] < measured["score"] <= measured["interval"][1]
        assert measured["agreement"] == parity[name]["same_top1"] / 13
    row = next(
        line for line in answer.out.splitlines() if line.startswith("| model.int8.onnx")
    )
    assert row in (target / "README.md").read_text()
    assert not [line for line in answer.err.splitlines() if line]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--accept", "ms<5"),
        ("--accept", ""),
        ("--tolerance", "nan"),
        ("--images", "-1"),
    ],
)
def test_invalid_limits_and_numbers_are_refused(distilled, command, wrong):
    answer = command("export", distilled, *wrong)
    assert (answer.code, len(answer.err.splitlines())) == (2, 1)


def test_vectors_are_mapped_for_the_teachers_index(embedded, command, tmp_path):
    target = tmp_path / "student"
    answer = command("export", embedded, "--to", target, "--index")
    assert answer.code == 0, answer
    manifest = json.loads((target / "manifest.json").read_text())
    assert (manifest["output"]["width"], manifest["output"]["space"]) == (48, "teacher")
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 16, 16), np.uint8)
    plain, mapped = (
        torch.from_numpy(
            onnxruntime.InferenceSession(folder / "model.onnx").run(
                None, {"image": images}
            )[0]
        )
        for folder in (embedded / "export", target)
    )
    tensors = RunDir(embedded).best()[1]
    weight, bias = (
        tensors[f"model.criterion.terms.0.project.{name}"]
        for name in ("weight", "bias")
    )
    # The export without a map has vectors of length 1, so their own length comes from
    # the network itself.
    network = timm.create_model(f"local-dir:{target}", pretrained=True).eval()
    mean, std = (
        torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1)
        for key in ("mean", "std")
    )
    with torch.no_grad():
        vectors = network((torch.from_numpy(images) / 255 - mean) / std)
    assert torch.allclose(F.normalize(vectors, dim=1), plain, atol=1e-5)
    assert torch.allclose(
        F.normalize(vectors @ weight.T + bias, dim=1), mapped, atol=1e-5
    )
    assert not [
        name for name in load_file(target / "model.safetensors") if "project" in name
    ]
    assert "so that an index of the teacher's vectors" in " ".join(
        (target / "README.md").read_text().split()
    )


def test_recall_is_a_score_of_the_report(embedded):
    row = [
        json.loads(line)
        for line in (embedded / "metrics.jsonl").read_text().splitlines()
    ][-1]
    assert 0 <= row["recall"] <= 1
    assert 0 < row["found"] <= 1
    report = " ".join((embedded / "report.md").read_text().split())
    assert "recall@10 in the teacher's index" in report


@pytest.mark.slow
def test_timmx_takes_an_export_over(exported, photos, tmp_path):
    """Its format without a runtime of its own; the other converters take the same
    module from the same folder.
    """
    timmx = pytest.importorskip("timmx", reason="timmx is not installed")
    path = timmx.export_model(
        "torch-export",
        f"local-dir:{exported}",
        pretrained=True,
        normalize=True,
        output=str(tmp_path / "student.pt2"),
    )
    image = np.random.default_rng(0).integers(0, 256, (1, 3, 16, 16), np.uint8)
    actual = (
        torch.export.load(path).module()(torch.from_numpy(image) / 255).detach().numpy()
    )
    (expected,) = onnxruntime.InferenceSession(exported / "model.onnx").run(
        None, {"image": image}
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_killed_export_leaves_no_server(exported):
    code = (
        "import sys, time; from pathlib import Path; from kd.deploy.serve.bench import"
        " server\n"
    )
    code += (
        "with server(Path(sys.argv[1]), 'model.onnx', 1, 1) as at: print(at[1],"
        " flush=True); time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, exported], stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(process.stdout.readline())
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        process.kill()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.1)
    pytest.fail("the server outlives the export")
