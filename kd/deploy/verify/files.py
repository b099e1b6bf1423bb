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
from kd.deploy.export.flags import missed_limits, parse_limits
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


def present_files(folder: Path, listed_names: Mapping[str, Any]) -> dict[str, Any]:
    """Return bytes and hashes of the files of an export.

    For a foreign file a text replaces the hash.
    """
    home = folder.resolve()
    files: dict[str, Any] = {name: {"sha256": "no file"} for name in listed_names}
    written_names = {
        *WRITTEN,
        *(file for name in registry.graphs() for file in registry.graph_files(name)),
    }
    blobs = home.parent.parent / "blobs"  # the hub links files to there
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name in (MANIFEST, SIGNATURE) or name.startswith(LEFT_BY_HUB):
            continue
        if path.is_dir() and not path.is_symlink():
            continue
        real_path = Path(os.path.realpath(path))
        if not real_path.is_relative_to(home) and real_path.parent != blobs:
            files[name] = {"sha256": "a link out of the folder"}
        elif name not in written_names or not path.is_file():
            files[name] = {"sha256": "no file that kd writes"}
        else:
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return files


def check_manifest(claims: Claims, manifest: Mapping[str, Any], readme: str) -> None:
    """Draw the card again, and repeat what several files say."""
    student = manifest["chain"]["student"]
    provenance = {
        "run": student["run"],
        "step": student["step"],
        "digest": student["exported"],
    }
    if "calibration" in manifest:
        provenance["calibration"] = manifest["calibration"]
    remade: dict[str, Any] = {
        "checksum": checksum(manifest),
        **_pick_claims(manifest),
        "kd.json": provenance,
    }
    claims.claimed["README.md"] = DRAWN
    if claims.old:
        claims.reasons |= {
            "README.md": "kd 0.3 drew it from texts",
            "format": "kd 0.3 wrote it, so that it says less",
        }
    else:
        remade["format"] = FORMAT
        if labels := manifest["about"]["labels"]:
            remade["config.json"] = {"label_names": labels}
        remade["README.md"] = DRAWN if card(manifest) == readme else "another text"
    claims.add_evidence(FILES, remade)


def _pick_claims(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the served graph, and the limits of `--accept` or why they are not met."""
    key = "cascade" if "cascade" in manifest else "accepted"
    if key not in manifest:
        return {"pick": variants.ONNX} if "pick" in manifest else {}
    accepted = manifest[key]
    try:
        limits = parse_limits(accepted["sentence"])
        errors = [
            f"{word}: not measured" for word in limits if word not in accepted["found"]
        ]
        errors += missed_limits(accepted["found"], limits)
    except ValueError as error:
        errors = [str(error)]
    file = accepted["file"]
    if file not in manifest["parity"]:
        file = "a graph of parity"
    threads = min(accepted["threads"], manifest["environment"]["machine"]["cores"])
    sentence = "; ".join(errors) or accepted["sentence"]
    facts = {"file": file, "threads": threads, "sentence": sentence}
    return {"pick": file, key: facts}


def check_weights(claims: Claims, task: Task) -> Classifier | None:
    """Compare weights and configuration; return the network if timm can build it."""
    claimed = claims.claimed
    config = claimed["config.json"]
    file = claims.folder / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as header:
        claimed[file.name] = header.metadata()
    exported = claimed["chain"]["student"]["exported"]
    # of a module that a Network wraps, of a model of transformers, or as it is
    for prefix in ("inner.", "model.", ""):
        digest = tensors_digest({prefix + key: tensors[key] for key in tensors})
        if exported == digest:
            break
    version = digest[:DIGITS] + ("-index" if claimed["output"].get("space") else "")
    size = claimed["input"]["size"]
    layout = f"float32 [batch, {claimed['output']['width']}]"
    output = {"name": runtimes.LOGITS, "layout": layout}
    if not task.logits:
        output = {"name": runtimes.EMBEDDING, "layout": f"{layout}, each of length 1"}
    pixels = {
        "name": runtimes.INPUT,
        "layout": f"uint8 [batch, 3, {size}, {size}], RGB",
        "network_size": config["pretrained_cfg"]["input_size"][-1] or size,
        "crop": config["pretrained_cfg"]["crop_pct"],
    }
    remade = {
        file.name: {"format": "pt"},
        "version": version,
        "chain": {"student": {"exported": digest}},
        "output": output,
        "input": pixels,
        "licences": _licences_by_name(claimed),
    }
    if not claims.old:
        remade["scores"] = {"columns": task.scores.record()}
        remade["input"] = {**pixels, "margin": MARGIN}
    claims.add_evidence(FILES, remade)
    if not isinstance(config["architecture"], str):
        return None
    return _build_network(claims, task, tensors)


def _licences_by_name(claimed: Mapping[str, Any]) -> dict[str, str]:
    """Return the licences of weights that belong to a timm name."""
    members = claimed["chain"].get("teacher", {"members": {}})["members"]
    licences = {
        key: licence_of(member["name"], "", True)
        for key, member in members.items()
        if NAMED in member["source"]
    }
    return {key: licence for key, licence in licences.items() if licence}


def _build_network(
    claims: Claims, task: Task, tensors: Mapping[str, Tensor]
) -> Classifier:
    """Build the network, and make again the keys of config.json that it shows."""
    claimed = claims.claimed
    labels = claims.labels
    require_fitting(claims.folder, tensors, "export.config.json")
    spec = Spec(
        "export",
        f"local-dir:{claims.folder}",
        {},
        labels,
        str(claims.folder),
        exact_head=True,
    )
    network = load(spec, claimed["input"]["size"])
    content, _ = export_files(
        network, labels, claimed["input"]["crop"], task.problem_type
    )
    pixels = ("input_size", "crop_pct", "num_classes", *(() if claims.old else CONFIG))
    keys = ("num_classes", "num_features", "global_pool", "problem_type")
    config = {key: content[key] for key in keys if key in content}
    config["pretrained_cfg"] = {
        key: value for key, value in content["pretrained_cfg"].items() if key in pixels
    }
    about = {"parameters": count_parameters(network), "library": "timm"}
    claims.add_evidence(FILES, {"config.json": config, "about": about})
    return network


def check_graph_files(claims: Claims, images: Sequence[ListedImage] | None) -> None:
    """Compare each graph's size, hash, kind of weights, and numbers of images."""
    claimed = claims.claimed
    accepted = claimed.get("accepted", {"file": "", "found": {}})
    for name in claims.graphs:
        path = claims.folder / name
        graph = registry.graphs()[name]
        exporter = registry.exporter(name)
        for key in exporter.metadata(path):
            claims.refuse(f"{name}/{key}", "a text that kd does not write")
        remade: dict[str, Any] = {"chain": {"graphs": {name: sha256(path)}}}
        parity: dict[str, float] = {}
        if images is not None:
            entry = claimed["parity"].get(name, {})
            parity |= _image_counts(claims, entry, images)
        if graph.precision == "int8":
            parity["int8_share"] = round(exporter.int8_share(path), 4)
        remade["parity"] = {name: parity}
        if not graph.code:
            precision = exporter.precision(path, graph.precision)
            if precision != graph.precision:
                claims.refuse(name, f"its weights are {precision}")
            size = variants.size(path)
            if name in claimed.get("variants", {}):
                facts = {
                    "runtime": graph.runtime,
                    "precision": graph.precision,
                    "bytes": size,
                }
                remade["variants"] = {name: facts}
            if name == accepted["file"] and "mb" in accepted["found"]:
                remade["accepted"] = {"found": {"mb": round(size / 1e6, 4)}}
        claims.add_evidence(FILES, remade)


def _image_counts(
    claims: Claims, entry: Mapping[str, Any], images: Sequence[ListedImage]
) -> dict[str, int]:
    """Return the number of images and, where an entry needs it, of labelled images."""
    counts = {"images": len(images)}
    labelled = sum(names is not None for *_, names in images)
    is_partly_labelled = labelled < len(images) and "correct" in entry
    if "labelled" in entry or (is_partly_labelled and not claims.old):
        counts["labelled"] = labelled
    return counts
