"""How much the outputs of honest and of faulty networks change between batches, and
what their examination costs.

Run: python benchmarks/examination.py [--size 64]

Honest: networks of timm and transformers and small ones of plain torch, with random
weights, in float32; also bfloat16 and dynamic int8. Faulty: those of
tests/helpers/brought.py. Each is examined as a teacher (its weights are final) and as a
student. `mixed`, `alone`: largest change of an output, as a share of the largest
|output|, if two images are shown in a batch of five, in turns, or one is alone.
`refused`: the fault that was found. Seconds are CPU seconds of one examination, on one
thread.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from _record import HERE, write
from kd.core.errors import ModelError
from kd.models.classifier import LogitsModel
from kd.models.examination import RAISED, SMALL, examine
from kd.models.examined import ALONE, MIXED, Examined, add_noise, noise_images, restored

sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
from brought import FAULTS, HONEST, SIDE

TIMM = (
    *(
        "vit_tiny_patch16_224",
        "deit3_small_patch16_224",
        "cait_xxs24_224",
        "xcit_nano_12_p16_224",
        "levit_128s",
    ),
    *(
        "swin_tiny_patch4_window7_224",
        "maxvit_rmlp_pico_rw_256",
        "coatnet_nano_rw_224",
        "mixer_s16_224",
    ),
    *(
        "resnet18",
        "resnet50",
        "resnext50_32x4d",
        "regnetx_002",
        "densenet121",
        "convnext_atto",
    ),
    *(
        "mobilenetv3_small_050",
        "mobileone_s0",
        "efficientnet_b0",
        "tf_efficientnet_lite0",
        "ghostnet_050",
        "lcnet_050",
    ),
    *(
        "poolformer_s12",
        "fastvit_t8",
        "repvit_m0_9",
        "edgenext_xx_small",
        "efficientvit_b0",
        "mobilevit_xxs",
    ),
)


def of_timm(size: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield networks of timm with ten classes, built for the size where they
    take one.
    """
    for name in TIMM:
        try:
            yield name, timm.create_model(name, num_classes=10, img_size=size)
        except TypeError:
            yield name, timm.create_model(name, num_classes=10)


def of_transformers(size: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield small networks of transformers."""
    import transformers as hf

    common: dict[str, Any] = {
        "num_labels": 10,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
    }
    common |= {"intermediate_size": 96, "image_size": size, "patch_size": 8}
    yield "transformers ViT", hf.ViTForImageClassification(hf.ViTConfig(**common))
    yield (
        "transformers DINOv2",
        hf.Dinov2ForImageClassification(hf.Dinov2Config(**common)),
    )
    small = {"num_labels": 10, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
    yield (
        "transformers ConvNeXt",
        hf.ConvNextForImageClassification(hf.ConvNextConfig(**small)),
    )


def low_precision(size: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield a ViT in bfloat16 and one with dynamic int8."""
    vit = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=size
    ).eval()
    yield "vit_tiny in bfloat16", copy.deepcopy(vit).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield (
            "vit_tiny in dynamic int8",
            torch.ao.quantization.quantize_dynamic(vit, {nn.Linear}),
        )


def row(
    kind: str, name: str, network: nn.Module, size: int, trained: bool
) -> dict[str, Any]:
    """Examine a network once and return its row."""
    model = LogitsModel(network.eval(), "network")
    pixels = noise_images(size).float() / 255 * 4 - 2
    pixels[1] = pixels[1].amin() + pixels[1].amax() - pixels[1]
    changes = {}
    with torch.no_grad(), restored(model, parameters=True):
        if trained:
            add_noise(model, RAISED, 0, below=SMALL)
        examined = Examined(model.eval(), pixels)
        for key, rows in (("mixed", MIXED), ("alone", ALONE)):
            try:
                changes[key] = f"{examined.change(rows):.2g}"
            except (
                RuntimeError,
                ValueError,
            ):  # another shape, or a lazy layer: the examination names it
                changes[key] = "fails"
    begin = time.process_time()
    refused = ""
    try:
        examine(model, "network", pixels, True, 2 if trained else 0)
    except ModelError as error:
        refused = error.wrong
    seconds = round(time.process_time() - begin, 3)
    millions = round(
        sum(parameter.numel() for parameter in network.parameters()) / 1e6, 2
    )
    examined_as = "student" if trained else "teacher"
    return {
        **{
            "kind": kind,
            "network": name,
            "as": examined_as,
            "px": size,
            "million_parameters": millions,
            **changes,
        },
        **{"cpu_seconds": seconds, "refused": refused},
    }


def main() -> None:
    """Measure all networks and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=64)
    size = parser.parse_args().size
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    networks = [*of_timm(size), *of_transformers(size)]
    for name, network in networks:
        rows += [
            row("honest", name, network, size, trained) for trained in (False, True)
        ]
    rows += [
        row("honest", name, network, size, False)
        for name, network in low_precision(size)
    ]
    for name, build in HONEST.items():
        rows += [
            row("honest", name, build(), SIDE, trained) for trained in (False, True)
        ]
    for name, (build, _) in FAULTS.items():
        if name == "a lazy layer":  # it has no outputs to measure
            continue
        rows += [
            row("faulty", name, build(), SIDE, trained) for trained in (False, True)
        ]
    for printed_row in rows:
        print(" | ".join(map(str, printed_row.values())))
    write("examination", f"python benchmarks/{Path(__file__).name} --size {size}", rows)


if __name__ == "__main__":
    main()
