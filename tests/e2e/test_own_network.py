"""One's own network as the student: `student.kind: torch`, from training to the
endpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
import torch
import yaml
from pieces import CLASSES, merged
from safetensors.torch import load_file, save_file

import kd

CODE = """
from torch import nn


def small(width, classes=3):
    return nn.Sequential(nn.Conv2d(3, width, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, classes))


def list_of_numbers():
    return [1, 2]
"""


@pytest.fixture
def configuration(settings, tmp_path, monkeypatch) -> Iterator[dict]:
    """A configuration whose student is a function of a module of ours."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    pixels = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    student = {"kind": "torch", "model": "mine:small", "args": {"width": 8}, **pixels}
    content = merged(settings, {"run": {"epochs": 1}, "optimizer": {"lr": 1e-2}})
    yield {**content, "student": student}
    sys.modules.pop("mine", None)


def test_it_is_trained_evaluated_reported_exported_and_served(
    configuration, tmp_path, command, refused
):
    from kd.deploy.serve.model import describe, load

    run = kd.train(configuration)
    assert f"Next: `kd-export {run.folder} --trust`" in run.report
    for name in ("evaluate", "export"):
        assert refused(name, run.folder).startswith(
            "student.kind: is 'torch', so that 'mine:small' would run"
        )
    evaluated = command("evaluate", run.folder, "--trust")
    assert f"{run.metrics['accuracy']:.4f}" in evaluated.out, evaluated
    assert command("report", run.folder, "--trust").code == 0
    folder = run.export(tmp_path / "export").folder
    model = load(describe(folder), threads=1, slots=1)
    assert model.labels == CLASSES
    network = sys.modules["mine"].small(8)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    image = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        expected = network.eval()((image / 255 - 0.5) / 0.25)
    torch.testing.assert_close(
        torch.from_numpy(model.engine(image.numpy())), expected, atol=1e-4, rtol=1e-4
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"]["function"] == "mine:small"
    assert config["pretrained_cfg"]["mean"] == [0.5, 0.5, 0.5]
    card = (folder / "README.md").read_text()
    assert "load_state_dict" in card
    assert "timm.create_model" not in card
    assert "accuracy" in run._repr_html_()


def test_it_is_fitted_as_the_teacher_too(configuration, tmp_path, command):
    fit = {"epochs": 1, "lr": 1e-2, "folder": str(tmp_path / "teachers")}
    teacher = {
        **configuration["student"],
        "args": {"width": 16},
        "fit": fit,
        "min_accuracy": 0,
    }
    content = {
        **configuration,
        "teacher": teacher,
        "run": {**configuration["run"], "folder": str(tmp_path / "runs")},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    assert (
        "fitted for 1 epochs if not found"
        in command("train", tmp_path / "own.yaml", "--check").out
    )
    assert command("teach", tmp_path / "own.yaml").code == 0
    answer = command("train", tmp_path / "own.yaml")
    assert answer.code == 0, answer
    (folder,) = (tmp_path / "teachers").glob("mine_small-*")
    assert f"reusing '{folder / 'export'}'" in answer.out + answer.err
    rows = [
        json.loads(line)
        for line in (
            (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
        )
    ]
    fitted = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    best = max(row["accuracy"] for row in fitted if row["kind"] == "val")
    assert next(row["teacher_accuracy"] for row in rows if row["kind"] == "val") == best
    before = command(
        "teach", tmp_path / "own.yaml", "teacher.std=[0.5,0.5,0.5]"
    )  # other pixels: another teacher
    assert before.code == 0, before
    assert len(list((tmp_path / "teachers").glob("mine_small-*"))) == 2


def test_a_module_of_the_working_folder_is_found_and_nothing_else_there(
    configuration, tmp_path, command, monkeypatch
):
    from kd.core.host import installed

    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    )
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(configuration))
    (tmp_path / "no_such_package").mkdir()
    before = list(sys.path)
    away = command("train", tmp_path / "own.yaml", "--check")
    assert (away.code, "module 'mine' cannot be imported" in away.err) == (
        2,
        True,
    ), away
    monkeypatch.chdir(tmp_path)
    assert command("train", "own.yaml", "--check").code == 0
    assert not installed("no_such_package")  # a folder that is called like one
    assert sys.path == before


def test_it_starts_from_weights(configuration, tmp_path):
    import mine

    torch.manual_seed(3)
    weights = mine.small(8).state_dict()
    save_file(weights, tmp_path / "start.safetensors")
    changes = {"init": "pretrained", "checkpoint": str(tmp_path / "start.safetensors")}
    run = kd.train(
        merged(
            configuration,
            {"student": changes, "run": {"steps": 1}, "optimizer": {"lr": 1e-9}},
        )
    )
    newest = max((run.folder / "checkpoints").iterdir())
    stored = load_file(next(newest.glob("*.safetensors")))
    for name, tensor in weights.items():
        torch.testing.assert_close(
            stored[f"model.student.network.inner.{name}"], tensor, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (
            {"kind": "onnx"},
            r"^student\.kind: is 'onnx'\. Allowed: timm, torch, transformers",
        ),
        ({"kind": "onx"}, r"^student\.kind: .*'onx'"),
        (
            {"init": "pretrained"},
            r"^student\.init: is 'pretrained'.*student\.checkpoint",
        ),
        ({"mean": [], "std": []}, r"^student\.mean: is missing"),
        (
            {"model": "mine:absent"},
            r"^student\.model: the module 'mine' has no function 'absent'",
        ),
        (
            {"model": "mine:list_of_numbers", "args": {}},
            r"^student\.model: 'mine:list_of_numbers' returns list",
        ),
        ({"args": {"depth": 2}}, r"^student\.args: 'mine:small' refuses them"),
        (
            {"args": {"width": 8, "classes": 4}},
            r"^student\.model: has 4 classes, the data has 3.*student\.args",
        ),
    ],
)
def test_a_faulty_network_is_a_one_line_error(
    configuration, student: dict, message: str
):
    changed = {**configuration, "student": {**configuration["student"], **student}}
    if student.get("kind") == "onnx":
        changed["student"] = {"kind": "onnx", "model": "teacher.onnx"}
    with pytest.raises(kd.KdError, match=message) as caught:
        kd.train(changed)
    assert "\n" not in str(caught.value)


def test_a_loss_on_features_needs_a_network_of_timm(configuration):
    with pytest.raises(
        kd.KdError, match=r"^student\.kind: is torch, which has one output"
    ):
        kd.train({**configuration, "losses": [{"kind": "kl"}, {"kind": "cosine"}]})
