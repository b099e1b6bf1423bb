"""The model card of an export: README.md in Hugging Face's format, with the numbers of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kd.progress.console import COLUMNS, scored_by
from kd.text import percent


@dataclass(frozen=True, slots=True)
class Card:
    """The contents of a model card."""

    name: str
    student: str
    student_parameters: int
    teacher: str
    """Empty: trained on labels alone."""
    losses: Sequence[str]
    data: str
    labels: Sequence[str]
    """Empty: an embedding model."""
    thresholds: Mapping[str, Mapping[str, Any]]
    """By label, where an image may have several: threshold, chosen, images. Empty: an image has one label."""
    calibration: Mapping[str, Any]
    """temperature, images, ece, calibrated_ece. Empty: the logits are those that were trained."""
    width: int
    """Of its vectors; 0 of a classifier."""
    metrics: Mapping[str, Any]
    """The validation row of the exported checkpoint."""
    baseline: Mapping[str, Any]
    """The validation row of the same student trained on labels alone; empty where there is none."""
    graphs: Mapping[str, Mapping[str, Any]]
    """For each exported graph: max_difference, images, cpu_ms, and same_top1 with accuracy or mAP, or cosine."""
    eager_ms: float
    """CPU milliseconds of PyTorch for one image with one thread; 0: not measured."""
    processor: str
    size: int
    crop: float
    license: str
    weights_from: str
    """Origin of the initial weights, with their licence, as text."""
    version: str
    commands: Mapping[str, str]


def render(card: Card) -> str:
    """Return the text of README.md."""
    return "\n".join([*_front(card), *_intro(card), *_scores(card), *_graphs(card), *_use(card), *_limits(card)]) + "\n"


def _front(card: Card) -> list[str]:
    task = "image-feature-extraction" if card.width else "image-classification"
    return [
        "---",
        f"tags: [{task}, timm, knowledge-distillation]",
        f"pipeline_tag: {task}",
        "library_name: timm",
        f"license: {card.license or 'unknown'}",
        "---",
    ]


def _intro(card: Card) -> list[str]:
    origin = f"distilled from `{card.teacher}`" if card.teacher else "trained on labels alone"
    shown = ", ".join(card.labels[:30]) + (f" and {len(card.labels) - 30} more" if len(card.labels) > 30 else "")
    return [
        f"# {card.name}",
        "",
        f"`{card.student}` with {card.student_parameters / 1e6:.2f} M parameters, {origin} by kd "
        f"(losses: {', '.join(card.losses)}). Version `{card.version}`.",
        "",
        f"- Data: {card.data}",
        f"- Output: a vector of {card.width} numbers" if card.width else f"- {len(card.labels)} classes: {shown}",
        f"- Weights: {card.weights_from}",
        f"- Licence: {card.license or 'not stated (`kd-export --license ID`)'}",
        "",
    ]


def _scores(card: Card) -> list[str]:
    metrics, rows = card.metrics, []
    if not metrics:
        return ["The run recorded no validation for these weights.", ""]
    if card.width:
        return _embedding_scores(metrics)
    shown = COLUMNS.get(scored_by(metrics), COLUMNS["accuracy"])
    for name, row, prefix in (
        ("teacher", metrics, "teacher_"),
        ("this student", metrics, ""),
        ("the same student, labels only", card.baseline, ""),
    ):
        if all(f"{prefix}{key}" in row for key in shown):
            values = (row[f"{prefix}{key}"] for key in shown)
            rows.append(f"| {name} | {' | '.join(percent(value) for value in values)} |")
    lines = [f"| validation split | {' | '.join(shown.values())} |", "|---|---:|---:|---:|", *rows, ""]
    lines = lines if rows else ["Trained and evaluated without labels, against its teacher.", ""]
    if "agreement" in metrics:
        agreement, kl = percent(metrics["agreement"]), metrics["kl"]
        lines += [f"Student and teacher give the same answer on {agreement} of the images; KL {kl:.3f} nats.", ""]
    if card.calibration:
        found, errors = card.calibration, (percent(card.calibration[key]) for key in ("ece", "calibrated_ece"))
        lines += [
            "These are the logits of the run. Here they are divided by "
            f"{found['temperature']:.3g}, fitted on {found['images']} validation images (arXiv:1706.04599), where the "
            f"calibration error falls from {' to '.join(errors)}. The answers are the same.",
            "",
        ]
    return lines


def _embedding_scores(metrics: Mapping[str, Any]) -> list[str]:
    lines = []
    if "knn" in metrics:
        ends = [name.removeprefix("teacher_knn") for name in metrics if name.startswith("teacher_knn")]
        rows = [(f"teacher{end.replace('_', ' ')}", f"teacher_knn{end}", f"teacher_probe{end}") for end in ends]
        lines = ["| validation split | nearest neighbours | linear probe |", "|---|---:|---:|"]
        for name, knn, probe in [*rows, ("this student", "knn", "probe")]:
            lines.append(f"| {name} | {percent(metrics[knn])} | {percent(metrics[probe])} |")
        lines += [
            "",
            "Accuracies with the vectors alone: 20 neighbours among training images, weighted by exp(cosine / 0.07), "
            "and a ridge classifier. The labels were not used in training.",
        ]
    text = f"Agreement with the teacher through the projector that was trained beside it: {metrics['agreement']:.4f}."
    return [*lines, text, ""]


def _graphs(card: Card) -> list[str]:
    if not card.graphs:
        return []
    score = "mAP" if any("mAP" in row for row in card.graphs.values()) else "accuracy"
    compared = "mean cosine with PyTorch" if card.width else f"{score} | same top-1 as PyTorch"
    lines = [
        f"| file | {compared} | max abs. difference | CPU ms per image |",
        "|---|---:|---:|---:|" if card.width else "|---|---:|---:|---:|---:|",
    ]
    for file, row in card.graphs.items():
        if card.width:
            found = f"{row['cosine']:.6f}"
        else:
            found = f"{percent(row[score])} | {row['same_top1']} of {row['images']}"
        lines.append(f"| {file} | {found} | {row['max_difference']:.1e} | {row['cpu_ms']:.2f} |")
    return [
        *lines,
        "",
        f"Compared on validation images. CPU time: one thread, one image, {card.processor}, interleaved with PyTorch, "
        f"which took {card.eager_ms:.2f} ms.",
        "",
    ]


def _use(card: Card) -> list[str]:
    lines = ["## Use", ""]
    for title, command in card.commands.items():
        lines += [f"{title}:", "", "```", command, "```", ""]
    return lines


def _limits(card: Card) -> list[str]:
    return [
        "## Pixels",
        "",
        f"Centre crop of {percent(card.crop)} of the shorter side, bicubic to {card.size} x {card.size}, RGB. "
        "The graphs take these as uint8 [batch, 3, height, width] and normalize them; for timm, mean and standard "
        "deviation are in config.json.",
        "",
        "## Limits",
        "",
        "The numbers above are of one run on one validation split. "
        + _several_labels(card.thresholds)
        + (
            "Compare vectors by their cosine: the graphs return them with length 1, timm as they are. They lie in the "
            "student's own space: they do not compare with the teacher's."
            if card.width
            else "An image unlike the training data gets scores too: a score is not the "
            "probability that the image shows that class."
            if card.thresholds
            else "Any image gets one of the classes, also one unlike the training data: a score is not the "
            "probability that the image shows that class."
        ),
    ]


def _several_labels(thresholds: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how logits become labels; empty where an image has one label."""
    if not thresholds:
        return ""
    chosen = sum(bool(one["chosen"]) for one in thresholds.values())
    return (
        "An image has each label whose sigmoid exceeds its threshold in manifest.json, or none. "
        f"{chosen} of {len(thresholds)} thresholds have the largest F1 on the validation images, on which their F1 is "
        "therefore too good; the others are 0.5. "
    )
