"""Faults of serving machines beside those of `test_self_check.py`: of branches of the
decoder, of batches and labels.

Each is planted in a library or in a file of the export, whose hashes are repaired.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import onnx
import pytest
from liars import INT8, Liar
from onnx import helper, numpy_helper
from PIL import Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from vnni import needs_vnni

import kd
from kd.core.errors import ModelError
from kd.deploy.serve import decoding, self_check
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import LoadedGraph, describe, load
from kd.deploy.serve.self_check import FILE, SelfCheckError
from kd.deploy.serve.service import Service
from kd.files import pixels
from kd.files.pixels import BRANCHES, HEIF

needs_heif = pytest.mark.skipif(not HEIF, reason="needs the package pillow-heif")


@dataclass(frozen=True)
class Fault:
    """A method of Pillow that is wrong for some images."""

    owner: Any
    method: str
    applies: Callable[..., bool]  # (image, arguments of the method)
    wrong: Callable[[Image.Image], Image.Image]

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        real = getattr(self.owner, self.method)
        inside = []

        def method(image: Image.Image, *args: Any, **named: Any) -> Any:
            applies = not inside and self.applies(image, *args)
            result = real(image, *args, **named)
            if applies:
                inside.append(True)  # `wrong` calls the method too
                wrong = self.wrong(
                    result if isinstance(result, Image.Image) else image.copy()
                )
                inside.clear()
                if isinstance(result, Image.Image):
                    return wrong
                image.im = wrong.im  # `load` changes its image
            return result

        patch.setattr(self.owner, self.method, method)


def darker(image: Image.Image) -> Image.Image:
    """Return an image whose values are an eighth smaller."""
    return Image.fromarray((np.asarray(image) * 0.875).astype(np.asarray(image).dtype))


def rolled(image: Image.Image) -> Image.Image:
    """Return an image whose columns are shifted by one."""
    return Image.fromarray(np.roll(np.asarray(image), 1, 1))


def with_mode(mode: str, kind: str = "") -> Callable[..., bool]:
    return lambda image, *args: image.mode == mode and kind in ("", image.format)


def reduced(divisor: int) -> Callable[..., bool]:
    return lambda image, *args: (
        image.decoderconfig[:1] == (divisor,) and bool(image.tile)
    )


def enlarged(image: Image.Image, size: tuple[int, int], *args: object) -> bool:
    return min(image.size) < min(size)


JPEG = JpegImagePlugin.JpegImageFile
PNG = PngImagePlugin.PngImageFile
FAULTS = {
    "grey JPEG": Fault(Image.Image, "convert", with_mode("L", "JPEG"), darker),
    "grey PNG": Fault(Image.Image, "convert", with_mode("L", "PNG"), darker),
    "black and white": Fault(Image.Image, "convert", with_mode("1"), ImageOps.invert),
    "palette": Fault(
        Image.Image,
        "convert",
        lambda image, mode="": with_mode("P")(image) and mode == "RGB",
        darker,
    ),
    "transparent palette": Fault(
        Image.Image,
        "convert",
        lambda image, mode="": with_mode("P")(image) and mode == "RGBA",
        darker,
    ),
    "grey with alpha": Fault(Image.Image, "convert", with_mode("LA"), darker),
    "alpha of PNG": Fault(Image.Image, "convert", with_mode("RGBA", "PNG"), darker),
    "alpha of WebP": Fault(Image.Image, "convert", with_mode("RGBA", "WEBP"), darker),
    "WebP": Fault(WebPImagePlugin.WebPImageFile, "load", with_mode("RGB"), darker),
    "16 bits": Fault(
        PNG, "load", lambda image: with_mode("I;16")(image) and bool(image.tile), darker
    ),
    "CMYK": Fault(Image.Image, "convert", with_mode("CMYK"), darker),
    "progressive JPEG": Fault(
        JPEG,
        "load",
        lambda image: "progressive" in image.info and bool(image.tile),
        darker,
    ),
    "JPEG at 1/2": Fault(JPEG, "load", reduced(2), rolled),
    "JPEG at 1/4": Fault(JPEG, "load", reduced(4), rolled),
    "JPEG at 1/8": Fault(JPEG, "load", reduced(8), rolled),
    "enlarging": Fault(Image.Image, "resize", enlarged, rolled),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_branch_of_the_decoder_is_noticed(fault, honest, monkeypatch):
    FAULTS[fault].plant(monkeypatch)
    with pytest.raises(SelfCheckError, match="the pixels of self-check picture"):
        kd.load(honest)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_wrong_turn_is_noticed(orientation, honest, monkeypatch):
    real = ImageOps.exif_transpose

    def turned(image: Image.Image, *, in_place: bool = False) -> Image.Image | None:
        return (
            None
            if image.getexif().get(0x0112) == orientation
            else real(image, in_place=in_place)
        )

    monkeypatch.setattr(ImageOps, "exif_transpose", turned)
    with pytest.raises(SelfCheckError, match="the pixels of self-check picture"):
        kd.load(honest)


@needs_heif
def test_a_wrong_heic_is_noticed_and_named(honest, monkeypatch):
    pixels.load_heif()
    plugin = importlib.import_module("pillow_heif.as_plugin").HeifImageFile
    Fault(plugin, "load", with_mode("RGB"), darker).plant(monkeypatch)
    with pytest.raises(
        SelfCheckError, match=r"self-check picture \d+ \(45x36 RGB HEIF\)"
    ):
        kd.load(honest)


WITHOUT_HEIF = """
import sys
sys.modules["pillow_heif"] = None
import kd
from kd.deploy.serve.decoding import NAMES
print("HEIC" in NAMES, kd.load(sys.argv[1]).check_itself())
"""


@needs_heif
def test_an_export_with_a_heic_starts_where_heic_is_not_installed(honest):
    stored = [
        file.tobytes()
        for name, file in np.load(honest / FILE).items()
        if name.startswith("picture")
    ]
    assert "HEIC" in map(pixels.format_of, stored)
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEIF, str(honest)],
        capture_output=True,
        text=True,
    )
    assert process.stdout.split() == ["False", "True"], process.stderr


def test_an_export_is_made_where_heic_is_not_installed(monkeypatch):
    monkeypatch.setattr(pixels, "HEIF", False)
    files = self_check.pictures(BRANCHES, self_check.SIDE, 16)
    assert len(files) == sum(kind != "HEIF" for kind, *_ in BRANCHES)
    assert "HEIC" not in map(pixels.format_of, files)


# --------------------------------------------------------------------------------
# every branch has a picture


def decoded(files: list[bytes], bits: int = 16) -> None:
    for file in files:
        prepare(file, self_check.SIDE, 0.875, bits=bits)


def lines_run(
    functions: list[Callable[..., Any]], run: Callable[[], None]
) -> set[tuple[str, int]]:
    """Return the lines of functions that a call runs, each as the function's name and a
    number from its `def`.
    """
    codes = {function.__code__ for function in functions}
    executed = set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code not in codes:
            return None
        executed.add((frame.f_code.co_name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return executed


def test_each_line_of_the_decoder_that_makes_pixels_is_run_by_a_picture():
    """Fails for a new branch without a picture: lines that neither raise nor follow an
    `except` must run.
    """
    functions = [pixels.decode_rgb, pixels.to_rgb, pixels.reduce, pixels.centre_crop]
    files = self_check.pictures(BRANCHES, self_check.SIDE, 16)
    executed = lines_run(functions, lambda: decoded(files))
    text = Path(pixels.__file__).read_text()
    refusing = lines_of_refusals(ast.parse(text))
    missed = set()
    for function in functions:
        code = function.__code__
        lines = {line for _, _, line in code.co_lines() if line}
        run = {number for name, number in executed if name == function.__name__}
        missed |= lines - run - refusing - {code.co_firstlineno}
    source = text.splitlines()
    conditions_of_errors = (
        'elif image.mode in ("I", "F"):',
        "if bits < 16:",
        "used_bits =",
    )
    assert all(
        source[line - 1].strip().startswith(conditions_of_errors) for line in missed
    ), "a branch of the decoder has no picture in BRANCHES"


def lines_of_refusals(tree: ast.Module) -> set[int]:
    """Return the lines of blocks that end in `raise`, and of `except` clauses."""
    blocks: list[list[ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            blocks.append([cast(ast.stmt, node)])
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[-1], ast.Raise):
                blocks.append(block)
    return {
        line
        for block in blocks
        for line in range(block[0].lineno, (block[-1].end_lineno or 0) + 1)
    }


def test_each_format_mode_turn_and_scale_has_a_picture():
    """Compare with what Pillow's decoders can return, from their own tables."""
    kinds = {kind for kind, *_ in BRANCHES}
    assert kinds == {*decoding.FORMATS, "HEIF"}
    modes = {mode for kind, mode, *_ in BRANCHES if kind == "PNG"}
    assert modes >= {mode for mode, _ in PngImagePlugin._MODES.values()} - {"I"}
    files = self_check.pictures(BRANCHES, self_check.SIDE, 16)
    opened = [Image.open(io.BytesIO(file)) for file in files]
    assert {image.getexif().get(0x0112, 1) for image in opened} == {*range(1, 9)}
    divisors = set()
    for image in (image for image in opened if image.format == "JPEG"):
        pixels.reduce(
            image,
            lambda width, height: pixels.least_of_centre(
                width, height, self_check.SIDE, 0.875
            ),
        )
        divisors.add(image.decoderconfig[0] if image.decoderconfig else 1)
    assert divisors == {1, 2, 4, 8}
    assert any(min(image.size) < self_check.SIDE for image in opened)


@pytest.mark.parametrize("bits", [9, 12])
def test_a_grey_picture_fits_the_bits_of_the_data(bits):
    files = self_check.pictures(BRANCHES, self_check.SIDE, bits)
    (grey,) = (file for file in files if Image.open(io.BytesIO(file)).mode == "I;16")
    assert 2 ** (bits - 1) < np.asarray(Image.open(io.BytesIO(grey))).max() < 2**bits
    decoded(files, bits)


# --------------------------------------------------------------------------------
# batches, two at once


def wrong_in_batches(graph: onnx.GraphProto) -> None:
    """Add a hundredth of its number in the batch to each picture's logits."""
    name = graph.output[0].name
    for node in graph.node:
        node.output[:] = [
            "before" if output == name else output for output in node.output
        ]
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "last": np.array([1]),
        "part": np.array(0.01, np.float32),
    }
    graph.initializer.extend(
        numpy_helper.from_array(value, key) for key, value in constants.items()
    )
    for kind, inputs, output, settings in (
        ("Shape", ["image"], "shape", {}),
        ("Gather", ["shape", "zero"], "count", {}),
        ("Range", ["zero", "count", "one"], "numbers", {}),
        ("Cast", ["numbers"], "floats", {"to": onnx.TensorProto.FLOAT}),
        ("Mul", ["floats", "part"], "hundredths", {}),
        ("Unsqueeze", ["hundredths", "last"], "column", {}),
        ("Add", ["before", "column"], name, {}),
    ):
        graph.node.append(helper.make_node(kind, inputs, [output], **settings))


def changed(
    honest: Path,
    folder: Path,
    change: Callable[[onnx.GraphProto], None],
    name: str = "model.onnx",
) -> Path:
    liar = Liar(shutil.copytree(honest, folder))
    model = onnx.load(liar.folder / name)
    change(model.graph)
    onnx.save(model, liar.folder / name)
    liar.reseal()
    return liar.folder


def test_a_graph_that_is_wrong_in_batches_alone_is_noticed(honest, tmp_path):
    folder = changed(honest, tmp_path / "export", wrong_in_batches)
    image = np.random.default_rng(0).integers(0, 256, (1, 3, 16, 16), np.uint8)
    with pytest.raises(SelfCheckError, match=r"the outputs of model\.onnx differ"):
        kd.load(folder)
    faulty, right = (
        kd.load(path, self_check=False).engine for path in (folder, honest)
    )
    assert np.array_equal(faulty(image), right(image)), "one at a time it is right"


class Shared:
    """A graph whose threads write to one buffer."""

    def __init__(self, model: LoadedGraph) -> None:
        self.real = model.engine
        self.buffer = np.zeros(0)

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        self.buffer = self.real(batch)
        time.sleep(0.02)
        return self.buffer


def test_a_graph_that_is_wrong_when_two_run_at_once_is_noticed(honest):
    model = load(describe(honest), 1, 2)
    assert model.check_itself()
    with pytest.raises((SelfCheckError, ModelError)):
        replace(model, engine=Shared(model)).check_itself()


def test_the_endpoints_own_threads_run_the_check(honest, monkeypatch):
    service = Service(describe(honest), Limits(), slots=2, threads=1)
    threads = set()
    real = self_check.outputs

    def outputs(engine: Any, *args: Any) -> np.ndarray:
        def noted(batch: np.ndarray) -> np.ndarray:
            threads.add(threading.current_thread().name)
            return engine(batch)

        return real(noted, *args)

    monkeypatch.setattr(self_check, "outputs", outputs)
    service.load()
    assert service.ready
    assert {name[:7] for name in threads} == {"kd-slot"}
    service.close()


# --------------------------------------------------------------------------------
# labels


@pytest.mark.parametrize(
    "order",
    [(1, 2, 0), (2, 1, 0), (1, 0, 2)],
    ids=["rotated", "reversed", "two exchanged"],
)
def test_another_order_of_the_classes_is_noticed(order, honest, tmp_path):
    liar = Liar(shutil.copytree(honest, tmp_path / "export"))
    labels = json.loads((honest / "config.json").read_text())["label_names"]
    liar.set("label_names", [labels[i] for i in order], "config.json")
    liar.reseal()
    with pytest.raises(SelfCheckError, match="labels of answers differ"):
        kd.load(liar.folder)


# --------------------------------------------------------------------------------
# int8


def shifted(by: int) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        points = [tensor for tensor in graph.initializer if "zero_point" in tensor.name]
        assert points
        for tensor in points:
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(
                numpy_helper.from_array((values + by).astype(values.dtype), tensor.name)
            )

    return change


@needs_vnni
def test_zero_points_shifted_by_one_are_noticed(honest, tmp_path):
    """Shifted by -1 this small graph changes less than between honest machines: see
    `self_check.DRIFT`.
    """
    with pytest.raises(SelfCheckError, match=f"the outputs of {INT8} differ"):
        kd.load(changed(honest, tmp_path / "export", shifted(1), INT8), INT8)


# --------------------------------------------------------------------------------
# older exports


def as_before(honest: Path, folder: Path) -> Liar:
    """Return an export as kd 0.3 wrote it: four pictures, whose logits were computed
    one at a time, no labels.
    """
    liar = Liar(shutil.copytree(honest, folder))
    arrays = dict(np.load(folder / FILE))
    older = {
        name: arrays[name]
        for name in ("picture0", "picture1", "picture2", "picture3", "pixels")
    }
    for name in ("model.onnx", INT8):
        engine = kd.load(honest, name, self_check=False).engine
        older[name] = np.concatenate(
            [engine(picture[None]) for picture in arrays["pixels"]]
        )
    np.savez_compressed(folder / FILE, **older)
    liar.reseal()
    return liar


@pytest.mark.parametrize("name", ["model.onnx", INT8])
def test_an_older_export_is_checked_as_before(name, honest, tmp_path):
    liar = as_before(honest, tmp_path / "export")
    assert kd.load(liar.folder, name).check_itself()
    engine = kd.load(liar.folder, name, self_check=False).engine
    calls = []

    def counted(batch: np.ndarray) -> np.ndarray:
        calls.append(len(batch))
        return engine(batch)

    replace(kd.load(liar.folder, name), engine=counted).check_itself()
    assert calls == [1, 1, 1, 1]
    liar.set("input/crop", 0.8)
    liar.reseal()
    with pytest.raises(SelfCheckError, match="the pixels of self-check picture"):
        kd.load(liar.folder, name)


@pytest.mark.parametrize(
    "arrays",
    [
        {
            "crops": np.zeros((31, 1, 1, 10**6), np.uint8)
        },  # resized to a million pixels a side it would fill the memory
        {"crops": np.zeros(31, np.uint8)},
        {"pixels": np.zeros(4, np.uint8)},
    ],
    ids=["a line", "numbers", "no pictures"],
)
def test_a_strangers_shapes_are_refused_in_one_line(arrays, honest, tmp_path):
    liar = Liar(shutil.copytree(honest, tmp_path / "export"))
    np.savez(liar.folder / FILE, **{**np.load(honest / FILE), **arrays})
    liar.reseal()
    with pytest.raises(
        ModelError,
        match=r"the self-check cannot be made|picture \d .* cannot be decoded",
    ):
        kd.load(liar.folder)


def test_each_picture_with_a_transparent_colour_shows_it():
    """The palette's index was one that no pixel had: a machine that ignored
    transparency passed.
    """
    files = self_check.pictures(BRANCHES, self_check.SIDE, 16)
    branches = [branch for branch in BRANCHES if branch[0] != "HEIF" or HEIF]
    for (_, mode, _, options), content in zip(branches, files, strict=True):
        if "transparency" in options:
            with Image.open(io.BytesIO(content)) as image:
                alpha = np.asarray(image.convert("RGBA"))[..., 3]
            assert (alpha == 0).sum() >= 1, mode
            assert (alpha == 255).mean() > 0.5, mode


def test_the_graph_sees_all_levels():
    files = self_check.pictures(BRANCHES[:4], 64, 16)
    with Image.open(io.BytesIO(files[0])) as image:
        pixels = np.asarray(image)
    assert pixels.min() < 5
    assert pixels.max() > 250
