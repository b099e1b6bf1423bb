"""`kd verify`: every planted lie is found by a row that names it, and no honest export is called a liar."""

from __future__ import annotations

import csv
import json
import shutil
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from subjects import CLASSES, PIXELS, SIZE, VIT, small_subject

from kd.core.errors import KdError
from kd.deploy.export import parity, variants
from kd.deploy.export.card import drawn
from kd.deploy.export.export import write
from kd.deploy.export.graphs import Subject
from kd.deploy.export.options import ExportOptions
from kd.deploy.export.package import seal
from kd.deploy.verify.claims import WRONG, Claims, NotVerifiedError
from kd.deploy.verify.verify import VerifyOptions, verify
from kd.files.manifest import MANIFEST
from kd.models import runtimes
from kd.models.classifier import tensors_digest
from kd.models.load import Spec, load
from kd.parts.tasks import embedding, label_sets

MANY = np.random.default_rng(5).integers(0, 256, (120, 3, SIZE, SIZE), np.uint8)
TEACHER = "vit_small_patch16_dinov3.lvd1689m"
LICENCES = {"teacher": "dinov3-license", "data": "cc-by-4.0", "student's first weights": "none: random weights"}


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    """Time briefly."""
    monkeypatch.setattr(parity, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(variants, "SECONDS", 0.01)


def painted(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> tuple[Subject, Path]:
    """Return a subject whose validation images lie in files, in folders named like classes, and their folder."""
    encoded = []
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        file = folder / "images" / (CLASSES[label] if labels.ndim == 1 else "all") / f"{i:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(file)
        encoded.append(zlib.crc32(file.read_bytes()))

    def images(limit: int, training: bool = False):
        yield pixels[: limit or None], labels[: limit or None], encoded[: limit or None]

    made = small_subject(folder / "runs", teacher=TEACHER, images=lambda: nullcontext(images), licences=LICENCES)
    recipe = replace(made.recipe, teacher=replace(made.recipe.teacher, fits={}))  # its weights come with its name
    return replace(made, recipe=recipe), folder / "images"


def answers(subject: Subject, pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return subject.student.answer(torch.from_numpy(pixels)).argmax(1).numpy()


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> tuple[Path, Path]:
    """An export with all that it can claim, and its images: two of three labels are what it answers."""
    folder = tmp_path_factory.mktemp("honest")
    labels = answers(small_subject(folder / "first"), MANY)
    labels[::3] = (labels[::3] + 1) % 3
    subject, images = painted(folder, MANY, labels)
    right = float((answers(subject, MANY) == labels).mean())
    subject = replace(subject, provenance={**subject.provenance, "metrics": {"accuracy": right}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "SECONDS", 0.01)
        find = runtimes.installed
        patch.setattr(runtimes, "installed", lambda name: name not in ("openvino", "nncf") and find(name))
        options = ExportOptions(int8=True, compare=True, accept="drop<=20 mb<=5", defer_share=0.2, license="mit")
        write(subject, folder / "export", options)
    return folder / "export", images


def found(export: Path, images: Path | str, **more: Any) -> Claims:
    return verify(VerifyOptions(export=export, data=str(images), **more))


def wrong(known: Claims) -> list[str]:
    return [" | ".join(row) for row in known.rows if row.verdict == WRONG]


def test_an_honest_export_is_right_in_all(honest):
    known = found(*honest)
    assert not wrong(known), wrong(known)
    known.require()
    rows = {row.what: row for row in known.rows}
    assert "(" in rows["model.onnx: accuracy"].found  # an interval
    assert float(rows["model.int8.onnx: ece"].claimed) > 0
    for what in ("model.int8.onnx: drop", "sure: threshold", "accepted: the sentence", "chain: weights", "labels"):
        assert rows[what].verdict == "right"
    assert any(what.startswith("model.onnx: as compared: speed.1.p50_ms") for what in rows)
    assert "read it" in "\n".join(drawn(known.manifest)["licences"])
    assert known.manifest["calibration"]["temperature"] > 0
    table = [line.split()[1] for line in drawn(known.manifest)["graphs"] if line.startswith("| model.")]
    assert table[:2] == ["model.onnx", "model.int8.onnx"]  # what is served is first


def tasked(subject: Subject, task: Any, student: Any = None) -> Subject:
    """Return the subject with another task, and with another student of it."""
    plan = replace(subject.recipe.student, task=task.build(task.Options()))
    student = student or subject.student
    provenance = {**subject.provenance, "digest": tensors_digest(student.network.state_dict())}
    return replace(subject, recipe=replace(subject.recipe, student=plan), student=student, provenance=provenance)


@pytest.mark.parametrize("kind", ["plain", "openvino", "sets", "vectors", "own"])
def test_honest_exports_of_other_kinds(kind, tmp_path):
    labels = answers(small_subject(tmp_path / "first"), PIXELS)
    sets = np.eye(3, dtype=np.int8)[labels]
    subject, images = painted(tmp_path, PIXELS, sets if kind == "sets" else labels)
    options = ExportOptions(int8=True, pt2=True, calibrate=False)
    if kind == "openvino":
        pytest.importorskip("openvino")
        options = replace(options, openvino=True)
    if kind == "sets":
        subject, options = tasked(subject, label_sets), replace(options, defer_share=0.2)
    if kind == "vectors":
        subject = tasked(subject, embedding, load(Spec("student", "vit_tiny_patch16_224", VIT, ()), SIZE).eval())
    if kind == "own":  # a network that is no timm's: no code of it can be run
        subject.student.architecture = {"module": "mine:net"}
        del subject.student.network.pretrained_cfg
    write(subject, tmp_path / "export", options)
    for trust in (False, True):
        known = found(tmp_path / "export", images, trust=trust)
        assert not wrong(known), wrong(known)
        assert trust == any(row.what.startswith("model.pt2: images") for row in known.rows)


# ---------------------------------------------------------------------------------------------------------- the lies


class Liar:
    """An export in the hands of somebody who changes it; `reseal` makes hashes and checksum fit again."""

    def __init__(self, folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        self.folder = folder
        self.manifest = {key: value for key, value in content.items() if key not in ("files", "checksum")}

    def edit(self, name: str, old: str, new: str) -> None:
        file = self.folder / name
        text = file.read_text()
        assert old in text, (name, old)
        file.write_text(text.replace(old, new))

    def set(self, path: str, value: Any, file: str = MANIFEST) -> None:
        """Change a value of a JSON file; `/` between the keys."""
        content = self.manifest if file == MANIFEST else json.loads((self.folder / file).read_text())
        *above, last = path.split("/")
        inner = content
        for key in above:
            inner = inner[key]
        assert inner[last] != value
        inner[last] = value
        if file != MANIFEST:
            (self.folder / file).write_text(json.dumps(content))

    def redraw(self, old: dict[str, list[str]]) -> None:
        """Change in the card what is drawn from the manifest."""
        for part, lines in drawn(self.manifest).items():
            if lines != old[part]:
                self.edit("README.md", "\n".join(old[part]), "\n".join(lines))

    def reseal(self) -> None:
        seal(self.folder, self.manifest)

    def plain(self) -> None:
        sealed = json.loads((self.folder / MANIFEST).read_text())
        (self.folder / MANIFEST).write_text(json.dumps({**sealed, **self.manifest}))


def other_weights(liar: Liar) -> None:
    """Weights of another step, with every hash made to fit."""
    file = liar.folder / "model.safetensors"
    tensors = {name: one + 0.05 * torch.randn_like(one) for name, one in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    digest = tensors_digest(tensors)
    liar.set("chain/student/exported", digest)
    liar.set("version", digest[:12])
    liar.set("digest", digest, "kd.json")


def other_graph(liar: Liar) -> None:
    torch.manual_seed(7)
    student = load(Spec("student", "vit_tiny_patch16_224", VIT, CLASSES), SIZE).eval()
    runtimes.write_onnx(runtimes.export_program(student, SIZE), liar.folder / "model.onnx")


def labels_of(liar: Liar, drop: int = 0) -> None:
    """Change the labels of images to what is answered, or leave images out."""
    file = liar.folder / "images.csv"
    rows = list(csv.reader(file.read_text().splitlines()))[drop:]
    if not drop:
        rows = [[a, b, known, CLASSES[(CLASSES.index(name) + 1) % 3]] for a, b, known, name in rows]
    file.write_text("".join(",".join(row) + "\n" for row in rows))


SEALED = {
    "accuracy in the card": (lambda x: x.edit("README.md", "accuracy", "accuracy of 99.9 %"), "README.md: "),
    "accuracy of a graph": (lambda x: x.set("parity/model.onnx/accuracy", 0.95), "model.onnx: accuracy"),
    "right answers of int8": (lambda x: x.set("parity/model.int8.onnx/correct", 119), "model.int8.onnx: correct"),
    "same answers": (lambda x: x.set("parity/model.int8.onnx/same_top1", 90), "model.int8.onnx: same_top1"),
    "difference from PyTorch": (
        lambda x: x.set("parity/model.int8.onnx/max_difference", 1e-6),
        "model.int8.onnx: max_difference",
    ),
    "calibration error": (lambda x: x.set("parity/model.onnx/ece", 0.4), "model.onnx: ece"),
    "CPU time": (lambda x: x.set("parity/model.onnx/cpu_ms", 1e-4), "model.onnx: cpu_ms"),
    "p50": (lambda x: x.set("variants/model.onnx/speed/1/p50_ms", 1e-4), "model.onnx: as compared: speed.1.p50_ms"),
    "drop of int8": (lambda x: x.set("variants/model.int8.onnx/drop", -0.4), "model.int8.onnx: as compared: drop"),
    "megabytes": (lambda x: x.set("variants/model.onnx/bytes", 999), "model.onnx: as compared: bytes"),
    "score of the card": (lambda x: x.set("scores/value", 0.99), "README.md: accuracy"),
    "an exchanged graph": (other_graph, "model.onnx: accuracy"),
    "permuted classes": (lambda x: x.set("label_names", list(CLASSES[::-1]), "config.json"), "model.onnx: accuracy"),
    "moved threshold": (lambda x: x.set("output/defer/threshold", 0.2), "sure: threshold"),
    "promise of sure": (
        lambda x: x.set("output/defer/stated/model.onnx/wrong", 0.001),
        "sure: promise of model.onnx: wrong",
    ),
    "another crop": (lambda x: x.set("input/crop", 0.8), "preprocessing: "),
    "other means": (
        lambda x: x.set("pretrained_cfg/mean", [0.1, 0.1, 0.1], "config.json"),
        "model.onnx: max_difference",
    ),
    "weights of another step": (other_weights, "model.onnx: max_difference"),
    "another step": (lambda x: x.set("chain/student/step", 9000), "chain: run, step, weights and version"),
    "another version": (lambda x: x.set("version", "0" * 12), "chain: run, step, weights and version"),
    "hash of a graph": (lambda x: x.set("chain/graphs/model.onnx", "0" * 64), "chain: model.onnx"),
    "licence removed": (lambda x: x.set("licences/teacher", "unknown"), "licence: teacher, as timm has it"),
    "accepted megabytes": (lambda x: x.set("accepted/found/mb", 0.001), "accepted: mb"),
    "sentence": (lambda x: x.set("accepted/sentence", "drop<=20 mb<=0.001"), "accepted: the sentence"),
    "labels": (labels_of, "labels"),
    "left out images": (lambda x: labels_of(x, 20), "model.onnx: images"),
}
PLAIN = {
    "a number of the card": (lambda x: x.edit("README.md", "accuracy", "accuracy 99 %"), "README.md: sha256"),
    "a number of the manifest": (lambda x: x.set("parity/model.onnx/accuracy", 0.99), "manifest.json: checksum"),
    "a graph": (other_graph, "model.onnx: sha256"),
    "weights": (other_weights, "model.safetensors: sha256"),
    "a licence of the card": (lambda x: x.edit("README.md", "dinov3-license", "mit"), "README.md: licences"),
    "a file more": (lambda x: (x.folder / "more.py").write_text("1"), "more.py: sha256"),
    "no card": (lambda x: (x.folder / "README.md").unlink(), "README.md: sha256"),
    "a file less": (lambda x: (x.folder / "model.int8.onnx").unlink(), "model.int8.onnx: sha256"),
}


@pytest.mark.parametrize("lie", [*SEALED, *PLAIN])
def test_a_lie_is_found(lie, honest, tmp_path):
    folder = shutil.copytree(honest[0], tmp_path / "export")
    liar = Liar(folder)
    tell, named = SEALED.get(lie) or PLAIN[lie]
    if "as compared" not in named:  # servers need not be timed for it
        liar.manifest.pop("variants")
        liar.reseal()
    before = drawn(liar.manifest)
    tell(liar)
    if lie in SEALED:
        liar.redraw(before)
        liar.reseal()
    else:
        liar.plain()
    known = found(folder, honest[1])
    assert [row for row in wrong(known) if row.startswith(named)], wrong(known)
    with pytest.raises(NotVerifiedError) as raised:
        known.require()
    assert raised.value.exit_code == 3


def test_what_cannot_be_verified(honest, tmp_path):
    export, images = honest
    (tmp_path / "none").mkdir()
    other = tmp_path / "other"
    painted(other, PIXELS, np.zeros(len(PIXELS), np.int64))
    bare = shutil.copytree(export, tmp_path / "bare")
    (bare / MANIFEST).unlink()
    broken = shutil.copytree(export, tmp_path / "broken")
    (broken / MANIFEST).write_text('{"files": 3, "checksum": 5}')
    for folder, data, told in (
        (bare, images, "is not an export: it has no manifest.json"),
        (broken, images, "is damaged, or was written by an older kd"),
        (export, "", "--data: is missing"),
        (export, tmp_path / "none", "--data: no images in"),
        (export, tmp_path / "gone", "--data: .* does not exist"),
        (export, other / "images", "--data: .* holds 0 of the 120 images"),
    ):
        with pytest.raises(KdError, match=told) as raised:
            found(folder, data)
        assert raised.value.exit_code == 2
        assert "\n" not in str(raised.value)
