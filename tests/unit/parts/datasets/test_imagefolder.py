"""Folders as people keep them, and what is said of those that cannot be used."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from pieces import WITHOUT_HEIF, labels, names
from PIL import Image

from kd.core.errors import CorruptImage, DataError
from kd.core.text import nfc
from kd.files.pixels import HEIF
from kd.parts.datasets.imagefolder import Options, build, facts


def paint(path: Path, color: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (color, 0, 0)).save(path, "PNG")
    return path


def fill(root: Path, *names: str) -> Path:
    for color, name in enumerate(names):
        paint(root / name, color)
    return root


def options(root: Path, **changes) -> Options:
    return Options(root=str(root), **changes)


def test_endings_may_have_any_case_and_hidden_files_are_no_images(tmp_path):
    good = ["1.JPG", "2.jpeg", "3.Png", "4.bmp", "5.webp", "6.gif", "7.tif", "8.TIFF"]
    ignored = [".9.png", "._1.JPG", "notes.txt", "a.npy", "Thumbs.db", ".cache/1.png"]
    fill(tmp_path, *(f"train/{name}/{file}" for name in "ab" for file in good))
    for file in ignored:
        path = tmp_path / "train" / "a" / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    source = build(options(tmp_path), "train", None)
    assert [Path(name).name for name in names(source)] == good * 2


def test_a_file_without_an_ending_is_read_if_it_begins_as_an_image(tmp_path):
    fill(tmp_path, "train/apple/1.png", "train/apple/a94a8fe5", "train/pear/2.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "train/pear/de9f2c7f", "JPEG")
    (tmp_path / "train/pear/README").write_text("BMW and other notes")
    (tmp_path / "train/pear/empty").touch()
    os.mkfifo(tmp_path / "train/pear/pipe")
    source = build(options(tmp_path), "train", None)
    assert names(source) == [
        "train/apple/1.png",
        "train/apple/a94a8fe5",
        "train/pear/2.png",
        "train/pear/de9f2c7f",
    ]
    assert source.decode(3).image.size == (4, 4)
    assert source.notes == ("3 files are not read: 3 without an ending",)


@WITHOUT_HEIF
def test_omitted_files_are_counted_and_named(tmp_path):
    fill(
        tmp_path,
        *(f"train/{name}/1.png" for name in ("apple", "fruit/pear")),
        "train/notes.txt",
    )
    for name in ("fig", "nuts/hazel", "fruit/plum"):
        (tmp_path / "train" / name).mkdir(parents=True)
    for name in ("fig/1.HEIC", "fig/2.HEIC", "fruit/plum/a.npy", "apple/Thumbs.db"):
        (tmp_path / "train" / name).write_bytes(b"x")
    unread, bare = build(options(tmp_path), "train", None).notes
    assert unread.startswith(
        "5 files are not read: 2 .HEIC (pillow-heif reads them: pip install"
        " 'PATH/kd[heic]'), 1 ."
    )
    assert all(f"1 {ending}" in unread for ending in (".txt", ".npy", ".db"))
    assert (
        bare == "3 folders have no image and are no class: train/fig, train/fruit/plum,"
        " train/nuts"
    )


@pytest.mark.slow  # pytest inside pytest
@pytest.mark.skipif(
    not HEIF, reason="pillow-heif is not installed: the tests run as they are"
)
def test_heic_without_pillow_heif_names_the_package():
    """The tests that need its absence, in a process that does not find it."""
    here = Path(__file__).parent
    chosen = [here, here.parents[1] / "jobs" / "test_before_a_run.py"]
    code = (
        "import pytest, sys; sys.modules['pillow_heif'] = None;"
        " sys.exit(pytest.main(sys.argv[1:]))"
    )
    argv = [
        sys.executable,
        "-c",
        code,
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "heic or left_out or not_read",
        *chosen,
    ]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) >= 3


def test_many_kinds_of_files_are_one_line(tmp_path):
    fill(tmp_path, "train/apple/1.png", "train/pear/1.png")
    for number in range(9):
        (tmp_path / f"train/pear/a.x{number}").write_text("no image")
    assert (
        build(options(tmp_path), "train", None).notes[0].endswith(" and 3 kinds more")
    )
    shutil.rmtree(tmp_path / "train/apple")
    with pytest.raises(
        DataError, match=r"only one class, 'pear'; 9 files are not read: 1 \.x"
    ):
        build(options(tmp_path), "train", None)
    (tmp_path / "train/pear/1.png").unlink()
    with pytest.raises(
        DataError,
        match=r"no images for the split 'train' in '.*train' \(9 files are not read",
    ):
        build(options(tmp_path), "train", None)


def test_linked_class_folders_and_files_are_read(tmp_path):
    fill(tmp_path / "store", "apples/1.png", "pear.png")
    fill(tmp_path / "root", "train/pear/1.png")
    (tmp_path / "root/train/apple").symlink_to(tmp_path / "store/apples")
    (tmp_path / "root/train/pear/2.png").symlink_to(tmp_path / "store/pear.png")
    source = build(options(tmp_path / "root"), "train", None)
    assert names(source) == [
        "train/apple/1.png",
        "train/pear/1.png",
        "train/pear/2.png",
    ]
    assert source.decode(2).image.size == (4, 4)


def test_dangling_and_circular_file_links_fail_in_decode_only(tmp_path):
    fill(tmp_path, "train/apple/1.png", "train/pear/1.png")
    (tmp_path / "train/apple/2.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "train/apple/3.png").symlink_to(tmp_path / "train/apple/3.png")
    source = build(options(tmp_path), "train", None)
    for id in (1, 2):
        with pytest.raises(
            CorruptImage,
            match=(
                rf"'train/apple/{id + 1}.png': it is a link to .* no file"
                r" is.*on_corrupt=skip"
            ),
        ):
            source.decode(id)
    Image.new("RGB", (4, 4)).save(tmp_path / "gone.png")
    assert source.decode(1).image.size == (4, 4)  # it is there now


def test_jpegs_by_other_names_and_by_their_content(tmp_path):
    kinds = ("jfif", "jpe", "JPEG_LARGE", "jpg_large", "pjpeg", "jpg_1", "4", "webp~")
    fill(tmp_path, "train/apple/1.png", *(f"train/pear/a.{kind}" for kind in kinds))
    for name in ("notes.txt~", "photo.nef", "scan.4.5"):
        (tmp_path / "train/pear" / name).write_bytes(
            b"II*\0 a raw photograph begins as a TIFF does"
        )
    source = build(options(tmp_path), "train", None)
    assert len(source) == 1 + len(kinds)
    assert {source.decode(id).image.size for id in range(len(source))} == {(4, 4)}
    assert source.notes[0].startswith("3 files are not read: 1 .")


def test_folders_may_be_named_by_numbers_and_in_two_unicode_forms(tmp_path):
    fill(tmp_path, *(f"train/{label}/1.png" for label in range(12)))
    assert build(options(tmp_path), "train", None).classes == tuple(map(str, range(12)))
    composed = "caf\xe9"
    decomposed = "cafe\u0301"
    fill(
        tmp_path / "b",
        f"train/{composed}/1.png",
        f"train/{decomposed}/2.png",
        "train/x/1.png",
        f"val/{decomposed}/1.png",
        "val/x/1.png",
    )
    train = build(options(tmp_path / "b"), "train", None)
    val = build(options(tmp_path / "b"), "val", train.classes)
    assert (train.classes, [val.classes[val.label(id)] for id in range(2)]) == (
        (composed, "x"),
        [composed, "x"],
    )
    assert len(train) == 3


@pytest.mark.skipif(os.name != "posix", reason="file names are bytes on POSIX only")
def test_a_file_name_may_be_no_utf8(tmp_path):
    fill(tmp_path, "train/apple/1.png", "train/pear/1.png")
    try:
        os.rename(
            bytes(tmp_path / "train/apple/1.png"),
            bytes(tmp_path) + b"/train/apple/\xff.png",
        )
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    source = build(options(tmp_path), "train", None)
    assert source.name(0) == "train/apple/\\xff.png"
    source.decode(0)


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, "train/1.png", "train/2.png", "bus/1.png", "bus/2.png")
    assert build(options(tmp_path, val_fraction=0.5), "train", None).classes == (
        "bus",
        "train",
    )


def test_val_fraction_needs_a_class_of_two_images(tmp_path):
    fill(tmp_path, "apple/1.png", "pear/1.png")
    train = build(options(tmp_path, val_fraction=0.5), "train", None)
    assert len(train) == 2
    with pytest.raises(DataError, match="no class has two images"):
        build(options(tmp_path, val_fraction=0.5), "val", train.classes)


ONE_EACH = ("train/apple/1.png", "train/pear/1.png")


@pytest.mark.parametrize(
    ("files", "changes", "split", "message"),
    [
        (
            ["food101/1.png"],
            {"root": "fod101"},
            "train",
            r"'.*fod101' does not exist. Did you mean 'food101'",
        ),
        (
            ["food.tar"],
            {"root": "food.tar"},
            "train",
            r"is a file\. A folder of images. Unpack the archive",
        ),
        (
            [],
            {},
            "train",
            (
                r"no images for the split 'train' in '.*train'. Files in class folders,"
                r" ending in .jpg"
            ),
        ),
        (
            ["train/apple/1.png"],
            {},
            "train",
            r"the split 'train' has only one class, 'apple'",
        ),
        (
            [*ONE_EACH, "train/1.png", "train/2.png"],
            {},
            "train",
            r"'train/1\.png' lies outside any .*, with 1 more",
        ),
        (
            ["val/aple/1.png"],
            {},
            "val",
            r"the class 'aple', which .*\. Allowed: apple, pear\. Did you mean 'apple'",
        ),
        (
            ["trian/a/1.png"],
            {},
            "train",
            (
                r"no folder 'train'. It has: trian. Did you mean 'trian'\? Set"
                r" data.train_s"
            ),
        ),
        (
            ["validation/a/1.png"],
            {},
            "val",
            r"no folder 'val'. It has: validation. Did you mean 'validation'\?",
        ),
        (
            ["test/a/1.png"],
            {},
            "val",
            r"It has: test. Did you mean 'test'\? Set data.val_split, or data.val_f",
        ),
        (
            ["apple/1.png"],
            {},
            "train",
            r"It has: apple. Set data.train_split, or data.val_fraction=0.1",
        ),
        (
            ONE_EACH,
            {"val_fraction": 0.1},
            "train",
            r"data\.root is already split: it has a folder 'train'",
        ),
    ],
)
def test_unfit_folders_are_one_line_errors(tmp_path, files, changes, split, message):
    (
        (tmp_path / "train/apple").mkdir(parents=True)
        if not files
        else fill(tmp_path, *files)
    )
    chosen = {**changes, "root": str(tmp_path / changes.get("root", ""))}
    with pytest.raises(
        DataError, match=rf"^data\.(root|val_fraction): .*{message}"
    ) as caught:
        build(Options(**chosen), split, None if split == "train" else ("apple", "pear"))
    assert "\n" not in str(caught.value)


def test_a_link_in_a_circle_is_refused(tmp_path):
    fill(tmp_path, "train/apple/1.png")
    (tmp_path / "train/apple/again").symlink_to(tmp_path / "train")
    with pytest.raises(
        DataError,
        match=r"data\.root: the folder '.*apple/again' is a link to a folder above it",
    ):
        build(options(tmp_path), "train", None)


def test_a_listing_is_compact(tmp_path):
    fill(tmp_path, *(f"train/{name}/{n:03d}.png" for name in "ab" for n in range(50)))
    assert (
        len(pickle.dumps(build(options(tmp_path), "train", None))) < 100 * 48
    )  # an image: path, end, label, times


def test_a_test_split_may_stand_beside_train_and_val(tmp_path):
    fill(
        tmp_path,
        "train/a/1.png",
        "train/b/1.png",
        "val/a/2.png",
        "exam/b/3.png",
        "exam/a/4.png",
    )
    chosen = options(tmp_path, test_split="exam")
    assert names(build(chosen, "test", ("a", "b"))) == ["exam/a/4.png", "exam/b/3.png"]
    assert facts(chosen).test == "test_split"
    assert facts(options(tmp_path)).test == ""
    with pytest.raises(
        DataError,
        match=r"has no folder 'exams'.*Did you mean 'exam'.*Set data.test_split",
    ):
        build(options(tmp_path, test_split="exams"), "test", ("a", "b"))
    with pytest.raises(
        ValueError, match="another folder than train_split and val_split"
    ):
        options(tmp_path, test_split="val")


def test_val_fraction_of_the_training_folder_where_a_test_folder_is_named(tmp_path):
    fill(
        tmp_path,
        *(f"train/{name}/{i}.png" for name in "ab" for i in range(6)),
        "test/a/1.png",
        "test/b/2.png",
    )
    chosen = options(tmp_path, test_split="test", val_fraction=0.3)
    train, val, test = (
        build(chosen, split, ("a", "b")) for split in ("train", "val", "test")
    )
    assert (len(train), len(val), names(test)) == (
        8,
        4,
        ["test/a/1.png", "test/b/2.png"],
    )
    assert sorted(names(train) + names(val)) == [
        f"train/{name}/{i}.png" for name in "ab" for i in range(6)
    ]


@pytest.mark.parametrize("folder", ["unlabeled", "Unlabelled", "rest"])
def test_a_folder_of_unlabelled_images_does_not_become_a_class(tmp_path, folder):
    fill(tmp_path, "train/apple/1.png", "train/pear/2.png", f"train/{folder}/3.png")
    source = build(options(tmp_path, unlabelled=folder), "train", None, "some")
    assert (source.classes, sorted(labels(source))) == (("apple", "pear"), [-1, 0, 1])
    if folder != "rest":
        with pytest.raises(
            DataError,
            match=(
                rf"^data\.unlabelled: .*'{folder}' would be a class.* Set it to"
                rf" {folder}"
            ),
        ):
            build(options(tmp_path), "train", None, "some")


def test_the_same_images_are_held_out_in_both_unicode_forms(tmp_path):
    """macOS writes é as two characters: a copy of the data from there once had other
    validation images.
    """
    held_out = []
    for form in ("NFC", "NFD"):
        root = tmp_path / form
        for folder in ("b", unicodedata.normalize(form, "é")):
            (root / folder).mkdir(parents=True)
            for number in range(20):
                (root / folder / f"{number}.png").write_bytes(b"x")
        source = build(Options(root=str(root), val_fraction=0.2), "val", None)
        held_out.append({nfc(source.name(id)) for id in range(len(source))})
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == 8
