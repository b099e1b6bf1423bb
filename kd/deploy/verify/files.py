"""Values of an export that its own files show: no graph is run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kd.core.evaluation import Task
from kd.deploy.export import variants
from kd.deploy.export.card import card
from kd.deploy.export.claims import FILES
from kd.deploy.export.export import FORMAT
from kd.deploy.export.flags import parse_limits, missed_limits
from kd.deploy.export.parity import IMAGES as IMAGES_FILE
from kd.deploy.export.receipt import NAMED
from kd.deploy.serve.self_check import FILE as SELF_CHECK
from kd.deploy.verify.comparison import Claims
from kd.deploy.verify.images import ListedImage
from kd.files.manifest import DIGITS, MANIFEST, SIGNATURE, checksum, sha256
from kd.files.pixels import MARGIN
from kd.models import runtimes
from kd.models.classifier import Classifier, tensors_digest
from kd.models.licences import licence_of
from kd.models.live_teacher import count_parameters
from kd.models.load_classifier import Spec, load
from kd.models.timm_folder import CONFIG, export_files, require_fitting
from kd.parts import registry

WRITTEN = (
    "README.md",
    "config.json",
    "kd.json",
    "model.safetensors",
    IMAGES_FILE,
    SELF_CHECK,
)
"""The files that kd writes, beside graphs."""
DRAWN = "drawn from manifest.json"
LEFT_BY_HUB = (".gitattributes", ".cache/huggingface/", ".git/")


def present_files(folder: Path, claimed: Mapping[str, Any]) -> dict[str, Any]:
    """Return bytes and hashes of the files of an export; for a foreign file a text
    replaces the hash.
    """
    home = folder.resolve()
    found: dict[str, Any] = {name: {"sha256": "no file"} for name in claimed}
    known = {
        *WRITTEN,
        *(file for name in registry.graphs() for file in registry.graph_files(name)),
    }
    for path in folder.rglob("*"):
        name, place = path.relative_to(folder).as_posix(), Path(os.path.realpath(path))
        if (
            name in (MANIFEST, SIGNATURE)
            or name.startswith(LEFT_BY_HUB)
            or (path.is_dir() and not path.is_symlink())
        ):
            continue
        if not (
            place.is_relative_to(home) or place.parent == home.parent.parent / "blobs"
        ):  # the hub has links too
            found[name] = {"sha256": "a link out of the folder"}
        elif name not in known or not path.is_file():
            found[name] = {"sha256": "no file that kd writes"}
        else:
            found[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return found


def show_manifest(known: Claims, manifest: Mapping[str, Any], readme: str) -> None:
    """Draw the card again, and repeat what several files say."""
    student = manifest["chain"]["student"]
    again: dict[str, Any] = {"checksum": checksum(manifest), **_accepted(manifest)}
    again["kd.json"] = {
        "run": student["run"],
        "step": student["step"],
        "digest": student["exported"],
    }
    if "calibration" in manifest:
        again["kd.json"]["calibration"] = manifest["calibration"]
    known.claimed["README.md"] = DRAWN
    if known.old:
        known.reasons |= {
            "README.md": "kd 0.3 drew it from texts",
            "format": "kd 0.3 wrote it, so that it says less",
        }
    else:
        again |= {
            "format": FORMAT,
            "config.json": {"label_names": manifest["about"]["labels"]},
        }
        if not manifest["about"]["labels"]:
            del again["config.json"]
        again["README.md"] = DRAWN if card(manifest) == readme else "another text"
    known.show(FILES, again)


def _accepted(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the served graph, and the limits of `--accept` if all are measured and
    met, else the error.
    """
    key = "cascade" if "cascade" in manifest else "accepted"
    if key not in manifest:
        return {"pick": variants.ONNX} if "pick" in manifest else {}
    accepted = manifest[key]
    try:
        wanted = parse_limits(accepted["sentence"])
        wrong = [
            f"{word}: not measured" for word in wanted if word not in accepted["found"]
        ]
        wrong += missed_limits(accepted["found"], wanted)
    except ValueError as error:
        wrong = [str(error)]
    file = (
        accepted["file"]
        if accepted["file"] in manifest["parity"]
        else "a graph of parity"
    )
    threads = min(accepted["threads"], manifest["environment"]["machine"]["cores"])
    return {
        "pick": file,
        key: {
            "file": file,
            "threads": threads,
            "sentence": "; ".join(wrong) or accepted["sentence"],
        },
    }


def show_weights(known: Claims, task: Task) -> Classifier | None:
    """Compare weights, configuration and graphs; return the network if timm can build
    it.
    """
    claimed, file, config = (
        known.claimed,
        known.folder / "model.safetensors",
        known.claimed["config.json"],
    )
    tensors = load_file(file)
    with safe_open(file, "pt") as header:
        claimed[file.name] = header.metadata()
    exported = claimed["chain"]["student"]["exported"]
    inner = tensors_digest(
        {f"inner.{key}": tensor for key, tensor in tensors.items()}
    )  # of an own network
    digest = inner if exported == inner else tensors_digest(tensors)
    size, width = claimed["input"]["size"], claimed["output"]["width"]
    layout = f"float32 [batch, {width}]" + ("" if task.logits else ", each of length 1")
    output = {
        "name": runtimes.LOGITS if task.logits else runtimes.EMBEDDING,
        "layout": layout,
    }
    pixels = {
        "name": runtimes.INPUT,
        "layout": f"uint8 [batch, 3, {size}, {size}], RGB",
        "network_size": config["pretrained_cfg"]["input_size"][-1] or size,
        "crop": config["pretrained_cfg"]["crop_pct"],
    }
    again = {
        file.name: {"format": "pt"},
        "version": (
            digest[:DIGITS] + ("-index" if claimed["output"].get("space") else "")
        ),
        "chain": {"student": {"exported": digest}},
        "output": output,
        "input": pixels,
        "licences": _by_name(claimed),
    }
    if not known.old:
        again |= {
            "scores": {"columns": task.scores.record()},
            "input": {**pixels, "margin": MARGIN},
        }
    known.show(FILES, again)
    return (
        _network(known, task, tensors)
        if isinstance(config["architecture"], str)
        else None
    )


def _by_name(claimed: Mapping[str, Any]) -> dict[str, str]:
    """Return the licences of weights that belong to a timm name."""
    members = claimed["chain"].get("teacher", {"members": {}})["members"]
    licences = {
        key: licence_of(one["name"], "", True)
        for key, one in members.items()
        if NAMED in one["source"]
    }
    return {key: licence for key, licence in licences.items() if licence}


def _network(known: Claims, task: Task, tensors: Mapping[str, Tensor]) -> Classifier:
    """Build the network, and make again what config.json does not tell itself."""
    claimed, labels = known.claimed, known.labels
    require_fitting(known.folder, tensors, "export.config.json")
    spec = Spec(
        "export",
        f"local-dir:{known.folder}",
        {},
        labels,
        str(known.folder),
        exact_head=True,
    )
    network = load(spec, claimed["input"]["size"])
    content, _ = export_files(
        network, labels, claimed["input"]["crop"], task.problem_type
    )
    pixels = ("input_size", "crop_pct", "num_classes", *(() if known.old else CONFIG))
    keys = ("num_classes", "num_features", "global_pool", "problem_type")
    again = {key: content[key] for key in keys if key in content}
    again["pretrained_cfg"] = {
        key: value for key, value in content["pretrained_cfg"].items() if key in pixels
    }
    about = {"parameters": count_parameters(network), "library": "timm"}
    known.show(FILES, {"config.json": again, "about": about})
    return network


def show_graphs(known: Claims, lines: Sequence[ListedImage] | None) -> None:
    """Compare each graph's size, hash, kind of weights, and numbers of compared and of
    labelled images.
    """
    claimed = known.claimed
    accepted = claimed.get("accepted", {"file": "", "found": {}})
    for name in known.graphs:
        path, graph, exporter = (
            known.folder / name,
            registry.graphs()[name],
            registry.exporter(name),
        )
        for key in exporter.metadata(path):
            known.refuse(f"{name}/{key}", "a text that kd does not write")
        again: dict[str, Any] = {"chain": {"graphs": {name: sha256(path)}}}
        if lines is not None:
            again["parity"] = {
                name: _counted(known, claimed["parity"].get(name, {}), lines)
            }
        if not graph.code:
            if (kind := exporter.precision(path, graph.precision)) != graph.precision:
                known.refuse(name, f"its weights are {kind}")
            size = variants.size(path)
            if name in claimed.get("variants", {}):
                facts = {
                    "runtime": graph.runtime,
                    "precision": graph.precision,
                    "bytes": size,
                }
                again["variants"] = {name: facts}
            if name == accepted["file"] and "mb" in accepted["found"]:
                again["accepted"] = {"found": {"mb": round(size / 1e6, 4)}}
        known.show(FILES, again)


def _counted(
    known: Claims, graph: Mapping[str, Any], lines: Sequence[ListedImage]
) -> dict[str, int]:
    """Return the numbers of images and, where a graph's entry needs it, of images with
    a label.
    """
    labelled = sum(names is not None for *_, names in lines)
    partly = labelled < len(lines) and "correct" in graph and not known.old
    return {
        "images": len(lines),
        **({"labelled": labelled} if partly or "labelled" in graph else {}),
    }
