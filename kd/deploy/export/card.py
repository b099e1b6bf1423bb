"""The model card of an export: README.md in Hugging Face's format, drawn from what was measured and recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kd.core.scores import Column
from kd.core.text import VARIANTS_NOTE, percent, table, variant_rows, written
from kd.deploy.export.defer import lines_of
from kd.deploy.export.graphs import Made, Subject
from kd.deploy.export.options import accepted_line
from kd.deploy.export.receipt import licence_lines, plain, plain_name
from kd.files.manifest import served_first
from kd.models.teacher import count_parameters
from kd.models.timm_folder import is_timm
from kd.study.report.summary import chain_lines, differences, samples_of

STUDENT, ALONE = "this student", "the same student, labels only"
LUCK = "The numbers above are of one run; an interval holds the luck of the images, not that of the seed."
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
        parts = drawn(self.facts)
        text = [*_front(self), *_intro(self), *parts["scores"], *parts["graphs"], *_use(self)]
        text += ["## Where it comes from", "", "```", *parts["chain"], "```", "", *parts["licences"], ""]
        text += ["## Pixels", "", *parts["pixels"], "", "## Limits", "", f"{LUCK} {_meaning(self)}"]
        return "\n".join([*text, *parts["sure"]]) + "\n"


def drawn(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the parts of a card that say what manifest.json says, by name: `kd verify` draws them again."""
    pixels = facts["input"]
    sure = [f"- {line}" for line in lines_of(facts["output"].get("defer", {}))]
    return {
        "scores": facts["scores"]["lines"],
        "graphs": _graphs(facts),
        "chain": chain_lines(facts),
        "licences": licence_lines(facts),
        "pixels": [
            f"Centre crop of {percent(pixels['crop'])} of the shorter side, bicubic to {pixels['size']} x "
            f"{pixels['size']}, RGB. The graphs take these as uint8 [batch, 3, height, width] and normalize them; for "
            "PyTorch, mean and standard deviation are in config.json."
        ],
        "sure": ["", "An answer says whether it is sure:", "", *sure] if sure else [],
    }


def loading(folder: str, timm: bool) -> str:
    """Return Python that loads the student of an export."""
    if timm:
        return f"timm.create_model('local-dir:{folder}', pretrained=True)"
    return f"network.load_state_dict(safetensors.torch.load_file('{folder}/model.safetensors'))"


def model_name(text: str) -> str:
    """Return the name of a model as a code span."""
    return f"`{plain_name(text)}`"


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


def scores_of(subject: Subject, made: Made) -> dict[str, Any]:
    """Return for manifest.json the score that decides, and the lines that the card has of all scores."""
    column, (scored, _) = subject.recipe.student.task.scores.own[0], subject.scored
    row = subject.provenance["metrics"] if scored is None else scored.row
    on = {"split": "val", "images": 0} if scored is None else {"split": scored.split, "images": scored.images}
    lines = [line for text in _scores(subject, row) for line in text.split("\n")] + _calibration(made.calibration)
    return {"title": column.title, "unit": column.unit, "value": row.get(column.key), **on, "lines": lines}


def _scores(subject: Subject, row: Mapping[str, Any]) -> list[str]:
    scores, (scored, alone) = subject.recipe.student.task.scores, subject.scored
    distilled = bool(subject.recipe.student.losses)
    if not row:
        return ["The run recorded no validation for these weights.", ""]
    decides, teachers = scores.own[0].key, scores.of_teachers(row)
    own = STUDENT if distilled else "this teacher"
    baseline = max(subject.baseline, key=lambda one: one[decides], default={}) if alone is None else alone.row
    models = {**teachers, own: row, ALONE: baseline}
    samples = {**samples_of(scored, teachers, own), **samples_of(alone, (), ALONE)}
    rows = scores.table({name: values for name, values in models.items() if decides in values}, samples)
    if rows:
        on = "On the validation split:" if scored is None else f"On {scored.images:,} {scored.title} images:"
        lines = [on, "", table(rows), "", *([scores.note, ""] if scores.note else [])]
        lines += differences(scores, row, samples, own)
        if scored is not None and (distilled or scored.split == "test"):  # the note is of the student's checkpoints
            lines += [scored.note, ""]
    else:
        lines = ["Trained and evaluated without labels, against its teacher.", ""]
    comparison = scores.against_teacher(row, "validation" if scored is None else scored.title)
    return [*lines, *([comparison, ""] if comparison else [])]


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


def _graphs(facts: Mapping[str, Any]) -> list[str]:
    if not facts["parity"]:
        return []
    score, rows = Column("", facts["scores"]["title"], facts["scores"]["unit"]), []
    for file in served_first(facts):
        graph, cells = facts["parity"][file], {"file": file}
        if "cosine" in graph:
            cells["mean cosine with PyTorch"] = f"{graph['cosine']:.6f}"
        if score.title in graph:
            cells[score.title] = score.text(graph[score.title])
        if "same_top1" in graph:
            cells["same top-1 as PyTorch"] = f"{graph['same_top1']} of {graph['images']}"
        cells |= {"max abs. difference": f"{graph['max_difference']:.1e}", "CPU ms per image": f"{graph['cpu_ms']:.2f}"}
        rows.append(cells)
    measured, machine = variant_rows(facts), facts["environment"]["machine"]["processor"]
    return [
        *table(rows).split("\n"),
        "",
        f"Compared on validation images. CPU time: one thread, one image, {machine}, interleaved with PyTorch, "
        f"which took {facts['eager_ms']:.2f} ms.",
        "",
        *([f"Of these, {accepted_line(facts['accepted'])}.", ""] if "accepted" in facts else []),
        *([*table(measured).split("\n"), "", VARIANTS_NOTE, ""] if measured else []),
    ]


def _use(card: ModelCard) -> list[str]:
    title = "With timm" if card.timm else "In PyTorch, with the code of the network"
    blocks = {title: loading(card.folder, card.timm)}
    if "model.onnx" in card.made.parity:
        ask = "curl --data-binary @image.jpg -H 'content-type: image/jpeg' localhost:8080/invocations"
        blocks["As an endpoint, without torch"] = f"kd-serve {card.folder}\n{ask}"
    lines = ([f"{title}:", "", "```", command, "```", ""] for title, command in blocks.items())
    return ["## Use", "", *(line for block in lines for line in block)]


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
            text += "They lie in the student's own space: they do not compare with the teacher's "
            return f"{text}(`kd-export --index`)."
        return text + "Those of its students lie in this space only where they were exported with `kd-export --index`."
    if card.made.thresholds:
        text = _several_labels(card.made.thresholds)
        return f"{text}An image unlike the training data gets scores too: {apart}"
    return f"Any image gets one of the classes, also one unlike the training data: {apart}"


def _several_labels(thresholds: Mapping[str, Mapping[str, Any]]) -> str:
    chosen = sum(bool(one["chosen"]) for one in thresholds.values())
    known = [one["f1"] for one in thresholds.values() if one["chosen"] and "f1" in one]
    text = "An image has each label whose probability exceeds its threshold in manifest.json, or none. "
    text += (
        f"{chosen} of {len(thresholds)} thresholds have the largest F1 on the validation images; the others are 0.5. "
    )
    if known:
        text += f"On images that did not choose the thresholds the mean F1 is {percent(sum(known) / len(known))}. "
    return text
