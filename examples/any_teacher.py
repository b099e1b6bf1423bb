"""Make one small teacher of each kind from photographs in class folders, without a
network, and distil each.

Run: python examples/any_teacher.py PHOTOGRAPHS [FOLDER]

PHOTOGRAPHS has `train` and `val`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kd
from kd.models.answer_table import AnswerTable, write_answers
from kd.parts import registry

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def network(classes: int = 3, width: int = 16) -> nn.Module:
    """Build a small convolutional network: what `kind: torch` names as
    `any_teacher:network`.
    """
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.GELU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)
    )


class Photographs:
    """Both splits as tensors."""

    def __init__(self, root: Path, size: int) -> None:
        self.size, options = (
            size,
            registry.default_options("datasets", "imagefolder", root=str(root)),
        )
        self.train = registry.build(
            "datasets", "imagefolder", options, "data", split="train", classes=None
        )
        self.classes = list(self.train.classes)
        self.val = registry.build(
            "datasets",
            "imagefolder",
            options,
            "data",
            split="val",
            classes=self.classes,
        )

    def pixels(self, source: Any) -> Tensor:
        """Return the whole images of a split, uint8 [N, 3, S, S]."""
        side = (self.size, self.size)
        rows = [
            np.asarray(source.decode(id).image.resize(side)).transpose(2, 0, 1)
            for id in range(len(source))
        ]
        return torch.from_numpy(np.stack(rows))


def normalized(pixels: Tensor) -> Tensor:
    """Return float images as the teachers take them."""
    mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def fit(
    model: nn.Module,
    pixels: Tensor,
    label: Tensor,
    epochs: int,
    answer: Any = lambda said: said,
) -> None:
    """Fit a model on labels, with random flips."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    model.train()
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        for rows in torch.randperm(len(label), generator=generator).split(32):
            image = normalized(pixels[rows])
            image = (
                image.flip(-1) if torch.rand((), generator=generator) < 0.5 else image
            )
            F.cross_entropy(answer(model(image)), label[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


def vit(classes: list[str], size: int, width: int) -> Any:
    """Build a ViT of transformers from its own configuration."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=2 * width,
            image_size=size,
            patch_size=8,
            id2label=dict(enumerate(classes)),
            label2id={name: label for label, name in enumerate(classes)},
        )
    )


def clip(size: int, width: int) -> Any:
    """Build a CLIP from its own configuration; only its image tower is used."""
    from transformers import CLIPConfig, CLIPModel

    text = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    text |= {
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 16,
    }
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
    }
    vision = {**sizes, "image_size": size, "patch_size": 8}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    )


def save(model: Any, folder: Path, size: int) -> None:
    """Write a model of transformers with its preprocessing."""
    from transformers import ViTImageProcessor

    model.save_pretrained(folder)
    side = {"height": size, "width": size}
    ViTImageProcessor(
        size=side, image_mean=list(MEAN), image_std=list(STD)
    ).save_pretrained(folder)


def make(
    root: Path, folder: Path, size: int = 64, width: int = 64, epochs: int = 8
) -> dict[str, dict[str, Any]]:
    """Fit a teacher of each kind and write it; return the `teacher` section of each.

    Args:
        root: photographs, with `train` and `val`.
        folder: where the teachers are written.
        size: side of an image, pixels.
        width: of the transformers.
        epochs: of each fit.
    """
    from safetensors.torch import save_file

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    photographs = Photographs(root, size)
    names, pixels = photographs.classes, photographs.pixels(photographs.train)
    label = torch.tensor([photographs.train.label(id) for id in range(len(pixels))])
    normal = {"mean": list(MEAN), "std": list(STD), "input_size": size}

    one = vit(names, size, width)
    fit(one, pixels, label, epochs, lambda said: said.logits)
    save(one, folder / "vit", size)

    two = clip(size, width)
    vectors = F.normalize(
        torch.randn(len(names), 32, generator=torch.Generator().manual_seed(1)), dim=1
    )
    tower = Cosine(two, vectors)
    fit(tower, pixels, label, epochs)
    save(two, folder / "clip", size)
    save_file({"vectors": vectors}, folder / "vectors.safetensors")
    (folder / "classes.txt").write_text("\n".join(names) + "\n")

    net = network(len(names))
    fit(net, pixels, label, 2 * epochs)
    torch.save(net.state_dict(), folder / "weights.pth")
    dynamic = {
        "dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=4096)},),
        "dynamo": True,
    }
    example = (torch.zeros(2, 3, size, size),)
    torch.onnx.export(
        net,
        example,
        folder / "net.onnx",
        output_names=["logits"],
        verbose=False,
        **dynamic,
    )

    found, said = [], []
    for source in (photographs.train, photographs.val):
        found += [source.name(id) for id in range(len(source))]
        with torch.no_grad():
            said.append(net(normalized(photographs.pixels(source))))
    write_answers(
        folder / "answers.safetensors",
        AnswerTable("logits", found, torch.cat(said)[None], names),
    )
    return {
        "transformers": {"kind": "transformers", "model": str(folder / "vit")},
        "zero_shot": {
            "kind": "zero_shot",
            "model": str(folder / "clip"),
            "vectors": str(folder / "vectors.safetensors"),
            "classes": str(folder / "classes.txt"),
        },
        "torch": {
            "kind": "torch",
            "model": "any_teacher:network",
            "args": {"classes": len(names)},
            "checkpoint": str(folder / "weights.pth"),
            **normal,
        },
        "onnx": {
            "kind": "onnx",
            "model": str(folder / "net.onnx"),
            "mean": normal["mean"],
            "std": normal["std"],
        },
        "answers": {"kind": "answers", "model": str(folder / "answers.safetensors")},
    }


class Cosine(nn.Module):
    """CLIP's image tower with a fixed vector for each class, while it is fitted."""

    def __init__(self, model: Any, vectors: Tensor) -> None:
        super().__init__()
        self.model, self.vectors = model, vectors

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scaled cosines."""
        said = self.model.get_image_features(pixel_values=pixels)
        image = F.normalize(
            said if isinstance(said, Tensor) else said.pooler_output, dim=1
        )
        return self.model.logit_scale.detach().exp() * image @ self.vectors.T


def main() -> None:
    """Distil a student from each."""
    root, folder = (
        Path(sys.argv[1]),
        Path(sys.argv[2] if len(sys.argv) > 2 else "teachers"),
    )
    for kind, teacher in make(root, folder).items():
        run = kd.train(
            {
                "run": {"name": f"from_{kind}", "epochs": 5},
                "data": {
                    "kind": "imagefolder",
                    "root": str(root),
                    "image_size": 64,
                    "batch_size": 32,
                },
                "teacher": teacher,
                "student": {
                    "model": "xcit_nano_12_p16_224",
                    "args": {
                        "embed_dim": 64,
                        "depth": 2,
                        "num_heads": 4,
                        "cls_attn_layers": 1,
                    },
                },
                "losses": [{"kind": "kl", "temperature": 2.0}],
                "optimizer": {"lr": 3e-3},
            }
        )
        print(
            kind,
            {
                name: round(run.metrics[name], 3)
                for name in ("accuracy", "teacher_accuracy", "agreement")
            },
        )


if __name__ == "__main__":
    main()
