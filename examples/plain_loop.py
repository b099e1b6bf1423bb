"""Use kd's losses, frozen teacher and sifter in a plain PyTorch training loop.

Run: python examples/plain_loop.py
"""

import torch

import kd
from kd.core.types import SiftContext
from kd.parts.sifters.history import History, Options
from own_modules import blobs, network


def main() -> float:
    """Train a student for 30 steps and return the last loss."""
    torch.manual_seed(0)
    images, labels = blobs(512, seed=1).tensors
    losses = [{"kind": "kl", "temperature": 2.0}, {"kind": "ce", "weight": 0.1}]
    distiller = kd.Distiller(network(32), losses)
    student = network(4)
    sifter = History(Options(keep=0.5), SiftContext.alone(labels, batch_size=64))
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for epoch in range(4):
        plan = sifter.plan(epoch, progress=epoch / 4)
        for ids, weight in zip(plan.ids.split(64), plan.weights.split(64), strict=True):
            batch = images[ids]
            loss = distiller(batch, student(batch), labels[ids], ids, weight=weight)
            sifter.observe(ids, distiller.per_image)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
