"""Files that are whole or absent: written beside their place, flushed, and renamed into it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kd.errors import RunError


@contextmanager
def atomic_folder(path: Path, where: str = "run.folder") -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` if the block ends well, and vanishes if it does not.

    An existing folder at `path` is replaced.

    Raises:
        RunError: the disk is full or not writable; nothing half-written stays.
    """
    draft = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for file in draft.rglob("*"):
            if file.is_file():
                _flush(file)
        if path.exists():
            old = path.parent / f".{path.name}.{os.getpid()}.old"
            os.replace(path, old)
            os.replace(draft, path)
            shutil.rmtree(old)
        else:
            os.replace(draft, path)
        _flush(path.parent)
    except OSError as error:
        raise disk_error(error, path, where) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_text(path: Path, text: str, where: str = "run.folder") -> None:
    """Write a text file atomically.

    Raises:
        RunError: the disk is full or not writable.
    """
    draft = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        _flush(draft)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise disk_error(error, path, where) from error


def write_json(path: Path, content: Any, where: str = "run.folder") -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n", where)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, inside of `atomic_folder`.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # safetensors hides the OSError in its text
        raise OSError(errno.ENOSPC if "No space" in str(error) else errno.EIO, str(error)) from error


def disk_error(error: OSError, path: Path, where: str) -> RunError:
    """Turn an OSError into one line with a remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    wrong = f"the disk is full at '{path}'" if full else f"cannot write '{path}' ({error.strerror or error})"
    remedy = "Free space and run the same command again: it resumes" if full else "Choose a folder that you may write"
    return RunError(where, wrong, "", remedy)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
