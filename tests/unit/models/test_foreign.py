"""Weights whose tensors have other names, and teachers with more classes than
the data.
"""

import pytest
import timm
import torch
from safetensors.torch import save_file

from kd.core.errors import ModelError
from kd.models.spec import Spec
from kd.parts import registry

NAME = "vit_tiny_patch16_224"
ARGS = {
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 1,
    "num_heads": 2,
    "img_size": 16,
}
CLASSES = ("apple", "fig", "pear")
PICTURES = torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8)


@pytest.fixture
def foreign(tmp_path):
    """A file of five classes whose names are not timm's, and the network that
    it is of.
    """
    torch.manual_seed(0)
    network = timm.create_model(NAME, **ARGS, num_classes=5)
    tensors = {
        f"layer_{i}": tensor for i, tensor in enumerate(network.state_dict().values())
    }
    torch.save({"state_dict": tensors}, tmp_path / "foreign.pth")
    return tmp_path / "foreign.pth", network.eval()


def build(path, classes, config_path="teacher", names="", **changes):
    options = registry.default_options("networks", "timm", classes=str(names))
    spec = Spec(
        config_path,
        NAME,
        ARGS,
        classes,
        str(path),
        weights="by_order",
        exact_head=config_path == "teacher",
        **changes,
    )
    return registry.build(
        "networks", "timm", options, config_path, spec=spec, image_size=16, features=()
    ).eval()


def refusal(*args, **changes) -> str:
    with pytest.raises(ModelError) as caught:
        build(*args, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_are_taken_by_their_places(foreign):
    path, network = foreign
    model = build(path, tuple("abcde"))
    assert torch.equal(model(PICTURES).main, network(model.normalize(PICTURES)))
    assert "taken by their order" in model.notes[0]


def test_a_student_of_other_classes_gets_a_fresh_head(foreign):
    path, network = foreign
    model = build(path, CLASSES, "student")
    assert model.num_classes == 3
    assert torch.equal(
        model.network.blocks[0].attn.qkv.weight, network.blocks[0].attn.qkv.weight
    )


def test_features_need_no_classifier(foreign):
    path, network = foreign
    model = build(path, ())
    assert torch.equal(
        model.network.patch_embed.proj.weight, network.patch_embed.proj.weight
    )


def test_unfit_networks_are_one_line_errors(foreign, tmp_path):
    path, network = foreign
    tensors = torch.load(path, weights_only=True)["state_dict"]
    assert "teacher.model: has 5 classes" in refusal(
        path, CLASSES
    ) or "has 5" in refusal(path, CLASSES)
    torch.save(dict([*tensors.items()][:-3]), path)
    assert f"the weights are not those of '{NAME}' (missing: norm.bias (1)" in refusal(
        path, CLASSES
    )
    turned = [*tensors.items()]
    turned[2], turned[3] = turned[3], turned[2]
    torch.save(dict(turned), path)
    assert "other shape: patch_embed.proj.bias (24, 3, 8, 8) != (24,)" in refusal(
        path, tuple("abcde")
    )
    save_file(
        {f"x_{name}": tensor for name, tensor in network.state_dict().items()},
        tmp_path / "a.safetensors",
    )
    assert "safetensors keep no order" in refusal(
        tmp_path / "a.safetensors", tuple("abcde")
    )
    path.write_bytes(b"no weights")
    assert "cannot be read as weights" in refusal(path, CLASSES)


def test_a_pickle_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").write_text, ("x",))

    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    assert "cannot be read as weights" in refusal(tmp_path / "evil.pth", CLASSES)
    assert not (tmp_path / "ran").exists()


def test_the_outputs_are_those_of_the_data_s_classes(foreign, tmp_path):
    """The file names all outputs; the data's are picked, in its order."""
    path, network = foreign
    names = tmp_path / "names.txt"
    names.write_text("pear\nplum\napple\ngrape\nfig\n")
    model = build(path, CLASSES, names=names)
    assert model.classes == CLASSES
    assert model.num_classes == 3
    expected = network(model.normalize(PICTURES))[:, [2, 4, 0]]
    torch.testing.assert_close(model(PICTURES).main, expected)
    names.write_text("pear\nplum\n")
    assert "names 2 classes, but the model returns 5" in refusal(
        path, CLASSES, names=names
    )
    assert "student.classes: is set" in refusal(path, CLASSES, "student", names)
