"""A device backend is one file: what kd must know of it stands in its facts."""

import json
from pathlib import Path

import pytest
import torch
from pieces import base, merged

import kd
from kd import config
from kd.cluster.requests import Job, _backend
from kd.core.host import cores
from kd.setup.build import build_backend, build_optimizer
from kd.setup.build_teacher import TeacherFactory, load_fitted, teacher_mode
from kd.setup.data import open_sources, workers_of
from kd.setup.recipe import resolve
from kd.setup.student import build_distillation


@pytest.fixture(autouse=True)
def lab(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def settings(photos, teacher, tmp_path):
    """Return a configuration on the laboratory's device, with a fitted teacher."""

    def make(cpu=False, **changes):
        values = merged(base(photos, tmp_path), {"run": {"epochs": 1}})
        values["teacher"] = {
            "model": str(teacher),
            "precision": "fp32",
            "attention": "unfused",
            "min_accuracy": 0.0,
        }
        if not cpu:
            values["backend"] = {"kind": "lab.device", "precision": "fp32", "chip": 1}
        return merged(values, changes)

    return make


def losses(run) -> list[float]:
    rows = [
        json.loads(line)
        for line in (Path(run.folder) / "metrics.jsonl").read_text().splitlines()
    ]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_it_trains_to_the_losses_of_the_cpu(settings):
    """Inference mode and fused optimizers, which it lacks, change no loss by much."""
    run = kd.train(settings())
    cpu_run = kd.train(settings(cpu=True, run={"name": "cpu"}))
    assert len(losses(run)) > 1
    assert losses(run) == pytest.approx(losses(cpu_run), rel=1e-4)
    manifest = json.loads((Path(run.folder) / "manifest.json").read_text())
    # torch's threads are those of the CPU
    assert (manifest["backend"], manifest["threads"]) == ("lab", 0)


def test_missing_features_are_read_from_facts(settings):
    recipe = resolve(config.load(settings(data={"workers": "auto"})))
    backend = build_backend(recipe.backend)
    data = open_sources(recipe.data)
    teachers = load_fitted(recipe, data)
    mode = teacher_mode(recipe.teacher, teachers.model, backend)
    live = TeacherFactory(
        recipe.teacher, teachers.model, backend, recipe.data.image_size
    )(mode)
    with live.frozen():
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    optimizer = build_optimizer(
        recipe, build_distillation(recipe, teachers, 2), backend
    )
    assert optimizer.defaults["fused"] is False
    cpu = build_backend(resolve(config.load(settings(cpu=True))).backend)
    # it is an accelerator
    assert workers_of(recipe.data, backend) == max(1, cores() - 1)
    assert workers_of(recipe.data, cpu) == (1 if cores() > 2 else 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": {"kind": "muon"}},
            r"^optimizer\.kind: is muon, which is untested on lab\.device",
        ),
        (
            {"optimizer": {"zero": True, "on_nonfinite": "skip"}},
            r"^optimizer\.on_nonfinite: .*the laboratory's ZeRO",
        ),
        (
            {"teacher": {"runtime": "onnxruntime"}},
            r"^teacher\.runtime: .* the backend is 'lab\.device'",
        ),
        ({"backend": {"chop": 1}}, r"^backend\.chop: .*chip"),
    ],
)
def test_unsupported_options_are_one_line_errors(settings, changes, message):
    with pytest.raises(kd.KdError, match=message):
        kd.train(settings(**changes))


def test_an_instance_that_it_does_not_run_on_is_refused():
    job = {
        "name": "a",
        "keys": {"backend.kind": "lab.device"},
        "image": "i",
        "role": "r",
    }
    errors = []
    assert (
        _backend(Job(**job, instance="ml.lab.xlarge", output="s3://b"), errors)
        == "lab.device"
    )
    assert errors == []
    _backend(Job(**job, instance="ml.g5.xlarge", output="s3://b"), errors)
    assert "'lab.device' runs on ml.lab*" in str(errors[0])
