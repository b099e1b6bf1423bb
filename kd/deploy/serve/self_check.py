"""Check an export at each start, by images with their pixels and outputs at the export.

An export is served on another processor, with another onnxruntime, OpenVINO or Pillow.
So each start decodes the images, runs the graph on their pixels, and refuses
differences beyond the export's bound.

The images are synthetic, so no photograph is published: noise at three scales, squares
and lines, from a seed. Four have the size of the graph's input; a small one takes each
branch of the decoder (`BRANCHES`). Two go through the graph as a batch, two at the same
time, and the labels of all classes are compared. Older exports have the four and no
labels.
"""

import io
import math
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from kd.core.errors import ModelError, first_sentence
from kd.core.host import package_versions
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.engines import WHERE, Engine
from kd.files.pixels import BRANCHES, CENTRE, HEIF, format_of, load_heif
from kd.parts import registry

FILE = "self_check.npz"
KEY = "self_check"
SEED = 65  # any other seed would do
# pixels of the crop of a branch's image: files grow by 80 kB, a start by 0.04 CPU
# seconds at most
SIDE = 24
CUTS = (2, 3)  # between the graph's calls
# pixels; for a larger crop the images are enlarged, so files stay small
LARGEST_CROP = 512
LEVELS = 4
"""Levels (of 255) by which a decoded pixel may differ. Pillow 10.3 to 13.0 differ by 2;
a bilinear filter differs by 11 to 24, a JPEG decoded at full size by 10.
"""
MEAN = 0.25  # levels by which the mean of a channel may differ; those Pillows: 0.03
FLOOR = 1e-4
"""Share of the largest |logit| by which logits may always differ. Float32 on AVX2,
AVX-512 and SSE, with the oldest and newest onnxruntime and OpenVINO, on 1 to 8 threads:
up to 1.0e-6; bfloat16 for float32: 2e-2 (`self_check_*.csv`).
"""
TIMES = 2.0
"""Largest allowed change of logits since the export, as a multiple of the file's error
against float32 then. Two results that close to float32 differ by at most 2: seen 1.1
for dynamic int8, 0.8 for bfloat16. Without VNNI sums overflow: 4.5 for dynamic int8.
"""
STATIC = 0.25
"""The same for static int8, which sums exact integers: seen 0.12 between versions of
OpenVINO; 0.6 to 1.1 without VNNI.
"""
DRIFT = 10
"""Weight of the mean change of the images' logits for dynamic int8, RMS over the
classes. So it may be 0.2 of the largest error against float32. Rounding cancels in a
mean: other versions of onnxruntime, and no AVX, moved it by up to 0.16. Zero points
shifted by one moved it by 0.18 to 4.1 in ViTs and Swins (37 of 38 noticed). XCiTs moved
by 0.13 to 0.20, no more than honest ones: 0 of 14 noticed (`self_check_int8_*.csv`).
"""
MAX_BYTES = 2**28  # largest size of the file's arrays: five crops of 4,096 pixels


Run = Callable[..., Iterable]  # Python's `map`, or an executor's


class SelfCheckError(ModelError):
    """Pixels or outputs differ from those at the export."""

    exit_code = 3


def pictures(branches: Sequence[tuple], side: int, bits: int) -> list[bytes]:
    """Return an image file per branch of `BRANCHES`, for a crop of `side` pixels.

    HEIC is left out if its decoder is not installed.
    """
    draw = np.random.default_rng(SEED)
    files = []
    for kind, mode, scale, options in branches:
        if kind == "HEIF" and not load_heif():
            continue
        height = int(scale * side)
        image = _paint_noise(5 * height // 4, height, draw)
        if "A" in mode:
            image.putalpha(_paint_noise(*image.size, draw).convert("L"))
        if mode == "I;16":
            grey = np.asarray(image.convert("L"), np.uint16)
            image = Image.fromarray(grey << (bits - 8))
        image = image.convert(mode)
        if options.get("transparency") == CENTRE:
            centre = image.getpixel((image.width // 2, image.height // 2))
            options = {"transparency": centre}
        file = io.BytesIO()
        image.save(file, kind, **options)
        files.append(file.getvalue())
    return files


def large_and_small(size: int, bits: int) -> tuple[list[bytes], list[bytes]]:
    """Return the image files for the graph's input of `size` pixels, and small ones."""
    large = pictures(BRANCHES[:4], min(size, LARGEST_CROP), bits)
    return large, pictures(BRANCHES, SIDE, bits)


def _paint_noise(width: int, height: int, draw: np.random.Generator) -> Image.Image:
    layers = []
    for side in (3, 9, 40):
        noise = Image.fromarray(draw.integers(0, 256, (side, side, 3), np.uint8))
        layer = noise.resize((width, height), Image.Resampling.BICUBIC)
        layers.append(np.asarray(layer))
    canvas = np.average(layers, 0, (3, 2, 1)).astype(np.uint8)
    for _ in range(12):
        x = draw.integers(0, width)
        y = draw.integers(0, height)
        canvas[y : y + height // 6, x : x + width // 6] = draw.integers(0, 256, 3)
    canvas[:, :: max(2, width // 24)] //= 2
    # All levels: a machine may clip some.
    canvas -= canvas.min()
    return Image.fromarray((canvas * (255 / canvas.max())).astype(np.uint8))


def outputs(
    engine: Engine, pixels: np.ndarray, cuts: Sequence[int] = CUTS, run: Run = map
) -> np.ndarray:
    """Return the logits of each image, float32 [N, C]; the first two are a batch.

    `run`, such as the `map` of an executor, may run them at the same time.
    """
    return np.concatenate([*run(engine, np.split(pixels, cuts))])


def allowed(file: str, logits: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest allowed difference of a graph's logits from `logits`.

    `exact`: the float32 graph's logits.
    """
    times = STATIC if registry.graphs()[file].integer else TIMES
    floor = FLOOR * float(np.abs(exact).max())
    return float(f"{max(times * _largest(logits, exact), floor):.3g}")


def write(
    folder: Path,
    engines: Mapping[str, Engine],
    labels: Sequence[str],
    size: int,
    crop: float,
    bits: int,
) -> dict[str, dict[str, float]]:
    """Write images, pixels, labels and logits; return each graph's manifest entry.

    `engines`: the first graph is the float32 one.
    """
    large, small = large_and_small(size, bits)
    arrays = {
        f"picture{i}": np.frombuffer(content, np.uint8)
        for i, content in enumerate(large + small)
    }
    for key, contents, side in (("pixels", large, size), ("crops", small, SIDE)):
        arrays[key] = np.stack(
            [prepare(content, side, crop, bits=bits).pixels for content in contents]
        )
    if labels:
        arrays["labels"] = np.array(labels)
    logits = {
        file: outputs(engine, arrays["pixels"]) for file, engine in engines.items()
    }
    np.savez_compressed(folder / FILE, **arrays, **logits)  # type: ignore[arg-type]
    exact, *_ = logits.values()
    return {
        file: {"allowed": allowed(file, values, exact)}
        for file, values in logits.items()
    }


def read(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of the untrusted file.

    Raises ValueError or another of `kd.files.json_file.DAMAGE`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(array.file_size for array in file.infolist()) > MAX_BYTES:
                raise ValueError(f"{FILE} has more than {MAX_BYTES} bytes")
        return dict(np.load(io.BytesIO(content), allow_pickle=False))
    except (zipfile.BadZipFile, EOFError, OSError, MemoryError) as error:
        raise ValueError(f"{FILE} is damaged") from error


class Differences(NamedTuple):
    """The largest differences from the values at the export."""

    # largest difference of a pixel, 0 to 255, or LEVELS / MEAN times that of a
    # channel's mean
    pixels: float
    picture: str  # the image of that difference
    # of a logit, or DRIFT times the RMS over the classes of the mean difference;
    # infinite if the shape differs
    logits: float


def differences(
    arrays: Mapping[str, np.ndarray],
    file: str,
    engine: Engine,
    crop: float,
    margin: float,
    bits: int,
    run: Run = map,
) -> Differences:
    """Decode the images and run the graph on the stored pixels.

    Raises SelfCheckError if an image cannot be decoded here.
    """
    pixels = arrays["pixels"]
    crops = arrays.get("crops", ())
    expected = [*pixels, *crops]

    def pixel_difference(i: int) -> tuple[float, str]:
        content = arrays[f"picture{i}"].tobytes()
        # The endpoint responds with 415.
        if format_of(content) in ("HEIC", "AVIF") and not HEIF:
            return 0.0, ""
        side = math.isqrt(expected[i].size // 3)
        try:
            decoded = prepare(content, side, crop, margin=margin, bits=bits)
        except Exception as error:  # decoders raise unrelated error types
            wrong = f"picture {i} of the self-check cannot be decoded on this machine"
            raise SelfCheckError(WHERE, f"{wrong} ({first_sentence(error)})") from error
        difference = decoded.pixels.astype(np.float64) - expected[i]
        mean = np.abs(difference.mean(axis=(1, 2))).max()
        largest = max(np.abs(difference).max(), mean * LEVELS / MEAN)
        return largest, f"{i} ({decoded.summary})"

    pixel_differences = [*run(pixel_difference, range(len(expected)))]
    logits = outputs(engine, pixels, CUTS if len(crops) else range(1, len(pixels)), run)
    largest = _largest(logits, arrays[file])
    graph = registry.graphs()[file]
    if len(crops) and graph.precision == "int8" and not graph.integer:
        mean = (logits - arrays[file]).mean(0)
        largest = max(largest, DRIFT * float(np.sqrt(np.square(mean).mean())))
    level, image = max(pixel_differences)
    return Differences(level, image, largest)


def _largest(logits: np.ndarray, expected: np.ndarray) -> float:
    if logits.shape != expected.shape or not np.isfinite(logits).all():
        return float("inf")
    return float(np.abs(logits.astype(np.float64) - expected).max())


def require(
    file: str, differences: Differences, allowed: float, packages: Mapping[str, Any]
) -> None:
    """Refuse differences of pixels beyond `LEVELS` or of logits beyond `allowed`.

    `packages`: the versions at the export.
    """
    images = f"the pixels of self-check picture {differences.picture}"
    _require_within("Pillow", images, differences.pixels, LEVELS, packages)
    runtime = registry.graphs()[file].runtime
    values = f"the outputs of {file}"
    _require_within(runtime, values, differences.logits, allowed, packages)


def _require_within(
    title: str, values: str, difference: float, limit: float, packages: Mapping
) -> None:
    if difference <= limit:
        return
    package = title.lower()
    here = package_versions(package)[package]
    there = packages.get(package, "unknown")
    wrong = (
        f"on this processor {values} differ from those at the export: largest"
        f" difference {difference:.2g}, {limit:.2g} is allowed; {title} {here} here,"
        f" {there} there"
    )
    remedy = "Export on such a processor"
    if here != there:
        remedy = f"Install {title} {there}"
    raise SelfCheckError(WHERE, wrong, "", f"{remedy}, or serve with --no-self-check")
