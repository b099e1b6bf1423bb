"""Distil in the Trainer of transformers, with stored teacher outputs."""

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import kd
from own_modules import blobs, network


class Distilled(Trainer):
    """Take the loss from a `kd.Distiller` in place of the model's own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, **_: Any):
        logits = model(inputs["pixel_values"])
        ids = inputs["id"] if model.training else None  # evaluation has other images
        loss = self.distiller(inputs["pixel_values"], logits, inputs["labels"], ids)
        return (loss, {"logits": logits}) if return_outputs else loss


def main(folder: str, epochs: int = 2) -> Trainer:
    """Train a student and return its trainer; the folder gets teacher outputs."""
    torch.manual_seed(0)
    rows = [
        {"pixel_values": image, "labels": label, "id": id}
        for id, (image, label) in enumerate(blobs(64, seed=1))
    ]
    settings = TrainingArguments(
        folder, num_train_epochs=epochs, remove_unused_columns=False, report_to=[]
    )
    trainer = Distilled(network(4), settings, train_dataset=rows)
    trainer.model_accepts_loss_kwargs = False  # the loss is a batch's mean
    trainer.distiller = kd.Distiller(network(32), ["kl", "ce"], cache=folder)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main("answers")
