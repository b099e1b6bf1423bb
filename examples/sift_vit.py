"""Classify images with a small ViT in a plain loop, with and without sifting: batches
are lists [images, labels].

Only the import line differs from a script for SageMaker's smart sifting. The images are
synthetic: bars in one of eight directions, from clear to hardly visible in noise.

Run: python examples/sift_vit.py
"""

import argparse
import time

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kd.sifting import (
    Loss,
    LossConfig,
    RelativeProbabilisticSiftConfig,
    SiftingBaseConfig,
    SiftingDataloader,
)

DIRECTIONS = 8
SIZE = 32  # pixels of an image's side


def bars(count: int, seed: int) -> TensorDataset:
    """Make noisy RGB images of bars of any direction, phase, contrast and colour."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(DIRECTIONS, (count,), generator=draw)
    angle = label[:, None, None] * (torch.pi / DIRECTIONS)
    grid = torch.linspace(-1, 1, SIZE)
    along = grid[None, :, None] * angle.sin() + grid[None, None, :] * angle.cos()
    phase, contrast = torch.rand(2, count, 1, 1, generator=draw)
    pattern = (9 * along + 2 * torch.pi * phase).sin() * (0.15 + contrast)
    colour = 0.5 + torch.rand(count, 3, 1, 1, generator=draw)
    return TensorDataset(
        pattern[:, None] * colour + torch.randn(count, 3, SIZE, SIZE, generator=draw),
        label,
    )


class ImageLoss(Loss):
    """The loss of each image, for sifting."""

    # the signature of smart sifting
    def loss(self, model, transformed_batch, original_batch=None):
        device = next(model.parameters()).device
        images, labels = (tensor.to(device) for tensor in original_batch)
        return nn.functional.cross_entropy(model(images), labels, reduction="none")


def train(
    train_data: TensorDataset, val: TensorDataset, epochs: int, beta: float | None
) -> tuple[float, float, float]:
    """Train; return accuracy, seconds and the share of images that were trained on."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIZE,
        patch_size=8,
        embed_dim=64,
        depth=3,
        num_heads=4,
        num_classes=DIRECTIONS,
    )
    loader = DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True)
    steps = all_steps = epochs * len(loader)
    if beta is not None:
        base = SiftingBaseConfig(sift_delay=len(loader))
        config = RelativeProbabilisticSiftConfig(
            beta_value=beta,
            loss_history_length=500,
            loss_based_sift_config=LossConfig(sift_config=base),
        )
        loader = SiftingDataloader(
            sift_config=config,
            orig_dataloader=loader,
            loss_impl=ImageLoss(),
            model=model,
        )
        steps = sum(loader.epoch_lengths(epochs))  # the schedule must end with the run
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    start = time.perf_counter()
    for _ in range(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - start
    model.eval()
    images, labels = val.tensors
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    return right.float().mean().item(), seconds, steps / all_steps


def main(argv: list[str] | None = None) -> dict[str, tuple[float, float, float]]:
    """Train with and without sifting and print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--images", type=int, default=2500)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--beta",
        type=float,
        default=2.0,
        help="keeps 1 / (1 + beta) after the first epoch",
    )
    args = parser.parse_args(argv)
    train_data = bars(args.images, seed=1)
    val = bars(1000, seed=2)
    results = {}
    for name, beta in (("everything", None), ("sifted", args.beta)):
        accuracy, seconds, share = train(train_data, val, args.epochs, beta)
        results[name] = accuracy, seconds, share
        print(f"{name:10}  accuracy {accuracy:.1%}  kept {share:.1%}  {seconds:.1f} s")
    return results


if __name__ == "__main__":
    main()
