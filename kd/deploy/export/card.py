"""The model card of an export: README.md in Hugging Face's format, made from manifest.json only."""

from collections.abc import Mapping, Sequence
from typing import Any

from kd.core.intervals import Samples, paired, wilson
from kd.core.scores import DIFFERENCES_NOTE, Column, Scored, Scores
from kd.core.text import VARIANTS_NOTE, percent, table, variant_rows
from kd.deploy.export.defer import lines_of
from kd.deploy.export.flags import accepted_line
from kd.deploy.export.receipt import ALONE, OWN, licence_lines, plain
from kd.files.manifest import DIGITS, served_first
from kd.models.licences import UNKNOWN
from kd.setup.provenance import chain_lines

LUCK = "The numbers above are from one run. Intervals cover sampling of the images, not variation between seeds."
NAMED = 30  # most labels in the card; config.json has all
Facts = Mapping[str, Any]


def card(facts: Facts) -> str:
    """Return README.md, a function of manifest.json only: `kd verify` generates it again and compares every byte.

    `facts`: the manifest. Raises one of `kd.files.json_file.DAMAGE` if it has another format.
    """
    pixels, sure = facts["input"], [f"- {line}" for line in lines_of(facts["output"].get("defer", {}))]
    text = [*_front(facts), *_intro(facts), *_scores(facts), *_graphs(facts), *_use(facts)]
    text += ["## Where it comes from", "", "```", *chain_lines(facts), "```", "", *licence_lines(facts), ""]
    text += [
        "## Pixels",
        "",
        f"Centre crop of {percent(pixels['crop'])} of the shorter side, bicubic to {pixels['size']} x "
        f"{pixels['size']}, RGB. The graphs take these as uint8 [batch, 3, height, width] and normalize them; for "
        "PyTorch, mean and standard deviation are in config.json.",
        "",
        *("## Limits", "", f"{LUCK} {_meaning(facts)}"),
    ]
    return "\n".join([*text, *(["", "Each prediction says whether it is sure:", "", *sure] if sure else [])]) + "\n"


def loading(folder: str, timm: bool) -> str:
    """Return Python that loads the student of an export."""
    if timm:
        return f"timm.create_model('local-dir:{folder}', pretrained=True)"
    return f"network.load_state_dict(safetensors.torch.load_file('{folder}/model.safetensors'))"


def _embeds(facts: Facts) -> bool:
    return facts["output"]["name"] == "embedding"


def _licence(facts: Facts) -> str:
    return plain(facts["licences"][facts["chain"]["student"]["is"]])


def _front(facts: Facts) -> list[str]:
    task = "image-feature-extraction" if _embeds(facts) else "image-classification"
    library = plain(facts["about"]["library"])
    tags = [f"tags: [{task}, {library}, knowledge-distillation]", f"pipeline_tag: {task}", f"library_name: {library}"]
    return ["---", *tags, f"license: {_licence(facts)}", "---"]


def _intro(facts: Facts) -> list[str]:
    about, licence = facts["about"], _licence(facts)
    teachers = [f"`{one['name']}`" for one in facts["chain"].get("teacher", {"members": {}})["members"].values()]
    origin = f"distilled from {' and '.join(teachers)}" if teachers else "trained on labels alone"
    origin += f" by kd (losses: {', '.join(map(plain, about['losses']))})"
    labels = [plain(label) for label in about["labels"]]
    names = ", ".join(labels[:NAMED]) + (f" and {len(labels) - NAMED} more" if len(labels) > NAMED else "")
    vector = f"- Output: a vector of {facts['output']['width']} numbers"
    model = f"`{about['model']}` with {about['parameters'] / 1e6:.2f} M parameters"
    return [
        f"# {plain(facts['name'])}",
        "",
        f"{model}, {origin if about['losses'] else 'a teacher'}. Version `{plain(facts['version'])}`.",
        "",
        f"- Data: {plain(about['data']['kind'])}, content hash {plain(about['data']['hash'])[:DIGITS]}",
        vector if _embeds(facts) else f"- {len(labels)} classes: {names}",
        f"- Weights: {plain(about['weights'])}",
        f"- Licence: {licence if licence != UNKNOWN else 'not stated (`kd-export --license ID`)'}",
        "",
    ]


def _scores(facts: Facts) -> list[str]:
    told, scores = facts["scores"], Scores.read(facts["scores"]["columns"])
    if not told["models"] and not told["pair"]:
        return ["The run recorded no validation for these weights.", "", *_calibration(facts.get("calibration"))]
    student = facts["chain"]["student"]["is"] == "student"
    title = f"this {facts['chain']['student']['is']}"
    titles = {OWN: title, ALONE: "the same student, labels only"}
    order: list[str] = sorted(told["models"], key=lambda name: (name == ALONE, name == OWN, name))
    models = {titles.get(name, name): told["models"][name] for name in order}
    rows = {name: {key: one["value"] for key, one in found.items()} for name, found in models.items()}
    ends = {
        name: {key: Samples(one["value"], ends=near) for key, one in found.items() if (near := interval(one))}
        for name, found in models.items()
    }
    scored, lines = Scored(told["split"], 0, "", told["images"], told["evaluations"], {}, {}), list[str]()
    if table_rows := scores.table(rows, ends):
        on = f"On {scored.images:,} {scored.title} images:" if scored.images else "On the validation split:"
        lines += [on, "", *table(table_rows).split("\n"), "", *([scores.note, ""] if scores.note else [])]
        column = scores.own[0]
        compared = [
            f"- {title} against {titles.get(name, name)}: {column.title} {column.differs(*_difference(one))}"
            for name, one in told["differences"].items()
        ]
        lines += [*compared, "", DIFFERENCES_NOTE, ""] if compared else []
        if scored.images and (student or scored.split == "test"):  # the note is about the student's checkpoints
            lines += [scored.note, ""]
    else:
        lines += ["Trained and evaluated without labels, against its teacher.", ""]
    comparison = scores.against_teacher(told["pair"], scored.title)
    return [*lines, *([comparison, ""] if comparison else []), *_calibration(facts.get("calibration"))]


def interval(one: Facts) -> tuple[float, float] | None:
    """Return the interval of a score: computed for a share of images, else the recorded one, else None."""
    return wilson(one["value"], one["images"]) if "images" in one else one.get("interval")


def _difference(one: Facts) -> tuple[float, float, float]:
    """Return the student's gain with the ends of its interval, computed from counts or as recorded."""
    if "gained" in one:
        gained, lost, images = one["gained"], one["lost"], one["images"]
        return (gained - lost) / images, *paired(gained, lost, images)
    return one["value"], one["interval"][0], one["interval"][1]


def _calibration(found: Facts | None) -> list[str]:
    if not found:
        return []
    return [
        f"The scores above use the run's logits. The graphs here divide them by {found['temperature']:.3g}, fitted "
        f"on {found['images']} validation images (arXiv:1706.04599). The calibration error goes from "
        f"{percent(found['ece'])} to {percent(found['calibrated_ece'])}, fitted on one half of them and counted "
        "on the other, twice. The same images chose the checkpoint. The predictions are the same.",
        "",
    ]


def _graphs(facts: Facts) -> list[str]:
    if not facts["parity"]:
        return []
    score, rows = Column(**facts["scores"]["columns"]["own"][0]), []
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
    measured, machine = variant_rows(facts), plain(facts["environment"]["machine"]["processor"])
    labelled = next(iter(facts["parity"].values())).get("labelled", 0)
    accepted = facts.get("accepted") or facts.get("cascade")
    which = f"; {score.title} on the {labelled:,} of them that have a label" if labelled else ""
    return [
        *table(rows).split("\n"),
        "",
        f"Compared on validation images{which}. CPU time: one thread, one image, {machine}, interleaved with PyTorch, "
        f"which took {facts['eager_ms']:.2f} ms.",
        "",
        *([f"Of these, {accepted_line(accepted)}.", ""] if accepted else []),
        *([*table(measured).split("\n"), "", VARIANTS_NOTE, ""] if measured else []),
    ]


def _use(facts: Facts) -> list[str]:
    timm = facts["about"]["library"] == "timm"
    title = "With timm, in this folder" if timm else "In PyTorch, with the code of the network, in this folder"
    blocks = {title: loading(".", timm)}
    if "model.onnx" in facts["parity"]:
        ask = "curl --data-binary @image.jpg -H 'content-type: image/jpeg' localhost:8080/invocations"
        blocks["As an endpoint, without torch"] = f"kd-serve .\n{ask}"
    lines = ([f"{title}:", "", "```", command, "```", ""] for title, command in blocks.items())
    return ["## Use", "", *(line for block in lines for line in block)]


def _meaning(facts: Facts) -> str:
    """Return the text on the limits of a prediction."""
    apart = "a score is not the probability that the image shows that class."
    if _embeds(facts):
        text = "Compare vectors by their cosine: the graphs return them with length 1, PyTorch as they are. "
        if facts["output"].get("space") == "teacher":
            return text + (
                "The graphs project them into the teacher's space by a learned matrix, so that an index of the "
                "teacher's vectors, made length 1 too, can be searched. The weights for timm lack that projection."
            )
        if facts["about"]["losses"]:
            text += "They lie in the student's own space: they do not compare with the teacher's "
            return f"{text}(`kd-export --index`)."
        return text + "Those of its students lie in this space only where they were exported with `kd-export --index`."
    if thresholds := facts["output"].get("thresholds"):
        text = _several_labels([*thresholds.values()])
        return f"{text}An image unlike the training data gets scores too: {apart}"
    return f"Every image is assigned one of the classes, even one unlike the training data: {apart}"


def _several_labels(thresholds: Sequence[Facts]) -> str:
    chosen = sum(bool(one["chosen"]) for one in thresholds)
    known = [one["f1"] for one in thresholds if one["chosen"] and "f1" in one]
    text = "An image has each label whose probability exceeds its threshold in manifest.json, or none. "
    text += f"{chosen} of {len(thresholds)} thresholds have the largest F1 on the validation images; the others are "
    text += "0.5. "
    if known:
        text += f"On images that did not choose the thresholds the mean F1 is {percent(sum(known) / len(known))}. "
    return text
