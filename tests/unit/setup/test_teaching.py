"""The live teacher's kernel: when another form is worth trying, what is asked for by name, what is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from pieces import Asks

from kd import config
from kd.artifacts.memory import Memory
from kd.engine.loop import train
from kd.errors import ConfigError, KdError, MissingExtra, ModelError
from kd.models.classifier import Classifier, Ensemble
from kd.progress.console import Console
from kd.setup.build import build_backend, build_run
from kd.setup.data import open_sources
from kd.setup.loaders import split_batch
from kd.setup.modes import ExecutionMode, Workload, compare, require, worth_trying
from kd.setup.recipe import Session, resolve
from kd.setup.teacher import choose_teacher, load_teacher, validation_images
from kd.setup.trial import attempt, clear_winner, fastest, milliseconds

LONG = ("run.steps=1000000000", "student.compile=off")
"""So many steps that everything is worth trying; built, never trained."""


@pytest.fixture
def built(settings, capsys):
    """Build a run; return it, what the manifest gets, and what was printed."""

    def alone(chosen):
        features = resolve(chosen).reads.features
        return load_teacher(chosen.teacher, ("apple", "fig", "pear"), chosen.data.image_size, features)

    def make(*overrides, pinned=None, model=alone):
        chosen = config.load(settings, overrides)
        data, backend = open_sources(chosen.data), build_backend(chosen.backend)
        built = build_run(resolve(chosen), data, backend, model(chosen), Memory(), Console("tiny"), pinned or {})
        return built.run, built.facts, capsys.readouterr().out

    return make


def minimal(*overrides) -> config.Config:
    sections = {
        "data": {"kind": "imagefolder", "root": "photos", "batch_size": 8},
        "student": {"model": "vit_tiny_patch16_224"},
        "teacher": {"model": "vit_small_patch16_224"},
        "losses": [{"kind": "kl"}],
        "backend": {"kind": "cpu"},
    }
    return config.load(sections, overrides)


def refusals(*overrides, features=False) -> list[KdError]:
    """Return what is refused when such a configuration is loaded."""
    losses = ["losses=[{kind: feature}]"] if features else []
    try:
        minimal(*overrides, *losses)
    except KdError as error:
        return getattr(error, "errors", [error])
    return []


@pytest.fixture
def cpu():
    return build_backend(minimal("backend.threads=1").backend)


# ------------------------------------------------------------------------------------------------ worth trying


@pytest.mark.parametrize(
    ("seconds", "form", "expected"),
    [
        (5999.0, "compiled", False),  # a minute is more than a hundredth of it
        (6000.0, "compiled", True),
        (1499.0, "onnxruntime", False),
        (1500.0, "onnxruntime", True),
        (1500.0, "openvino", True),
        (0.0, "onnxruntime", False),
        (190.0, "onnxruntime", False),  # the whole of configs/vit_food.yaml
    ],
)
def test_a_trial_costs_a_hundredth_of_the_work_at_most(seconds, form, expected):
    assert worth_trying(seconds, form) is expected


def test_the_work_of_a_run():
    # 1,000 images in 5 epochs; on 2 ranks 2,500 each; in trials of 16 images and 80 ms: 12.5 s
    assert minimal("run.epochs=5").run.images(1000, 8) == 5000
    assert minimal("run.steps=30").run.images(1000, 8) == 240
    assert Workload(2500, 16, 80.0).seconds == 12.5


@pytest.mark.parametrize(
    ("text", "numerics", "rebuilt"),
    [
        ("fp32+fused", "fp32", False),
        ("bf16+unfused+compiled", "bf16", True),
        ("fp32+onnxruntime", "fp32", True),
        ("int8+onnxruntime", "int8+onnxruntime", True),
        ("int8+fused", "int8+torch", True),
        ("int8+unfused+compiled", "int8+torch", True),
    ],
)
def test_what_a_manifest_says_can_be_read(text, numerics, rebuilt):
    mode = ExecutionMode.parse(text)
    assert str(mode) == text
    assert (mode.numerics, mode.rebuilt) == (numerics, rebuilt)


def sleeping(seconds: float):
    def work() -> torch.Tensor:
        time.sleep(seconds)
        return torch.ones(1)

    return work


def test_a_candidate_must_win_clearly():
    plain = [20.0, 20.0, 20.0, 60.0]
    assert clear_winner({"plain": plain, "other": [19.5, 19.5, 19.5, 19.5]}, 0.05) == "plain"
    assert clear_winner({"plain": plain, "other": [19.0, 19.0, 19.0, 90.0], "third": [21.0]}, 0.05) == "other"
    assert clear_winner({"plain": plain, "other": [10.0, 10.0, 21.0, 61.0]}, 0.05) == "plain"  # only in two of four
    assert clear_winner({"plain": [20.0], "other": [18.0], "third": [17.0]}, 0.05) == "third"
    assert clear_winner({"plain": [20.0, 20.0], "other": [25.0, 25.0]}, 0.0) == "plain"


def test_candidates_are_compared_where_the_run_is_long_enough(cpu):
    work = {"fp32+fused": sleeping(0.03), "fp32+onnxruntime": sleeping(0.0)}
    best, candidates, long = "fp32+fused", ["fp32+onnxruntime"], Workload(10**8, 16, 20.0)
    name, table, text = compare(best, candidates, work.__getitem__, long, cpu)
    assert name == "fp32+onnxruntime"  # thirty milliseconds against none
    assert table.keys() == {best, *candidates}
    assert "(16 images, 125000 s of work)" in text
    assert compare(best, candidates, work.__getitem__, Workload(16, 16, 20.0), cpu) == (best, {}, "")
    assert compare(best, candidates, work.__getitem__, Workload(0, 16, 0.0), cpu) == (best, {}, "")


def test_a_candidate_that_cannot_be_run_is_said_and_left(cpu):
    def work(name: str):
        if name == "fp32+fused":
            return sleeping(0.001)
        raise RuntimeError("no compiler here\nand a long explanation")

    name, _, told = compare("fp32+fused", ["fp32+fused+compiled"], work, Workload(10**9, 1, 0.0), cpu)
    assert name == "fp32+fused"
    assert "fp32+fused+compiled cannot be run here (RuntimeError: no compiler here and a long explanation)" in told


def test_what_is_named_and_cannot_be_run(cpu):
    def fails() -> torch.Tensor:
        raise RuntimeError("no compiler here")

    assert attempt(fails, cpu) == "RuntimeError: no compiler here"
    assert attempt(sleeping(0.0), cpu) == ""
    with pytest.raises(ModelError, match=r"^student\.compile: 'x' is asked for, but RuntimeError: no compiler here\. "):
        require(fails, "student.compile", "'x' is asked for")
    assert milliseconds(sleeping(0.005), cpu) >= 5
    first_call = iter([0.7])  # as of a compiler; hopeless, if it were measured
    slow_once = {"a": sleeping(0.02), "b": lambda: sleeping(next(first_call, 0.001))()}
    assert fastest(slow_once, cpu, warm=True)[0] == "b"


# --------------------------------------------------------------------------------------------- chosen in a run


def test_in_a_short_run_nothing_is_tried(built):
    _, facts, out = built("teacher.attention=auto", "run.epochs=5")
    assert facts["choices"]["teacher"] in ("fp32+fused", "fp32+unfused")
    assert facts["measured_ms"]["teacher"].keys() == {"fp32+fused", "fp32+unfused"}
    assert "teacher_error" not in facts
    assert "teacher:" not in out


def test_in_a_long_run_the_runtimes_race(built):
    pytest.importorskip("openvino", reason="pip install 'kd[openvino]'")
    run, facts, out = built(*LONG, "teacher.compile=off")
    names = {"fp32+unfused", "fp32+onnxruntime", "fp32+openvino"}
    assert facts["measured_ms"]["teacher"].keys() == names
    assert facts["choices"]["teacher"] in names
    assert out.startswith(f"teacher: {facts['choices']['teacher']}: fp32+onnxruntime ")
    assert "times as fast as fp32+unfused; fp32+openvino" in out
    pinned, facts, out = built(*LONG, "teacher.compile=off", pinned=facts["choices"])
    assert facts["measured_ms"] == {}
    assert out == ""
    answers = [made.teacher.model for made in (run, pinned)]
    assert type(answers[0]) is type(answers[1])


def curve(run) -> list[float]:
    train(run)
    return [row["loss"] for row in run.store.rows if row["kind"] == "train"]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_run_with_another_runtime_is_the_run_to_rounding(built, runtime):
    pytest.importorskip(runtime, reason="pip install 'kd[openvino]'")
    exact, _, _ = built()
    other, facts, out = built(f"teacher.runtime={runtime}")
    assert facts["choices"]["teacher"] == f"fp32+{runtime}"
    assert 0 <= facts["teacher_error"]["largest"] < 2e-5
    assert f"teacher: fp32+{runtime}; its logits differ from torch float32's by" in out
    # Rounding of the targets, 1e-7, through a few steps of AdamW.
    torch.testing.assert_close(torch.tensor(curve(exact)), torch.tensor(curve(other)), rtol=1e-3, atol=1e-5)


def test_int8_says_how_far_it_is_off(built):
    _, facts, out = built("teacher.precision=int8")
    error = facts["teacher_error"]
    assert facts["choices"]["teacher"] == "int8+onnxruntime"
    assert error["images"] == 13
    assert 1e-3 < error["of_std"] < 1.0
    assert f"by {error['largest']:.2g} at most, {error['of_std']:.2g} of their standard deviation (13 valid" in out


def test_the_error_is_that_of_the_logits(built, settings):
    _, facts, _ = built("teacher.precision=int8")
    chosen = config.load(settings, ["teacher.precision=int8"])
    data, backend = open_sources(chosen.data), build_backend(chosen.backend)
    model = load_teacher(chosen.teacher, data.train.classes, chosen.data.image_size)
    images = validation_images(data)
    assert images.shape == (13, 3, 16, 16)
    session = Session(backend, data, split_batch(chosen.data, 1, len(data.train)))
    taught = choose_teacher(session, chosen.teacher, model, 0, "")
    live = taught.live
    assert live.images == 0  # trials are not the run's
    with torch.no_grad():
        reference = model.eval()(images).logits
        said = live.model(images).logits
    largest = (said - reference).abs().max().item()
    assert taught.error["largest"] == pytest.approx(largest, abs=1e-5)
    assert taught.error["of_std"] == pytest.approx(largest / reference.std(correction=0).item(), rel=1e-3)
    assert facts["teacher_error"] == taught.error


def test_several_teachers_are_as_many_graphs(built):
    def ensemble(settings):
        alone = load_teacher(settings.teacher, ("apple", "fig", "pear"), settings.data.image_size)
        other = copy.deepcopy(alone)
        with torch.no_grad():
            other.network.head.bias += torch.tensor([1.0, 0.0, -1.0])
        return Ensemble([alone, other], [1.0, 3.0])

    _, facts, out = built("teacher.runtime=onnxruntime", model=ensemble)
    assert facts["choices"]["teacher"] == "fp32+onnxruntime"
    assert facts["teacher_error"]["largest"] < 2e-5
    assert "its logits differ from torch float32's" in out


def test_a_teacher_that_cannot_be_exported(built):
    odd = Classifier(Asks(), 3, 0)
    with pytest.raises(
        ModelError, match=r"^teacher\.runtime: 'fp32\+onnxruntime' is asked for, but torch\.export cannot"
    ):
        built("teacher.runtime=onnxruntime", model=lambda _: odd)
    _, facts, out = built(*LONG, "teacher.compile=off", model=lambda _: odd)
    assert facts["choices"]["teacher"] == "fp32+unfused"
    assert "fp32+onnxruntime cannot be run here (torch.export cannot express this network" in out


@pytest.mark.slow
def test_without_a_compiler(written, tmp_path):
    """On a machine of its own kind: no C++ compiler, nothing compiled before."""
    script = (
        "import sys; from kd import config; from kd.errors import KdError\n"
        "from kd.artifacts.memory import Memory; from kd.progress.console import Console\n"
        "from kd.setup.build import build_backend, build_run; from kd.setup.data import open_sources\n"
        "from kd.setup.recipe import resolve; from kd.setup.teacher import load_teacher\n"
        "for mode in ('auto', 'on'):\n"
        "    c = config.load(sys.argv[1], [*sys.argv[2:], 'teacher.runtime=torch', 'teacher.compile=' + mode])\n"
        "    data, backend = open_sources(c.data), build_backend(c.backend)\n"
        "    teacher = load_teacher(c.teacher, data.train.classes, c.data.image_size)\n"
        "    try:\n"
        "        built = build_run(resolve(c), data, backend, teacher, Memory(), Console(''))\n"
        "        print(built.facts['choices']['teacher'])\n"
        "    except KdError as error:\n"
        "        print(error.exit_code, error)\n"
    )
    environment = {"CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script, written(), *LONG],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    said, chosen, refused = done.stdout.splitlines()
    assert said.startswith("teacher: fp32+unfused: fp32+unfused+compiled cannot be run here (InductorError")
    assert chosen == "fp32+unfused"
    assert refused.startswith("2 teacher.compile: 'fp32+unfused+compiled' is asked for, but InductorError")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_runs_agree_with_plain_ones_and_with_each_other(built):
    plain, _, _ = built()
    compiled, facts, out = built("teacher.compile=on", "student.compile=on")
    assert facts["choices"] == dict.fromkeys(("teacher", "student"), "fp32+unfused+compiled") | {"threads": "1"}
    assert "teacher: fp32+unfused+compiled; its logits differ from torch float32's by" in out
    first = curve(compiled)
    torch.testing.assert_close(torch.tensor(curve(plain)), torch.tensor(first), rtol=1e-3, atol=1e-5)
    again, _, _ = built("teacher.compile=on", "student.compile=on", pinned=facts["choices"])
    assert curve(again) == first
    names = list(plain.distillation.state_dict())
    assert list(compiled.distillation.state_dict()) == names
    for name in names:
        assert torch.equal(compiled.distillation.state_dict()[name], again.distillation.state_dict()[name])


# ------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("overrides", "features", "message"),
    [
        (
            ["teacher.runtime=onnxruntime"],
            True,
            "teacher.runtime: is onnxruntime, but a loss needs the teacher's features",
        ),
        (
            ["teacher.runtime=openvino", "teacher.shard=true"],
            False,
            "teacher.runtime: is openvino, but the teacher is div",
        ),
        (
            ["teacher.precision=int8", "teacher.pipeline=2"],
            False,
            "teacher.precision: is int8, but the teacher is divided",
        ),
        (
            ["teacher.compile=on", "teacher.shard=true"],
            False,
            "teacher.compile: is on, but the teacher is divided over",
        ),
        (
            ["teacher.runtime=openvino", "teacher.precision=int8"],
            False,
            "teacher.precision: is int8, which kd does not run",
        ),
        (
            ["teacher.runtime=onnxruntime", "teacher.precision=bf16"],
            False,
            "teacher.precision: is bf16, which kd does not",
        ),
        (
            ["teacher.runtime=onnxruntime", "teacher.compile=on"],
            False,
            "teacher.runtime: is onnxruntime, but teacher.comp",
        ),
        (
            ["teacher.precision=int8"],
            True,
            "teacher.precision: is int8, which on a CPU runs as a graph of onnxruntime, but",
        ),
        (
            ["teacher.precision=int8", "teacher.compile=on"],
            False,
            "but teacher.compile is on. torch has int8 too, many",
        ),
        (
            ["teacher.precision=fp8"],
            False,
            "teacher.precision: is fp8, which backend 'cpu' does not have. fp8 goes with",
        ),
        (
            ["backend.kind=cuda", "teacher.runtime=openvino"],
            False,
            "teacher.runtime: is openvino, but the backend is 'cuda",
        ),
        (
            ["backend.kind=xla", "teacher.precision=int8"],
            False,
            "is int8, which backend 'xla' does not have. ",
        ),
        (
            ["backend.kind=xla", "student.compile=on"],
            False,
            "student.compile: is on, but backend 'xla' compiles by itself",
        ),
        (
            ["backend.kind=neuron", "teacher.compile=on"],
            False,
            "teacher.compile: is on, but backend 'neuron' compiles by",
        ),
    ],
)
def test_what_cannot_be(overrides, features, message):
    found = refusals(*overrides, features=features)
    # a runtime that is not installed is refused beside it, as a package that is missing
    assert all(isinstance(error, ConfigError | MissingExtra) for error in found), found
    assert any(isinstance(error, ConfigError) and message in str(error) for error in found), found


@pytest.mark.parametrize(
    ("package", "overrides", "message"),
    [
        (
            "openvino",
            ["teacher.runtime=openvino"],
            "teacher.runtime: is openvino, which is not installed. pip install 'kd[",
        ),
        (
            "onnxruntime",
            ["teacher.precision=int8", "teacher.runtime=onnxruntime"],
            "which is not installed. pip install",
        ),
        (
            "torchao",
            ["teacher.precision=int8", "teacher.runtime=torch"],
            "for which torch needs torchao. pip install 'kd[q",
        ),
    ],
)
def test_an_extra_that_is_missing(monkeypatch, package, overrides, message):
    monkeypatch.setitem(sys.modules, package, None)
    (error,) = refusals(*overrides)
    assert message in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "overrides", [[], ["backend.kind=cuda"], ["teacher.runtime=torch", "teacher.compile=on"], ["student.compile=on"]]
)
def test_what_can_be(overrides):
    assert refusals(*overrides, features=True) == []


@pytest.mark.parametrize("check", [False, True])
def test_a_command_refuses_before_it_starts(written, refused, tmp_path, check):
    told = refused("train", written(), "teacher.precision=fp8", *(["--check"] if check else []))
    assert told.startswith("teacher.precision: is fp8, which backend 'cpu' does not have.")
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------- as a user sees it


def test_int8_in_a_manifest_and_in_a_cache_of_its_own(written, command, tmp_path):
    views = ("teacher.cache.views=1", "run.epochs=1")
    for name, *extra in (("exact",), ("coarse", "teacher.precision=int8")):
        done = command("train", written(), *views, f"run.name={name}", *extra)
        assert done.code == 0, done
    assert "teacher: int8+onnxruntime; its logits differ from torch float32's by" in done.out
    manifest = json.loads((tmp_path / "runs" / "coarse" / "manifest.json").read_text())
    assert manifest["choices"]["teacher"] == "int8+onnxruntime"
    assert manifest["teacher_error"].keys() == {"largest", "of_std", "images"}
    caches = sorted((tmp_path / "runs" / "caches").glob("*/manifest.json"))
    assert {json.loads(file.read_text())["precision"] for file in caches} == {"fp32", "int8+onnxruntime"}
    verified = command("cache", written(), *views, "teacher.precision=int8", "--verify")
    assert verified.code == 0, verified
    again = command("train", written(), *views, "run.name=coarse", "teacher.precision=int8", "run.keep=3")
    assert again.code == 0, again
    kept = json.loads((tmp_path / "runs" / "coarse" / "manifest.json").read_text())
    assert kept["teacher_error"] == manifest["teacher_error"]
    assert kept["choices"] == manifest["choices"]
