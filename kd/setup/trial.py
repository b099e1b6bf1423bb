"""Trial steps: training steps on noise, made as the loop makes them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from kd.core.contracts import Backend, Teacher
from kd.core.types import Batch, Outputs
from kd.engine.criterion import Distillation

CPU_TRIAL = 16
"""Images of a trial on a CPU at most: all cores are busy, and a ViT-B answers in a second. An accelerator needs the
whole micro-batch to be busy."""


class Trial:
    """Training steps on noise, made as the loop makes them.

    A context manager: its end drops gradients and restores batch norm's statistics and the training mode.
    """

    def __init__(
        self, distillation: Distillation, teacher: Teacher, backend: Backend, image_size: int, images: int
    ) -> None:
        """Prepare steps; nothing is computed yet."""
        self.distillation, self.teacher, self.backend = distillation, teacher, backend
        self.image_size, self.images = image_size, images
        self._training = distillation.training
        self._buffers: dict[str, torch.Tensor] | None = None

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._buffers is not None:
            self.distillation.train(self._training).zero_grad()
            for name, buffer in self.distillation.named_buffers():
                buffer.copy_(self._buffers[name])

    def _begin(self, training: bool) -> None:
        if self._buffers is None:
            self._buffers = {name: buffer.clone() for name, buffer in self.distillation.named_buffers()}
        self.distillation.train(training)

    @cached_property
    def batch(self) -> Batch:
        """Noise, uint8, with labels of the task."""
        student: Any = self.distillation.student
        labels = self.distillation.task.no_labels(self.images, student.num_classes)
        return noise(self.images, self.image_size, self.backend, labels)

    @cached_property
    def outputs(self) -> Outputs:
        return self.teacher(self.batch)

    def ask(self) -> torch.Tensor:
        return self.teacher(self.batch).main

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Run the student's forward and backward, and an optimizer's step where one is given; return the loss."""
        self._begin(training=True)
        with self.backend.autocast():
            _, scores = self.distillation(self.batch, self.outputs)
        loss = scores["loss"].mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        self.distillation.zero_grad()
        self.backend.end_step()
        return loss.detach()

    def score(self) -> torch.Tensor:
        """Run the student's forward as a scoring pass does; return the losses [B]."""
        self._begin(training=False)
        with torch.no_grad(), self.backend.autocast():
            loss = self.distillation(self.batch, self.outputs)[1]["loss"]
        self.backend.end_step()
        return loss


def trial_images(micro_batch: int, backend: Backend) -> int:
    """Return how many images a trial has."""
    return min(micro_batch, CPU_TRIAL) if backend.device.type == "cpu" else micro_batch


def noise(images: int, size: int, backend: Backend, labels: torch.Tensor | None = None) -> Batch:
    """Make a batch of noise, uint8 [images, 3, size, size]; without labels all are class 0."""
    image = torch.randint(256, (images, 3, size, size), dtype=torch.uint8).to(backend.device)
    labels = torch.zeros(images, dtype=torch.int64) if labels is None else labels
    return Batch.of(image, labels.to(image.device))
