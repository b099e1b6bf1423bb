"""What student and teacher of a finished run answer on validation images; computed once, kept in the run folder."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from PIL import Image

from kd.artifacts.run_dir import RunDir
from kd.contracts import TeacherModel
from kd.errors import CorruptImage, DataError, KdError, RunError
from kd.files.storage import write_json
from kd.jobs.teach import fit_place, is_fitted, merge_teachers
from kd.models.teacher import LiveTeacher
from kd.report.record import Answers, Picture
from kd.setup.data import Data, evenly_spaced, open_sources, views
from kd.setup.finished import best_student
from kd.setup.recipe import Recipe
from kd.setup.teacher import load_teacher
from kd.types import Batch

FILE = "answers.json"
BATCH = 50
"""Images of a forward."""
SHOWN, SIDE = 24, 160
"""Pictures on which the models differ; their side, pixels."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers, or why there are none."""

    answers: Answers | None
    note: str = ""


def answers(folder: RunDir, recipe: Recipe, images: int) -> Asked:
    """Return what the best student and its teacher answer, from the run folder or computed now, on one device.

    A teacher is loaded, never fitted.

    Args:
        folder: of the run.
        recipe: of the run.
        images: of the validation split, evenly spaced; 0: all of them.
    """
    if not (recipe.reads.student_logits and recipe.reads.teacher_logits) or recipe.reads.sigmoid:
        return Asked(None)  # an embedding, or a set of labels, is no answer to count
    try:
        data = open_sources(recipe.data)
        data.val.prepare()
        belongs = {"weights": folder.best_weights(), "data": data.val.fingerprint, "images": images}
        file, kept = folder.path / FILE, _kept(folder, belongs)
        if kept is None:
            kept = {**_ask(folder, recipe, data, images), "belongs": belongs}
            write_json(file, kept)
    except KdError as error:
        return Asked(None, f"No answers of the models on validation images: {error}")
    found = _answers(kept, data)
    try:
        return Asked(replace(found, pictures=_pictures(kept, data)))
    except DataError as error:  # each missing file is waited for: one is enough
        return Asked(found, f"No photographs: {error}")


def _kept(folder: RunDir, belongs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answers that an earlier report kept, if they are the best checkpoint's for these images."""
    try:
        found = json.loads((folder.path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("belongs") == belongs else None


def _ask(folder: RunDir, recipe: Recipe, data: Data, images: int) -> dict[str, Any]:
    """Run both models over validation images as evaluation shows them, in float32.

    Raises:
        RunError: the images have no labels.
    """
    if not data.labelled:
        raise RunError("data.labels", "is none, and answers are counted by label", "Labelled images", "")
    classes = data.classes
    student, _ = best_student(folder, recipe, classes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {"student": student.to(device).eval()}
    teacher = _teacher(recipe, data)
    if teacher is not None:
        models["teacher"] = LiveTeacher(teacher, device).validation()  # type: ignore[assignment]
    shown = views(data, recipe.seed)[1]
    asked = evenly_spaced(len(data.val), images or len(data.val))
    found: dict[str, Any] = {"of": len(data.val), "ids": [], "label": []}
    found |= {f"{name}{part}": [] for name in models for part in ("", "_share")}
    for start in range(0, len(asked), BATCH):
        samples = [(id, shown.load(id, 0)) for id in asked[start : start + BATCH]]
        samples = [(id, sample) for id, sample in samples if sample.readable and sample.label >= 0]
        if not samples:
            continue
        pixels = torch.stack([sample.pixels for _, sample in samples]).to(device)
        labels = torch.tensor([sample.label for _, sample in samples])
        ids = torch.tensor([id for id, _ in samples], device=device)
        found["ids"] += [id for id, _ in samples]
        found["label"] += labels.tolist()
        for name, model in models.items():
            with torch.no_grad():
                batch: Any = pixels if name == "student" else Batch.of(pixels, labels.to(device), ids)
                best = model(batch).logits.float().softmax(-1).max(-1)
            found[name] += best.indices.tolist()
            found[f"{name}_share"] += [round(share, 4) for share in best.values.tolist()]
    return found


def _teacher(recipe: Recipe, data: Data) -> TeacherModel | None:
    """Load the teacher of a run.

    Raises:
        RunError: it was fitted elsewhere and is not here.
    """
    if not recipe.teacher.model:
        return None
    models = []
    for where, alone in recipe.teachers.items():
        place = ""
        if where in recipe.fits:
            target = fit_place(recipe.fits[where], data.fingerprint)[1]
            if not is_fitted(target):
                raise RunError(where, f"the fitted teacher is not at '{target}'", "", "Run in the folder of kd-train")
            place = str(target)
        given: Any = {"where": where, "images": data.images(recipe.seed, recipe.views), "sigmoid": recipe.reads.sigmoid}
        size, features = recipe.data.image_size, recipe.reads.features
        models.append(load_teacher(alone, data.asked, size, features, place, **given))
    return merge_teachers(recipe.teacher, models, recipe.reads.sigmoid)


def _answers(kept: Mapping[str, Any], data: Data) -> Answers:
    return Answers(
        classes=tuple(data.classes),
        label=kept["label"],
        student=kept["student"],
        teacher=kept.get("teacher", []),
        of=kept["of"],
    )


def _pictures(kept: Mapping[str, Any], data: Data) -> list[Picture]:
    """Return the images on which the models differ: those that the teacher gets right first, its surest ones first.

    Raises:
        DataError: an image cannot be read.
    """
    if "teacher" not in kept:
        return []
    differ = [i for i, answer in enumerate(kept["student"]) if answer != kept["teacher"][i]]
    differ.sort(key=lambda i: (kept["teacher"][i] != kept["label"][i], -kept["teacher_share"][i]))
    classes, show = data.classes, data.evaluate()
    found: list[Picture] = []

    def named(who: str, i: int) -> str:
        return classes[int(kept[who][i])]

    for i in differ:
        if len(found) == SHOWN:
            break
        id = kept["ids"][i]
        try:
            image = show(data.val.decode(id).image, Random(0))
        except CorruptImage:
            continue
        found.append(
            Picture(
                name=data.val.name(id),
                truth=named("label", i),
                teacher=named("teacher", i),
                teacher_share=kept["teacher_share"][i],
                student=named("student", i),
                student_share=kept["student_share"][i],
                data=_thumbnail(image),
            )
        )
    return found


def _thumbnail(image: Image.Image) -> str:
    """Return an image as a data URI of a small JPEG."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
