"""The ladder to int8: it stops at the first rung that holds, says what is missing, and repair repairs."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pieces import base, paint

from kd import config
from kd.core.errors import MissingExtra, ModelError
from kd.core.intervals import paired
from kd.deploy.export import export as _export
from kd.deploy.export import int8
from kd.deploy.export.int8 import DYNAMIC, STATIC, Exam
from kd.deploy.export.parity import shown_images
from kd.deploy.export.repair import repair
from kd.deploy.serve.model import describe, load
from kd.jobs.train import train
from kd.models import runtimes
from kd.models.classifier import Classifier
from kd.models.load import Spec
from kd.models.load import load as load_model
from kd.parts.tasks.single_label import SingleLabel
from kd.setup.build import distributed
from kd.setup.data import open_data
from kd.setup.recipe import resolve
from kd.study.finished import best_student, opened_run

NNCF = pytest.mark.skipif(
    not (runtimes.installed("nncf") and runtimes.installed("openvino")), reason="needs the extra nncf"
)
OUTLIERS = 1000.0


pytestmark = pytest.mark.timeout(900)  # NNCF compiles its fake quantization once on a machine


def planted(student: Classifier) -> Classifier:
    """The same answers in float32, and two channels before the head a thousand times as large as the others."""
    changed = copy.deepcopy(student)
    with torch.no_grad():
        changed.network.norm.weight[:2] *= OUTLIERS
        changed.network.norm.bias[:2] *= OUTLIERS
        changed.network.head.weight[:, :2] /= OUTLIERS
    return changed


@pytest.fixture
def outliers(monkeypatch) -> None:
    """Every exported student has outliers."""

    def found(*arguments):
        student, provenance = best_student(*arguments)
        return planted(student), provenance

    monkeypatch.setattr(_export, "best_student", found)


def test_the_first_rung_that_holds_ends_the_climb(exported):
    (rung,) = json.loads((exported / "manifest.json").read_text())["int8"]
    assert (rung["name"], rung["file"], rung["title"]) == ("dynamic", DYNAMIC, "accuracy")
    assert rung["bytes"] == (exported / DYNAMIC).stat().st_size
    assert rung["drop"] <= 0.2
    assert not (exported / STATIC).exists()


def test_the_interval_is_that_of_the_same_images():
    reference = torch.eye(4).repeat(5, 1)  # 20 images, answers 0 1 2 3 0 ...
    labels = reference.argmax(1)
    labels[0] = 3  # PyTorch is wrong here
    outputs = reference.clone()
    outputs[0] = torch.eye(4)[3]  # the graph is right where PyTorch is not,
    outputs[1:4] = torch.eye(4)[0]  # and wrong three times
    exam = Exam(SingleLabel(), lambda: [], reference, labels)
    assert exam._interval(outputs, 0.1) == paired(3, 1, 20)


@pytest.mark.parametrize("package", ["nncf", "openvino"])
def test_what_is_missing_is_one_line(package, distilled, outliers, refused, tmp_path, monkeypatch):
    for name in ("nncf", "openvino"):  # the other one counts as installed
        monkeypatch.setitem(sys.modules, name, None if name == package else sys)
    said = refused("export", distilled, "--to", tmp_path / "student", "--int8", "--max-drop", "0.5")
    assert said.startswith("--int8: dynamic int8 loses ")
    assert "at most 0.5 are allowed (--max-drop)" in said
    assert f"the next rung needs {package}, which is not installed. pip install 'kd[nncf]'." in said
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_one_line(distilled, embedded, refused, command, tmp_path):
    said = refused("export", distilled, "--to", tmp_path / "student", "--repair", "5")
    assert said == "--repair: goes with --int8. Leave it out, or add --int8."
    said = refused("export", embedded, "--to", tmp_path / "student", "--int8", "--repair", "5")
    assert said.startswith("--repair: trains classifiers of kd-train on")
    for wrong in (("--max-drop", "nan"), ("--tolerance", "nan"), ("--images", "-1")):
        assert command("export", distilled, *wrong).code == 2
    answer = command("export", distilled, "--max-drop", "half")
    assert (answer.code, "'half' is not a number of points such as 0.5" in answer.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


@NNCF
def test_the_second_rung_holds_and_is_served(distilled, outliers, command, tmp_path):
    target = tmp_path / "student"
    answer = command("export", distilled, "--to", target, "--int8", "--max-drop", "0.5")
    assert answer.code == 0, answer
    first, second = json.loads((target / "manifest.json").read_text())["int8"]
    assert first["drop"] > 0.05
    assert (second["name"], second["file"], second["drop"]) == ("post-training", STATIC, 0.0)
    assert not (target / DYNAMIC).exists()
    assert "int8, dynamic: accuracy " in answer.out
    assert "int8, post-training: accuracy " in answer.out
    image = np.random.default_rng(0).integers(0, 256, (3, 3, 16, 16), np.uint8)
    served = load(describe(target, STATIC), 1, 1).engine(image)
    np.testing.assert_allclose(served, runtimes.openvino_runner(target / STATIC, 1)(image), rtol=1e-5, atol=1e-6)


def test_the_first_rung_does_not_hold_where_convolutions_stay_as_they_are(tmp_path, monkeypatch):
    torch.manual_seed(0)
    student = load_model(Spec("student", "lcnet_050", {}, ["a", "b"], free_size=True), 32).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 3, 32, 32), np.uint8)

    def images(limit: int = 0):
        yield pixels, np.zeros(len(pixels), np.int64)

    runtimes.write_onnx(runtimes.export_program(student, 32), tmp_path / int8.ONNX)
    exam = Exam.of(SingleLabel(), student, images)
    ladder = int8.Ladder(folder=tmp_path, student=student, size=32, exam=exam, views=images, max_drop=1.0)
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(MissingExtra, match=r"leaves convolutions in float32, .* % of the weights"):
        ladder.climb()
    (first,) = ladder.rungs
    weights = {name: one.numel() for name, one in student.network.named_parameters() if one.ndim > 1}
    linear = sum(count for name, count in weights.items() if name.startswith("classifier"))
    assert first.share == pytest.approx(linear / sum(weights.values()), abs=0.01)


def test_a_rung_with_few_int8_weights_is_no_drop_that_holds(tmp_path, monkeypatch):
    for name in ("require", "post_training", "controlled"):
        monkeypatch.setattr(int8, name, lambda *given: ())
    monkeypatch.setattr(runtimes, "write_int8", lambda source, path: path.touch())
    monkeypatch.setattr(runtimes, "int8_share", lambda path: 0.01)

    class Fixed:
        labels = torch.zeros(10)

        def __call__(self, name, path, left_out=()):
            drop = 0.0 if name == "dynamic" else 0.05
            return int8.Rung(name, path.name, "accuracy", 0.5, drop, (0.0, 0.1), 1.0, 1)

    given: dict = {"student": None, "size": 8, "exam": Fixed(), "views": None}
    with pytest.raises(ModelError, match=r"dynamic 0\.00 \(1\.0 % of the weights\), post-training 5\.00, "):
        int8.Ladder(folder=tmp_path, max_drop=0.005, **given).climb()


@NNCF
@pytest.mark.slow
def test_a_drop_that_nothing_holds_is_one_line(distilled, embedded, refused, tmp_path):
    said = refused("export", distilled, "--to", tmp_path / "student", "--int8", "--max-drop", "-100")
    assert said.startswith("--max-drop: no int8 graph holds it: on 13 validation images they lose dynamic 0.00, post-")
    assert "accuracy control " in said
    assert said.endswith("Nothing was written; raise --max-drop, or add --repair 500.")
    said = refused("export", embedded, "--to", tmp_path / "student", "--int8", "--max-drop", "-100")
    assert said.endswith("Nothing was written; raise --max-drop.")  # --repair trains classifiers
    assert list(tmp_path.iterdir()) == []


@NNCF
@pytest.mark.slow
def test_repair_brings_back_what_outliers_cost(tmp_path):
    """MinMax ranges ruin the student; kd's loop trains it on, against its teacher and its own float32 self."""
    paint(tmp_path / "photos/train", (12, 12, 12), seed=1)
    paint(tmp_path / "photos/val", (20, 20, 20), seed=2)
    settings = base(tmp_path / "photos", tmp_path)
    settings["teacher"]["fit"]["epochs"], settings["run"]["epochs"] = 3, 6
    run, stored = opened_run(train(config.load(settings)).folder)
    recipe, manifest = resolve(stored), run.manifest()
    student = planted(best_student(run, recipe.student, recipe.data.section, manifest["classes"])[0].eval())
    graph, quantized = tmp_path / "model.onnx", tmp_path / STATIC
    runtimes.write_onnx(runtimes.export_program(student, 16), graph)
    with distributed(recipe.backend) as backend:
        data = open_data(recipe.data, backend, fill=False)
        views = partial(shown_images, data, training=True)
        exam = Exam.of(recipe.student.task, student, partial(shown_images, data, 0))
        int8.post_training(graph, quantized, views, smooth=False)
        ruined = exam("MinMax", quantized)
        own, fake = int8.fake_quantized(student, 16, views, smooth=False)
    assert ruined.drop > 0.05, ruined
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    repair(recipe, manifest["choices"], fake, own, 60)
    int8.write_fake(fake, 16, quantized)
    assert exam("repair", quantized).drop <= 0.3 * ruined.drop
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


@NNCF
@pytest.mark.slow
def test_a_fake_quantized_student_is_written_as_it_answers(distilled, tmp_path):
    run, stored = opened_run(distilled)
    recipe = resolve(stored)
    student = best_student(run, recipe.student, recipe.data.section, run.manifest()["classes"])[0].eval()
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 16, 16), np.uint8)
    own, fake = int8.fake_quantized(student, 16, lambda count: [(images, np.zeros(20))], temperature=0.5)
    int8.write_fake(fake, 16, tmp_path / STATIC, temperature=0.5)
    with torch.no_grad():
        torch.testing.assert_close(
            own.head(own.normalize(torch.from_numpy(images))) / 0.5, student(torch.from_numpy(images)).logits
        )
        expected = fake.eval()(torch.from_numpy(images)).logits / 0.5
    answers = runtimes.openvino_runner(Path(tmp_path / STATIC), 1)(images)
    assert np.abs(answers - expected.numpy()).max() < 0.1 * expected.std()


@NNCF
def test_nncf_reports_nothing():
    """Whether it may is read when it is imported, which must not be earlier than kd says no."""
    script = """
import sys
from kd.deploy.export.int8 import _nncf
from kd.models.runtimes import installed
assert installed("nncf")
assert "nncf" not in sys.modules
with _nncf():
    from nncf.telemetry import wrapper
print(isinstance(wrapper.telemetry, wrapper.NNCFTelemetryStub))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NNCF_")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["True"], run.stderr
