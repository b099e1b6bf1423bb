"""Parts from outside the repository: a task, a loss, a sifter, a teacher and a backend
with options, one file each.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml
from pieces import merged

import kd
from kd.cli.command import explain_keys
from kd.deploy.export.export import ExportOptions, export
from kd.study.report.report import report

TASK = '''
"""Ordered classes: an answer is worse the farther its class stands from the label's."""

from dataclasses import dataclass, replace

from kd.core.scores import Column
from kd.parts.tasks.single_label import SCORES, SingleLabel, SingleLabelEvaluator


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The YAML keys of the task."""

    tolerance: int = 1
    """Classes by which an answer may miss."""


class Near(SingleLabelEvaluator):
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
CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(
    encoding="utf-8"
)
LOSS = (
    CONTRIBUTING.partition("## Add a loss")[2]
    .partition("```python\n")[2]
    .partition("```")[0]
)
"""As CONTRIBUTING.md has it, to be pasted."""
SIFTER = '''
"""Visit every n-th image of an order that is drawn anew each epoch."""

from dataclasses import dataclass

import torch

from kd.parts.sifters.none import Everything
from kd.core.facts import SifterFacts
from kd.core.types import Plan


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

from kd.core.types import Outputs


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

from kd.parts.backends._ddp import DDPBackend
from kd.core.facts import BackendFacts


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

        content = merged(base(photos, tmp_path), {"run": {"epochs": 1}})
        content["teacher"] = {
            "model": str(teacher),
            "precision": "fp32",
            "attention": "unfused",
            "min_accuracy": 0.0,
        }
        return merged(content, changes)

    return make


def test_a_task_is_one_file(outside, settings, capsys):
    """Console, report.md, manifest, page, model card and export show its columns;
    nothing of kd names them.
    """
    content = settings(
        task={"kind": outside("task", TASK), "tolerance": 0},
        run={"epochs": 2, "baseline": True},
    )
    run = kd.train(content)
    rows = [
        json.loads(line)
        for line in (run.folder / "metrics.jsonl").read_text().splitlines()
    ]
    val = [row for row in rows if row["kind"] == "val"]
    assert all(
        row["near"] == pytest.approx(row["accuracy"]) for row in val
    )  # within 0 classes: the right one
    assert run.metrics["near"] == max(row["near"] for row in val)
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert (manifest["decides"], manifest["task"]) == ("near", "ordered")
    page = report([run.folder], images=0, trust=True).file.read_text()
    card = (
        export(run.folder, options=ExportOptions(onnx=False), trust=True).folder
        / "README.md"
    ).read_text()
    for text in (capsys.readouterr().out, run.report, page, card):
        assert "answers within reach" in text
    assert "labels only" in run.report
    assert (
        kd.train(
            merged(content, {"run": {"name": "wide"}, "task": {"tolerance": 2}})
        ).metrics["near"]
        == 1.0
    )


def test_a_task_has_its_own_keys(outside, settings):
    with pytest.raises(kd.KdError, match=r"task\.toleranse.*tolerance"):
        kd.train(settings(task={"kind": outside("task", TASK), "toleranse": 0}))


def test_a_loss_is_one_file(outside, settings):
    run = kd.train(settings(losses=[{"kind": outside("loss", LOSS), "centred": False}]))
    assert run.metrics["kl"] >= 0


def test_an_own_part_is_explained(outside, command):
    kind = outside("loss", LOSS)
    answer = command("parts", kind)
    assert answer.code == 0, answer
    for text in (
        "Match the student's logits",
        "centred  (true or false, default true)",
        "mean logit first.",
    ):
        assert text in answer.out
    assert explain_keys(kind) in answer.out  # as `kd help lab_loss.part` has it


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "square().mean(1)",
            "square().mean()",
            r"^losses: 'lab_loss\.part' returns float32 \[\]\. Allowed: float32 \[2\]",
        ),
        ("square().mean(1)", "square()", r"^losses: .* returns float32 \[2, 3\]"),
        (
            "square().mean(1)",
            "double().square().mean(1)",
            r"^losses: .* returns float64 \[2\]",
        ),
        (
            "square().mean(1)",
            "square().mean(1).detach()",
            r"^losses: .* has no gradient",
        ),
        (
            "return difference_BC.square",
            "difference_BC.square",
            r"^losses: .* returns NoneType",
        ),
        (
            "dims: Dims)",
            "sizes: Dims)",
            r"^losses\[0\]: the function build .*build\(options, dims\)",
        ),
        (
            "from torch import Tensor, nn",
            "from torch import Tensor",
            r"raises NameError: .*'nn'.*part\.py, line \d+",
        ),
        (
            "class MSE(nn.Module):",
            "class MSE(nn.Module)",
            r"raises SyntaxError: .*part\.py",
        ),
        (
            "from torch import Tensor, nn",
            "import absent",
            r"raises ModuleNotFoundError: .*absent.*part\.py, line 3",
        ),
    ],
)
def test_a_loss_that_cannot_be_used_is_one_line(
    outside, settings, old: str, new: str, message: str
):
    assert old in LOSS
    with pytest.raises(kd.KdError, match=message) as caught:
        kd.train(settings(losses=[{"kind": outside("loss", LOSS.replace(old, new))}]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("role", ["loss", "sifter"])
def test_an_error_of_an_own_part_is_not_a_bug_of_kd(
    outside, settings, tmp_path, command, role: str
):
    text = LOSS.replace("difference_BC.mean(", "1 / 0 * difference_BC.mean(")
    if role == "sifter":
        text = SIFTER.replace("max(1, len", "1 // 0 + max(1, len")
    kind = outside(role, text)
    section = (
        {"losses": [{"kind": kind}]} if role == "loss" else {"sifter": {"kind": kind}}
    )
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings(**section)))
    answer = command("train", tmp_path / "own.yaml")
    assert answer.code == 2, answer
    assert "bug in kd" not in answer.err
    line = next(
        number
        for number, code in enumerate(text.splitlines(), 1)
        if "1 / 0" in code or "1 // 0" in code
    )
    last = answer.err.splitlines()[-1]
    assert "your own code" in last
    assert (
        f"ZeroDivisionError: {'division by zero' if role == 'loss' else 'integer'}"
        in last
    )
    assert (
        f"part.py, line {line}, in {'forward' if role == 'loss' else 'plan'})" in last
    )


def test_a_loss_that_does_not_say_what_it_reads_is_refused(outside, settings):
    old = LOSS.replace(
        'LossFacts(teacher=True, logits="softmax")', 'frozenset({"teacher"})'
    )
    assert old != LOSS
    with pytest.raises(
        kd.KdError,
        match=r"^losses\[0\]\.kind: .* returns frozenset.*kd\.core\.facts\.LossFacts",
    ):
        kd.train(settings(losses=[{"kind": outside("loss", old)}]))
    silent = LOSS.replace("def facts(", "def others(")
    with pytest.raises(
        kd.KdError, match=r"^losses\[0\]\.kind: .* does not declare its inputs"
    ):
        kd.train(settings(losses=[{"kind": outside("silent", silent)}]))


def test_a_sifter_with_options_is_one_file(outside, settings):
    run = kd.train(settings(sifter={"kind": outside("sifter", SIFTER), "every": 3}))
    epochs = [
        json.loads(line)
        for line in (run.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["trained"] for row in epochs if row["kind"] == "epoch"] == [
        8.0
    ]  # of 36


def test_an_outside_sifters_facts_are_checked(outside, settings):
    with pytest.raises(kd.KdError, match=r"data\.labels.*class"):
        kd.train(
            settings(
                sifter={"kind": outside("sifter", SIFTER), "by_class": True},
                data={"labels": "some"},
            )
        )


def test_a_teacher_is_one_file(outside, settings):
    content = settings()
    content["teacher"] = {
        "kind": outside("teacher", TEACHER),
        "model": "any",
        "scale": 0.5,
        "min_accuracy": 0.5,
    }
    run = kd.train(content)  # the classes of `photos` are red, green and blue
    assert run.metrics["teacher_accuracy"] == 1.0


def test_a_backend_with_options_is_one_file(outside, settings):
    kind = outside("backend", BACKEND)
    content = settings()
    content["backend"] = {"kind": kind, "precision": "fp32", "threads": 1}
    run = kd.train(content)
    manifest = json.loads((Path(run.folder) / "manifest.json").read_text())
    assert manifest["backend"] == "counting"
    assert sys.modules[kind].Counting.ended > 4
