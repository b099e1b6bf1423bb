"""`kd verify` of what a hostile stranger wrote: rows or one line, no traceback, no
hang, nothing that is executed.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from liars import INT8, Liar, graph_of, honest_export, verify_export, wrong_rows
from onnx import TensorProto, helper, numpy_helper

from kd.core.errors import KdError
from kd.deploy.export import parity, variants
from kd.deploy.verify import child
from kd.files.manifest import MANIFEST

SECONDS = (
    20.0  # of a graph here: a process starts in 1 to 5 on a machine with other work
)
RAN = Path("/tmp/kd_verify_executed")


@pytest.fixture(scope="session")
def honest(once) -> tuple[Path, Path]:
    """The folders of an export with all that it can claim, and of its images. Do not
    write into them.
    """
    folder = once("honest export", honest_export)
    return folder / "export", folder / "images"


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    """Time briefly, and wait briefly for a graph."""
    monkeypatch.setattr(parity, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(variants, "SECONDS", 0.01)
    monkeypatch.setattr(child, "SECONDS", SECONDS)


def raw(content: bytes) -> Callable[[Liar], bool]:
    """Write manifest.json as it is, and seal nothing."""

    def tell(liar: Liar) -> bool:
        (liar.folder / MANIFEST).write_bytes(content)
        return True

    return tell


def setting(path: str, value: Any, file: str = MANIFEST) -> Callable[[Liar], None]:
    return lambda liar: liar.set(path, value, file)


def written(name: str, content: bytes) -> Callable[[Liar], None]:
    def tell(liar: Liar) -> None:
        (liar.folder / name).write_bytes(content)
        if name.endswith((".onnx", ".xml")):
            if name.endswith(".xml"):
                (liar.folder / name).with_suffix(".bin").write_bytes(b"")
            liar.manifest["parity"][name] = {**liar.manifest["parity"]["model.onnx"]}
            graph_of(liar, name)

    return tell


def linked(target: str) -> Callable[[Liar], bool]:
    """A listed file that is a link; of a device hash and size are made up."""

    def tell(liar: Liar) -> bool:
        liar.reseal()
        (liar.folder / "kd.json").unlink()
        (liar.folder / "kd.json").symlink_to(target)
        return True

    return tell


def pipe(liar: Liar) -> bool:
    liar.reseal()
    (liar.folder / "kd.json").unlink()
    os.mkfifo(liar.folder / "kd.json")
    return True


def directory(liar: Liar) -> bool:
    (liar.folder / "model.onnx").unlink()
    (liar.folder / "model.onnx").mkdir()
    return False


class Executed:
    def __reduce__(self):
        return os.system, (f"touch {RAN}",)


def pickled(liar: Liar) -> None:
    import pickle

    (liar.folder / "model.safetensors").write_bytes(pickle.dumps(Executed()))


def cut(liar: Liar) -> None:
    file = liar.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def graph(
    nodes: list[Any], output: Any, constants: list[Any] = ()
) -> Callable[[Liar], None]:  # type: ignore[assignment]
    """A graph of a few nodes from `image` to `logits`."""

    def tell(liar: Liar) -> None:
        image = helper.make_tensor_value_info(
            "image", TensorProto.UINT8, ["batch", 3, 16, 16]
        )
        built = helper.make_graph(nodes, "hostile", [image], [output], list(constants))
        model = helper.make_model(
            built, opset_imports=[helper.make_opsetid("", 20)], ir_version=9
        )
        (liar.folder / "model.onnx").write_bytes(model.SerializeToString())
        graph_of(liar, "model.onnx")

    return tell


def logits(kind: int = TensorProto.FLOAT, shape: Any = ("batch", 3)) -> Any:
    return helper.make_tensor_value_info("logits", kind, list(shape))


def constant(name: str, value: Any, kind: type) -> Any:
    return numpy_helper.from_array(np.array(value, kind), name)


def endless() -> Callable[[Liar], None]:
    """A loop of 2**62 turns."""
    places = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in (
        ("turn", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("x", TensorProto.FLOAT, [1, 3]),
        ("go2", TensorProto.BOOL, []), ("y", TensorProto.FLOAT, [1, 3]))]  # fmt: skip
    body = [
        helper.make_node("Identity", ["go"], ["go2"]),
        helper.make_node("Sin", ["x"], ["y"]),
    ]
    loop = helper.make_graph(body, "body", places[:3], places[3:])
    nodes = [helper.make_node("Loop", ["most", "yes", "start"], ["logits"], body=loop)]
    constants = [
        constant("most", 2**62, np.int64),
        constant("yes", True, np.bool_),
        constant("start", [[0, 0, 0]], np.float32),
    ]
    return graph(nodes, logits(shape=(1, 3)), constants)


def outside(liar: Liar) -> None:
    """Weights that lie in a file of the system."""
    model = onnx.load(liar.folder / "model.onnx")
    tensor = max(model.graph.initializer, key=lambda weight: len(weight.raw_data))
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../../../../etc/passwd")
    (liar.folder / "model.onnx").write_bytes(model.SerializeToString())
    graph_of(liar, "model.onnx")


def listed(text: str) -> Callable[[Liar], None]:
    return written("images.csv", text.encode())


def stamped(liar: Liar) -> None:
    liar.manifest["accepted"] |= {"threads": 300, "sentence": "drop<=20 mb<=5 ms<=9"}
    liar.manifest["accepted"]["found"] |= {"ms": 1.0}


SCALE = [helper.make_node("ConstantOfShape", ["many"], ["logits"])]
FAST = {"p50_ms": 1, "p99_ms": 1, "images_per_second": 1, "memory_mb": 1}
ONE = [constant("flat", [1], np.int64)]
BOMB = (
    b'<!DOCTYPE a [<!ENTITY b "b">]><net><data element_type="f32" size="9"/>&b;</net>'
)
HOSTILE: dict[str, Callable[[Liar], Any]] = {
    "no JSON": raw(b"{"),
    "a list": raw(b"[]"),
    "deep": raw(b'{"files": ' + b"[" * 100_000),
    "deep and whole": raw(b'{"files": {}, "a": ' + b'{"a": ' * 900 + b"1" + b"}" * 901),
    "no UTF-8": raw(b'{"files": "\xff\xfe"}'),
    "files a number": raw(b'{"files": 3, "checksum": 5}'),
    "files of numbers": raw(b'{"files": {"kd.json": 3}}'),
    "nothing but files": raw(b'{"files": {}}'),
    "no scores": setting("scores", None),
    "NaN": setting("parity/model.onnx/correct", float("nan")),
    "a huge number": setting("parity/model.onnx/correct", 10**400),
    "text for a number": setting("parity/model.onnx/correct", "many"),
    "text for graphs": setting("parity", "all right"),
    "labels by name": setting("about/labels", {"apple": 1}),
    "size": setting("input/size", 10**9),
    "width": setting("output/width", -1),
    "control characters": setting("name", "a\x1b[2Jb"),
    "a path out of the folder": raw(b'{"files": {"../../../../etc/passwd": {"bytes": 1, "sha256": "0"}}}'),
    "many keys": lambda liar: liar.manifest.update({f"key {i}": i for i in range(20_000)}),
    "300 threads": stamped,
    "many threads": setting("variants/model.onnx/speed/999999999999", FAST),
    "another rule": setting("output/defer/rule", {"__class__": 1}),
    "a long sentence": setting("accepted/sentence", "drop<=1 " * 100_000),
    "a pickle": pickled,
    "cut weights": cut,
    "a header of 2**60 bytes": written("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
    "no bytes": written("model.onnx", b""),
    "noise": written(INT8, bytes(range(256)) * 9),
    "an endless loop": endless(),
    "few outputs": graph([helper.make_node("Cast", ["flat"], ["logits"], to=1)], logits(shape=(1,)), ONE),
    "another shape": graph([helper.make_node("Cast", ["image"], ["logits"], to=1)], logits(shape=("batch", 3, 16, 16))),
    "texts": graph([helper.make_node("Cast", ["image"], ["logits"], to=8)], logits(8, ("batch", 3, 16, 16))),
    "memory": graph(SCALE, logits(shape=(None, None)), [constant("many", [2**20, 2**20], np.int64)]),
    "weights of the system": outside,
    "no bytes of OpenVINO": written("openvino.xml", b""),
    "entities": written("openvino.xml", BOMB),
    "a long field": listed("0,0,1," + "a" * 200_000 + "\n"),
    "no list": written("images.csv", b"\xff\xfe\x00\x01"),
    "an unknown label": listed("00000000,00000000,1,unknown\n"),
    "an empty list": listed(""),
    "a link out": linked("/etc/passwd"),
    "a link to a device": linked("/dev/zero"),
    "a link to itself": linked("kd.json"),
    "a pipe": pipe,
    "a folder": directory,
    "no such network": setting("architecture", "vit_of_nobody", "config.json"),
    "a module": setting("architecture", {"module": "os:system"}, "config.json"),
    "another argument": setting("model_args/depth", 10**6, "config.json"),
    "a list for kd.json": written("kd.json", b"[]"),
    "a card of bytes": written("README.md", b"\xff\x00\x1b" * 100),
}  # fmt: skip


UNDRAWN = (
    "a card of bytes",
    "no scores",
    "text for graphs",
    "labels by name",
    "a huge number",
    "text for a number",
)


SLOW = {
    *(
        "an endless loop",
        "many threads",
        "memory",
        "another shape",
        "texts",
        "deep and whole",
        "a huge number",
    ),
    *(
        "text for a number",
        "text for graphs",
        "size",
        "width",
        "control characters",
        "many keys",
        "another rule",
    ),
    *(
        "a long sentence",
        "cut weights",
        "no bytes",
        "no bytes of OpenVINO",
        "another argument",
        "an unknown label",
    ),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in HOSTILE],
)
def test_nothing_of_a_stranger_breaks_it(kind, honest, tmp_path):
    export, images = honest
    RAN.unlink(missing_ok=True)
    liar = Liar(shutil.copytree(export, tmp_path / "export"))
    if kind != "many threads":
        liar.manifest.pop("variants")
    if not HOSTILE[kind](liar):
        if kind not in UNDRAWN:
            liar.redraw()
        liar.reseal()
    message = ""
    code = 0
    try:
        verdict = verify_export(liar.folder, images)
        message = "\n".join(verdict.lines)
        code = 1 if wrong_rows(verdict) else 0
        json.dumps(verdict.rows)
    except KdError as error:
        message = str(error)
        code = error.exit_code
    assert code in (1, 2, 3) or kind in ("control characters", "a module"), message
    assert code in (0, 1) or "\n" not in message
    assert "\x1b" not in message
    assert not RAN.exists()
