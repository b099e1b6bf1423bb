"""The self-check: a few pictures in every export, with the pixels and outputs measured at the export.

The export is served elsewhere: on another processor, with another onnxruntime, OpenVINO or Pillow. So each start
decodes the pictures, runs the graph on their pixels, and refuses differences beyond the export's bound.

The pictures are synthetic, so no photograph leaves the house: noise at three scales, squares and lines, from a seed.
They are a JPEG that is reduced while it is decoded, a JPEG turned by EXIF, a PNG, and a transparent PNG.
"""

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kd.core.errors import ModelError
from kd.core.host import versions
from kd.deploy.serve.engines import Engine
from kd.parts import registry

FILE, KEY = "self_check.npz", "self_check"
SEED = 65  # any other would do
LARGEST_CROP = 512  # pixels; of a larger crop the pictures are enlarged, and files stay small
LEVELS = 8
"""Of 255 by which a decoded pixel may differ: Pillow 10.3 to 13.0 differ by 2, another filter by 16."""
FLOOR = 1e-4
"""Of the largest |logit|, by which logits may always differ. Float32 on AVX2, AVX-512, SSE, of the oldest and newest
onnxruntime and OpenVINO, on 1 to 8 threads: up to 1.0e-6; bfloat16 for float32: 2e-2 (`self_check_*.csv`)."""
TIMES, STATIC = 2.0, 0.25
"""Of a graph's largest difference from float32 at the export, by which its logits may differ. Two ways to compute it
that both stay that close to float32 are at most twice as far from each other: seen 0.6 of dynamic int8, 0.8 of
bfloat16. Static int8 adds up the same integers: seen 0.12 between versions of OpenVINO. Without VNNI its sums overflow,
and those of dynamic int8: 0.6 to 1.1, and 4.5."""
MAX_BYTES = 2**28  # of the file's arrays: five crops of 4,096 pixels


class SelfCheckError(ModelError):
    """Pixels or outputs differ from those at the export."""

    exit_code = 3


def pictures(size: int) -> list[bytes]:
    """Return the files of the pictures, for a crop of `size` pixels."""
    draw, side, files, turned = np.random.default_rng(SEED), min(size, LARGEST_CROP), [], Image.Exif()
    turned[0x0112] = 6  # by 90 degrees
    jpeg = {"format": "JPEG", "quality": 90}
    kinds = (5.0, 4.0, jpeg), (2.0, 1.5, {**jpeg, "exif": turned}), (1.5, 1.25, {"format": "PNG"})
    for width, height, options in (*kinds, (1.25, 1.75, {"format": "PNG"})):
        picture, file = _painted(int(width * side), int(height * side), draw), io.BytesIO()
        if len(files) == len(kinds):
            picture.putalpha(_painted(*picture.size, draw).convert("L"))
        picture.save(file, **options)
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
    """Return the logits of each picture alone, as it is served, float32 [N, C]."""
    return np.concatenate([engine(one[None]) for one in pixels])


def allowed(file: str, found: np.ndarray, others: Sequence[np.ndarray], exact: np.ndarray) -> float:
    """Return how far a graph's logits may differ from the `found` ones.

    `others` are of other threads and batches, `exact` those of the float32 graph.
    """
    static = registry.graphs()[file].integer
    spread = TIMES * max(_largest(one, found) for one in others)
    most = max(spread, (STATIC if static else TIMES) * _largest(found, exact), FLOOR * float(np.abs(exact).max()))
    return float(f"{most:.3g}")


def write(
    folder: Path, size: int, decode: Callable[[bytes], np.ndarray], engines: Mapping[str, Sequence[Engine]]
) -> dict[str, dict[str, float]]:
    """Write the pictures, their pixels and each graph's logits; return by graph its entry in manifest.json.

    `engines`: of each graph one as it is served, and more on other numbers of threads; the first is the float32 graph.
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
    """Return the arrays of the file; ValueError or another of `kd.files.json_file.DAMAGE`: a stranger wrote it."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(one.file_size for one in file.infolist()) > MAX_BYTES:
                raise ValueError(f"{FILE} has more than {MAX_BYTES} bytes")
        return dict(np.load(io.BytesIO(content), allow_pickle=False))
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"{FILE} is damaged") from error


def differences(
    arrays: Mapping[str, np.ndarray], file: str, decode: Callable[[bytes], np.ndarray], engine: Engine
) -> tuple[float, float]:
    """Return the largest differences here, of pixels in levels and of logits; infinite where a shape differs."""
    pixels = arrays["pixels"]
    files = [arrays[f"picture{i}"].tobytes() for i in range(len(pixels))]
    return _largest(np.stack([decode(one) for one in files]), pixels), _largest(outputs(engine, pixels), arrays[file])


def _largest(here: np.ndarray, there: np.ndarray) -> float:
    if here.shape != there.shape or not np.isfinite(here).all():
        return float("inf")
    return float(np.abs(here.astype(np.float64) - there).max())


def require(file: str, found: tuple[float, float], most: float, packages: Mapping[str, Any]) -> None:
    """Refuse differences beyond `LEVELS` and `most`; `packages` are the versions at the export."""
    runtime = registry.graphs()[file].runtime
    told = (
        ("Pillow", "pillow", "the pixels of a self-check picture", found[0], LEVELS),
        (runtime, runtime, f"the outputs of {file}", found[1], most),
    )
    for title, package, what, off, limit in told:
        if not off <= limit:
            here, there = versions(package)[package], packages.get(package, "unknown")
            wrong = f"on this processor {what} differ from those at the export: largest difference {off:.2g}"
            wrong += f", {limit:.2g} is allowed; {title} {here} here, {there} there"
            raise SelfCheckError("export", wrong, "", "Install the version there, or export on such a processor")
