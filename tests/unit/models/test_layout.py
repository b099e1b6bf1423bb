"""Convolutional networks: channels last in memory, and images of the data's
own size.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.models.timm_folder import export_files

SMALL = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}


def built(model: str, args: dict | None = None, **changes):
    torch.manual_seed(0)
    return load(Spec("student", model, args or {}, ["a", "b"], **changes), 64)


@pytest.mark.parametrize(
    ("model", "args", "last"),
    [("resnet18", SMALL, True), ("vit_tiny_patch16_224", {}, False)],
)
def test_a_channels_last_network_has_equal_outputs(model, args, last):
    network = built(model, args, free_size=True).eval()
    weights = [
        p for p in network.network.parameters() if p.dim() == 4 and min(p.shape[1:]) > 1
    ]
    assert all(
        p.is_contiguous(memory_format=torch.channels_last) == last for p in weights
    )
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        logits = network(image).logits
        expected = network.network.to(memory_format=torch.contiguous_format)(
            network.normalize(image).contiguous()
        )
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_a_network_with_weights_of_five_dimensions_is_built_as_before():
    network = built("lambda_resnet26t", free_size=True)
    assert any(p.dim() == 5 for p in network.network.parameters())


@pytest.mark.parametrize(
    ("model", "args", "free", "size"),
    [
        ("resnet18", SMALL, True, 64),
        ("vit_tiny_patch16_224", {"depth": 1}, True, 64),
        ("resnet18", SMALL, False, 224),  # that of its weights, where they are there
        (
            "resnet18",
            {**SMALL, "pretrained_cfg_overlay": {"input_size": [3, 96, 96]}},
            True,
            96,
        ),
    ],
)
def test_a_free_network_with_random_weights_sees_the_images_as_they_are(
    model, args, free, size
):
    assert built(model, args, free_size=free).input_size == size


@pytest.mark.parametrize(
    "model",
    [
        "levit_128s",
        "efficientvit_m0",
        "mobilevit_xxs",
        "lcnet_050",
        "vit_tiny_patch16_224",
    ],
)
def test_it_is_built_exported_and_loaded_for_the_images_of_the_data(model, tmp_path):
    network = built(model, free_size=True).eval()
    content, tensors = export_files(network, ["a", "b"], 1.0)
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file(tensors, tmp_path / "model.safetensors")
    again = load(
        Spec(
            "teacher", str(tmp_path), {}, ["a", "b"], pretrained=True, exact_head=True
        ),
        96,
    ).eval()
    assert (network.input_size, again.input_size) == (64, 64)
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(again(image).logits, network(image).logits)
