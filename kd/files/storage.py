"""Files on a disk: files and folders that are whole or absent, a lock, checksummed records, folders named by a hash."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import struct
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from kd.errors import RunError

MANIFEST = "manifest.json"
LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]+\.(tmp|old)")
"""The hidden names of drafts and of folders that are being replaced."""
ABANDONED = 3600.0
"""Age in seconds from which a draft is taken for that of a killed process, where no lock tells."""
MANIFEST_WAIT = 10.0
"""Seconds that a reader waits for the manifest of a folder whose writer has just made the folder."""
LAST = 2**26
"""Bytes of a file of rows that are read: some 60,000 log windows, or two days of samples of the machine."""
log = logging.getLogger("kd")

# ---------------------------------------------------------------------------------------------- whole or absent


@contextmanager
def atomic_folder(path: Path, where: str = "run.folder") -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` if the block ends well, and is removed if it does not.

    An existing folder at `path` is replaced. If the process is killed in between, `recover` puts the old one back.

    Raises:
        RunError: the disk is full or not writable; no half-written folder stays.
    """
    recover(path.parent, path.name)
    draft = _beside(path)
    old = draft.with_suffix(".old")
    try:
        draft.mkdir(parents=True)
        with _opened(draft) as held:
            with suppress(OSError):  # so that `recover` in another process leaves it alone
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield draft
            for file in (*draft.rglob("*"), draft):
                flush(file)
            if path.exists():
                os.replace(path, old)
                try:
                    os.replace(draft, path)
                except OSError:
                    os.replace(old, path)
                    raise
                _delete(old, where)
            else:
                os.replace(draft, path)
        flush(path.parent)
    except OSError as error:
        raise disk_error(error, path, where) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def recover(folder: Path, name: str = "", alone: bool = False) -> None:
    """Remove drafts that killed processes left in a folder; put back what one of them was about to replace.

    Args:
        folder: where to look.
        name: of the file or folder that was being written; empty: any.
        alone: no other process writes here, so no draft is in use.
    """
    for left in sorted(folder.glob(".*.*.*")):  # of one draft, `old` comes before `tmp`
        found = LEFTOVER.fullmatch(left.name)
        if found is None or name not in ("", found[1]) or (not alone and _in_use(left.with_suffix(".tmp"))):
            continue
        if found[2] == "old" and not (folder / found[1]).exists():
            with suppress(OSError):
                os.replace(left, folder / found[1])
        else:
            _delete(left, "run.folder")


def remove_folder(path: Path, where: str = "run.folder") -> None:
    """Remove a folder, so that it is whole or gone. If that fails, warn."""
    left = _beside(path)
    try:
        os.replace(path, left)
    except OSError:
        left = path
    _delete(left, where)


@contextmanager
def atomic_file(path: Path, where: str = "run.folder") -> Iterator[Path]:
    """Yield the path of a draft that becomes `path` if the block ends well, and is removed if it does not.

    Raises:
        RunError: the disk is full or not writable.
    """
    draft = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        flush(draft)
        os.replace(draft, path)
        flush(path.parent)
    except OSError as error:
        raise disk_error(error, path, where) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def write_text(path: Path, text: str, where: str = "run.folder") -> None:
    """Write a text file atomically.

    Raises:
        RunError: the disk is full or not writable.
    """
    with atomic_file(path, where) as draft, draft.open("x", encoding="utf-8") as file:
        file.write(text)


def write_json(path: Path, content: Any, where: str = "run.folder") -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n", where)


def disk_error(error: OSError, path: Path, where: str) -> RunError:
    """Turn an OSError into one line with a remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    wrong = f"the disk is full at '{path}'" if full else f"cannot write '{path}' ({error.strerror or error})"
    remedy = "Free space and run the same command again: it resumes" if full else "Choose a folder that you may write"
    return RunError(where, wrong, "", remedy)


def flush(path: Path) -> None:
    """Make a file, or the list of files of a folder, durable.

    Raises:
        OSError: the disk is full or damaged. A file system that cannot flush folders is no error.
    """
    with _opened(path) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                raise


def _beside(path: Path) -> Path:
    """Return a new hidden name in the same folder. It is random: processes in two containers may share a PID."""
    return path.parent / f".{path.name}.{uuid4().hex[:12]}.tmp"


def _delete(path: Path, where: str) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        log.warning(f"{where}: cannot remove '{path}' ({error.strerror or error}). It is not needed any more.")


def _in_use(draft: Path) -> bool:
    """Return whether the process that writes a draft may be alive. Where a lock cannot tell, its age does."""
    recent = True
    try:
        with _opened(draft) as descriptor:
            recent = time.time() - os.fstat(descriptor).st_mtime < ABANDONED
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return recent and draft.is_file()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return recent


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------------- lock


def read_rows(path: Path, last: int = LAST) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none where there is no file.

    A line that is no JSON object is left out: a kill or a full disk has cut it short, and the next start may have
    written behind it. So is all but the end of a very long file.

    Args:
        path: of the file.
        last: bytes at the end that are read.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        skipped = max(0, path.stat().st_size - last)
        file.seek(skipped)
        lines = file.read().split(b"\n")
    rows = []
    for line in lines[1 if skipped else 0 :]:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def lock(path: Path, where: str) -> IO[str] | None:
    """Take the exclusive lock of a file until the result is closed or this process ends; None if another holds it.

    The file holds the process id of the owner, for messages.

    Raises:
        OSError: the file cannot be opened for writing.
        RunError: the file system has no locks.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, (BlockingIOError, PermissionError)):
            return None
        wrong = f"'{path.parent}' lies on a file system without locks ({error.strerror or error})"
        raise RunError(where, wrong, "One writer at a time", "Choose a folder on another file system") from error
    # A data worker may outlive its killed trainer by seconds. It must not keep the lock.
    os.register_at_fork(after_in_child=file.close)
    with suppress(OSError):  # it is for messages only, and the disk may be full
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), str(os.getpid()).encode())
    return file


# ------------------------------------------------------------------------------------------------------ records


class Stop:
    """Says that writing has ended, and why. Processes forked from this one share it, so that only one of them warns."""

    def __init__(self, name: str, consequence: str) -> None:
        self.name, self.consequence, self._page = name, consequence, mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def reason(self) -> str:
        """Why nothing is written any more; empty before that."""
        return self._page[:].rstrip(b"\0").decode()

    def set(self, reason: str) -> None:
        """End writing, and warn once."""
        if not self.reason:
            text = reason.encode()
            self._page[: len(text)] = text
            log.warning(f"{self.name} takes no more ({reason}). {self.consequence}")


class Records:
    """A sparse file of numbered records, each of at most `size` bytes, with its length and a checksum.

    Several processes may write one file. Each record is one write, so a reader finds the old record, the new one, or
    one that is not whole. A record is not whole if it was never written, cut off, damaged, or copied from another id.

    Records are read by `pread`. If a file is cut short while it is mapped, reading it ends the process (SIGBUS).
    """

    HEAD = struct.Struct("<II")
    """Checksum and length."""

    def __init__(self, file: int, size: int, stop: Stop, label: str = "", align: int = 1) -> None:
        """Take over an open file.

        Args:
            file: descriptor; closed with this object.
            size: most bytes of a record's content.
            stop: set when the disk is full.
            label: enters the checksums. A record copied from a file of another label is not whole.
            align: each record begins at a multiple of this many bytes.
        """
        self.size, self.stop, self.stride = size, stop, record_bytes(size, align)
        self._file, self._label = file, label
        self._close = weakref.finalize(self, os.close, file)

    def read(self, id: int) -> bytes | None:
        """Return the content of a record, or None if it is not whole or cannot be read."""
        start = id * self.stride
        try:
            head = os.pread(self._file, self.HEAD.size, start)
            if len(head) < self.HEAD.size:
                return None
            checksum, length = self.HEAD.unpack(head)
            if not 0 < length <= self.size:
                return None
            content = os.pread(self._file, length, start + self.HEAD.size)
        except OSError:
            return None
        return content if len(content) == length and self._checksum(id, content) == checksum else None

    def write(self, id: int, content: bytes) -> None:
        """Write a record. If the disk is full, warn once and write no more; what is written stays good."""
        if self.stop.reason or len(content) > self.size:
            return
        record = self.HEAD.pack(self._checksum(id, content), len(content)) + content
        try:
            reason = "it is full" if os.pwrite(self._file, record, id * self.stride) < len(record) else ""
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            self.stop.set(reason)

    def clear(self) -> None:
        """Remove all records; a reader finds none that is whole."""
        os.ftruncate(self._file, 0)

    def _checksum(self, id: int, content: bytes) -> int:
        return zlib.crc32(content, zlib.crc32(f"{self._label}:{id}:{len(content)}".encode()))


def record_bytes(size: int, align: int = 1) -> int:
    """Return how many bytes of a file a record with up to `size` bytes of content takes."""
    return -(-(Records.HEAD.size + size) // align) * align


# --------------------------------------------------------------------------------------- folders named by a hash


def hashed_folder(parent: Path, name: str, identity: dict[str, Any]) -> Path:
    """Return the folder for a content: its name ends in a hash of everything that the content depends on."""
    return parent / f"{name}-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]}"


def open_folder(folder: Path, identity: dict[str, Any], where: str, writable: bool = True) -> None:
    """Open a folder that was made from `identity` (JSON values), or begin it. Any number of processes may do so.

    Raises:
        RunError: it was made from something else (the field is named), cannot be used, or its manifest is damaged.
    """
    file, deadline = folder / MANIFEST, time.monotonic() + MANIFEST_WAIT
    if writable:
        recover(folder, MANIFEST)
        if not file.is_file():
            write_json(file, identity, where)
    remedy = f"Remove the folder '{folder}', which is then filled again, or use another one"
    try:
        while not file.is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = dict(json.loads(file.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise disk_error(error, file, where) from error
    except (ValueError, TypeError) as error:
        raise RunError(where, f"'{file}' is damaged ({error})", "", remedy) from error
    for name in identity | found:
        if found.get(name) != identity.get(name):
            one, other = (str(each.get(name))[:60] for each in (found, identity))
            wrong = f"'{folder}' was made with another {name} ({one}; this run has {other})"
            raise RunError(where, wrong, "One folder holds what was made from the same", remedy)
