"""Read an export's description, and load its graph."""

import hashlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kd.core.errors import (
    BadImage,
    ConfigError,
    MissingExtra,
    ModelError,
    first_sentence,
)
from kd.core.text import is_one_line
from kd.deploy.serve import self_check
from kd.deploy.serve.decoding import OpenedImage, decode, open_image, read_file
from kd.deploy.serve.engines import WHERE, Engine, PerProcess, require_version
from kd.deploy.serve.limits import LOCAL, Limits, Problem
from kd.deploy.serve.responses import (
    Answer,
    Bands,
    Values,
    bands,
    embeddings,
    predictions,
)
from kd.deploy.shift import Measures, Reference, measure
from kd.files.json_file import DAMAGE, read_json
from kd.files.manifest import MANIFEST, has_valid_checksum
from kd.files.pixels import planes
from kd.parts import registry

CONFIG = "config.json"
# the `problem_type` of models with several labels per image
SEVERAL = "multi_label_classification"
log = logging.getLogger("kd.serve")
# pixels per side: 50 MB per image; 10^9 would exhaust the memory at the warm-up
MAX_SIZE = 4096
MIN_CROP = 0.01  # smallest share of the shorter side: no training crop is smaller
# most labels, or numbers of a vector: ten times any known model's
MAX_WIDTH = 1_000_000
# most characters of a name or label, which log, metrics and every response repeat
MAX_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Output:
    """The kind of a graph's outputs."""

    name: str  # "logits", or "embedding": a vector of length 1
    width: int
    # for several labels per image: each label's threshold, a probability
    thresholds: tuple[float, ...] = ()
    # see `kd.deploy.serve.responses`; empty: predictions have no `sure`
    unsure: Bands = ()
    values: Values = field(default_factory=dict)

    @property
    def embeds(self) -> bool:
        return self.name == "embedding"


@dataclass(frozen=True, slots=True)
class Description:
    """The metadata of an export folder, read before the socket opens."""

    folder: Path
    file: str
    name: str
    # first digits of the weights' hash, then the kind of graph unless it is model.onnx
    version: str
    labels: tuple[str, ...]
    output: Output
    size: int  # side of the crop, pixels
    crop: float  # share of the shorter side that the crop keeps
    # margin of JPEGs decoded at reduced size; 0 (older exports): decoded whole
    margin: float
    bits: int  # range of an image of 16 bits per channel
    files: dict[str, str]  # the sha256 of each file, from manifest.json
    # predictions on validation images; None: an older export, or no such images
    reference: Reference | None
    # share of unsure validation images, ends of its interval; (): not recorded
    passed_on: tuple[float, ...]
    # largest difference of the self-check's logits; None: no self-check
    check: float | None
    # name and version of the second export with which `--accept` chose this one, or ""
    accepted_second: str
    packages: dict[str, str] = field(compare=False)  # versions at the export


def describe(folder: Path, file: str = "", checked: bool = True) -> Description:
    """Read and check an untrusted export, for the graph `file` or the default.

    `checked`: whether its self-check will run.
    """
    folder = _export_folder(folder)
    manifest = _read_export_json(folder, MANIFEST)
    config = _read_export_json(folder, CONFIG)
    try:
        description, least = _parse_manifest(folder, file, manifest, config)
    except KeyError as error:
        wrong = f"'{folder}' lacks {error} in manifest.json or config.json"
        raise invalid_export(wrong) from error
    except DAMAGE as error:
        wrong = f"has a damaged manifest.json or config.json ({first_sentence(error)})"
        raise invalid_export(f"'{folder}' {wrong}") from error
    _require_graph(description)
    read_verified(folder, CONFIG, description.files)
    require_version(description.file, least)
    if description.check is None:
        log.info("an older kd wrote this export: it has no self-check")
    elif not checked:
        log.warning("the self-check is off")
        description = replace(description, check=None)
    return description


def _export_folder(folder: Path) -> Path:
    """Return the folder, or the only export inside it.

    `tar czf model.tar.gz export/` packs it so.
    """
    if (folder / MANIFEST).exists() and (folder / CONFIG).exists():
        return folder
    below = sorted(
        path.parent
        for path in folder.glob(f"*/{MANIFEST}")
        if path.with_name(CONFIG).exists()
    )
    if len(below) > 1:
        names = ", ".join(f"'{path.name}'" for path in below)
        wrong = f"'{folder}' has {len(below)} exports: {names}"
        raise ModelError(WHERE, wrong, "One", f"Name it: {below[0]}")
    return below[0] if below else folder


def _parse_manifest(
    folder: Path, file: str, manifest: dict[str, Any], config: dict[str, Any]
) -> tuple[Description, str]:
    """Return the description, and the least version of the graph's runtime.

    Raises one of `DAMAGE` for a value that kd does not write.
    """
    if not has_valid_checksum(manifest):
        wrong = "has changed since the export (its checksum differs)"
        raise invalid_export(f"'{folder / MANIFEST}' {wrong}")
    files = {
        name: _text(entry["sha256"], f"files.{name}")
        for name, entry in manifest["files"].items()
    }
    file = file or _text(manifest.get("pick", "model.onnx"), "pick")
    preprocessing = _parse_input(manifest["input"])
    name = _text(manifest["name"], "name")
    version = _text(manifest["version"], "version")
    if file != "model.onnx":
        version += f"-{Path(file).stem.removeprefix('model.')}"
    labels, output = _parse_output(manifest["output"], config)
    recorded = manifest.get("validation", {}).get(file)
    reference = Reference.read(recorded, labels) if recorded else None
    passed_on = _parse_passed_on(manifest["output"], file)
    cascade = manifest.get("cascade")
    accepted_second = _text(cascade["second"], "cascade.second") if cascade else ""
    check, least = _parse_self_check(manifest, file, files)
    installed = manifest.get("environment", {}).get("packages", {})
    packages = {
        package: _text(number, "environment.packages")
        for package, number in installed.items()
    }
    description = Description(
        folder=folder,
        file=file,
        name=name,
        version=version,
        labels=labels,
        output=output,
        **preprocessing,
        files=files,
        reference=reference,
        passed_on=passed_on,
        check=check,
        accepted_second=accepted_second,
        packages=packages,
    )
    return description, least


def _parse_input(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "size": _integer(entry["size"], 8, MAX_SIZE, "input.size"),
        "crop": _number(entry["crop"], MIN_CROP, 1, "input.crop"),
        "margin": _number(entry.get("margin", 0), 0, 100, "input.margin"),
        "bits": _integer(entry.get("bits", 16), 9, 16, "input.bits"),
    }


def _parse_passed_on(entry: dict[str, Any], file: str) -> tuple[float, ...]:
    """Return the share of unsure images with its interval; empty without a rule."""
    stated = entry.get("defer", {}).get("stated", {}).get(file)
    if not stated:
        return ()
    shares = (stated["passed_on"], *stated["passed_on_interval"])
    return tuple(_number(share, 0, 1, "output.defer.stated") for share in shares)


def _parse_self_check(
    manifest: dict[str, Any], file: str, files: dict[str, str]
) -> tuple[float | None, str]:
    """Return the largest difference of logits, and the runtime's least version."""
    entry = manifest.get(self_check.KEY, {}).get(file)
    if entry is not None:
        allowed = _number(entry["allowed"], 0, 1e30, f"{self_check.KEY}.allowed")
        return allowed, _text(entry["least"], f"{self_check.KEY}.least")
    if {file, self_check.FILE} <= files.keys():
        raise ValueError(f"it has no {self_check.KEY} of {file}")
    return None, "0"


def _require_graph(description: Description) -> None:
    file = description.file
    files = description.files
    graphs = {
        name: graph for name, graph in registry.graphs().items() if not graph.code
    }
    if file in files and file in graphs:
        return
    names = ", ".join(sorted(graphs.keys() & files.keys())) or "no graph at all"
    option = graphs[file].option if file in graphs else ""
    wrong = f"'{description.folder}' has no '{file}'"
    remedy = f"Export anew: kd-export RUN {option}".rstrip()
    raise ModelError("--file", wrong, f"There is {names}", remedy)


def _parse_output(
    entry: dict[str, Any], config: dict[str, Any]
) -> tuple[tuple[str, ...], Output]:
    name = _text(entry["name"], "output.name")
    if name == "embedding":
        return (), Output(name, _integer(entry["width"], 1, MAX_WIDTH, "output.width"))
    if name != "logits" or not isinstance(config["label_names"], list):
        raise ValueError(f"output.name is {name!r}, or label_names is no list")
    labels = tuple(_text(label, "label_names") for label in config["label_names"])
    if not 0 < len(labels) <= MAX_WIDTH or len(set(labels)) < len(labels):
        raise ValueError(f"label_names has {len(labels)} labels, or one twice")
    by_label = entry.get("thresholds", {})
    if not by_label and config.get("problem_type") == SEVERAL:
        raise ValueError(
            "output.thresholds is missing, and an image may have several labels"
        )
    thresholds = tuple(
        _number(by_label[label]["threshold"], 0, 1, "thresholds")
        for label in labels
        if by_label
    )
    unsure = bands(entry, labels)
    if not all(-1 <= low <= high <= 1 for low, high in unsure):  # false for NaN
        raise ValueError("output.defer has an invalid band")
    if unsure and (len(unsure) > 1) != bool(thresholds) and len(labels) > 1:
        raise ValueError(
            "output.defer is of one label per image where it has several, or the"
            " reverse"
        )
    values = parse_values(entry, labels)
    return labels, Output(name, len(labels), thresholds, unsure, values)


def parse_values(entry: dict[str, Any], labels: Sequence[str]) -> Values:
    """Return the values of each label in `output` of a manifest.

    Raises one of `DAMAGE` if a label has none, or for a value that kd does not write.
    """
    if "values" not in entry:
        return {}
    columns = [_text(name, "values") for name in entry["values"]["columns"]]
    rows = entry["values"]["labels"]
    if not columns or len({*columns}) < len(columns) or rows.keys() != {*labels}:
        raise ValueError("output.values is of other labels, or names a column twice")
    for value in itertools.chain.from_iterable(rows.values()):
        if isinstance(value, str):
            _text(value, "values")
        elif value is not None:
            _number(value, -sys.float_info.max, sys.float_info.max, "values")
    return {label: dict(zip(columns, rows[label], strict=True)) for label in labels}


def _text(value: Any, key: str) -> str:
    """Require valid one-line UTF-8 text, for log lines and headers too."""
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= MAX_TEXT
        or not is_one_line(value)
    ):
        raise ValueError(f"{key} is {value!r:.60}, and no line of text")
    return value


def _integer(value: Any, low: int, high: int, key: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{key} is {value!r:.60}, and no whole number from {low} to {high}"
        )
    return value


def _number(value: Any, low: float, high: float, key: str) -> float:
    # `not low <= value` is true for NaN.
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(
            f"{key} is {value!r:.60}, and no number from {low:g} to {high:g}"
        )
    return float(value)


def _read_export_json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        wrong = f"'{folder}' is not an export: it has no {name}"
        remedy = "Name the folder that `kd-export RUN` wrote: runs/NAME/export"
        raise ModelError(WHERE, wrong, "", remedy)
    remedy = "Export anew: kd-export RUN"
    return read_json(folder / name, WHERE, remedy, kind=ModelError, required=True)


def read_verified(folder: Path, name: str, files: dict[str, str]) -> bytes:
    """Read a file once and return its bytes, if its hash equals the manifest's."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        wrong = f"'{folder / name}' cannot be read ({error.strerror})"
        raise invalid_export(wrong) from error
    if hashlib.sha256(content).hexdigest() != files.get(name):
        wrong = "is not the file that was exported (its sha256 differs from"
        raise invalid_export(f"'{folder / name}' {wrong} manifest.json)")
    return content


def invalid_export(wrong: str) -> ModelError:
    """Return the error for a folder that cannot be served."""
    return ModelError(
        WHERE, wrong, "A folder as `kd-export` wrote it", "Export anew: kd-export RUN"
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for an image."""

    row: dict[str, Any]  # as JSON values, which `kd-serve` and `kd-predict` write
    # the first model's row if there are two: validation's counts are of the first
    counted: dict[str, Any]
    measures: Measures  # see `kd.deploy.shift.measure`
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class LoadedGraph(Description):
    """A loaded export, from `kd.load`, kd-serve and kd-predict. Thread-safe."""

    engine: Engine
    threads: int
    slots: int

    def __reduce__(self) -> tuple[Any, ...]:
        checked = self.check is not None
        return reopen, (self.folder, self.file, self.threads, self.slots, checked)

    def __call__(self, pictures: Any, top: int = 5, on_error: str = "raise") -> Any:
        """Predict one image, or several.

        A file gives the same bits as kd-serve; PIL images and arrays may differ
        slightly, because a large JPEG was not decoded at reduced size.

        Args:
            pictures: an image, or a list or tuple of images: each a path, the bytes of
                a file, a PIL image, or a uint8 array [H, W, 3].
            top: the number of labels in an answer's `top`; 0: all.
            on_error: "raise", or "none" to return None for an unreadable image.

        Returns:
            The `Answer` for an image, or a list of them.

        Raises:
            BadImage: an image cannot be read.
        """
        if on_error not in ("raise", "none"):
            wrong = f"it is {on_error!r}"
            raise ConfigError("on_error", wrong, "raise or none", "Choose one of them")
        skip = on_error == "none"
        if isinstance(pictures, list | tuple):
            return [self._answer(image, top, skip) for image in pictures]
        return self._answer(pictures, top, skip)

    def _answer(self, image: Any, top: int, skip: bool) -> Answer | None:
        try:
            row = self.predict(self.open(image, LOCAL), top).row
        except (Problem, OSError) as error:
            if skip:
                return None
            is_path = isinstance(image, str | os.PathLike)
            config_path = str(image) if is_path else type(image).__name__
            if isinstance(error, Problem):
                detail = error.detail
            else:
                detail = error.strerror or type(error).__name__
            remedy = "Leave it out, or set on_error='none'"
            raise BadImage(config_path, detail, "", remedy) from error
        return Answer.of(row)

    def open(self, image: Any, limits: Limits) -> OpenedImage:
        """Open an image, see `__call__`, without decoding it.

        Raises a Problem unless it is an image within `limits`.
        """
        if isinstance(image, str | os.PathLike):
            image = read_file(image)
        if isinstance(image, bytes | bytearray | memoryview):
            return open_image(bytes(image), self.size, self.crop, limits, self.margin)
        if isinstance(image, np.ndarray):
            shape = image.shape
            is_rgb = len(shape) == 3 and shape[2] == 3 and image.size > 0
            if image.dtype != np.uint8 or not is_rgb:
                wrong = f"It is an array {image.dtype} {list(shape)}."
                raise Problem(400, f"{wrong} Allowed is uint8 [H, W, 3].")
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise TypeError(
                "a picture is a path, bytes, a PIL image or a uint8 array, not"
                f" {type(image).__name__}"
            )
        return OpenedImage(image.copy(), "", 0.0)

    def predict(self, opened: OpenedImage, top: int) -> Prediction:
        """Decode an opened image and predict it, with `top` labels (0: all).

        Raises a Problem 400 if it is damaged.
        """
        started = time.perf_counter()
        return self.predict_decoded(decode(opened, self.bits), top, started)

    def predict_decoded(self, rgb: Image.Image, top: int, started: float) -> Prediction:
        """Crop a decoded image as in evaluation and predict it.

        `started`: when its decoding began, by `time.perf_counter`.
        """
        pixels = planes(rgb, self.size, self.crop)
        measures = measure(pixels)
        decode_seconds = time.perf_counter() - started
        (row,) = self.answers(self.engine(pixels[None]), top)
        return Prediction(row, row, measures, decode_seconds)

    def answers(self, values: np.ndarray, top: int) -> list[dict]:
        """Return the predictions for logits [B, C] or vectors [B, D], as JSON values.

        `top`: the number of labels, 0 for all.
        """
        if self.output.embeds:
            return embeddings(values)
        count = min(top or len(self.labels), len(self.labels))
        output = self.output
        return predictions(
            values, self.labels, count, output.thresholds, output.unsure, output.values
        )

    def check_itself(self, run: self_check.Run | None = None) -> bool | None:
        """Run the self-check; return None if the export has none, or it is off.

        `run`: an executor's `map` (default: that of two threads).

        Raises:
            SelfCheckError: pixels, outputs or labels differ from those at the export.
        """
        if self.check is None:
            return None
        content = read_verified(self.folder, self_check.FILE, self.files)
        try:
            arrays = self_check.read(content)
            differences = self_check.differences(
                arrays,
                self.file,
                self.engine,
                self.crop,
                self.margin,
                self.bits,
                run or ThreadPoolExecutor(2).map,
            )
            if "labels" in arrays:
                # Falling logits: each label once, in their order.
                (answer,) = self.answers(-np.arange(len(self.labels))[None], 0)
                if [row["label"] for row in answer["top"]] != arrays["labels"].tolist():
                    wrong = "the labels of answers differ from those at the export"
                    raise self_check.SelfCheckError(WHERE, wrong)
        except self_check.SelfCheckError:
            raise
        except Exception as error:  # runtimes have their own, unrelated error types
            wrong = f"the self-check cannot be made ({first_sentence(error)})"
            raise invalid_export(wrong) from error
        self_check.require(self.file, differences, self.check, self.packages)
        return True

    def warm_up(self, times: int = 3) -> None:
        """Run the graph on a grey image: the first client waits for no allocations."""
        grey = np.full((1, 3, self.size, self.size), 127, np.uint8)
        for _ in range(times):
            try:
                shape = self.engine(grey).shape
            except Exception as error:  # runtimes have their own, unrelated error types
                wrong = f"the graph fails on a grey image ({first_sentence(error)})"
                raise invalid_export(wrong) from error
            if shape != (1, self.output.width):
                wrong = (
                    f"the graph returns {shape}, but manifest.json says"
                    f" {self.output.width} {self.output.name}"
                )
                raise invalid_export(wrong)


def reopen(
    folder: Path, file: str, threads: int, slots: int, checked: bool
) -> LoadedGraph:
    """Load an export again, in another process."""
    model = load(describe(folder, file, checked), threads, slots)
    model.check_itself()
    return model


def load(description: Description, threads: int, slots: int) -> LoadedGraph:
    """Load the graph, for at most `slots` calls at once, each on `threads` threads."""

    def opener() -> Engine:
        file = description.file
        graph = read_verified(description.folder, file, description.files)
        weights = b""
        if weights_file := registry.graphs()[file].weights:
            weights = read_verified(description.folder, weights_file, description.files)
        try:
            return registry.exporter(file).load(file, graph, weights, threads, slots)
        except MissingExtra:
            raise
        except Exception as error:  # runtimes have their own, unrelated error types
            wrong = f"'{file}' cannot be loaded ({first_sentence(error)})"
            raise invalid_export(wrong) from error

    values = {
        field.name: getattr(description, field.name) for field in fields(description)
    }
    engine = PerProcess(opener)
    return LoadedGraph(**values, engine=engine, threads=threads, slots=slots)
