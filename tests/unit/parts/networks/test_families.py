"""Every family of transformers answers on the same pixels as in transformers; others
are refused in one line.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers")

from families import FAMILIES, FLAT, REFUSED, SIDE, answers, load, make, prepared

from kd.core.errors import ModelError
from kd.models.examination import examine
from kd.models.examined import noise_images
from kd.models.spec import Spec
from kd.parts import registry


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def squares(count=3, side=SIDE):
    """Pictures that differ in their means, as noise does not."""
    rng = np.random.default_rng(0)
    images = [
        rng.integers(60 * i, 60 * i + 120, (8, 8, 3), np.uint8) for i in range(count)
    ]
    return [
        Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)
        for image in images
    ]


def tensor(images):
    return torch.from_numpy(
        np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2).copy()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_outputs_equal_its_own_librarys(family, tmp_path):
    """Channel order, offsets, missing and left-over keys were ignored: logits off by
    0.9 to 3.8 spreads, exit 0.
    """
    make(family, tmp_path)
    pixels = prepared(tmp_path, squares(), **FLAT)
    teacher = load(tmp_path)
    expected = answers(tmp_path, pixels)
    normalized = teacher.normalize(tensor(squares()))[:, teacher.network.order]
    torch.testing.assert_close(normalized, torch.cat(pixels), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert expected.std() > 0
        assert (
            teacher(tensor(squares())).logits - expected
        ).abs().max() < 1e-4 * expected.std()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [
        "clip",
        "siglip",
        "deit, distilled",
        "levit",
        "dinov2",
        "swin",
        "segformer",
        "hgnet_v2",
        "pp_lcnet",
        "perceiver",
    ],
)
def test_a_family_has_features(family, tmp_path):
    """CLIP's and SigLIP's classifiers were a traceback."""
    teacher = load(make(family, tmp_path), ("pooled", "tokens"))
    if family == "perceiver":
        with pytest.raises(
            ModelError, match=r"^losses: .*no vector of features before its classifier"
        ):
            teacher(tensor(squares()))
        return
    with torch.no_grad():
        outputs = teacher(tensor(squares()))
    torch.testing.assert_close(
        outputs.logits,
        answers(tmp_path, prepared(tmp_path, squares(), **FLAT)),
        rtol=1e-4,
        atol=1e-4,
    )
    assert outputs.features["pooled"].ndim == 2
    assert outputs.features["tokens"].ndim == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("siglip2", r"makes input of the shape \[1, 256, 768\].*max_num_patches"),
        ("imagegpt", "makes input of the shape"),
        ("donut-swin", "makes 60x80 pixels of a square image.*size"),
    ],
)
def test_a_processor_without_square_pixels_is_a_one_line_error(
    family, message, tmp_path
):
    assert family in REFUSED
    make(family, tmp_path)
    with pytest.raises(ModelError, match=rf"^teacher\.model: .*{message}"):
        load(tmp_path)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return make("vit", tmp_path_factory.mktemp("vit"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("7", r"'preprocessor_config\.json' of .* cannot be used"),
        ("[1, 2]", r"'preprocessor_config\.json' of .* cannot be used"),
        ("{", r"'preprocessor_config\.json' of .* cannot be used"),
        ('"text"', r"'preprocessor_config\.json' of .* cannot be used"),
        ({"image_std": [0.0, 0.5, 0.5]}, r"image_std .0\.0, 0\.5, 0\.5."),
        ({"image_std": 0}, "image_std"),
        ({"image_mean": [0.1, 0.2]}, "fails"),
        ({"image_mean": "half"}, "fails|cannot be used"),
        ({"rescale_factor": 0}, "do_rescale|image_std|fails"),
    ],
)
def test_an_odd_preprocessor_file_is_one_line(content, message, vit, tmp_path):
    """Broken JSON was called absent, a number was a traceback, a deviation of 0 gave
    NaN.
    """
    folder = shutil.copytree(vit, tmp_path / "vit")
    file = folder / "preprocessor_config.json"
    text = (
        json.dumps({**json.loads(file.read_text()), **content})
        if isinstance(content, dict)
        else content
    )
    file.write_text(text)
    with pytest.raises(ModelError, match=rf"^teacher\.model: .*({message})") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["image_mean", "image_std", "rescale_factor"])
def test_a_missing_key_has_its_family_s_default(key, tmp_path):
    folder = make("clip", tmp_path)
    file = folder / "preprocessor_config.json"
    content = json.loads(file.read_text())
    del content[key]
    file.write_text(json.dumps(content))
    expected = answers(folder, prepared(folder, squares(), **FLAT))
    with torch.no_grad():
        assert (
            load(folder)(tensor(squares())).logits - expected
        ).abs().max() < 1e-4 * expected.std()


def test_a_crop_size_that_is_not_used_is_no_input_size(vit, tmp_path):
    folder = shutil.copytree(vit, tmp_path / "vit")
    file = folder / "preprocessor_config.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "crop_size": 32, "do_center_crop": False}
        )
    )
    assert load(folder).input_size == SIDE


def test_a_model_that_masks_at_random_is_refused(tmp_path):
    """ViTMAE masks patches in evaluation too: a cache kept one draw for ever."""
    from families import VIT
    from transformers import ViTImageProcessor, ViTMAEConfig, ViTMAEModel

    ViTMAEModel(ViTMAEConfig(**VIT)).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(tmp_path)
    spec = Spec("teacher", str(tmp_path), {}, (), pretrained=True)
    options = registry.default_options("networks", "transformers")
    model = registry.build(
        "networks",
        "transformers",
        options,
        "x",
        spec=spec,
        image_size=SIDE,
        features=("pooled",),
    )
    with pytest.raises(
        ModelError,
        match=r"^teacher\.model: .*different outputs for the same pixels.*ViTMAE",
    ):
        examine(model, "teacher.model", noise_images(SIDE))


def test_the_pooled_token_of_a_convnext_is_no_place(tmp_path):
    """DINOv3's ConvNeXt puts its pooled vector before the places, and has no patches by
    which to tell.
    """
    from transformers import AutoModel, DINOv3ViTImageProcessor

    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ConvNextConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    DINOv3ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(
        tmp_path
    )
    spec = Spec("teacher", str(tmp_path), {}, (), pretrained=True)
    options = registry.default_options("networks", "transformers")
    context = {"spec": spec, "image_size": SIDE, "features": ("pooled", "tokens")}
    model = registry.build("networks", "transformers", options, "x", **context).eval()
    image = tensor(squares())
    with torch.no_grad():
        features = model(image).features
        hidden = (
            AutoModel.from_pretrained(tmp_path)
            .eval()(model.normalize(image))
            .last_hidden_state
        )
    assert features["tokens"].shape == (3, 4, 16)
    torch.testing.assert_close(features["tokens"], hidden[:, 1:])
    torch.testing.assert_close(features["pooled"], hidden[:, 0])


def test_a_network_of_timm_in_the_wrapper_of_transformers_is_refused_with_the_way_out(
    tmp_path,
):
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    size = {
        "img_size": SIDE,
        "patch_size": 16,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
    }
    config = TimmWrapperConfig(
        architecture="vit_tiny_patch16_224", num_labels=3, model_args=size
    )
    TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError,
        match=(
            r"^teacher\.model: .*wraps a network of timm \(vit_tiny.*teacher\.kind=timm"
        ),
    ):
        load(tmp_path)
