"""Distil in a LightningModule, with stored teacher outputs."""

from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

import kd
from own_modules import blobs, network


class Distilled(lightning.LightningModule):
    """Train a student; the teacher is in no checkpoint and no optimizer."""

    def __init__(self, student: torch.nn.Module, distiller: kd.Distiller) -> None:
        super().__init__()
        self.student = student
        self.distiller = distiller

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        ids, images, labels = batch
        return self.distiller(images, self.student(images), labels, ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=3e-3)


def main(folder: str, epochs: int = 2) -> torch.nn.Module:
    """Train and return a student; the folder gets teacher outputs."""
    items = [(id, *item) for id, item in enumerate(blobs(128, seed=1))]
    module = Distilled(network(4), kd.Distiller(network(32), ["kl", "ce"], folder))
    options = {"logger": False, "default_root_dir": folder}
    trainer = lightning.Trainer(max_epochs=epochs, **options)
    trainer.fit(module, DataLoader(items, batch_size=32, shuffle=True))
    return module.student


if __name__ == "__main__":
    main("answers")
