"""A folder of images with a file of label sets: CSV and JSON say the same, and what is wrong is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kd.datasets.multilabel import Options, build
from kd.errors import DataError

SETS = {"a.jpg": {"rice", "egg"}, "deep/b.jpg": set(), "c.jpg": {"egg"}, "d.jpg": {"soup"}}
CLASSES = ("egg", "rice", "soup")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for name in [*SETS, "e.jpg"]:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path


def write(root: Path, form: str, names=SETS) -> str:
    """Write the sets in one of the forms and return the file's name."""
    if form == "json":
        (root / "sets.json").write_text(json.dumps({name: sorted(SETS[name]) for name in names}))
        return "sets.json"
    lines = ["file,labels"] + [f"{name},{'|'.join(sorted(SETS[name]))}" for name in names]
    if form == "columns":
        lines = [f"file,{','.join(CLASSES)}"]
        lines += [f"{name},{','.join(str(int(one in SETS[name])) for one in CLASSES)}" for name in names]
    (root / f"{form}.csv").write_text("\n".join(lines) + "\n")
    return f"{form}.csv"


def source(root: Path, file: str, **changes):
    return build(Options(**{"root": str(root), "train_labels": file, "val_fraction": 0.5, **changes}), "train", None)


def sets(source) -> dict[str, set[str]]:
    found = {source.name(id): np.flatnonzero(source.label(id)) for id in range(len(source))}
    return {name: {source.classes[one] for one in label} for name, label in found.items()}


def test_all_forms_say_the_same_and_val_fraction_parts_them(root):
    prints = set()
    for form in ("json", "pairs", "columns"):
        options = Options(root=str(root), train_labels=write(root, form), val_fraction=0.5)
        train = build(options, "train", None)
        val = build(options, "val", train.classes)
        assert tuple(train.classes) == CLASSES
        assert {**sets(train), **sets(val)} == SETS
        assert 0 < len(val) < len(SETS)
        prints.add((train.fingerprint, val.fingerprint))
    assert len(prints) == 1


def test_names_may_lack_their_ending_and_labels_another_separator(root):
    (root / "some.csv").write_text("id,tags\na,rice egg\nc,egg\n")
    found = source(root, "some.csv", separator=" ", ending=".jpg", val_fraction=0.0, val_labels="pairs.csv")
    assert sets(found) == {"a.jpg": {"rice", "egg"}, "c.jpg": {"egg"}}


def test_an_image_without_an_entry_has_no_label_where_some_have_none(root):
    (root / "some.json").write_text(json.dumps({"a.jpg": ["egg"], "c.jpg": None, "d.jpg": []}))
    options = Options(root=str(root), train_labels="some.json", val_labels="val.json")
    some = build(options, "train", ("egg", "rice"), "some")
    assert [some.label(id).tolist() for id in range(3)] == [[1, 0], [-1, -1], [0, 0]]
    assert [build(options, "train", None, "none").label(id) for id in range(3)] == [-1] * 3
    with pytest.raises(DataError, match=r"data\.train_labels: 'c\.jpg' has no entry"):
        build(options, "train", None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "file,labels\na.jpg\n", "line 2 has 1 fields"),
        ("a.csv", "file,labels\na.jpg,egg\na.jpg,egg\n", "line 3 names 'a.jpg' a second time"),
        ("a.csv", "file,egg,rice\na.jpg,1,maybe\n", "line 2 has 'maybe' where 0 or 1"),
        ("a.csv", "file\n", "does not name two columns"),
        ("a.json", "[1]", "it holds a list"),
        ("a.json", '{"a.jpg": "egg"}', "'a.jpg' has no list of names"),
        ("a.json", "{", "a.json"),
        ("a.csv", "file,labels\nz.jpg,egg\n", "the first 'z.jpg'"),
        ("a.csv", "file,labels\n", "has no images"),
        ("none.csv", None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_one_line(root, name, content, words):
    if content is not None:
        (root / name).write_text(content)
    with pytest.raises(DataError, match=r"^data\.train_labels: ") as caught:
        source(root, name)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_validation_has_images_and_classes_of_its_own_or_is_refused(root):
    options = Options(root=str(root), train_labels=write(root, "json", ["c.jpg"]), val_labels=write(root, "pairs"))
    with pytest.raises(DataError, match=r"data\.val_labels: 'c\.jpg' is also in data\.train_labels"):
        build(options, "val", ("egg",))
    options = Options(
        root=str(root), train_labels=write(root, "json", ["c.jpg"]), val_labels=write(root, "pairs", ["a.jpg"])
    )
    with pytest.raises(DataError, match="'rice', which no training image has"):
        build(options, "val", ("egg",))


@pytest.mark.parametrize(
    "wrong", [{"val_fraction": 0.0}, {"val_labels": "b"}, {"separator": ""}, {"val_fraction": 1.5}]
)
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=r"val_|separator"):
        Options(**{"root": "a", "train_labels": "a", "val_fraction": 0.5, **wrong})
