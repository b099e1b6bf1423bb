"""Predictions of student and teacher on validation images, cached in a run's
answers.json.
"""

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
from kd.setup.data import open_sources
from kd.setup.finished import Trust
from kd.setup.recipe import Recipe
from kd.setup.student import best_student
from kd.study.audit.lists import FOLDER, read_repeats, thumbnail, with_ids
from kd.study.report.record import Picture, Predictions

FILE = "answers.json"
MOST_PICTURES = 24  # most pictures on which the models differ, 6 kB each in the page


def answers(
    folder: RunDir, recipe: Recipe, images: int, vouched: Trust
) -> tuple[Predictions | None, str]:
    """Return the predictions of the best student and its teacher (or None), and a note
    if some are missing.

    They are read from the run folder, or computed now on one device, for `images` of
    the validation split, evenly spaced; 0: all. A teacher is loaded, never fitted.
    `vouched`: the permissions of `--trust`.
    """
    if recipe.task.logits != "softmax" or not recipe.read.teacher_logits:
        return (
            None,
            "",
        )  # embeddings and sets of labels cannot be counted as predictions
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
            model = load_fitted(recipe, data).model
            if not data.labelled:
                raise RunError(
                    "data.labels",
                    "has no label: predictions are counted by label",
                    "Labelled images",
                    "",
                )
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            best, _ = best_student(folder, recipe, data.classes)
            models: dict[str, Any] = {"student": best.to(device).eval()}
            models |= (
                {}
                if model is None
                else {"teacher": LiveTeacher(model, device).validation()}
            )
            stored = {
                **ask_all(models, data.views()[1], images, device),
                "belongs": belongs,
            }
            write_json(folder.path / FILE, stored)
    except KdError as error:
        return None, f"No predictions of the models on validation images: {error}"
    pairs = [
        pair
        for pair in with_ids(read_repeats(folder.path / FOLDER), data.splits)
        if pair.leaks
    ]
    leaks = {
        seen.name
        for pair in pairs
        for seen in (pair.first, pair.second)
        if seen.split == "val"
    }
    found = Predictions(
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
            if leaks and data.val.name(id) in leaks
        ],
    )
    try:
        pictures = _pictures(
            stored,
            data.evaluation_views(data.val, on_corrupt="skip"),
            list(data.classes),
        )
    except DataError as error:  # every missing file takes retries: one is enough
        return found, f"No photographs: {error}"
    return replace(found, pictures=pictures), ""


def _stored(folder: RunDir, belongs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the predictions stored by an earlier report, if they are the chosen
    checkpoint's for these images.
    """
    try:
        content = read_json(folder.path / FILE, "run", "Remove the file")
    except (
        OSError,
        RunError,
    ):  # a damaged file counts as missing: the models run again
        return None
    return content if content.get("belongs") == belongs else None


def _of_pixels(model: Any, batch: Any) -> Any:
    """Run a model that takes pixels on a batch."""
    return model(batch.image)


def _pictures(
    stored: Mapping[str, Any], shown: Views, classes: list[str]
) -> list[Picture]:
    """Return the images on which the models differ, first those with the teacher right,
    by its confidence.
    """
    if "teacher" not in stored:
        return []
    differ = [
        i
        for i, answer in enumerate(stored["student"])
        if answer != stored["teacher"][i]
    ]
    differ.sort(
        key=lambda i: (
            stored["teacher"][i] != stored["label"][i],
            -stored["teacher_share"][i],
        )
    )
    pictures = []
    for i in differ:
        id = stored["ids"][i]
        truth, teacher, student = (
            classes[stored[name][i]] for name in ("label", "teacher", "student")
        )
        sure, own = (stored[f"{name}_share"][i] for name in ("teacher", "student"))
        if len(pictures) < MOST_PICTURES and (sample := shown.load(id, 0)).readable:
            small = thumbnail(Image.fromarray(sample.pixels.permute(1, 2, 0).numpy()))
            pictures.append(
                Picture(
                    shown.source.name(id), truth, teacher, sure, student, own, small
                )
            )
    return pictures


def ask_all(
    models: Mapping[str, Any], shown: Dataset, images: int, device: torch.device
) -> dict[str, Any]:
    """Run models in float32 on `images` images of a split in evaluation's view; 0: all.

    Return JSON values: `of` (images of the split), `ids`, `label`, and per model its
    predictions by name and their probabilities (`NAME_share`). "student" takes pixels,
    other models a batch. `student_sure`: its probabilities after a temperature fitted
    on every second image; `cpu_ms`: CPU time per image by model.
    """
    sampled = evenly_spaced(len(shown), images or len(shown))
    content: dict[str, Any] = {"of": len(shown), "ids": [], "label": []}
    content |= {f"{name}{part}": [] for name in models for part in ("", "_share")}
    logits: list[torch.Tensor] = []
    seconds = dict.fromkeys(models, 0.0)
    for every in batches_of(shown, sampled):
        batch = every.take((every.label >= 0).nonzero()[:, 0])
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
            best = logits_BC.softmax(-1).max(-1)
            logits += [logits_BC] if takes_pixels else []
            content[name] += best.indices.tolist()
            content[f"{name}_share"] += [
                round(share, 4) for share in best.values.tolist()
            ]
    content["student_sure"] = []
    if logits:
        logits_NC, label_N = torch.cat(logits), torch.tensor(content["label"])
        chosen_NC, labels = logits_NC[::2], label_N[::2]
        wrong = bool(
            (chosen_NC.argmax(1) != labels).any()
        )  # without a mistake there is no best temperature
        by = temperature(chosen_NC, labels) if wrong else 1.0
        content["student_sure"] = (logits_NC.double() / by).softmax(1).amax(1).tolist()
    count = max(1, len(content["label"]))
    content["cpu_ms"] = (
        {}
        if device.type != "cpu"
        else {name: 1000 * each / count for name, each in seconds.items()}
    )
    return content
