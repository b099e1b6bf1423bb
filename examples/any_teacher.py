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

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def network(classes: int = 3, width: int = 16) -> nn.Module:
    """Build a small convolutional network, which `kind: torch` names."""
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.GELU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)
    )


class Photographs:
    """Both splits as tensors."""

    def __init__(self, root: Path, size: int) -> None:
        self.size = size
        options = registry.default_options("datasets", "imagefolder", root=str(root))
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
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def fit(
    model: nn.Module,
    pixels: Tensor,
    label: Tensor,
    epochs: int,
    logits_of: Any = lambda output: output,
) -> None:
    """Fit a model on labels, with random flips."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    model.train()
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        for rows in torch.randperm(len(label), generator=generator).split(32):
            image = normalized(pixels[rows])
            if torch.rand((), generator=generator) < 0.5:
                image = image.flip(-1)
            F.cross_entropy(logits_of(model(image)), label[rows]).backward()
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
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 16,
    }
    vision = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
        "image_size": size,
        "patch_size": 8,
    }
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
    names = photographs.classes
    pixels = photographs.pixels(photographs.train)
    label = torch.tensor([photographs.train.label(id) for id in range(len(pixels))])

    transformer = vit(names, size, width)
    fit(transformer, pixels, label, epochs, lambda output: output.logits)
    save(transformer, folder / "vit", size)

    clip_model = clip(size, width)
    vectors = F.normalize(
        torch.randn(len(names), 32, generator=torch.Generator().manual_seed(1)), dim=1
    )
    tower = Cosine(clip_model, vectors)
    fit(tower, pixels, label, epochs)
    save(clip_model, folder / "clip", size)
    save_file({"vectors": vectors}, folder / "vectors.safetensors")
    (folder / "classes.txt").write_text("\n".join(names) + "\n")

    net = network(len(names))
    fit(net, pixels, label, 2 * epochs)
    torch.save(net.state_dict(), folder / "weights.pth")
    export_onnx(net, folder / "net.onnx", size)
    write_answers(folder / "answers.safetensors", answer_table(net, photographs))
    return sections(folder, len(names), size)


def export_onnx(model: nn.Module, file: Path, size: int) -> None:
    """Write a network as an ONNX graph for batches of any size."""
    torch.onnx.export(
        model,
        (torch.zeros(2, 3, size, size),),
        file,
        output_names=["logits"],
        verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},),
        dynamo=True,
    )


def answer_table(model: nn.Module, photographs: Photographs) -> AnswerTable:
    """Return the logits of both splits, by the names of the images."""
    image_names = []
    logits = []
    for source in (photographs.train, photographs.val):
        image_names += [source.name(id) for id in range(len(source))]
        with torch.no_grad():
            logits.append(model(normalized(photographs.pixels(source))))
    classes = photographs.classes
    return AnswerTable("logits", image_names, torch.cat(logits)[None], classes)


def sections(folder: Path, classes: int, size: int) -> dict[str, dict[str, Any]]:
    """Return the `teacher` section of each teacher in a folder."""
    pixels = {"mean": list(MEAN), "std": list(STD)}
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
            "args": {"classes": classes},
            "checkpoint": str(folder / "weights.pth"),
            **pixels,
            "input_size": size,
        },
        "onnx": {"kind": "onnx", "model": str(folder / "net.onnx"), **pixels},
        "answers": {"kind": "answers", "model": str(folder / "answers.safetensors")},
    }


class Cosine(nn.Module):
    """CLIP's image tower with a fixed vector for each class, while it is fitted."""

    def __init__(self, model: Any, vectors: Tensor) -> None:
        super().__init__()
        self.model = model
        self.vectors = vectors

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scaled cosines."""
        features = self.model.get_image_features(pixel_values=pixels)
        if not isinstance(features, Tensor):
            features = features.pooler_output
        image = F.normalize(features, dim=1)
        return self.model.logit_scale.detach().exp() * image @ self.vectors.T


def main() -> None:
    """Distil a student from each."""
    root = Path(sys.argv[1])
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "teachers")
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
        names = ("accuracy", "teacher_accuracy", "agreement")
        print(kind, {name: round(run.metrics[name], 3) for name in names})


if __name__ == "__main__":
    main()
