"""Distill your own module into a smaller one, on your own dataset, without YAML, timm
or a run folder.

Run: python examples/own_modules.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import kd


def blobs(count: int, seed: int) -> TensorDataset:
    """Make noisy 8 x 8 RGB images of four classes; the class is the bright quarter."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (count,), generator=generator)
    image = torch.randn(count, 3, 8, 8, generator=generator)
    for i, quarter in enumerate(label.tolist()):
        row, column = divmod(quarter, 2)
        image[i, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 0.5
    return TensorDataset(image, label)


def network(width: int) -> nn.Module:
    """Make a small convolutional network."""
    body = [
        nn.Conv2d(3, width, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(width, width, 3, 2, 1),
        nn.GELU(),
    ]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * width, 4))


def main() -> float:
    """Fit a teacher on the labels, distill it, and return the student's accuracy."""
    torch.manual_seed(0)
    train = blobs(512, seed=1)
    val = blobs(256, seed=2)
    teacher = network(16)
    student = network(4)
    common = {"train": train, "val": val, "optimizer": {"lr": 1e-2}}
    kd.distill(
        teacher=teacher,
        student=teacher,
        losses=[{"kind": "ce"}],
        epochs=5,
        progress=False,
        **common,
    )
    losses = [{"kind": "kl", "temperature": 2.0}, {"kind": "ce", "weight": 0.1}]
    distilled = kd.distill(
        teacher=teacher, student=student, losses=losses, epochs=5, **common
    )
    print(
        {
            name: round(value, 3)
            for name, value in distilled.metrics.items()
            if name != "kind"
        }
    )
    return distilled.metrics["accuracy"]


if __name__ == "__main__":
    main()
