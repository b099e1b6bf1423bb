"""The model card of an export: README.md in Hugging Face's format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.core.intervals import Samples, paired_interval, wilson_interval
from kd.core.scores import DIFFERENCES_NOTE, Column, Scored, Scores
from kd.core.text import VARIANTS_NOTE, markdown_table, percent, variant_rows
from kd.deploy.export.defer import defer_lines
from kd.deploy.export.flags import accepted_line
from kd.deploy.export.receipt import ALONE, OWN, licence_lines, plain
from kd.deploy.export.variants import int8_note
from kd.files.manifest import DIGITS, graphs_by_priority
from kd.files.templates import render_template
from kd.models.licences import UNKNOWN
from kd.setup.provenance import chain_lines

TEMPLATE = Path(__file__).parent / "card.md.jinja"
NAMED = 30  # most labels in the card; config.json has all
Facts = Mapping[str, Any]


def card(facts: Facts) -> str:
    """Return README.md, which depends on the manifest alone.

    `kd verify` generates it again and compares every byte. Raises one of
    `kd.files.json_file.DAMAGE` if the manifest has another format.
    """
    about = facts["about"]
    return render_template(
        TEMPLATE,
        facts=facts,
        about=about,
        embeds=_embeds(facts),
        task="image-feature-extraction" if _embeds(facts) else "image-classification",
        library=plain(about["library"]),
        licence=plain(facts["licences"][facts["chain"]["student"]["is"]]),
        unknown=UNKNOWN,
        origin=_training(facts),
        labels=[plain(label) for label in about["labels"]],
        columns=map(plain, facts["output"].get("values", {}).get("columns", ())),
        named=NAMED,
        digits=DIGITS,
        scores=_score_section(facts),
        differences_note=DIFFERENCES_NOTE,
        graphs=_graph_comparison(facts),
        variants_note=VARIANTS_NOTE,
        loading=loading(".", about["library"] == "timm"),
        chain=chain_lines(facts),
        licences=licence_lines(facts),
        meaning=_limits_text(facts),
        sure=defer_lines(facts["output"].get("defer", {})),
        plain=plain,
        percent=percent,
        table=markdown_table,
    )


def loading(folder: str, timm: bool) -> str:
    """Return Python that loads the student of an export."""
    if timm:
        return f"timm.create_model('local-dir:{folder}', pretrained=True)"
    weights = f"safetensors.torch.load_file('{folder}/model.safetensors')"
    return f"network.load_state_dict({weights})"


def _embeds(facts: Facts) -> bool:
    return facts["output"]["name"] == "embedding"


def _training(facts: Facts) -> str:
    losses = facts["about"]["losses"]
    if not losses:
        return "a teacher"
    members = facts["chain"].get("teacher", {"members": {}})["members"]
    training = "trained on labels alone"
    if members:
        names = [f"`{teacher['name']}`" for teacher in members.values()]
        training = f"distilled from {' and '.join(names)}"
    return f"{training} by kd (losses: {', '.join(map(plain, losses))})"


def _score_section(facts: Facts) -> dict[str, Any]:
    """Return what the card says about the recorded scores, {} without any."""
    recorded = facts["scores"]
    scores = Scores.read(recorded["columns"])
    if not recorded["models"] and not recorded["pair"]:
        return {}
    exported = facts["chain"]["student"]["is"]
    titles = {OWN: f"this {exported}", ALONE: "the same student, labels only"}
    order: list[str] = sorted(
        recorded["models"], key=lambda name: (name == ALONE, name == OWN, name)
    )
    values: dict[str, dict[str, float]] = {}
    samples: dict[str, dict[str, Samples]] = {}
    for name in order:
        title = titles.get(name, name)
        values[title] = {}
        samples[title] = {}
        for key, score in recorded["models"][name].items():
            values[title][key] = score["value"]
            if ends := score_interval(score):
                samples[title][key] = Samples(score["value"], ends=ends)
    scored = Scored(
        recorded["split"], 0, "", recorded["images"], recorded["evaluations"], {}, {}
    )
    images = "On the validation split:"
    split_note = ""
    if scored.images:
        images = f"On {scored.images:,} {scored.title} images:"
        # the note on other splits is about the student's checkpoints
        if exported == "student" or scored.split == "test":
            split_note = scored.note
    column = scores.own[0]
    return {
        "rows": scores.table(values, samples),
        "images": images,
        "note": scores.note,
        "differences": [
            f"{titles[OWN]} against {titles.get(name, name)}: {column.title}"
            f" {column.difference_text(*_gain(gain))}"
            for name, gain in recorded["differences"].items()
        ],
        "split_note": split_note,
        "against_teacher": scores.against_teacher(recorded["pair"], scored.title),
    }


def score_interval(score: Facts) -> tuple[float, float] | None:
    """Return the interval of a score, computed from its images or as recorded."""
    if "images" in score:
        return wilson_interval(score["value"], score["images"])
    return score.get("interval")


def _gain(gain: Facts) -> tuple[float, float, float]:
    """Return the student's gain and the ends of its interval."""
    if "gained" not in gain:
        return gain["value"], gain["interval"][0], gain["interval"][1]
    gained = gain["gained"]
    lost = gain["lost"]
    images = gain["images"]
    return (gained - lost) / images, *paired_interval(gained, lost, images)


def _graph_comparison(facts: Facts) -> dict[str, Any]:
    """Return the comparison of the graphs with PyTorch, {} without graphs."""
    if not facts["parity"]:
        return {}
    score = Column(**facts["scores"]["columns"]["own"][0])
    rows = []
    for file in graphs_by_priority(facts):
        graph = facts["parity"][file]
        cells = {"file": file}
        if "cosine" in graph:
            cells["mean cosine with PyTorch"] = f"{graph['cosine']:.6f}"
        if score.title in graph:
            cells[score.title] = score.text(graph[score.title])
        if "same_top1" in graph:
            cells["same top-1 as PyTorch"] = (
                f"{graph['same_top1']} of {graph['images']}"
            )
        cells |= {
            "max abs. difference": f"{graph['max_difference']:.1e}",
            "CPU ms per image": f"{graph['cpu_ms']:.2f}",
        }
        rows.append(cells)
    labelled = next(iter(facts["parity"].values())).get("labelled", 0)
    accepted = facts.get("accepted") or facts.get("cascade")
    return {
        "rows": rows,
        "labelled": (
            f"; {score.title} on the {labelled:,} of them that have a label"
            if labelled
            else ""
        ),
        "accepted": accepted_line(accepted) if accepted else "",
        "variants": variant_rows(facts),
        "int8": [
            f"`{file}`: {note}."
            for file, graph in facts["parity"].items()
            if (note := int8_note(graph.get("int8_share", 1.0)))
        ],
    }


def _limits_text(facts: Facts) -> str:
    """Return the text on the limits of a prediction."""
    if _embeds(facts):
        return _embedding_text(facts)
    warning = "a score is not the probability that the image shows that class."
    if thresholds := facts["output"].get("thresholds"):
        text = _label_set_text([*thresholds.values()])
        return f"{text}An image unlike the training data gets scores too: {warning}"
    return (
        "Every image is assigned one of the classes, even one unlike the training"
        f" data: {warning}"
    )


def _embedding_text(facts: Facts) -> str:
    if facts["output"].get("space") == "teacher":
        space = (
            "The graphs project them into the teacher's space by a learned matrix, so"
            " that an index of the teacher's vectors, made length 1 too, can be"
            " searched. The weights for timm lack that projection."
        )
    elif facts["about"]["losses"]:
        space = (
            "They lie in the student's own space: they do not compare with the"
            " teacher's (`kd-export --index`)."
        )
    else:
        space = (
            "Those of its students lie in this space only where they were exported"
            " with `kd-export --index`."
        )
    return (
        "Compare vectors by their cosine: the graphs return them with length 1,"
        f" PyTorch as they are. {space}"
    )


def _label_set_text(thresholds: Sequence[Facts]) -> str:
    chosen = [threshold for threshold in thresholds if threshold["chosen"]]
    f1_values = [threshold["f1"] for threshold in chosen if "f1" in threshold]
    text = (
        "An image has each label whose probability exceeds its threshold in"
        f" manifest.json, or none. {len(chosen)} of {len(thresholds)} thresholds have"
        " the largest F1 on the validation images; the others are 0.5. "
    )
    if f1_values:
        text += (
            "On images that did not choose the thresholds the mean F1 is"
            f" {percent(sum(f1_values) / len(f1_values))}. "
        )
    return text
