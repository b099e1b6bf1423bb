"""Find labels that a teacher doubts, and repeated images by its outputs.

Legend: N, M images, C classes, D width.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kd.core.contracts import Source
from kd.core.errors import CorruptImage
from kd.files.storage import write_text
from kd.study.audit import lists
from kd.study.audit.copies import Album, Pairs, closely

NAMED = 3  # printed labels: enough to show the list's content
LIMITS = (
    "It finds single mistakes. {planted}. It misses classes that are exchanged for each other: in a study with another "
    "teacher (CIFAR-10), which had learned the exchange of 8 % of two classes, 1 of 77 was among the first 77."
)
PLANTED, FEWEST = 0.1, 10  # share of validation labels changed in a trial, and the smallest useful number
WIDTH, NEIGHBOURS, ROWS = 64, 5, 1024
"""Dimensions for the neighbour search: a random projection to 64 keeps cosines within 0.1. Neighbours per image. Images
per batch: their cosines with 100,000 others take 400 MB."""
CONFIDENT = 0.75  # share of the mean probability that a teacher gives to the labels of a class


class TeacherAnswers(NamedTuple):
    """A teacher's predictions for a split's labelled, readable images."""

    id: np.ndarray
    label: np.ndarray
    answer: np.ndarray  # the predicted class
    share: np.ndarray  # its probability
    own: np.ndarray  # the probability of the label
    wrong: np.ndarray  # another class for the trial
    of_wrong: np.ndarray  # its probability
    vector: np.ndarray  # float32 [N, D], D at most `WIDTH`


def labelled(ids: np.ndarray, shares: np.ndarray, source: Source) -> TeacherAnswers:
    """Return the findings on the images `ids` that have a label, from the probabilities `shares` [N, C]."""
    label = np.array([source.label(int(id)) for id in ids])
    rows = np.flatnonzero(label >= 0)
    ids, shares, label = ids[rows], shares[rows], label[rows]
    best, vectors, row = shares.argmax(1), narrow(np.log(np.maximum(shares, 1e-6))), np.arange(len(label))
    classes = shares.shape[1]
    wrong = (label + 1 + ids * 7919 % max(1, classes - 1)) % classes  # a prime spreads the ids over the classes
    own, of_wrong = shares[row, label], shares[row, wrong]
    return TeacherAnswers(ids, label, best, shares.max(1, initial=0), own, wrong, of_wrong, vectors)


def joined(parts: Sequence[TeacherAnswers]) -> TeacherAnswers:
    """Return several parts of a split as one."""
    parts = [one for one in parts if len(one.id)]
    if not parts:
        none, share = np.zeros(0, np.int64), np.zeros(0)
        return TeacherAnswers(none, none, none, share, share, none, share, np.zeros((0, 1), np.float32))
    return TeacherAnswers(*(np.concatenate(one) for one in zip(*parts, strict=True)))


def write_labels(
    answers: dict[str, TeacherAnswers], splits: Mapping[str, Source], classes: Sequence[str], target: Path
) -> list[str]:
    """Write labels.csv and labels.html; return a summary of the doubted labels."""
    head = ("split", "name", "label", "prediction", "share of prediction", "share of label")
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
    limits = LIMITS.format(planted=planted(answers["val"]))
    page = lists.page("Labels that the teacher doubts, the surest first", figures, splits, limits)
    write_text(target / "labels.html", page)
    lines = [f"labels    doubted by the teacher: {', '.join(counts)}", f"          {limits}"]
    return [*lines, *(f"          {row[0]}:{row[1]} is labelled {row[2]}, predicted {row[3]}" for row in rows[:NAMED])]


def write_repeats(answers: dict[str, TeacherAnswers], splits: Mapping[str, Source], target: Path) -> list[str]:
    """Add to duplicates.csv the pairs between splits with similar outputs that show one photograph."""
    train, val = answers["train"], answers["val"]
    if not len(train.id) or not len(val.id) or train.vector.shape[1] != val.vector.shape[1]:
        return []
    rows, near = neighbours(train.vector, val.vector)
    numbers = [*splits]
    wanted = [("val", int(id)) for id in val.id] + [("train", int(id)) for id in train.id[np.unique(near)]]
    album, row_of = Album(len(wanted)), {}
    for split, id in wanted:
        try:
            album.add(numbers.index(split), id, splits[split].decode(id))
        except CorruptImage:  # data.on_corrupt decides where a run reads it
            continue
        row_of[split, id] = len(album) - 1
    pairs = [
        (row_of.get(("train", int(train.id[b]))), row_of.get(("val", int(val.id[a]))))
        for a, b in zip(rows, near, strict=True)
    ]
    known = np.array([pair for pair in pairs if None not in pair], np.int64).reshape(-1, 2)
    candidates = Pairs(known[:, 0], known[:, 1], np.full(len(known), -1), np.zeros(len(known)))
    found = lists.repeats(album, closely(album, candidates), splits)
    before = lists.with_ids(lists.read_repeats(target), splits)
    both = lists.worst_first([*before, *found])
    if both:
        lists.write_repeats(target, both, splits)
    text = f"repeats   {len(found)} pairs in two splits by the teacher's outputs, {len(both) - len(before)} of them new"
    return [f"{text}; {lists.DUPLICATES} has {len(both)}"]


def doubted(label: np.ndarray, answer: np.ndarray, share: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the images whose label a confident teacher doubts, as rows of [N], most certain first.

    Confidence is relative to the mean probability that the teacher gives to labels of that class (arXiv:1911.00068), so
    overconfident teachers and hard classes need no other threshold. A label is doubted if another class is predicted
    with at least `CONFIDENT` of that. Images are ranked by the ratio of both confidences.
    """
    classes = int(max(label.max(initial=-1), answer.max(initial=-1))) + 1
    usual = np.bincount(label, own, classes) / np.maximum(np.bincount(label, minlength=classes), 1)
    usual = np.maximum(usual, 1e-9)
    rows = np.flatnonzero((answer != label) & (share >= CONFIDENT * usual[answer]))
    ratio = np.maximum(own[rows], 1e-9) / usual[label[rows]] / (share[rows] / usual[answer[rows]])
    return rows[np.argsort(ratio, kind="stable")]


def planted(one: TeacherAnswers) -> str:
    """Change k random labels of a split and report how many of them are among the first k doubted labels."""
    rows = np.random.default_rng(0).permutation(len(one.id))[: round(PLANTED * len(one.id))]
    if (count := len(rows)) < FEWEST:
        return "How many was not measured: there are too few validation images"
    label, own = one.label.copy(), one.own.copy()
    label[rows], own[rows] = one.wrong[rows], one.of_wrong[rows]
    found = int(np.isin(doubted(label, one.answer, one.share, own)[:count], rows).sum())
    told = f"Of {count} validation labels that were changed at random for a trial {found} were among the first {count}"
    return f"{told}; of labels that the teacher has learned it finds fewer"


def narrow(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [N, D] of length 1, D at most 64, by a fixed random projection."""
    wide = vectors.astype(np.float32)
    if wide.shape[1] > WIDTH:
        wide = wide @ np.random.default_rng(0).normal(size=(wide.shape[1], WIDTH)).astype(np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)


def neighbours(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return index pairs (in `other`, in `one`): for each row of `other`, its 5 nearest by cosine in `one`."""
    most = min(NEIGHBOURS, len(one))
    found = [np.zeros((0, most), np.int64)]
    for start in range(0, len(other), ROWS):
        near = other[start : start + ROWS] @ one.T
        found.append(np.argpartition(-near, most - 1, axis=1)[:, :most])
    return np.repeat(np.arange(len(other)), most), np.concatenate(found).ravel()
