"""`kd verify`: lies about what the endpoint does and what lies in the files, and honest
numbers of several labels.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from liars import (
    INT8,
    Liar,
    graph_of,
    honest_export,
    make_liar,
    painted,
    tasked,
    verify_export,
    wrong_rows,
)
from onnx import helper, numpy_helper
from PIL import Image
from safetensors.torch import load_file, save_file
from subjects import CLASSES, PIXELS
from vnni import needs_vnni

from kd.core.intervals import Samples, bootstrap_scores
from kd.core.scores import Scored
from kd.deploy.export import parity, variants
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.serve import self_check
from kd.deploy.serve.decoding import prepare
from kd.deploy.serve.engines import open_graph
from kd.deploy.verify.comparison import OPEN, RIGHT, WRONG
from kd.deploy.verify.verify import Verdict
from kd.parts.tasks import label_sets


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    """Time briefly."""
    monkeypatch.setattr(parity, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(variants, "SECONDS", 0.01)


@pytest.fixture(scope="session")
def honest(once) -> tuple[Path, Path]:
    """The folders of an export with all that it can claim, and of its images. Do not
    write into them.
    """
    folder = once("honest export", honest_export)
    return folder / "export", folder / "images"


def verdicts(verdict: Verdict) -> dict[str, str]:
    return {row.what: row.verdict for row in verdict.rows}


# --------------------------------------------------------------------------------
# the endpoint


def checked_again(liar: Liar, large: list[bytes], small: list[bytes]) -> None:
    """Write the self-check of the graphs as they are now, on these pictures, with
    bounds that fit.
    """
    size = liar.get("input/size")
    crop = liar.get("input/crop")
    pixels = np.stack([prepare(picture, size, crop).pixels for picture in large])
    crops = np.stack(
        [prepare(picture, self_check.SIDE, crop).pixels for picture in small]
    )
    labels = np.load(liar.folder / self_check.FILE)["labels"]
    engines = {
        name: open_graph(liar.folder / name) for name in liar.manifest["self_check"]
    }
    logits = {
        name: self_check.outputs(engine, pixels) for name, engine in engines.items()
    }
    arrays = {
        f"picture{i}": np.frombuffer(picture, np.uint8)
        for i, picture in enumerate(large + small)
    }
    arrays |= {"pixels": pixels, "crops": crops, "labels": labels, **logits}
    np.savez_compressed(liar.folder / self_check.FILE, **arrays)  # type: ignore[arg-type]
    for name in engines:
        bound = self_check.allowed(name, logits[name], logits["model.onnx"])
        liar.manifest["self_check"][name]["allowed"] = bound


def rolled(liar: Liar, name: str) -> None:
    """Roll the classes of a graph where it is asked for one image, as the endpoint
    asks.
    """
    path = liar.folder / name
    model = onnx.load(path)
    for node in model.graph.node:
        node.output[:] = [
            "batch_logits" if output == "logits" else output for output in node.output
        ]
    constants = {
        "roll_order": [1, 2, 0],
        "roll_one": [1],
        "roll_begin": [0],
        "roll_end": [1],
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(values, np.int64), key)
        for key, values in constants.items()
    )
    nodes = [
        ("Shape", ["image"], "roll_shape"),
        ("Slice", ["roll_shape", "roll_begin", "roll_end"], "roll_batch"),
    ]
    nodes.append(("Equal", ["roll_batch", "roll_one"], "roll_alone"))
    model.graph.node.extend(
        helper.make_node(kind, inputs, [output]) for kind, inputs, output in nodes
    )
    model.graph.node.append(
        helper.make_node(
            "Gather", ["batch_logits", "roll_order"], ["roll_logits"], axis=1
        )
    )
    model.graph.node.append(
        helper.make_node(
            "Where", ["roll_alone", "roll_logits", "batch_logits"], ["logits"]
        )
    )
    onnx.save(model, path)
    graph_of(liar, name)
    checked_again(liar, *self_check.large_and_small(liar.get("input/size"), 16))


@pytest.mark.parametrize("name", ["model.onnx", pytest.param(INT8, marks=needs_vnni)])
def test_a_graph_that_answers_otherwise_for_one_image_is_wrong(name, honest, tmp_path):
    liar = make_liar(honest, tmp_path, [lambda liar: rolled(liar, name)])
    engine = open_graph(liar.folder / name)
    pixels = PIXELS[:4]
    alone = np.concatenate([engine(image[None]) for image in pixels])
    np.testing.assert_allclose(
        alone, engine(pixels)[:, [1, 2, 0]], rtol=0.1, atol=0.1
    )  # it is the lie that is meant
    rows = verdicts(verify_export(liar.folder, honest[1]))
    assert rows[f"parity/{name}/correct"] == RIGHT  # which is counted on batches
    assert rows[f"random images/{name}"] == WRONG


def grey() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (127, 127, 127)).save(file, "PNG")
    return file.getvalue()


def test_pictures_of_the_self_check_that_are_not_made_from_the_seed_are_wrong(
    honest, tmp_path
):
    """Grey squares, with the pixels and outputs that belong to them: any graph would
    pass.
    """
    assert verdicts(verify_export(honest[0]))["self_check.npz"] == RIGHT
    large, small = (
        [grey() for _ in pictures] for pictures in self_check.large_and_small(16, 16)
    )
    liar = make_liar(honest, tmp_path, [lambda liar: checked_again(liar, large, small)])
    rows = verdicts(verify_export(liar.folder))
    assert [name for name, verdict in rows.items() if verdict == WRONG] == [
        "self_check.npz"
    ]


def test_another_encoder_may_make_other_pictures(honest, tmp_path):
    """Bytes of another Pillow prove nothing."""
    lies = [
        lambda liar: checked_again(liar, [grey()] * 4, [grey()]),
        lambda liar: liar.set("environment/packages/pillow", "9.9"),
    ]
    assert (
        verdicts(verify_export(make_liar(honest, tmp_path, lies).folder))[
            "self_check.npz"
        ]
        == OPEN
    )


# --------------------------------------------------------------------------------
# the files

TEXTS = {"license": "mit", "author": "somebody", "accuracy": "99.9 %"}


def titled(liar: Liar, name: str) -> None:
    model = onnx.load(liar.folder / name)
    helper.set_model_props(
        model,
        {
            **{entry.key: entry.value for entry in model.metadata_props},
            "license": TEXTS["license"],
        },
    )
    model.graph.node[0].metadata_props.add(key="author", value=TEXTS["author"])
    model.graph.doc_string = TEXTS["accuracy"]
    onnx.save(model, liar.folder / name)
    graph_of(liar, name)


@pytest.mark.parametrize("name", ["model.onnx", INT8])
def test_texts_in_a_graph_are_wrong(name, honest, tmp_path):
    liar = make_liar(honest, tmp_path, [lambda liar: titled(liar, name)])
    rows = verdicts(verify_export(liar.folder))
    assert [rows[f"{name}/{key}"] for key in ("license", "author", "doc_string")] == [
        WRONG
    ] * 3


def test_texts_in_the_weights_are_wrong(honest, tmp_path):
    def lie(liar: Liar) -> None:
        file = liar.folder / "model.safetensors"
        save_file(load_file(file), file, metadata={"format": "pt", **TEXTS})

    rows = verdicts(verify_export(make_liar(honest, tmp_path, [lie]).folder))
    assert rows["model.safetensors"] == WRONG


def test_texts_in_a_graph_of_openvino_are_wrong(tmp_path):
    pytest.importorskip("openvino")
    subject, _ = painted(tmp_path, PIXELS, np.zeros(len(PIXELS), np.int64))
    write(subject, tmp_path / "export", ExportOptions(openvino=True, calibrate=False))
    liar = Liar(tmp_path / "export")
    file = liar.folder / "openvino.xml"
    text = file.read_text()
    file.write_text(
        text.replace(
            "<conversion_parameters>",
            '<license value="mit" />\n<conversion_parameters>',
        )
    )
    graph_of(liar, "openvino.xml")
    liar.redraw()
    liar.reseal()
    verdict = verify_export(liar.folder)
    assert "license" in " ".join(wrong_rows(verdict)), verdict.line


def test_a_list_that_repeats_images_is_not_predicted(honest, tmp_path):
    """A list of two million lines took more than 150 s."""
    liar = make_liar(honest, tmp_path, [lambda liar: liar.rows(lambda rows: rows * 20)])
    verdict = verify_export(liar.folder, honest[1])
    assert verdicts(verdict)["images.csv/times"] == WRONG
    assert verdicts(verdict)["parity/model.onnx/correct"] == OPEN


# --------------------------------------------------------------------------------
# honest numbers


def scored(logits: torch.Tensor, truth: torch.Tensor) -> Scored:
    """Return what a run of several labels records for a student and a teacher of other
    logits, read from its file.
    """
    row = {}
    samples = {}
    for prefix, values in (
        ("", logits),
        ("teacher_", logits + torch.linspace(-3, 3, len(logits))[:, None]),
    ):
        scores = label_sets.score(values, truth)
        drawn = bootstrap_scores(
            lambda ids, values=values: label_sets.score(values[ids], truth[ids])["map"],
            len(truth),
        )
        row |= {
            prefix + key: torch.tensor(value).item() for key, value in scores.items()
        }  # float32, as the ranks have
        samples[f"{prefix}map"] = Samples(
            scores["map"], replicates=drawn, images=len(truth)
        )
    record = Scored("val", 3, "0" * 16, len(truth), 2, row, samples)
    return Scored.read(json.loads(json.dumps(record.record())))


def test_differences_of_several_labels_are_those_of_the_scores(tmp_path):
    draw = np.random.default_rng(3)
    sets = draw.integers(0, 2, (len(PIXELS), len(CLASSES)), np.int8)
    subject, images = painted(tmp_path, PIXELS, sets)
    with torch.no_grad():
        logits = subject.student.answer(torch.from_numpy(PIXELS)).double()
    subject = replace(
        tasked(subject, label_sets),
        scored=(scored(logits, torch.from_numpy(sets) > 0), None),
    )
    write(subject, tmp_path / "export", ExportOptions())
    manifest = json.loads((tmp_path / "export/manifest.json").read_text())["scores"]
    student, teacher = (
        manifest["models"][name]["map"]["value"] for name in ("student", "teacher")
    )
    assert abs(student - teacher) > 0.01
    assert manifest["differences"]["teacher"]["value"] == student - teacher
    verdict = verify_export(tmp_path / "export", images)
    assert not wrong_rows(verdict), wrong_rows(verdict)
