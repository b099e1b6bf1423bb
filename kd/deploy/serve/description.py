"""What an export folder says of itself: labels, input, output and the hash of each file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kd.core.errors import ModelError
from kd.core.sure import Bands, bands
from kd.deploy.shift import Reference
from kd.files.manifest import GRAPHS, MANIFEST, unchanged

WHERE = "export"


@dataclass(frozen=True, slots=True)
class Output:
    """What the graph returns for an image."""

    name: str  # "logits" of the labels, or "embedding": a vector of length 1
    width: int
    thresholds: tuple[float, ...] = ()
    """Where an image may have several labels: from which probability it has each. Empty: it has one."""
    unsure: Bands = ()  # see `kd.core.sure`; empty: it does not say which answers are sure

    @property
    def embeds(self) -> bool:
        return self.name == "embedding"


@dataclass(frozen=True, slots=True)
class Description:
    """The metadata of an export folder. It is read before the socket opens."""

    folder: Path
    file: str
    name: str
    version: str  # first digits of the weights' hash, then the kind of graph unless it is model.onnx
    labels: tuple[str, ...]
    output: Output
    size: int  # side of the crop, pixels
    crop: float  # share of the shorter side that the crop keeps
    files: dict[str, str]  # the sha256 of each file, as manifest.json has it
    reference: Reference | None
    """What the graph answered on validation images; None: an older export, or one without them."""


def describe(folder: Path, file: str = "") -> Description:
    """Read an export's manifest and labels, not the graph.

    `file` is the graph's; "": the one that `kd-export --compare` picked, or model.onnx.
    """
    manifest, config = _json(folder, MANIFEST), _json(folder, "config.json")
    if isinstance(manifest, dict) and not unchanged(manifest):
        raise invalid_export(f"'{folder / MANIFEST}' is not what was exported (its checksum differs)")
    try:
        size, crop = int(manifest["input"]["size"]), float(manifest["input"]["crop"])
        files = {name: str(entry["sha256"]) for name, entry in dict(manifest["files"]).items()}
        output = manifest.get("output", {"name": "logits"})  # older exports: logits alone
        embeds = output["name"] == "embedding"
        labels = () if embeds else tuple(map(str, config["label_names"]))
        entries = output.get("thresholds", {})
        thresholds = tuple(float(entries[label]["threshold"]) for label in labels) if entries else ()
        width, unsure = int(output["width"]) if embeds else len(labels), bands(output, labels)
        output = Output(str(output["name"]), width, thresholds, unsure)
        name, version = str(manifest["name"]), str(manifest["version"])
        file = file or str(manifest.get("pick") or "model.onnx")
        recorded = manifest.get("validation", {}).get(file)
        reference = Reference.read(recorded, labels) if recorded else None
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise invalid_export(f"'{folder}' lacks {error} in manifest.json or config.json") from error
    if not (size > 0 and 0 < crop <= 1):
        raise invalid_export(f"'{folder}' has the input size {size} and the crop {crop} in manifest.json")
    if file not in files or file not in GRAPHS:
        graphs = ", ".join(sorted(GRAPHS.keys() & files.keys())) or "no graph at all"
        remedy = f"Export anew: kd-export RUN {GRAPHS[file].option if file in GRAPHS else ''}".rstrip()
        raise ModelError("--file", f"'{folder}' has no '{file}'", f"There is {graphs}", remedy)
    read_verified(folder, "config.json", files)
    kind = "" if file == "model.onnx" else f"-{Path(file).stem.removeprefix('model.')}"
    return Description(folder, file, name, version + kind, labels, output, size, crop, files, reference)


def _json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "Name the folder that `kd-export RUN` wrote: runs/NAME/export"
        raise ModelError(WHERE, f"'{folder}' is not an export: it has no {name}", "", remedy) from error
    except (OSError, ValueError) as error:
        raise invalid_export(f"'{folder / name}' cannot be read ({type(error).__name__})") from error


def read_verified(folder: Path, name: str, files: dict[str, str]) -> bytes:
    """Read a file once, compare its hash with the manifest, and return the bytes."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise invalid_export(f"'{folder / name}' cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != files.get(name):
        wrong = f"'{folder / name}' is not the file that was exported (its sha256 differs from manifest.json)"
        raise invalid_export(wrong)
    return content


def invalid_export(wrong: str) -> ModelError:
    """Return the error for a folder that cannot be served."""
    return ModelError(WHERE, wrong, "A folder as `kd-export` wrote it", "Export anew: kd-export RUN")


def first_line(error: Exception) -> str:
    """Return the first line of a runtime's message, at most 200 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
