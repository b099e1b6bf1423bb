"""`kd-export --values`: what a table may be, and what of it stands in an export."""

from __future__ import annotations

import json
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from subjects import CLASSES, small_subject

import kd
from kd.config.schema import TaskSection
from kd.core.errors import ConfigError, ModelError
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.graphs import Subject
from kd.deploy.export.package import seal
from kd.deploy.export.value_table import label_values
from kd.deploy.serve.model import describe
from kd.deploy.verify.comparison import OPEN, RIGHT, WRONG
from kd.deploy.verify.verify import VerifyOptions, verify
from kd.files.manifest import MANIFEST

TABLE = (
    "dish,kcal,protein_g,allergen\napple,52,0.3,\nfig,74,0.8,n/a\npear,57,0.4,none\n"
)
VALUES = {
    "apple": {"kcal": 52, "protein_g": 0.3, "allergen": None},
    "fig": {"kcal": 74, "protein_g": 0.8, "allergen": "n/a"},
    "pear": {"kcal": 57, "protein_g": 0.4, "allergen": "none"},
}


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Subject:
    return small_subject(tmp_path_factory.mktemp("student"))


@pytest.fixture
def read(student, tmp_path):
    """Return the values and the line of a table, for a student of `classes`."""

    def values_of(content: str | bytes, classes=CLASSES, name="n.csv"):
        file = tmp_path / name
        data = content if isinstance(content, bytes) else content.encode()
        file.write_bytes(data)
        source = replace(student, classes=classes)
        values, (line,) = label_values(file, tmp_path / "none", source)
        return values, line

    return values_of


def test_numbers_are_numbers_and_texts_are_texts(read):
    values, line = read(TABLE)
    assert values == VALUES
    assert [type(value) for value in values["apple"].values()] == [
        int,
        float,
        type(None),
    ]
    for text in ("kcal (number)", "protein_g (number)", "allergen (text)", "3 labels"):
        assert text in line


@pytest.mark.parametrize(
    "data",
    [
        TABLE.encode("utf-8-sig"),
        TABLE.encode("utf-16"),
        TABLE.replace(",", ";").encode(),
        TABLE.replace(",", "\t").encode(),
        b"sep=;\r\n" + TABLE.replace(",", ";").replace("\n", "\r\n").encode(),
    ],
    ids=["BOM", "UTF-16", "semicolons", "tabs", "Excel"],
)
def test_what_spreadsheets_write_is_read(read, data):
    assert read(data)[0] == VALUES


@pytest.mark.parametrize(
    ("cells", "expected", "kind"),
    [
        (("1", "-2.5", "1e3"), [1, -2.5, 1000.0], "(number)"),
        (("007", "1", "2"), ["007", "1", "2"], "text, because of '007'"),
        (("4006381333931", "1", ""), [4006381333931, 1, None], "(number)"),
        # more digits than a float64 of JavaScript keeps
        (("1234567890123456", "a", "b"), ["1234567890123456", "a", "b"], "text"),
        (
            ("9007199254740993", "9007199254740995", ""),
            ["9007199254740993", "9007199254740995", None],
            "text, because of '9007199254740993', which has more than 15 digits",
        ),
        (("52", "n/a", ""), ["52", "n/a", None], "text, because of 'n/a'"),
        (('"1,3"', '"1,7"', "g"), ["1,3", "1,7", "g"], "(text)"),  # allergens
        (("+5", "1", "2"), ["+5", "1", "2"], "(text, because of '+5')"),
        (("true", "<b>", '"a, b"'), ["true", "<b>", "a, b"], "(text)"),
    ],
)
def test_a_column_has_one_type(read, cells, expected, kind):
    rows = "".join(
        f"{label},{cell}\n" for label, cell in zip(CLASSES, cells, strict=True)
    )
    values, line = read("label,x\n" + rows)
    assert [values[label]["x"] for label in CLASSES] == expected
    assert kind in line


def test_labels_match_in_any_form_of_unicode_and_with_spaces(read):
    classes = ("crème brûlée", "ice cream", " odd")
    decomposed = unicodedata.normalize("NFD", classes[0])
    assert decomposed != classes[0]
    table = f"label,x\n ice cream ,2\n{decomposed},1\n odd,3\n"
    values, _ = read(table, classes)
    assert [values[label]["x"] for label in classes] == [1, 2, 3]


def test_rows_of_other_labels_are_left_out_with_a_line(read):
    extra = "".join(f"dish {number},1,1,none\n" for number in range(1000))
    values, line = read(TABLE + extra)
    assert values == VALUES
    assert "left out 1000 of other labels: dish 0, dish 1" in line
    assert "dish 9" not in line


HEAD = "dish,kcal\n"
REST = "fig,2\npear,3\n"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (HEAD + "apple,1\n", ("2 of 3 labels", "'fig', 'pear'")),
        (HEAD + "apple,1\nfig,2\npears,3\n", ("'pears'", "Did you mean 'pear'?")),
        ("apple,1\n" + REST, ("'apple'", "first line", "name the columns")),
        (HEAD + "apple,1\napple,2\n" + REST, ("line 3", "second row for 'apple'")),
        (HEAD + ",1\n" + REST, ("line 2", "no label")),
        ("dish,kcal,\napple,1,2\n", ("no name",)),
        ("dish,kcal,kcal\napple,1,2\n", ("'kcal' twice",)),
        ("dish,caf\u00e9,cafe\u0301\napple,1,2\n", ("'caf\u00e9' twice",)),
        ("", ("two columns",)),
        ("dish\napple\n", ("two columns",)),
        (HEAD + "apple,1,2\n", ("line 2", "3 fields")),
        (HEAD + "apple,nan\n" + REST, ("line 2", "'nan'", "empty")),
        (HEAD + "apple,-Inf\n" + REST, ("'-Inf'", "empty")),
        (HEAD + "apple,1e999\n" + REST, ("'1e999'", "empty")),
        ("dish;kcal\napple;0,5\nfig;2\npear;3\n", ("decimal comma", "0.5")),
        ('dish,kcal\napple,"1,000"\nfig,2\npear,3\n', ("separates thousands", "1000")),
        (HEAD + "apple,a\x1bb\n" + REST, ("line 2", "control")),
        (HEAD + 'apple,"a\nb"\n' + REST, ("2 lines",)),
        (HEAD + f"apple,{'a' * 1001}\n" + REST, ("1000",)),
        ("dish,label\napple,1\n", ("'label'", "Rename")),
        ("dish,score\napple,1\n", ("'score'", "Rename")),
        ("dish,image\napple,1\n", ("'image'", "Rename")),
        ("dish,label_2\napple,1\n", ("'label_2'", "Rename")),
        ("dish,omega,omega_3\napple,1,2\n", ("'omega_3'", "Rename")),
        ("dish,score:fig\napple,1\n", ("'score:fig'", "Rename")),
        ("dish,kcal\napple,\u00e9\n".encode("latin-1"), ("UTF-8", "iconv")),
    ],
)
def test_a_table_that_cannot_be_right_is_one_line(read, table, words):
    with pytest.raises(ConfigError, match=r"^--values: ") as caught:
        read(table)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_number_in_a_name_is_no_clash(read):
    values, _ = read("dish,omega_3\napple,1\n" + REST)
    assert values["apple"] == {"omega_3": 1}


def test_nothing_is_written_for_a_table_that_is_refused(subject, tmp_path):
    table = tmp_path / "n.csv"
    table.write_text(HEAD)
    for path in (table, tmp_path / "missing.csv", tmp_path):
        with pytest.raises(ConfigError, match=r"^--values: "):
            write(subject(), tmp_path / "export", ExportOptions(values=path))
    assert not (tmp_path / "export").exists()
    vectors = subject()
    section = TaskSection(kind="embedding")
    vectors = replace(vectors, recipe=vectors.recipe.with_(task=section))
    with pytest.raises(ConfigError, match="vectors, not labels"):
        write(vectors, tmp_path / "export", ExportOptions(values=table))


@pytest.fixture(scope="module")
def written_once(student, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    table = folder / "n.csv"
    table.write_text(TABLE)
    return write(student, folder / "export", ExportOptions(values=table)).folder


@pytest.fixture
def exported(written_once, tmp_path) -> Path:
    return shutil.copytree(written_once, tmp_path / "export")


def test_values_are_in_the_manifest_the_card_and_the_model(exported):
    output = json.loads((exported / MANIFEST).read_text())["output"]
    assert output["values"]["columns"] == ["kcal", "protein_g", "allergen"]
    assert output["values"]["labels"]["apple"] == [52, 0.3, None]
    assert "kcal, protein_g, allergen" in (exported / "README.md").read_text()
    assert describe(exported).output.values == VALUES


def test_without_a_table_nothing_is_said_of_values(subject, tmp_path):
    folder = write(subject(), tmp_path / "export", ExportOptions()).folder
    assert "values" not in json.loads((folder / MANIFEST).read_text())["output"]
    assert "Values" not in (folder / "README.md").read_text()
    assert describe(folder).output.values == {}


def test_an_export_that_replaces_another_keeps_its_values(exported, subject, tmp_path):
    again = write(subject(), exported, ExportOptions(accept="drop<=50"))
    assert describe(exported).output.values == VALUES
    assert any("as in the replaced export" in line for line in again.lines)
    table = tmp_path / "n.csv"
    table.write_text("dish,x\napple,1\nfig,2\npear,3\n")
    write(subject(), exported, ExportOptions(values=table))
    assert describe(exported).output.values["fig"] == {"x": 2}
    student = replace(subject(), classes=("a", "fig", "pear"))
    assert label_values(None, exported, student)[0] == {}
    assert "other labels" in label_values(None, exported, student)[1][0]


def test_kd_verify_leaves_values_open_and_finds_other_ones(exported):
    rows = verify(VerifyOptions(export=exported)).rows
    assert [row.verdict for row in rows if row.what == "output/values"] == [OPEN]
    verdicts = {row.what: row.verdict for row in rows}
    assert verdicts["README.md"] == verdicts["checksum"] == RIGHT
    file = exported / MANIFEST
    file.write_text(file.read_text().replace("0.3", "0.9"))
    with pytest.raises(ModelError, match="checksum"):
        kd.load(exported)
    assert "checksum" in [
        row.what
        for row in verify(VerifyOptions(export=exported)).rows
        if row.verdict == WRONG
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["labels"].pop("fig"),
        lambda values: values["labels"].update(kiwi=[1, 2, 3]),
        lambda values: values["columns"].append("more"),
        lambda values: values.update(columns=["kcal", "kcal", "allergen"]),
        lambda values: values["labels"].update(fig=[True, 1, ""]),
        lambda values: values["labels"].update(fig=[{}, 1, "a"]),
        lambda values: values["labels"].update(fig=[float("nan"), 1, "a"]),
        lambda values: values["labels"].update(fig=[1, 1, "a\nb"]),
        lambda values: values.update(labels=[]),
    ],
)
def test_a_strangers_values_are_checked_before_they_are_served(exported, change):
    manifest = json.loads((exported / MANIFEST).read_text())
    change(manifest["output"]["values"])
    seal(
        exported, {k: v for k, v in manifest.items() if k not in ("files", "checksum")}
    )
    with pytest.raises(ModelError, match=r"damaged manifest\.json"):
        describe(exported)
