"""A served export: its description, and its loaded graph."""

import hashlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
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
from kd.deploy.serve.responses import Answer, Bands, bands, embeddings, predictions
from kd.deploy.shift import Measures, Reference, measure
from kd.files.json_file import DAMAGE, read_json
from kd.files.manifest import MANIFEST, has_valid_checksum
from kd.files.pixels import planes
from kd.parts import registry

CONFIG = "config.json"
SEVERAL = (  # the `problem_type` of models with several labels per image
    "multi_label_classification"
)
log = logging.getLogger("kd.serve")
# pixels per side: 50 MB per image; 10^9 would exhaust the memory at the warm-up
MAX_SIZE = 4096
MIN_CROP = 0.01  # smallest share of the shorter side: no training crop is smaller
MAX_WIDTH = (
    1_000_000  # most labels, or numbers of a vector: ten times any known model's
)
# most characters of a name or label, which log, metrics and every response repeat
MAX_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Output:
    """Kind of the graph's outputs."""

    name: str  # "logits", or "embedding": a vector of length 1
    width: int
    thresholds: tuple[
        float, ...
    ] = ()  # for several labels per image: each label's threshold, a probability
    # see `kd.deploy.serve.responses`; empty: predictions have no `sure`
    unsure: Bands = ()

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
    reference: (
        Reference | None
    )  # predictions on validation images; None: an older export, or no such images
    passed_on: tuple[
        float, ...
    ]  # share of unsure validation images, ends of its interval; (): not recorded
    check: (
        float | None
    )  # largest difference of the self-check's logits; None: no self-check
    # name and version of the second export with which `--accept` chose this one; "":
    # none
    accepted_second: str
    packages: dict[str, str] = field(compare=False)  # versions at the export


def describe(folder: Path, file: str = "", checked: bool = True) -> Description:
    """Read and check an untrusted export, for the graph `file` or the default;
    `checked`: with its self-check.
    """
    folder = _export_in(folder)
    manifest, config = _json(folder, MANIFEST), _json(folder, CONFIG)
    try:
        if not has_valid_checksum(manifest):
            raise invalid_export(
                f"'{folder / MANIFEST}' has changed since the export (its checksum"
                " differs)"
            )
        files = {
            name: _text(entry["sha256"], f"files.{name}")
            for name, entry in manifest["files"].items()
        }
        file = file or _text(manifest.get("pick", "model.onnx"), "pick")
        size = _whole(manifest["input"]["size"], 8, MAX_SIZE, "input.size")
        crop = _number(manifest["input"]["crop"], MIN_CROP, 1, "input.crop")
        margin = _number(manifest["input"].get("margin", 0), 0, 100, "input.margin")
        bits = _whole(manifest["input"].get("bits", 16), 9, 16, "input.bits")
        name, version = (
            _text(manifest["name"], "name"),
            _text(manifest["version"], "version"),
        )
        labels, output = _output(manifest["output"], config)
        recorded = manifest.get("validation", {}).get(file)
        reference = Reference.read(recorded, labels) if recorded else None
        stated = manifest["output"].get("defer", {}).get("stated", {}).get(file)
        shares = (stated["passed_on"], *stated["passed_on_interval"]) if stated else ()
        passed_on = tuple(
            _number(share, 0, 1, "output.defer.stated") for share in shares
        )
        cascade = manifest.get("cascade")
        pair = _text(cascade["second"], "cascade.second") if cascade else ""
        told = manifest.get(self_check.KEY, {}).get(file)
        if told is None and {file, self_check.FILE} <= files.keys():
            raise ValueError(f"it has no {self_check.KEY} of {file}")
        check, least = None, "0"
        if told is not None:
            check = _number(told["allowed"], 0, 1e30, f"{self_check.KEY}.allowed")
            least = _text(told["least"], f"{self_check.KEY}.least")
        installed = manifest.get("environment", {}).get("packages", {})
        packages = {
            name: _text(one, "environment.packages") for name, one in installed.items()
        }
    except KeyError as error:
        raise invalid_export(
            f"'{folder}' lacks {error} in manifest.json or config.json"
        ) from error
    except DAMAGE as error:
        raise invalid_export(
            f"'{folder}' has a damaged manifest.json or config.json ({first_sentence(error)})"
        ) from error
    known = {name: graph for name, graph in registry.graphs().items() if not graph.code}
    if file not in files or file not in known:
        graphs = ", ".join(sorted(known.keys() & files.keys())) or "no graph at all"
        remedy = f"Export anew: kd-export RUN {known[file].option if file in known else ''}".rstrip()
        raise ModelError(
            "--file", f"'{folder}' has no '{file}'", f"There is {graphs}", remedy
        )
    read_verified(folder, "config.json", files)
    require_version(file, least)
    if check is None:
        log.info("an older kd wrote this export: it has no self-check")
    elif not checked:
        log.warning("the self-check is off")
    check = check if checked else None
    kind = "" if file == "model.onnx" else f"-{Path(file).stem.removeprefix('model.')}"
    described = (
        labels,
        output,
        size,
        crop,
        margin,
        bits,
        files,
        reference,
        passed_on,
        check,
        pair,
        packages,
    )
    return Description(folder, file, name, version + kind, *described)


def _export_in(folder: Path) -> Path:
    """Return the folder, or the only export inside it, as packed by `tar czf
    model.tar.gz export/`.
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
        raise ModelError(
            WHERE,
            f"'{folder}' has {len(below)} exports: {names}",
            "One",
            f"Name it: {below[0]}",
        )
    return below[0] if below else folder


def _output(
    found: dict[str, Any], config: dict[str, Any]
) -> tuple[tuple[str, ...], Output]:
    """Return labels and output; raises one of `DAMAGE` for a value that kd does not
    write.
    """
    name = _text(found["name"], "output.name")
    if name == "embedding":
        return (), Output(name, _whole(found["width"], 1, MAX_WIDTH, "output.width"))
    if name != "logits" or not isinstance(config["label_names"], list):
        raise ValueError(f"output.name is {name!r}, or label_names is no list")
    labels = tuple(_text(label, "label_names") for label in config["label_names"])
    if not 0 < len(labels) <= MAX_WIDTH or len(set(labels)) < len(labels):
        raise ValueError(f"label_names has {len(labels)} labels, or one twice")
    limits = found.get("thresholds", {})
    if not limits and config.get("problem_type") == SEVERAL:
        raise ValueError(
            "output.thresholds is missing, and an image may have several labels"
        )
    thresholds = (
        tuple(
            _number(limits[label]["threshold"], 0, 1, "thresholds") for label in labels
        )
        if limits
        else ()
    )
    unsure = bands(found, labels)
    if not all(-1 <= low <= high <= 1 for low, high in unsure):  # false for NaN
        raise ValueError("output.defer has an invalid band")
    if unsure and (len(unsure) > 1) != bool(thresholds) and len(labels) > 1:
        raise ValueError(
            "output.defer is of one label per image where it has several, or the"
            " reverse"
        )
    return labels, Output(name, len(labels), thresholds, unsure)


def _text(value: Any, key: str) -> str:
    """Require valid one-line UTF-8 text, for log lines and headers too."""
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= MAX_TEXT
        or not is_one_line(value)
    ):
        raise ValueError(f"{key} is {value!r:.60}, and no line of text")
    return value


def _whole(value: Any, low: int, high: int, key: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{key} is {value!r:.60}, and no whole number from {low} to {high}"
        )
    return value


def _number(value: Any, low: float, high: float, key: str) -> float:
    if (
        type(value) not in (int, float) or not low <= value <= high
    ):  # the second test is true for NaN
        raise ValueError(
            f"{key} is {value!r:.60}, and no number from {low:g} to {high:g}"
        )
    return float(value)


def _json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        remedy = "Name the folder that `kd-export RUN` wrote: runs/NAME/export"
        raise ModelError(
            WHERE, f"'{folder}' is not an export: it has no {name}", "", remedy
        )
    return read_json(
        folder / name,
        WHERE,
        "Export anew: kd-export RUN",
        kind=ModelError,
        required=True,
    )


def read_verified(folder: Path, name: str, files: dict[str, str]) -> bytes:
    """Read a file once and return its bytes, if its hash equals the manifest's."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise invalid_export(
            f"'{folder / name}' cannot be read ({error.strerror})"
        ) from error
    if hashlib.sha256(content).hexdigest() != files.get(name):
        wrong = (
            f"'{folder / name}' is not the file that was exported (its sha256 differs"
            " from manifest.json)"
        )
        raise invalid_export(wrong)
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
    counted: dict[
        str, Any
    ]  # the first model's row if there are two: validation's counts are of the first
    measures: Measures  # see `kd.deploy.shift.measure`
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class LoadedGraph(Description):
    """A loaded export, from `kd.load`; also used by kd-serve and kd-predict.
    Thread-safe.
    """

    engine: Engine
    threads: int
    slots: int

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (
            self.folder,
            self.file,
            self.threads,
            self.slots,
            self.check is not None,
        )

    def __call__(self, pictures: Any, top: int = 5, on_error: str = "raise") -> Any:
        """Return the `Answer` for a picture, or a list for a list or tuple of pictures.

        A picture is a path, the bytes of a file, a PIL image, or a uint8 array [H, W,
        3]. A file gives the same bits as kd-serve; images and arrays may differ
        slightly, because a large JPEG was not decoded at reduced size.

        Raises:
            BadImage: a picture cannot be read; with `on_error="none"` None is returned.
        """
        if on_error not in ("raise", "none"):
            raise ConfigError(
                "on_error", f"it is {on_error!r}", "raise or none", "Choose one of them"
            )
        several = isinstance(pictures, list | tuple)
        answers = [
            self._answer(picture, top, on_error == "none")
            for picture in (pictures if several else [pictures])
        ]
        return answers if several else answers[0]

    def _answer(self, picture: Any, top: int, skip: bool) -> Answer | None:
        try:
            row = self.predict(self.open(picture, LOCAL), top).row
        except (Problem, OSError) as error:
            if skip:
                return None
            config_path = (
                str(picture)
                if isinstance(picture, str | os.PathLike)
                else type(picture).__name__
            )
            detail = (
                error.detail
                if isinstance(error, Problem)
                else error.strerror or type(error).__name__
            )
            raise BadImage(
                config_path, detail, "", "Leave it out, or set on_error='none'"
            ) from error
        return Answer.of(row)

    def open(self, picture: Any, limits: Limits) -> OpenedImage:
        """Open a picture, see `__call__`, without decoding it. Raises Problem unless it
        is an image within `limits`.
        """
        if isinstance(picture, str | os.PathLike):
            picture = read_file(picture)
        if isinstance(picture, bytes | bytearray | memoryview):
            return open_image(bytes(picture), self.size, self.crop, limits, self.margin)
        if isinstance(picture, np.ndarray):
            if (
                picture.dtype != np.uint8
                or picture.ndim != 3
                or picture.shape[2] != 3
                or not picture.size
            ):
                raise Problem(
                    400,
                    f"It is an array {picture.dtype} {list(picture.shape)}. Allowed is"
                    " uint8 [H, W, 3].",
                )
            picture = Image.fromarray(picture)
        if not isinstance(picture, Image.Image):
            raise TypeError(
                "a picture is a path, bytes, a PIL image or a uint8 array, not"
                f" {type(picture).__name__}"
            )
        return OpenedImage(picture.copy(), "", 0.0)

    def predict(self, opened: OpenedImage, top: int) -> Prediction:
        """Decode an opened picture and predict it, with `top` labels (0: all); Problem
        400 if it is damaged.
        """
        started = time.perf_counter()
        return self.predict_decoded(decode(opened, self.bits), top, started)

    def predict_decoded(self, rgb: Image.Image, top: int, started: float) -> Prediction:
        """Crop a decoded picture as in evaluation and predict it; `started`: when its
        decoding did.
        """
        pixels = planes(rgb, self.size, self.crop)
        measures = measure(pixels)
        decode_seconds = time.perf_counter() - started
        (row,) = self.answers(self.engine(pixels[None]), top)
        return Prediction(row, row, measures, decode_seconds)

    def answers(self, values: np.ndarray, top: int) -> list[dict]:
        """Return the predictions for logits [B, C] or vectors [B, D], as JSON values;
        `top` labels, 0 for all.
        """
        if self.output.embeds:
            return embeddings(values)
        count = min(top or len(self.labels), len(self.labels))
        return predictions(
            values, self.labels, count, self.output.thresholds, self.output.unsure
        )

    def check_itself(self, run: self_check.Run | None = None) -> bool | None:
        """Run the self-check; None: an export without, or it is off. `run`: an executor's `map` (default: two threads).

        Raises:
            SelfCheckError: pixels, outputs or labels differ from those at the export.
        """
        if self.check is None:
            return None
        content = read_verified(self.folder, self_check.FILE, self.files)
        try:
            arrays = self_check.read(content)
            found = self_check.differences(
                arrays,
                self.file,
                self.engine,
                self.crop,
                self.margin,
                self.bits,
                run or ThreadPoolExecutor(2).map,
            )
            if "labels" in arrays:
                (answer,) = self.answers(
                    -np.arange(len(self.labels))[None], 0
                )  # each label once, in their order
                if [row["label"] for row in answer["top"]] != arrays["labels"].tolist():
                    raise self_check.SelfCheckError(
                        "export",
                        "the labels of answers differ from those at the export",
                    )
        except self_check.SelfCheckError:
            raise
        except Exception as error:  # runtimes have their own, unrelated error types
            raise invalid_export(
                f"the self-check cannot be made ({first_sentence(error)})"
            ) from error
        self_check.require(self.file, found, self.check, self.packages)
        return True

    def warm_up(self, times: int = 3) -> None:
        """Run the graph on a grey image, so the first client does not wait for
        allocations.
        """
        grey = np.full((1, 3, self.size, self.size), 127, np.uint8)
        for _ in range(times):
            try:
                shape = self.engine(grey).shape
            except Exception as error:  # runtimes have their own, unrelated error types
                raise invalid_export(
                    f"the graph fails on a grey image ({first_sentence(error)})"
                ) from error
            if shape != (1, self.output.width):
                wrong = (
                    f"the graph returns {shape}, but manifest.json says"
                    f" {self.output.width} {self.output.name}"
                )
                raise invalid_export(wrong)


def reopened(
    folder: Path, file: str, threads: int, slots: int, checked: bool
) -> LoadedGraph:
    """Load an export again, in another process."""
    model = load(describe(folder, file, checked), threads, slots)
    model.check_itself()
    return model


def load(description: Description, threads: int, slots: int) -> LoadedGraph:
    """Load the graph, for at most `slots` calls at once, each on `threads` threads."""

    def opener() -> Engine:
        content = read_verified(description.folder, description.file, description.files)
        beside = registry.graphs()[description.file].weights
        weights = (
            read_verified(description.folder, beside, description.files)
            if beside
            else b""
        )
        try:
            return registry.exporter(description.file).load(
                description.file, content, weights, threads, slots
            )
        except MissingExtra:
            raise
        except Exception as error:  # runtimes have their own, unrelated error types
            raise invalid_export(
                f"'{description.file}' cannot be loaded ({first_sentence(error)})"
            ) from error

    known = {one.name: getattr(description, one.name) for one in fields(description)}
    return LoadedGraph(**known, engine=PerProcess(opener), threads=threads, slots=slots)
