"""The model card of an export: README.md in Hugging Face's format, with the numbers of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kd.core.scores import Scored, Scores
from kd.core.text import VARIANTS_NOTE, percent, table
from kd.deploy.export.defer import lines_of
from kd.study.report.summary import differences, samples_of

WITH_TIMM = "With timm"
STUDENT, ALONE = "this student", "the same student, labels only"


@dataclass(frozen=True, slots=True)
class Card:
    """The contents of a model card."""

    name: str
    student: str
    student_parameters: int
    teacher: str  # empty: trained on labels alone
    losses: Sequence[str]  # empty: it is a teacher, and was not distilled
    data: str
    labels: Sequence[str]  # empty: an embedding model
    thresholds: Mapping[str, Mapping[str, Any]]
    """By label, where an image may have several: threshold, chosen, images, f1. Empty: an image has one label."""
    defer: Mapping[str, Any]  # see `kd.deploy.export.defer.choose`; empty: no answer says whether it is sure
    calibration: Mapping[str, Any]
    """temperature, images, ece, calibrated_ece. Empty: the logits are those that were trained."""
    width: int  # of its vectors; 0 of a classifier
    index: bool  # whether its vectors lie in the teacher's space
    scores: Scores  # the columns of `metrics` and `baseline`
    metrics: Mapping[str, Any]  # the validation row of the exported checkpoint
    baseline: Mapping[str, Any]
    """The validation row of the same student trained on labels alone; empty where there is none."""
    graphs: Mapping[str, Mapping[str, Any]]
    """For each file: max_difference, images, cpu_ms; cosine, or same_top1 and the score that decides, by its title."""
    variants: list[dict[str, str]]
    """What `--compare` measured, as `kd.core.text.variant_rows` has it; empty: nothing was compared."""
    eager_ms: float  # CPU milliseconds of PyTorch for one image with one thread; 0: not measured
    processor: str
    size: int
    crop: float
    license: str
    weights_from: str  # origin of the initial weights, with their licence, as text
    version: str
    commands: Mapping[str, str]
    scored: Scored | None = None  # the last score of the exported checkpoint; None: `metrics` are all that is known
    baseline_scored: Scored | None = None


def render(card: Card) -> str:
    """Return the text of README.md."""
    return "\n".join([*_front(card), *_intro(card), *_scores(card), *_graphs(card), *_use(card), *_limits(card)]) + "\n"


def _front(card: Card) -> list[str]:
    task = "image-feature-extraction" if card.width else "image-classification"
    library = "timm" if WITH_TIMM in card.commands else "pytorch"
    tags = [f"tags: [{task}, {library}, knowledge-distillation]", f"pipeline_tag: {task}", f"library_name: {library}"]
    return ["---", *tags, f"license: {card.license or 'unknown'}", "---"]


def _intro(card: Card) -> list[str]:
    origin = f"distilled from `{card.teacher}`" if card.teacher else "trained on labels alone"
    origin += f" by kd (losses: {', '.join(card.losses)})"
    origin = origin if card.losses else "a teacher"
    names = ", ".join(card.labels[:30]) + (f" and {len(card.labels) - 30} more" if len(card.labels) > 30 else "")
    return [
        f"# {card.name}",
        "",
        f"`{card.student}` with {card.student_parameters / 1e6:.2f} M parameters, {origin}. Version `{card.version}`.",
        "",
        f"- Data: {card.data}",
        f"- Output: a vector of {card.width} numbers" if card.width else f"- {len(card.labels)} classes: {names}",
        f"- Weights: {card.weights_from}",
        f"- Licence: {card.license or 'not stated (`kd-export --license ID`)'}",
        "",
    ]


def _scores(card: Card) -> list[str]:
    scores, scored, calibration = card.scores, card.scored, card.calibration
    row = card.metrics if scored is None else scored.row
    if not row:
        return ["The run recorded no validation for these weights.", ""]
    teachers, alone = scores.of_teachers(row), card.baseline_scored
    own = STUDENT if card.losses else "this teacher"
    models = {**teachers, own: row, ALONE: card.baseline if alone is None else alone.row}
    samples = {**samples_of(scored, teachers, own), **samples_of(alone, (), ALONE)}
    rows = scores.table({name: values for name, values in models.items() if scores.own[0].key in values}, samples)
    if rows:
        on = "On the validation split:" if scored is None else f"On {scored.images:,} {scored.title} images:"
        lines = [on, "", table(rows), "", *([scores.note, ""] if scores.note else [])]
        lines += differences(scores, row, samples, own)
        if scored is not None and (card.losses or scored.split == "test"):  # the note is of the student's checkpoints
            lines += [scored.note, ""]
    else:
        lines = ["Trained and evaluated without labels, against its teacher.", ""]
    comparison = scores.against_teacher(row)
    lines += [comparison, ""] if comparison else []
    if calibration:
        lines += [
            "These are the logits of the run. Here they are divided by "
            f"{calibration['temperature']:.3g}, fitted on {calibration['images']} validation images "
            f"(arXiv:1706.04599). The calibration error goes from {percent(calibration['ece'])} to "
            f"{percent(calibration['calibrated_ece'])} on images that chose nothing: fitted on one half of them and "
            "counted on the other, twice. The answers are the same.",
            "",
        ]
    return lines


def _graphs(card: Card) -> list[str]:
    if not card.graphs:
        return []
    score = card.scores.own[0]
    rows = []
    for file, graph in card.graphs.items():
        cells = {"file": file}
        if "cosine" in graph:
            cells["mean cosine with PyTorch"] = f"{graph['cosine']:.6f}"
        if score.title in graph:
            cells[score.title] = score.text(graph[score.title])
        if "same_top1" in graph:
            cells["same top-1 as PyTorch"] = f"{graph['same_top1']} of {graph['images']}"
        cells |= {"max abs. difference": f"{graph['max_difference']:.1e}", "CPU ms per image": f"{graph['cpu_ms']:.2f}"}
        rows.append(cells)
    return [
        table(rows),
        "",
        f"Compared on validation images. CPU time: one thread, one image, {card.processor}, interleaved with PyTorch, "
        f"which took {card.eager_ms:.2f} ms.",
        "",
        *([table(card.variants), "", VARIANTS_NOTE, ""] if card.variants else []),
    ]


def _use(card: Card) -> list[str]:
    blocks = ([f"{title}:", "", "```", command, "```", ""] for title, command in card.commands.items())
    return ["## Use", "", *(line for block in blocks for line in block)]


def _limits(card: Card) -> list[str]:
    apart = "a score is not the probability that the image shows that class."
    limits = f"Any image gets one of the classes, also one unlike the training data: {apart}"
    if card.thresholds:
        limits = f"{_several_labels(card.thresholds)}An image unlike the training data gets scores too: {apart}"
    elif card.width:
        limits = "Compare vectors by their cosine: the graphs return them with length 1, PyTorch as they are. "
        limits += (
            "The graphs map them into the teacher's space with what the run has learned, so that an index of the "
            "teacher's vectors, made length 1 too, can be searched. The weights for timm are without that map."
            if card.index
            else "They lie in the student's own space: they do not compare with the teacher's (`kd-export --index`)."
            if card.losses
            else "Those of its students lie in this space only where they were exported with `kd-export --index`."
        )
    return [
        "## Pixels",
        "",
        f"Centre crop of {percent(card.crop)} of the shorter side, bicubic to {card.size} x {card.size}, RGB. "
        "The graphs take these as uint8 [batch, 3, height, width] and normalize them; for PyTorch, mean and standard "
        "deviation are in config.json.",
        "",
        "## Limits",
        "",
        f"The numbers above are of one run; an interval holds the luck of the images, not that of the seed. {limits}",
        *(["", "An answer says whether it is sure:", ""] if card.defer else []),
        *(f"- {line}" for line in lines_of(card.defer)),
    ]


def _several_labels(thresholds: Mapping[str, Mapping[str, Any]]) -> str:
    chosen = sum(bool(one["chosen"]) for one in thresholds.values())
    known = [one["f1"] for one in thresholds.values() if one["chosen"] and "f1" in one]
    return (
        "An image has each label whose probability exceeds its threshold in manifest.json, or none. "
        f"{chosen} of {len(thresholds)} thresholds have the largest F1 on the validation images; the others are 0.5. "
        + (f"On images that chose nothing the mean F1 is {percent(sum(known) / len(known))}. " if known else "")
    )
