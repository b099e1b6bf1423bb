"""The self-check: planted faults are found, each by its line, and nothing honest is
called wrong.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from liars import INT8, Liar
from onnx import helper, numpy_helper
from PIL import Image, ImageOps, JpegImagePlugin
from subjects import SIZE

import kd
from kd.core.errors import MissingExtra, ModelError
from kd.deploy.predict.predict import PredictOptions, predict
from kd.deploy.serve import self_check
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe
from kd.deploy.serve.self_check import FILE, SelfCheckError
from kd.deploy.serve.service import Service
from kd.deploy.verify.verify import VerifyOptions, verify
from kd.files.pixels import BRANCHES, to_rgb
from kd.parts import registry

Array = Callable[[np.ndarray], np.ndarray]


def graph(
    change: Callable[[onnx.GraphProto], None], name: str = "model.onnx"
) -> Callable[[Liar], str]:
    """Return a fault that changes a graph."""

    def plant(liar: Liar) -> str:
        model = onnx.load(liar.folder / name)
        before = model.SerializeToString()
        change(model.graph)
        assert model.SerializeToString() != before
        onnx.save(model, liar.folder / name)
        return name

    return plant


def tensors(
    change: Array, applies: Callable[[onnx.TensorProto], bool]
) -> Callable[[onnx.GraphProto], None]:
    def changed(proto: onnx.GraphProto) -> None:
        for tensor in proto.initializer:
            if applies(tensor):
                values = numpy_helper.to_array(tensor)
                tensor.CopyFrom(
                    numpy_helper.from_array(
                        change(values).astype(values.dtype), tensor.name
                    )
                )

    return changed


def floats(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1


def named(text: str) -> Callable[[onnx.TensorProto], bool]:
    return lambda tensor: text in tensor.name


def to_bf16(values: np.ndarray) -> np.ndarray:
    return (
        (values.view(np.uint32) + 0x8000 & 0xFFFF0000)
        .astype(np.uint32)
        .view(np.float32)
    )


def exchanged(proto: onnx.GraphProto) -> None:
    """Exchange the channels of the input."""
    for node in proto.node:
        node.input[:] = [
            "bgr" if source == "image" else source for source in node.input
        ]
    proto.initializer.append(numpy_helper.from_array(np.array([2, 1, 0]), "order"))
    proto.node.insert(
        0, helper.make_node("Gather", ["image", "order"], ["bgr"], axis=1)
    )


def added(number: float) -> Callable[[onnx.GraphProto], None]:
    """Add a number to each logit."""

    def changed(proto: onnx.GraphProto) -> None:
        name = proto.output[0].name
        for node in proto.node:
            node.output[:] = [
                "before" if output == name else output for output in node.output
            ]
        proto.initializer.append(
            numpy_helper.from_array(np.array([number], np.float32), "bias")
        )
        proto.node.append(helper.make_node("Add", ["before", "bias"], [name]))

    return changed


def attribute(kind: str, name: str, value: object) -> Callable[[onnx.GraphProto], None]:
    def changed(proto: onnx.GraphProto) -> None:
        for node in (
            candidate for candidate in proto.node if candidate.op_type == kind
        ):
            remaining = [entry for entry in node.attribute if entry.name != name]
            del node.attribute[:]
            node.attribute.extend([*remaining, helper.make_attribute(name, value)])

    return changed


def random(scale: float) -> Array:
    return lambda values: (
        values * (1 + scale * np.random.default_rng(1).standard_normal(values.shape))
    )


DIFFER = "differ from those at the export"
DECODES = r"the pixels of self-check picture \d+ \(.*\)"
HASH = "sha256"
GRAPHS: dict[str, Callable[[Liar], str]] = {
    "channels exchanged": graph(exchanged),
    "bias + 1e-2": graph(added(1e-2)),
    "another padding": graph(attribute("Conv", "pads", [1, 1, 0, 0])),
    "weights of an earlier step": graph(tensors(random(1e-2), floats)),
    "bf16 for float32": graph(tensors(to_bf16, floats)),
    "float16 for float32": graph(tensors(lambda w: w.astype(np.float16), floats)),
    "no temperature": graph(tensors(lambda w: 1.02 * w, named("head.weight"))),
    "classes exchanged": graph(
        tensors(lambda w: np.roll(w, 1, 0), named("head.weight"))
    ),
    "another mean": graph(tensors(lambda s: s + 0.01, named("shift"))),
    "another epsilon": graph(attribute("LayerNormalization", "epsilon", 1e-3)),
    "no softmax": graph(attribute("Softmax", "axis", 1)),
    "positions rolled": graph(tensors(lambda p: np.roll(p, 1, 1), named("pos_embed"))),
    "a weight that is no number": graph(
        tensors(lambda b: b + np.nan, named("norm1.bias"))
    ),
    "int8 scales halved": graph(tensors(lambda s: s / 2, named("_scale")), INT8),
    "int8 weights saturated": graph(
        tensors(lambda w: w.clip(-48, 48), lambda tensor: "_quantized" in tensor.name),
        INT8,
    ),
}


@pytest.mark.parametrize("fault", GRAPHS)
def test_a_fault_of_a_graph_is_found_though_its_hash_is_repaired(
    fault, honest, tmp_path
):
    liar = Liar(shutil.copytree(honest, tmp_path / "export"))
    file = GRAPHS[fault](liar)
    liar.reseal()
    with pytest.raises(
        SelfCheckError,
        match=(
            f"the outputs of {file} {DIFFER}: largest difference .* is allowed;"
            " onnxruntime"
        ),
    ):
        kd.load(liar.folder, file)
    kd.load(liar.folder, file, self_check=False)


def resized(filter: Image.Resampling) -> Callable[..., Image.Image]:
    real = Image.Image.resize
    return lambda self, size, _=None, *args, **kwargs: real(
        self, size, filter, *args, **kwargs
    )


def blue_first(
    self: Image.Image, *args, real=Image.Image.resize, **kwargs
) -> Image.Image:
    return Image.fromarray(np.asarray(real(self, *args, **kwargs))[..., ::-1])


def brighter(
    self: Image.Image, *args, real=Image.Image.resize, **kwargs
) -> Image.Image:
    """Add one level: far below what another filter changes, and everywhere."""
    return real(self, *args, **kwargs).point(lambda value: min(255, value + 1))


def inverted(
    self: Image.Image, mode: str, *args, real=Image.Image.convert, **kwargs
) -> Image.Image:
    """Convert CMYK as if its inks were inverted."""
    inks = self.point(lambda value: 255 - value) if self.mode == "CMYK" else self
    return real(inks, mode, *args, **kwargs)


def on_black(
    mode: str, size: tuple[int, int], color: object = 0, real=Image.new
) -> Image.Image:
    return real(mode, size, "black")


DECODERS = {
    "bilinear for bicubic": (Image.Image, "resize", resized(Image.Resampling.BILINEAR)),
    "nearest for bicubic": (Image.Image, "resize", resized(Image.Resampling.NEAREST)),
    "EXIF is ignored": (ImageOps, "exif_transpose", lambda image, in_place=False: None),
    "a decoder of BGR": (Image.Image, "resize", blue_first),
    "one level brighter": (Image.Image, "resize", brighter),
    "CMYK is inverted": (Image.Image, "convert", inverted),
    "transparent on black": (Image, "new", on_black),
    "a JPEG is not reduced": (
        JpegImagePlugin.JpegImageFile,
        "draft",
        lambda self, mode, size: None,
    ),
}


@pytest.mark.parametrize("fault", DECODERS)
def test_another_decoder_is_found(fault, honest, monkeypatch):
    monkeypatch.setattr(*DECODERS[fault])
    with pytest.raises(SelfCheckError, match=f"{DECODES} {DIFFER}.* Pillow"):
        kd.load(honest)


def no_decoder(
    mode: str, name: str, args: object, extra: object = (), real=Image._getdecoder
) -> object:
    if name == "jpeg":
        raise OSError("decoder jpeg not available")
    return real(mode, name, args, extra)


def test_a_machine_that_cannot_decode_a_picture_is_named_and_not_the_export(
    honest, monkeypatch
):
    monkeypatch.setattr(Image, "_getdecoder", no_decoder)
    with pytest.raises(
        SelfCheckError,
        match=r"picture 0 of the self-check cannot be decoded on this machine",
    ):
        kd.load(honest)
    service = Service(describe(honest), Limits(), slots=1, threads=1)
    service.load()
    problem = service.admission_error()
    assert not service.ready
    assert problem is not None
    assert (
        "picture 0 of the self-check cannot be decoded on this machine"
        in problem.detail
    )
    service.close()
    row = next(
        row
        for row in verify(VerifyOptions(export=honest)).rows
        if row.what == "self_check/model.onnx"
    )
    assert row.verdict == "WRONG"


def stored(folder: Path, **arrays: np.ndarray) -> Path:
    """Return an export whose self-check has other arrays, resealed."""
    liar = Liar(folder)
    original = dict(np.load(folder / FILE))
    np.savez(folder / FILE, **{**original, **arrays})
    liar.reseal()
    return folder


def bomb() -> np.ndarray:
    file = io.BytesIO()
    Image.new("1", (16_000, 10_000)).save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)


@pytest.mark.parametrize(
    "picture",
    [np.frombuffer(b"no picture", np.uint8), bomb()],
    ids=["text", "160 megapixels"],
)
def test_a_strangers_picture_is_a_wrong_row_of_kd_verify(picture, honest, tmp_path):
    folder = stored(shutil.copytree(honest, tmp_path / "export"), picture0=picture)
    rows = {row.what: row.verdict for row in verify(VerifyOptions(export=folder)).rows}
    assert rows["self_check/model.onnx"] == "WRONG"
    with pytest.raises(
        SelfCheckError, match="picture 0 of the self-check cannot be decoded"
    ):
        kd.load(folder)


def test_a_header_of_petabytes_is_refused(honest, tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**15,)}
    )
    folder = shutil.copytree(honest, tmp_path / "export")
    with (
        zipfile.ZipFile(honest / FILE) as old,
        zipfile.ZipFile(folder / FILE, "w") as new,
    ):
        for name in old.namelist():
            new.writestr(
                name, header.getvalue() if name == "pixels.npy" else old.read(name)
            )
    Liar(folder).reseal()
    with pytest.raises(ModelError, match="the self-check cannot be made"):
        kd.load(folder)
    assert any(
        row.verdict == "WRONG"
        for row in verify(VerifyOptions(export=folder)).rows
        if FILE in row.what
    )


@pytest.mark.parametrize("gone", ["self_check", "self_check/model.onnx"])
def test_an_export_with_pictures_and_without_their_entry_is_damaged_and_not_old(
    gone, honest, tmp_path
):
    liar = Liar(shutil.copytree(honest, tmp_path / "export"))
    section, _, graph = gone.partition("/")
    del (liar.manifest[section] if graph else liar.manifest)[graph or section]
    liar.reseal()
    with pytest.raises(ModelError, match=r"it has no self_check of model.onnx"):
        kd.load(liar.folder)
    assert any(
        row.verdict == "WRONG" for row in verify(VerifyOptions(export=liar.folder)).rows
    )


def test_another_crop_is_found_and_what_has_another_hash_is_not_read(honest, tmp_path):
    liar = Liar(shutil.copytree(honest, tmp_path / "crop"))
    liar.set("input/crop", 0.8)
    liar.reseal()
    with pytest.raises(SelfCheckError, match=DECODES):
        kd.load(liar.folder)
    liar = Liar(shutil.copytree(honest, tmp_path / "labels"))
    liar.set("label_names", ["pear", "apple", "fig"], "config.json")
    with pytest.raises(ModelError, match=HASH):
        kd.load(liar.folder)
    shutil.copy(liar.folder / "kd.json", liar.folder / FILE)
    shutil.copy(honest / "config.json", liar.folder)
    with pytest.raises(ModelError, match=HASH):
        kd.load(liar.folder)
    liar.reseal()  # a stranger may have written it
    with pytest.raises(ModelError, match="the self-check cannot be made"):
        kd.load(liar.folder)


def test_the_oldest_runtime_that_reads_a_graph_is_compared(honest, tmp_path):
    entry = json.loads((honest / "manifest.json").read_text())["self_check"][
        "model.onnx"
    ]
    reader = registry.exporter("model.onnx").reader
    assert (entry["opset"], entry["least"]) == (20, reader(entry["ir"], 20))
    assert reader(10, 22) == "1.21"
    assert reader(10, 23) == "1.23"
    liar = Liar(shutil.copytree(honest, tmp_path / "export"))
    liar.set("self_check/model.onnx/least", "99.0")
    liar.reseal()
    with pytest.raises(MissingExtra, match=r"needs onnxruntime 99\.0, and .* is here"):
        kd.load(liar.folder)


def faulty(honest: Path, folder: Path) -> Path:
    liar = Liar(shutil.copytree(honest, folder))
    GRAPHS["bias + 1e-2"](liar)
    liar.reseal()
    return liar.folder


def test_the_endpoint_is_not_ready_and_says_why(honest, tmp_path, caplog):
    for checked, ready in ((True, False), (False, True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "kd.serve"):
            folder = faulty(honest, tmp_path / str(checked))
            service = Service(
                describe(folder, checked=checked), Limits(), slots=1, threads=1
            )
            service.load()
        assert service.ready == ready
        text = service.metrics.text().decode()
        if checked:
            problem = service.admission_error()
            assert problem is not None
            assert DIFFER in problem.detail
            assert DIFFER in caplog.text
            assert "\nkd_self_check 0.0\n" in text
        else:
            assert "the self-check is off" in caplog.text
            assert "kd_self_check" not in text
        service.close()
    service = Service(describe(honest), Limits(), slots=2, threads=1)
    service.load()
    assert b"\nkd_self_check 1.0\n" in service.metrics.text()
    service.close()


def test_kd_predict_and_kd_verify_find_it(honest, tmp_path, command):
    folder = faulty(honest, tmp_path / "export")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    answer = command(
        "predict", folder, tmp_path / "red.png", "--to", tmp_path / "o.csv"
    )
    assert (answer.code, (tmp_path / "o.csv").exists()) == (3, False)
    assert DIFFER in answer.err
    settings = PredictOptions(
        export=folder,
        images=str(tmp_path / "red.png"),
        to=tmp_path / "o.csv",
        self_check=False,
    )
    assert predict(settings, io.StringIO()).images == 1
    for export, verdict in ((honest, "right"), (folder, "WRONG")):
        rows = {
            row.what: row.verdict for row in verify(VerifyOptions(export=export)).rows
        }
        assert rows["self_check/model.onnx/allowed"] == verdict
    liar = Liar(shutil.copytree(honest, tmp_path / "loose"))
    liar.set("self_check/model.onnx/allowed", 50.0)
    liar.reseal()
    rows = {
        row.what: row.verdict for row in verify(VerifyOptions(export=liar.folder)).rows
    }
    assert rows["self_check/model.onnx/allowed"] == "WRONG"


def test_an_older_export_is_served_without(honest, tmp_path, caplog):
    liar = Liar(shutil.copytree(honest, tmp_path / "export"))
    del liar.manifest["self_check"]
    (liar.folder / FILE).unlink()
    liar.reseal()
    with caplog.at_level(logging.INFO, "kd.serve"):
        model = kd.load(liar.folder)
    assert caplog.text.count("it has no self-check") == 1
    assert model.check_itself() is None


@pytest.mark.parametrize("size", [self_check.SIDE, 64])
def test_the_pictures_are_drawn_alike_again_in_every_format(size):
    files = self_check.pictures(BRANCHES, size, 16)
    assert files == self_check.pictures(BRANCHES, size, 16)
    opened = [Image.open(io.BytesIO(file)) for file in files]
    assert [(image.format, image.mode) for image in opened] == [
        branch[:2] for branch in BRANCHES[: len(files)]
    ]
    assert all(np.asarray(to_rgb(image)).std() > 15 for image in opened)
    assert sum(map(len, files[:4])) < 400_000


def test_the_bound_of_a_graph_is_twice_its_distance_from_float32(tmp_path):
    def returning(value: float) -> Callable[[np.ndarray], np.ndarray]:
        return lambda pixels: np.full((len(pixels), 3), value, np.float32)

    engines = {"model.onnx": returning(1.0), "model.int8.onnx": returning(1.5)}
    bounds = self_check.write(tmp_path, engines, ("a", "b", "c"), SIZE, 1.0, 16)
    assert {name: entry["allowed"] for name, entry in bounds.items()} == {
        "model.onnx": 1e-4,
        "model.int8.onnx": 1.0,
    }
