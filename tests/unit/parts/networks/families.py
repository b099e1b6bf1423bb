"""The families of transformers with a classifier, made small from their own
configuration classes; random weights.
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

CLASSES = ["apple", "fig", "pear"]
SIDE = 64
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
VIT |= {"image_size": SIDE, "patch_size": 16}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TEXT |= {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SWIN = {
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    "image_size": SIDE,
    "patch_size": 4,
}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
NET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
CVT = {
    "embed_dim": [8, 16, 16],
    "num_heads": [1, 2, 2],
    "depth": [1, 2, 3],
    "mlp_ratio": [2.0, 2.0, 2.0],
}
LEVIT = {
    "image_size": SIDE,
    "hidden_sizes": [16, 32, 48],
    "num_attention_heads": [1, 2, 2],
    "depths": [1, 1, 1],
}
LEVIT |= {"key_dim": [8, 8, 8]}
BOTH = {"vision_config": VIT, "text_config": TEXT}
HEAD = "ForImageClassification"
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}

FAMILIES: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    # model_type: (prefix, its configuration, class of the head, class of the processor,
    # keys of the processor)
    "beit": ("Beit", VIT, HEAD, "Beit", {}),
    "bit": ("Bit", {**NET, "num_groups": 4}, HEAD, "Bit", {}),
    "clip": ("CLIP", BOTH, HEAD, "CLIP", {}),
    "convnext": ("ConvNext", {**NET, "num_stages": 2}, HEAD, "ConvNext", IMAGENET),
    "convnextv2": ("ConvNextV2", {**NET, "num_stages": 2}, HEAD, "ConvNext", IMAGENET),
    "cvt": ("Cvt", CVT, HEAD, "ConvNext", IMAGENET),
    "data2vec-vision": ("Data2VecVision", VIT, HEAD, "Beit", {}),
    "deit": ("DeiT", VIT, HEAD, "DeiT", IMAGENET),
    "deit, distilled": ("DeiT", VIT, f"{HEAD}WithTeacher", "DeiT", IMAGENET),
    "dinov2": ("Dinov2", VIT, HEAD, "Bit", IMAGENET),
    "dinov2_with_registers": ("Dinov2WithRegisters", VIT, HEAD, "Bit", IMAGENET),
    "efficientnet": (
        "EfficientNet",
        {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            "batch_norm_eps": 1e-12,
            "batch_norm_momentum": 1.0,
        },
        HEAD,
        "EfficientNet",
        {
            "image_mean": IMAGENET["image_mean"],
            "image_std": [0.47853944, 0.4732864, 0.47434163],
            "include_top": True,
        },
    ),
    "focalnet": (
        "FocalNet",
        {**SWIN, "focal_levels": [1, 1], "focal_windows": [3, 3]},
        HEAD,
        "Bit",
        IMAGENET,
    ),
    "hgnet_v2": ("HGNetV2", {}, HEAD, "ViT", IMAGENET),
    "hiera": (
        "Hiera",
        {
            "embed_dim": 8,
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 4],
            "num_query_pool": 2,
            "image_size": [SIDE, SIDE],
        },
        HEAD,
        "Bit",
        IMAGENET,
    ),
    "ijepa": ("IJepa", VIT, HEAD, "ViT", IMAGENET),
    "levit": ("Levit", LEVIT, HEAD, "Levit", {}),
    "levit, distilled": ("Levit", LEVIT, f"{HEAD}WithTeacher", "Levit", {}),
    "metaclip_2": ("MetaClip2", BOTH, HEAD, "CLIP", {}),
    "mobilenet_v1": (
        "MobileNetV1",
        {"depth_multiplier": 0.25, "image_size": SIDE},
        HEAD,
        "MobileNetV1",
        {},
    ),
    "mobilenet_v2": (
        "MobileNetV2",
        {"depth_multiplier": 0.25, "image_size": SIDE},
        HEAD,
        "MobileNetV2",
        {},
    ),
    "mobilevit": (
        "MobileViT",
        {
            "image_size": SIDE,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
        },
        HEAD,
        "MobileViT",
        {"size": {"shortest_edge": 72}, "crop_size": {"height": SIDE, "width": SIDE}},
    ),
    "mobilevitv2": (
        "MobileViTV2",
        {"image_size": SIDE, "width_multiplier": 0.25},
        HEAD,
        "MobileViT",
        {"size": {"shortest_edge": 72}, "crop_size": {"height": SIDE, "width": SIDE}},
    ),
    "perceiver": (
        "Perceiver",
        {
            "num_latents": 8,
            "d_latents": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2,
            "image_size": SIDE,
        },
        f"{HEAD}Learned",
        "Perceiver",
        {
            "size": {"height": SIDE, "width": SIDE},
            "crop_size": {"height": 73, "width": 73},
        },
    ),
    "poolformer": ("PoolFormer", STAGES, HEAD, "PoolFormer", {}),
    "pp_lcnet": ("PPLCNet", {"scale": 0.25}, HEAD, "PPLCNet", {}),
    "pvt": (
        "Pvt",
        {**STAGES, "num_attention_heads": [1, 1, 2, 2], "image_size": SIDE},
        HEAD,
        "Pvt",
        {},
    ),
    "pvt_v2": (
        "PvtV2",
        {**STAGES, "num_attention_heads": [1, 1, 2, 2], "image_size": SIDE},
        HEAD,
        "Pvt",
        {},
    ),
    "regnet": ("RegNet", {**NET, "groups_width": 8}, HEAD, "ConvNext", IMAGENET),
    "resnet": ("ResNet", NET, HEAD, "ConvNext", IMAGENET),
    "segformer": (
        "Segformer",
        {**STAGES, "num_attention_heads": [1, 1, 2, 2]},
        HEAD,
        "Segformer",
        {},
    ),
    "siglip": ("Siglip", BOTH, HEAD, "Siglip", {}),
    "swiftformer": (
        "SwiftFormer",
        {"embed_dims": [8, 16, 16, 32], "depths": [1] * 4},
        HEAD,
        "ViT",
        IMAGENET,
    ),
    "swin": ("Swin", SWIN, HEAD, "ViT", IMAGENET),
    "swinv2": ("Swinv2", SWIN, HEAD, "ViT", IMAGENET),
    "textnet": ("TextNet", {}, HEAD, "TextNet", {}),
    "vit": ("ViT", VIT, HEAD, "ViT", {}),
    "vit_msn": ("ViTMSN", VIT, HEAD, "ViT", IMAGENET),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    "donut-swin": (
        "DonutSwin",
        SWIN,
        HEAD,
        "Donut",
        {"size": {"height": 80, "width": 60}},
    ),
    "imagegpt": (
        "ImageGPT",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
        HEAD,
        "ImageGPT",
        {
            "clusters": [[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]],
            "size": {"height": 8, "width": 8},
        },
    ),
    "siglip2": (
        "Siglip2",
        {"vision_config": {**VIT, "num_patches": 16}, "text_config": TEXT},
        HEAD,
        "Siglip2",
        {},
    ),
}


def make(name: str, folder: Path) -> Path:
    """Write a model of a family with its own processor, made small; return the
    folder.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    prefix, sizes, head, processor, keys = {**FAMILIES, **REFUSED}[name]
    names = dict(enumerate(CLASSES))
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(
        **sizes, id2label=names, label2id={n: i for i, n in names.items()}
    )
    model = getattr(transformers, prefix + head)(config)
    with torch.no_grad():  # as initialized, most answer every image alike
        for module in model.modules():
            if (
                isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
                and module.weight.dim() > 1
            ):
                torch.nn.init.orthogonal_(module.weight)
        if "batch_norm_eps" in sizes:  # its signal dies out without
            model.train()(
                pixel_values=torch.nn.functional.interpolate(
                    torch.randn(8, 3, 8, 8), SIDE, mode="bicubic"
                )
            )
    model.eval().save_pretrained(folder)
    cls = getattr(transformers, f"{processor}ImageProcessor")
    preprocessing = cls(**keys).to_dict()
    shown_size = (
        preprocessing["crop_size"]
        if preprocessing.get("do_center_crop")
        else preprocessing.get("size", {})
    )
    factor = (
        1.0
        if keys.keys() & {"size", "crop_size"}
        else SIDE / max(shown_size.values(), default=SIDE)
    )
    sizes = {
        key: preprocessing[key] for key in ("size", "crop_size") if key in preprocessing
    }
    small = {
        key: {name: round(side * factor) for name, side in sides.items()}
        for key, sides in sizes.items()
    }
    cls(**{**small, **keys}).save_pretrained(folder)
    return folder


def prepared(
    folder: Path, images: list[Image.Image], **switches: bool
) -> list[torch.Tensor]:
    """Return what the folder's own processor makes of each image."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)
    for key, value in switches.items():
        setattr(processor, key, value)
    return [processor(image, return_tensors="pt")["pixel_values"] for image in images]


def answers(folder: Path, pixels: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits of transformers."""
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        outputs = [model(pixel_values=image) for image in pixels]
    return torch.cat(
        [
            output.logits if hasattr(output, "logits") else output.last_hidden_state
            for output in outputs
        ]
    )


FLAT = {"do_resize": False, "do_center_crop": False, "do_pad": False}


def load(folder: Path, features: tuple[str, ...] = ()) -> Any:
    """Load a teacher as kd does."""
    from kd.models.spec import Spec
    from kd.parts import registry

    spec = Spec("teacher", str(folder), {}, CLASSES, pretrained=True, exact_head=True)
    options = registry.default_options("networks", "transformers")
    return registry.build(
        "networks",
        "transformers",
        options,
        "x",
        spec=spec,
        image_size=SIDE,
        features=features,
    ).eval()
