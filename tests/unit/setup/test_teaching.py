"""The live teacher's kernel: when another form is worth trying, what is asked for by name, what is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from pieces import Asks

from kd import config
from kd.core.errors import ConfigError, KdError, MissingExtra, ModelError
from kd.core.facts import BackendFacts
from kd.engine.loop import train
from kd.jobs.progress.console import Console
from kd.models import compiled
from kd.models.classifier import Classifier, Ensemble
from kd.parts.tasks import single_label
from kd.setup import modes
from kd.setup.build import build_backend, compare_threads
from kd.setup.data import open_sources
from kd.setup.loaders import split_batch
from kd.setup.modes import Chosen, ExecutionMode, Wanted, Workload, choose_mode, require
from kd.setup.recipe import Choices, Session, resolve
from kd.setup.teacher import Teachers, choose_teacher, load_teachers, validation_images
from kd.setup.trial import attempt, clear_winner, fastest, milliseconds

LONG = ("run.steps=1000000000", "student.compile=off")
"""So many steps that everything is worth trying; built, never trained."""


@pytest.fixture
def built(make, capsys):
    """Build a run; return it, what the manifest gets, and what was printed."""

    def built(*overrides, recorded=None, change=lambda teachers: teachers):
        made = make(*overrides, logger=Console("tiny"), recorded=recorded, change=change)
        return made.run, made.facts, capsys.readouterr().out

    return built


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
    losses = ["losses=[{kind: cosine}]"] if features else []
    try:
        minimal(*overrides, *losses)
    except KdError as error:
        return getattr(error, "errors", [error])
    return []


@pytest.fixture
def cpu():
    return build_backend(minimal("backend.threads=1").backend)


# ------------------------------------------------------------------------------------------------ worth trying


FUSED, COMPILED = ExecutionMode("fp32", "fused"), ExecutionMode("fp32", "fused", compiled=True)
EXPORTED = ExecutionMode("fp32", "onnxruntime")


def wanted(*exported: ExecutionMode, compile: str = "off") -> Wanted:
    """Nothing is left open in plain torch."""
    return Wanted("fp32", "fused", compile, torch.nn.Identity(), exported)


@pytest.mark.parametrize(
    ("seconds", "form", "expected"),
    [
        (1499.0, "compiled", False),  # a minute is more than a 25th of it
        (1500.0, "compiled", True),
        (374.0, "onnxruntime", False),
        (375.0, "onnxruntime", True),
        (375.0, "openvino", True),
        (0.0, "onnxruntime", False),
        (190.0, "onnxruntime", False),  # the whole of configs/vit_food.yaml
    ],
)
def test_a_trial_costs_a_25th_of_the_work_at_most(monkeypatch, cpu, seconds, form, expected):
    monkeypatch.setattr(modes, "milliseconds", lambda work, backend: 1000 * seconds)  # of one trial, and there is one
    other = COMPILED if form == "compiled" else ExecutionMode("fp32", form)
    left = wanted(compile="auto") if form == "compiled" else wanted(other)
    asked = []

    def work(mode: ExecutionMode, images: int):
        asked.append(mode)
        return sleeping(0.0)

    choose_mode(left, work, Workload(16, 16, 16), cpu)
    assert (other in asked) is expected


def test_what_was_compiled_before_is_tried_in_a_shorter_run(monkeypatch, cpu, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_locks", {})
    monkeypatch.setattr(modes, "milliseconds", lambda work, backend: 250_000.0)
    asked = []

    def chosen(images: int = 16) -> ExecutionMode:
        def work(mode: ExecutionMode, count: int):
            asked.append(mode)
            return sleeping(0.0 if mode == COMPILED else 0.03)

        return choose_mode(wanted(compile="auto"), work, Workload(images, 16, 16), cpu).mode

    assert chosen() == FUSED  # 250 s of work
    assert COMPILED not in asked
    assert chosen(16 * 6) == COMPILED  # as 1500
    assert chosen() == COMPILED  # the libraries are there now
    assert chosen(15) == FUSED
    compiled.clear_libraries()
    assert chosen() == FUSED


def test_the_work_of_a_run():
    # 1,000 images in 5 epochs; on 2 ranks 2,500 each; in trials of 16 images and 80 ms: 12.5 s
    assert resolve(minimal("run.epochs=5")).loop.images(1000, 8) == 5000
    assert resolve(minimal("run.steps=30")).loop.images(1000, 8) == 240
    assert Workload(2500, 16, 64).seconds(80.0) == 12.5


@pytest.mark.parametrize(
    ("text", "numerics", "rebuilt"),
    [
        ("fp32+fused", "fp32", False),
        ("bf16+unfused+compiled", "bf16", True),
        ("fp32+onnxruntime", "fp32", True),
        ("int8+onnxruntime", "int8+onnxruntime", True),
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


def test_candidates_are_compared_where_the_run_is_long_enough(monkeypatch, cpu):
    monkeypatch.setattr(modes, "milliseconds", lambda work, backend: 20.0)
    asked = []

    def work(mode: ExecutionMode, images: int):
        asked.append((mode, images))
        return sleeping(0.0 if mode == EXPORTED else 0.03)

    chosen = choose_mode(wanted(EXPORTED), work, Workload(10**8, 16, 64), cpu)
    assert chosen.mode == EXPORTED  # thirty milliseconds against none
    assert chosen.table.keys() == {FUSED, EXPORTED}
    assert chosen.record.keys() == {"fp32+fused", "fp32+onnxruntime"}
    assert "(64 images, 125000 s of work)" in chosen.summary
    assert {(FUSED, 64), (EXPORTED, 64)} <= set(asked)  # as many images as a step has
    assert choose_mode(wanted(EXPORTED), work, Workload(16, 16, 16), cpu) == Chosen(FUSED)
    assert choose_mode(wanted(EXPORTED), work, Workload(0, 16, 64), cpu) == Chosen(FUSED)
    divided = replace(wanted(EXPORTED), rebuilt=False)
    assert choose_mode(divided, work, Workload(10**8, 16, 64), cpu) == Chosen(FUSED)


def test_a_candidate_that_cannot_be_run_is_said_and_left(cpu):
    def work(mode: ExecutionMode, images: int):
        if mode == FUSED:
            return sleeping(0.001)
        raise RuntimeError("no compiler here\nand a long explanation")

    chosen = choose_mode(wanted(compile="auto"), work, Workload(10**9, 1, 1), cpu)
    assert chosen.mode == FUSED
    told = "fp32+fused+compiled cannot be run here (RuntimeError: no compiler here and a long explanation)"
    assert told in chosen.summary


def test_where_measuring_would_compile_nothing_is_measured(cpu):
    def work(mode: ExecutionMode, images: int):
        def never() -> torch.Tensor:
            raise AssertionError(f"{mode} was run")

        return never

    cpu.fixed_mode = "bf16+unfused"
    left = Wanted("auto", "auto", "auto", torch.nn.Identity(), [EXPORTED])
    assert choose_mode(left, work, Workload(10**9, 1, 1), cpu) == Chosen(ExecutionMode("bf16", "unfused"))


def test_compiled_by_name_is_not_compared(cpu):
    chosen = choose_mode(wanted(EXPORTED, compile="on"), lambda mode, images: sleeping(0.0), Workload(10**9, 1, 1), cpu)
    assert chosen == Chosen(COMPILED)


def test_what_is_named_and_cannot_be_run(cpu):
    def fails() -> torch.Tensor:
        raise RuntimeError("no compiler here")

    assert attempt(fails, cpu) == "RuntimeError: no compiler here"
    assert attempt(sleeping(0.0), cpu) == ""
    with pytest.raises(ModelError, match=r"^student\.compile: 'fp32\+fused\+compiled' is asked for, but .*compiler"):
        require(fails, "student.compile", COMPILED)
    assert milliseconds(sleeping(0.005), cpu) >= 5
    first_call = iter([0.7])  # as of a compiler; hopeless, if it were measured
    slow_once = {"a": sleeping(0.02), "b": lambda: sleeping(next(first_call, 0.001))()}
    assert fastest(slow_once, cpu, warm=True)[0] == "b"


# --------------------------------------------------------------------------------------------- chosen in a run


def test_threads_are_compared_in_a_long_run_of_plain_torch_alone(built):
    run, _, _ = built()
    for steps, student, expected in ((100, FUSED, True), (99, FUSED, False), (100, COMPILED, False)):
        found = compare_threads(run, BackendFacts(cpu=True), steps, Choices(FUSED, student, threads=2))
        assert (found is not run) is expected


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
    pinned, facts, out = built(*LONG, "teacher.compile=off", recorded=facts["choices"])
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
    recipe = resolve(config.load(settings, ["teacher.precision=int8"]))
    data, backend = open_sources(recipe.data), build_backend(recipe.backend)
    model = load_teachers(recipe.teacher, data, {}).model
    images = validation_images(data.shown(data.val))
    assert images.shape == (13, 3, 16, 16)
    session = Session(backend, data, split_batch(data.section, 1, len(data.train)))
    taught = choose_teacher(session, recipe.teacher.section, model, 0, None)
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
    def ensemble(teachers: Teachers) -> Teachers:
        alone, other = teachers.model, copy.deepcopy(teachers.model)
        with torch.no_grad():
            other.network.head.bias += torch.tensor([1.0, 0.0, -1.0])
        average = single_label.build(single_label.Options()).average
        return replace(teachers, model=Ensemble([alone, other], [1.0, 3.0], average), members=[alone, other])

    _, facts, out = built("teacher.runtime=onnxruntime", change=ensemble)
    assert facts["choices"]["teacher"] == "fp32+onnxruntime"
    assert facts["teacher_error"]["largest"] < 2e-5
    assert "its logits differ from torch float32's" in out


def test_a_teacher_that_cannot_be_exported(built):
    odd = Classifier(Asks(), 3, 0)
    change = lambda teachers: replace(teachers, model=odd, members=[odd])  # noqa: E731
    with pytest.raises(
        ModelError, match=r"^teacher\.runtime: 'fp32\+onnxruntime' is asked for, but torch\.export cannot"
    ):
        built("teacher.runtime=onnxruntime", change=change)
    _, facts, out = built(*LONG, "teacher.compile=off", change=change)
    assert facts["choices"]["teacher"] == "fp32+unfused"
    assert "fp32+onnxruntime cannot be run here (torch.export cannot express this network" in out


@pytest.mark.slow
def test_without_a_compiler(written, tmp_path):
    """On a machine of its own kind: no C++ compiler, nothing compiled before."""
    script = (
        "import sys; from kd import config; from kd.core.errors import KdError\n"
        "from kd.files.run_dir import Memory; from kd.jobs.progress.console import Console\n"
        "from kd.jobs.teach import obtain_teachers\n"
        "from kd.setup.build import Results, Setting, build_backend, build_run\n"
        "from kd.setup.data import open_sources; from kd.setup.recipe import resolve\n"
        "for mode in ('auto', 'on'):\n"
        "    overrides = [*sys.argv[2:], 'teacher.runtime=torch', 'teacher.compile=' + mode]\n"
        "    recipe = resolve(config.load(sys.argv[1], overrides))\n"
        "    data, backend = open_sources(recipe.data), build_backend(recipe.backend)\n"
        "    setting = Setting(obtain_teachers(recipe.teacher, data, backend), backend, recipe.backend)\n"
        "    results = Results(Memory(), Console(''))\n"
        "    try:\n"
        "        built = build_run(recipe.teacher, recipe.student, recipe.loop, setting, results)\n"
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
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_libraries_that_cannot_be_loaded_are_compiled_anew(written, tmp_path):
    """Cut short behind their first bytes; those that a killed linker leaves are found before, in test_compiled.py."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "kd.cli", "train", written(), "teacher.compile=on", "run.steps=1"]
    for start in range(2):
        done = subprocess.run(
            [*argv, f"run.name=start-{start}"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        libraries = list((tmp_path / "cache").rglob("*.main.so"))
        assert all(library.stat().st_size > 100 for library in libraries)
        for library in libraries:
            os.truncate(library, 100)
    assert libraries
    assert "compiled once more" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_runs_agree_with_plain_ones_and_with_each_other(built):
    plain, _, _ = built()
    compiled, facts, out = built("teacher.compile=on", "student.compile=on")
    assert facts["choices"] == dict.fromkeys(("teacher", "student"), "fp32+unfused+compiled") | {"threads": "1"}
    assert "teacher: fp32+unfused+compiled; its logits differ from torch float32's by" in out
    first = curve(compiled)
    torch.testing.assert_close(torch.tensor(curve(plain)), torch.tensor(first), rtol=1e-3, atol=1e-5)
    again, _, _ = built("teacher.compile=on", "student.compile=on", recorded=facts["choices"])
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
            "teacher.precision: is int8, but a loss needs the teacher's features",
        ),
        (
            ["teacher.precision=int8", "teacher.compile=on"],
            False,
            "teacher.precision: is int8, but teacher.compile is on, and torch.compile is torch's",
        ),
        (
            ["teacher.precision=int8", "teacher.runtime=torch"],
            False,
            "teacher.precision: is int8, but teacher.runtime is torch. int8 runs as a graph of onnxruntime",
        ),
        (
            ["teacher.precision=fp8"],
            False,
            "teacher.precision: is 'fp8'. Allowed: one of auto, fp32, bf16, int8",
        ),
        (
            ["backend.kind=cuda", "teacher.runtime=openvino"],
            False,
            "teacher.runtime: is openvino, but the backend is 'cuda",
        ),
        (
            ["backend.kind=cuda", "teacher.precision=int8"],
            False,
            "teacher.precision: is int8, but the backend is 'cuda'",
        ),
        (
            ["backend.kind=xla", "teacher.precision=int8"],
            False,
            "teacher.precision: is int8, but the backend is 'xla'",
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
            "teacher.runtime: is openvino, which is not installed. pip install 'kd[openvino]'",
        ),
        (
            "onnxruntime",
            ["teacher.precision=int8", "teacher.runtime=onnxruntime"],
            "is onnxruntime, which is not installed. pip install 'onnxruntime'",
        ),
        (
            "onnxruntime",
            ["teacher.precision=int8"],
            "teacher.precision: is int8, for which onnxruntime is not installed. pip install 'onnxruntime'",
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
    overrides = ("teacher.precision=int8", "teacher.runtime=torch")
    told = refused("train", written(), *overrides, *(["--check"] if check else []))
    assert told.startswith("teacher.precision: is int8, but teacher.runtime is torch.")
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
    again = command("train", written(), *views, "run.name=coarse", "teacher.precision=int8", "run.keep=3")
    assert again.code == 0, again
    kept = json.loads((tmp_path / "runs" / "coarse" / "manifest.json").read_text())
    assert kept["teacher_error"] == manifest["teacher_error"]
    assert kept["choices"] == manifest["choices"]
