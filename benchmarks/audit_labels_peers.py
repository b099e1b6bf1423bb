"""Which list of doubted labels finds planted mistakes? kd's and cleanlab's, from equal
probabilities.

    python benchmarks/audit_labels_peers.py --data CIFAR10 --weights LITE0.pth [--people NPY]

A logistic regression learns the labels with the mistakes from features of 5,000
training pictures: 128 components of an EfficientNet-Lite0 with ImageNet's weights at 96
px. Its probabilities come from five folds, for pictures of the other folds ("out of
sample"), and from one fit on all ("in sample", like a teacher's for its own training
pictures). `--people`: labels of CIFAR-10N (arXiv:2110.12088) in the published order,
mistakes that people made. Needs cleanlab.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cleanlab  # pyright: ignore[reportMissingImports]
import numpy as np
import timm
import torch
from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
from cleanlab.rank import (  # pyright: ignore[reportMissingImports]
    get_label_quality_scores,
)
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold

import _record
from kd.study.audit.labels import doubted_rows

IMAGES = 5000
SIDE = 96
SEEDS = (0, 1, 2)
FOLDS = 5
WIDTH = 128  # principal components of the features: a fit takes a second
SHARES = (0.05, 0.1)
CONFUSABLE = {
    0: 8,
    1: 9,
    2: 0,
    3: 5,
    4: 7,
    5: 3,
    6: 3,
    7: 4,
    8: 0,
    9: 1,
}  # the class most like each class of CIFAR-10
REGULARIZATION = 0.01  # scikit-learn's C
SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
FILTERS = ("prune_by_noise_rate", "confident_learning")


def features(files: list[Path], weights: Path) -> np.ndarray:
    """Return the pooled features [N, 1280] of pictures."""
    network: Any = timm.create_model("tf_efficientnet_lite0")
    stored = torch.load(weights, weights_only=True)
    names = list(network.state_dict())
    network.load_state_dict(dict(zip(names, stored.values(), strict=True)))
    network.reset_classifier(0)
    network.eval()
    batches = []
    for start in range(0, len(files), 64):
        pictures = [
            np.asarray(Image.open(file).convert("RGB").resize((SIDE, SIDE), 3))
            for file in files[start : start + 64]
        ]
        pixels = (
            torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() - 127
        ) / 128
        with torch.inference_mode():
            batches.append(network(pixels).numpy())
    return np.concatenate(batches)


def planted(
    truth: np.ndarray, share: float, kind: str, rng: np.random.Generator
) -> np.ndarray:
    """Return labels, a share of them wrong: of another class at random, or of the class
    most like it.
    """
    label = truth.copy()
    classes = truth.max() + 1
    rows = rng.choice(len(truth), round(share * len(truth)), replace=False)
    if kind == "random":
        label[rows] = (truth[rows] + rng.integers(1, classes, len(rows))) % classes
    else:
        label[rows] = [CONFUSABLE[int(label_of_row)] for label_of_row in truth[rows]]
    return label


def probabilities(
    vectors: np.ndarray, label: np.ndarray, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the probabilities [N, C] out of sample and in sample."""

    def fitted(rows: np.ndarray) -> LogisticRegression:
        return LogisticRegression(C=REGULARIZATION, max_iter=300, tol=1e-3).fit(
            vectors[rows], label[rows]
        )

    shares = np.zeros((len(label), label.max() + 1))
    for rows, held_out in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(
        vectors, label
    ):
        shares[held_out] = fitted(rows).predict_proba(vectors[held_out])
    yield "out of sample", shares
    yield "in sample", fitted(np.arange(len(label))).predict_proba(vectors)


def by_kd(label: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return kd's list of doubted labels, rows, most certain first."""
    return doubted_rows(
        label, shares.argmax(1), shares.max(1), shares[np.arange(len(label)), label]
    )


def relative(label: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return kd's list before 2026-11-30: where a prediction reaches 3/4 of its class's
    mean probability.
    """
    prediction = shares.argmax(1)
    own_share = shares[np.arange(len(label)), label]
    usual = np.bincount(label, own_share) / np.bincount(label)
    confidence = shares.max(1) / usual[prediction]
    rows = np.flatnonzero((prediction != label) & (confidence >= 0.75))
    return rows[
        np.argsort(
            own_share[rows] / usual[label[rows]] / confidence[rows], kind="stable"
        )
    ]


def by_score(
    method: str, adjusted: bool
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return cleanlab's order of all labels by a score, the lowest quality first."""
    return lambda label, shares: np.argsort(
        get_label_quality_scores(
            label, shares, method=method, adjust_pred_probs=adjusted
        ),
        kind="stable",
    )


def by_filter(
    method: str, order: str
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return cleanlab's list of label issues, ranked."""
    return lambda label, shares: find_label_issues(
        label, shares, filter_by=method, return_indices_ranked_by=order, n_jobs=1
    )


METHODS = {
    "kd": by_kd,
    "kd, relative to the class": relative,
    **{f"cleanlab {score}": by_score(score, False) for score in SCORES},
    **{f"cleanlab {score}, adjusted": by_score(score, True) for score in SCORES[:2]},
    **{
        f"cleanlab {name}, {score}": by_filter(name, score)
        for name in FILTERS
        for score in SCORES[:2]
    },
}


def measured(
    label: np.ndarray, wrong: np.ndarray, shares: np.ndarray
) -> Iterator[dict[str, object]]:
    """Yield the numbers of each method; labels not on its list follow it in the order
    of their probability.
    """
    own_share = shares[np.arange(len(label)), label]
    for name, method in METHODS.items():
        ranked = method(label, shares)
        unranked = np.setdiff1d(
            np.argsort(own_share, kind="stable"), ranked, assume_unique=True
        )
        order = np.concatenate([ranked, unranked])
        place = np.empty(len(label))
        place[order] = np.arange(len(label))
        first = ranked[: wrong.sum()]
        precision = round(float(wrong[first].sum() / wrong.sum()), 4)
        average = round(float(average_precision_score(wrong, -place)), 4)
        yield {
            "method": name,
            "listed": len(ranked),
            "precision_at_k": precision,
            "average_precision": average,
        }


def main() -> None:
    """Measure all kinds of mistakes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument(
        "--people", type=Path, help="labels of people and clean labels, int [2, 50000]"
    )
    options = parser.parse_args()
    classes = sorted(path.name for path in (options.data / "train").iterdir())
    files = [
        file
        for name in classes
        for file in sorted((options.data / "train" / name).iterdir())
    ]
    truth = np.array([classes.index(file.parent.name) for file in files])
    chosen = np.sort(np.random.default_rng(0).permutation(len(files))[:IMAGES])
    vectors = features([files[row] for row in chosen], options.weights)
    vectors = PCA(WIDTH, whiten=True, random_state=0).fit_transform(vectors)
    tasks = [
        (
            kind,
            share,
            seed,
            planted(truth[chosen], share, kind, np.random.default_rng(seed)),
        )
        for kind in ("random", "confusable")
        for share in SHARES
        for seed in SEEDS
    ]
    if options.people:
        people, clean = np.load(options.people)
        order = np.concatenate(
            [np.flatnonzero(clean == number) for number in range(len(classes))]
        )
        tasks.append(
            ("people", float((people != clean).mean()), 0, people[order][chosen])
        )
    rows = []
    for kind, share, seed, label in tasks:
        wrong = label != truth[chosen]
        for sample, shares in probabilities(vectors, label, seed):
            right = (shares.argmax(1) == truth[chosen]).mean()
            facts = {
                "mistakes": kind,
                "share": round(share, 3),
                "seed": seed,
                "probabilities": sample,
            }
            for row in measured(label, wrong, shares):
                rows.append(
                    {
                        **facts,
                        "planted": int(wrong.sum()),
                        "right": round(float(right), 4),
                        **row,
                    }
                )
                print(rows[-1], flush=True)
    words = "--data PATH --weights PATH" + " --people PATH" * bool(options.people)
    _record.write(
        "audit_labels_peers", f"python benchmarks/audit_labels_peers.py {words}", rows
    )
    print("cleanlab", cleanlab.__version__)


if __name__ == "__main__":
    main()
