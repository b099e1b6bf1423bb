"""Predict validation images with student and teacher, cached in answers.json."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from kd.core.contracts import Dataset
from kd.core.errors import DataError, KdError, RunError
from kd.core.seeds import evenly_spaced
from kd.data.loader import batches_of
from kd.data.views import Views
from kd.files.json_file import read_json
from kd.files.run_dir import RunDir
from kd.files.storage import write_json
from kd.models.inference import predict
from kd.models.live_teacher import LiveTeacher
from kd.parts.tasks.single_label import temperature
from kd.setup.build_teacher import load_fitted
from kd.setup.data import Data, open_sources
from kd.setup.finished import Trust
from kd.setup.recipe import Recipe
from kd.setup.student import best_student
from kd.study.audit.lists import FOLDER, read_repeats, thumbnail, with_ids
from kd.study.report.record import Picture, Predictions

FILE = "answers.json"
MOST_PICTURES = 24  # most pictures on which the models differ, 6 kB each in the page


def read_predictions(
    folder: RunDir, recipe: Recipe, images: int, vouched: Trust
) -> tuple[Predictions | None, str]:
    """Return the predictions of student and teacher, and a note if some are missing.

    They are read from the run folder, or computed now on one device, for `images` of
    the validation split, evenly spaced; 0: all. A teacher is loaded, never fitted.
    `vouched`: the permissions of `--trust`.
    """
    # embeddings and sets of labels cannot be counted as predictions
    if recipe.task.logits != "softmax" or not recipe.read.teacher_logits:
        return None, ""
    try:
        vouched.check_folder(recipe.data)
        data = open_sources(recipe.data)
        vouched.check_images(data, folder.manifest())
        data.val.prepare()
        belongs = {
            "weights": folder.best_weights(),
            "data": data.val.fingerprint,
            "images": images,
            "form": 2,
        }
        stored = _stored(folder, belongs)
        if stored is None:
            vouched.check_models({**recipe.members, "student": recipe.student})
            stored = _predict(folder, recipe, data, images)
            stored["belongs"] = belongs
            write_json(folder.path / FILE, stored)
    except KdError as error:
        return None, f"No predictions of the models on validation images: {error}"
    leaked_names = _leaked_names(folder, data)
    predictions = Predictions(
        classes=tuple(data.classes),
        label=stored["label"],
        student=stored["student"],
        teacher=stored.get("teacher", []),
        of=stored["of"],
        student_sure=stored["student_sure"],
        cpu_ms=stored["cpu_ms"],
        leaked=[
            i
            for i, id in enumerate(stored["ids"])
            if leaked_names and data.val.name(id) in leaked_names
        ],
    )
    try:
        views = data.evaluation_views(data.val, on_corrupt="skip")
        pictures = _pictures(stored, views, list(data.classes))
    except DataError as error:  # every missing file takes retries: one is enough
        return predictions, f"No photographs: {error}"
    return replace(predictions, pictures=pictures), ""


def _stored(folder: RunDir, belongs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what an earlier report stored for this checkpoint and these images."""
    try:
        content = read_json(folder.path / FILE, "run", "Remove the file")
    # a damaged file counts as missing: the models run again
    except (OSError, RunError):
        return None
    return content if content.get("belongs") == belongs else None


def _predict(folder: RunDir, recipe: Recipe, data: Data, images: int) -> dict[str, Any]:
    """Load the models of a run, and predict validation images."""
    teacher = load_fitted(recipe, data).model
    if not data.labelled:
        wrong = "has no label: predictions are counted by label"
        raise RunError("data.labels", wrong, "Labelled images", "")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    student, _ = best_student(folder, recipe, data.classes)
    models: dict[str, Any] = {"student": student.to(device).eval()}
    if teacher is not None:
        models["teacher"] = LiveTeacher(teacher, device).validation()
    return predict_all(models, data.views()[1], images, device)


def _leaked_names(folder: RunDir, data: Data) -> set[str]:
    """Return the validation images that the run folder lists in another split too."""
    repeats = with_ids(read_repeats(folder.path / FOLDER), data.splits)
    images = [
        image for pair in repeats if pair.leaks for image in (pair.first, pair.second)
    ]
    return {image.name for image in images if image.split == "val"}


def _of_pixels(model: Any, batch: Any) -> Any:
    """Run a model that takes pixels on a batch."""
    return model(batch.image)


def _pictures(
    stored: Mapping[str, Any], views: Views, classes: list[str]
) -> list[Picture]:
    """Return the images on which the models differ, the surest right teacher first."""
    if "teacher" not in stored:
        return []
    label = stored["label"]
    student = stored["student"]
    teacher = stored["teacher"]
    teacher_share = stored["teacher_share"]
    positions = [i for i, answer in enumerate(student) if answer != teacher[i]]
    positions.sort(key=lambda i: (teacher[i] != label[i], -teacher_share[i]))
    pictures = []
    for i in positions:
        if len(pictures) == MOST_PICTURES:
            break
        id = stored["ids"][i]
        sample = views.load(id, 0)
        if not sample.readable:
            continue
        pixels = sample.pixels.permute(1, 2, 0).numpy()
        pictures.append(
            Picture(
                name=views.source.name(id),
                truth=classes[label[i]],
                teacher=classes[teacher[i]],
                teacher_share=teacher_share[i],
                student=classes[student[i]],
                student_share=stored["student_share"][i],
                data=thumbnail(Image.fromarray(pixels)),
            )
        )
    return pictures


def predict_all(
    models: Mapping[str, Any], views: Dataset, images: int, device: torch.device
) -> dict[str, Any]:
    """Run models in float32 on `images` images of a split in evaluation's view; 0: all.

    Return JSON values: `of` (images of the split), `ids`, `label`, and per model its
    predictions by name and their probabilities (`NAME_share`). "student" takes pixels,
    other models a batch. `student_sure`: its probabilities after a temperature fitted
    on every second image; `cpu_ms`: CPU time per image by model.
    """
    chosen = evenly_spaced(len(views), images or len(views))
    content: dict[str, Any] = {"of": len(views), "ids": [], "label": []}
    for name in models:
        content[name] = []
        content[f"{name}_share"] = []
    student_logits: list[torch.Tensor] = []
    seconds = dict.fromkeys(models, 0.0)
    for batch in batches_of(views, chosen):
        batch = batch.take((batch.label >= 0).nonzero()[:, 0])
        if not len(batch.ids):
            continue
        content["ids"] += batch.ids.tolist()
        content["label"] += batch.label.tolist()
        for name, model in models.items():
            takes_pixels = name == "student"
            forward = partial(_of_pixels, model) if takes_pixels else model
            start = time.process_time()
            (answer,) = predict(forward, [batch], device)
            seconds[name] += time.process_time() - start
            logits_BC = answer.outputs.logits.float()
            if takes_pixels:
                student_logits.append(logits_BC)
            best = logits_BC.softmax(-1).max(-1)
            content[name] += best.indices.tolist()
            shares = [round(share, 4) for share in best.values.tolist()]
            content[f"{name}_share"] += shares
    content["student_sure"] = []
    if student_logits:
        logits_NC = torch.cat(student_logits)
        label_N = torch.tensor(content["label"])
        content["student_sure"] = _calibrated_shares(logits_NC, label_N)
    content["cpu_ms"] = {}
    if device.type == "cpu":
        count = max(1, len(content["label"]))
        for name, total in seconds.items():
            content["cpu_ms"][name] = 1000 * total / count
    return content


def _calibrated_shares(logits_NC: torch.Tensor, label_N: torch.Tensor) -> list[float]:
    """Return the largest probability of each image, with a fitted temperature."""
    fit_NC = logits_NC[::2]
    fit_label = label_N[::2]
    divisor = 1.0
    if (fit_NC.argmax(1) != fit_label).any():  # no mistake, no best temperature
        divisor = temperature(fit_NC, fit_label)
    return (logits_NC.double() / divisor).softmax(1).amax(1).tolist()
