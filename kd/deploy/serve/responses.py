"""Turn logits or vectors into a response, JSON or CSV, chosen by the Accept header."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kd.core.text import table_cell
from kd.deploy.serve.limits import Problem

JSON, CSV = "application/json", "text/csv"
DIGITS = 6  # decimals of a probability: float32 has seven
MAX_ENTRIES = 32  # entries of an Accept header
MODEL, FIRST, SECOND = (
    "model",
    "first",
    "second",
)  # a prediction's key and values if there are two models
Bands = tuple[tuple[float, float], ...]
"""Bands (low, high) of probabilities at which a prediction is unsure: one for the
predicted class, or one per class if an image may have several labels. Empty: the export
has no rule for `sure`.
"""


@dataclass(frozen=True, slots=True)
class Label:
    """A label of an image."""

    label: str
    score: float  # its probability
    sure: bool | None = None  # None: the export has no rule for `sure`


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's prediction for an image, which `kd-serve` writes as JSON."""

    label: str | None = (
        # the most probable label; None for several labels per image and for embeddings
        None
    )
    score: float | None = None  # its probability
    sure: bool | None = None  # None: the export has no rule for `sure`
    model: str | None = (
        None  # "first" or "second": the model that predicted; None: there is one
    )
    top: tuple[Label, ...] = ()  # the most probable labels, best first
    labels: tuple[Label, ...] | None = (
        None  # for several labels per image: those above their thresholds
    )
    embedding: np.ndarray | None = field(
        default=None, compare=False
    )  # float32 [D], length 1

    @staticmethod
    def of(row: dict[str, Any]) -> "Answer":
        made = {
            key: tuple(Label(**one) for one in row[key])
            for key in ("top", "labels")
            if key in row
        }
        vector = (
            {"embedding": np.array(row["embedding"], np.float32)}
            if "embedding" in row
            else {}
        )
        return Answer(**{**row, **made, **vector})


def negotiate(accept: str) -> str:
    """Return the media type with the higher quality value, JSON if equal; Problem 406
    if neither is accepted.
    """
    if accept.count(",") >= MAX_ENTRIES:
        raise Problem(400, f"The Accept header has more than {MAX_ENTRIES} entries.")
    found = {
        JSON: (-1, -1.0),
        CSV: (-1, -1.0),
    }  # specificity of the matching entry, and its quality value
    for item in (accept.strip() or "*/*").split(","):
        pattern, *parameters = (part.strip().lower() for part in item.split(";"))
        q = next((_number(p[2:]) for p in parameters if p.startswith("q=")), 1.0)
        for kind, (closest, _) in found.items():
            ranges = ["*/*", f"{kind.partition('/')[0]}/*", kind]
            if pattern in ranges and ranges.index(pattern) > closest:
                found[kind] = (ranges.index(pattern), q)
    best = max(found, key=lambda kind: found[kind][1])
    if found[best][1] <= 0:
        raise Problem(406, f"The response can be {JSON} or {CSV}.")
    return best


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of logits [B, C], float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def independent_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the independent probability of each class, the sigmoid of logits [B, C],
    float64.
    """
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))


def predictions(
    logits: np.ndarray,
    labels: Sequence[str],
    top: int,
    thresholds: Sequence[float] = (),
    unsure: Bands = (),
) -> list[dict]:
    """Return for each row of logits [B, C] the best label, its score, and the `top`
    best labels.

    With thresholds an image may have several labels or none: `labels`, a list of those
    above their threshold, replaces the best label. With `unsure` a prediction has
    `sure`: see `mark`.
    """
    scores = independent_probabilities(logits) if thresholds else probabilities(logits)
    answers = []
    for row in scores:
        best = _ranked(row, labels, top)
        if thresholds:
            above = row > np.asarray(thresholds)
            present = _ranked(np.where(above, row, -1), labels, int(above.sum()))
            answers.append({"labels": present, "top": best})
        else:
            answers.append({**best[0], "top": best})
    mark(answers, scores, labels, unsure)
    return answers


def bands(output: Mapping[str, Any], labels: Sequence[str]) -> Bands:
    """Return the bands in `output` of a manifest; KeyError: a label lacks one."""
    found = output.get("defer")
    if not found:
        return ()
    if "threshold" in found:
        return ((-1.0, float(found["threshold"])),)
    return tuple(
        (float(found["labels"][label]["low"]), float(found["labels"][label]["high"]))
        for label in labels
    )


def mark(
    answers: Sequence[dict],
    probabilities: np.ndarray,
    labels: Sequence[str],
    unsure: Bands,
) -> None:
    """Add `sure` to the predictions of B images with probabilities [B, C], in place;
    nothing without bands.

    A prediction with `label` is sure if that label is. With `labels`, each entry and
    each of `top` has its own `sure`, and the image is sure if the presence or absence
    of every label is sure.
    """
    if not unsure:
        return
    low, high = np.array(unsure).T
    for answer, sure in zip(
        answers, (probabilities <= low) | (probabilities >= high), strict=True
    ):
        several = "labels" in answer
        answer["sure"] = bool(sure.all() if several else sure.any())
        if several:
            by_label = dict(zip(labels, sure.tolist(), strict=True))
            for one in (*answer["labels"], *answer["top"]):
                one["sure"] = by_label[one["label"]]


def _ranked(
    scores: np.ndarray, labels: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """Return the `count` labels with the highest scores [C], best first."""
    order = np.argsort(-scores, kind="stable")[:count]
    return [
        {"label": labels[i], "score": round(float(scores[i]), DIGITS)} for i in order
    ]


def embeddings(vectors: np.ndarray) -> list[dict]:
    """Return each row of vectors [B, D], as JSON values."""
    return [{"embedding": row.tolist()} for row in vectors]


def write(kind: str, answers: Sequence[dict], model: str, version: str) -> bytes:
    """Write one prediction per image: JSON, or CSV without a header.

    A row of CSV is label, score, label, score, ..., best first (or those above their
    threshold, for several labels per image); or the embedding. Then `true` or `false`
    if the export has a rule for `sure`; then `first` or `second` if there are two
    models. A label that a spreadsheet would run as a formula becomes 'LABEL.
    """
    if kind == JSON:
        return json.dumps(
            {"predictions": answers, "model": model, "version": version}
        ).encode()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for answer in answers:
        pairs = answer.get("labels", answer.get("top", ()))
        more = [str(answer[key]).lower() for key in ("sure", MODEL) if key in answer]
        cells = [
            cell
            for pair in pairs
            for cell in (table_cell(pair["label"]), pair["score"])
        ]
        writer.writerow(answer.get("embedding", [*cells, *more]))
    return text.getvalue().encode()
