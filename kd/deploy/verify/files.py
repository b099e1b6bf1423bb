"""Checks on the files of an export and the consistency of its numbers: no graph is run."""

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kd.core.evaluation import Task
from kd.core.intervals import wilson
from kd.deploy.export import variants
from kd.deploy.export.card import card
from kd.deploy.export.export import FORMAT
from kd.deploy.export.flags import limits, misses
from kd.deploy.export.parity import IMAGES as IMAGES_FILE
from kd.deploy.export.receipt import NAMED, OWN
from kd.deploy.serve.self_check import FILE as SELF_CHECK
from kd.deploy.verify.claims import EXPORT, MANIFEST, Claims
from kd.deploy.verify.images import Line
from kd.files.manifest import DIGITS, checksum, sha256
from kd.files.manifest import MANIFEST as MANIFEST_FILE
from kd.files.pixels import MARGIN
from kd.models import runtimes
from kd.models.classifier import Classifier, tensors_digest
from kd.models.licences import licence_of
from kd.models.live_teacher import count_parameters
from kd.models.load_classifier import Spec, load
from kd.models.timm_folder import CONFIG, export_files, known_configs, require_fitting
from kd.parts import registry

WRITTEN = ("README.md", "config.json", "kd.json", "model.safetensors", IMAGES_FILE, SELF_CHECK)
"""The files that kd writes, beside graphs."""
ENDED, DRAWN = "no further line", "drawn from manifest.json"
LEFT_BY_HUB = (".gitattributes", ".cache/huggingface/", ".git/")


def listed(folder: Path, claimed: Mapping[str, Any]) -> dict[str, Any]:
    """Return bytes and hashes of the files of an export; for a foreign file a text replaces the hash."""
    home = folder.resolve()
    found: dict[str, Any] = {name: {"sha256": "no file"} for name in claimed}
    known = {*WRITTEN, *(file for name in registry.graphs() for file in registry.graph_files(name))}
    for path in folder.rglob("*"):
        name, place = path.relative_to(folder).as_posix(), Path(os.path.realpath(path))
        if name == MANIFEST_FILE or name.startswith(LEFT_BY_HUB) or (path.is_dir() and not path.is_symlink()):
            continue
        if not (place.is_relative_to(home) or place.parent == home.parent.parent / "blobs"):  # the hub has links too
            found[name] = {"sha256": "a link out of the folder"}
        elif name not in known or not path.is_file():
            found[name] = {"sha256": "no file that kd writes"}
        else:
            found[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return found


def show_manifest(known: Claims, manifest: Mapping[str, Any], readme: str) -> None:
    """Generate the card again, and compute derived numbers of the manifest."""
    known.show(EXPORT, {"checksum": checksum(manifest)})
    known.show(MANIFEST, _consistent(manifest, known.old))
    known.claimed["README.md"] = DRAWN
    if known.old:
        known.reasons |= {"README.md": "kd 0.3 drew it from texts", "format": "kd 0.3 wrote it, so that it says less"}
        return
    known.show(EXPORT, {"format": FORMAT})
    drawn, told = card(manifest).split("\n"), readme.split("\n")
    lines = (pair for pair in zip_longest(drawn, told, fillvalue=ENDED) if pair[0] != pair[1])
    line, known.claimed["README.md"] = next(lines, (DRAWN, DRAWN))
    known.show(EXPORT, {"README.md": line})


def _consistent(told: Mapping[str, Any], old: bool) -> dict[str, Any]:
    parity, defer, own = told["parity"], told["output"].get("defer", {}), told["chain"]["student"]
    first = parity.get(variants.ONNX, {})
    found: dict[str, Any] = {
        "parity": {
            name: {"accuracy": _correct(one)} for name, one in parity.items() if {"correct", "accuracy"} & one.keys()
        },
        "variants": {
            name: _variant(one, parity[name], first)
            for name, one in told.get("variants", {}).items() if name in parity
        },
        "output": {"defer": {"stated": {name: _stated(one) for name, one in defer.get("stated", {}).items()}}},
        "kd.json": {"run": own["run"], "step": own["step"], "digest": own["exported"]},
    }  # fmt: skip
    if not old:
        found["config.json"] = {"label_names": told["about"]["labels"]} if told["about"]["labels"] else {}
        found["scores"] = {"differences": _differences(told["scores"])}
    if "calibration" in told:
        found["kd.json"]["calibration"] = told["calibration"]
    if "accepted" in told or "pick" in told:
        file = told.get("cascade", {}).get("file", variants.ONNX)
        accepted = told.get("accepted", {"file": file, "found": {}, "sentence": ""})
        one = parity.get(accepted["file"])
        found["pick"] = accepted["file"] if one else "a graph of parity"
        found["accepted"] = _accepted(accepted, one or {}, first, told["scores"]) if "accepted" in told else {}
        if "threads" in accepted:
            found["accepted"]["threads"] = min(accepted["threads"], told["environment"]["machine"]["cores"])
    return found


def _labelled(one: Mapping[str, Any]) -> int:
    return one.get("labelled", one["images"])


def _correct(one: Mapping[str, Any]) -> float:
    return one.get("correct", 0) / _labelled(one) if _labelled(one) else 0.0


def _is_share(one: Mapping[str, Any]) -> bool:
    return "correct" in one or "labelled" in one


def _share(one: Mapping[str, Any]) -> tuple[float, int]:
    """Return the deciding share and the number of its images: correct predictions, without labels PyTorch's."""
    if "correct" in one:
        return _correct(one), _labelled(one)
    return one["same_top1"] / max(1, one["images"]), one["images"]


def _variant(told: Mapping[str, Any], one: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    same = one["same_top1"] / max(1, one["images"]) if "same_top1" in one else one.get("cosine")
    value = next((one[key] for key in ("accuracy", "mAP", "cosine") if key in one), same)
    near = told["cpu_ms"] if round(told["cpu_ms"], 3) == one["cpu_ms"] else one["cpu_ms"]
    speed = {key: {"p99_ms": max(each["p99_ms"], each["p50_ms"])} for key, each in told["speed"].items()}
    found = {"score": value, "agreement": same, "images": one["images"], "cpu_ms": near, "speed": speed}
    if _is_share(one):
        share = _share(one)
        found |= {"interval": wilson(*share), "drop": _share(first)[0] - share[0]}
    return found


def _stated(one: Mapping[str, Any]) -> dict[str, Any]:
    passed = {"passed_on_interval": wilson(one["passed_on"], one["images"])}
    wrong = {"wrong_interval": wilson(one["wrong"], one["answered"])} if "wrong" in one else {}
    return {**one, **passed, **wrong}


def _differences(told: Mapping[str, Any]) -> dict[str, Any]:
    key, models, found = told["columns"]["own"][0]["key"], told["models"], {}
    for name, one in told["differences"].items():
        value = models[OWN][key]["value"] - models[name][key]["value"]
        more = {"gained": one["lost"] + round(value * one["images"])} if "gained" in one else {"value": value}
        found[name] = {**one, **more}
    return found


def _accepted(told: Mapping[str, Any], one: Mapping[str, Any], first: Mapping[str, Any], scores: Any) -> dict[str, Any]:
    """Return the limits if all are measured and met, else the error; and derived numbers."""
    try:
        wanted = limits(told["sentence"])
    except ValueError as error:
        return {"sentence": str(error), "file": told["file"]}
    wrong = [f"{word}: not measured" for word in wanted if word not in told["found"]] + misses(told["found"], wanted)
    found: dict[str, float] = {"ece": round(100 * one["ece"], 4)} if "ece" in told["found"] else {}
    if _is_share(one):
        lost = 100 * (_share(first)[0] - _share(one)[0])
        found |= {"drop": round(lost, 4)} if "drop" in told["found"] else {}
        if "teacher-drop" in told["found"] and "columns" in scores:
            key = scores["columns"]["own"][0]["key"]
            both = [scores["models"][name][key]["value"] for name in ("teacher", OWN)]
            found["teacher-drop"] = round(lost + 100 * (both[0] - both[1]), 4)
    file = told["file"] if one else "a graph of parity"
    return {"sentence": "; ".join(wrong) or told["sentence"], "file": file, "found": found}


def show_weights(known: Claims, folder: Path, task: Task) -> Classifier | None:
    """Compare weights, configuration and graphs; return the network if timm can build it."""
    told, file, config = known.claimed, folder / "model.safetensors", known.claimed["config.json"]
    tensors = load_file(file)
    with safe_open(file, "pt") as header:
        known.claimed[file.name] = header.metadata()
    inner = tensors_digest({f"inner.{key}": one for key, one in tensors.items()})  # of an own network
    own = told["chain"]["student"]["exported"]
    digest = inner if own == inner else tensors_digest(tensors)
    labels, size = known.labels, told["input"]["size"]
    embeds, width = not task.logits, told["output"]["width"]
    layout = f"float32 [batch, {width}]" + (", each of length 1" if embeds else "")
    network_size = config["pretrained_cfg"]["input_size"][-1]
    known.show(
        EXPORT,
        {
            file.name: {"format": "pt"},
            "version": digest[:DIGITS] + ("-index" if told["output"].get("space") else ""),
            "chain": {"student": {"exported": digest}},
            **({} if known.old else {"scores": {"columns": task.scores.record()}}),
            "output": {
                "name": runtimes.EMBEDDING if embeds else runtimes.LOGITS,
                "layout": layout,
                **_thresholds(told["output"].get("thresholds", {}), labels if task.logits == "sigmoid" else ()),
            },
            "input": {
                "name": runtimes.INPUT,
                "layout": f"uint8 [batch, 3, {size}, {size}], RGB",
                "network_size": network_size or size,
                "crop": config["pretrained_cfg"]["crop_pct"],
                **({} if known.old else {"margin": MARGIN}),
            },
            "licences": _by_name(told),
        },
    )
    return _network(known, folder, labels, task, tensors) if isinstance(config["architecture"], str) else None


def _thresholds(stated: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the stated thresholds, of exactly these classes: images show their values."""
    found = {name: stated.get(name, "a threshold") for name in classes}
    return {"thresholds": found} if found or stated else {}


def _by_name(told: Mapping[str, Any]) -> dict[str, str]:
    """Return the licences of weights that belong to a timm name."""
    members = told["chain"].get("teacher", {"members": {}})["members"]
    found = {key: licence_of(one["name"], "", True) for key, one in members.items() if NAMED in one["source"]}
    return {key: one for key, one in found.items() if one}


def _network(known: Claims, folder: Path, labels: list[str], task: Task, tensors: Mapping[str, Tensor]) -> Classifier:
    told, size = known.claimed, known.claimed["input"]["size"]
    require_fitting(folder, tensors, "export.config.json")
    spec = Spec("export", f"local-dir:{folder}", {}, labels, str(folder), exact_head=True)
    network = load(spec, size)
    content, _ = export_files(network, labels, told["input"]["crop"], task.problem_type)
    own, written = told["config.json"]["pretrained_cfg"], content["pretrained_cfg"]
    sure = ("input_size", "crop_pct", "num_classes", *(() if known.old else CONFIG))
    kept = {key: written[key] for key in sure if key in written}
    for config in known_configs(content["architecture"]):
        kept |= {key: own[key] for key in own if key not in sure and config.get(key, own[key]) == own[key]}
    keys = ("num_classes", "num_features", "global_pool", "problem_type")
    found = {key: content[key] for key in keys if key in content}
    found["pretrained_cfg"] = {key: one for key, one in kept.items() if key in own}
    known.show(EXPORT, {"config.json": found, "about": {"parameters": count_parameters(network), "library": "timm"}})
    return network


def show_graphs(known: Claims, folder: Path, lines: Sequence[Line] | None) -> None:
    """Compare each graph's size, hash, type of weights, and numbers of compared and of labelled images."""
    found: dict[str, Any] = {"chain": {"graphs": {}}, "parity": {}, "variants": {}, "weights": {}, "accepted": {}}
    known.claimed["weights"] = {}
    for name in known.graphs:
        path = folder / name
        if texts := registry.exporter(name).metadata(path):
            known.claimed[name] = texts  # in no line of the table
        found["chain"]["graphs"][name] = sha256(path)
        if lines is not None:
            found["parity"][name] = _counted(known, known.claimed["parity"].get(name, {}), lines)
        if not (graph := registry.graphs()[name]).code:
            precision = graph.precision
            facts = {"runtime": graph.runtime, "precision": precision, "bytes": variants.size(path)}
            if name in known.claimed.get("variants", {}):
                found["variants"][name] = facts
            known.claimed["weights"][name] = precision
            found["weights"][name] = registry.exporter(name).precision(path, precision)
            accepted = known.claimed.get("accepted", {})
            if name == accepted.get("file") and "mb" in accepted["found"]:
                found["accepted"] = {"found": {"mb": round(facts["bytes"] / 1e6, 4)}}
    known.show(EXPORT, found)


def _counted(known: Claims, one: Mapping[str, Any], lines: Sequence[Line]) -> dict[str, int]:
    """Return the numbers of images and, where a graph's entry needs it, of images with a label."""
    labelled = sum(names is not None for *_, names in lines)
    some = labelled < len(lines) and "correct" in one and not known.old
    return {"images": len(lines), **({"labelled": labelled} if some or "labelled" in one else {})}
