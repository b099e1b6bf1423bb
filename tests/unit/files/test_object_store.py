"""Files under URLs: what is half-written, missing or refused. The store is moto's."""

from __future__ import annotations

import gc
import io

import pytest

from kd.core.errors import DataError, MissingExtra, RunError
from kd.files import object_store


class Failing(io.BytesIO):
    """A file that can be read once."""

    def read(self, size=-1):
        if self.tell():
            raise OSError("the disk is gone")
        return super().read(8)


def test_an_upload_that_fails_leaves_nothing(aws):
    with pytest.raises(DataError, match="the disk is gone"):
        object_store.upload(Failing(b"half of it, and the rest"), "s3://bucket/file", "run.mirror")
    gc.collect()
    assert object_store.listing("s3://bucket", "run.mirror") == {}
    object_store.upload(io.BytesIO(b"whole"), "s3://bucket/a/file", "run.mirror")
    assert object_store.listing("s3://bucket/a/", "run.mirror") == {"s3://bucket/a/file": 5}
    assert object_store.listing("s3://bucket/a/file", "run.mirror") == {"s3://bucket/a/file": 5}
    assert object_store.read("s3://bucket/a/file", "run.mirror") == b"whole"
    for _ in range(2):
        object_store.remove("s3://bucket/a/file", "run.mirror")
    with pytest.raises(FileNotFoundError):
        object_store.read("s3://bucket/a/file", "run.mirror")


def test_an_upload_that_fails_says_why_in_any_store():
    with pytest.raises(DataError, match="the disk is gone"):
        object_store.upload(Failing(b"half of it, and the rest"), "memory://bucket/file", "run.mirror")


def test_a_version_changes_with_the_content(aws):
    found = set()
    for content in (b"one", b"two", b"two"):
        object_store.upload(io.BytesIO(content), "s3://bucket/file", "data.train")
        found.add(object_store.version("s3://bucket/file", "data.train")[:4])
    assert len(found) >= 2


def test_a_copy_is_whole_or_absent(aws, tmp_path, small_disk):
    object_store.upload(io.BytesIO(bytes(2**20)), "s3://bucket/file", "data.train")
    with pytest.raises(RunError, match=r"data\.train: the disk is full"):
        object_store.copy_here("s3://bucket/file", small_disk / "file", "data.train")
    assert list(small_disk.iterdir()) == []
    with pytest.raises(DataError, match=r"s3://bucket/other.*Check the name"):
        object_store.copy_here("s3://bucket/other", tmp_path / "other", "data.train")
    assert list(tmp_path.glob("other*")) == []


@pytest.mark.parametrize(("url", "words"), [("nocloud://a/b", "nocloud"), ("gs://a/b", "pip install gcsfs")])
def test_a_protocol_without_its_package(url, words):
    with pytest.raises(MissingExtra, match=words):
        object_store.listing(url, "data.train")
