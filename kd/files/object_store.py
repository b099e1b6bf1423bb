"""List, read and copy files at URLs such as `s3://bucket/key`, by fsspec."""

import errno
import functools
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kd.core.errors import DataError, MissingExtra, first_sentence
from kd.files.storage import atomic_file

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
EXTRAS = {"s3": "pip install 'PATH/kd[sagemaker]'", "gs": "pip install gcsfs"}
# errors of this machine's disk, which are raised unchanged
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return URL.match(path) is not None


def join_url(url: str, name: str) -> str:
    """Return the URL of a file below another URL."""
    return f"{url.rstrip('/')}/{name}"


def versions(url: str, config_path: str) -> dict[str, tuple[int, str]]:
    """Return size and `version` of all files at or below a URL, sorted.

    A URL with wildcards gives the matches. Folders are left out.
    """
    with _store_errors(url, config_path):
        files, path = _open_store(url, config_path)
        infos = {}
        if re.search(r"[*?\[]", path):
            infos = {
                files.unstrip_protocol(name): info
                for name, info in files.glob(path, detail=True).items()
            }
        # not `unstrip_protocol`: a URL has several spellings, and the caller's is kept
        else:
            for name, info in files.find(path, detail=True).items():
                below = name[len(path) :].lstrip("/")
                infos[join_url(url, below) if below or name.endswith("/") else url] = (
                    info
                )
        # object stores' consoles write an empty object "photos/" for a folder
        return {
            name: (int(info["size"] or 0), _version(name, info))
            for name, info in sorted(infos.items())
            if not name.endswith("/") and info.get("type") != "directory"
        }


def version(url: str, config_path: str) -> str:
    """Return a hash of a file's size, ETag and times in the store.

    It changes with the content.
    """
    with _store_errors(url, config_path):
        files, path = _open_store(url, config_path)
        return _version(url, files.info(path))


def _version(url: str, info: Any) -> str:
    keys = ("size", "ETag", "etag", "mtime", "LastModified", "updated")
    stamps = [str(info.get(key, "")) for key in keys]
    return hashlib.sha256("\0".join([url, *stamps]).encode()).hexdigest()[:12]


def read_url(url: str, config_path: str) -> bytes:
    """Read a whole file.

    FileNotFoundError and PermissionError are raised as for a local file.
    """
    try:
        with _store_errors(url, config_path, (FileNotFoundError, PermissionError)):
            files, path = _open_store(url, config_path)
            return files.cat_file(path)
    except (FileNotFoundError, PermissionError) as error:
        raise type(error)(
            error.errno or errno.ENOENT, "no such file, or no right to read it", url
        ) from error


def copy_here(url: str, target: Path, config_path: str) -> None:
    """Copy a file to this machine, atomically."""
    with (
        atomic_file(target, config_path) as draft,
        _store_errors(url, config_path, disk=True),
    ):
        files, path = _open_store(url, config_path)
        files.get_file(path, str(draft))


def _open_store(url: str, config_path: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    try:
        files = _file_system(protocol, os.getpid())
    # ValueError: fsspec does not know the protocol
    except (ImportError, ValueError) as error:
        remedy = EXTRAS.get(protocol, "Install the package for fsspec that brings it")
        wrong = (
            f"'{url}' needs a package that is not installed ({first_sentence(error)})"
        )
        raise MissingExtra(config_path, wrong, "", remedy) from error
    return files, files._strip_protocol(url)


@functools.lru_cache
def _file_system(protocol: str, process: int) -> Any:
    """Return the process's file system, shared by its threads.

    fsspec would make one with a client per thread.
    """
    import fsspec

    return fsspec.filesystem(protocol, use_listings_cache=False)


@contextmanager
def _store_errors(
    url: str,
    config_path: str,
    passed: tuple[type[Exception], ...] = (),
    disk: bool = False,
) -> Iterator[None]:
    """Convert a store's exceptions, of many unrelated types, to a DataError.

    `passed` are raised unchanged.
    """
    try:
        yield
    except (MissingExtra, *passed):
        raise
    except Exception as error:
        if disk and isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        wrong = f"'{url}': the store reports: {first_sentence(error)}"
        remedy = (
            "Check the name, credentials and network, then run the same command again"
        )
        raise DataError(config_path, wrong, "", remedy) from error
