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

JSON = "application/json"
CSV = "text/csv"
DIGITS = 6  # decimals of a probability: float32 has seven
MAX_ENTRIES = 32  # entries of an Accept header
# a prediction's key, and its values, if there are two models
MODEL = "model"
FIRST = "first"
SECOND = "second"
Bands = tuple[tuple[float, float], ...]
"""Bands (low, high) of probabilities at which a prediction is unsure: one for the
predicted class, or one per class if an image may have several labels. Empty: the export
has no rule for `sure`.
"""
Value = str | int | float | None
Values = Mapping[str, Mapping[str, Value]]
"""The values of each label by column, from `kd-export --values`. Empty: the export has
none.
"""


@dataclass(frozen=True, slots=True)
class Label:
    """A label of an image."""

    label: str
    score: float  # its probability
    sure: bool | None = None  # None: the export has no rule for `sure`
    # by column of `kd-export --values`; None: the export has none
    values: dict[str, Value] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's prediction for an image, which `kd-serve` writes as JSON."""

    # the most probable label; None for several labels per image and for embeddings
    label: str | None = None
    score: float | None = None  # its probability
    sure: bool | None = None  # None: the export has no rule for `sure`
    # "first" or "second": the model that predicted; None: there is one
    model: str | None = None
    top: tuple[Label, ...] = ()  # the most probable labels, best first
    # for several labels per image: those above their thresholds
    labels: tuple[Label, ...] | None = None
    # float32 [D], length 1
    embedding: np.ndarray | None = field(default=None, compare=False)
    values: dict[str, Value] | None = field(default=None, hash=False)  # of `label`

    @staticmethod
    def of(row: dict[str, Any]) -> "Answer":
        fields = dict(row)
        for key in {"top", "labels"} & row.keys():
            fields[key] = tuple(Label(**label) for label in row[key])
        if "embedding" in row:
            fields["embedding"] = np.array(row["embedding"], np.float32)
        return Answer(**fields)


def negotiate(accept: str) -> str:
    """Return the media type with the higher quality value, JSON if equal.

    Raises a Problem 406 if neither is accepted.
    """
    if accept.count(",") >= MAX_ENTRIES:
        raise Problem(400, f"The Accept header has more than {MAX_ENTRIES} entries.")
    specificity = {JSON: -1, CSV: -1}  # of the matching entry
    quality = {JSON: -1.0, CSV: -1.0}  # that entry's value
    for entry in (accept.strip() or "*/*").split(","):
        pattern, *parameters = (text.strip().lower() for text in entry.split(";"))
        for kind, closest in specificity.items():
            ranges = ["*/*", f"{kind.partition('/')[0]}/*", kind]
            if pattern in ranges and ranges.index(pattern) > closest:
                specificity[kind] = ranges.index(pattern)
                quality[kind] = _quality_value(parameters)
    best = max(quality, key=quality.__getitem__)
    if quality[best] <= 0:
        raise Problem(406, f"The response can be {JSON} or {CSV}.")
    return best


def _quality_value(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of logits [B, C], float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def independent_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of logits [B, C], the probability of each class, float64."""
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))


def predictions(
    logits: np.ndarray,
    labels: Sequence[str],
    top: int,
    thresholds: Sequence[float] = (),
    unsure: Bands = (),
    values: Values | None = None,
) -> list[dict]:
    """Return each image's best label, its score and its `top` best labels.

    `logits` is [B, C].

    With thresholds an image may have several labels or none: `labels`, a list of those
    above their threshold, replaces the best label. With `unsure` a prediction has
    `sure`: see `mark`. With `values` each entry with a label has that label's.
    """
    scores = independent_probabilities(logits) if thresholds else probabilities(logits)
    answers = []
    for row in scores:
        best = _ranked(row, labels, top, values)
        if thresholds:
            above = row > np.asarray(thresholds)
            present = _ranked(
                np.where(above, row, -1), labels, int(above.sum()), values
            )
            answers.append({"labels": present, "top": best})
        else:
            answers.append({**best[0], "top": best})
    mark(answers, scores, labels, unsure)
    return answers


def bands(output: Mapping[str, Any], labels: Sequence[str]) -> Bands:
    """Return the bands in `output` of a manifest; KeyError if a label lacks one."""
    rule = output.get("defer")
    if not rule:
        return ()
    if "threshold" in rule:
        return ((-1.0, float(rule["threshold"])),)
    by_label = rule["labels"]
    return tuple(
        (float(by_label[label]["low"]), float(by_label[label]["high"]))
        for label in labels
    )


def mark(
    answers: Sequence[dict],
    probabilities: np.ndarray,
    labels: Sequence[str],
    unsure: Bands,
) -> None:
    """Add `sure` to the predictions of images with probabilities [B, C], in place.

    A prediction with `label` is sure if that label is. With `labels`, each entry and
    each of `top` has its own `sure`, and the image is sure if the presence or absence
    of every label is sure. Without bands nothing is added.
    """
    if not unsure:
        return
    low, high = np.array(unsure).T
    sure_BC = (probabilities <= low) | (probabilities >= high)
    for answer, sure_C in zip(answers, sure_BC, strict=True):
        if "labels" not in answer:
            answer["sure"] = bool(sure_C.any())
            continue
        answer["sure"] = bool(sure_C.all())
        sure_by_label = dict(zip(labels, sure_C.tolist(), strict=True))
        for entry in (*answer["labels"], *answer["top"]):
            entry["sure"] = sure_by_label[entry["label"]]


def _ranked(
    scores: np.ndarray, labels: Sequence[str], count: int, values: Values | None
) -> list[dict[str, Any]]:
    """Return the `count` labels with the highest scores [C], best first."""
    order = np.argsort(-scores, kind="stable")[:count]
    entries: list[dict[str, Any]] = [
        {"label": labels[i], "score": round(float(scores[i]), DIGITS)} for i in order
    ]
    if values:
        for entry in entries:
            entry["values"] = dict(values[entry["label"]])
    return entries


def label_cells(entry: Mapping[str, Any]) -> list[Value]:
    """Return a label's cells of a CSV row: label, score, and its values."""
    return [entry["label"], entry["score"], *entry.get("values", {}).values()]


def text_cell(value: Value) -> Value:
    """Return a value for a CSV cell, where no text is run as a formula."""
    return table_cell(value) if isinstance(value, str) else value


def embeddings(vectors: np.ndarray) -> list[dict]:
    """Return each row of vectors [B, D], as JSON values."""
    return [{"embedding": row.tolist()} for row in vectors]


def write(kind: str, answers: Sequence[dict], model: str, version: str) -> bytes:
    """Write one prediction per image: JSON, or CSV without a header.

    A row of CSV is label, score, label, score, ..., best first (or those above their
    threshold, for several labels per image); or the embedding. A label's values follow
    its score. Then `true` or `false` if the export has a rule for `sure`; then `first`
    or `second` if there are two models. A text that a spreadsheet would run as a
    formula becomes 'TEXT.
    """
    if kind == JSON:
        content = {"predictions": answers, "model": model, "version": version}
        return json.dumps(content).encode()
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for answer in answers:
        cells = []
        for entry in answer.get("labels", answer.get("top", ())):
            cells += map(text_cell, label_cells(entry))
        cells += [str(answer[key]).lower() for key in ("sure", MODEL) if key in answer]
        writer.writerow(answer.get("embedding", cells))
    return table.getvalue().encode()
