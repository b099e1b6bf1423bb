"""What a teacher's answers say of data: labels that it doubts, and images that it sees alike.

Legend: N, M images, C classes, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WIDTH, NEIGHBOURS, ROWS = 64, 5, 1024
"""Numbers of an image that neighbours are looked up by: a random projection to 64 keeps cosines to some 0.1.
Neighbours of each image. Images at a time: beside 100,000 others their cosines take 400 MB."""
CONFIDENT = 0.75  # of the mean probability that a teacher gives to the labels of a class


class TeacherAnswers(NamedTuple):
    """What a teacher answers to the images of a split that have a label and could be read."""

    id: np.ndarray
    label: np.ndarray
    answer: np.ndarray  # the class with the largest probability
    share: np.ndarray  # its probability
    own: np.ndarray  # the probability of the label
    vector: np.ndarray  # float32 [N, D], D at most `WIDTH`


def doubted(label: np.ndarray, answer: np.ndarray, share: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the images whose label a confident teacher doubts, rows of [N], the surest first.

    How sure it is counts by class, as a share of the mean probability that it gives to the labels of that class
    (arXiv:1911.00068): a teacher that is too sure, or of a hard class never sure, needs no other threshold. It doubts
    where it answers another class with `CONFIDENT` of that share. Ranked by the ratio of both shares.
    """
    classes = int(max(label.max(initial=-1), answer.max(initial=-1))) + 1
    usual = np.bincount(label, own, classes) / np.maximum(np.bincount(label, minlength=classes), 1)
    usual = np.maximum(usual, 1e-9)
    rows = np.flatnonzero((answer != label) & (share >= CONFIDENT * usual[answer]))
    ratio = np.maximum(own[rows], 1e-9) / usual[label[rows]] / (share[rows] / usual[answer[rows]])
    return rows[np.argsort(ratio, kind="stable")]


def narrow(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [N, D] of length 1 and at most 64 numbers, by a fixed random projection."""
    wide = vectors.astype(np.float32)
    if wide.shape[1] > WIDTH:
        wide = wide @ np.random.default_rng(0).normal(size=(wide.shape[1], WIDTH)).astype(np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)


def neighbours(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each of M vectors its nearest of N by the cosine: rows of `other`, and rows of `one`, 5 M each."""
    most = min(NEIGHBOURS, len(one))
    found = [np.zeros((0, most), np.int64)]
    for start in range(0, len(other), ROWS):
        near = other[start : start + ROWS] @ one.T
        found.append(np.argpartition(-near, most - 1, axis=1)[:, :most])
    return np.repeat(np.arange(len(other)), most), np.concatenate(found).ravel()
