"""`--accept`: what a sentence may say, the first graph that keeps it, and by how much
the others miss.
"""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from subjects import PIXELS

from kd.core.errors import ModelError
from kd.deploy.export import graphs
from kd.deploy.export.export import write
from kd.deploy.export.flags import (
    ExportOptions,
    NotAcceptedError,
    missed_limits,
    normalized_limits,
    parse_limits,
)
from kd.deploy.export.parity import compare, eager_runner
from kd.deploy.serve.engines import open_graph
from kd.deploy.serve.model import describe, load
from kd.parts.exporters import openvino
from kd.parts.tasks import single_label


def test_a_sentence_is_read_as_limits():
    assert parse_limits("drop<=2  ms<=5.5 mb<=4 ece<=0") == {
        "drop": 2.0,
        "ms": 5.5,
        "mb": 4.0,
        "ece": 0.0,
    }
    assert normalized_limits(" teacher-drop<=1.5  mb<=4 ") == "teacher-drop<=1.5 mb<=4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ms<5", r"'ms<5' is not WORD<=NUMBER, such as"),
        ("ms <= 5", "'ms' is not WORD<=NUMBER"),
        ("ms<=fast", "is not WORD<=NUMBER"),
        ("ms<=nan", "is not WORD<=NUMBER"),
        ("ms<=1e9", "is not WORD<=NUMBER"),
        ("drop<=-1", "is not WORD<=NUMBER"),
        ("ms<=0", "'ms<=0' is out of range"),
        ("drop<=101", "'drop<=101' is out of range"),
        ("dorp<=1", "'dorp' is not one of drop, teacher-drop, ece, ms, mb"),
        ("mb<=1 mb<=2", "'mb' is repeated"),
        ("  ", "is empty"),
    ],
)
def test_malformed_limits_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_limits(text)


def test_it_says_by_how_much_a_graph_misses():
    values = {"drop": 2.5, "mb": 4.0, "ece": float("nan")}
    assert missed_limits(values, {"drop": 2, "mb": 4, "ms": 1, "ece": 3}) == [
        "drop by 0.5 (2.5)",
        "ece by nan (nan)",
    ]


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("brief")
def test_the_first_graph_that_keeps_the_sentence_is_exported(
    subject, tmp_path, monkeypatch
):
    """model.onnx is too large, so that int8 is made, measured through kd-serve and
    loaded; the card says so.

    OpenVINO's graph, two files, is too large as well, and of it nothing is left.
    """

    def large(exporter, path, network):
        path.write_bytes(b"<net/>")
        path.with_suffix(".bin").write_bytes(bytes(10**6))

    monkeypatch.setattr(openvino, "installed", lambda name: True)
    monkeypatch.setattr(openvino.OpenVINO, "write", large)
    float32 = write(
        subject(), tmp_path / "float32", ExportOptions(accept="drop<=0 ece<=100")
    )
    assert float32.manifest["accepted"]["file"] == "model.onnx"
    assert "model.int8.onnx" not in files(float32.folder)
    size = (float32.folder / "model.onnx").stat().st_size / 1e6
    text = f"drop<=20 ms<=10000 mb<={size - 0.005:.3f}"
    written = write(subject(), tmp_path / "export", ExportOptions(accept=text))
    accepted = json.loads((written.folder / "manifest.json").read_text())["accepted"]
    assert (accepted["sentence"], accepted["file"], accepted["threads"]) == (
        text,
        "model.int8.onnx",
        1,
    )
    assert 0 < accepted["found"]["ms"] <= 10000
    assert accepted["found"]["mb"] * 1e6 == pytest.approx(
        (written.folder / "model.int8.onnx").stat().st_size, abs=51
    )
    assert describe(written.folder).file == "model.int8.onnx"
    assert "not accepted: openvino.xml misses mb by" in "\n".join(written.lines)
    assert files(written.folder) == {*files(float32.folder), "model.int8.onnx"}
    card = (written.folder / "README.md").read_text()
    assert f'accepted "{text}": model.int8.onnx with drop ' in card
    assert card.index("| model.int8.onnx") < card.index("| model.onnx")
    assert card.index("graph  model.int8.onnx") < card.index("graph  model.onnx")
    missed = re.search(
        r"not accepted: model.onnx misses mb by ([0-9.]+)", "\n".join(written.lines)
    )
    assert missed
    assert float(missed[1]) == pytest.approx(
        0.005, abs=0.00105
    )  # the bound and the miss are rounded, to 0.001


@pytest.mark.usefixtures("brief")
def test_nothing_is_written_where_nothing_keeps_it(subject, tmp_path):
    with pytest.raises(NotAcceptedError) as raised:
        write(subject(), tmp_path / "export", ExportOptions(accept="mb<=0.001"))
    assert raised.value.exit_code == 3
    text = str(raised.value)
    assert text.startswith(
        '--accept: nothing keeps "mb<=0.001". model.onnx misses mb by '
    )
    for name in (
        "model.int8.onnx misses mb by ",
        "openvino.xml: openvino is not installed",
    ):
        assert name in text
    assert "\n" not in text
    assert not (tmp_path / "export").exists()


@pytest.mark.usefixtures("brief")
def test_a_graph_that_cannot_be_written_is_no_end(subject, tmp_path, monkeypatch):
    def fails(source, path):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(graphs.runtimes, "write_int8", fails)
    message = r"model\.int8\.onnx: cannot be written \(RuntimeError: no kernel\)"
    with pytest.raises(NotAcceptedError, match=message):
        write(subject(), tmp_path / "export", ExportOptions(accept="mb<=0.001"))


def test_a_graph_is_compared_with_the_recorded_teacher(subject, tmp_path):
    base = subject()
    with pytest.raises(ModelError, match="teacher-drop has nothing to compare with"):
        write(base, tmp_path / "export", ExportOptions(accept="teacher-drop<=1"))
    metrics = {"accuracy": 0.7, "teacher_accuracy": 0.75}
    base = subject(provenance={**base.provenance, "metrics": metrics})
    written = write(base, tmp_path / "export", ExportOptions(accept="teacher-drop<=6"))
    assert written.manifest["accepted"]["found"] == {"teacher-drop": pytest.approx(5.0)}
    assert "below its teacher" not in "\n".join(written.lines)
    written = write(base, tmp_path / "export", ExportOptions(accept="drop<=1"))
    assert "the student itself is 5.0 points below" in "\n".join(written.lines)


@pytest.mark.slow
def test_openvinos_graph_is_accepted(subject, tmp_path):
    pytest.importorskip("openvino")
    written = write(
        subject(), tmp_path / "export", ExportOptions(accept="drop<=0 mb<=0.1")
    )
    assert written.manifest["accepted"]["file"] == "openvino.xml", written.lines
    assert written.manifest["accepted"]["found"]["mb"] < 0.1
    assert describe(written.folder).file == "openvino.xml"
    assert load(describe(written.folder), 1, 1).engine(PIXELS[:2]).shape == (2, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_ten_judgements_hold_on_images_that_chose_nothing(
    subject, tmp_path, record_property
):
    """What is said of int8 on one half of the images, accepted or refused, is so within
    the interval of the other.

    Such an interval misses one time in 40 where the drop is the bound itself, and
    processors differ in their int8 products: of ten three miss once in 600. To accept
    all of them would be right in six, to refuse all in six.
    """
    right = 0
    accepted = 0
    for trial in range(10):
        base = subject()
        draw = np.random.default_rng(trial)
        pixels = draw.integers(0, 256, (4000, 3, 16, 16), np.uint8)
        torch.manual_seed(trial)
        with torch.no_grad():
            for parameter in base.student.network.parameters():  # another student
                parameter += 0.02 * torch.randn_like(parameter)
            labels = base.student.answer(torch.from_numpy(pixels)).argmax(1).numpy()
        wrong = draw.random(4000) < 0.3
        labels[wrong] = draw.integers(0, 3, int(wrong.sum()))

        def images(limit, training=False, pixels=pixels, labels=labels):
            yield pixels[: min(limit, 2000)], labels[: min(limit, 2000)]

        base = replace(base, images=lambda images=images: nullcontext(images))
        bound = (0.0, 0.2, 0.5, 1.0, 2.0)[trial % 5]
        text = f"drop<={bound:g} mb<=0.1"  # less than model.onnx takes
        folder = tmp_path / str(trial)
        try:
            write(base, folder, ExportOptions(accept=text, calibrate=False))
            is_accepted = True
        except NotAcceptedError:
            write(base, folder, ExportOptions(int8=True, calibrate=False))
            is_accepted = False
        runners = {"model.int8.onnx": open_graph(folder / "model.int8.onnx")}
        outputs = compare(
            eager_runner(base.student), runners, [(pixels[2000:], labels[2000:])]
        )
        low, high = outputs.drop_interval(
            "model.int8.onnx", single_label.build(single_label.Options())
        )
        right += low <= bound / 100 if is_accepted else high >= bound / 100
        accepted += is_accepted
    record_property("tried", 10)
    print(f"right in {right} of 10, {accepted} accepted and {10 - accepted} refused")
    assert right >= 8
    assert 0 < accepted < 10
