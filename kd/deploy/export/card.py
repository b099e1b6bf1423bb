"""The model card of an export: README.md in Hugging Face's format, drawn from what was measured and recorded."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.core.host import processor
from kd.core.text import VARIANTS_NOTE, percent, table, variant_rows, written
from kd.deploy.export.defer import lines_of
from kd.deploy.export.graphs import Made, Subject
from kd.deploy.export.options import accepted_line
from kd.models.teacher import count_parameters
from kd.models.timm_folder import is_timm
from kd.study.report.summary import differences, samples_of

STUDENT, ALONE = "this student", "the same student, labels only"
NAMED = 30  # labels that the card names: what a reader looks over; config.json has them all


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model card is drawn from."""

    subject: Subject
    made: Made
    facts: Mapping[str, Any]  # what manifest.json says
    folder: str  # its name, in the commands
    license: str

    @property
    def losses(self) -> Sequence[str]:
        """Kinds of the losses; empty: it is a teacher, and was not distilled."""
        return [loss.kind for loss in self.subject.recipe.student.losses]

    @property
    def embeds(self) -> bool:
        return not self.subject.recipe.student.task.logits

    @property
    def timm(self) -> bool:
        """Whether timm builds the network."""
        return is_timm(self.subject.student.network)

    def render(self) -> str:
        parts = (_front(self), _intro(self), _scores(self), _graphs(self), _use(self), _limits(self))
        return "\n".join(line for part in parts for line in part) + "\n"


def loading(folder: str, timm: bool) -> str:
    """Return Python that loads the student of an export."""
    if timm:
        return f"timm.create_model('local-dir:{folder}', pretrained=True)"
    return f"network.load_state_dict(safetensors.torch.load_file('{folder}/model.safetensors'))"


def plain(text: str) -> str:
    """Return a name as one line of Markdown that shows it and does nothing: no HTML, no link, no heading."""
    line = "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
    return re.sub(r"([\\`*\[\]|#])", r"\\\1", html.escape(line, quote=False))


def model_name(text: str) -> str:
    """Return the name of a model as a code span; of a path on this machine its last folder alone."""
    name = " ".join(str(text).split()).replace("`", "'").removeprefix("local-dir:")
    return f"`{Path(name).name if name.startswith(('/', '~')) else name}`"


def _front(card: ModelCard) -> list[str]:
    task = "image-feature-extraction" if card.embeds else "image-classification"
    library = "timm" if card.timm else "pytorch"
    tags = [f"tags: [{task}, {library}, knowledge-distillation]", f"pipeline_tag: {task}", f"library_name: {library}"]
    return ["---", *tags, f"license: {plain(card.license) or 'unknown'}", "---"]


def _intro(card: ModelCard) -> list[str]:
    recipe, student, losses = card.subject.recipe, card.subject.student, card.losses
    teacher = written(recipe.teacher.model)
    origin = f"distilled from {model_name(teacher)}" if teacher else "trained on labels alone"
    origin += f" by kd (losses: {', '.join(losses)})"
    labels = [plain(label) for label in card.subject.classes]
    names = ", ".join(labels[:NAMED]) + (f" and {len(labels) - NAMED} more" if len(labels) > NAMED else "")
    model = f"{model_name(written(recipe.student.model))} with {count_parameters(student) / 1e6:.2f} M parameters"
    return [
        f"# {plain(card.facts['name'])}",
        "",
        f"{model}, {origin if losses else 'a teacher'}. Version `{card.facts['version']}`.",
        "",
        f"- Data: {recipe.data.kind}, content hash {card.subject.data[:12]}",
        f"- Output: a vector of {student.num_features} numbers" if card.embeds else f"- {len(labels)} classes: {names}",
        f"- Weights: {card.subject.origin}",
        f"- Licence: {plain(card.license) or 'not stated (`kd-export --license ID`)'}",
        "",
    ]


def _scores(card: ModelCard) -> list[str]:
    scores, (scored, alone) = card.subject.recipe.student.task.scores, card.subject.scored
    row = card.subject.provenance["metrics"] if scored is None else scored.row
    if not row:
        return ["The run recorded no validation for these weights.", ""]
    decides, teachers = scores.own[0].key, scores.of_teachers(row)
    own = STUDENT if card.losses else "this teacher"
    baseline = max(card.subject.baseline, key=lambda one: one[decides], default={}) if alone is None else alone.row
    models = {**teachers, own: row, ALONE: baseline}
    samples = {**samples_of(scored, teachers, own), **samples_of(alone, (), ALONE)}
    rows = scores.table({name: values for name, values in models.items() if decides in values}, samples)
    if rows:
        on = "On the validation split:" if scored is None else f"On {scored.images:,} {scored.title} images:"
        lines = [on, "", table(rows), "", *([scores.note, ""] if scores.note else [])]
        lines += differences(scores, row, samples, own)
        if scored is not None and (card.losses or scored.split == "test"):  # the note is of the student's checkpoints
            lines += [scored.note, ""]
    else:
        lines = ["Trained and evaluated without labels, against its teacher.", ""]
    comparison = scores.against_teacher(row)
    return [*lines, *([comparison, ""] if comparison else []), *_calibration(card.made.calibration)]


def _calibration(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    return [
        f"These are the logits of the run. Here they are divided by {found['temperature']:.3g}, fitted on "
        f"{found['images']} validation images (arXiv:1706.04599). The calibration error goes from "
        f"{percent(found['ece'])} to {percent(found['calibrated_ece'])}, fitted on one half of them and counted "
        "on the other, twice. The same images chose the checkpoint. The answers are the same.",
        "",
    ]


def _graphs(card: ModelCard) -> list[str]:
    if not card.made.parity:
        return []
    score, rows = card.subject.recipe.student.task.scores.own[0], []
    for file, graph in card.made.parity.items():
        cells = {"file": file}
        if "cosine" in graph:
            cells["mean cosine with PyTorch"] = f"{graph['cosine']:.6f}"
        if score.title in graph:
            cells[score.title] = score.text(graph[score.title])
        if "same_top1" in graph:
            cells["same top-1 as PyTorch"] = f"{graph['same_top1']} of {graph['images']}"
        cells |= {"max abs. difference": f"{graph['max_difference']:.1e}", "CPU ms per image": f"{graph['cpu_ms']:.2f}"}
        rows.append(cells)
    measured = variant_rows(card.facts)
    return [
        table(rows),
        "",
        f"Compared on validation images. CPU time: one thread, one image, {processor()}, interleaved with PyTorch, "
        f"which took {card.made.eager_ms:.2f} ms.",
        "",
        *([f"Of these, {accepted_line(card.made.accepted)}.", ""] if card.made.accepted else []),
        *([table(measured), "", VARIANTS_NOTE, ""] if measured else []),
    ]


def _use(card: ModelCard) -> list[str]:
    title = "With timm" if card.timm else "In PyTorch, with the code of the network"
    blocks = {title: loading(card.folder, card.timm)}
    if "model.onnx" in card.made.parity:
        ask = "curl --data-binary @image.jpg -H 'content-type: image/jpeg' localhost:8080/invocations"
        blocks["As an endpoint, without torch"] = f"kd-serve {card.folder}\n{ask}"
    lines = ([f"{title}:", "", "```", command, "```", ""] for title, command in blocks.items())
    return ["## Use", "", *(line for block in lines for line in block)]


def _limits(card: ModelCard) -> list[str]:
    pixels = card.facts["input"]
    return [
        "## Pixels",
        "",
        f"Centre crop of {percent(pixels['crop'])} of the shorter side, bicubic to {pixels['size']} x "
        f"{pixels['size']}, RGB. The graphs take these as uint8 [batch, 3, height, width] and normalize them; for "
        "PyTorch, mean and standard deviation are in config.json.",
        "",
        "## Limits",
        "",
        f"The numbers above are of one run; an interval holds the luck of the images, not that of the seed. "
        f"{_meaning(card)}",
        *(["", "An answer says whether it is sure:", ""] if card.made.defer else []),
        *(f"- {line}" for line in lines_of(card.made.defer)),
    ]


def _meaning(card: ModelCard) -> str:
    """Return what an answer does not say."""
    apart = "a score is not the probability that the image shows that class."
    if card.embeds:
        text = "Compare vectors by their cosine: the graphs return them with length 1, PyTorch as they are. "
        if card.facts["output"].get("space") == "teacher":
            return text + (
                "The graphs map them into the teacher's space with what the run has learned, so that an index of the "
                "teacher's vectors, made length 1 too, can be searched. The weights for timm are without that map."
            )
        if card.losses:
            return (
                text
                + "They lie in the student's own space: they do not compare with the teacher's "
                + ("(`kd-export --index`).")
            )
        return text + "Those of its students lie in this space only where they were exported with `kd-export --index`."
    if card.made.thresholds:
        text = _several_labels(card.made.thresholds)
        return f"{text}An image unlike the training data gets scores too: {apart}"
    return f"Any image gets one of the classes, also one unlike the training data: {apart}"


def _several_labels(thresholds: Mapping[str, Mapping[str, Any]]) -> str:
    chosen = sum(bool(one["chosen"]) for one in thresholds.values())
    known = [one["f1"] for one in thresholds.values() if one["chosen"] and "f1" in one]
    return (
        "An image has each label whose probability exceeds its threshold in manifest.json, or none. "
        f"{chosen} of {len(thresholds)} thresholds have the largest F1 on the validation images; the others are 0.5. "
        + (
            f"On images that did not choose the thresholds the mean F1 is {percent(sum(known) / len(known))}. "
            if known
            else ""
        )
    )
