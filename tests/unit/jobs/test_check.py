"""What `kd-train --check` says of images that repeat, and `data.exclude`, which takes
the list.
"""

import csv
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from kd import config
from kd.core.contracts import HasWarnings, Source, Stamped
from kd.core.errors import CorruptImage, DataError
from kd.jobs.scan_images import scan
from kd.setup.data import open_sources
from kd.setup.recipe import resolve
from kd.study.audit.lists import read_repeats


@pytest.fixture
def leaking(photos: Path, tmp_path: Path) -> Path:
    """The photos, of which one lies in both splits, and one is cropped, with two
    labels.
    """
    root = tmp_path / "leaking"
    shutil.copytree(photos, root)
    shutil.copy(root / "train/fig/03.jpg", root / "val/fig/copy.jpg")
    big = np.asarray(Image.open(root / "train/pear/05.jpg").resize((200, 200), 3))
    Image.fromarray(big).save(root / "train/pear/big.jpg")
    Image.fromarray(big[10:190, 10:190]).save(root / "train/apple/cut.jpg")
    return root


def sources(settings: dict, root: Path, *overrides: str):
    values = {**settings, "data": {**settings["data"], "root": str(root)}}
    return open_sources(resolve(config.load(values, overrides)).data)


def test_repeats_are_named_listed_and_shown(
    settings: dict, leaking: Path, tmp_path: Path
):
    data = sources(settings, leaking)
    lines = scan(data.splits, -1.0, tmp_path / "run", everything=True)
    assert lines[0] == "images    decoded all 52: none is damaged"
    assert (
        lines[1]
        == "repeats   1 pairs in two splits (1 with the same bytes), 1 with two labels"
        " in one"
    )
    assert (
        "train:train/fig/03.jpg = val:val/fig/copy.jpg (same bytes, 1.00)" in lines[2]
    )
    assert "labelled apple and pear" in lines[3]
    assert f"data.exclude={tmp_path / 'run/audit/exclude.txt'}" in lines[-1]
    assert "data.group keeps frames of a clip" in lines[-2]
    with (tmp_path / "run/audit/duplicates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["same bytes", "a part"]
    assert (rows[0]["name"], rows[0]["other name"]) == (
        "train/fig/03.jpg",
        "val/fig/copy.jpg",
    )
    repeats = read_repeats(tmp_path / "run/audit")
    assert (
        repeats[0].leaks,
        repeats[0].contradicts,
        repeats[1].leaks,
        repeats[1].contradicts,
    ) == (
        True,
        False,
        False,
        True,
    )
    page = (tmp_path / "run/audit/duplicates.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 4
    assert "://" not in page


def test_clean_images_leave_no_file(settings: dict, photos: Path, tmp_path: Path):
    lines = scan(sources(settings, photos).splits, -1.0, tmp_path / "run")
    assert lines[1].startswith("repeats   none among all 49")
    assert not (tmp_path / "run").exists()


def test_more_damaged_images_than_a_run_skips_are_refused_and_named(
    settings: dict, photos: Path, tmp_path: Path
):
    """It said "5 damaged, to be skipped", and the run ended after some steps."""
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    for name in ("fig/03", "fig/04", "pear/05"):
        (root / f"train/{name}.jpg").write_bytes(b"\xff\xd8\xff")
    splits = sources(settings, root).splits
    with pytest.raises(
        DataError, match=r"data\.max_skipped: 3 of the \d+ images of 'train'"
    ) as refused:
        scan(splits, 0.01, tmp_path / "run")
    with pytest.raises(
        CorruptImage,
        match=r"3 images among all 49 are damaged: .* The first: .*damaged",
    ) as stopped:
        scan(splits, -1.0, tmp_path / "run")
    for name in ("fig/03.jpg", "fig/04.jpg", "pear/05.jpg"):
        assert f"train:train/{name}" in str(refused.value)
        assert f"train:train/{name}" in str(stopped.value)
    remaining = sources(
        settings, root, f"data.exclude={tmp_path / 'run/audit/damaged.txt'}"
    ).splits
    assert "none is damaged" in scan(remaining, -1.0, tmp_path / "run")[0]
    assert "3 damaged, to be skipped" in scan(splits, 0.2, tmp_path / "run")[0]


def test_the_list_is_taken_by_data_exclude(
    settings: dict, leaking: Path, tmp_path: Path
):
    complete = sources(settings, leaking)
    scan(complete.splits, -1.0, tmp_path / "run", everything=True)
    file = tmp_path / "run/audit/exclude.txt"
    text = file.read_text()
    assert "\ntrain:train/fig/03.jpg\n" in text
    assert "\n# train:train/apple/cut.jpg\n" in text
    data = sources(settings, leaking, f"data.exclude={file}")
    names = [data.train.name(id) for id in range(len(data.train))]
    assert names == [
        name
        for name in map(complete.train.name, range(len(complete.train)))
        if name != "train/fig/03.jpg"
    ]
    assert len(data.val) == len(complete.val)
    assert (
        "data.exclude: 1 of 38 images of the split 'train' are left out" in data.notes
    )
    assert data.train.fingerprint != complete.train.fingerprint
    assert (
        data.val.fingerprint == complete.val.fingerprint
    )  # so that two runs are compared on the same images
    assert (
        "none among all 51"
        not in scan(data.splits, -1.0, tmp_path / "again", everything=True)[1]
    )


def test_a_subset_is_a_source_with_new_ids(
    settings: dict, leaking: Path, tmp_path: Path
):
    (tmp_path / "list.txt").write_text(
        "# a remark\n\nval/fig/copy.jpg\n train:train/apple/00.jpg \n"
    )
    complete = sources(settings, leaking)
    data = sources(settings, leaking, f"data.exclude={tmp_path / 'list.txt'}")
    assert (len(data.train), len(data.val)) == (
        len(complete.train) - 1,
        len(complete.val) - 1,
    )
    train = pickle.loads(pickle.dumps(data.train))
    assert isinstance(train, Source)
    assert isinstance(train, HasWarnings)
    assert isinstance(train, Stamped)
    assert isinstance(complete.train, Stamped)
    for id in range(len(train)):
        old = next(
            i
            for i in range(len(complete.train))
            if complete.train.name(i) == train.name(id)
        )
        assert (train.label(id), train.stamp(id)) == (
            complete.train.label(old),
            complete.train.stamp(old),
        )
        assert train.decode(id).crc == complete.train.decode(old).crc
    (tmp_path / "other.txt").write_text("train:train/apple/01.jpg\nval/fig/copy.jpg\n")
    other_subset = sources(settings, leaking, f"data.exclude={tmp_path / 'other.txt'}")
    assert (
        len(
            {
                complete.train.fingerprint,
                train.fingerprint,
                other_subset.train.fingerprint,
            }
        )
        == 3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:train/fig/03.jpeg\n",
            "names 'train:train/fig/03.jpeg', which is no image",
        ),
        ("val:train/fig/03.jpg\nx\n", "which is no image; 2 of 2 names are missing"),
        (
            "".join(
                f"val/{kind}/{i:02d}.jpg\n"
                for kind in ("apple", "fig", "pear")
                for i in range(5)
            ),
            "names all images",
        ),
    ],
)
def test_a_wrong_list_is_one_error(
    settings: dict, photos: Path, tmp_path: Path, text: str, message: str
):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(DataError, match=r"data\.exclude: ") as caught:
        sources(settings, photos, f"data.exclude={tmp_path / 'list.txt'}")
    assert message in str(caught.value)
    with pytest.raises(DataError, match=r"data\.exclude: .* cannot be read"):
        sources(settings, photos, "data.exclude=nowhere.txt")


def test_check_stands_before_or_behind_the_configuration(
    written, command, leaking: Path, inside: Path
):
    path = written(data={"root": str(leaking)}, run={"folder": "runs"})
    for argv in ((path, "--check=all"), ("--check", path)):
        answer = command("train", *argv)
        assert answer.code == 0, answer
        assert "repeats   1 pairs in two splits" in answer.out
    assert [entry.name for entry in (inside / "runs/tiny").iterdir()] == ["audit"]
    answer = command(
        "train", path, "data.exclude=runs/tiny/audit/exclude.txt", "run.steps=1"
    )
    assert answer.code == 0, answer
    assert "1 of 38 images of the split 'train' are left out" in answer.out
    assert "split 'val'" not in answer.out
    assert "also in another split" not in command("report", "runs/tiny").out
    assert command("train", path, "--check=none").code == 2


def test_a_list_that_is_in_use_stays_when_it_is_written_anew(
    written, command, leaking: Path, inside: Path
):
    path = written(data={"root": str(leaking)}, run={"folder": "runs", "steps": 1})
    exclude = "runs/tiny/audit/exclude.txt"
    assert command("train", path, "--check=all").code == 0
    assert command("train", path, f"data.exclude={exclude}").code == 0
    answer = command("train", path, f"data.exclude={exclude}", "--check=all")
    assert (
        "repeats   0 pairs in two splits (0 with the same bytes), 1 with two labels"
        in answer.out
    )
    lines = Path(exclude).read_text().splitlines()
    assert {"train:train/fig/03.jpg", "# train:train/apple/cut.jpg"} <= {*lines}
    assert (
        command("train", path, f"data.exclude={exclude}").code == 0
    )  # the same images as before


def test_a_look_at_some_images_keeps_what_is_listed(
    settings, leaking: Path, tmp_path: Path, monkeypatch
):
    splits = sources(settings, leaking).splits
    folder = tmp_path / "run"
    scan(splits, -1.0, folder, everything=True)
    with (folder / "audit/duplicates.csv").open("a") as file:
        file.write("a part,0.9,train,train/fig/00.jpg,fig,val,val/fig/00.jpg,fig\n")
        file.write("a part,0.9,train,train/fig/gone.jpg,fig,val,val/fig/00.jpg,fig\n")
    monkeypatch.setattr("kd.jobs.scan_images.MOST_LOOKED", 51)
    assert "decoded 51 of 52" in scan(splits, -1.0, folder)[0]
    names = [pair.first.name for pair in read_repeats(folder / "audit")]
    assert "train/fig/00.jpg" in names
    assert "train/fig/gone.jpg" not in names


def test_images_that_kd_serve_refuses_are_counted(settings, photos, tmp_path):
    """Training takes them; before, the first client of the endpoint met the limits."""
    shutil.copytree(photos, tmp_path / "more")
    kinds = {
        "a.gif": (60, 40),
        "b.png": (300, 10),
        "c.png": (30, 3),
        "d.png": (5200, 5000),
        "e.jpg": (5200, 5000),
    }
    for name, size in kinds.items():
        Image.new("L", size).save(tmp_path / "more/train/fig" / name)
    with (tmp_path / "more/train/fig/e.jpg").open("ab") as file:
        file.write(bytes(25 * 2**20))
    settings["data"]["root"] = str(tmp_path / "more")
    lines = scan(
        open_sources(resolve(config.load(settings)).data).splits,
        -1.0,
        tmp_path / "run",
        everything=True,
    )
    (line,) = [line for line in lines if line.startswith("endpoint")]
    assert line.startswith(
        "endpoint  kd-serve refuses 5 of all 54 by its default limits: "
    )
    for reason in (
        "1 GIF",
        "1 with a side ratio above 20",
        "1 with a side below 4 px",
        "1 PNG above 25 million pixels",
        "1 above 25 MiB",
    ):
        assert reason in line


@pytest.mark.parametrize(
    "name", ["ap\u2028ple", "ap\u2029ple", "ap\x1b[2Jple", "ap\x85ple", "ap\tple"]
)
def test_a_class_name_that_no_server_would_load_is_refused(
    settings, photos, refused, tmp_path, name
):
    """It was trained and exported, and then nothing loaded it."""
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    for split in ("train", "val"):
        (root / split / "apple").rename(root / split / name)
    (tmp_path / "odd.yaml").write_text(
        yaml.safe_dump({**settings, "data": {**settings["data"], "root": str(root)}})
    )
    message = refused("train", tmp_path / "odd.yaml", "--check")
    assert message.startswith(
        f"data.kind: the class {name!a} has a control character or a line break. "
    )
    assert len(message.splitlines()) == 1
    vectors = sources(
        {**settings, "losses": [{"kind": "cosine"}]}, root
    )  # an embedding has no labels
    assert name in vectors.train.classes


def test_a_class_name_with_wide_spaces_is_taken(settings, photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    for split in ("train", "val"):
        (root / split / "apple").rename(root / split / "a\u3000b\u00a0c\u200cd")
    assert "a\u3000b\u00a0c\u200cd" in sources(settings, root).classes
