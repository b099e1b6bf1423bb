"""Folders, tables, shards and parquet as people bring them: right, or one line whose
remedy, followed, helps.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, encoded, photo, plain, write
from PIL import Image

from kd import config
from kd.core.errors import CorruptImage, KdError
from kd.jobs.scan_images import scan
from kd.parts import registry
from kd.setup.data import open_sources
from kd.setup.data_plan import DataPlan

OF_DATA = ("labels", "bits", "on_corrupt", "max_skipped")


@dataclass(frozen=True)
class TrainingData:
    """What kd makes of the training images."""

    counts: dict[str, int]
    order: tuple[str, ...]
    message: str
    first: Image.Image | None


def read(root: Path, keys: Mapping[str, Any]) -> TrainingData:
    """Read data as `kd-train --check=all` does, and count the images of each class."""
    values = {
        **({} if "kind" in keys else {"kind": "imagefolder", "root": "ROOT"}),
        **keys,
    }
    values = {
        key: value.replace("ROOT", str(root)) if isinstance(value, str) else value
        for key, value in values.items()
    }
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
    }
    section = {key: values.pop(key) for key in OF_DATA if key in values}
    kind = values.pop("kind")
    plan = DataPlan(
        kind=kind,
        options=registry.default_options("datasets", kind, **values),
        **section,
    )
    data = open_sources(plan)
    max_skipped = plan.max_skipped if plan.on_corrupt == "skip" else -1.0
    lines = scan(
        data.splits, max_skipped, root.parent / "audit", everything=True, bits=plan.bits
    )
    counts = Counter[str]()
    first = None
    for id in range(len(data.train)):
        try:
            image = data.train.decode(id).image
        except CorruptImage:
            continue  # it is skipped, or `look` would have raised
        first = first or image
        label = data.train.label(id)
        if isinstance(label, np.ndarray):
            counts[
                "+".join(
                    name for name, on in zip(data.classes, label, strict=True) if on > 0
                )
            ] += 1
        else:
            counts[data.classes[label] if label >= 0 else ""] += 1
    assert len(data.val)
    return TrainingData(
        dict(counts), tuple(data.classes), "\n".join([*data.notes, *lines]), first
    )


def outcome(case: Case, root: Path) -> str:
    """Make a case and return what kd does with it: "right", "refused", "traceback" or
    "silently wrong".
    """
    case.make(root)
    keys = dict(case.keys)
    try:
        content = read(root, keys)
    except KdError as error:
        line = str(error)
    except Exception:
        return "traceback"
    else:
        if case.refused:
            return "silently wrong"
        check(case, content)
        return "right"
    assert len(line.splitlines()) == 1
    assert line.endswith((".", "?", "!"))
    assert re.search(case.refused or "$^", line), line
    assert case.remedy is not None
    case.remedy(root, keys)
    check(case, read(root, keys))  # a remedy that does not help is no refusal
    return "refused"


def check(case: Case, content: TrainingData) -> None:
    assert content.counts == dict(case.right)
    assert re.search(case.message, content.message, re.DOTALL), content.message
    assert case.order in ((), content.order)
    assert content.first is not None
    assert case.pixels is None or case.pixels(content.first)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    for config_path in (datasets.config, constants):
        monkeypatch.setattr(config_path, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_right_or_refused_with_a_remedy_that_helps(
    case, tmp_path, request, record_property
):
    if case.kind == "parquet":
        request.getfixturevalue("hub")
    (tmp_path / "data").mkdir()
    result = outcome(case, tmp_path / "data")
    record_property("outcome", result)
    assert result == ("refused" if case.refused else "right")


def test_names_of_cases_are_their_own_and_many():
    assert len({case.name for case in CASES}) == len(CASES) >= 60


def test_check_names_all_four_and_what_it_passes_runs(tmp_path):
    """One link without a target once kept `--check` from looking at any image, and the
    run died in its first epoch.
    """
    plain(tmp_path, count=19)
    write(tmp_path / "train/apple/empty.jpg", b"")
    write(tmp_path / "train/apple/cut.jpg", photo(1)[:300])
    write(tmp_path / "train/apple/page.jpg", "<html>")
    (tmp_path / "train/apple/link.jpg").symlink_to("/nowhere/x.jpg")
    with pytest.raises(KdError) as caught:
        read(tmp_path, {})
    assert all(
        f"train/apple/{name}.jpg" in str(caught.value)
        for name in ("empty", "cut", "page", "link")
    )
    listed_in = re.search(r"data\.exclude=(\S+?)\.?$", str(caught.value))
    assert listed_in is not None
    assert read(tmp_path, {"on_corrupt": "skip", "max_skipped": 0.2}).counts == {
        "apple": 19,
        "pear": 19,
    }


def test_used_bits_are_reported_and_the_advised_key_works(tmp_path):
    plain(tmp_path)
    for number in range(3):
        values = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
        write(
            tmp_path / f"train/pear/x{number}.png",
            encoded(Image.fromarray(values), "PNG"),
        )
    content = read(tmp_path, {})
    advised = re.search(
        r"3 grey images of 16 bits use 12 of them.* 16 of 256 levels.*data\.bits=(\d+)",
        content.message,
    )
    assert advised is not None
    assert "grey images" not in read(tmp_path, {"bits": int(advised[1])}).message
    write(
        tmp_path / "train/pear/high.png",
        encoded(Image.fromarray(np.full((8, 8), 65535, np.uint16)), "PNG"),
    )
    assert "grey images" not in read(tmp_path, {}).message  # the range is that of all


def test_a_storage_that_is_away_is_no_damaged_image(tmp_path, monkeypatch):
    from kd.files import storage

    monkeypatch.setattr(storage, "PAUSES", ())
    data = open_sources(DataPlan(kind="imagefolder", options=registry.default_options(
        "datasets", "imagefolder", root=str(plain(tmp_path)))))  # fmt: skip
    os.rename(tmp_path / "train", tmp_path / "away")
    with pytest.raises(KdError, match="the storage is away") as caught:
        scan(data.splits, 0.5, tmp_path / "audit")
    assert not isinstance(caught.value, CorruptImage)


NAMES = ("no", "on", "null", "1e3", "007")


@pytest.mark.parametrize("written", ["{%s: 2.0}", "%s: 2.0"])
@pytest.mark.parametrize("name", NAMES)
def test_names_of_classes_in_a_configuration_are_texts(name, written, tmp_path):
    line = (
        f"  class_weights: {written % name}"
        if "{" in written
        else f"  class_weights:\n    {written % name}"
    )
    file = write(
        tmp_path / "a.yaml",
        f"losses:\n- kind: ce\n{line}\ndata: {{kind: food_mini}}\nstudent: {{model:"
        " lcnet_050}\n",
    )
    assert config.load(file).losses[0].options.class_weights == {name: 2.0}
    override = f"losses=[{{kind: ce, class_weights: {{{name}: 3}}}}]"
    assert config.load(file, [override]).losses[0].options.class_weights == {name: 3}


def test_a_bare_no_where_a_text_belongs_is_refused_and_quotes_help(tmp_path):
    text = (
        "losses: [{kind: ce}]\ndata: {kind: imagefolder, root: x, labels: some,"
        " unlabelled: %s}\n"
    )
    text += "student: {model: lcnet_050}\n"
    with pytest.raises(
        KdError, match=r"data\.unlabelled: is False.*a boolean without quotes.*Quote it"
    ):
        config.load(write(tmp_path / "a.yaml", text % "no"))
    assert (
        config.load(write(tmp_path / "a.yaml", text % "'no'")).data.options.unlabelled
        == "no"
    )


def test_kd_init_finds_what_roboflow_exports_and_says_what_is_left_out(
    tmp_path, monkeypatch, capfd
):
    import yaml
    from cases import roboflow

    from kd.cli.training import init

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    roboflow(tmp_path / "robo")
    assert init(["robo", "-o", "robo.yaml"]) == 0
    keys = yaml.safe_load(Path("robo.yaml").read_text())["data"]
    assert {key: keys[key] for key in ("kind", "train_labels", "val_labels")} == {
        "kind": "multilabel", "train_labels": "train/_classes.csv", "val_labels": "valid/_classes.csv"}  # fmt: skip
    plain(tmp_path / "two")
    write(tmp_path / "two/train/apple/1.nef", b"II*\0")
    values = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    write(tmp_path / "two/train/pear/x.png", encoded(Image.fromarray(values), "PNG"))
    capfd.readouterr()
    assert init(["two", "-o", "two.yaml"]) == 0
    screen = capfd.readouterr().out
    assert "1 file is not read: 1 .nef" in screen
    assert yaml.safe_load(Path("two.yaml").read_text())["data"]["bits"] == 12


def test_foreign_messages_are_one_sentence_without_codes():
    from kd.core.errors import first_sentence

    bold = (
        "Weights only load failed. You have two options, \x1b[1mdo those steps only if"
        " you trust it\x1b[0m. \n\t(1) ..."
    )
    assert first_sentence(ValueError(bold)) == "Weights only load failed"
    assert first_sentence(OSError("one\r\ntwo\x00three\x07")) == "one two three"
    assert first_sentence(KeyError()) == "KeyError"
    assert len(first_sentence("x" * 999)) == 200


def test_class_order_that_a_teacher_does_not_have_is_named(tmp_path):
    """Folders 0 to 11 are in the order of numbers: a teacher whose names are in the
    order of text is refused.
    """
    from kd.models.load_classifier import check_classes

    data = [str(number) for number in range(12)]
    with pytest.raises(
        KdError,
        match=(
            r"class 2 is '10', the data's is '2' \(the same classes in another order\)"
        ),
    ):
        check_classes("teacher.model", sorted(data), data)


def test_a_teacher_of_more_classes_is_refused_and_the_named_file_helps(tmp_path):
    """A .pth of five outputs without names, for data of two of them: the remedy is a
    file of all outputs.
    """
    import timm
    import torch

    from kd.jobs.check import check as check_run
    from kd.setup.recipe import resolve

    plain(tmp_path / "data")
    torch.manual_seed(0)
    weights = tmp_path / "five.pth"
    torch.save(timm.create_model("lcnet_050", num_classes=5).state_dict(), weights)
    base = {
        "run": {"folder": str(tmp_path)},
        "data": {
            "kind": "imagefolder",
            "root": str(tmp_path / "data"),
            "image_size": 32,
            "batch_size": 2,
        },
        "teacher": {"model": "lcnet_050", "checkpoint": str(weights)},
        "student": {"model": "lcnet_050"},
        "losses": [{"kind": "kl"}],
    }
    with pytest.raises(
        KdError,
        match=(
            r"teacher\.checkpoint: has 5 classes, the data has 2.*teacher\.classes=FILE"
        ),
    ):
        check_run(resolve(config.load(base)))
    names = write(tmp_path / "names.txt", "fig\npear\nplum\napple\nkiwi\n")
    checked = check_run(resolve(config.load(base, [f"teacher.classes={names}"])))
    assert list(checked.teachers.data.classes) == ["apple", "pear"]


@pytest.mark.parametrize("source", ["file", "folder"])
def test_a_teacher_of_the_same_classes_in_another_order_is_reordered(tmp_path, source):
    """Before, it was refused, and the message asked for a file that would have misnamed
    its outputs.
    """
    import timm
    import torch

    from kd.jobs.check import check as check_run
    from kd.setup.build_teacher import load_teachers
    from kd.setup.recipe import resolve

    plain(tmp_path / "data")
    torch.manual_seed(0)
    network = timm.create_model("lcnet_050", num_classes=2).eval()
    teacher = {"model": "lcnet_050", "checkpoint": str(tmp_path / "two.pth")}
    torch.save(network.state_dict(), tmp_path / "two.pth")
    if source == "folder":
        timm.models.save_for_hf(network, str(tmp_path / "two"), safe_serialization=True)
        file = tmp_path / "two" / "config.json"
        file.write_text(
            json.dumps(
                {**json.loads(file.read_text()), "label_names": ["pear", "apple"]}
            )
        )
        teacher = {"model": str(tmp_path / "two"), "pretrained": True}
    else:
        teacher["classes"] = str(write(tmp_path / "names.txt", "pear\napple\n"))
    base = {
        "run": {"folder": str(tmp_path)},
        "data": {
            "kind": "imagefolder",
            "root": str(tmp_path / "data"),
            "image_size": 32,
            "batch_size": 2,
        },
        "teacher": teacher,
        "student": {"model": "lcnet_050"},
        "losses": [{"kind": "kl"}],
    }
    recipe = resolve(config.load(base))
    checked = check_run(recipe)
    assert list(checked.teachers.data.classes) == ["apple", "pear"]
    assert "order of the data's classes" in " ".join(checked.teachers.notes)
    teachers = load_teachers(recipe, checked.teachers.data, {})
    image = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        model = teachers.model.eval()
        expected = network(model.normalize(image))[:, [1, 0]]
        torch.testing.assert_close(model(image).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_endpoint_scales_16_bits_as_training_does(tmp_path):
    import torch
    from cases import grey16

    from kd.deploy.export.export import input_claims
    from kd.deploy.serve.decoding import prepare
    from kd.deploy.serve.limits import Limits, Problem
    from kd.files.pixels import centre_crop
    from kd.models.load_classifier import load
    from kd.models.spec import Spec
    from kd.parts.datasets._decode import decode_image

    data = grey16(12)
    trained = centre_crop(
        decode_image(data, "file", "data.root", bits=12).image, 8, 1.0
    )
    served = prepare(data, 8, 1.0, Limits(), bits=12).pixels
    assert np.array_equal(served, np.asarray(trained).transpose(2, 0, 1))
    assert served.max() > 240
    with pytest.raises(Problem, match=r"values of 16 bits\. At most 12"):
        prepare(grey16(16), 8, 1.0, Limits(), bits=12)
    with torch.device("meta"):
        student = load(Spec("student", "lcnet_050", {}, ("a", "b")), 32)
    plan = DataPlan(kind="food_mini", bits=12, image_size=32)
    assert input_claims(student, plan)["bits"] == 12
    assert "bits" not in input_claims(
        student, DataPlan(kind="food_mini", image_size=32)
    )
