"""Train a fake-quantized student on by kd's own loop: against the run's teacher, and against its own float32 self.

Distilling from the float32 model repairs post-training quantization with few images (arXiv:2601.20088). Loss terms on
features are left out: the student gives logits alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kd.config.reads import needs
from kd.config.schema import SifterSection
from kd.config.tuning import Tuning
from kd.core.types import Batch, Dims, Needs, Outputs
from kd.engine.criterion import Criterion, Distillation
from kd.engine.loop import train
from kd.files.run_dir import Memory
from kd.jobs.progress.console import Console
from kd.models.classifier import Classifier
from kd.parts import registry
from kd.setup.build import Results, Setting, build_run, distributed
from kd.setup.data import open_data
from kd.setup.recipe import Recipe
from kd.setup.student import build_criterion
from kd.setup.teacher import Teachers, load_fitted

RATE = 0.1  # peak learning rate, as a share of the run's
SELF = {"softmax": "kl", "sigmoid": "binary_kl"}
"""The loss against the float32 self, by the function that reads a logit."""


class Self(nn.Module):
    """The divergence of a student from its own float32 self."""

    def __init__(self, own: Classifier, logits: str, dims: Dims) -> None:
        super().__init__()
        kind = SELF[logits]
        self.loss = registry.build("losses", kind, registry.default_options("losses", kind), "losses", dims=dims)
        self.needs = Needs(logits=logits)
        self._own = [own]  # in a list: nobody trains it, and no checkpoint holds it

    def forward(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the divergence of each image [B]."""
        with torch.no_grad():
            own = self._own[0](batch.image)
        return self.loss(student, own, batch)


def repair(recipe: Recipe, recorded: Mapping[str, Any], fake: Classifier, own: Classifier, steps: int) -> None:
    """Train `fake` in place, on the run's views, in float32, with a tenth of the run's learning rate and no sifter.

    `recorded`: what the run chose (threads, the teacher's mode), by name. `own`: the same student in float32.
    """
    reads = needs(recipe.student.losses)
    losses = tuple(
        one for one, read in zip(recipe.student.losses, reads, strict=True) if read.logits and not read.features
    )
    needed = any(one.teacher for one in needs(losses))
    teacher = replace(recipe.teacher, needed=needed, logits=needed, features=())
    student = replace(recipe.student, losses=losses, features=(), precision="fp32")
    loop = replace(
        recipe.loop,
        steps=steps,
        every=replace(recipe.loop.every, log=max(1, steps // 5), evaluate=steps, checkpoint=steps),
        optimizer=replace(recipe.loop.optimizer, lr=RATE * recipe.loop.optimizer.lr, weight_decay=0.0, ema=0.0),
        tuning=Tuning(),
        patience=0,
        sifter=SifterSection(options=registry.default_options("sifters", "none")),
        profile=(),
    )
    chosen = {**recorded, "student": "fp32+unfused", "sifter": "none"}
    with distributed(recipe.backend) as backend, Console("repair", scores=student.task.scores) as console:
        data = open_data(recipe.data, backend)
        teachers = load_fitted(teacher, data) if needed else Teachers(None, data)
        data = teachers.data
        own.to(backend.device).eval()
        dims = Dims(len(data.classes), 0, 0, classes=tuple(data.classes), labels=data.labels)
        base = build_criterion(losses, [dims], loop.seed, labelled=data.labelled_share())
        terms: list[tuple[str, float, nn.Module]] = list(zip(base.names, base.weights, base.terms, strict=True))
        terms.append(("self", 1.0, Self(own, student.task.logits, dims)))
        made = Distillation(fake, Criterion(terms, labelled=base.labelled), student.task)
        setting = Setting(teachers, backend, recipe.backend)
        train(build_run(teacher, student, loop, setting, Results(Memory(), console, chosen), made).run)
        fake.cpu()
