"""The self-check: pictures in every export, with their pixels and outputs at the
export.

An export is served on another processor, with another onnxruntime, OpenVINO or Pillow.
So each start decodes the pictures, runs the graph on their pixels, and refuses
differences beyond the export's bound.

The pictures are synthetic, so no photograph is published: noise at three scales,
squares and lines, from a seed. Four have the size of the graph's input; a small one
takes each branch of the decoder (`BRANCHES`). Two go through the graph as a batch, two
at the same time, and the labels of all classes are compared. Older exports have the
four and no labels.
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
from kd.deploy.serve.engines import Engine
from kd.files.pixels import BRANCHES, CENTRE, HEIF, format_of, load_heif
from kd.parts import registry

FILE, KEY = "self_check.npz", "self_check"
SEED = 65  # any other seed would do
# pixels of the crop of a branch's picture: files grow by 80 kB, a start by 0.04 CPU
# seconds at most
SIDE = 24
CUTS = (2, 3)  # between the graph's calls
LARGEST_CROP = (
    512  # pixels; for a larger crop the pictures are enlarged, so files stay small
)
LEVELS, MEAN = 4, 0.25
"""Levels (of 255) by which a decoded pixel, and the mean of a picture's channel, may
differ: Pillow 10.3 to 13.0 differ by 2 and 0.03. A bilinear filter differs by 11 to 24,
a JPEG decoded at full size by 10.
"""
FLOOR = 1e-4
"""Share of the largest |logit| by which logits may always differ. Float32 on AVX2,
AVX-512 and SSE, with the oldest and newest onnxruntime and OpenVINO, on 1 to 8 threads:
up to 1.0e-6; bfloat16 for float32: 2e-2 (`self_check_*.csv`).
"""
TIMES, STATIC = 2.0, 0.25
"""Largest allowed change of logits since the export, as a multiple of the file's error
against float32 then. Two results that close to float32 differ by at most 2: seen 1.1
for dynamic int8, 0.8 for bfloat16. STATIC: static int8 sums exact integers: seen 0.12
between versions of OpenVINO. Without VNNI sums overflow: 0.6 to 1.1 for static int8,
4.5 for dynamic.
"""
DRIFT = 10
"""Weight of the mean change of the pictures' logits for dynamic int8, RMS over the
classes. So it may be 0.2 of the largest error against float32. Rounding cancels in a
mean: other versions of onnxruntime, and no AVX, moved it by up to 0.16. Zero points
shifted by one moved it by 0.18 to 4.1 in ViTs and Swins (37 of 38 noticed). XCiTs moved
by 0.13 to 0.20, no more than honest ones: 0 of 14 noticed (`self_check_int8_*.csv`).
"""
MAX_BYTES = 2**28  # largest size of the file's arrays: five crops of 4,096 pixels


Run = Callable[..., Iterable]  # `map`, or that of an executor


class SelfCheckError(ModelError):
    """Pixels or outputs differ from those at the export."""

    exit_code = 3


def pictures(branches: Sequence[tuple], side: int, bits: int) -> list[bytes]:
    """Return a picture file per branch of `BRANCHES`, for a crop of `side` pixels; of
    HEIC only if it is installed.
    """
    draw, files = np.random.default_rng(SEED), []
    for kind, mode, scale, options in branches:
        if kind == "HEIF" and not load_heif():
            continue
        height, file = int(scale * side), io.BytesIO()
        picture = _painted(5 * height // 4, height, draw)
        if "A" in mode:
            picture.putalpha(_painted(*picture.size, draw).convert("L"))
        if mode == "I;16":
            picture = Image.fromarray(
                np.asarray(picture.convert("L"), np.uint16) << (bits - 8)
            )
        picture = picture.convert(mode)
        if options.get("transparency") == CENTRE:
            options = {
                "transparency": picture.getpixel(
                    (picture.width // 2, picture.height // 2)
                )
            }
        picture.save(file, kind, **options)
        files.append(file.getvalue())
    return files


def of_both_sizes(size: int, bits: int) -> tuple[list[bytes], list[bytes]]:
    """Return the picture files for the graph's input of `size` pixels, and the small
    ones of all branches.
    """
    return pictures(BRANCHES[:4], min(size, LARGEST_CROP), bits), pictures(
        BRANCHES, SIDE, bits
    )


def _painted(width: int, height: int, draw: np.random.Generator) -> Image.Image:
    noise = (
        Image.fromarray(draw.integers(0, 256, (n, n, 3), np.uint8)) for n in (3, 9, 40)
    )
    layers = [
        np.asarray(one.resize((width, height), Image.Resampling.BICUBIC))
        for one in noise
    ]
    picture = np.average(layers, 0, (3, 2, 1)).astype(np.uint8)
    for _ in range(12):
        x, y = draw.integers(0, width), draw.integers(0, height)
        picture[y : y + height // 6, x : x + width // 6] = draw.integers(0, 256, 3)
    picture[:, :: max(2, width // 24)] //= 2
    picture -= picture.min()
    return Image.fromarray(
        (picture * (255 / picture.max())).astype(np.uint8)
    )  # all levels: a machine may clip some


def outputs(
    engine: Engine, pixels: np.ndarray, cuts: Sequence[int] = CUTS, run: Run = map
) -> np.ndarray:
    """Return the logits of each picture, float32 [N, C]: the first two as a batch, the
    others alone.

    `run`, such as the `map` of an executor, may run them at the same time.
    """
    return np.concatenate([*run(engine, np.split(pixels, cuts))])


def allowed(file: str, found: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest allowed difference of a graph's logits from the `found` ones;
    `exact`: the float32 graph's.
    """
    times = STATIC if registry.graphs()[file].integer else TIMES
    most = max(times * _largest(found, exact), FLOOR * float(np.abs(exact).max()))
    return float(f"{most:.3g}")


def write(
    folder: Path,
    engines: Mapping[str, Engine],
    labels: Sequence[str],
    size: int,
    crop: float,
    bits: int,
) -> dict[str, dict[str, float]]:
    """Write pictures, pixels, labels and each graph's logits; return by graph its entry
    in manifest.json.

    `engines`: the first graph is the float32 one.
    """
    large, small = of_both_sizes(size, bits)
    arrays = {
        f"picture{i}": np.frombuffer(content, np.uint8)
        for i, content in enumerate(large + small)
    }
    arrays["pixels"] = np.stack(
        [prepare(content, size, crop, bits=bits).pixels for content in large]
    )
    arrays["crops"] = np.stack(
        [prepare(content, SIDE, crop, bits=bits).pixels for content in small]
    )
    if labels:
        arrays["labels"] = np.array(labels)
    logits = {
        name: outputs(engine, arrays["pixels"]) for name, engine in engines.items()
    }
    exact = next(iter(logits.values()))
    np.savez_compressed(folder / FILE, **arrays, **logits)  # type: ignore[arg-type]
    return {
        name: {"allowed": allowed(name, found, exact)} for name, found in logits.items()
    }


def read(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of the untrusted file; raises ValueError or another of
    `kd.files.json_file.DAMAGE`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(one.file_size for one in file.infolist()) > MAX_BYTES:
                raise ValueError(f"{FILE} has more than {MAX_BYTES} bytes")
        return dict(np.load(io.BytesIO(content), allow_pickle=False))
    except (zipfile.BadZipFile, EOFError, OSError, MemoryError) as error:
        raise ValueError(f"{FILE} is damaged") from error


class Differences(NamedTuple):
    """The largest differences from the values at the export."""

    # largest difference of a pixel, 0 to 255, or LEVELS / MEAN times that of a
    # channel's mean
    pixels: float
    picture: str  # the one of that difference
    # or DRIFT times the RMS over the classes of the mean difference; infinite if the
    # shape differs
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
    """Decode the pictures and run the graph on the stored pixels. SelfCheckError: a
    picture cannot be decoded here.
    """
    pixels, crops = arrays["pixels"], arrays.get("crops", ())
    expected = [*pixels, *crops]

    def change(i: int) -> tuple[float, str]:
        content, stored = arrays[f"picture{i}"].tobytes(), expected[i]
        if (
            format_of(content) in ("HEIC", "AVIF") and not HEIF
        ):  # the endpoint answers 415
            return 0.0, ""
        try:
            decoded = prepare(
                content, math.isqrt(stored.size // 3), crop, margin=margin, bits=bits
            )
        except Exception as error:  # decoders raise unrelated error types
            wrong = (
                f"picture {i} of the self-check cannot be decoded on this machine"
                f" ({first_sentence(error)})"
            )
            raise SelfCheckError("export", wrong) from error
        difference = decoded.pixels.astype(np.float64) - stored
        mean = np.abs(difference.mean(axis=(1, 2))).max()
        return (
            max(np.abs(difference).max(), mean * LEVELS / MEAN),
            f"{i} ({decoded.summary})",
        )

    levels = [*run(change, range(len(expected)))]
    logits = outputs(engine, pixels, CUTS if len(crops) else range(1, len(pixels)), run)
    largest, graph = _largest(logits, arrays[file]), registry.graphs()[file]
    if len(crops) and graph.precision == "int8" and not graph.integer:
        mean = (logits - arrays[file]).mean(0)
        largest = max(largest, DRIFT * float(np.sqrt(np.square(mean).mean())))
    level, picture = max(levels)
    return Differences(level, picture, largest)


def _largest(here: np.ndarray, there: np.ndarray) -> float:
    if here.shape != there.shape or not np.isfinite(here).all():
        return float("inf")
    return float(np.abs(here.astype(np.float64) - there).max())


def require(
    file: str, found: Differences, most: float, packages: Mapping[str, Any]
) -> None:
    """Refuse differences beyond `LEVELS`, `MEAN` and `most`; `packages` are the
    versions at the export.
    """
    runtime = registry.graphs()[file].runtime
    for title, what, difference, limit in (
        (
            "Pillow",
            f"the pixels of self-check picture {found.picture}",
            found.pixels,
            LEVELS,
        ),
        (runtime, f"the outputs of {file}", found.logits, most),
    ):
        if not difference <= limit:
            package = title.lower()
            here, there = (
                package_versions(package)[package],
                packages.get(package, "unknown"),
            )
            wrong = (
                f"on this processor {what} differ from those at the export: largest"
                f" difference {difference:.2g}"
            )
            wrong += f", {limit:.2g} is allowed; {title} {here} here, {there} there"
            remedy = (
                f"Install {title} {there}"
                if here != there
                else "Export on such a processor"
            )
            raise SelfCheckError(
                "export", wrong, "", f"{remedy}, or serve with --no-self-check"
            )
