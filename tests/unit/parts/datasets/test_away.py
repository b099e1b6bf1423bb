"""A storage that fails: tried again, then fatal; never taken for a corrupt image."""

import builtins
import errno
import os
import threading
import time

import pytest
from PIL import Image

from kd.core.errors import CorruptImage, DataError
from kd.data.views import EvalTransform, Views
from kd.files import storage
from kd.parts.datasets._source import ImageSource
from kd.parts.datasets.imagefolder import Options, build


@pytest.fixture
def source(tmp_path) -> ImageSource:
    for name in ("apple", "pear"):
        folder = tmp_path / "root" / "train" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (4, 4), (9, 9, 9)).save(folder / "1.png")
    (tmp_path / "root" / "train" / "pear" / "2.png").write_text("not an image")
    return build(Options(root=str(tmp_path / "root")), "train", None)


@pytest.mark.parametrize(
    "code", ["ESTALE", "EIO", "EACCES", "ENOENT", "ETIMEDOUT", "ENOTCONN", "EMFILE"]
)
def test_a_failed_read_is_fatal_although_corrupt_images_are_skipped(
    source, monkeypatch, code
):
    number = getattr(errno, code)
    tries = []
    opened = builtins.open

    def fail(path, *args, **options):
        if not os.fsdecode(path).endswith("1.png"):
            return opened(path, *args, **options)
        tries.append(path)
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(storage, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(builtins, "open", fail)
    views = Views(source, EvalTransform(4, 1.0), 4, 0, on_corrupt="skip")
    with pytest.raises(
        DataError,
        match=r"data\.root: file 'train/apple/1\.png': .* the storage is away",
    ) as caught:
        views.load(0, 0)
    assert os.strerror(number) in str(caught.value)
    assert not isinstance(caught.value, CorruptImage)
    assert len(tries) == 3
    assert not views.load(2, 0).readable  # read whole, and no image


def test_a_file_of_many_gigabytes_is_refused_unread(source, tmp_path):
    os.truncate(
        tmp_path / "root" / "train" / "apple" / "1.png", 40 * 10**9
    )  # zeros that take no space
    with pytest.raises(
        CorruptImage, match=r"file 'train/apple/1\.png': it has 40000000000 bytes"
    ):
        source.decode(0)


def test_a_storage_that_comes_back_is_not_noticed(source, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PAUSES", (0.05,) * 200)
    (tmp_path / "root").rename(tmp_path / "away")

    def come_back() -> None:
        time.sleep(0.2)
        (tmp_path / "away").rename(tmp_path / "root")

    back = threading.Thread(target=come_back)
    back.start()
    assert source.decode(0).image.size == (4, 4)
    back.join()
