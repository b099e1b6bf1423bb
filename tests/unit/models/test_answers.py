"""Tables of answers that people bring: which files are read, and what is said of those
that do not fit.
"""

import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

import kd
from kd import config
from kd.core.errors import ModelError
from kd.jobs.description import describe
from kd.models import answer_table
from kd.models.answer_table import read_answers, read_vectors
from kd.setup.build_teacher import load_teachers
from kd.setup.data import Data, open_sources
from kd.setup.recipe import resolve

TABLE = "name,fig,pear\na/1.jpg,1.5,-2\na/2.jpg,0.5,3\n"
WHERE = "teacher.model"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TABLE),
        ("a.CSV", TABLE),
        ("a.tsv", TABLE.replace(",", "\t")),
        ("a.TSV", TABLE.replace(",", "\t")),
        ("a.csv", "\ufeff" + TABLE.replace("\n", "\r\n")),
        ("a.csv", TABLE.replace("\n", "\n\n")),
        ("a.csv", TABLE.replace(",", ", ")),
        ("a.csv", TABLE.replace("a/1", "./a//1")),
    ],
)
def test_every_form_of_a_table_is_read(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    table = read_answers(str(tmp_path / name), WHERE)
    assert (list(table.names), list(table.classes)) == (
        ["a/1.jpg", "a/2.jpg"],
        ["fig", "pear"],
    )
    assert table.values.tolist() == [[[1.5, -2.0], [0.5, 3.0]]]


def test_the_ending_of_an_array_may_be_in_capitals(tmp_path):
    with (tmp_path / "a.NPZ").open("wb") as file:
        np.savez(file, logits=np.ones((1, 2), np.float32), names=["./a.jpg"])
    assert list(read_answers(str(tmp_path / "a.NPZ"), WHERE).names) == ["a.jpg"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npy", "", "np.savez("),
        ("a.txt", "", "A file that ends in .safetensors, .npz, .csv, .tsv"),
        ("a.csv", "", "the first line is not `name,CLASS"),
        ("a.csv", "file,fig,pear\n", "the first line is not `name,CLASS"),
        ("a.csv", TABLE.replace(",", ";"), "the first line is not `name,CLASS"),
        ("a.csv", TABLE.replace(",3", ""), "line 3 has 2 fields, the first line has 3"),
        (
            "a.csv",
            TABLE.replace("0.5", "half"),
            "line 3: could not convert string to float: 'half'",
        ),
        ("a.csv", TABLE.replace("0.5", ""), "line 3: could not convert"),
        (
            "a.csv",
            TABLE.replace("0.5", "nan"),
            "NaN or infinity for 'a/2.jpg', with 0 more images",
        ),
        (
            "a.csv",
            TABLE.replace("0.5", "inf").replace("1.5", "nan"),
            "infinity for 'a/1.jpg', with 1 more images",
        ),
        ("a.csv", TABLE.replace("a/2", "a/1"), "it has the image 'a/1.jpg' twice"),
        ("a.csv", TABLE.replace("a/2", "./a/1"), "it has the image 'a/1.jpg' twice"),
        ("a.csv", TABLE.replace("pear", "fig"), "it has the class 'fig' twice"),
        ("a.csv", b"name,f\xefg,pear\n", "'utf-8' codec can't decode"),
        ("a.npz", "x", "cannot be read as a table of outputs"),
        ("a.npz", "PK\3\4 cut short", "cannot be read as a table of outputs"),
        ("a.safetensors", "x", "cannot be read as a table of outputs"),
    ],
)
def test_a_wrong_table_is_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(ModelError, match=r"^teacher\.model: ") as caught:
        read_answers(str(tmp_path / name), WHERE)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_table_is_written_or_a_disk_error_raised(tmp_path, small_disk):
    table = answer_table.AnswerTable(
        "logits", [f"{i}.jpg" for i in range(2000)], torch.zeros(1, 2000, 50)
    )
    answer_table.write_answers(tmp_path / "a.safetensors", table)
    assert (
        tmp_path / "a.safetensors"
    ).stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o644
    assert len(read_answers(str(tmp_path / "a.safetensors"), WHERE).names) == 2000
    with pytest.raises(OSError, match="No space left"):
        answer_table.write_answers(small_disk / "a.safetensors", table)


def with_answers(settings, path: Path, **section) -> dict:
    teacher = {"kind": "answers", "model": str(path), "precision": "fp32", **section}
    return {**settings, "teacher": teacher}


def listed(settings) -> Data:
    return open_sources(resolve(config.load(settings)).data)


def write(
    settings, path: Path, rows: torch.Tensor | None = None, prefix: str = ""
) -> torch.Tensor:
    """Write probabilities of three classes for all images, those of `rows` instead of
    the last ones.
    """
    data = listed(settings)
    names = [
        source.name(id)
        for source in (data.train, data.val)
        for id in range(len(source))
    ]
    table = torch.rand(
        len(names), 3, generator=torch.Generator().manual_seed(0)
    ).softmax(1)
    if rows is not None:
        table[-len(rows) :] = rows
    lines = [
        ",".join([prefix + name, *map(str, row)])
        for name, row in zip(names, table.tolist(), strict=True)
    ]
    path.write_text("\n".join(["name,apple,fig,pear", *lines]))
    return table


def build(settings):
    recipe = resolve(config.load(settings))
    return load_teachers(recipe, open_sources(recipe.data), {})


def test_absolute_names_are_those_of_the_data(settings, tmp_path):
    """Wherever the answers were made."""
    expected = write(settings, tmp_path / "a.csv")
    write(settings, tmp_path / "b.csv", prefix="/elsewhere/food/")
    for name in ("a.csv", "b.csv"):
        model = build(
            with_answers(settings, tmp_path / name, outputs="probabilities")
        ).model
        logits = model(
            torch.zeros(5, 3, 16, 16, dtype=torch.uint8), torch.arange(5)
        ).logits
        torch.testing.assert_close(logits.softmax(1), expected[:5])


def test_names_of_images_may_be_decomposed(settings, tmp_path):
    root = Path(settings["data"]["root"])
    copied = shutil.copytree(root, tmp_path / "images")
    for folder in copied.glob("*/apple"):
        folder.rename(folder.with_name("cre\u0300me"))
    settings = {**settings, "data": {**settings["data"], "root": str(copied)}}
    expected = write(settings, tmp_path / "a.csv")
    for form in ("NFC", "NFD"):
        text = (tmp_path / "a.csv").read_text().replace("apple,fig", "cr\u00e8me,fig")
        (tmp_path / "b.csv").write_text(unicodedata.normalize(form, text))
        model = build(
            with_answers(settings, tmp_path / "b.csv", outputs="probabilities")
        ).model
        logits = model(
            torch.zeros(5, 3, 16, 16, dtype=torch.uint8), torch.arange(5)
        ).logits
        torch.testing.assert_close(logits.softmax(1), expected[:5])


@pytest.mark.parametrize(
    ("outputs", "last", "description"),
    [
        ("probabilities", [[0.5, 0.5, 0.5]], "no probabilities"),
        ("probabilities", [[-1.0, 1.0, 1.0], [0.2, 0.2, 0.6]], "no probabilities"),
        ("logits", [[0.5, 0.5, 0.5]], "probabilities"),
    ],
)
def test_all_outputs_are_checked_for_probabilities(
    settings, tmp_path, outputs, last, description
):
    """The last validation images have no probabilities, all others have: the first 64
    answers do not say it.
    """
    write(settings, tmp_path / "a.csv", torch.tensor(last))
    data = listed(settings)
    first = (
        data.val.name(len(data.val) - len(last))
        if outputs == "probabilities"
        else data.train.name(0)
    )
    with pytest.raises(
        ModelError,
        match=(
            rf"^teacher\.outputs: is {outputs}, but the outputs are {description}: '{first}'"
        ),
    ):
        build(with_answers(settings, tmp_path / "a.csv", outputs=outputs))


def test_a_run_notes_that_table_outputs_ignore_augmentation(settings, tmp_path, capsys):
    write(settings, tmp_path / "a.csv")
    chosen = with_answers(
        settings, tmp_path / "a.csv", outputs="probabilities", min_accuracy=0.0
    )
    note = (
        "its outputs are for whole images; the student sees augmented ones"
        " (data.augment: crop 0.25, flip 0.5"
    )
    assert note in describe(
        resolve(config.load(chosen, ["data.augment.crop_scale=0.25"]))
    )
    kd.train(chosen, "data.augment.crop_scale=0.25", "run.steps=1", "run.epochs=1")
    assert f"teacher: {note}" in capsys.readouterr().out
    plain = [
        "data.augment.crop_scale=1",
        "data.augment.flip=0",
        "data.augment.jitter=0",
        "data.augment.policy=",
    ]
    assert "whole images" not in describe(resolve(config.load(chosen, plain)))


def test_numbers_of_vectors_and_names_must_be_equal(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        vectors=np.eye(2, 4, dtype=np.float32),
        classes=["apple", "fig", "pear"],
    )
    with pytest.raises(
        ModelError, match=r"^teacher\.vectors: .* names 3 classes and holds 2 vectors"
    ):
        read_vectors(str(tmp_path / "a.npz"), "teacher.vectors")
