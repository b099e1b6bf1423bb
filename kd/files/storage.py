"""Files and folders are written atomically here, rows appended, files locked."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

from kd.core.errors import DataError, RunError
from kd.files.json_file import read_json

try:
    import fcntl
except ImportError:  # on Windows, where the endpoint runs without locks
    fcntl = None

MANIFEST = "manifest.json"
# drafts, and folders being replaced
LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]+\.(tmp|old)")
# seconds after which a draft without a lock counts as left by a killed process
ABANDONED = 3600.0
# seconds that a reader waits for the manifest of a folder just created by its writer
MANIFEST_WAIT = 10.0
# bytes read from the end of a file of rows: 30,000 log windows of 20 steps, or two days
# of machine samples
LAST = 2**26
# longest line of such a file, bytes. A longer line is not kd's and is skipped in parts.
LINE = 2**20
REPLACED = "A new or empty folder, or an older export, which is replaced"
log = logging.getLogger("kd")


@contextmanager
def atomic_folder(path: Path, config_path: str = "run.folder") -> Iterator[Path]:
    """Yield a draft that replaces the folder `path` if the block succeeds.

    `recover` repairs after a kill.
    """
    recover(path.parent, path.name)
    draft = _beside(path)
    old = draft.with_suffix(".old")
    try:
        draft.mkdir(parents=True)
        with _open_descriptor(draft) as descriptor:
            # so that `recover` in another process does not touch it
            with suppress(OSError):
                _lock(descriptor)
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
                _delete(old, config_path)
            else:
                os.replace(draft, path)
        flush(path.parent)
    except OSError as error:
        raise disk_error(error, path, config_path) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def refuse_unlisted(folder: Path, names: Collection[str], config_path: str) -> None:
    """Refuse to replace a folder that holds files with other names."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        wrong = (
            f"'{folder}' exists and is a {'link' if folder.is_symlink() else 'file'}"
        )
        raise RunError(config_path, wrong, REPLACED, "Choose another folder")
    for path in sorted(folder.rglob("*")):
        holds_files = path.is_dir() and not path.is_symlink() and any(path.iterdir())
        if path.relative_to(folder).as_posix() not in names and not holds_files:
            remedy = "Move it away, or choose another folder"
            raise RunError(
                config_path, f"'{path}' belongs to no export", REPLACED, remedy
            )


def recover(folder: Path, name: str = "", alone: bool = False) -> None:
    """Remove drafts left by killed processes; restore folders being replaced.

    `name`: only those of this name; "": all.

    `alone`: no other process writes here, so every draft is abandoned.
    """
    # the `old` of a draft sorts before its `tmp`
    for leftover in sorted(folder.glob(".*.*.*")):
        match = LEFTOVER.fullmatch(leftover.name)
        if match is None or name not in ("", match[1]):
            continue
        if not alone and _in_use(leftover.with_suffix(".tmp")):
            continue
        if match[2] == "old" and not (folder / match[1]).exists():
            with suppress(OSError):
                os.replace(leftover, folder / match[1])
        else:
            _delete(leftover, "run.folder")


def remove_folder(path: Path) -> None:
    """Remove a folder atomically. If that fails, warn."""
    hidden = _beside(path)
    try:
        os.replace(path, hidden)
    except OSError:
        hidden = path
    _delete(hidden, "run.folder")


@contextmanager
def atomic_file(path: Path, config_path: str = "run.folder") -> Iterator[Path]:
    """Yield a draft's path; the draft becomes `path` if the block succeeds.

    Else it is removed.
    """
    draft = _beside(path)
    try:
        with on_disk(path, config_path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield draft
            flush(draft)
            os.replace(draft, path)
            flush(path.parent)
    finally:
        with suppress(OSError):
            draft.unlink()


def write_text(path: Path, text: str, config_path: str = "run.folder") -> None:
    """Write a text file atomically."""
    with (
        atomic_file(path, config_path) as draft,
        draft.open("x", encoding="utf-8") as file,
    ):
        file.write(text)


def write_json(path: Path, content: Any, config_path: str = "run.folder") -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n", config_path)


def disk_error(error: OSError, path: Path, config_path: str) -> RunError:
    """Turn an OSError into one line with a remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        wrong = f"the disk is full at '{path}'"
        remedy = "Free space and run the same command again: it resumes"
    else:
        wrong = f"cannot write '{path}' ({error.strerror or error})"
        remedy = "Choose a folder that you may write"
    return RunError(config_path, wrong, "", remedy)


@contextmanager
def on_disk(path: Path, config_path: str) -> Iterator[None]:
    """Convert an OSError in this block to one line about a path: see `disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, config_path) from error


def flush(path: Path) -> None:
    """Make a file, or a folder's list of files, durable.

    A file system that cannot flush folders is no error.
    """
    with _open_descriptor(path) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            unsupported = error.errno in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
            if not (unsupported and path.is_dir()):
                raise


def share(path: Path) -> None:
    """Give a file its folder's read permissions.

    safetensors lets only the owner read it.
    """
    with suppress(OSError):  # a file system without permissions
        path.chmod(0o644 & path.parent.stat().st_mode)


def _beside(path: Path) -> Path:
    """Return a new hidden name in the same folder.

    It is random, because processes in two containers may share a PID.
    """
    return path.parent / f".{path.name}.{uuid4().hex[:12]}.tmp"


def _delete(path: Path, config_path: str) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        log.warning(
            f"{config_path}: cannot remove '{path}' ({error.strerror or error}). It is"
            " not needed any more."
        )


def _in_use(draft: Path) -> bool:
    """Return whether a draft's writer may be alive, by its lock, else by its age."""
    recent = True
    try:
        with _open_descriptor(draft) as descriptor:
            recent = time.time() - os.fstat(descriptor).st_mtime < ABANDONED
            _lock(descriptor)
            return recent and draft.is_file()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return recent


@contextmanager
def _open_descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def append_rows(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append rows to a file of JSON lines; an OSError is raised unchanged."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file of JSON lines with only the rows to keep, if the file exists."""
    if path.is_file():
        rows = [row for row in read_rows(path, last=None) if keep(row)]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path, last: int | None = LAST) -> list[dict[str, Any]]:
    """Return the rows in the last `last` bytes (None: all) of a file of JSON lines.

    A missing file gives [].

    A line that is not a JSON object was truncated and is skipped: the next start may
    have written after it.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        skipped = 0 if last is None else max(0, path.stat().st_size - last)
        file.seek(skipped)
        rows = []
        at_start = not skipped  # whether a line begins here
        while line := file.readline(LINE):
            ends = line.endswith(b"\n")
            if at_start and (ends or len(line) < LINE):
                with suppress(ValueError, RecursionError):
                    rows.append(json.loads(line))
            at_start = ends
    return [row for row in rows if isinstance(row, dict)]


def lock(path: Path, config_path: str) -> IO[str] | None:
    """Take the exclusive lock of a file until the result is closed.

    None: another process holds it.
    """
    file = path.open("a")
    owned = False
    try:
        owned = take_lock(file, path, config_path)
    finally:
        if not owned:
            file.close()
    if not owned:
        return None
    # A data worker may outlive its killed trainer by seconds; it must not inherit the
    # lock.
    os.register_at_fork(after_in_child=file.close)
    with suppress(OSError):  # it is only for messages, and the disk may be full
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), str(os.getpid()).encode())
    return file


def _lock(file: IO[Any] | int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "on Windows kd trains in WSL")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def take_lock(file: IO[Any], path: Path, config_path: str) -> bool:
    """Take the exclusive lock of an open file until it is closed.

    False: another process holds it.
    """
    try:
        _lock(file)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        wrong = (
            f"'{path.parent}' lies on a file system without locks"
            f" ({error.strerror or error})"
        )
        remedy = "Choose a folder on another file system"
        raise RunError(config_path, wrong, "One writer at a time", remedy) from error
    return True


def hashed_folder(parent: Path, name: str, identity: dict[str, Any]) -> Path:
    """Return the folder of a content.

    Its name ends in a hash of everything that the content depends on.
    """
    content = json.dumps(identity, sort_keys=True)
    return parent / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def open_folder(
    folder: Path, identity: dict[str, Any], config_path: str, writable: bool = True
) -> None:
    """Open or create a folder made from `identity` (JSON values).

    Any number of processes may call it.
    """
    file = folder / MANIFEST
    deadline = time.monotonic() + MANIFEST_WAIT
    if writable:
        recover(folder, MANIFEST)
        if not file.is_file():
            write_json(file, identity, config_path)
    remedy = (
        f"Remove the folder '{folder}', which is then filled again, or use another one"
    )
    with on_disk(file, config_path):
        while not file.is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        stored = read_json(file, config_path, remedy)
    for name in identity | stored:
        if stored.get(name) != identity.get(name):
            old = str(stored.get(name))[:60]
            new = str(identity.get(name))[:60]
            wrong = (
                f"'{folder}' was made with another {name} ({old}; this run has {new})"
            )
            allowed = "A folder holds the data of one identity"
            raise RunError(config_path, wrong, allowed, remedy)


# seconds between tries: a network storage's failover takes a second or two
PAUSES = (0.1, 0.4, 1.5)
REMEDY = "Bring the storage back and run the same command again: it resumes"
Result = TypeVar("Result")


def read_with_retries(
    read: Callable[[], Result],
    subject: str,
    config_path: str,
    *,
    allowed: str = "",
    remedy: str = REMEDY,
    final: tuple[type[OSError], ...] = (),
) -> Result:
    """Return `read()`; repeat it after a pause if it raises an OSError.

    Those of `final` are raised at once.
    """
    pauses = list(PAUSES)
    while True:
        try:
            return read()
        except final:
            raise
        except OSError as error:
            if not pauses:
                reason = f"({error.strerror or error}), in {len(PAUSES) + 1} tries"
                wrong = (
                    f"{subject}: it cannot be read {reason}: the storage is away, or"
                    " the file is"
                )
                raise DataError(config_path, wrong, allowed, remedy) from error
            time.sleep(pauses.pop(0))
