"""`kd-evaluate RUN --audit`: labels that the teacher doubts, and images that repeat and that only it finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd.core.contracts import Source
from kd.core.errors import CorruptImage, RunError
from kd.data.batches import ask, batches_of
from kd.data.views import Views
from kd.engine.run import Run
from kd.files.storage import write_text
from kd.models.cache import CachedTeacher, Store
from kd.setup.data import Data
from kd.setup.recipe import Recipe
from kd.study.audit import lists
from kd.study.audit.album import Album
from kd.study.audit.copies import Pairs, closely
from kd.study.audit.doubts import TeacherAnswers, doubted, narrow, neighbours

READ = 1024  # records of the cache that are read at once: 4 MB of 1,000 classes
NAMED = 3  # labels that are printed: enough to see what the list holds
LIMITS = (
    "It finds single mistakes: of 320 labels changed at random 224 were among the first 320. It misses classes that "
    "are exchanged for each other: with 8 % of two classes exchanged 1 of 77 was among the first 77, since the teacher "
    "has learned the exchange."
)
"""What the list does not find, measured with one teacher; a worse one finds less."""


def audit(run: Run, recipe: Recipe, data: Data, folder: Path) -> list[str]:
    """Ask the teacher of a run about all its images, write what it doubts into `audit` of its folder, and say so.

    Of training images the cache is asked first: a mean over their views. Without a cache the teacher runs on all.
    """
    answering = recipe.teacher.members and recipe.teacher.needed and recipe.teacher.logits
    if recipe.student.task.logits != "softmax" or not answering or not data.labelled:
        wrong = "the run has no teacher that answers one class of each image, or its images have no labels"
        raise RunError("--audit", wrong, "A teacher whose logits the losses read, and one label an image", "")
    if run.backend.world_size > 1:
        raise RunError("--audit", "runs in one process", "", "Start it without a launcher")
    val = answers_to(_live(run).validation(), data.shown(data.val, "skip"), range(len(data.val)))
    answers = {"train": _training(run, data), "val": val}
    target = folder / lists.FOLDER
    return [
        *_labels(answers, data.splits, data.classes, target),
        *_repeats(answers, data.splits, target),
        f"listed    in '{target}', with pictures",
    ]


def _live(run: Run) -> Any:
    return run.teacher.live if isinstance(run.teacher, CachedTeacher) else run.teacher


def _training(run: Run, data: Data) -> TeacherAnswers:
    """Return the answers to the training images: from the cache, and for the others from the teacher."""
    shown, left, known = data.shown(data.train, "skip"), np.arange(len(data.train)), []
    if isinstance(run.teacher, CachedTeacher) and not data.plan.augment.mixes:  # mixed images have two labels
        known = [_stored(run.teacher.store, data.plan.views, data.train)]
        left = np.setdiff1d(left, known[0].id)
    return _joined([*known, answers_to(_live(run), shown, left.tolist())])


def _stored(store: Store, views: int, source: Source) -> TeacherAnswers:
    """Return the mean of the answers of the cache over the views of each image that has one."""
    found = []
    for start in range(0, store.num_images, READ):
        ids = range(start, min(start + READ, store.num_images))
        total, count = None, np.zeros(len(ids))
        for view in range(views):
            parts, readable, _ = store.parts(view, ids)
            shares = store.codec.unpack(parts).logits.float().softmax(-1).numpy() * readable[:, None]
            total, count = shares if total is None else total + shares, count + readable
        rows = np.flatnonzero(count)
        if total is not None and len(rows):
            found.append(_labelled(np.asarray(ids)[rows], total[rows] / count[rows, None], source))
    return _joined(found)


def answers_to(teacher: Any, shown: Views, ids: Sequence[int]) -> TeacherAnswers:
    """Return a teacher's answers to those of the images that have a label and can be read."""
    source = shown.source
    device = next((one.device for one in teacher.model.parameters()), torch.device("cpu"))
    batches = batches_of(shown, [id for id in ids if source.label(id) >= 0])
    return _joined(
        [
            _labelled(one.ids.numpy(), one.outputs.logits.float().softmax(-1).numpy(), source)
            for one in ask(teacher, batches, device)
        ]
    )


def _labelled(ids: np.ndarray, shares: np.ndarray, source: Source) -> TeacherAnswers:
    label = np.array([source.label(int(id)) for id in ids])
    rows = np.flatnonzero(label >= 0)
    ids, shares, label = ids[rows], shares[rows], label[rows]
    best, vectors = shares.argmax(1), narrow(np.log(np.maximum(shares, 1e-6)))
    return TeacherAnswers(ids, label, best, shares.max(1, initial=0), shares[np.arange(len(label)), label], vectors)


def _joined(parts: Sequence[TeacherAnswers]) -> TeacherAnswers:
    parts = [one for one in parts if len(one.id)]
    if not parts:
        none = np.zeros(0, np.int64)
        return TeacherAnswers(none, none, none, np.zeros(0), np.zeros(0), np.zeros((0, 1), np.float32))
    return TeacherAnswers(*(np.concatenate(one) for one in zip(*parts, strict=True)))


def _labels(
    answers: dict[str, TeacherAnswers], splits: Mapping[str, Source], classes: Sequence[str], target: Path
) -> list[str]:
    """Write labels.csv and labels.html, and say how many labels are doubted."""
    head = ("split", "name", "label", "answer", "share of answer", "share of label")
    listed, counts = [], []
    for split, one in answers.items():
        found = doubted(one.label, one.answer, one.share, one.own)
        counts.append(f"{len(found)} of {len(one.id)} in '{split}'")
        for rank, row in enumerate(found):
            id, label, answer = int(one.id[row]), classes[int(one.label[row])], classes[int(one.answer[row])]
            seen, shares = lists.Seen(split, splits[split].name(id), label, id), (one.share[row], one.own[row])
            listed.append((rank, seen, answer, [round(float(share), 4) for share in shares]))
    listed.sort(key=lambda one: one[:2])
    rows = [(*seen[:3], answer, *shares) for _, seen, answer, shares in listed]
    lists.write_table(target / "labels.csv", [head, *rows])
    figures = [(f"{one.label}, or {answer} ({100 * shares[0]:.0f} %)?", [one]) for _, one, answer, shares in listed]
    page = lists.page("Labels that the teacher doubts, the surest first", figures, splits, LIMITS)
    write_text(target / "labels.html", page)
    lines = [f"labels    doubted by the teacher: {', '.join(counts)}", f"          {LIMITS}"]
    return [*lines, *(f"          {row[0]}:{row[1]} is labelled {row[2]}, answered {row[3]}" for row in rows[:NAMED])]


def _repeats(answers: dict[str, TeacherAnswers], splits: Mapping[str, Source], target: Path) -> list[str]:
    """Add to duplicates.csv the pairs of two splits that have near answers and show one photograph."""
    train, val = answers["train"], answers["val"]
    if not len(train.id) or not len(val.id) or train.vector.shape[1] != val.vector.shape[1]:
        return []
    rows, near = neighbours(train.vector, val.vector)
    numbers = [*splits]
    wanted = dict.fromkeys(
        [("val", int(id)) for id in val.id] + [("train", int(id)) for id in train.id[np.unique(near)]]
    )
    album, row_of = Album(len(wanted)), {}
    for split, id, decoded in _decoded(wanted, splits):
        row_of[split, id] = len(album)
        album.add(numbers.index(split), id, decoded)
    pairs = [
        (row_of.get(("train", int(train.id[b]))), row_of.get(("val", int(val.id[a]))))
        for a, b in zip(rows, near, strict=True)
    ]
    known = np.array([pair for pair in pairs if None not in pair], np.int64).reshape(-1, 2)
    count = len(known)
    candidates = Pairs(known[:, 0], known[:, 1], np.full(count, -1), np.zeros(count))
    found = lists.repeats(album, closely(album, candidates), splits)
    before = lists.with_ids(lists.read_repeats(target), splits)
    both = lists.worst_first([*before, *found])
    if both:
        lists.write_repeats(target, both, splits)
    text = f"repeats   {len(found)} pairs in two splits by the teacher's answers, {len(both) - len(before)} of them new"
    return [f"{text}; {lists.DUPLICATES} has {len(both)}"]


def _decoded(wanted: Any, splits: Mapping[str, Source]) -> Iterator[Any]:
    for split, id in wanted:
        try:
            yield split, id, splits[split].decode(id)
        except CorruptImage:  # data.on_corrupt decides where a run reads it
            continue
