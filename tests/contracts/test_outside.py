"""Parts from outside the repository: a task, a loss, a sifter, a teacher and a backend with options, one file each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pieces import merged

import kd
from kd.export.export import Options as ExportOptions
from kd.export.export import export
from kd.report.report import report

TASK = '''
"""Ordered classes: an answer is worse the farther its class stands from the label's."""

from dataclasses import dataclass, replace

from kd.scores import Column
from kd.tasks.single_label import SCORES, Evaluator, SingleLabel


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the task."""

    tolerance: int = 1
    """Classes by which an answer may miss."""


class Near(Evaluator):
    def __init__(self, setting, scores, tolerance):
        super().__init__(setting, scores)
        self.tolerance = tolerance

    def _row(self, batch, student_BC, teacher_BC):
        row, weight_B = super()._row(batch, student_BC, teacher_BC), batch.weight * batch.labelled
        for name, logits_BC in (("near", student_BC), ("teacher_near", teacher_BC)):
            if logits_BC is not None:
                near_B = (logits_BC.argmax(-1) - batch.label).abs() <= self.tolerance
                row = {name: (weight_B * near_B).double().sum(), **row}
        return row


class Ordered(SingleLabel):
    name = "ordered"
    scores = replace(SCORES, own=(Column("near", "answers within reach"), *SCORES.own))

    def __init__(self, tolerance):
        self.tolerance = tolerance

    def evaluator(self, setting):
        return Near(setting, self.scores, self.tolerance)


def build(options):
    return Ordered(options.tolerance)
'''
LOSS = '''
"""The squared difference of the logits."""

from dataclasses import dataclass

from torch import nn

from kd.types import Needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the loss."""

    centred: bool = True
    """Subtract each image's mean logit first."""


class MSE(nn.Module):
    needs = Needs(teacher=True, logits="softmax")

    def __init__(self, centred):
        super().__init__()
        self.centred = centred

    def forward(self, student, teacher, batch):
        difference_BC = student.logits.float() - teacher.logits.detach().float()
        if self.centred:
            difference_BC = difference_BC - difference_BC.mean(1, keepdim=True)
        return difference_BC.square().mean(1)


def build(options, dims):
    return MSE(options.centred)
'''
SIFTER = '''
"""Visit every n-th image of an order that is drawn anew each epoch."""

from dataclasses import dataclass

import torch

from kd.sifters.none import Everything
from kd.types import Plan, SifterFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the sifter."""

    every: int = 2
    """Which images are visited."""
    by_class: bool = False
    """Refused where images have several labels."""


class EveryNth(Everything):
    def __init__(self, every, context):
        super().__init__(context)
        self.every = every

    def plan(self, epoch, progress):
        plan, size = super().plan(epoch, progress), self.context.batch_size
        count = max(1, len(plan.ids) // self.every // size) * size
        return Plan(plan.ids[:count], torch.ones(count))


def facts(options):
    return SifterFacts(by_class=options.by_class)


def build(options, context):
    return EveryNth(options.every, context)
'''
TEACHER = '''
"""Answer by the brightest channel of an image."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kd.types import Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the teacher."""

    scale: float = 1.0
    """Of the logits."""


class Brightest(nn.Module):
    runtime, reads_ids, num_features = "torch", False, 0

    def __init__(self, scale, classes):
        super().__init__()
        self.scale, self.classes, self.network = scale, classes, nn.Identity()

    def identity(self):
        return {"teacher": f"brightest {self.scale}"}

    def forward(self, image):
        return Outputs(self.scale * image.float().mean((2, 3)))


def build(options, spec, image_size, features):
    return Brightest(options.scale, list(spec.classes))
'''
BACKEND = '''
"""The CPU, with a count of its steps."""

from dataclasses import dataclass

import torch

from kd.backends._ddp import DDPBackend
from kd.types import BackendFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the backend."""

    threads: int = 1
    """Of torch."""


class Counting(DDPBackend):
    kind, init = "counting", "gloo"
    ended = 0

    def end_step(self):
        Counting.ended += 1


def facts(options):
    return BackendFacts(cpu=True, threads=options.threads)


def build(options, precision, timeout_seconds):
    torch.set_num_threads(options.threads)
    return Counting(torch.device("cpu"), precision, timeout_seconds)
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Write a module and return its dotted name."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, text: str) -> str:
        package = folder / f"lab_{name}"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text(text)
        return f"lab_{name}.part"

    yield write
    for name in [name for name in sys.modules if name.startswith("lab_")]:
        del sys.modules[name]


@pytest.fixture
def settings(photos, teacher, tmp_path):
    """A configuration whose teacher is fitted already."""

    def make(**changes):
        from pieces import base

        made = merged(base(photos, tmp_path), {"run": {"epochs": 1}})
        made["teacher"] = {"model": str(teacher), "precision": "fp32", "attention": "unfused", "min_accuracy": 0.0}
        return merged(made, changes)

    return make


def test_a_task_is_one_file(outside, settings, capsys):
    """Console, report.md, manifest, page, model card and export show its columns; nothing of kd names them."""
    made = settings(task={"kind": outside("task", TASK), "tolerance": 0}, run={"epochs": 2, "baseline": True})
    run = kd.train(made)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    val = [row for row in rows if row["kind"] == "val"]
    assert all(row["near"] == pytest.approx(row["accuracy"]) for row in val)  # within 0 classes: the right one
    assert run.metrics["near"] == max(row["near"] for row in val)
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert (manifest["decides"], manifest["task"]) == ("near", "ordered")
    page = report([run.folder], images=0, trust=True).file.read_text()
    card = (export(run.folder, options=ExportOptions(onnx=False), trust=True).folder / "README.md").read_text()
    for text in (capsys.readouterr().out, run.report, page, card):
        assert "answers within reach" in text
    assert "labels only" in run.report
    assert kd.train(merged(made, {"run": {"name": "wide"}, "task": {"tolerance": 2}})).metrics["near"] == 1.0


def test_a_task_has_its_own_keys(outside, settings):
    with pytest.raises(kd.KdError, match=r"task\.toleranse.*tolerance"):
        kd.train(settings(task={"kind": outside("task", TASK), "toleranse": 0}))


def test_a_loss_is_one_file(outside, settings):
    run = kd.train(settings(losses=[{"kind": outside("loss", LOSS), "centred": False}]))
    assert run.metrics["kl"] >= 0


def test_a_loss_that_does_not_say_what_it_reads_is_refused(outside, settings):
    old = LOSS.replace('Needs(teacher=True, logits="softmax")', 'frozenset({"teacher"})')
    with pytest.raises(kd.KdError, match=r"losses\[0\]\.kind.*kd\.types\.Needs"):
        kd.train(settings(losses=[{"kind": outside("loss", old)}]))


def test_a_sifter_with_options_is_one_file(outside, settings):
    run = kd.train(settings(sifter={"kind": outside("sifter", SIFTER), "every": 3, "gate": "off"}))
    epochs = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["trained"] for row in epochs if row["kind"] == "epoch"] == [8.0]  # of 36


def test_what_a_sifter_from_outside_reads_is_known(outside, settings):
    with pytest.raises(kd.KdError, match=r"data\.labels.*class"):
        kd.train(settings(sifter={"kind": outside("sifter", SIFTER), "by_class": True}, data={"labels": "some"}))


def test_a_teacher_is_one_file(outside, settings):
    made = settings()
    made["teacher"] = {"kind": outside("teacher", TEACHER), "model": "any", "scale": 0.5, "min_accuracy": 0.5}
    run = kd.train(made)  # the classes of `photos` are red, green and blue
    assert run.metrics["teacher_accuracy"] == 1.0


def test_a_backend_with_options_is_one_file(outside, settings):
    kind = outside("backend", BACKEND)
    made = settings()
    made["backend"] = {"kind": kind, "precision": "fp32", "threads": 1}
    run = kd.train(made)
    manifest = json.loads((Path(run.folder) / "manifest.json").read_text())
    assert manifest["backend"] == "counting"
    assert sys.modules[kind].Counting.ended > 4
