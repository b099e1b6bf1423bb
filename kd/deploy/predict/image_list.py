"""List the images that `kd-predict` classifies.

They are in a folder, a list, one file, tar shards, or below a prefix of an object
store.
"""

import hashlib
import os
import re
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kd.core.errors import DataError
from kd.deploy.serve.decoding import begins_as_image, check_bytes, read_file
from kd.files import object_store, shards
from kd.files.folders import Walk, count_unread, is_image
from kd.files.pixels import ENDINGS
from kd.files.storage import read_with_retries

WHERE = "kd-predict"
STDIN = "-"
# the last three give rows with an error: kd-serve does not decode them
LISTED = (*ENDINGS, "heic", "heif", "avif")
GONE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors of one image, unless the image existed at listing and is gone now. That, and
any other OSError, may affect all later images and ends the command after some tries.
"""


@dataclass(frozen=True, slots=True)
class ImageList:
    """A list of images in a fixed order, with files that kd-serve does not decode."""

    names: Sequence[str]
    # (id) -> the bytes of an image; raises `GONE`, OSError or Problem. Thread-safe.
    read: Callable[[int], bytes]
    # size and time of each image at listing; "": missing, or a URL in a list
    stamps: Sequence[str]
    path: Callable[[int], str]  # (id) -> the local file of an image; "": it has none
    remote: bool = False  # reading uses a network
    notes: Sequence[str] = ()  # lines about files that the listing left out

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()

    def content(self, id: int) -> bytes:
        """Return the bytes of an image; retry if the storage fails.

        Errors of `GONE` concern only this image.
        """

        def read() -> bytes:
            try:
                return self.read(id)
            except GONE as error:
                if self.stamps[id] and self.path(id) and not _stamp(self.path(id)):
                    wrong = f"{error.strerror}, although it existed at listing"
                    raise OSError(wrong) from error
                raise

        return read_with_retries(read, f"'{self.names[id]}'", WHERE, final=GONE)


def find(source: str, copies: Path) -> ImageList:
    """List the images of a source, in the order of their rows.

    `source`: a folder (all images below it), tar shards by path or URL
    (`train-{000..009}.tar`), an image, a list of paths and URLs (one per line, or
    zero-terminated; relative to the file), a URL (all images below it), or "-": an
    image or a list on standard input, relative to the working folder. Remote shards are
    copied to `copies`.
    """
    if source.endswith(".tar"):
        images = _shards(source, copies)
    elif object_store.is_url(source):
        images = _below_url(source)
    elif os.path.isdir(source):
        images = _folder(source)
    elif source == STDIN or os.path.exists(source):
        images = _file(source)
    else:
        allowed = (
            "A folder, an image, a list (.txt), shards (.tar), a URL, or - (standard"
            " input)"
        )
        raise DataError(WHERE, f"'{source}' does not exist", allowed, "Check the path")
    if not images.names:
        allowed = f"Files ending in {', '.join(ENDINGS)}"
        raise DataError(WHERE, f"no images in '{source}'", allowed, "Check the path")
    return images


def _is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in LISTED


def _folder(root: str) -> ImageList:
    walk = Walk(
        root,
        b"",
        WHERE,
        lambda entry: _is_image(os.fsdecode(entry.name)) or is_image(entry),
    )
    images = _files(root, [os.fsdecode(path) for _, path, _ in walk])
    return replace(images, notes=count_unread(walk.unread))


def _files(folder: str, names: Sequence[str]) -> ImageList:
    folder = os.path.abspath(folder)  # other hosts have other working folders

    def path(id: int) -> str:
        return "" if object_store.is_url(names[id]) else os.path.join(folder, names[id])

    def content(id: int) -> bytes:
        return (
            read_file(path(id)) if path(id) else object_store.read_url(names[id], WHERE)
        )

    stamps = [_stamp(path(id)) for id in range(len(names))]
    remote = any(map(object_store.is_url, names))
    if names and not any(stamps) and not remote:
        wrong = f"none of the {len(names)} images is there, from '{names[0]}' on"
        raise DataError(WHERE, wrong, "", "Check the paths, or bring the storage back")
    return ImageList(names, content, stamps, path, remote)


def _stamp(path: str) -> str:
    """Return the size and time of a file; "" if there is no file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _below_url(prefix: str) -> ImageList:
    versions = object_store.versions(prefix, WHERE)
    urls = [url for url in versions if _is_image(url)]
    stamps = [versions[url][1] for url in urls]

    def read(id: int) -> bytes:
        size, _ = versions[urls[id]]
        check_bytes(size)
        return object_store.read_url(urls[id], WHERE)

    return ImageList(urls, read, stamps, lambda id: "", remote=True)


def _file(source: str) -> ImageList:
    if source != STDIN and os.path.isfile(source) and _is_image(source):
        return _files("", [source])
    try:
        data = sys.stdin.buffer.read() if source == STDIN else Path(source).read_bytes()
    except OSError as error:
        wrong = f"'{source}' cannot be read ({error.strerror})"
        allowed = "Text with a path a line, or an image"
        raise DataError(WHERE, wrong, allowed, "Check the file") from error
    if begins_as_image(data):
        name = "stdin" if source == STDIN else source
        stamp = hashlib.sha256(data).hexdigest()
        return ImageList([name], lambda id: data, [stamp], lambda id: "")
    data = data.removeprefix(b"\xef\xbb\xbf")
    if b"\0" in data:
        lines = data.split(b"\0")
    else:
        lines = [line.strip() for line in data.split(b"\n")]
    folder = "" if source == STDIN else os.path.dirname(source)
    return _files(folder, [os.fsdecode(line) for line in lines if line])


def _shards(pattern: str, copies: Path) -> ImageList:
    names: list[str] = []
    stamps: list[str] = []
    members: list[tuple[str, int, int]] = []  # path, offset and size per image
    for shard in shards.find_shards(pattern, WHERE, str(copies)):
        try:
            with open(shard.path, "rb", buffering=0) as file:
                samples = shards.members(file, shard.path, WHERE)
        except (OSError, tarfile.TarError) as error:
            wrong = f"the shard '{shard.origin}' cannot be read ({error})"
            allowed = "Whole, uncompressed .tar files"
            raise DataError(WHERE, wrong, allowed, "Copy or write it again") from error
        if shard.path == shard.origin:
            stamp = _stamp(shard.path)
        else:
            stamp = Path(shard.path).parent.name  # the URL's version
        title = re.split(r"[/\\]", shard.origin)[-1]
        for key, endings in samples.items():
            for ending in ENDINGS:
                if ending in endings:
                    names.append(f"{title}/{key}.{ending}")
                    members.append((shard.path, *endings[ending]))
                    stamps.append(stamp)

    def read(id: int) -> bytes:
        path, offset, size = members[id]
        check_bytes(size)
        return shards.read_member(path, offset, size)

    return ImageList(names, read, stamps, lambda id: members[id][0])
