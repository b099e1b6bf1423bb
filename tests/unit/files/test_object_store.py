"""Files under URLs: what is missing or refused. The store is moto's."""

import fsspec
import pytest

from kd.core.errors import DataError, MissingExtra, RunError
from kd.files import object_store


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


def test_files_are_listed_and_read(aws):
    put("s3://bucket/a/file", b"whole")
    assert list(object_store.versions("s3://bucket/a/", "data.train")) == [
        "s3://bucket/a/file"
    ]
    for url in ("s3://bucket/a/file", "s3://bucket/a/f*"):
        assert [
            size for size, _ in object_store.versions(url, "data.train").values()
        ] == [5]
    assert object_store.read_url("s3://bucket/a/file", "data.train") == b"whole"
    with pytest.raises(FileNotFoundError):
        object_store.read_url("s3://bucket/a/other", "data.train")


def test_a_version_changes_with_the_content(aws):
    versions = set()
    for content in (b"one", b"two", b"two"):
        put("s3://bucket/file", content)
        versions.add(object_store.version("s3://bucket/file", "data.train")[:4])
    assert len(versions) >= 2


@pytest.mark.parametrize(
    "mark", ["size", "ETag", "etag", "mtime", "LastModified", "updated"]
)
def test_each_mark_that_a_store_gives_is_part_of_the_version(mark):
    """Stores give different ones: S3 ETag and LastModified, Google etag and updated, a
    local disk mtime.
    """
    versions = {
        object_store._version("s3://bucket/file", {mark: value})
        for value in ("one", "two")
    }
    assert len(versions) == 2


def test_a_copy_is_whole_or_absent(aws, tmp_path, small_disk):
    put("s3://bucket/file", bytes(2**20))
    with pytest.raises(RunError, match=r"data\.train: the disk is full"):
        object_store.copy_here("s3://bucket/file", small_disk / "file", "data.train")
    assert list(small_disk.iterdir()) == []
    with pytest.raises(DataError, match=r"s3://bucket/other.*Check the name"):
        object_store.copy_here("s3://bucket/other", tmp_path / "other", "data.train")
    assert list(tmp_path.glob("other*")) == []


@pytest.mark.parametrize(
    ("url", "words"), [("nocloud://a/b", "nocloud"), ("gs://a/b", "pip install gcsfs")]
)
def test_a_protocol_without_its_package_is_refused(url, words):
    with pytest.raises(MissingExtra, match=words):
        object_store.versions(url, "data.train")
