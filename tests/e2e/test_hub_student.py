"""`student.kind: transformers`: from a configuration or a folder to the exported graph."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from pieces import CLASSES, base, merged, slow, teacher_at
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import kd
from kd.engine.optim import groups
from kd.models.classifier import set_attention
from kd.models.spec import Spec
from kd.parts import registry

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
    # the hub read it when it was imported: without this line 23 seconds of retries
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
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


@pytest.fixture(scope="module")
def exported(photos, teacher, tmp_path_factory):
    """Return the export of a trained student by its architecture. Do not write into
    it.
    """

    @functools.cache
    def export(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        settings = {**base(photos, folder), "teacher": teacher_at(teacher)}
        return trained(settings, student(name)).export(folder / "export").folder

    return export


@pytest.mark.parametrize("name", ["vit", slow("convnext"), slow("resnet")])
def test_it_is_trained_and_exported_with_equal_outputs(exported, photos, command, name):
    from kd.deploy.serve.model import describe, load

    export = exported(name)
    model = load(describe(export), threads=1, slots=1)
    assert model.labels == CLASSES
    verified = command("verify", export)
    assert verified.code == 0, verified.out
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


def test_it_starts_from_a_folder_with_a_new_classifier(
    settings, folder, tmp_path, capfd
):
    section = {"kind": "transformers", "model": str(folder), "init": "pretrained"}
    run = trained(
        settings, section, run={"steps": 1}, optimizer={"lr": 1e-9, "weight_decay": 0}
    )
    prefix = "model.student.network.model."
    first = hub.ViTForImageClassification.from_pretrained(folder).state_dict()
    assert len(first["classifier.weight"]) == 5
    changed = tensors(run)
    for name, expected in first.items():
        if name.startswith("classifier."):
            expected = torch.zeros(len(CLASSES), *expected.shape[1:])
        tensor = changed[prefix + name]
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
    said = capfd.readouterr()
    assert "classifier is for 5 other classes" in said.out + said.err
    # exporting needs the folder's configuration, not its weights
    (folder / "model.safetensors").unlink()
    config = json.loads(
        (run.export(tmp_path / "export").folder / "config.json").read_text()
    )
    assert config["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3]


def test_a_classifier_of_the_same_classes_is_kept(folder):
    config = hub.ViTConfig.from_pretrained(folder)
    config.id2label = dict(enumerate(CLASSES))
    torch.manual_seed(6)
    hub.ViTForImageClassification(config).save_pretrained(folder)
    expected = hub.ViTForImageClassification.from_pretrained(folder).classifier.weight
    network = built(str(folder), {}, pretrained=True)
    assert torch.equal(network.network.model.classifier.weight, expected)
    assert not network.notes


def test_a_classifier_of_fewer_unnamed_classes_is_not_kept_in_silence(folder):
    """Its names LABEL_0 and LABEL_1 say nothing, and their number is another."""
    config = hub.ViTConfig.from_pretrained(folder)
    config.id2label = {0: "LABEL_0", 1: "LABEL_1"}
    hub.ViTForImageClassification(config).save_pretrained(folder)
    network = built(str(folder), {}, pretrained=True)
    assert not network.network.model.classifier.weight.any()
    assert "2 other classes" in network.notes[0]


def built(model, args, classes=CLASSES, path="student", size=16, **keys):
    """Build a student as a run does; `size`: of the data, pixels."""
    spec = Spec(path, model, args, classes, free_size=not keys, **keys)
    options = registry.default_options("networks", "transformers")
    context = {"spec": spec, "image_size": size, "features": ()}
    return registry.build("networks", "transformers", options, "kind", **context)


def test_a_student_from_scratch_has_the_size_and_classes_of_the_data():
    network = built("vit", VIT)
    assert network.input_size == network.network.model.config.image_size == 16
    assert network.network.model.config.id2label == dict(enumerate(CLASSES))
    assert network.normalize(torch.zeros(1, 3, 16, 16))[0, :, 0, 0].tolist() == (
        pytest.approx([-mean / std for mean, std in zip(*IMAGENET, strict=True)])
    )
    assert built("vit", {**VIT, "image_size": 32}).input_size == 32
    assert built("vit", VIT, classes=()).num_features == VIT["hidden_size"]


def test_tokens_positions_and_vectors_do_not_decay():
    network = built("vit", VIT).network
    decayed, undecayed = groups([network], 0.05)
    sizes = {id(parameter) for parameter in decayed["params"]}
    names = {name for name, value in network.named_parameters() if id(value) in sizes}
    assert names == {
        name
        for name, value in network.named_parameters()
        if value.ndim > 1 and not name.endswith(("cls_token", "position_embeddings"))
    }
    assert undecayed["weight_decay"] == 0


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        ("vitt", VIT, r"^student\.model: no model 'vitt'.*Did you mean 'vit'"),
        ("bert", {}, r"^student\.model: 'bert' is a bert.*convnext"),
        (
            "vit",
            {"hiden_size": 16},
            r"^student\.args: has 'hiden_size'.*Did you mean 'hidden_size'",
        ),
        ("vit", {"num_labels": 4}, r"^student\.args\.num_labels: .*the data's classes"),
        ("vit", {"hidden_size": "x"}, r"^student\.args: 'vit' cannot be built"),
        (
            "nobody/nothing",
            {},
            r"^student\.model: the weights of 'hf-hub:nobody/nothing'",
        ),
    ],
)
def test_a_mistake_is_one_line(model, args, message):
    with pytest.raises(kd.KdError, match=message) as caught:
        built(model, args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["student", "teacher"])
def test_an_architecture_has_no_pretrained_weights(path):
    with pytest.raises(kd.KdError, match=rf"^{path}\.model: .*has no weights"):
        built("vit", VIT, path=path, pretrained=True, exact_head=path == "teacher")


def test_distill_takes_models_of_transformers():
    torch.manual_seed(0)
    teacher, network = (
        hub.ViTForImageClassification(hub.ViTConfig(**VIT, image_size=16, num_labels=3))
        for _ in range(2)
    )
    items = TensorDataset(torch.randn(16, 3, 16, 16), torch.arange(16) % 3)
    first = network.classifier.weight.detach().clone()
    settings = {"losses": [{"kind": "kl"}], "epochs": 1, "batch_size": 8}
    kd.distill(teacher=teacher, student=network, train=items, val=items, **settings)
    assert not torch.equal(network.classifier.weight, first)


def test_it_goes_on_from_its_export_in_either_form(exported, settings, tmp_path, capfd):
    """As docs/watching.md says for every student: the exported file is the start."""
    export = exported("vit")
    capfd.readouterr()
    file = load_file(export / "model.safetensors")
    start = {"kind": "transformers", "init": "pretrained"}
    frozen = {"optimizer": {"lr": 1e-9, "weight_decay": 0}, "teacher": {}}
    sections = {
        "file": {**student("vit"), **start, "checkpoint": str(export)},
        "folder": {**start, "model": str(export)},
    }
    for name, section in sections.items():
        again = trained(settings, section, run={"name": name, "steps": 1}, **frozen)
        changed = tensors(again)
        for key, expected in file.items():
            tensor = changed[f"model.student.network.model.{key}"]
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
        again_exported = again.export(tmp_path / name, onnx=False).folder
        first, second = (
            json.loads((folder / "config.json").read_text())
            for folder in (export, again_exported)
        )
        assert first == second
    said = capfd.readouterr()
    assert "begins with zeros" not in said.out + said.err


def test_an_export_is_a_teacher_with_its_classes_and_pixels(settings, folder, tmp_path):
    section = {"kind": "transformers", "model": str(folder), "init": "pretrained"}
    run = trained(settings, section)
    export = run.export(tmp_path / "export", onnx=False).folder
    teacher = built(str(export), {}, path="teacher", pretrained=True, exact_head=True)
    assert list(teacher.classes) == [*CLASSES]
    normalized = teacher.normalize(torch.zeros(1, 3, 16, 16))[0, :, 0, 0]
    assert normalized.tolist() == pytest.approx([-0.2, -0.4, -0.6])
    file = load_file(export / "model.safetensors")
    for name, tensor in teacher.network.model.state_dict().items():
        assert torch.equal(tensor, file[name])


def test_other_classes_of_a_checkpoint_are_told(exported):
    export = exported("vit")
    start = {"pretrained": True, "checkpoint": str(export)}
    kept = built("vit", VIT, **start)
    assert kept.network.model.classifier.weight.any()
    other = built("vit", VIT, classes=["kiwi", "plum"], **start)
    assert not other.network.model.classifier.weight.any()
    assert f"{len(CLASSES)} other classes" in other.notes[0]
    with pytest.raises(kd.KdError, match=r"^student\.checkpoint: .*not those of 'vit'"):
        built("vit", {**VIT, "hidden_size": 32}, **start)


def test_attention_is_that_of_the_key():
    tower = built("vit", VIT).network
    pixels = torch.randn(2, 3, 16, 16)
    outputs = []
    for fused in (True, False):
        assert set_attention(tower, fused) == 1
        assert tower.model.config._attn_implementation == ("sdpa" if fused else "eager")
        outputs.append(tower(pixels))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    assert set_attention(built("resnet", STUDENTS["resnet"]).network, True) == 0


@pytest.mark.parametrize("path", ["./nothing", "/no/where", "runs/tf/export", "~/no"])
def test_a_folder_that_is_not_there_is_no_matter_of_the_hub(path):
    with pytest.raises(kd.KdError, match=r"^student\.model: there is no folder"):
        built(path, {}, pretrained=True)


def test_other_pixels_than_those_of_an_export_are_refused(settings, folder, tmp_path):
    section = {"kind": "transformers", "model": str(folder), "init": "pretrained"}
    export = trained(settings, section).export(tmp_path / "export").folder
    with pytest.raises(kd.KdError, match=r"^student\.checkpoint: .*mean \(0\.1, 0\.2"):
        built("vit", VIT, pretrained=True, checkpoint=str(export / "model.safetensors"))
    other = built(str(export), {}, pretrained=True, size=24)
    assert other.input_size == 16
    assert "16 px on images of 24 px" in other.notes[-1]


def test_an_architecture_with_two_classifiers_is_read_from_its_export(
    settings, tmp_path
):
    section = {**student("vit"), "model": "deit"}
    export = trained(settings, section).export(tmp_path / "export").folder
    network = built(str(export), {}, pretrained=True)
    file = load_file(export / "model.safetensors")
    for name, tensor in network.network.model.state_dict().items():
        assert torch.equal(tensor, file[name])
