"""The self-check: pictures in every export, with their pixels and outputs at the export.

An export is served on another processor, with another onnxruntime, OpenVINO or Pillow. So each start decodes the
pictures, runs the graph on their pixels, and refuses differences beyond the export's bound.

The pictures are synthetic, so no photograph is published: noise at three scales, squares and lines, from a seed. They
are a JPEG decoded at reduced size, a JPEG rotated by EXIF, a PNG, and a transparent PNG.
"""

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from kd.core.errors import ModelError, in_short
from kd.core.host import versions
from kd.deploy.serve.engines import Engine
from kd.parts import registry

FILE, KEY = "self_check.npz", "self_check"
SEED = 65  # any other seed would do
LARGEST_CROP = 512  # pixels; for a larger crop the pictures are enlarged, so files stay small
LEVELS, MEAN = 4, 0.25
"""Levels (of 255) by which a decoded pixel, and the mean of a picture's channel, may differ: Pillow 10.3 to 13.0 differ
by 2 and 0.03. A bilinear filter differs by 11 to 24, a JPEG decoded at full size by 10."""
FLOOR = 1e-4
"""Share of the largest |logit| by which logits may always differ. Float32 on AVX2, AVX-512 and SSE, with the oldest and
newest onnxruntime and OpenVINO, on 1 to 8 threads: up to 1.0e-6; bfloat16 for float32: 2e-2 (`self_check_*.csv`)."""
TIMES, STATIC = 2.0, 0.25
"""Largest allowed change of logits since the export, as a multiple of the file's error against float32 then. Two
results that close to float32 differ by at most 2: seen 0.6 for dynamic int8, 0.8 for bfloat16. STATIC: static int8 sums
exact integers: seen 0.12 between versions of OpenVINO. Without VNNI sums overflow: 0.6 to 1.1 for static int8, 4.5 for
dynamic."""
UNREADABLE = "cannot be decoded on this machine"
MAX_BYTES = 2**28  # largest size of the file's arrays: five crops of 4,096 pixels


class SelfCheckError(ModelError):
    """Pixels or outputs differ from those at the export."""

    exit_code = 3


def pictures(size: int) -> list[bytes]:
    """Return the picture files for a crop of `size` pixels."""
    draw, side, files, turned = np.random.default_rng(SEED), min(size, LARGEST_CROP), [], Image.Exif()
    turned[0x0112] = 6  # rotated by 90 degrees
    jpeg = {"format": "JPEG", "quality": 90}
    kinds = (
        (5.0, 4.0, "RGB", jpeg),
        (2.0, 1.5, "CMYK", {**jpeg, "exif": turned}),
        (1.5, 1.25, "RGB", {"format": "WEBP", "quality": 90}),
        (1.25, 1.75, "RGBA", {"format": "PNG"}),
    )
    for width, height, mode, options in kinds:
        picture, file = _painted(int(width * side), int(height * side), draw), io.BytesIO()
        if mode == "RGBA":
            picture.putalpha(_painted(*picture.size, draw).convert("L"))
        picture.convert(mode).save(file, **options)
        files.append(file.getvalue())
    return files


def _painted(width: int, height: int, draw: np.random.Generator) -> Image.Image:
    noise = (Image.fromarray(draw.integers(0, 256, (n, n, 3), np.uint8)) for n in (3, 9, 40))
    layers = [np.asarray(one.resize((width, height), Image.Resampling.BICUBIC)) for one in noise]
    picture = np.average(layers, 0, (3, 2, 1)).astype(np.uint8)
    for _ in range(12):
        x, y = draw.integers(0, width), draw.integers(0, height)
        picture[y : y + height // 6, x : x + width // 6] = draw.integers(0, 256, 3)
    picture[:, :: max(2, width // 24)] //= 2
    return Image.fromarray(picture)


def outputs(engine: Engine, pixels: np.ndarray) -> np.ndarray:
    """Return the logits of each picture, run one at a time as in serving, float32 [N, C]."""
    return np.concatenate([engine(one[None]) for one in pixels])


def allowed(file: str, found: np.ndarray, others: Sequence[np.ndarray], exact: np.ndarray) -> float:
    """Return the largest allowed difference of a graph's logits from the `found` ones.

    `others`: logits with other threads and batch sizes; `exact`: the float32 graph's.
    """
    static = registry.graphs()[file].integer
    spread = TIMES * max(_largest(one, found) for one in others)
    most = max(spread, (STATIC if static else TIMES) * _largest(found, exact), FLOOR * float(np.abs(exact).max()))
    return float(f"{most:.3g}")


def write(
    folder: Path, size: int, decode: Callable[[bytes], np.ndarray], engines: Mapping[str, Sequence[Engine]]
) -> dict[str, dict[str, float]]:
    """Write the pictures, their pixels and each graph's logits; return by graph its entry in manifest.json.

    `engines`: per graph one as in serving, then others with other numbers of threads; the first graph is the float32
    one.
    """
    files = pictures(size)
    pixels = np.stack([decode(file) for file in files])
    found = {name: outputs(served, pixels) for name, (served, *_) in engines.items()}
    arrays = {f"picture{i}": np.frombuffer(file, np.uint8) for i, file in enumerate(files)} | {"pixels": pixels}
    np.savez_compressed(folder / FILE, **arrays, **found)  # type: ignore[arg-type]
    exact = next(iter(found.values()))
    return {
        name: {"allowed": allowed(name, found[name], [served(pixels), *(outputs(one, pixels) for one in more)], exact)}
        for name, (served, *more) in engines.items()
    }


def read(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of the untrusted file; raises ValueError or another of `kd.files.json_file.DAMAGE`."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(one.file_size for one in file.infolist()) > MAX_BYTES:
                raise ValueError(f"{FILE} has more than {MAX_BYTES} bytes")
        return dict(np.load(io.BytesIO(content), allow_pickle=False))
    except (zipfile.BadZipFile, EOFError, OSError, MemoryError) as error:
        raise ValueError(f"{FILE} is damaged") from error


class Differences(NamedTuple):
    """The largest differences from the values at the export; infinite if a shape differs."""

    levels: float  # largest difference of a pixel, 0 to 255
    mean: float  # largest difference of a channel's mean
    logits: float


def differences(
    arrays: Mapping[str, np.ndarray], file: str, decode: Callable[[bytes], np.ndarray], engine: Engine
) -> Differences:
    """Decode the pictures and run the graph on the stored pixels. SelfCheckError: a picture cannot be decoded here."""
    pixels, here = arrays["pixels"], []
    for i in range(len(pixels)):
        try:
            here.append(decode(arrays[f"picture{i}"].tobytes()))
        except KeyError:
            raise
        except Exception as error:  # decoders raise unrelated error types
            raise SelfCheckError("export", f"picture {i} of the self-check {UNREADABLE} ({in_short(error)})") from error
    off = np.stack(here).astype(np.float64) - pixels if np.shape(here) == pixels.shape else np.array([[[[np.inf]]]])
    return Differences(
        float(np.abs(off).max()),
        float(np.abs(off.mean(axis=(2, 3))).max()),
        _largest(outputs(engine, pixels), arrays[file]),
    )


def _largest(here: np.ndarray, there: np.ndarray) -> float:
    if here.shape != there.shape or not np.isfinite(here).all():
        return float("inf")
    return float(np.abs(here.astype(np.float64) - there).max())


def require(file: str, found: Differences, most: float, packages: Mapping[str, Any]) -> None:
    """Refuse differences beyond `LEVELS`, `MEAN` and `most`; `packages` are the versions at the export."""
    runtime, pixels = registry.graphs()[file].runtime, "the pixels of a self-check picture differ"
    told = (
        ("Pillow", pixels, "largest", found.levels, LEVELS),
        ("Pillow", pixels, "mean", found.mean, MEAN),
        (runtime, f"the outputs of {file} differ", "largest", found.logits, most),
    )
    for title, what, kind, off, limit in told:
        if not off <= limit:
            here, there = versions(title.lower())[title.lower()], packages.get(title.lower(), "unknown")
            wrong = f"on this processor {what} from those at the export: {kind} difference {off:.2g}"
            wrong += f", {limit:.2g} is allowed; {title} {here} here, {there} there"
            remedy = f"Install {title} {there}" if here != there else "Export on such a processor"
            raise SelfCheckError("export", wrong, "", f"{remedy}, or serve with --no-self-check")
