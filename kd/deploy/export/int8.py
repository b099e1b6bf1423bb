"""Post-training quantization: int8 weights and activations in OpenVINO's IR, ranges found on training views.

With SmoothQuant (arXiv:2211.10438) and bias correction (NNCF). Dynamic quantization is `runtimes.write_int8`.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from kd.core.host import signal_stack
from kd.models import runtimes

DYNAMIC, STATIC = "model.int8.onnx", "openvino.int8.xml"
VIEWS = 300
"""Training views on which NNCF finds ranges: its own default. With SmoothQuant and so many, two ViTs with planted
outliers lost 0.0 and 0.65 points of 40 (benchmarks/int8_planted*.csv)."""
Views = Callable[[int], Iterable[tuple[np.ndarray, np.ndarray]]]  # so many, uint8 [B, 3, S, S], labels


def post_training(source: Path, path: Path, views: Views) -> None:
    """Write OpenVINO's IR, `path` (.xml) and its .bin, with int8 weights and activations."""
    with _nncf() as nncf:
        openvino = runtimes.require("openvino", "--int8", "nncf")
        quantized = nncf.quantize(
            openvino.convert_model(str(source)),
            nncf.Dataset(_singles(views)),
            model_type=nncf.ModelType.TRANSFORMER,
            target_device=nncf.TargetDevice.CPU,
            subset_size=VIEWS,
        )
        openvino.save_model(quantized, str(path), compress_to_fp16=False)


def _singles(views: Views) -> list[np.ndarray]:
    """Return training views one by one, uint8 [1, 3, S, S]: NNCF's statistics are those of an image."""
    pixels = (image[None] for batch, _ in views(VIEWS) for image in batch)
    return list(itertools.islice(pixels, VIEWS))


@contextmanager
def _nncf() -> Iterator[Any]:
    """Import NNCF, and keep its progress bars and log from a user who cannot act on them."""
    os.environ.setdefault("NNCF_CI", "1")  # nothing is sent to Intel: NNCF's telemetry is off
    level = logging.getLogger("nncf").level
    with signal_stack(), runtimes.quiet(), redirect_stdout(io.StringIO()):
        yield runtimes.require("nncf", "--int8", "nncf")
    logging.getLogger("nncf").setLevel(level)
