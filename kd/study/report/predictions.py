"""Predictions of student and teacher on validation images, cached in answers.json of the run folder."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from kd.core.contracts import Source, TeacherModel
from kd.core.errors import DataError, KdError, RunError
from kd.data.views import Views
from kd.files.json_file import read_json
from kd.files.run_dir import RunDir
from kd.files.storage import write_json
from kd.models.teacher import LiveTeacher
from kd.setup.data import Data, DataPlan, open_sources
from kd.setup.recipe import StudentPlan, TeacherPlan
from kd.setup.teacher import load_fitted
from kd.study.answers import ask_all
from kd.study.audit.lists import FOLDER, read_repeats, with_ids
from kd.study.finished import Trust, best_student
from kd.study.report.record import Picture, Predictions

FILE = "answers.json"
MOST_PICTURES, SIDE = 24, 160  # pictures on which the models differ, 6 kB each in the page; their side, pixels


def answers(
    folder: RunDir, plan: DataPlan, teacher: TeacherPlan, student: StudentPlan, images: int, vouched: Trust
) -> tuple[Predictions | None, str]:
    """Return the predictions of the best student and its teacher, or None, and a note about what is missing.

    They come from the run folder, or are computed now on one device. `images` of the validation split are taken,
    evenly spaced; 0: all. A teacher is loaded, never fitted. `vouched` says what the run folder may name.
    """
    if student.task.logits != "softmax" or not teacher.logits:
        return None, ""  # an embedding, or a set of labels, is no answer to count
    try:
        vouched.check_folder(plan)
        data = open_sources(plan)
        vouched.check_images(data, folder.manifest())
        data.val.prepare()
        belongs = {"weights": folder.best_weights(), "data": data.val.fingerprint, "images": images, "form": 2}
        stored = _stored(folder, belongs)
        if stored is None:
            vouched.check_teacher(teacher)
            vouched.check_student(student)
            stored = {**_predict(folder, student, load_fitted(teacher, data).model, data, images), "belongs": belongs}
            write_json(folder.path / FILE, stored)
    except KdError as error:
        return None, f"No answers of the models on validation images: {error}"
    answers = Predictions(
        classes=tuple(data.classes),
        label=stored["label"],
        student=stored["student"],
        teacher=stored.get("teacher", []),
        of=stored["of"],
        student_sure=stored["student_sure"],
        cpu_ms=stored["cpu_ms"],
        leaked=_leaked(stored["ids"], data.splits, folder.path),
    )
    try:
        return replace(
            answers, pictures=_pictures(stored, data.shown(data.val, on_corrupt="skip"), list(data.classes))
        ), ""
    except DataError as error:  # each missing file is waited for: one is enough
        return answers, f"No photographs: {error}"


def _stored(folder: RunDir, belongs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the predictions that an earlier report stored, if they are the best checkpoint's for these images."""
    try:
        content = read_json(folder.path / FILE, "run", "Remove the file")
    except (OSError, RunError):  # damaged is as good as not there: the models answer again
        return None
    return content if content.get("belongs") == belongs else None


def _predict(
    folder: RunDir, plan: StudentPlan, teacher: TeacherModel | None, data: Data, images: int
) -> dict[str, Any]:
    """Run both models over validation images as evaluation shows them, in float32."""
    if not data.labelled:
        raise RunError("data.labels", "is none, and answers are counted by label", "Labelled images", "")
    student, _ = best_student(folder, plan, data.plan, data.classes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models: dict[str, Any] = {"student": student.to(device).eval()}
    if teacher is not None:
        models["teacher"] = LiveTeacher(teacher, device).validation()
    return ask_all(models, data.views()[1], images, device)


def _leaked(ids: Sequence[int], splits: Mapping[str, Source], path: Path) -> list[int]:
    """Return which of the validation images are in another split too, as the list of `--check` or `--audit` says."""
    pairs = [pair for pair in with_ids(read_repeats(path / FOLDER), splits) if pair.leaks]
    names = {seen.name for pair in pairs for seen in (pair.one, pair.other) if seen.split == "val"}
    return [i for i, id in enumerate(ids) if splits["val"].name(id) in names] if names else []


def _pictures(stored: Mapping[str, Any], shown: Views, classes: list[str]) -> list[Picture]:
    """Return the images on which the models differ: those that the teacher gets right first, its surest ones first."""
    if "teacher" not in stored:
        return []
    differ = [i for i, answer in enumerate(stored["student"]) if answer != stored["teacher"][i]]
    differ.sort(key=lambda i: (stored["teacher"][i] != stored["label"][i], -stored["teacher_share"][i]))
    pictures = []
    for i in differ:
        if len(pictures) == MOST_PICTURES:
            break
        id = stored["ids"][i]
        truth, teacher, student = (classes[stored[name][i]] for name in ("label", "teacher", "student"))
        sample = shown.load(id, 0)
        if not sample.readable:
            continue
        picture = Picture(
            name=shown.source.name(id),
            truth=truth,
            teacher=teacher,
            teacher_share=stored["teacher_share"][i],
            student=student,
            student_share=stored["student_share"][i],
            data=_thumbnail(Image.fromarray(sample.pixels.permute(1, 2, 0).numpy())),
        )
        pictures.append(picture)
    return pictures


def _thumbnail(image: Image.Image) -> str:
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
