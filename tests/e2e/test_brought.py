"""Networks from outside at every door: kd-train, `--check`, kd-teach, kd.distill,
kd-export.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import yaml
from brought import FAULTS, HONEST, SIDE, Changed, normalized_in_place
from pieces import merged
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kd
from kd.core.errors import ModelError

PIXELS = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
CPU = {"kind": "cpu", "precision": "fp32", "threads": 1}


def build(name: str) -> nn.Module:
    """Return a network by name; kd-train calls this."""
    return FAULTS[name][0]() if name in FAULTS else HONEST[name]()


def flat_with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * SIDE**2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def data(count: int = 12) -> TensorDataset:
    image = torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    return TensorDataset(image, torch.arange(count) % 3)


def distill(
    teacher: nn.Module, student: nn.Module, train=None, **changes
) -> kd.Distilled:
    defaults = {
        "train": train or data(),
        "val": data(),
        "steps": 2,
        "batch_size": 4,
        "backend": CPU,
        "progress": False,
    }
    return kd.distill(teacher=teacher, student=student, **{**defaults, **changes})


@pytest.fixture
def section(monkeypatch):
    """A section of kd-train whose network is one of `brought.py`."""
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])

    def make(name: str) -> dict:
        return {
            "kind": "torch",
            "model": "test_brought:build",
            "args": {"name": name},
            **PIXELS,
        }

    return make


@pytest.mark.parametrize("loader", [False, True], ids=["dataset", "loader"])
@pytest.mark.parametrize("config_path", ["teacher", "student"])
@pytest.mark.parametrize("name", FAULTS)
def test_distill_refuses(name, config_path, loader):
    if config_path == "teacher" and "behind" in name:
        return  # its final weights hide nothing
    models = {"teacher": Changed(), "student": Changed(), config_path: build(name)}
    with pytest.raises(ModelError, match=rf"^{config_path}: .*{FAULTS[name][1]}"):
        distill(
            models["teacher"],
            models["student"],
            DataLoader(data(), 4) if loader else data(),
        )


@pytest.mark.parametrize("name", HONEST)
def test_distill_accepts(name):
    result = distill(Changed(), build(name))
    assert result.state.step == 2


@pytest.mark.parametrize(
    "name", sorted({*FAULTS} - {"a lazy layer"})
)  # kd runs it once: then it has weights
def test_kd_train_refuses_a_student(name, settings, section, refused, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**settings, "student": section(name)}))
    error = refused("train", file)
    assert re.search(FAULTS[name][1], error), error
    assert error.startswith("student."), error


@pytest.mark.parametrize(
    "name",
    ["attention over the batch", "an LSTM over the batch", "dropout that always acts"],
)
def test_kd_train_refuses_a_teacher(name, settings, section, refused, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({**settings, "teacher": {**section(name), "min_accuracy": 0}})
    )
    for flags in ((), ("--check",)):
        error = refused("train", file, *flags)
        assert FAULTS[name][1] in error, error
        assert error.startswith("teacher.model: "), error


def test_kd_teach_refuses_a_network_to_be_fitted(settings, section, refused, tmp_path):
    fit = {"epochs": 1, "lr": 1e-2, "folder": str(tmp_path / "teachers")}
    file = tmp_path / "run.yaml"
    teacher = {**section("attention over the batch"), "fit": fit}
    file.write_text(yaml.safe_dump({**settings, "teacher": teacher}))
    assert "alone has other outputs" in refused("teach", file)


@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_a_micro_batch_of_one_under_batch_norm_is_one_line(
    flags, settings, refused, tmp_path, monkeypatch
):
    """It said "this is a bug in kd", also in --check."""
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    student = {"kind": "torch", "model": "test_brought:flat_with_batch_norm", **PIXELS}
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            merged(settings, {"data": {"micro_batch": 1}}) | {"student": student}
        )
    )
    error = refused("train", file, *flags)
    assert error.startswith("student.model: ")
    assert "batch norm" in error
    assert "one value" in error


def test_an_export_refuses_what_an_earlier_kd_trained(tmp_path):
    """A student of an older kd, which asked nothing: 78.9 % stood on its card, alone
    its images had 25.0 %.
    """
    levels = TensorDataset((data().tensors[0] * 255).round() / 255, data().tensors[1])
    result = distill(Changed(), Changed(), val=levels)
    result.student.after = lambda logits: logits - logits.mean(0)
    with pytest.raises(ModelError, match=r"^student: .*alone has other outputs"):
        result.export(tmp_path / "export", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert not (tmp_path / "export").exists()


def test_a_teacher_that_changes_its_input_teaches_as_one_that_does_not():
    plain = Changed(before=lambda image: (image - 0.5) / 0.25)
    dataset = data()
    inplace = Changed(before=normalized_in_place)
    inplace.load_state_dict(plain.state_dict())
    first = Changed()
    students = [copy.deepcopy(first), copy.deepcopy(first)]
    before = dataset.tensors[0].clone()
    results = [
        distill(t, s, dataset, val=dataset)
        for t, s in zip((plain, inplace), students, strict=True)
    ]
    assert torch.equal(dataset.tensors[0], before)
    assert results[0].metrics == results[1].metrics
    for name, tensor in students[0].state_dict().items():
        assert torch.equal(tensor, students[1].state_dict()[name]), name


def test_a_caller_s_modules_and_generators_are_as_they_were():
    """A teacher in evaluation came back in training, with frozen batch norm too; the
    next random numbers were equal.
    """
    import random

    teacher = HONEST["batch norm"]().eval()
    student = HONEST["dropout"]()
    before = copy.deepcopy(teacher.state_dict())
    numbers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        torch_state = torch.get_rng_state()
        state = random.getstate()
        distill(teacher, student)
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert random.getstate() == state
        numbers.append(torch.rand(()).item())
    assert numbers[0] != numbers[1]
    assert not any(module.training for module in teacher.modules())
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in teacher.state_dict().items()
    )
    teacher = FAULTS["a centre learned in evaluation"][0]()
    with pytest.raises(ModelError, match=r"^teacher: .*centre"):
        distill(teacher, student)
    assert teacher.centre.abs().sum() == 0


def test_scores_that_are_not_finite_are_said(capsys):
    """One black image made the scores NaN, and the log had no word of it."""
    val = data()
    val.tensors[0][-1] = 0.0
    student = Changed(before=lambda image: image / image.std((1, 2, 3), keepdim=True))
    result = distill(Changed(), student, val=val, progress=True)
    assert result.metrics["nll"] != result.metrics["nll"]
    output = capsys.readouterr()
    assert "validation: " in output.out + output.err
    assert (
        "nll"
        in (output.out + output.err)
        .partition("validation: ")[2]
        .partition("are NaN")[0]
    )


def test_a_student_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        student = Changed()
    with pytest.raises(ModelError, match=r"^student: .*inference_mode"):
        distill(Changed(), student)


def test_a_student_that_shares_its_backbone_with_the_teacher_is_refused():
    teacher = Changed()
    student = Changed()
    student.plain = teacher.plain
    before = copy.deepcopy(teacher.state_dict())
    with pytest.raises(
        ModelError, match=r"^student: shares 2 tensors with teacher.*plain"
    ):
        distill(teacher, student)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in teacher.state_dict().items()
    )
    distill(teacher, copy.deepcopy(teacher))
