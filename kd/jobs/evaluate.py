"""Evaluate the best student of a run, its teacher and their agreement; audit its data.

An audit lists labels that the teacher doubts, and repeated images that only its
predictions find.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd import config
from kd.core.contracts import Source
from kd.core.errors import RunError
from kd.core.scores import Scored
from kd.data.loader import batches_of
from kd.data.views import Views
from kd.engine.run import Run
from kd.engine.snapshot import load_distillation
from kd.jobs.distill import score
from kd.jobs.progress.console import Console
from kd.jobs.train import obtain_teachers, open_job
from kd.models.cache import CachedTeacher, Store
from kd.models.inference import predict
from kd.setup.build import build_run
from kd.setup.data import Data
from kd.setup.finished import Trust, opened_run, require_files
from kd.setup.recipe import Recipe, resolve
from kd.study.audit import lists
from kd.study.audit.labels import (
    TeacherAnswers,
    add_repeats,
    join_answers,
    labelled_answers,
    write_labels,
)

READ = 1024  # cache records read at once: 4 MB for 1,000 classes

log = logging.getLogger("kd")


def evaluate(
    path: Path,
    overrides: Sequence[str] = (),
    trust: bool = False,
    split: str = "val",
    audit: bool = False,
) -> Scored:
    """Score the best student of a run and its teacher on a split; audit on request."""
    folder, stored = opened_run(path, trust)
    require_files(path, stored.data)
    recipe = resolve(config.load(config.to_dict(stored), overrides))
    vouched = Trust.of(trust, overrides, recipe.data)
    vouched.check_models({**recipe.members, "student": recipe.student})
    vouched.check_folder(recipe.data)
    state, best, _ = folder.best()

    def examine(data: Data) -> None:
        vouched.check_images(data, folder.manifest())
        if split == "test" and data.test is None:
            wrong = "is test, but the data of the run names no test split"
            remedy = (
                "Add data.test_split=FOLDER behind the run, or the key that its kind of"
                " data has (`kd help data`)"
            )
            raise RunError("--split", wrong, "val", remedy)

    with open_job(recipe, obtain_teachers, fill=False, examine=examine) as (setting, _):
        built = build_run(setting, folder, Console("", quiet=True))
        load_distillation(built.run.distillation, best)
        scored = score(built, state.step, len(folder.metrics("val")), split == "test")
        if audit:
            for line in audit_run(
                built.run, recipe, setting.teachers.data, folder.path
            ):
                log.info(line)
        return scored


def audit_run(run: Run, recipe: Recipe, data: Data, folder: Path) -> list[str]:
    """Run the teacher on a run's images, write doubtful labels, return a summary.

    They are written to the folder's `audit`. For training images the cached outputs are
    used (mean over views); the teacher runs on the others.
    """
    has_logits = recipe.members and recipe.read.teacher and recipe.read.teacher_logits
    if recipe.task.logits != "softmax" or not has_logits or not data.labelled:
        wrong = (
            "the run has no teacher of one class per image, or its images have no"
            " labels"
        )
        allowed = "A teacher whose logits the losses read, and one label per image"
        raise RunError("--audit", wrong, allowed, "")
    if run.backend.world_size > 1:
        raise RunError(
            "--audit", "runs in one process", "", "Start it without a launcher"
        )
    live: Any = run.teacher
    ids = np.arange(len(data.train))
    predictions = []
    if isinstance(run.teacher, CachedTeacher):
        live = run.teacher.live
        if not data.plan.augment.mixes:  # mixed images have two labels
            store = run.teacher.store
            cached = _cached_predictions(store, data.plan.views, data.train)
            predictions.append(cached)
            ids = np.setdiff1d(ids, cached.id)
    train_views = data.evaluation_views(data.train, "skip")
    predictions.append(labelled_predictions(live, train_views, ids.tolist()))
    val_views = data.evaluation_views(data.val, "skip")
    answers = {
        "train": join_answers(predictions),
        "val": labelled_predictions(live.validation(), val_views, range(len(data.val))),
    }
    target = folder / lists.FOLDER
    return [
        *write_labels(answers, data.splits, data.classes, target),
        *add_repeats(answers, data.splits, target),
        f"listed    in '{target}', with pictures",
    ]


def _cached_predictions(store: Store, views: int, source: Source) -> TeacherAnswers:
    """Return the mean of the cached outputs over views, for images that have any."""
    answers = []
    for start in range(0, store.num_images, READ):
        ids = range(start, min(start + READ, store.num_images))
        total: Any = 0.0
        count = np.zeros(len(ids))
        for view in range(views):
            arrays, readable, _ = store.read_arrays(view, ids)
            logits = store.codec.unpack(arrays).logits
            shares = logits.float().softmax(-1).numpy() * readable[:, None]
            total = total + shares
            count = count + readable
        rows = np.flatnonzero(count)
        if len(rows):
            mean = total[rows] / count[rows, None]
            answers.append(labelled_answers(np.asarray(ids)[rows], mean, source))
    return join_answers(answers)


def labelled_predictions(
    teacher: Any, views: Views, ids: Sequence[int]
) -> TeacherAnswers:
    """Return a teacher's outputs for the images that have a label and can be read."""
    source = views.source
    weight = next(teacher.model.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device
    batches = batches_of(views, [id for id in ids if source.label(id) >= 0])
    answers = []
    for prediction in predict(teacher, batches, device):
        shares = prediction.outputs.logits.float().softmax(-1)
        answers.append(labelled_answers(prediction.ids.numpy(), shares.numpy(), source))
    return join_answers(answers)
