"""Distil in a loop of accelerate, with stored teacher outputs of two views."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import kd
from own_modules import blobs, network


def main(folder: str, epochs: int = 4) -> torch.nn.Module:
    """Train and return a student; the folder gets teacher outputs."""
    torch.manual_seed(0)
    items = [(id, *item) for id, item in enumerate(blobs(128, seed=1))]
    student = network(4)
    accelerator = Accelerator()
    student, optimizer, loader = accelerator.prepare(
        student,
        torch.optim.AdamW(student.parameters(), lr=3e-3),
        DataLoader(items, batch_size=32, shuffle=True),
    )
    distiller = kd.Distiller(network(32), ["kl", "ce"], cache=folder)
    for epoch in range(epochs):
        view = epoch % 2
        for ids, images, labels in loader:
            shown = images.flip(-1) if view else images
            loss = distiller(shown, student(shown), labels, ids, view)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: kl {distiller.terms['kl'].mean():.3f}")
    return accelerator.unwrap_model(student)


if __name__ == "__main__":
    main("answers")
