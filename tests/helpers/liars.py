"""An export with all that it can claim, and what a dishonest supplier makes of it,
sealed with kd's own code.
"""

from __future__ import annotations

import csv
import json
import shutil
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from subjects import CLASSES, SIZE, measure_briefly, small_subject

from kd.config.schema import TaskSection
from kd.config.tuning import Fit
from kd.deploy.export import parity
from kd.deploy.export.card import card
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import Subject
from kd.deploy.export.package import seal
from kd.deploy.verify.comparison import WRONG
from kd.deploy.verify.verify import Verdict, VerifyOptions, verify
from kd.files.manifest import MANIFEST, sha256
from kd.models.classifier import tensors_digest

INT8 = "model.int8.onnx"
MANY = np.random.default_rng(5).integers(0, 256, (120, 3, SIZE, SIZE), np.uint8)
TEACHER = "vit_small_patch16_dinov3.lvd1689m"
LICENCES = {
    "teacher": "dinov3-license",
    "data": "cc-by-4.0",
    "student's first weights": "none: random weights",
}


def painted(
    folder: Path, pixels: np.ndarray, labels: np.ndarray
) -> tuple[Subject, Path]:
    """Return a subject with its validation images in class folders, and the folder."""
    encoded = []
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        class_folder = CLASSES[label] if labels.ndim == 1 and label >= 0 else "all"
        file = folder / "images" / class_folder / f"{i:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(file)
        encoded.append(zlib.crc32(file.read_bytes()))

    def images(limit: int, training: bool = False):
        for first in range(0, len(pixels), parity.BATCH):
            batch = slice(first, min(first + parity.BATCH, limit or len(pixels)))
            if len(pixels[batch]):
                yield pixels[batch], labels[batch], encoded[batch]

    subject = small_subject(
        folder / "runs",
        teacher=TEACHER,
        images=lambda: nullcontext(images),
        licences=LICENCES,
    )
    # the teacher's weights come with its name
    teacher = replace(subject.recipe.teacher, fit=Fit())
    recipe = subject.recipe.with_(teacher=teacher)
    return replace(subject, recipe=recipe), folder / "images"


def tasked(subject: Subject, task: Any, student: Any = None) -> Subject:
    """Return the subject with another task, and with another student of it."""
    recipe = subject.recipe.with_(
        task=TaskSection(kind=task.__name__.rpartition(".")[2])
    )
    student = student or subject.student
    provenance = {
        **subject.provenance,
        "digest": tensors_digest(student.network.state_dict()),
    }
    return replace(subject, recipe=recipe, student=student, provenance=provenance)


def answers(subject: Subject, pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return subject.student.answer(torch.from_numpy(pixels)).argmax(1).numpy()


def honest_export(folder: Path) -> Path:
    """Write an export with all that it can claim, and images, two of three right."""
    labels = answers(small_subject(folder / "first"), MANY)
    labels[::3] = (labels[::3] + 1) % 3
    subject, _ = painted(folder, MANY, labels)
    right = float((answers(subject, MANY) == labels).mean())
    metrics = {"accuracy": right, "teacher_accuracy": 0.8, "agreement": 0.7}
    subject = replace(subject, provenance={**subject.provenance, "metrics": metrics})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "TIMED_SECONDS", 0.01)
        measure_briefly(patch)
        options = ExportOptions(
            int8=True,
            compare=True,
            accept="drop<=20 mb<=5",
            defer_share=0.2,
            license="mit",
        )
        write(subject, folder / "export", options)
    return folder


def verify_export(export: Path, images: Path | str = "", **options: Any) -> Verdict:
    return verify(VerifyOptions(export=export, data=str(images), **options))


def wrong_rows(verdict: Verdict) -> list[str]:
    return [" | ".join(row) for row in verdict.rows if row.verdict == WRONG]


class Liar:
    """An export in the hands of somebody who changes it, redraws the card, and makes
    hashes and checksum fit again.
    """

    def __init__(self, folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        self.folder = folder
        self.manifest = {
            key: value
            for key, value in content.items()
            if key not in ("files", "checksum")
        }

    def set(self, path: str, value: Any, file: str = MANIFEST) -> None:
        """Change a value of a JSON file; `/` between the keys."""
        content = self.manifest
        if file != MANIFEST:
            content = json.loads((self.folder / file).read_text())
        *above, last = path.split("/")
        inner = content
        for key in above:
            inner = inner[key]
        assert inner.get(last) != value
        inner[last] = value
        if file != MANIFEST:
            (self.folder / file).write_text(json.dumps(content))

    def get(self, path: str) -> Any:
        inner = self.manifest
        for key in path.split("/"):
            inner = inner[key]
        return inner

    def edit(self, old: str, new: str) -> None:
        """Change the card, once all else is told."""
        file = self.folder / "README.md"
        text = file.read_text()
        assert old in text, old
        file.write_text(text.replace(old, new))

    def rows(self, change: Callable[[list[list[str]]], list[list[str]]]) -> None:
        """Change the list of images, and the counts of images with it."""
        file = self.folder / "images.csv"
        rows = change([*csv.reader(file.read_text().splitlines())])
        file.write_text("".join(",".join(row) + "\n" for row in rows))
        for graph in self.manifest["parity"].values():
            graph["images"] = len(rows)

    def redraw(self) -> None:
        (self.folder / "README.md").write_text(
            card(json.loads(json.dumps(self.manifest, sort_keys=True)))
        )

    def reseal(self) -> None:
        seal(self.folder, self.manifest)


def graph_of(liar: Liar, name: str, source: Path | None = None) -> None:
    """Make hash and size of a graph fit, which `source` may replace."""
    if source is not None:
        shutil.copy(source, liar.folder / name)
    liar.manifest["chain"]["graphs"][name] = sha256(liar.folder / name)
    if name == liar.manifest.get("accepted", {}).get("file"):
        liar.manifest["accepted"]["found"]["mb"] = round(
            (liar.folder / name).stat().st_size / 1e6, 4
        )


def make_liar(
    honest: tuple[Path, Path],
    tmp_path: Path,
    lies: list[Callable[[Liar], Any]],
    speeds: bool = False,
) -> Liar:
    liar = Liar(shutil.copytree(honest[0], tmp_path / "export"))
    if not speeds:  # servers need not be timed for it
        liar.manifest["variants"] = {}
    for lie in lies:
        lie(liar)
    if not liar.manifest["variants"]:
        del liar.manifest["variants"]
    liar.redraw()
    liar.reseal()
    return liar
