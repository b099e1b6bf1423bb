"""A network behind uint8 pixels: normalized as torchvision does it, features beside the
same logits.
"""

import pytest
import torch
from timm.data import resolve_model_data_config
from torch import nn
from torchvision.transforms import v2

from kd.models.classifier import Classifier, set_attention
from kd.models.load_classifier import load
from kd.models.spec import Spec

CLASSES = ("a", "b", "c", "d", "e")
TINY = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
FAMILIES = {
    "vit_tiny_patch16_224": TINY,
    "deit_tiny_distilled_patch16_224": TINY,
    "vit_tiny_patch16_224 of means": {**TINY, "global_pool": "avg"},
    "test_vit2": {},
    "test_resnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_byobnet": {},
    "test_nfnet": {},
    "test_mambaout": {},
    "mobilenetv3_small_050": {},
    "efficientvit_b0": {},
}


def images(size: int = 32, count: int = 3) -> torch.Tensor:
    return torch.randint(
        256,
        (count, 3, size, size),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )


def family(name: str, features: bool) -> Classifier:
    torch.manual_seed(0)
    return load(
        Spec("student", name.split()[0], FAMILIES[name], CLASSES),
        32,
        ("pooled",) if features else (),
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_logits_beside_features_are_the_plain_logits(name, training):
    plain = family(name, False).train(training)
    with_features = family(name, True).train(training)
    torch.manual_seed(1)
    expected = plain(images())
    torch.manual_seed(1)
    outputs = with_features(images())
    assert not expected.features
    assert torch.equal(outputs.logits, expected.logits)
    assert outputs.logits.shape == (3, 5)
    assert outputs.features["pooled"].shape == (3, with_features.num_features)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "test_resnet", "test_efficientnet"]
)
def test_pixels_are_normalized_as_timm_says(name):
    model = family(name, False)
    config = resolve_model_data_config(model.network)
    size = model.input_size
    pixels = images(size)
    reference = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(config["mean"], config["std"]),
        ]
    )(pixels)
    torch.testing.assert_close(model.normalize(pixels), reference, rtol=1e-5, atol=1e-5)
    model.eval()
    torch.testing.assert_close(
        model(pixels).logits, model.network(reference), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("size", [16, 24, 48, 161])
def test_another_size_is_resized_like_torchvision(size):
    model = Classifier(
        nn.Conv2d(3, 1, 1), 2, 32, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255)
    )
    resized = v2.functional.resize(
        images(size).float(), [32, 32], v2.InterpolationMode.BICUBIC, antialias=True
    )
    normalized = model.normalize(images(size))
    assert normalized.shape == (3, 3, 32, 32)
    torch.testing.assert_close(normalized, resized.clamp(0, 255), rtol=0, atol=1e-3)
    assert normalized.min() >= 0  # bicubic overshoots
    assert normalized.max() <= 255.001


def test_a_vit_is_built_for_the_datas_size_and_a_cnn_resizes():
    assert family("vit_tiny_patch16_224", False).input_size == 32
    assert family("test_resnet", False).input_size == 160
    vit = load(
        Spec("student", "vit_tiny_patch16_224", {**TINY, "img_size": 48}, CLASSES), 32
    )
    assert vit.input_size == 48
    assert vit(images(32)).logits.shape == (3, 5)


def test_normalization_stays_float32_and_the_network_gets_its_own_dtype():
    model = family("vit_tiny_patch16_224", False)
    reference = model.normalize(images())
    model.network.to(torch.bfloat16)
    assert model.normalize(images()).dtype == torch.bfloat16
    assert torch.equal(model.normalize(images()), reference.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "test_resnet"])
def test_attention_kernels_agree(name):
    model = family(name, False).eval()
    layers = set_attention(model, fused=True)
    assert layers == (2 if name.startswith("vit") else 0)
    fused = model(images()).logits
    assert set_attention(model, fused=False) == layers
    assert not any(getattr(layer, "fused_attn", False) for layer in model.modules())
    torch.testing.assert_close(model(images()).logits, fused, rtol=1e-4, atol=1e-5)
