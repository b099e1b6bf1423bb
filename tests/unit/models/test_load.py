"""Models by name, folder, file and hub id; whatever does not fit is one line, never a
random head.
"""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

from kd.core.errors import ModelError
from kd.models.classifier import Classifier, digest
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.models.timm_folder import export_files, folder_classes
from kd.parts.networks import timm as timm_kind

NAME = "vit_tiny_patch16_224"
TINY = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
CLASSES = ("apple", "fig", "pear")


def build(
    model=NAME, classes=CLASSES, config_path="teacher", args=TINY, size=16, **changes
):
    return load(Spec(config_path, str(model), args, classes, **changes), size)


def exact(model, classes=CLASSES, **changes):
    return build(model, classes, args={}, pretrained=True, exact_head=True, **changes)


def keys_of(folder: Path, source: str) -> dict:
    """Return the keys that name a folder as a model or as a checkpoint."""
    if source == "checkpoint":
        return {"checkpoint": str(folder)}
    return {"model": folder, "args": {}, "pretrained": True}


def refusal(*args, **changes) -> str:
    with pytest.raises(ModelError) as caught:
        build(*args, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.fixture
def stored(tmp_path) -> Path:
    """A folder as `kd-export` writes it."""
    torch.manual_seed(0)
    return store(tmp_path / "stored", build().network)


def store(folder: Path, network, classes=CLASSES) -> Path:
    folder.mkdir()
    content, tensors = export_files(Classifier(network, len(classes), 16), classes, 0.9)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Attack:
    """What a pickle may do while it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
@pytest.mark.parametrize("form", ["{}", "local-dir:{}"])
def test_a_folder_without_safetensors_is_refused_before_timm_reads_it(
    stored, tmp_path, monkeypatch, name, form
):
    (stored / "model.safetensors").unlink()
    mark = tmp_path / "ran"
    torch.save({"head.weight": Attack(mark)}, stored / name)
    torch.load(stored / name, weights_only=False)
    assert mark.exists()  # the attack works where somebody loads it
    mark.unlink()
    calls = []
    monkeypatch.setattr(
        timm, "create_model", lambda *args, **kwargs: calls.append(args)
    )
    for config_path in ("teacher", "student"):
        text = refusal(
            form.format(stored), args={}, pretrained=True, config_path=config_path
        )
        assert text.startswith(f"{config_path}.model: no model.safetensors in ")
    assert not calls
    assert not mark.exists()


@pytest.mark.parametrize("form", ["{}", "local-dir:{}"])
def test_a_folder_names_a_model(stored, form):
    model = exact(form.format(stored))
    assert same(
        dict(model.network.state_dict()), load_file(stored / "model.safetensors")
    )
    assert model.input_size == 16


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_checkpoint_gives_the_weights(stored, kind):
    path = stored / "model.safetensors" if kind == "file" else stored
    model = build(checkpoint=str(path), exact_head=True)
    assert same(
        dict(model.network.state_dict()), load_file(stored / "model.safetensors")
    )


def test_timm_loads_what_we_export_with_equal_logits_and_labels(stored):
    ours = exact(stored).eval()
    theirs = timm.create_model(f"local-dir:{stored}", pretrained=True).eval()
    pixels = torch.rand(4, 3, 16, 16)
    assert torch.equal(ours.network(pixels), theirs(pixels))
    assert theirs.pretrained_cfg["label_names"] == list(CLASSES)
    assert theirs.pretrained_cfg["crop_pct"] == 0.9
    assert tuple(theirs.pretrained_cfg["input_size"]) == (3, 16, 16)
    assert folder_classes(stored) == list(CLASSES)


def test_a_folder_of_another_size_keeps_its_own(stored):
    assert exact(stored, size=64).input_size == 16


def test_unknown_name_suggests_one():
    message = refusal("vit_tiny_patch16_244")
    assert message.startswith(
        "teacher.model: no model 'vit_tiny_patch16_244'. A timm model name"
    )
    assert message.endswith("Did you mean 'vit_tiny_patch16_224'?")
    assert refusal("no/such/folder").startswith(
        "teacher.model: no model 'no/such/folder'"
    )
    message = refusal("vit_tiny_patch16_224.augreg_in22k", pretrained=True)
    assert message.startswith(
        "teacher.model: no model 'vit_tiny_patch16_224.augreg_in22k'. A timm model name"
    )
    assert message.endswith("Did you mean 'vit_tiny_patch16_224.augreg_in21k'?")


def test_arguments_that_the_architecture_refuses_are_named():
    message = refusal(args={"embed_dim": 25, "num_heads": 2})
    assert message.startswith(f"teacher.model: '{NAME}' cannot be built (")
    assert "teacher.args" in message
    assert "banana" in refusal(args={"banana": 1})
    assert "cannot be built" in refusal(args={"depth": "deep"})
    assert "cannot be built (ZeroDivisionError" in refusal(args={"num_heads": 0})
    assert "cannot be built (IndexError" in refusal("convnext_atto", args={"dims": [8]})


def test_a_hub_id_needs_the_network(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal(
        "hf-hub:nobody/no-such-model", args={}, pretrained=True, exact_head=True
    )
    assert message.startswith(
        "teacher.model: the weights of 'hf-hub:nobody/no-such-model' are not here"
    )


def test_a_folder_without_config_is_refused(tmp_path):
    assert "no config.json" in refusal(
        f"local-dir:{tmp_path}", args={}, pretrained=True
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"architecture": "no_such_net"}', '"vit"']
)
def test_a_folder_with_a_damaged_config_is_refused_in_one_line(stored, text):
    (stored / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"^teacher\.model: ") as caught:
        exact(stored)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_checkpoint_beside_a_damaged_config_is_refused(stored, text):
    (stored / "config.json").write_text(text)
    assert refusal(checkpoint=str(stored), exact_head=True).startswith(
        "teacher.checkpoint: "
    )


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "absent"])
@pytest.mark.parametrize("source", ["model", "checkpoint"])
def test_weights_that_are_not_whole_are_refused(stored, damage, source):
    file = stored / "model.safetensors"
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(
            {
                "cut": file.read_bytes()[:-100],
                "text": b"not safetensors at all",
                "empty": b"",
            }[damage]
        )
    with pytest.raises(ModelError) as caught:
        build(exact_head=True, **keys_of(stored, source))
    assert str(caught.value).startswith(f"teacher.{source}: ")
    assert "\n" not in str(caught.value)


def classes_refused(stored, classes, source):
    return refusal(classes=classes, exact_head=True, **keys_of(stored, source))


@pytest.mark.parametrize("source", ["model", "checkpoint"])
def test_another_number_of_classes_is_never_a_random_head(stored, source):
    message = classes_refused(stored, (*CLASSES, "quince"), source)
    assert message.startswith(
        f"teacher.{source}: has 3 classes, the data has 4. Both must be equal: a new head"
        " would be"
    )
    for remedy in (
        "teacher.classes=FILE",
        "teacher.pretrained=true with teacher.fit.epochs",
        "losses=[{kind: cosine}]",
    ):
        assert remedy in message


def test_the_number_of_classes_is_read_from_the_file(stored, tmp_path):
    shutil.copy(stored / "model.safetensors", tmp_path / "alone.safetensors")
    message = refusal(
        classes=CLASSES[:2],
        checkpoint=str(tmp_path / "alone.safetensors"),
        exact_head=True,
    )
    assert "has 3 classes, the data has 2" in message


@pytest.mark.parametrize("source", ["model", "checkpoint"])
def test_classes_are_reordered_and_other_ones_refused(stored, source):
    tensors = load_file(stored / "model.safetensors")
    keys = keys_of(stored, source)
    model = build(classes=("fig", "apple", "pear"), exact_head=True, **keys)
    assert torch.equal(model.network.head.weight, tensors["head.weight"][[1, 0, 2]])
    assert torch.equal(model.network.head.bias, tensors["head.bias"][[1, 0, 2]])
    assert "order of the data's classes" in model.notes[0]
    assert "class 1 is 'fig', the data's is 'fog'." in classes_refused(
        stored, ("apple", "fog", "pear"), source
    )


def test_a_folder_without_labels_is_taken_by_its_number(stored):
    content = json.loads((stored / "config.json").read_text())
    for section in (content, content["pretrained_cfg"]):
        section.pop("label_names", None)
    (stored / "config.json").write_text(json.dumps(content))
    assert exact(stored, ("x", "y", "z")).num_classes == 3
    with pytest.raises(ModelError, match="has 3 classes, the data has 2"):
        exact(stored, ("x", "y"))


def test_weights_of_another_architecture_are_refused(stored):
    message = refusal(args={**TINY, "depth": 2}, checkpoint=str(stored))
    assert (
        f"a part of the network, which '{NAME}' does not take (missing: blocks.1."
        in message
    )
    message = refusal(
        args={**TINY, "embed_dim": 32}, checkpoint=str(stored), exact_head=True
    )
    assert "other shape: " in message


@pytest.mark.parametrize("classes", [CLASSES, ("a", "b", "c", "d")])
def test_a_student_from_weights_of_another_class_count_gets_a_head_of_zeros(
    stored, classes
):
    started = build(
        config_path="student", classes=classes, checkpoint=str(stored)
    ).network.state_dict()
    tensors = load_file(stored / "model.safetensors")
    for name, tensor in started.items():
        expected = (
            torch.zeros_like(tensor)
            if name.startswith("head.") and len(classes) != 3
            else tensors[name]
        )
        assert torch.equal(tensor, expected), name


def test_a_student_may_start_from_a_folder_with_another_head(stored):
    started = build(
        stored, ("a", "b"), "student", args={}, pretrained=True
    ).network.state_dict()
    tensors = load_file(stored / "model.safetensors")
    assert started["head.weight"].shape == (2, 24)
    assert not started["head.weight"].any()
    assert all(
        torch.equal(started[name], tensors[name])
        for name in tensors
        if not name.startswith("head.")
    )


@pytest.mark.parametrize(
    "classes", [("plum", "fig", "pear"), ("fig", "apple", "pear"), CLASSES]
)
@pytest.mark.parametrize("source", ["checkpoint", "model"])
def test_a_student_keeps_a_head_of_the_same_classes_only(stored, classes, source):
    tensors = load_file(stored / "model.safetensors")
    keys = keys_of(stored, source)
    started = build(config_path="student", classes=classes, **keys)
    same_bits = {
        name: torch.equal(tensor, tensors[name])
        for name, tensor in started.network.state_dict().items()
    }
    assert same_bits.pop("head.weight") == (classes == CLASSES)
    del same_bits["head.bias"]  # zeros in both
    assert all(same_bits.values())


@pytest.mark.parametrize("source", ["checkpoint", "model"])
def test_a_name_may_be_decomposed(tmp_path, source):
    """As macOS writes it: it was another class, whose student began with a head of
    zeros.
    """
    torch.manual_seed(0)
    folder = store(tmp_path / "stored", build().network, ("cre\u0300me", "fig", "pear"))
    tensors = load_file(folder / "model.safetensors")
    classes = ("cr\u00e8me", "fig", "pear")
    keys = keys_of(folder, source)
    started = build(config_path="student", classes=classes, **keys)
    assert torch.equal(started.network.head.weight, tensors["head.weight"])


@pytest.mark.parametrize("names", [CLASSES, ("class_0", "class_1", "class_2")])
def test_outputs_are_put_into_the_order_of_the_datas_classes_whatever_their_names(
    tmp_path, names
):
    """`class_0` is also what outputs without a name are called."""
    torch.manual_seed(0)
    folder = store(tmp_path / "stored", build().network, (names[0], names[2], names[1]))
    tensors = load_file(folder / "model.safetensors")
    spec = Spec("teacher", str(folder), {}, names, pretrained=True, exact_head=True)
    model = timm_kind.build(timm_kind.Options(), spec, 16, ())
    assert torch.equal(model.network.head.weight, tensors["head.weight"][[0, 2, 1]])


def test_the_digest_follows_every_bit():
    torch.manual_seed(0)
    network = build().network
    first = digest(network)
    assert digest(network) == first
    with torch.no_grad():
        network.head.bias[0] = torch.nextafter(network.head.bias[0], torch.tensor(9.0))
    assert digest(network) != first
    assert digest(network.to(torch.bfloat16)) != first


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_convnext"])
def test_other_families_survive_an_export(tmp_path, name):
    torch.manual_seed(0)
    network = build(name, args={}).network.eval()
    theirs = timm.create_model(
        f"local-dir:{store(tmp_path / name, network)}", pretrained=True
    ).eval()
    pixels = torch.rand(2, 3, 64, 64)
    # theirs keeps channels first
    network = network.to(memory_format=torch.contiguous_format)
    assert torch.equal(network(pixels), theirs(pixels))


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"class_token": False, "global_pool": "avg"},
        {"reg_tokens": 2, "no_embed_class": True},
    ],
)
def test_the_position_embedding_of_another_image_size_is_resampled_as_timm_does_it(
    tmp_path, args
):
    sizes = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2, **args}
    torch.manual_seed(0)
    large = timm.create_model(
        "vit_tiny_patch16_224", img_size=28, num_classes=9, **sizes
    )
    torch.nn.init.normal_(large.pos_embed)
    file = tmp_path / "large.safetensors"
    save_file(large.state_dict(), file)
    spec = Spec("teacher", "vit_tiny_patch16_224", sizes, (), str(file))
    model = load(spec, 16, ("pooled",))
    timms = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, num_classes=9, **sizes
    )
    # as timm loads pretrained weights
    timms.load_state_dict(checkpoint_filter_fn(large.state_dict(), timms))
    assert model.num_classes == 0  # nine classes of other data play no part
    torch.testing.assert_close(model.network.pos_embed, timms.pos_embed)
    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        pixels = model.normalize(image)
        expected = timms.eval().forward_head(
            timms.forward_features(pixels), pre_logits=True
        )
        torch.testing.assert_close(model.eval()(image).features["pooled"], expected)


def test_a_config_json_in_the_working_folder_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    assert build(exact_head=True).num_classes == 3


@pytest.mark.parametrize("config_path", ["model", "checkpoint"])
def test_weights_that_are_only_compared_raise_no_warnings(tmp_path, config_path):
    """On the meta device, as in `--check`: 590 lines of a ViT-B. What does not fit is
    refused there too.
    """
    args = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
    }
    network = timm.create_model("vit_tiny_patch16_224", num_classes=2, **args)
    timm.models.save_for_hf(
        network, tmp_path, model_config={"num_classes": 2}, safe_serialization=True
    )
    named = (
        {"model": str(tmp_path), "pretrained": True} if config_path == "model" else {}
    )
    named = named or {"model": "vit_tiny_patch16_224", "checkpoint": str(tmp_path)}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(
            Spec("teacher", args=args, classes=["a", "b"], exact_head=True, **named), 32
        )
    assert next(model.parameters()).is_meta
    with pytest.raises(ModelError), torch.device("meta"):
        load(
            Spec(
                "teacher",
                args={**args, "depth": 2},
                classes=["a", "b"],
                exact_head=True,
                **named,
            ),
            32,
        )
