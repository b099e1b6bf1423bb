"""How models are executed: what `auto` means on a machine, what is asked for by name,
what is refused.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pieces import Asks, slow
from PIL import Image

from kd import config
from kd.core import host
from kd.core.errors import ConfigError, KdError, MissingExtra, ModelError
from kd.core.host import bf16_units
from kd.core.types import Decoded
from kd.engine.loop import train
from kd.jobs.progress.console import Console
from kd.models.classifier import Classifier, Ensemble
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.backends import _ddp
from kd.parts.backends.cpu import CPU
from kd.parts.tasks import single_label
from kd.setup.build import build_backend
from kd.setup.build_teacher import (
    LARGEST_ERROR,
    PROBED,
    RunContext,
    Teachers,
    choose_teacher,
    load_teachers,
    pixels_of,
    readable_images,
    teacher_mode,
)
from kd.setup.data import open_sources
from kd.setup.modes import ExecutionMode, convolution_shares, require_mode, torch_mode
from kd.setup.recipe import resolve


@pytest.fixture
def built(make, capsys):
    """Build a run; return it, what the manifest gets, and what was printed."""

    def built(*overrides, change=lambda teachers: teachers):
        setup = make(*overrides, logger=Console("tiny"), change=change)
        return setup.run, setup.facts, capsys.readouterr().out

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


@pytest.mark.parametrize(
    ("flags", "auto"),
    [("fpu avx512_bf16 sse", "bf16+unfused"), ("fpu avx512f", "fp32+unfused")],
)
def test_auto_is_a_fact_of_the_processor(tmp_path, flags, auto):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        f"processor : 0\nmodel name : any bf16\nflags : {flags}\n"
    )
    assert bool(bf16_units(tmp_path)) == auto.startswith("bf16")
    assert not bf16_units(tmp_path / "nowhere")


MADE = {
    "resnet10t": (1.0, 0.0),
    "tf_efficientnet_lite0": (1.0, 0.09),
    "vit_tiny_patch16_224": (0.03, 0.0),
}
"""Shares of multiplications in convolutions and in depthwise ones, at 64 pixels."""


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("units", [{"avx512_bf16"}, {"avx512_bf16", "amx_bf16"}])
def test_auto_depends_on_the_networks_layers(monkeypatch, cpu, units, threads, trained):
    """AVX-512 trains depthwise convolutions faster in float32, and with several threads
    all convolutions.
    """
    for place in (host, _ddp):
        monkeypatch.setattr(place, "bf16_units", lambda *root: units)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    slow = {
        "tf_efficientnet_lite0": trained,
        "resnet10t": trained and threads == 2,
        "vit_tiny_patch16_224": False,
    }
    for name, shares in MADE.items():
        model = load(Spec("student", name, {}, ("a", "b"), free_size=True), 64)
        assert convolution_shares(model) == pytest.approx(shares, abs=0.02)
        module = torch.nn.Module()
        module.student = model
        expected = "fp32" if slow[name] and len(units) == 1 else "bf16"
        for precision, mode in (("auto", expected), ("fp32", "fp32"), ("bf16", "bf16")):
            assert (
                torch_mode(
                    precision, "auto", False, module if trained else model, cpu
                ).precision
                == mode
            ), name
        assert model.training


def test_the_share_of_convolutions_is_that_of_a_count_by_hand():
    """3 x 3 on 16 x 16 places, the same of one channel each, then a matrix product of
    [1, 4] and [4, 9].
    """
    convolutions = (
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.Conv2d(4, 4, 3, padding=1, groups=4),
    )
    ends = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 9)
    dense = 16 * 16 * 4 * 3 * 9
    depthwise = 16 * 16 * 4 * 9
    product = 4 * 9
    total = dense + depthwise + product
    shares = convolution_shares(
        Classifier(torch.nn.Sequential(*convolutions, *ends), 9, 16)
    )
    assert shares == pytest.approx(((dense + depthwise) / total, depthwise / total))
    assert convolution_shares(
        Classifier(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 9)), 9, 16
        )
    ) == (0.0, 0.0)

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.mean((2, 3)) * self.scale

    assert convolution_shares(Classifier(Scaled(), 3, 16)) == (
        0.0,
        0.0,
    )  # nothing that counts as arithmetic


def automatic(monkeypatch, auto: str) -> None:
    """Make this machine one on which `auto` is that mode."""
    monkeypatch.setattr(CPU, "auto_mode", property(lambda backend: auto))


AUTO = (
    "teacher.precision=auto",
    "teacher.attention=auto",
    "student.attention=auto",
    "backend.precision=auto",
)


def test_auto_is_the_machines_mode_and_nothing_is_timed(monkeypatch, built):
    automatic(monkeypatch, "bf16+fused")
    run, facts, out = built(*AUTO)
    assert facts["modes"] == {"teacher": "bf16+fused", "student": "bf16+fused"}
    assert run.backend.autocast_dtype == torch.bfloat16
    assert facts["teacher_error"]["of_std"] <= LARGEST_ERROR
    assert "teacher: bf16+fused; its logits differ from torch float32's by" in out
    again, again_facts, _ = built(*AUTO)
    assert (again_facts["modes"], again_facts["teacher_error"]) == (
        facts["modes"],
        facts["teacher_error"],
    )
    assert curve(run) == curve(again)


def test_auto_refuses_bfloat16_with_large_logit_errors(monkeypatch, built):
    """A classifier whose logits are small differences of large numbers."""

    def spoilt(teachers: Teachers) -> Teachers:
        with torch.no_grad():
            teachers.model.network.head.bias += 300.0
        return teachers

    automatic(monkeypatch, "bf16+unfused")
    _, facts, out = built(*AUTO, change=spoilt)
    assert facts["modes"] == {"teacher": "fp32+unfused", "student": "bf16+unfused"}
    assert facts["teacher_error"]["refused"] == "bf16+unfused"
    assert facts["teacher_error"]["of_std"] > LARGEST_ERROR
    line = next(
        line
        for line in out.splitlines()
        if line.startswith("teacher: fp32+unfused: in bf16+unfused, its logits")
    )
    assert line.endswith(f"; {LARGEST_ERROR:g} is allowed")
    _, facts, _ = built(
        *AUTO, "teacher.precision=bf16", change=spoilt
    )  # by name it is taken, and said
    assert facts["modes"]["teacher"] == "bf16+unfused"
    assert facts["teacher_error"]["of_std"] > LARGEST_ERROR


def test_auto_takes_float32_where_bfloat16_has_no_operator(monkeypatch, built):
    """A Fourier transform ended the run: torch has none in bfloat16."""

    def transforming(teachers: Teachers) -> Teachers:
        head = teachers.model.network.head
        head.register_forward_hook(
            lambda module, inputs, logits: (
                torch.fft.rfft(logits).abs().sum(1, True) + logits
            )
        )
        return teachers

    automatic(monkeypatch, "bf16+unfused")
    _, facts, out = built(*AUTO, change=transforming)
    assert facts["modes"]["teacher"] == "fp32+unfused"
    assert facts["teacher_error"]["refused"] == "bf16+unfused"
    assert "teacher: fp32+unfused: in bf16+unfused, its forward fails (" in out


def test_an_error_that_would_be_larger_on_more_images_is_refused(monkeypatch, built):
    """0.096 of a standard deviation on 16 images was accepted; 1,000 had 0.23. They
    have up to 2.3 times that of 64.
    """

    def shifted(shift: float):
        def change(teachers: Teachers) -> Teachers:
            with torch.no_grad():
                teachers.model.network.head.bias += shift
            return teachers

        return change

    automatic(monkeypatch, "bf16+unfused")
    facts_of_runs = [
        built(*AUTO, change=shifted(shift))[1]
        for shift in (0.0, 8.0, 20.0, 24.0, 28.0, 64.0)
    ]
    errors = [facts["teacher_error"]["of_std"] for facts in facts_of_runs]
    assert any(0.1 / 2.3 < error <= 0.1 for error in errors), errors
    for facts, error in zip(facts_of_runs, errors, strict=True):
        assert ("refused" in facts["teacher_error"]) == (error > 0.05)


class Squares:
    """A source of a hundred black squares."""

    def __len__(self) -> int:
        return 100

    def decode(self, id: int) -> Decoded:
        return Decoded(Image.new("RGB", (4, 4)), 0)


def test_a_precision_is_judged_on_64_images_of_all_of_the_split():
    ids = readable_images(Squares(), PROBED)[1]  # type: ignore[arg-type]
    assert (len(ids), ids[0], ids[-1]) == (64, 0, 98)


def test_a_model_that_torch_does_not_run_has_no_precision(monkeypatch, built):
    automatic(monkeypatch, "bf16+unfused")

    def foreign(teachers: Teachers) -> Teachers:
        teachers.model.runtime = "a table"
        return teachers

    _, facts, out = built(*AUTO, change=foreign)
    assert facts["modes"]["teacher"] == "fp32+unfused"
    assert "teacher_error" not in facts
    assert "teacher:" not in out


def test_a_divided_teacher_is_not_compared_and_runs_in_float32(
    monkeypatch, cpu, settings
):
    automatic(monkeypatch, "bf16+unfused")
    recipe = resolve(config.load(settings, [*AUTO, "teacher.shard=true"]))
    data = open_sources(recipe.data)
    model = load_teachers(recipe, data, {}).model
    assert str(teacher_mode(recipe.teacher, model, cpu)) == "fp32+unfused"


@pytest.mark.parametrize(
    ("text", "numerics", "rebuilt"),
    [
        ("fp32+fused", "fp32", False),
        ("bf16+unfused+compiled", "bf16", True),
        ("fp32+onnxruntime", "fp32", True),
        ("int8+onnxruntime", "int8+onnxruntime", True),
    ],
)
def test_the_manifest_text_of_a_mode_says_its_parts(text, numerics, rebuilt):
    precision, kernel, *compiled = text.split("+")
    mode = ExecutionMode(precision, kernel, bool(compiled))
    assert str(mode) == text
    assert (mode.numerics, mode.rebuilt) == (numerics, rebuilt)


def test_a_named_mode_that_cannot_run_is_an_error():
    def fails() -> torch.Tensor:
        raise RuntimeError("no compiler here\nand a long explanation")

    mode = ExecutionMode("fp32", "fused", compiled=True)
    with pytest.raises(
        ModelError,
        match=(
            r"^student\.compile: 'fp32\+fused\+compiled' is requested, but .*compiler"
            r" here and"
        ),
    ):
        require_mode(fails, "student.compile", mode)


def curve(run) -> list[float]:
    train(run)
    return [row["loss"] for row in run.store.rows if row["kind"] == "train"]


@pytest.mark.parametrize("runtime", [slow("onnxruntime"), "openvino"])
def test_a_run_with_another_runtime_is_the_run_to_rounding(built, runtime):
    pytest.importorskip(runtime, reason="pip install 'PATH/kd[openvino]'")
    exact, _, _ = built()
    approximate, facts, out = built(f"teacher.runtime={runtime}")
    assert facts["modes"]["teacher"] == f"fp32+{runtime}"
    assert 0 <= facts["teacher_error"]["largest"] < 2e-5
    assert f"teacher: fp32+{runtime}; its logits differ from torch float32's by" in out
    # Rounding of the targets, 1e-7, through a few steps of AdamW.
    torch.testing.assert_close(
        torch.tensor(curve(exact)),
        torch.tensor(curve(approximate)),
        rtol=1e-3,
        atol=1e-5,
    )


def test_the_error_is_that_of_the_logits(built, settings):
    _, facts, _ = built("teacher.precision=int8")
    recipe = resolve(config.load(settings, ["teacher.precision=int8"]))
    data = open_sources(recipe.data)
    backend = build_backend(recipe.backend)
    setting = RunContext(recipe, load_teachers(recipe, data, {}), backend)
    model = setting.teachers.model
    images = pixels_of(readable_images(data.val)[0], data.evaluation_views(data.val))
    assert images.shape == (13, 3, 16, 16)
    taught = choose_teacher(setting)
    live = taught.live
    assert live.images == 0  # trials are not the run's
    with torch.no_grad():
        reference = model.eval()(images).logits
        logits = live.model(images).logits
    largest = (logits - reference).abs().max().item()
    assert taught.error["largest"] == pytest.approx(largest, abs=1e-5)
    assert taught.error["of_std"] == pytest.approx(
        largest / reference.std(correction=0).item(), rel=1e-3
    )
    assert facts["teacher_error"] == taught.error


def test_several_teachers_are_as_many_graphs(built):
    def ensemble(teachers: Teachers) -> Teachers:
        alone = teachers.model
        shifted = copy.deepcopy(teachers.model)
        with torch.no_grad():
            shifted.network.head.bias += torch.tensor([1.0, 0.0, -1.0])
        average = single_label.build(single_label.Options()).average
        return replace(
            teachers,
            model=Ensemble([alone, shifted], [1.0, 3.0], average),
            members=[alone, shifted],
        )

    _, facts, out = built("teacher.runtime=onnxruntime", change=ensemble)
    assert facts["modes"]["teacher"] == "fp32+onnxruntime"
    assert facts["teacher_error"]["largest"] < 2e-5
    assert "its logits differ from torch float32's" in out


def test_a_teacher_that_cannot_be_exported_is_refused(built):
    odd = Classifier(Asks(), 3, 0)
    change = lambda teachers: replace(teachers, model=odd, members=[odd])  # noqa: E731
    with pytest.raises(
        ModelError,
        match=(
            r"^teacher\.runtime: 'fp32\+onnxruntime' is requested, but torch\.export"
            r" cannot"
        ),
    ):
        built("teacher.runtime=onnxruntime", change=change)


@pytest.mark.slow
def test_a_missing_compiler_is_named(written, tmp_path):
    """On a machine of its own kind: no C++ compiler, nothing compiled before."""
    environment = {
        "CXX": "/no/such/compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    argv = [sys.executable, "-m", "kd.cli", "train", written(), "teacher.compile=on"]
    result = subprocess.run(
        argv,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "teacher.compile: 'fp32+unfused+compiled' is requested, but InductorError"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_runs_agree_with_plain_ones_and_with_each_other(built):
    plain, _, _ = built()
    compiled, facts, out = built("teacher.compile=on", "student.compile=on")
    assert facts["modes"] == dict.fromkeys(
        ("teacher", "student"), "fp32+unfused+compiled"
    )
    assert (
        "teacher: fp32+unfused+compiled; its logits differ from torch float32's by"
        in out
    )
    first = curve(compiled)
    torch.testing.assert_close(
        torch.tensor(curve(plain)), torch.tensor(first), rtol=1e-3, atol=1e-5
    )
    again, _, _ = built("teacher.compile=on", "student.compile=on")
    assert curve(again) == first
    names = list(plain.distillation.state_dict())
    assert list(compiled.distillation.state_dict()) == names
    for name in names:
        assert torch.equal(
            compiled.distillation.state_dict()[name],
            again.distillation.state_dict()[name],
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "teacher.runtime=onnxruntime",
            "runtime: is onnxruntime, but a loss needs the teacher's features",
        ),
        (
            "teacher.runtime=openvino teacher.shard=true",
            "runtime: is openvino, but the teacher is div",
        ),
        (
            "teacher.precision=int8 teacher.pipeline=2",
            "precision: is int8, but the teacher is divided",
        ),
        (
            "teacher.compile=on teacher.shard=true",
            "compile: is on, but the teacher is divided over",
        ),
        (
            "teacher.runtime=openvino teacher.precision=int8",
            "precision: is int8, which kd does not run",
        ),
        (
            "teacher.runtime=onnxruntime teacher.precision=bf16",
            "precision: is bf16, which kd does not",
        ),
        (
            "teacher.runtime=onnxruntime teacher.compile=on",
            "runtime: is onnxruntime, but teacher.comp",
        ),
        (
            "teacher.precision=int8",
            "precision: is int8, but a loss needs the teacher's features",
        ),
        (
            "teacher.precision=int8 teacher.compile=on",
            "is int8, but teacher.compile is on, and torch.compile is",
        ),
        (
            "teacher.precision=int8 teacher.runtime=torch",
            "is int8, but teacher.runtime is torch. On a CPU",
        ),
        (
            "teacher.precision=fp8",
            "precision: is 'fp8'. Allowed: one of auto, fp32, bf16, int8",
        ),
        (
            "backend.kind=cuda teacher.runtime=openvino",
            "runtime: is openvino, but the backend is 'cuda",
        ),
        (
            "backend.kind=cuda teacher.precision=int8",
            "precision: is int8, but the backend is 'cuda'",
        ),
        (
            "backend.kind=xla teacher.precision=int8",
            "precision: is int8, but the backend is 'xla'",
        ),
        (
            "backend.kind=xla student.compile=on",
            "student.compile: is on, but backend 'xla' compiles by itself",
        ),
        (
            "backend.kind=neuron teacher.compile=on",
            "compile: is on, but backend 'neuron' compiles by",
        ),
    ],
)
def test_incompatible_runtime_and_precision_are_refused(overrides, message):
    errors = refusals(*overrides.split(), features="features" in message)
    # a runtime that is not installed is refused beside it, as a package that is missing
    assert all(isinstance(error, ConfigError | MissingExtra) for error in errors), (
        errors
    )
    assert any(
        isinstance(error, ConfigError) and message in str(error) for error in errors
    ), errors


@pytest.mark.parametrize(
    ("package", "key", "message"),
    [
        (
            "openvino",
            "runtime=openvino",
            "is openvino, which is not installed. pip install 'PATH/kd[openvino]'",
        ),
        (
            "onnxruntime",
            "runtime=onnxruntime",
            "is onnxruntime, which is not installed. pip install 'onnxruntime'",
        ),
        (
            "onnxruntime",
            "precision=int8",
            "precision: is int8, for which onnxruntime is not installed. pip install",
        ),
    ],
)
def test_an_extra_that_is_missing_is_named(monkeypatch, package, key, message):
    monkeypatch.setitem(sys.modules, package, None)
    (error,) = refusals(f"teacher.{key}")
    assert message in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["backend.kind=cuda"],
        ["teacher.runtime=torch", "teacher.compile=on"],
        ["student.compile=on"],
    ],
)
def test_compatible_runtime_and_precision_are_accepted(overrides):
    assert refusals(*overrides, features=True) == []


@pytest.mark.slow
def test_int8_stands_in_the_manifest_and_has_a_cache_of_its_own(
    written, command, tmp_path
):
    views = ("teacher.cache.views=1", "run.epochs=1")
    for name, *extra in (("exact",), ("coarse", "teacher.precision=int8")):
        result = command("train", written(), *views, f"run.name={name}", *extra)
        assert result.code == 0, result
    assert (
        "teacher: int8+onnxruntime; its logits differ from torch float32's by"
        in result.out
    )
    manifest = json.loads((tmp_path / "runs" / "coarse" / "manifest.json").read_text())
    assert manifest["modes"]["teacher"] == "int8+onnxruntime"
    assert manifest["teacher_error"].keys() == {"largest", "of_std", "images"}
    caches = sorted((tmp_path / "runs" / "caches").glob("*/manifest.json"))
    assert {json.loads(file.read_text())["precision"] for file in caches} == {
        "fp32",
        "int8+onnxruntime",
    }
    again = command(
        "train",
        written(),
        *views,
        "run.name=coarse",
        "teacher.precision=int8",
        "run.keep=3",
    )
    assert again.code == 0, again
    manifest_after = json.loads(
        (tmp_path / "runs" / "coarse" / "manifest.json").read_text()
    )
    assert manifest_after["teacher_error"] == manifest["teacher_error"]
    assert manifest_after["modes"] == manifest["modes"]
