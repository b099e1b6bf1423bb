"""`student.kind: transformers`: from a configuration or a folder to the exported graph."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from pieces import CLASSES, merged, slow
from safetensors.torch import load_file

import kd

hub = pytest.importorskip("transformers")
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
CONVNEXT |= {"patch_size": 2, "drop_path_rate": 0.1}
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
STUDENTS = {"vit": VIT, "convnext": CONVNEXT, "resnet": RESNET}
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def student(name: str, **keys) -> dict:
    return {"kind": "transformers", "model": name, "args": STUDENTS[name], **keys}


@pytest.fixture
def folder(tmp_path):
    """A ViT of five other classes with its processor, as save_pretrained writes it."""
    torch.manual_seed(5)
    config = hub.ViTConfig(**VIT, image_size=16, num_labels=5)
    hub.ViTForImageClassification(config).save_pretrained(tmp_path / "hub")
    hub.ViTImageProcessor(
        size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3]
    ).save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def tensors(run) -> dict[str, torch.Tensor]:
    newest = max((run.folder / "checkpoints").iterdir())
    return load_file(newest / "tensors.safetensors")


def trained(settings, section, *overrides, **sections):
    run = {"epochs": 2, **sections.pop("run", {})}
    changed = merged(settings, {"run": run, **sections})
    return kd.train({**changed, "student": section}, *overrides)


@pytest.mark.parametrize("name", ["vit", slow("convnext"), slow("resnet")])
def test_it_is_trained_and_exported_with_equal_outputs(
    settings, photos, tmp_path, name
):
    from kd.deploy.serve.model import describe, load

    run = trained(settings, student(name))
    export = run.export(tmp_path / "export").folder
    model = load(describe(export), threads=1, slots=1)
    assert model.labels == CLASSES
    # the library itself loads what was exported
    about = json.loads((export / "config.json").read_text())
    config = hub.AutoConfig.for_model(
        **about["architecture"]["config"], num_labels=about["num_classes"]
    )
    network = hub.AutoModelForImageClassification.from_config(config).eval()
    network.load_state_dict(load_file(export / "model.safetensors"))
    image = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    with torch.no_grad():
        expected = network((image / 255 - mean) / std).logits
    torch.testing.assert_close(
        torch.from_numpy(model.engine(image.numpy())), expected, atol=1e-4, rtol=1e-4
    )
    photo = next(path for path in (photos / "val").rglob("*") if path.is_file())
    assert kd.load(export)([photo])[0].label in CLASSES


def test_a_resumed_run_is_bitwise_the_same(settings):
    every = "run.every.checkpoint=4"
    expected = tensors(trained(settings, student("vit"), every))
    again = trained(settings, student("vit"), every, run={"name": "again"})
    removed = sorted((again.folder / "checkpoints").iterdir())[1:]
    assert removed
    for checkpoint in removed:
        shutil.rmtree(checkpoint)
    resumed = trained(settings, student("vit"), every, run={"name": "again"})
    for name, tensor in tensors(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_it_starts_from_a_folder_with_a_new_classifier(settings, folder, tmp_path):
    section = {"kind": "transformers", "model": str(folder), "init": "pretrained"}
    run = trained(
        settings, section, run={"steps": 1}, optimizer={"lr": 1e-9, "weight_decay": 0}
    )
    prefix = "model.student.network.model."
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors(run).items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            expected = stored[name]
            if name.startswith("classifier."):
                expected = torch.zeros(len(CLASSES), *expected.shape[1:])
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
    lines = (
        (run.folder / "log.txt").read_text()
        if (run.folder / "log.txt").exists()
        else ""
    )
    print(lines[:200])
    about = json.loads(
        (run.export(tmp_path / "export").folder / "config.json").read_text()
    )
    assert about["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3]
