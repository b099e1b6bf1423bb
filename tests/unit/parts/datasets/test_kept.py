"""A kept listing is the listing, until something that it looks at has changed."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from kd.core.errors import KdError
from kd.parts.datasets.imagefolder import Options, build


@pytest.fixture
def options(tmp_path) -> Options:
    for folder, count in (("a", 150), ("b", 140), ("b/c", 3), ("bare", 0)):
        (tmp_path / "images" / folder).mkdir(parents=True, exist_ok=True)
        for image in range(count):
            (tmp_path / "images" / folder / f"{image:04d}.jpg").write_bytes(b"x" * (image + 1))
    (tmp_path / "images" / "a" / "notes.txt").write_text("no image")
    rest(tmp_path / "images")
    return Options(root=str(tmp_path / "images"), val_fraction=0.2, listing=str(tmp_path / "kept"))


def rest(root: Path) -> None:
    """Let all folders have rested for a minute."""
    then = time.time() - 60
    for folder, *_ in os.walk(root):
        os.utime(folder, (then, then))


def facts(source) -> tuple:
    ids = range(len(source))
    each = [(source.name(id), source.label(id), source.stamp(id)) for id in ids]
    return source.classes, source.fingerprint, source.notes[:2], each


def used(source) -> bool:
    return any("is used" in note for note in source.notes)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_kept_listing_is_the_listing(options, split):
    plain = build(Options(root=options.root, val_fraction=0.2), split, None)
    first, second = (build(options, split, None) for _ in range(2))
    assert facts(plain) == facts(first) == facts(second)
    assert (used(first), used(second)) == (False, True)
    assert "4 folders" not in second.notes[-1]
    assert "5 folders and" in second.notes[-1]  # the root and the bare one too
    path = Path(options.root, second.name(0))
    assert path.is_file()


def test_what_else_it_depends_on(options):
    build(options, "train", None)
    for other in (build(options, "val", None), build(options, "train", None, labels="none")):
        assert not used(other)
    other = Options(root=options.root, val_fraction=0.3, listing=options.listing)
    assert not used(build(other, "train", None))
    assert used(build(options, "train", None))


CHANGES = {
    "an image more": lambda root: (root / "b/c/new.jpg").write_bytes(b"x"),
    "an image less": lambda root: (root / "a/0007.jpg").unlink(),
    "another name": lambda root: (root / "a/0007.jpg").rename(root / "a/seven.jpg"),
    "a folder more": lambda root: (root / "d").mkdir(),
    "a folder less": lambda root: (root / "bare").rmdir(),
    "an image written in place": lambda root: (root / "a/0003.jpg").write_bytes(b"y" * 4),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_listed_again(options, change, caplog):
    build(options, "train", None)
    change(Path(options.root))
    with caplog.at_level(logging.INFO, "kd"):
        again = build(options, "train", None)
    assert not used(again)
    assert "since it was listed" in caplog.text
    assert facts(again) == facts(build(Options(root=options.root, val_fraction=0.2), "train", None))
    rest(Path(options.root))
    build(options, "train", None)
    assert used(build(options, "train", None))


def test_a_folder_that_has_just_changed_is_not_kept(options, caplog):
    os.utime(Path(options.root, "bare"))
    assert not used(build(options, "train", None))
    assert "not kept" in caplog.text
    assert not Path(options.listing).exists()


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_damaged_file_is_replaced(options, content, caplog):
    before = facts(build(options, "train", None))
    (file,) = Path(options.listing).iterdir()
    data = bytearray(file.read_bytes())
    data[data.index(b"labels.npy") + 200] ^= 255
    file.write_bytes(bytes(data) if content is None else content)
    again = build(options, "train", None)
    assert facts(again) == before
    assert not used(again)
    assert "cannot be read" in caplog.text
    assert used(build(options, "train", None))


def test_a_folder_that_cannot_be_written(options, tmp_path):
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(KdError, match=r"^data\.listing: "):
        build(options, "train", None)
