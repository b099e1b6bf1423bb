"""Use kd's criterion, frozen teacher and sifter in a plain PyTorch training loop.

Run: python examples/plain_loop.py
"""

from dataclasses import replace

import torch

from kd.core.types import Batch, Outputs, SiftContext
from kd.engine.criterion import Criterion
from kd.models.classifier import LogitsModel
from kd.models.live_teacher import LiveTeacher
from kd.parts.sifters.history import History, Options
from kd.setup.student import loss_term
from own_modules import blobs, network


def main() -> float:
    """Train a student for 30 steps and return the last loss."""
    torch.manual_seed(0)
    images, labels = blobs(512, seed=1).tensors
    teacher = LiveTeacher(LogitsModel(network(32)), torch.device("cpu"))
    student = network(4)
    criterion = Criterion([loss_term("kl", temperature=2.0), loss_term("ce", 0.1)])
    sifter = History(Options(keep=0.5), SiftContext.alone(labels, batch_size=64))
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for epoch in range(4):
        plan = sifter.plan(epoch, progress=epoch / 4)
        for ids, weight in zip(plan.ids.split(64), plan.weights.split(64), strict=True):
            batch = replace(Batch.of(images[ids], labels[ids], ids), weight=weight)
            scores = criterion(Outputs(student(batch.image)), teacher(batch), batch)
            sifter.observe(ids, scores["per_image"])
            loss = scores["loss"].mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
