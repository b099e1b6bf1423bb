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
from kd.study.audit.copies import UNKNOWN, Album, Pairs, same_photograph

NAMED = 3  # printed labels: enough to show the list's content
LIMITS = (
    "It finds single mistakes. {planted}. It misses classes that are exchanged for each"
    " other: in a study with another teacher (CIFAR-10), which had learned the exchange"
    " of 8 % of two classes, 1 of 77 was among the first 77."
)
PLANTED = 0.1  # share of validation labels changed in a trial
FEWEST = 10  # smallest useful number of changed labels
# dimensions for the neighbour search: a random projection to 64 keeps cosines within
# 0.1
WIDTH = 64
NEIGHBOURS = 5  # training images compared with a validation image
# validation images per batch: their cosines with 100,000 others take 400 MB
ROWS = 1024


class TeacherAnswers(NamedTuple):
    """A teacher's predictions for a split's labelled, readable images."""

    id: np.ndarray
    label: np.ndarray
    prediction: np.ndarray  # the most probable class
    confidence: np.ndarray  # its probability
    label_probability: np.ndarray
    trial_label: np.ndarray  # another class, for the trial
    trial_probability: np.ndarray
    vector: np.ndarray  # float32 [N, D], D at most `WIDTH`


class Doubt(NamedTuple):
    """A label that the teacher doubts."""

    rank: int
    image: lists.Seen
    prediction: str
    confidence: float
    label_probability: float


def labelled_answers(
    ids: np.ndarray, shares: np.ndarray, source: Source
) -> TeacherAnswers:
    """Return the predictions for the images `ids` that have a label.

    `shares` [N, C] are the probabilities.
    """
    label = np.array([source.label(int(id)) for id in ids])
    rows = np.flatnonzero(label >= 0)
    ids = ids[rows]
    shares = shares[rows]
    label = label[rows]
    classes = shares.shape[1]
    # a prime spreads the ids over the classes
    trial_label = (label + 1 + ids * 7919 % max(1, classes - 1)) % classes
    image = np.arange(len(label))
    return TeacherAnswers(
        id=ids,
        label=label,
        prediction=shares.argmax(1),
        confidence=shares.max(1, initial=0),
        label_probability=shares[image, label],
        trial_label=trial_label,
        trial_probability=shares[image, trial_label],
        vector=narrow(np.log(np.maximum(shares, 1e-6))),
    )


def join_answers(batches: Sequence[TeacherAnswers]) -> TeacherAnswers:
    """Return the predictions of several batches as one."""
    batches = [batch for batch in batches if len(batch.id)]
    if not batches:
        ids = np.zeros(0, np.int64)
        shares = np.zeros(0)
        return TeacherAnswers(
            ids, ids, ids, shares, shares, ids, shares, np.zeros((0, 1), np.float32)
        )
    return TeacherAnswers(*map(np.concatenate, zip(*batches, strict=True)))


def write_labels(
    answers: dict[str, TeacherAnswers],
    splits: Mapping[str, Source],
    classes: Sequence[str],
    target: Path,
) -> list[str]:
    """Write labels.csv and labels.html; return a summary of the doubted labels."""
    doubts = []
    counts = []
    for split, answer in answers.items():
        split_doubts = _doubts(answer, split, splits[split], classes)
        counts.append(f"{len(split_doubts)} of {len(answer.id)} in '{split}'")
        doubts += split_doubts
    doubts.sort(key=lambda doubt: (doubt.rank, doubt.image))
    head = (
        "split",
        "name",
        "label",
        "prediction",
        "share of prediction",
        "share of label",
    )
    rows = [(*doubt.image[:3], *doubt[2:]) for doubt in doubts]
    lists.write_table(target / "labels.csv", [head, *rows])
    figures = []
    for doubt in doubts:
        confidence = f"({100 * doubt.confidence:.0f} %)"
        caption = f"{doubt.image.label}, or {doubt.prediction} {confidence}?"
        figures.append((caption, [doubt.image]))
    limits = LIMITS.format(planted=trial_text(answers["val"]))
    page = lists.page(
        "Labels that the teacher doubts, the surest first", figures, splits, limits
    )
    write_text(target / "labels.html", page)
    lines = [
        f"labels    doubted by the teacher: {', '.join(counts)}",
        f"          {limits}",
    ]
    for doubt in doubts[:NAMED]:
        image = doubt.image
        lines.append(
            f"          {image.split}:{image.name} is labelled {image.label}, predicted"
            f" {doubt.prediction}"
        )
    return lines


def _doubts(
    answer: TeacherAnswers, split: str, source: Source, classes: Sequence[str]
) -> list[Doubt]:
    """Return a split's doubted labels, most certain first."""
    rows = doubted_rows(
        answer.label, answer.prediction, answer.confidence, answer.label_probability
    )
    doubts = []
    for rank, row in enumerate(rows):
        id = int(answer.id[row])
        image = lists.Seen(split, source.name(id), classes[int(answer.label[row])], id)
        prediction = classes[int(answer.prediction[row])]
        confidence = round(float(answer.confidence[row]), 4)
        share = round(float(answer.label_probability[row]), 4)
        doubts.append(Doubt(rank, image, prediction, confidence, share))
    return doubts


def add_repeats(
    answers: dict[str, TeacherAnswers], splits: Mapping[str, Source], target: Path
) -> list[str]:
    """Add pairs between splits with similar outputs to duplicates.csv.

    Only those that show one photograph are added.
    """
    train = answers["train"]
    val = answers["val"]
    if not len(train.id) or not len(val.id):
        return []
    val_rows, train_rows = neighbours(train.vector, val.vector)
    ids = {"val": val.id, "train": train.id[np.unique(train_rows)]}
    album, row_of = _album(ids, splits)
    first = row_of["train"][train.id[train_rows]]
    second = row_of["val"][val.id[val_rows]]
    readable = (first >= 0) & (second >= 0)
    variant = np.full(readable.sum(), UNKNOWN)
    candidates = Pairs(
        first[readable], second[readable], variant, np.zeros(len(variant))
    )
    repeats = lists.repeats(album, same_photograph(album, candidates), splits)
    earlier = lists.with_ids(lists.read_repeats(target), splits)
    listed = lists.worst_first([*earlier, *repeats])
    if listed:
        lists.write_repeats(target, listed, splits)
    text = (
        f"{len(repeats)} pairs in two splits by the teacher's outputs,"
        f" {len(listed) - len(earlier)} of them new"
    )
    listing = f"{lists.DUPLICATES} has {len(listed)}" if listed else "none is listed"
    return [
        f"repeats   {text}; {listing}",
        "          `kd-train --check=all` compares all images, pixel by pixel",
    ]


def _album(
    ids: Mapping[str, np.ndarray], splits: Mapping[str, Source]
) -> tuple[Album, dict[str, np.ndarray]]:
    """Decode images of splits; return their album, and the row of each id in it.

    The row of an unreadable image is -1.
    """
    album = Album(sum(map(len, ids.values())))
    row_of = {split: np.full(len(splits[split]), -1) for split in ids}
    numbers = [*splits]
    for split, split_ids in ids.items():
        for id in map(int, split_ids):
            try:
                decoded = splits[split].decode(id)
            except CorruptImage:  # data.on_corrupt decides where a run reads it
                continue
            row_of[split][id] = len(album)
            album.add(numbers.index(split), id, decoded)
    return album, row_of


def doubted_rows(
    label: np.ndarray,
    prediction: np.ndarray,
    confidence: np.ndarray,
    label_probability: np.ndarray,
) -> np.ndarray:
    """Return the rows of [N] for which the teacher predicts another class.

    The most doubtful label comes first. They are ranked by the label's probability over
    that of the prediction. In `audit_labels_peers_*.csv` this finds more mistakes than
    confidence relative to each class (arXiv:1911.00068), and about as many as the best
    of cleanlab's rules; it was chosen on those data.
    """
    rows = np.flatnonzero(prediction != label)
    ratio = label_probability[rows] / confidence[rows]
    return rows[np.argsort(ratio, kind="stable")]


def trial_text(answer: TeacherAnswers) -> str:
    """Change k random labels; report how many are among the first k doubted ones."""
    count = round(PLANTED * len(answer.id))
    if count < FEWEST:
        return "How many was not measured: there are too few validation images"
    rows = np.random.default_rng(0).permutation(len(answer.id))[:count]
    label = answer.label.copy()
    label_probability = answer.label_probability.copy()
    label[rows] = answer.trial_label[rows]
    label_probability[rows] = answer.trial_probability[rows]
    doubts = doubted_rows(
        label, answer.prediction, answer.confidence, label_probability
    )
    right = int(np.isin(doubts[:count], rows).sum())
    trial = (
        f"Of {count} validation labels that were changed at random for a trial {right}"
        f" were among the first {count}"
    )
    return f"{trial}; of labels that the teacher has learned it finds fewer"


def narrow(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [N, D] of length 1, D at most 64, by a fixed random projection."""
    vectors = vectors.astype(np.float32)
    width = vectors.shape[1]
    if width > WIDTH:
        projection = np.random.default_rng(0).normal(size=(width, WIDTH))
        vectors = vectors @ projection.astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def neighbours(train: np.ndarray, val: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 5 rows of `train` nearest to each row of `val` by cosine.

    Returned are index pairs: the rows of `val`, and those of `train`.
    """
    count = min(NEIGHBOURS, len(train))
    nearest = np.empty((len(val), count), np.int64)
    for start in range(0, len(val), ROWS):
        batch = slice(start, start + ROWS)
        order = np.argpartition(-(val[batch] @ train.T), count - 1, axis=1)
        nearest[batch] = order[:, :count]
    return np.repeat(np.arange(len(val)), count), nearest.ravel()
