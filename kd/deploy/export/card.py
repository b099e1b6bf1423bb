"""The model card of an export: README.md in Hugging Face's format, made from
manifest.json only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.core.intervals import Samples, paired_interval, wilson_interval
from kd.core.scores import DIFFERENCES_NOTE, Column, Scored, Scores
from kd.core.text import VARIANTS_NOTE, markdown_table, percent, variant_rows
from kd.deploy.export.defer import lines_of
from kd.deploy.export.flags import accepted_line
from kd.deploy.export.receipt import ALONE, OWN, licence_lines, plain
from kd.files.manifest import DIGITS, graphs_by_priority
from kd.files.templates import render_template
from kd.models.licences import UNKNOWN
from kd.setup.provenance import chain_lines

TEMPLATE = Path(__file__).parent / "card.md.jinja"
NAMED = 30  # most labels in the card; config.json has all
Facts = Mapping[str, Any]


def card(facts: Facts) -> str:
    """Return README.md, a function of manifest.json only: `kd verify` generates it
    again and compares every byte.

    `facts`: the manifest. Raises one of `kd.files.json_file.DAMAGE` if it has another
    format.
    """
    about = facts["about"]
    timm = about["library"] == "timm"
    return render_template(
        TEMPLATE,
        facts=facts,
        about=about,
        embeds=_embeds(facts),
        task="image-feature-extraction" if _embeds(facts) else "image-classification",
        library=plain(about["library"]),
        licence=plain(facts["licences"][facts["chain"]["student"]["is"]]),
        unknown=UNKNOWN,
        origin=_origin(facts),
        labels=[plain(label) for label in about["labels"]],
        named=NAMED,
        digits=DIGITS,
        scores=_scores(facts),
        differences_note=DIFFERENCES_NOTE,
        graphs=_graphs(facts),
        variants_note=VARIANTS_NOTE,
        loading=loading(".", timm),
        chain=chain_lines(facts),
        licences=licence_lines(facts),
        meaning=_meaning(facts),
        sure=lines_of(facts["output"].get("defer", {})),
        plain=plain,
        percent=percent,
        table=markdown_table,
    )


def loading(folder: str, timm: bool) -> str:
    """Return Python that loads the student of an export."""
    if timm:
        return f"timm.create_model('local-dir:{folder}', pretrained=True)"
    return f"network.load_state_dict(safetensors.torch.load_file('{folder}/model.safetensors'))"


def _embeds(facts: Facts) -> bool:
    return facts["output"]["name"] == "embedding"


def _origin(facts: Facts) -> str:
    losses = facts["about"]["losses"]
    if not losses:
        return "a teacher"
    teachers = [
        f"`{one['name']}`"
        for one in facts["chain"].get("teacher", {"members": {}})["members"].values()
    ]
    origin = (
        f"distilled from {' and '.join(teachers)}"
        if teachers
        else "trained on labels alone"
    )
    return f"{origin} by kd (losses: {', '.join(map(plain, losses))})"


def _scores(facts: Facts) -> dict[str, Any]:
    """Return what the card says about the recorded scores, {} without any."""
    recorded, scores = facts["scores"], Scores.read(facts["scores"]["columns"])
    if not recorded["models"] and not recorded["pair"]:
        return {}
    exported = facts["chain"]["student"]["is"]
    titles = {OWN: f"this {exported}", ALONE: "the same student, labels only"}
    order: list[str] = sorted(
        recorded["models"], key=lambda name: (name == ALONE, name == OWN, name)
    )
    models = {titles.get(name, name): recorded["models"][name] for name in order}
    values = {
        name: {key: score["value"] for key, score in columns.items()}
        for name, columns in models.items()
    }
    ends = {
        name: {
            key: Samples(score["value"], ends=near)
            for key, score in columns.items()
            if (near := interval(score))
        }
        for name, columns in models.items()
    }
    scored = Scored(
        recorded["split"], 0, "", recorded["images"], recorded["evaluations"], {}, {}
    )
    column = scores.own[0]
    of_student = exported == "student"  # the note is about the student's checkpoints
    return {
        "rows": scores.table(values, ends),
        "images": (
            f"On {scored.images:,} {scored.title} images:"
            if scored.images
            else "On the validation split:"
        ),
        "note": scores.note,
        "differences": [
            f"{titles[OWN]} against {titles.get(name, name)}: {column.title}"
            f" {column.difference_text(*_difference(gain))}"
            for name, gain in recorded["differences"].items()
        ],
        "split_note": (
            scored.note
            if scored.images and (of_student or scored.split == "test")
            else ""
        ),
        "against_teacher": scores.against_teacher(recorded["pair"], scored.title),
    }


def interval(one: Facts) -> tuple[float, float] | None:
    """Return the interval of a score: computed for a share of images, else the recorded
    one, else None.
    """
    return (
        wilson_interval(one["value"], one["images"])
        if "images" in one
        else one.get("interval")
    )


def _difference(one: Facts) -> tuple[float, float, float]:
    """Return the student's gain with the ends of its interval, computed from counts or
    as recorded.
    """
    if "gained" in one:
        gained, lost, images = one["gained"], one["lost"], one["images"]
        return (gained - lost) / images, *paired_interval(gained, lost, images)
    return one["value"], one["interval"][0], one["interval"][1]


def _graphs(facts: Facts) -> dict[str, Any]:
    """Return the comparison of the graphs with PyTorch, {} without graphs."""
    if not facts["parity"]:
        return {}
    score, rows = Column(**facts["scores"]["columns"]["own"][0]), []
    for file in graphs_by_priority(facts):
        graph, cells = facts["parity"][file], {"file": file}
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
    }


def _meaning(facts: Facts) -> str:
    """Return the text on the limits of a prediction."""
    apart = "a score is not the probability that the image shows that class."
    if _embeds(facts):
        text = (
            "Compare vectors by their cosine: the graphs return them with length 1,"
            " PyTorch as they are. "
        )
        if facts["output"].get("space") == "teacher":
            return (
                text + "The graphs project them into the teacher's space by a learned"
                " matrix, so that an index of the teacher's vectors, made length 1"
                " too, can be searched. The weights for timm lack that projection."
            )
        if facts["about"]["losses"]:
            text += (
                "They lie in the student's own space: they do not compare with the"
                " teacher's "
            )
            return f"{text}(`kd-export --index`)."
        return (
            text
            + "Those of its students lie in this space only where they were exported"
            " with `kd-export --index`."
        )
    if thresholds := facts["output"].get("thresholds"):
        text = _several_labels([*thresholds.values()])
        return f"{text}An image unlike the training data gets scores too: {apart}"
    return (
        "Every image is assigned one of the classes, even one unlike the training"
        f" data: {apart}"
    )


def _several_labels(thresholds: Sequence[Facts]) -> str:
    chosen = sum(bool(one["chosen"]) for one in thresholds)
    known = [one["f1"] for one in thresholds if one["chosen"] and "f1" in one]
    text = (
        "An image has each label whose probability exceeds its threshold in"
        " manifest.json, or none. "
    )
    text += (
        f"{chosen} of {len(thresholds)} thresholds have the largest F1 on the"
        " validation images; the others are "
    )
    text += "0.5. "
    if known:
        text += (
            "On images that did not choose the thresholds the mean F1 is"
            f" {percent(sum(known) / len(known))}. "
        )
    return text
