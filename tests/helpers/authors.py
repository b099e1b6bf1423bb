"""Files of weights as their authors wrote them: timm's networks under the names from
which its filters come.

A row has a network of timm, arguments that make it small, and how timm's names become
the authors': pairs of a pattern and its replacement, in order. Families whose authors
have timm's names have no pairs: their files differ by a wrapper, idle buffers or the
prefix of a framework, as in `WRAPPED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor

CLASSES = ("apple", "fig", "pear", "plum", "quince")
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def shifted(template: str, by: int) -> Callable[[re.Match[str]], str]:
    """Return a replacement whose `#` is the first group, moved."""
    return lambda match: template.replace("#", str(int(match[1]) + by)).replace(
        "@", match[2] if match.re.groups > 1 else ""
    )


FACEBOOK = [
    (r"^stem\.", "downsample_layers.0."),
    (r"^stages\.(\d+)\.downsample\.", r"downsample_layers.\1."),
    (r"^stages\.(\d+)\.blocks\.", r"stages.\1."),
    (r"conv_dw", "dwconv"),
    (r"mlp\.grn\.bias", "grn.beta"),
    (r"mlp\.grn\.weight", "grn.gamma"),
    (r"mlp\.fc", "pwconv"),
    (r"^head\.norm\.", "norm."),
    (r"^head\.fc\.", "head."),
]
MICROSOFT = [
    (r"^layers\.(\d+)\.downsample", shifted("layers.#.downsample", -1)),
    (r"^head\.fc\.", "head."),
]
FLAT = [(rf"^stages\.{i}\.downsample\.", f"network.{2 * i - 1}.") for i in (1, 2, 3)]
FLAT += [(rf"^stages\.{i}\.blocks\.", f"network.{2 * i}.") for i in range(4)]
STEM4 = [
    (rf"^stem\.{ours}\.", f"patch_embed.{n}.")
    for ours, n in (("conv1", 0), ("norm1", 1), ("conv2", 3), ("norm2", 4))
]
CLIP = [
    (r"^patch_embed\.proj", "conv1"),
    (r"^pos_embed$", "positional_embedding"),
    (r"^cls_token$", "class_embedding"),
    (r"^blocks\.", "transformer.resblocks."),
    (r"norm_pre", "ln_pre"),
    (r"^norm\.", "ln_post."),
    (r"\.norm(\d)", r".ln_\1"),
    (r"attn\.qkv\.", "attn.in_proj_"),
    (r"attn\.proj", "attn.out_proj"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"^", "visual."),
]
TNT = [
    (r"^patch_pos", "outer_pos"),
    (r"^pixel_pos", "inner_pos"),
    (r"^pixel_embed", "patch_embed"),
    (r"norm1_proj", "proj_norm1"),
    (r"norm2_proj", "proj_norm2"),
    (r"norm_in", "inner_norm1"),
    (r"attn_in", "inner_attn"),
    (r"norm_mlp_in", "inner_norm2"),
    (r"\.mlp_in", ".inner_mlp"),
    (r"norm_out", "outer_norm1"),
    (r"attn_out", "outer_attn"),
    (r"norm_mlp", "outer_norm2"),
    (r"\.mlp\.", ".outer_mlp."),
]
FASTVIT = [
    (r"^stem", "patch_embed"),
    (r"conv_kxk", "rbr_conv"),
    (r"conv_scale", "rbr_scale"),
    (r"\.identity\.", ".rbr_skip."),
    (r"^final_conv", "conv_exp"),
    (r"\.mlp\.", ".convffn."),
    (r"large_conv", "lkb_origin"),
    (r"se\.fc1", "se.reduce"),
    (r"se\.fc2", "se.expand"),
    (r"layer_scale(_\d)?\.gamma", r"layer_scale\1"),
    (r"^head\.fc\.", "head."),
    *[
        (rf"^stages\.{i}\.downsample\.proj", f"network.{2 * i - 1}.proj")
        for i in (1, 2, 3)
    ],
    *[(rf"^stages\.{i}\.blocks\.", f"network.{2 * i}.") for i in range(4)],
]
TORCHVISION_REGNET = [
    (r"^stem\.conv", "stem.0"),
    (r"^stem\.bn", "stem.1"),
    (
        r"^s(\d)\.b(\d+)\.",
        lambda m: f"trunk_output.block{m[1]}.block{m[1]}-{int(m[2]) - 1}.",
    ),
    (r"\.conv1\.conv", ".f.a.0"),
    (r"\.conv1\.bn", ".f.a.1"),
    (r"\.conv2\.conv", ".f.b.0"),
    (r"\.conv2\.bn", ".f.b.1"),
    (r"\.se\.fc1", ".f.se.fc1"),
    (r"\.se\.fc2", ".f.se.fc2"),
    (r"\.conv3\.conv", ".f.c.0"),
    (r"\.conv3\.bn", ".f.c.1"),
    (r"downsample\.conv", "proj.0"),
    (r"downsample\.bn", "proj.1"),
    (r"^head\.fc", "fc"),
]
PVT = [
    (r"^patch_embed\.", "patch_embed1."),
    (r"^stages\.(\d)\.downsample\.", shifted("patch_embed#.", 1)),
    (r"^stages\.(\d)\.blocks\.", shifted("block#.", 1)),
    (r"^stages\.(\d)\.norm\.", shifted("norm#.", 1)),
    (r"\.dwconv\.", ".dwconv.dwconv."),
]
POOLFORMER = [
    (r"^stem\.conv", "patch_embed.proj"),
    (r"^stages\.(\d)\.downsample\.conv", lambda m: f"network.{2 * int(m[1]) - 1}.proj"),
    (r"^stages\.(\d)\.blocks\.", lambda m: f"network.{2 * int(m[1])}."),
    (r"layer_scale(\d)\.scale", r"layer_scale_\1"),
    (r"^head\.norm", "norm"),
    (r"^head\.fc", "head"),
]
IFORMER = [
    (r"^head\.head_dist\.", "classifier.classifier_dist."),
    (r"^head\.head\.", "classifier.classifier."),
    (r"^stem\.conv1\.", "downsample_layers.0.0."),
    (r"^stem\.conv2\.", "downsample_layers.0.2.conv_exp_bn1."),
    (r"^stem\.conv3\.", "downsample_layers.0.2.conv_pwl_bn2."),
    (r"^stages\.(\d+)\.downsample\.", r"downsample_layers.\1.0."),
    (r"^stages\.(\d+)\.blocks\.(\d+)\.", r"stages.\1.\2.block."),
    (r"\.module\.", ".m."),
]
SWIFT = [
    (r"^stem\.", "patch_embed."),
    (r"^head_dist\.", "dist_head."),
    (r"layer_scale(_\d)?\.gamma", r"layer_scale\1"),
    *FLAT,
]
MAMBAOUT = [
    (r"^head\.norm\.", "norm."),
    (r"^head\.pre_logits\.fc\.", "head.fc1."),
    (r"^head\.pre_logits\.norm\.", "head.norm."),
    (r"^head\.fc\.", "head.fc2."),
    (r"^stem\.", "downsample_layers.0."),
    (r"^stages\.(\d+)\.downsample\.", r"downsample_layers.\1."),
    (r"^stages\.(\d+)\.blocks\.", r"stages.\1."),
]
DAVIT = [
    (r"^stem\.conv", "patch_embeds.0.proj"),
    (r"^stem\.norm", "patch_embeds.0.norm"),
    (r"^stages\.(\d)\.downsample\.conv", r"patch_embeds.\1.proj"),
    (r"^stages\.(\d)\.downsample\.norm", r"patch_embeds.\1.norm"),
    (r"^stages\.(\d)\.blocks\.", r"main_blocks.\1."),
    (r"cpe1", "cpe.0"),
    (r"cpe2", "cpe.1"),
    (r"^head\.norm", "norms"),
    (r"^head\.fc", "head"),
]
RESMLP = [
    (r"^stem\.", "patch_embed."),
    (r"linear_tokens\.", "attn."),
    (r"mlp_channels\.", "mlp."),
    (r"\.ls(\d)", r".gamma_\1"),
]
SEQUENCER = [
    (r"^stages\.(\d+)\.downsample\.down", shifted("blocks.#.9.down", -1)),
    (r"^stages\.(\d+)\.blocks\.", r"blocks.\1."),
    (r"^head\.fc\.", "head."),
]
FOCAL = [
    (r"ls(\d)\.gamma", r"gamma_\1"),
    (r"^stem", "patch_embed"),
    (r"^layers\.(\d+)\.downsample", shifted("layers.#.downsample", -1)),
    (r"^head\.fc", "head"),
]
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
SWIN = {
    "img_size": 64,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 2, 2, 2),
}
FAMILIES: dict[str, tuple[dict[str, Any], list[tuple[str, Any]]]] = {
    "convnext_atto": ({}, FACEBOOK),
    "convnextv2_atto": ({}, FACEBOOK),
    "convnext_tiny": ({"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}, FACEBOOK),
    "edgenext_xx_small": ({}, FACEBOOK),
    "mambaout_femto": ({}, MAMBAOUT),
    "davit_tiny": (
        {
            "depths": (1, 1, 1, 1),
            "embed_dims": (16, 16, 32, 32),
            "num_heads": (1, 1, 2, 2),
            "num_groups": None,
        },
        DAVIT,
    ),
    "efficientformer_l1": (
        {},
        [
            *STEM4,
            (r"ls(\d)\.gamma", r"layer_scale_\1"),
            (r"^head_dist\.", "dist_head."),
            *[
                (rf"^stages\.{i}\.downsample\.conv", f"network.{2 * i - 1}.proj")
                for i in (1, 2, 3)
            ],
            *[
                (rf"^stages\.{i}\.downsample\.norm", f"network.{2 * i - 1}.norm")
                for i in (1, 2, 3)
            ],
            *FLAT[3:],
        ],
    ),
    "fastvit_t8": ({}, FASTVIT),
    "focalnet_tiny_srf": ({}, FOCAL),
    "hiera_tiny_224": (
        {},
        [(r"^head\.fc\.", "head.projection."), (r"^head\.norm\.", "norm.")],
    ),
    "pit_ti_224": ({}, [(r"^transformers\.(\d)\.pool\.", shifted("pools.#.", -1))]),
    "pvt_v2_b0": ({}, PVT),
    "swin_tiny_patch4_window7_224": (SWIN, MICROSOFT),
    "swinv2_tiny_window8_256": (SWIN, MICROSOFT),
    "swinv2_cr_tiny_224": (SWIN, [(r"^head\.fc\.", "head.")]),
    "tnt_s_legacy_patch16_224": ({"depth": 1}, TNT),
    "xcit_nano_12_p16_224": ({"depth": 1}, [(r"^pos_embed\.", "pos_embeder.")]),
    "vit_base_patch16_clip_224": (VIT, CLIP),
    "vit_small_patch14_reg4_dinov2": (VIT, [(r"^reg_token$", "register_tokens")]),
    "deit3_small_patch16_224": (VIT, [(r"ls(\d)\.gamma", r"gamma_\1")]),
    "poolformer_s12": ({}, POOLFORMER),
    "resmlp_12_224": ({}, RESMLP),
    "iformer_t": ({}, IFORMER),
    "sequencer2d_s": ({}, SEQUENCER),
    "swiftformer_xs": ({}, SWIFT),
    "regnetx_002": ({}, TORCHVISION_REGNET),
    "regnety_002": ({}, TORCHVISION_REGNET),
    "crossvit_tiny_240": ({}, [(r"^(pos_embed|cls_token)_(\d)", r"\1.\2")]),
    "densenet121": ({}, [(r"(denselayer\d+\.(?:norm|conv))(\d)\.", r"\1.\2.")]),
    "rdnet_tiny": ({}, [(r"^stem\.", "stem.stem.")]),
    "tresnet_m": ({}, []),
    "cait_xxs24_224": ({"depth": 1}, [(r"^", "module.")]),
    "coat_tiny": ({}, []),
    "levit_128s": ({}, []),
    "tiny_vit_5m_224": ({}, []),
    "beit_base_patch16_224": (VIT, []),
    "vit_tiny_patch16_224": (VIT, []),
    "ghostnet_100": ({}, []),
    "starnet_s1": ({}, []),
    "shvit_s1": ({}, []),
    "efficientvit_m0": ({}, []),
    "maxvit_rmlp_pico_rw_256": ({}, []),
    "repvit_m0_9": ({}, []),
    "resnet18": ({}, []),
}
"""44 networks of 40 families and more: those with pairs are renamed by timm's filters,
the others are as they are.
"""
IDLE = {
    "swin_tiny_patch4_window7_224": "layers.0.blocks.0.attn.relative_position_index",
    "levit_128s": "stages.0.blocks.0.attn.attention_bias_idxs",
    "tiny_vit_5m_224": "stages.1.blocks.0.attn.attention_bias_idxs",
    "beit_base_patch16_224": "blocks.0.attn.relative_position_index",
    "vit_small_patch14_reg4_dinov2": "mask_token",
    "coat_tiny": "norm1.weight",
}
"""Tensors that the authors' files have beside, which timm's filters leave out."""


def build_network(name: str, seed: int = 0, **options: Any) -> torch.nn.Module:
    """Return a small network of a family with random values, also for constants."""
    torch.manual_seed(seed)
    options = {**FAMILIES.get(name, ({},))[0], **options}
    network = timm.create_model(name, num_classes=len(CLASSES), **options).eval()
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * (torch.rand_like(tensor) - 0.5))
    return network


def author_tensors(name: str, network: torch.nn.Module) -> dict[str, Tensor]:
    """Return a network's tensors with the names, shapes and buffers of its authors."""
    renamed = {}
    for key, tensor in network.state_dict().items():
        for pattern, new in FAMILIES[name][1]:
            key = re.sub(pattern, new, key)
        if FAMILIES[name][1] is FACEBOOK and ".pwconv" in key and tensor.ndim == 4:
            tensor = tensor[:, :, 0, 0]
        renamed[key] = (
            tensor[None, None, None]
            if key.endswith(("grn.beta", "grn.gamma"))
            else tensor.clone()
        )
    if name.startswith("vit_base_patch16_clip"):  # OpenAI's, without the tower of texts
        renamed["visual.proj"] = renamed.pop("visual.head.weight").T
        renamed["visual.class_embedding"] = renamed["visual.class_embedding"][0, 0]
        renamed["visual.positional_embedding"] = renamed["visual.positional_embedding"][
            0
        ]
        del renamed["visual.head.bias"]
    if name.endswith("reg4_dinov2"):  # its positions include the class token's
        zero = torch.zeros_like(renamed["cls_token"])
        renamed["pos_embed"] = torch.cat([zero, renamed["pos_embed"]], 1)
    if name == "densenet121":  # from before torch counted batches
        renamed = {
            key: tensor for key, tensor in renamed.items() if "num_batches" not in key
        }
    if name in IDLE:
        renamed[IDLE[name]] = torch.zeros(3, 3)
    return renamed
