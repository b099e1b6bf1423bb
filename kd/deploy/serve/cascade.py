"""Join two exports: the second predicts the images on which the first is unsure.

Exports of one run take the same pixels, so each predicts as it does alone. A JPEG is
decoded once, at the size that the larger input needs: a first model with a smaller
input sees other pixels than alone, by at most 1.3 of 255 levels in the mean of each of
200 photographs.
"""

import logging
import math
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from PIL import Image

from kd.core.errors import ModelError
from kd.core.host import cores
from kd.deploy.serve import self_check
from kd.deploy.serve.decoding import OpenedImage
from kd.deploy.serve.engines import WHERE as EXPORT
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import Description, LoadedGraph, Prediction, describe, load
from kd.deploy.serve.responses import FIRST, MODEL, SECOND
from kd.deploy.serve.self_check import SelfCheckError

WHERE = "--second"
ONNX = "model.onnx"
log = logging.getLogger("kd.serve")


@dataclass(frozen=True, slots=True)
class Cascade(LoadedGraph):
    """The first model, which passes images on to `second`. Thread-safe."""

    second: LoadedGraph

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = LoadedGraph.__reduce__(self)
        return open_exports, (*arguments, self.second.folder)

    def open(self, image: Any, limits: Limits) -> OpenedImage:
        """Open an image for the model that needs more pixels: `LoadedGraph.open`."""
        larger = max(self, self.second, key=_pixels_needed)
        return LoadedGraph.open(larger, image, limits)

    def predict_decoded(self, rgb: Image.Image, top: int, started: float) -> Prediction:
        """Predict an image with the first model and, if it is unsure, with the second.

        `sure` is that of the export that predicted; false if it has no threshold.
        """
        first = LoadedGraph.predict_decoded(self, rgb, top, started)
        if first.row["sure"]:
            return replace(first, row={**first.row, MODEL: FIRST})
        second = self.second.predict_decoded(rgb, top, time.perf_counter())
        row = {**second.row, "sure": second.row.get("sure", False), MODEL: SECOND}
        decode_seconds = first.decode_seconds + second.decode_seconds
        return replace(first, row=row, decode_seconds=decode_seconds)

    def check_itself(self, run: self_check.Run | None = None) -> bool | None:
        """Run both self-checks; return None if an export has none, or it is off."""
        first = LoadedGraph.check_itself(self, run)
        try:
            return self.second.check_itself(run) and first
        except SelfCheckError as error:
            raise SelfCheckError(
                WHERE, error.wrong, error.allowed, error.remedy
            ) from error

    def warm_up(self, times: int = 3) -> None:
        """Run both graphs; see `LoadedGraph.warm_up`."""
        LoadedGraph.warm_up(self, times)
        self.second.warm_up(times)


def _pixels_needed(model: Description) -> float:
    """Return the least shorter side of a JPEG that is decoded at reduced size.

    Pixels; infinite if no JPEG is reduced.
    """
    return model.margin * model.size / model.crop if model.margin else math.inf


def describe_pair(
    folder: Path, file: str = "", second: Path | None = None, checked: bool = True
) -> tuple[Description, Description | None]:
    """Read and check an export and, if given, the second one; see `describe`.

    The first's version names both. Logs a warning if `kd-export --accept` chose the
    first with another second export. The first's `values` replace the second's.

    Raises:
        ModelError: the first has no threshold, or the second is the same or predicts
            other classes.
    """
    first_model = describe(folder, file, checked)
    if second is None:
        _warn_unless_accepted(first_model, None)
        return first_model, None
    if not first_model.output.unsure:
        wrong = "the first model, does not say which of its predictions are sure"
        remedy = "Export it with --defer 0.02 or --defer-share 0.1"
        raise ModelError(EXPORT, f"'{folder}', {wrong}", "", remedy)
    # A fitted teacher's folder has a manifest of its own.
    if not (second / ONNX).is_file():
        wrong = f"'{second}' is no export: it has no {ONNX}"
        remedy = "A teacher is written by `kd-export RUN --teacher`"
        raise ModelError(WHERE, wrong, "", remedy)
    second_model = describe(second, "", checked)
    if difference := _difference(first_model, second_model):
        remedy = "Choose another export of the same classes"
        raise ModelError(WHERE, f"'{second}': {difference}", "", remedy)
    output = replace(second_model.output, values=first_model.output.values)
    second_model = replace(second_model, output=output)
    _warn_unless_accepted(first_model, second_model)
    reference = first_model.reference
    if reference:
        reference = replace(reference, replaced=True)
    version = f"{first_model.version}+{second_model.version}"
    return replace(first_model, version=version, reference=reference), second_model


def _warn_unless_accepted(first: Description, second: Description | None) -> None:
    accepted = first.accepted_second
    if accepted and not (second and accepted.endswith(f" {second.version}")):
        current = f"{second.name} {second.version}" if second else "none"
        warning = (
            "'%s' was accepted with the second export %s, but %s is given: it may miss"
            " the accepted limits"
        )
        log.warning(warning, first.folder, accepted, current)


def _difference(first: Description, second: Description) -> str:
    """Return why two exports are no pair; "" if they are one."""
    if second.version == first.version:
        return "it is the first model"
    count = len(first.labels)
    if len(second.labels) != count:
        return f"it has {len(second.labels)} classes, the first model {count}"
    for number, (label, expected) in enumerate(
        zip(second.labels, first.labels, strict=True)
    ):
        if label != expected:
            labels = f"is {label!r}, that of the first model is {expected!r}"
            return f"its class {number} {labels}"
    if bool(second.output.thresholds) != bool(first.output.thresholds):
        return "one model returns one label per image, the other several"
    if second.bits != first.bits:
        return (
            f"its images have {second.bits} bits per channel, those of the first model"
            f" {first.bits}"
        )
    return ""


def load_pair(
    first: Description, second: Description | None, threads: int, slots: int
) -> LoadedGraph:
    """Load the graphs of `describe_pair`; see `kd.deploy.serve.model.load`."""
    model = load(first, threads, slots)
    if second is None:
        return model
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    return Cascade(**values, second=load(second, threads, slots))


def open_exports(
    folder: str | Path,
    file: str = "",
    threads: int = 1,
    slots: int = 0,
    self_check: bool = True,
    second: str | Path | None = None,
) -> LoadedGraph:
    """Load an export without torch, to call it with images: `LoadedGraph.__call__`.

    Args:
        folder: the export.
        file: the graph; default: the one chosen by `kd-export --accept`, or model.onnx.
        threads: cores per call.
        slots: parallel calls that OpenVINO prepares for; 0: as many as the cores allow.
        self_check: whether to run the self-check.
        second: another export, such as the teacher's, for images on which the first is
            unsure.

    Returns:
        The loaded model.

    Raises:
        ModelError: the export cannot be used.
        SelfCheckError: the self-check fails.
    """
    pair = describe_pair(
        Path(folder).absolute(),
        file,
        Path(second).absolute() if second else None,
        self_check,
    )
    model = load_pair(*pair, threads, slots or max(1, cores() // threads))
    model.check_itself()
    return model
