"""`kd verify`: each planted lie has a row that says so, or that it was not checked; no
honest export is called a liar.

One export is made, with all that it can claim; each lie is planted in a copy and sealed
with kd's own code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, get_args, get_origin, is_typeddict

import numpy as np
import pytest
import torch
from liars import (
    INT8,
    Liar,
    answers,
    graph_of,
    honest_export,
    make_liar,
    painted,
    tasked,
    verify_export,
    wrong_rows,
)
from pieces import slow
from safetensors.torch import load_file, save_file
from subjects import CLASSES, PIXELS, SIZE, VIT, small_subject

from kd.core.errors import KdError
from kd.deploy.export import parity, variants
from kd.deploy.export.claims import IMAGES, Beside, Manifest
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import Subject
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.shift import measure
from kd.deploy.verify.comparison import (
    OPEN,
    RIGHT,
    RULES,
    WRONG,
    Claims,
    key_types,
    without_annotation,
)
from kd.deploy.verify.files import present_files
from kd.deploy.verify.graph_outputs import _repeated_facts
from kd.deploy.verify.images import read_image_list
from kd.deploy.verify.verify import NotVerifiedError
from kd.files.manifest import MANIFEST
from kd.models import runtimes
from kd.models.classifier import tensors_digest
from kd.models.load_classifier import Spec, load
from kd.parts.tasks import embedding, label_sets
from kd.parts.tasks.single_label import SingleLabel


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


def test_an_honest_export_is_right_in_all_that_is_compared(honest):
    verdict = verify_export(*honest)
    assert not wrong_rows(verdict), wrong_rows(verdict)
    verdict.require()
    rows = {row.what: row for row in verdict.rows}
    assert float(rows["parity/model.int8.onnx/ece"].claimed) > 0
    right = (
        "variants/model.int8.onnx/drop",
        "output/defer/threshold",
        "accepted/sentence",
        "chain/student/exported",
    )
    for name in (
        *right,
        "images.csv/times",
        "README.md",
        "validation/model.onnx",
        "calibration/temperature",
    ):
        assert rows[name].verdict == RIGHT, rows[name]
    assert "variants/model.onnx/speed/1/p50_ms" in rows
    assert "read it" in (honest[0] / "README.md").read_text()
    open_rows = [row for row in verdict.rows if row.verdict == OPEN]
    assert all(row.why for row in open_rows), open_rows
    assert verdict.line.startswith(
        f"right: {len(verdict.rows) - len(open_rows)}; wrong: 0; not checked:"
        f" {len(open_rows)} ("
    )
    with pytest.raises(NotVerifiedError) as raised:
        verdict.require(strict=True)
    assert raised.value.exit_code == 1


def test_without_images_and_run_the_files_alone_are_compared(honest):
    verdict = verify_export(honest[0])
    assert not wrong_rows(verdict), wrong_rows(verdict)
    rows = {row.what: row for row in verdict.rows}
    assert rows["parity/model.onnx/correct"][3:] == (OPEN, "--data shows it")
    assert rows["chain/student/step"][3:] == (OPEN, "--run shows it")
    assert rows["files/model.onnx/sha256"].verdict == RIGHT


def test_every_key_of_an_export_is_in_the_types(honest):
    """A claim without a type would be WRONG in an honest export; one that nothing made
    again is `not checked`.
    """
    claimed = json.loads((honest[0] / MANIFEST).read_text())
    claimed |= {
        name: json.loads((honest[0] / name).read_text())
        for name in ("config.json", "kd.json")
    }
    claims = Claims(claimed, graphs=("model.onnx", "model.int8.onnx"))
    places = [*claims.row_origins(Manifest | Beside, [claimed])]
    assert len(places) > 100
    assert not [path for path, origin in places if origin is None]
    assert {row.verdict for row in claims.rows} == {OPEN}  # nothing was looked at
    assert {row.verdict for row in Claims({"new": 1}).rows} == {WRONG}


def leaves(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each value of a type, with from what it can be made."""
    kind, origin = without_annotation(kind)
    if origin is not None or not (get_origin(kind) is dict or is_typeddict(kind)):
        yield path, origin
    elif get_origin(kind) is dict:
        yield from leaves(get_args(kind)[1], f"{path}/*")
    else:
        for key, value in key_types(kind).items():
            yield from leaves(value, f"{path}/{key}")


class Careless(TypedDict):
    """A manifest with a key of which nobody said from what it can be made."""

    loudness: float


def test_each_value_says_from_what_it_can_be_made_and_how_close_it_must_be():
    origins = dict(value for kind in (Manifest, Beside) for value in leaves(kind, ""))
    assert len(origins) > 100
    assert [path for path, origin in origins.items() if origin is None] == []
    assert {origin.close for origin in origins.values()} <= set(RULES)
    assert [path for path, origin in leaves(Careless, "") if origin is None] == [
        "/loudness"
    ]


def test_one_wrong_value_among_doubtful_ones_is_wrong():
    """On another processor a threshold 0.05 off is not decided, one 0.8 off is."""
    claims = Claims(
        {"output": {"thresholds": {"a": {"threshold": 0.55}, "b": {"threshold": 0.9}}}},
        images=100,
    )
    claims.elsewhere = True
    claims.add_evidence(
        IMAGES,
        {"output": {"thresholds": {"a": {"threshold": 0.5}, "b": {"threshold": 0.1}}}},
    )
    assert [row.verdict for row in claims.rows] == [WRONG]


@pytest.mark.parametrize("names", [(), CLASSES[:-1], (*CLASSES, "kiwi")])
def test_a_list_with_more_or_fewer_values_is_wrong(names):
    claims = Claims({"about": {"labels": list(names)}})
    claims.add_evidence(IMAGES, {"about": {"labels": list(CLASSES)}})
    assert [row.verdict for row in claims.rows] == [WRONG]


def test_costs_and_counts_have_three_verdicts():
    base = {"parity": {"model.onnx": {"correct": 80, "cpu_ms": 1.0}}}
    here = {"machine": {"processor": "another", "cores": 2}}
    for value, cost, verdicts in (
        (81, 1.4, (RIGHT, RIGHT)), (83, 3.0, (WRONG, OPEN)), (90, 1000.0, (WRONG, WRONG))
    ):  # fmt: skip
        near = Claims(json.loads(json.dumps(base)), graphs=("model.onnx",), images=120)
        near.elsewhere = False
        near.noisy = True
        near.add_evidence(
            IMAGES, {"parity": {"model.onnx": {"correct": value, "cpu_ms": cost}}}
        )
        assert tuple(row.verdict for row in near.rows) == verdicts
        far = Claims(
            json.loads(json.dumps(base | {"environment": here})),
            graphs=("model.onnx",),
            images=120,
        )
        assert far.elsewhere
        far.add_evidence(
            IMAGES, {"parity": {"model.onnx": {"correct": value, "cpu_ms": cost}}}
        )
        rows = {row.what: row.verdict for row in far.rows}
        assert (
            rows["parity/model.onnx/correct"] == {81: RIGHT, 83: OPEN, 90: WRONG}[value]
        )
        assert rows["parity/model.onnx/cpu_ms"] == (
            WRONG if cost > 100 else OPEN
        )  # a time of another machine


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [(1.2, RIGHT), (0.9, RIGHT), (9.0, WRONG), (0.1, OPEN), (0.005, WRONG)],
)
def test_a_slow_pytorch_flatters_a_graph_as_a_fast_graph_does(
    measured, verdict, monkeypatch
):
    monkeypatch.setattr(Claims, "busy", False)
    claims = Claims({"eager_ms": 1.0})
    claims.elsewhere = False
    claims.add_evidence(IMAGES, {"eager_ms": measured})
    assert [row.verdict for row in claims.rows] == [verdict]


@pytest.mark.parametrize(
    ("claimed", "here", "elsewhere"),
    [
        (0.05, RIGHT, RIGHT),
        (0.14, RIGHT, RIGHT),
        (0.3, WRONG, OPEN),
        (0.6, WRONG, WRONG),
        (0.012, WRONG, OPEN),
    ],
)
def test_a_difference_far_above_or_below_what_is_found_is_wrong(
    claimed, here, elsewhere
):
    for is_elsewhere, verdict in ((False, here), (True, elsewhere)):
        claims = Claims({"parity": {INT8: {"max_difference": claimed}}}, graphs=(INT8,))
        claims.elsewhere = is_elsewhere
        claims.add_evidence(IMAGES, {"parity": {INT8: {"max_difference": 0.05}}})
        assert [row.verdict for row in claims.rows] == [verdict]


def test_claims_missing_in_kd_0_3_are_not_wrong():
    """Of the alarms' reference it did not count the right answers; from `format: 2` on
    a missing count is WRONG.
    """
    for form, verdict in ((1, RIGHT), (2, WRONG)):
        claimed = {"format": form, "validation": {"model.onnx": {"images": 120}}}
        claims = Claims(claimed, graphs=("model.onnx",), images=120)
        claims.add_evidence(
            IMAGES, {"validation": {"model.onnx": {"images": 120, "right": 80}}}
        )
        assert {row.what: row.verdict for row in claims.rows}[
            "validation/model.onnx"
        ] == verdict


KINDS = {  # of honest exports, and a row that is right
    "plain": "parity/model.onnx/correct",
    "hub": "parity/model.int8.onnx/correct",
    "openvino": "parity/openvino.xml/correct",
    "sets": "output/thresholds",
    "vectors": "parity/model.onnx/cosine",
    "own": "parity/model.onnx/correct",
    "twice": "images.csv/times",
    "unlabelled": "parity/model.onnx/same_top1",
    "no graph": "about/parameters",
}


def of_kind(kind: str, folder: Path) -> tuple[Subject, Path, ExportOptions]:
    """Return what an export of a kind is made of, its images, and how it is
    exported.
    """
    labels = answers(small_subject(folder / "first"), PIXELS)
    pixels = PIXELS.copy()
    if kind == "twice":  # two files of one content
        pixels[1] = pixels[0]
        labels[1] = labels[0]
    subject, images = painted(
        folder, pixels, np.eye(3, dtype=np.int8)[labels] if kind == "sets" else labels
    )
    options = ExportOptions(
        int8=True,
        pt2=kind in ("plain", "own"),
        calibrate=False,
        onnx=kind != "no graph",
    )
    if kind == "openvino":
        pytest.importorskip("openvino")
        options = replace(options, openvino=True)
    elif kind == "sets":
        subject = tasked(subject, label_sets)
        options = replace(options, defer_share=0.2)
    elif kind == "vectors":
        subject = tasked(
            subject,
            embedding,
            load(Spec("student", "vit_tiny_patch16_224", VIT, ()), SIZE).eval(),
        )
    elif kind == "own":  # a network that is no timm's: no code of it can be run
        subject.student.architecture = {"module": "mine:net"}
        del subject.student.network.pretrained_cfg
    elif kind == "unlabelled":  # in folders that are named as classes
        with subject.images() as read:
            batches = [
                (views, np.full(len(label), -1), crcs) for views, label, crcs in read(0)
            ]
        subject = replace(
            subject, images=lambda: nullcontext(lambda limit, training=False: batches)
        )
    return subject, images, options if kind != "no graph" else ExportOptions(onnx=False)


SLOW = (
    "openvino",
    "own",
    "hub",
    "twice",
    "unlabelled",
)  # what the quick ones show too, in a costly form


@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in KINDS],
)
def test_honest_exports_of_other_kinds_are_right(kind, tmp_path):
    subject, images, options = of_kind(kind, tmp_path)
    export = tmp_path / "export"
    write(subject, export, options)
    if kind == "hub":  # what `hf download` leaves
        (export / ".gitattributes").write_text("*.onnx filter=lfs")
        (export / ".cache/huggingface/download").mkdir(parents=True)
        (export / ".cache/huggingface/download/model.onnx.metadata").write_text("1")
    for trust in (False, True) if options.pt2 else (False,):
        verdict = verify_export(
            export, images if kind != "no graph" else "", trust=trust
        )
        assert not wrong_rows(verdict), wrong_rows(verdict)
        rows = {row.what: row.verdict for row in verdict.rows}
        assert rows[KINDS[kind]] == RIGHT
        assert not options.pt2 or (rows["parity/model.pt2/correct"] == RIGHT) == trust


def partly_labelled(folder: Path, labelled: int) -> tuple[Path, Path]:
    """Return an export of 40 images, of which the first ones have a label, and the
    images; five labels are wrong.
    """
    labels = answers(small_subject(folder / "first"), PIXELS)
    labels[:5] = (labels[:5] + 1) % 3
    labels[labelled:] = -1
    subject, images = painted(folder, PIXELS, labels)
    write(subject, folder / "export", ExportOptions(calibrate=False, accept="drop<=5"))
    return folder / "export", images


def as_in_kd_0_3(liar: Liar) -> None:
    """PyTorch's own predictions are the labels of the other images."""
    for entry in liar.manifest["parity"].values():
        assert (entry.pop("labelled"), entry["correct"]) == (20, 15)
        entry |= {"correct": 35, "accuracy": 35 / 40}


def without_wrong_ones(liar: Liar) -> None:
    for entry in liar.manifest["parity"].values():
        entry |= {"labelled": 15, "accuracy": 1.0}


def test_accuracy_is_that_of_the_labelled_images(tmp_path):
    export, images = partly_labelled(tmp_path, 20)
    entry = json.loads((export / MANIFEST).read_text())["parity"]["model.onnx"]
    card = (export / "README.md").read_text()
    assert (
        entry.items()
        >= {
            "images": 40,
            "labelled": 20,
            "correct": 15,
            "accuracy": 0.75,
        }.items()
    )
    assert "; accuracy on the 20 of them that have a label" in card
    verdict = verify_export(export, images)
    assert not wrong_rows(verdict), wrong_rows(verdict)
    rows = {row.what: row.verdict for row in verdict.rows}
    places = (
        "parity/model.onnx/labelled",
        "parity/model.onnx/accuracy",
        "accepted/found/drop",
    )
    assert [rows[place] for place in places] == [RIGHT] * 3
    for lie in (as_in_kd_0_3, without_wrong_ones):
        liar = make_liar((export, images), tmp_path / lie.__name__, [lie])
        assert {
            row.what for row in verify_export(liar.folder).rows if row.verdict == WRONG
        } == {places[0]}
    rows = {
        row.what: row.verdict
        for row in verify_export(
            tmp_path / as_in_kd_0_3.__name__ / "export", images
        ).rows
    }
    assert rows["parity/model.onnx/correct"] == WRONG


def test_images_without_labels_have_no_accuracy(tmp_path):
    export, images = partly_labelled(tmp_path, 0)
    entry = json.loads((export / MANIFEST).read_text())["parity"]["model.onnx"]
    assert (
        entry["labelled"],
        entry["same_top1"],
        entry.keys() & {"correct", "accuracy", "ece"},
    ) == (0, 40, set())
    assert "| accuracy" not in (export / "README.md").read_text()
    verdict = verify_export(export, images)
    assert not wrong_rows(verdict), wrong_rows(verdict)
    assert {row.what: row.verdict for row in verdict.rows}[
        "accepted/found/drop"
    ] == RIGHT
    for i, changes in enumerate(({"accuracy": 1.0}, {"accuracy": 1.0, "correct": 40})):
        liar = make_liar(
            (export, images),
            tmp_path / str(i),
            [
                lambda liar, changes=changes: liar.get("parity/model.onnx").update(
                    changes
                )
            ],
        )
        rows = {
            row.what: row.verdict for row in verify_export(liar.folder, images).rows
        }
        assert rows["parity/model.onnx/accuracy"] == WRONG


@pytest.mark.parametrize(("form", "verdict"), [(1, OPEN), (2, WRONG)])
def test_kd_0_3_took_pytorchs_predictions_for_missing_labels(form, verdict):
    logits = 5 * torch.eye(3)[[0, 1, 2, 0]]
    labels = torch.tensor([1, 1, -1, -1])
    numbers = [measure(image) for image in PIXELS[:4]]
    outputs = GraphOutputs(
        {EAGER: logits, "model.onnx": logits}, labels, numbers, {"model.onnx": 1.0}
    )
    claimed = {
        "format": form,
        "output": {"width": 3},
        "parity": {"model.onnx": {"correct": 4, "same_top1": 4}},
    }
    claims = Claims(
        claimed | {"config.json": {"label_names": list(CLASSES)}},
        graphs=("model.onnx",),
        images=4,
    )
    claims.elsewhere = False
    claims.add_evidence(IMAGES, _repeated_facts(claims, outputs, SingleLabel(), False))
    assert {row.what: row.verdict for row in claims.rows}[
        "parity/model.onnx/correct"
    ] == verdict


# --------------------------------------------------------------------------------
# the lies


def other_weights(liar: Liar) -> None:
    """Weights of another step, with every hash made to fit."""
    file = liar.folder / "model.safetensors"
    tensors = {
        name: tensor + 0.05 * torch.randn_like(tensor)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    digest = tensors_digest(tensors)
    liar.set("chain/student/exported", digest)
    liar.set("version", digest[:12])
    liar.set("digest", digest, "kd.json")


def other_graph(liar: Liar) -> None:
    torch.manual_seed(7)
    student = load(Spec("student", "vit_tiny_patch16_224", VIT, CLASSES), SIZE).eval()
    runtimes.write_onnx(
        runtimes.export_program(student, SIZE), liar.folder / "model.onnx"
    )
    graph_of(liar, "model.onnx")


def exchanged(liar: Liar) -> None:
    """Each graph under the name of the other."""
    saved = Path(
        shutil.copy(liar.folder / "model.onnx", liar.folder.parent / "kept.onnx")
    )
    graph_of(liar, "model.onnx", liar.folder / "model.int8.onnx")
    graph_of(liar, "model.int8.onnx", saved)
    parity = liar.manifest["parity"]
    parity["model.onnx"], parity["model.int8.onnx"] = (
        parity["model.int8.onnx"],
        parity["model.onnx"],
    )


def back_door(
    liar: Liar, row: int, column: int, name: str = "model.onnx", increase: float = 50
) -> None:
    """A graph that answers "apple" where one pixel is as red as can be; none of the
    images has such a pixel there.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    path = liar.folder / name
    model = onnx.load(path)
    graph = model.graph

    def ints(name: str, values: list[int]) -> TensorProto:
        return numpy_helper.from_array(np.array(values, np.int64), name)

    graph.initializer.extend([
        ints("d_start", [0, row, column]), ints("d_end", [1, row + 1, column + 1]), ints("d_axes", [1, 2, 3]),
        ints("d_flat", [-1, 1]), numpy_helper.from_array(np.array(255, np.uint8), "d_red"),
        numpy_helper.from_array(np.array([[increase, 0, 0]], np.float32), "d_apple"),
    ])  # fmt: skip
    for node in graph.node:
        node.output[:] = [
            "d_logits" if output == "logits" else output for output in node.output
        ]
    nodes = [
        ("Slice", ["image", "d_start", "d_end", "d_axes"], "d_pixel"),
        ("Equal", ["d_pixel", "d_red"], "d_there"),
    ]
    nodes += [("Reshape", ["d_there", "d_flat"], "d_column")]
    graph.node.extend(
        [helper.make_node(kind, inputs, [output]) for kind, inputs, output in nodes]
    )
    graph.node.append(
        helper.make_node("Cast", ["d_column"], ["d_one"], to=TensorProto.FLOAT)
    )
    graph.node.append(helper.make_node("Mul", ["d_one", "d_apple"], ["d_more"]))
    graph.node.append(helper.make_node("Add", ["d_logits", "d_more"], ["logits"]))
    onnx.save(model, path)
    graph_of(liar, name)


def unchecked(liar: Liar) -> None:
    del liar.manifest["self_check"]
    (liar.folder / "self_check.npz").unlink()


def shown_right(rows: list[list[str]]) -> list[list[str]]:
    return [row for row in rows if row[-1] == "pear"]  # all that the student answers


def relabelled(rows: list[list[str]]) -> list[list[str]]:
    return [
        [a, b, truth, CLASSES[(CLASSES.index(name) + 1) % 3]]
        for a, b, truth, name in rows
    ]


def counted(liar: Liar, images: int, correct: int) -> None:
    """Make all counts those of other images."""
    for entry in liar.manifest["parity"].values():
        entry |= {
            "images": images,
            "correct": correct,
            "same_top1": images,
            "accuracy": correct / images,
        }


def named(liar: Liar, *names: str) -> None:
    liar.set("about/labels", list(names))
    liar.set("label_names", list(names), "config.json")


def setting(path: str, value: Any, file: str = MANIFEST) -> Callable[[Liar], None]:
    return lambda liar: liar.set(path, value, file)


def ghost(liar: Liar) -> None:
    liar.manifest["parity"]["openvino.xml"] = {**liar.manifest["parity"]["model.onnx"]}
    liar.manifest["chain"]["graphs"]["openvino.xml"] = "0" * 64
    liar.manifest["output"]["defer"]["stated"]["openvino.xml"] = {
        **liar.get("output/defer/stated")["model.onnx"]
    }


def uncompared(liar: Liar) -> None:
    for name in ("openvino.xml", "openvino.bin"):
        (liar.folder / name).write_bytes((liar.folder / "model.onnx").read_bytes())


LIES: dict[str, tuple[list[Callable[[Liar], Any]], Mapping[str, str]]] = {
    # kind of the table, and what is planted; rows that must say so
    "1 often": (
        [lambda liar: liar.rows(lambda rows: [rows[0]] * 100 + rows[20:])],
        {"images.csv/times": WRONG},
    ),
    "1 unlabelled": (
        [
            lambda liar: liar.rows(
                lambda rows: [
                    [*row[:2], "0"] if row[-1] == "apple" else row for row in rows
                ]
            )
        ],
        {"parity/model.onnx/labelled": WRONG},
    ),
    "1 labels": (
        [lambda liar: liar.rows(relabelled)],
        {"parity/model.onnx/correct": WRONG, "images.csv/choice": OPEN},
    ),
    "1 left out": (
        [lambda liar: liar.rows(shown_right), lambda liar: counted(liar, 80, 80)],
        {"images.csv/choice": OPEN, "scores/models/student/accuracy/value": WRONG},
    ),
    "2 served": (
        [setting("pick", "openvino.xml"), uncompared],
        {"pick": WRONG, "chain/graphs/openvino.xml": WRONG},
    ),
    "2 accepted": (
        [setting("accepted/file", "model.pt2")],
        {"accepted/file": WRONG, "pick": WRONG},
    ),
    "3 headline": (
        [
            setting("scores/models/student/accuracy/value", 0.99),
            setting("scores/models/teacher/accuracy/value", 0.999),
            setting(
                "scores/models/labels only",
                {"accuracy": {"value": 0.2, "images": 5000}},
            ),
            setting("scores/images", 120),
        ],
        {
            "scores/models/student/accuracy/value": WRONG,
            "scores/models/teacher/accuracy/value": OPEN,
            "scores/models/labels only/accuracy/value": OPEN,
            "scores/models/labels only/accuracy/images": OPEN,
            "scores/images": OPEN,
        },
    ),
    "4 not measured": (
        [setting("accepted/sentence", "drop<=20 mb<=5 ms<=1")],
        {"accepted/sentence": WRONG},
    ),
    "4 not so": (
        [
            setting("accepted/sentence", "drop<=20 mb<=0.001 ece<=1 teacher-drop<=1"),
            setting(
                "accepted/found",
                {"drop": 0.0, "mb": 0.001, "ece": 0.3, "teacher-drop": -3.0},
            ),
        ],
        {
            "accepted/found/mb": WRONG,
            "accepted/found/ece": WRONG,
            "accepted/found/teacher-drop": WRONG,
        },
    ),
    "5 sources": (
        [
            setting("licences/student", "apache-2.0"),
            setting("licences/teacher", "mit"),
            setting("about/parameters", 999),
            setting("about/data/hash", "f" * 16),
            setting("about/labels", list(CLASSES[::-1])),
        ],
        {
            "licences/student": OPEN,
            "licences/teacher": WRONG,
            "about/parameters": WRONG,
            "about/data/hash": OPEN,
            "config.json/label_names": WRONG,
        },
    ),
    "6 unseen": (
        [lambda liar: named(liar, "apple", "kiwi", "pear")],
        {"about/labels": OPEN, "config.json/label_names": OPEN},
    ),
    "6 seen": (
        [lambda liar: named(liar, "pear", "fig", "apple")],
        {"parity/model.onnx/correct": WRONG},
    ),
    "7 run": (
        [
            setting("chain/teacher/members/teacher/name", "vit_giant"),
            setting("scores/pair/agreement", 0.999),
            setting("metrics", {"accuracy": 0.99}, "kd.json"),
            setting("calibration/calibrated_ece", 0.001),
            setting("input/crop", 0.8),
        ],
        {
            "chain/teacher": OPEN,
            "scores/pair": OPEN,
            "kd.json/metrics": OPEN,
            "calibration/calibrated_ece": WRONG,
            "input/crop": WRONG,
        },
    ),
    "8 ghosts": (
        [ghost],
        {
            "parity/openvino.xml": WRONG,
            "chain/graphs/openvino.xml": WRONG,
            "output/defer/stated/openvino.xml": WRONG,
        },
    ),
    "9 tolerance": (
        [
            lambda liar: liar.set(
                f"parity/{INT8}/accuracy", liar.get(f"parity/{INT8}/accuracy") + 0.019
            ),
            lambda liar: liar.set(
                "scores/models/student/accuracy/value",
                liar.get("parity/model.onnx/accuracy") + 0.0192,
            ),
            setting("output/defer/stated/model.onnx/wrong_interval", [0.3, 0.35]),
            setting("output/defer/threshold", 0.2),
        ],
        {
            f"parity/{INT8}/accuracy": WRONG,
            "scores/models/student/accuracy/value": WRONG,
            "output/defer/stated/model.onnx": WRONG,
            "output/defer/threshold": WRONG,
        },
    ),
    "9 counts": (
        [
            setting(f"parity/{INT8}/correct", 119),
            setting(f"parity/{INT8}/same_top1", 90),
            setting(f"parity/{INT8}/ece", 0.4),
            setting(f"parity/{INT8}/max_difference", 1e-6),
        ],
        {
            f"parity/{INT8}/{key}": WRONG
            for key in ("correct", "same_top1", "ece", "max_difference")
        },
    ),
    "10 exchanged": ([exchanged], {"model.onnx": WRONG, INT8: WRONG}),
    "10 another": (
        [other_graph],
        {"parity/model.onnx/correct": WRONG, "random images/model.onnx": WRONG},
    ),
    "11 times": (
        [
            lambda liar: liar.set("eager_ms", liar.get("eager_ms") / 3),
            setting("parity/model.onnx/cpu_ms", 1e-6),
        ],
        {"eager_ms": OPEN, "parity/model.onnx/cpu_ms": WRONG},
    ),
    "12 pixels": (
        [
            setting("pretrained_cfg/interpolation", "bilinear", "config.json"),
            setting("pretrained_cfg/crop_mode", "border", "config.json"),
            setting("pretrained_cfg/first_conv", "stem", "config.json"),
            setting("input/layout", "uint8 [batch, 16, 16, 3], BGR"),
        ],
        {
            "config.json/pretrained_cfg/interpolation": WRONG,
            "config.json/pretrained_cfg/crop_mode": WRONG,
            "config.json/pretrained_cfg/first_conv": OPEN,
            "input/layout": WRONG,
        },
    ),
    "12 means": (
        [setting("pretrained_cfg/mean", [0.1, 0.1, 0.1], "config.json")],
        {"parity/model.onnx/max_difference": WRONG},
    ),
    "13 corner": (
        [lambda liar: back_door(liar, 0, 0)],
        {"random images/model.onnx": WRONG},
    ),
    "13 centre": (
        [lambda liar: back_door(liar, 7, 9)],
        {"random images/model.onnx": WRONG, "random images/all others": OPEN},
    ),
    "13 int8": (
        [
            lambda liar: back_door(liar, 0, 0, INT8),
            setting(f"parity/{INT8}/max_difference", 2.0),
        ],
        {f"parity/{INT8}/max_difference": WRONG, f"random images/{INT8}": WRONG},
    ),
    "13 no number": (
        [
            lambda liar: back_door(liar, 0, 0, INT8, np.inf),
            setting(f"parity/{INT8}/max_difference", np.inf),
        ],
        {f"random images/{INT8}": WRONG},
    ),
    "13 weights": ([other_weights], {"parity/model.onnx/max_difference": WRONG}),
    "14 files and keys": (
        [
            lambda liar: (liar.folder / "more.pkl").write_bytes(
                b"cposix\nsystem\n(S'true'\ntR."
            ),
            setting("certified", "by nobody"),
            setting("parity/model.onnx/f1", 0.99),
            setting("certified", True, "kd.json"),
            lambda liar: liar.set(
                "scores/columns/own",
                [{**liar.get("scores/columns/own")[0], "title": "human accuracy"}],
            ),
        ],
        {
            "files/more.pkl/sha256": WRONG,
            "certified": WRONG,
            "parity/model.onnx/f1": WRONG,
        },
    ),
    "14 keys": (
        [
            setting("name", "state of the art"),
            setting("environment/machine/processor", "a phone"),
            setting("certified", True, "kd.json"),
            setting("certified", True, "config.json"),
            lambda liar: liar.manifest["scores"]["columns"]["own"][0].update(
                title="human accuracy"
            ),
        ],
        {
            "name": OPEN,
            "environment": OPEN,
            "kd.json/certified": WRONG,
            "config.json/certified": WRONG,
            "scores/columns": WRONG,
        },
    ),
    "15 alarms": (
        [
            setting("validation/model.onnx/numbers/brightness/counts/pear", "15:120"),
            setting(f"validation/{INT8}/calibrated", False),
        ],
        {"validation/model.onnx": WRONG, f"validation/{INT8}": WRONG},
    ),
    "16 no self-check": ([unchecked], {"self_check/model.onnx": WRONG}),
    "16 of one graph": (
        [lambda liar: liar.manifest["self_check"].pop(INT8)],
        {f"self_check/{INT8}": WRONG},
    ),
    "version": (
        [
            setting("version", "0" * 12),
            setting("chain/student/step", 9000),
        ],
        {"version": WRONG, "chain/student/step": OPEN, "kd.json/step": WRONG},
    ),
}
SPEEDS = {  # of `--compare`: servers are started
    "8 threads, 9 signs": (
        [
            lambda liar: liar.set(
                "variants/model.onnx/speed/64",
                {**liar.get("variants/model.onnx/speed/1")},
            ),
            setting(f"variants/{INT8}/drop", -0.019),
            setting(f"variants/{INT8}/interval", [0.66, 0.67]),
            setting(f"variants/{INT8}/speed/1/p50_ms", 1e-4),
            setting(f"variants/{INT8}/speed/1/memory_mb", 0.5),
            setting("variants/model.onnx/bytes", 999),
        ],
        {
            "variants/model.onnx/speed/64": WRONG,
            f"variants/{INT8}/drop": WRONG,
            f"variants/{INT8}/interval": WRONG,
            f"variants/{INT8}/speed/1/p50_ms": WRONG,
            f"variants/{INT8}/speed/1/memory_mb": WRONG,
            "variants/model.onnx/bytes": WRONG,
        },
    ),
}


def after(liar: Liar) -> str:
    """Return the end of the card, behind the heading of its last section."""
    return (liar.folder / "README.md").read_text().partition("\n## Limits")[2]


EDITED = {  # after the card was drawn
    "3 a number of the card": lambda liar: liar.edit("66.7 %", "99.7 %"),
    "5 a comment": lambda liar: liar.edit("# small", "<!--\n# small"),
    "5 a section": lambda liar: liar.edit(
        "## Limits", "## Certified\n\nBy nobody.\n\n## Limits"
    ),
    "5 a section at the end": lambda liar: liar.edit(
        after(liar), after(liar) + "\n## Certified\n\nBy nobody.\n"
    ),
    "5 no limits": lambda liar: liar.edit("\n## Limits" + after(liar), ""),
    "5 a licence": lambda liar: liar.edit("dinov3-license", "mit"),
    "5 of another kd": lambda liar: [
        liar.set("environment/packages/kd", "0.0.9"),
        liar.edit("kd-serve .", "kd-serve other"),
    ],
}


AGAIN = {  # kinds of lies that another one of LIES is about too
    *(
        "1 often",
        "1 unlabelled",
        "2 accepted",
        "4 not measured",
        "6 unseen",
        "7 run",
        "8 ghosts",
        "9 counts",
    ),
    *(
        "10 another",
        "11 times",
        "12 means",
        "13 corner",
        "13 no number",
        "14 keys",
        "16 of one graph",
    ),
}


@pytest.mark.parametrize(
    "kind", [slow(name) if name in AGAIN else name for name in (*LIES, *SPEEDS)]
)
def test_a_lie_has_a_row(kind, honest, tmp_path, record_property):
    lies, rows = LIES.get(kind) or SPEEDS[kind]
    record_property("tried", len(lies))
    liar = make_liar(honest, tmp_path, lies, kind in SPEEDS)
    verdict = verify_export(liar.folder, honest[1])
    verdicts = {row.what: row.verdict for row in verdict.rows}
    assert {place: verdicts.get(place) for place in rows} == rows, wrong_rows(verdict)
    if WRONG in rows.values():
        with pytest.raises(NotVerifiedError) as raised:
            verdict.require()
        assert raised.value.exit_code == 1


def test_several_labels_have_a_threshold_each_and_one_label_has_none(honest, tmp_path):
    """Of an export without them `kd-serve` would answer with one label."""
    subject, images, options = of_kind("sets", tmp_path)
    write(subject, tmp_path / "export", replace(options, int8=False, defer_share=0.0))
    threshold = {"threshold": 0.5, "chosen": False, "images": 0}
    lies: tuple[tuple[Path, Callable[[dict[str, Any]], Any]], ...] = (
        (tmp_path / "export", lambda output: output.pop("thresholds")),
        (tmp_path / "export", lambda output: output["thresholds"].pop("fig")),
        (
            tmp_path / "export",
            lambda output: output["thresholds"].update(kiwi=threshold),
        ),
    )
    for i, (folder, lie) in enumerate(lies):
        liar = Liar(shutil.copytree(folder, tmp_path / str(i)))
        lie(liar.manifest["output"])
        liar.redraw()
        liar.reseal()
        wrong = {
            row.what
            for row in verify_export(liar.folder, images).rows
            if row.verdict == WRONG
        }
        assert wrong & {"output/thresholds", "what kd-serve reads"}
    one_label = Liar(shutil.copytree(honest[0], tmp_path / "one label"))
    one_label.manifest["output"].update(
        thresholds={name: threshold for name in CLASSES}
    )
    one_label.redraw()
    one_label.reseal()
    assert "what kd-serve reads" in {
        row.what for row in verify_export(one_label.folder).rows if row.verdict == WRONG
    }


EDITED_AGAIN = ("5 a comment", "5 a section", "5 a licence")  # the same comparison


@pytest.mark.parametrize(
    "kind", [slow(name) if name in EDITED_AGAIN else name for name in EDITED]
)
def test_the_card_says_nothing_else(kind, honest, tmp_path):
    liar = make_liar(honest, tmp_path, [])
    EDITED[kind](liar)
    liar.reseal()
    assert {
        row.what for row in verify_export(liar.folder).rows if row.verdict == WRONG
    } == {"README.md"}


PLAIN = {  # nothing is sealed again
    "a number of the manifest": (
        setting("parity/model.onnx/accuracy", 0.99),
        "checksum",
    ),
    "a graph": (other_graph, "files/model.onnx/sha256"),
    "weights": (other_weights, "files/model.safetensors/sha256"),
    "a file more": (
        lambda liar: (liar.folder / "more.py").write_text("1"),
        "files/more.py/sha256",
    ),
    "no card": (
        lambda liar: (liar.folder / "README.md").unlink(),
        "files/README.md/sha256",
    ),
    "a file less": (lambda liar: (liar.folder / INT8).unlink(), f"files/{INT8}/sha256"),
}


@pytest.mark.parametrize("lie", PLAIN)
def test_changed_files_and_claims_are_found(lie, honest, tmp_path):
    liar = Liar(shutil.copytree(honest[0], tmp_path / "export"))
    tell, row = PLAIN[lie]
    tell(liar)
    sealed = json.loads((liar.folder / MANIFEST).read_text())
    (liar.folder / MANIFEST).write_text(json.dumps({**sealed, **liar.manifest}))
    assert row in {
        row.what
        for row in verify_export(liar.folder, honest[1]).rows
        if row.verdict == WRONG
    }


def test_a_second_export_of_no_pair_is_refused(honest):
    with pytest.raises(KdError, match=r"--second: .*nothing of a pair") as raised:
        verify_export(*honest, second=honest[0])
    assert raised.value.exit_code == 2


def test_an_old_export_with_images_of_both_kinds_is_not_called_wrong(tmp_path):
    """kd 0.3 took PyTorch's predictions for missing labels: its counts are not
    checked.
    """
    export, images = partly_labelled(tmp_path, 20)
    liar = make_liar(
        (export, images),
        tmp_path / "old",
        [lambda liar: liar.manifest.update(format=1), as_in_kd_0_3],
    )
    rows = {row.what: row.verdict for row in verify_export(liar.folder, images).rows}
    assert rows["parity/model.onnx/correct"] == OPEN
    assert not [
        name
        for name, verdict in rows.items()
        if verdict == WRONG and name.startswith("parity/")
    ]


def test_a_file_more_is_the_only_wrong_row(honest, tmp_path):
    folder = shutil.copytree(honest[0], tmp_path / "export")
    (folder / "LICENSE").write_text("mit")
    rows = {row.what: row for row in verify_export(folder, honest[1]).rows}
    assert [name for name, row in rows.items() if row.verdict == WRONG] == [
        "files/LICENSE/sha256"
    ]
    assert "files are wrong" in rows["parity/model.onnx/correct"].why


def test_labels_are_not_shown_by_images_alone(honest, tmp_path):
    """Who renames two classes in every file tells a lie that only the run
    contradicts.
    """

    def swapped(names: list[str]) -> list[str]:
        partner = {"apple": "fig", "fig": "apple"}
        return [partner.get(name, name) for name in names]

    def lie(liar: Liar) -> None:
        named(liar, *swapped(list(CLASSES)))
        liar.rows(lambda rows: [[*row[:3], *swapped(row[3:])] for row in rows])

    rows = {
        row.what: row
        for row in verify_export(
            make_liar(honest, tmp_path, [lie]).folder, honest[1]
        ).rows
    }
    for place in ("about/labels", "config.json/label_names", "images.csv/choice"):
        assert (rows[place].verdict, "--run shows" in rows[place].why) == (OPEN, True)


def test_links_lead_to_files_of_the_export_or_of_the_hub(tmp_path):
    """As the hub's cache has them; the names of folders beside both begin alike."""
    folder = tmp_path / "snapshots/export"
    places = {
        "README.md": ".",
        "config.json": "../../blobs",
        "kd.json": "../export-private",
    }
    places |= {"images.csv": "../../blobs-private", "model.onnx": "../../blobs/inner"}
    for name, place in places.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "file").write_text("{}")
        (folder / name).symlink_to(f"{place}/file")
    out = {
        name
        for name, entry in present_files(folder, {}).items()
        if entry == {"sha256": "a link out of the folder"}
    }
    assert out == {"kd.json", "images.csv", "model.onnx"}


def test_unverifiable_folders_are_refused(honest, tmp_path):
    export, images = honest
    (tmp_path / "none").mkdir()
    foreign = tmp_path / "other"
    painted(foreign, PIXELS, np.zeros(len(PIXELS), np.int64))
    bare = shutil.copytree(export, tmp_path / "bare")
    (bare / MANIFEST).unlink()
    unlisted = Liar(shutil.copytree(export, tmp_path / "unlisted"))
    (unlisted.folder / "images.csv").unlink()
    unlisted.reseal()
    for folder, data, code, message in (
        (unlisted.folder, images, 2, "--data: .* has no images.csv"),
        (bare, images, 3, "is not an export: manifest.json is missing"),
        (export, tmp_path / "none", 2, "--data: no images in"),
        (export, tmp_path / "gone", 2, "--data: .* does not exist"),
        (export, foreign / "images", 2, "--data: .* holds 0 of the 120 images"),
    ):
        with pytest.raises(KdError, match=message) as raised:
            verify_export(folder, data)
        assert raised.value.exit_code == code
        assert "\n" not in str(raised.value)


def test_a_label_with_another_line_break_is_one_line_of_the_list(tmp_path):
    (tmp_path / parity.IMAGES).write_text(
        '0a,0b,1,"a\u2028b","c\nd"\n0c,0d,0\n', encoding="utf-8", newline=""
    )
    assert read_image_list(tmp_path) == [(10, 11, ["a\u2028b", "c\nd"]), (12, 13, None)]
