"""A folder of images with a file of label sets: CSV and JSON say the same, and what is
wrong is one line.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kd.core.errors import DataError
from kd.parts.datasets.multilabel import Options, build, facts

SETS = {
    "a.jpg": {"rice", "egg"},
    "deep/b.jpg": set(),
    "c.jpg": {"egg"},
    "d.jpg": {"soup"},
}
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
        (root / "sets.json").write_text(
            json.dumps({name: sorted(SETS[name]) for name in names})
        )
        return "sets.json"
    lines = ["file,labels"] + [
        f"{name},{'|'.join(sorted(SETS[name]))}" for name in names
    ]
    if form == "columns":
        lines = [f"file,{','.join(CLASSES)}"]
        lines += [
            f"{name},{','.join(str(int(label in SETS[name])) for label in CLASSES)}"
            for name in names
        ]
    (root / f"{form}.csv").write_text("\n".join(lines) + "\n")
    return f"{form}.csv"


def source(root: Path, file: str, **changes):
    return build(
        Options(
            **{"root": str(root), "train_labels": file, "val_fraction": 0.5, **changes}
        ),
        "train",
        None,
    )


def sets(source) -> dict[str, set[str]]:
    labels = {
        source.name(id): np.flatnonzero(source.label(id)) for id in range(len(source))
    }
    return {
        name: {source.classes[position] for position in label}
        for name, label in labels.items()
    }


def test_all_forms_say_the_same_and_val_fraction_parts_them(root):
    prints = set()
    for form in ("json", "pairs", "columns"):
        options = Options(
            root=str(root), train_labels=write(root, form), val_fraction=0.5
        )
        train = build(options, "train", None)
        val = build(options, "val", train.classes)
        assert tuple(train.classes) == CLASSES
        assert {**sets(train), **sets(val)} == SETS
        assert 0 < len(val) < len(SETS)
        prints.add((train.fingerprint, val.fingerprint))
    assert len(prints) == 1


def test_with_labels_some_an_image_without_an_entry_is_unlabelled(root):
    (root / "some.json").write_text(
        json.dumps({"a.jpg": ["egg"], "c.jpg": None, "d.jpg": []})
    )
    options = Options(root=str(root), train_labels="some.json", val_labels="val.json")
    partial = build(options, "train", ("egg", "rice"), "some")
    assert [partial.label(id).tolist() for id in range(3)] == [[1, 0], [-1, -1], [0, 0]]
    assert [build(options, "train", None, "none").label(id) for id in range(3)] == [
        -1
    ] * 3
    with pytest.raises(DataError, match=r"data\.train_labels: 'c\.jpg' has no label"):
        build(options, "train", None)
    (root / "some.csv").write_text("file,labels\na.jpg,egg\nc.jpg,\n")
    options = Options(root=str(root), train_labels="some.csv", val_labels="val.json")
    for labels, last in (
        ("some", [-1, -1]),
        ("all", [0, 0]),
    ):  # a table of two columns cannot say both
        opened = build(options, "train", ("egg", "rice"), labels)
        assert [opened.label(id).tolist() for id in range(2)] == [[1, 0], last]


def test_the_column_of_the_images_may_have_no_name(root):
    """As pandas writes an index; a hidden image is none that the first line names."""
    (root / ".hidden.jpg").write_bytes(b"")
    (root / "index.csv").write_text(",egg,rice\na.jpg,1,1\nc.jpg,1,0\n")
    opened = build(
        Options(root=str(root), train_labels="index.csv", val_labels="val.json"),
        "train",
        None,
    )
    assert sets(opened) == {"a.jpg": {"egg", "rice"}, "c.jpg": {"egg"}}


FEW = {"a.jpg": {"rice", "egg"}, "c.jpg": {"egg"}}
PAIRS = "file,labels\na.jpg,rice|egg\nc.jpg,egg\n"
WIDE = "file,egg,rice\na.jpg,1,1\nc.jpg,1,0\n"


@pytest.mark.parametrize(
    ("name", "content", "changes"),
    [
        ("a.tsv", PAIRS.replace(",", "\t"), {}),
        ("a.csv", PAIRS.replace("|", " | "), {}),
        ("a.csv", PAIRS.replace("|", "|egg|"), {}),
        ("a.csv", PAIRS.replace("|", "||"), {}),
        ("a.csv", PAIRS.replace("|", ";"), {"separator": ";"}),
        ("a.csv", PAIRS.replace("|", " "), {"separator": " "}),
        ("a.csv", PAIRS.replace("rice|egg", '"rice,egg"'), {"separator": ","}),
        ("a.csv", WIDE, {}),
        ("a.TSV", WIDE.replace(",", "\t"), {}),
        ("a.csv", WIDE.replace("1", "1.0").replace(",0", ",0.0"), {}),
        ("a.json", '{"a.jpg": ["rice", "egg"], "c.jpg": ["egg"]}', {}),
        ("a.JSON", '{"./a": [" rice", "egg", "egg"], "c": ["egg"]}', {}),
        ("a.json", '\ufeff{"a": ["rice", "egg"], "c.jpg": ["egg"]}', {}),
    ],
)
def test_forms_that_say_the_same_are_read_alike(root, name, content, changes):
    (root / name).write_text(content)
    opened = source(root, name, val_fraction=0.0, val_labels="v.csv", **changes)
    assert (sets(opened), list(opened.classes)) == (FEW, ["egg", "rice"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('file,labels\na.jpg,"rice, boiled"\nc.jpg,egg\n', {"rice, boiled", "egg"}),
        ("file,labels\na.jpg,0\nc.jpg,3|1\n", {"0", "1", "3"}),
        ("file,labels\na.jpg,\nc.jpg,egg|rice\n", {"egg", "rice"}),
        ("file,egg,rice,soup\na.jpg,1,1,0\n", {"egg", "rice", "soup"}),
    ],
)
def test_classes_of_a_table_are_its_columns(root, content, expected):
    (root / "a.csv").write_text(content)
    assert (
        set(source(root, "a.csv", val_fraction=0.0, val_labels="v.csv").classes)
        == expected
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.csv",
            "file,labels\na.jpg,egg\n./a.jpg,rice\n",
            "line 3: './a.jpg' is the image of line 2: 'a.jpg'",
        ),
        (
            "a.csv",
            "file,labels\na.jpg,egg\nROOT/a.jpg,rice\n",
            "is the image of line 2",
        ),
        ("a.csv", "a,rice|egg\nc,egg\n", "its first line is an image, 'a'"),
        (
            "a.csv",
            "file,rice\na.jpg,1\nc.jpg,0\n",
            "'rice' holds 0 and 1 alone: a table of one class",
        ),
        ("a.csv", "file,rice\na.jpg,1.0\nc.jpg,\n", "a table of one class"),
        (
            "a.csv",
            "file,labels\na.jpg,rice;egg\nc.jpg,egg\n",
            "joined by ';' ('rice;egg'): set data.separator=';'",
        ),
        (
            "a.csv",
            'file,labels\na.jpg,"rice,egg"\nc.jpg,egg\n',
            "set data.separator=','",
        ),
        (
            "a.csv",
            'file,labels\na.jpg,"[""rice"", ""egg""]"\nc.jpg,egg\n',
            "is a list, not text: write a|b",
        ),
        (
            "a.csv",
            "file,labels\na.jpg,\"['rice']\"\nc.jpg,egg\n",
            "cell '['rice']' is a list",
        ),
        (
            "a.csv",
            'file,labels\na.jpg,"{""choices"": [""rice""]}"\nc.jpg,egg\n',
            "is a list, not text",
        ),
        ("a.csv", "file,egg, egg\na.jpg,1,1\n", "its first line names 'egg' twice"),
        ("a.csv", "file,\xe9,e\u0301\na.jpg,1,0\n", "its first line names"),
        ("a.csv", "file,egg,\na.jpg,1,1\n", "a column has no name"),
        ("a.csv", "file,egg,rice\na.jpg,1,maybe\n", "line 2 has 'maybe' where 0 or 1"),
        ("a.csv", "file,egg,rice\na.jpg,nan,1\n", "line 2 has 'nan' where 0 or 1"),
        ("a.csv", "file,egg,rice\na.jpg,,\n", "line 2: 'a.jpg' has no label"),
        ("a.csv", "file,labels\n", "has no images"),
        ("a.csv", "file,labels\nA.JPG,egg\n", "line 2: 'A.JPG' is no image"),
        ("a.json", "[1]", "it holds a list"),
        ("a.json", '{"a.jpg": "egg"}', "'a.jpg' has no list of names"),
        ("a.json", '{"a.jpg": [1]}', "'a.jpg' has no list of names"),
        (
            "a.json",
            '{"a.jpg": ["egg"], "a.jpg": ["rice"]}',
            "'a.jpg' is the image of 'a.jpg'",
        ),
        (
            "a.json",
            '{"a.jpg": ["egg"], "./a.jpg": ["rice"]}',
            "'./a.jpg' is the image of 'a.jpg'",
        ),
        ("a.json", '{"a.jpg": null}', "'a.jpg' has no label"),
        ("a.json", "{", "a.json"),
        ("a.json", "[" * 100_000, "recursion"),
        ("a.xlsx", "", "A file that ends in .csv, .tsv, .json"),
        ("deep.csv", "a folder", "cannot be read"),
    ],
)
def test_a_wrong_file_is_one_line(root, name, content, words):
    """What a list of one label an image has in common with it is in test_csv.py."""
    if content == "a folder":
        (root / name).mkdir()
    else:
        (root / name).write_text(content.replace("ROOT", str(root)))
    with pytest.raises(DataError, match=r"^data\.train_labels: ") as caught:
        source(root, name)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file,egg\nc.jpg,1\n", "a table of one class"),
        (
            "file,egg,rice\nc.jpg,1,0\n",
            "has no column 'soup', a class of training. Columns: egg, rice",
        ),
        (
            "file,egg,rice,soup,fig\nc.jpg,1,0,0,1\n",
            "'c.jpg' has the label 'fig', which no training image has",
        ),
        ("file,labels\nc.jpg,eggs\n", "Did you mean 'egg'?"),
    ],
)
def test_validation_must_name_the_classes_of_training(root, content, message):
    (root / "v.csv").write_text(content)
    options = Options(
        root=str(root),
        train_labels=write(root, "columns", ["a.jpg", "d.jpg"]),
        val_labels="v.csv",
    )
    with pytest.raises(DataError, match=r"^data\.val_labels: ") as caught:
        build(options, "val", CLASSES)
    assert message in str(caught.value)


def test_columns_of_validation_may_stand_in_another_order(root):
    (root / "v.csv").write_text("file,soup,other,rice,egg\nc.jpg,0,0,0,1\n")
    options = Options(
        root=str(root),
        train_labels=write(root, "columns", ["a.jpg", "d.jpg"]),
        val_labels="v.csv",
    )
    val = build(options, "val", CLASSES)
    assert (sets(val), val.classes) == ({"c.jpg": {"egg"}}, CLASSES)
    assert val.notes == (
        "1 images beside the listed ones are in no list",
    )  # e.jpg; no file in deep/ is listed


def test_validation_has_images_and_classes_of_its_own_or_is_refused(root):
    options = Options(
        root=str(root),
        train_labels=write(root, "json", ["c.jpg"]),
        val_labels=write(root, "pairs"),
    )
    with pytest.raises(
        DataError,
        match=r"data\.val_labels: line 4: 'c\.jpg' is also in data\.train_labels",
    ):
        build(options, "val", ("egg",))
    options = Options(
        root=str(root),
        train_labels=write(root, "json", ["c.jpg"]),
        val_labels=write(root, "pairs", ["a.jpg"]),
    )
    with pytest.raises(DataError, match="'rice', which no training image has"):
        build(options, "val", ("egg",))


def test_test_labels_are_a_split_of_their_own(root):
    files = {f"{split}_labels": f"{split}.csv" for split in ("train", "val", "test")}
    for file, name in zip(
        files.values(), ("a.jpg", "c.jpg", "deep/b.jpg"), strict=True
    ):
        (root / file).write_text((root / write(root, "columns", [name])).read_text())
    options = Options(root=str(root), **files)
    assert sets(build(options, "test", CLASSES)) == {"deep/b.jpg": set()}
    assert facts(options).test == "test_labels"
