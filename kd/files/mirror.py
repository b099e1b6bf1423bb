"""A copy of a run folder at a URL: written after each checkpoint, read where the run folder is empty.

docs/design.md, files, says how it does without renames. There are no locks either: a process that starts takes the copy
over with the next generation, and of two that start in the same moment the one that wrote last goes on. The copy holds
no hidden files and no run folders inside of the run folder.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from kd.core.errors import DataError, KdError, RunError
from kd.files import checkpoint, object_store
from kd.files.storage import log

WHERE = "run.mirror"
CONFIG, OWNER = "config.yaml", ".kd-owner"
CHECKPOINT = re.compile(r"checkpoints/(step_\d{8})/(state\.json|tensors\.safetensors)")
"""Only such files are ever removed from the copy."""
Mark = tuple[int, int]  # size in bytes and time of change of a file


class Mirror:
    """The copy of one run folder. Rank 0 has one; uploads run in a thread of their own."""

    def __init__(self, folder: Path, url: str, shared: bool = False) -> None:
        """Name a folder and its copy; where `shared`, a process whose copy is taken over goes on without one."""
        self.folder, self.url, self.shared = folder, url, shared
        self._remote: dict[str, Mark | None] = {}
        """Files of the copy, with the mark that the local file had when it was uploaded."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kd-mirror")
        self._lock = threading.Lock()
        self._waiting: dict[str, BinaryIO] = {}
        self._last: Future[None] | None = None
        self._owner = ""
        self._taken: RunError | None = None
        """Why nothing is uploaded any more: another process writes the copy."""

    def read(self, name: str) -> str:
        """Return a text file of the copy; "" where there is none, or no complete checkpoint to lose."""
        return self._text(name) if _checkpoints(self._names()) else ""

    def open(self) -> None:
        """Become the one writer of the copy, and restore the run folder if it holds no run."""
        empty, names = not (self.folder / CONFIG).exists(), self._names()
        newest, here = max(_checkpoints(names), default=""), max(_checkpoints(_files(self.folder)), default="")
        if not empty and newest > here:
            wrong = f"'{self.url}' has {newest}, which is newer than what '{self.folder}' has ({here or 'none'})"
            raise RunError(WHERE, wrong, "", "Remove the folder to go on from the copy, or choose another run.name")
        self._take_over()
        names = self._names()  # the writer before may have removed some
        self._remote = dict.fromkeys(names)
        if empty:
            self._restore(names)

    def push(self) -> None:
        """Upload what has changed, in the background. A push that has not begun is replaced by this one."""
        if self._without_copy():
            return
        snapshot = {}
        for name in _files(self.folder):
            with suppress(FileNotFoundError):  # files that are removed from now on stay readable
                snapshot[name] = (self.folder / name).open("rb")
        with self._lock:
            replaced, self._waiting = self._waiting, snapshot
        for file in replaced.values():
            file.close()
        if not replaced:
            self._last = self._pool.submit(self._upload)

    def finish(self) -> None:
        """Upload what has changed and wait for the end."""
        self.push()
        error = self._last.exception() if self._last is not None else None
        if not self._without_copy() and error is not None:
            wrong = f"the copy is not complete ({error}). The run folder '{self.folder}' is"
            raise RunError(WHERE, wrong, "", "Run the same command again: it uploads the rest") from error

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _names(self) -> list[str]:
        """Return the files of the copy, without those of runs inside of it: each has a copy of its own."""
        prefix = f"{self.url}/"
        names = [url.removeprefix(prefix) for url in object_store.listing(self.url, WHERE) if url.startswith(prefix)]
        if set(names) - {OWNER} and CONFIG not in names:
            allowed = "The copy of a run, or nothing"
            raise RunError(WHERE, f"'{self.url}' holds files that are no run", allowed, "Choose another URL")
        if outside := next((name for name in names if ".." in name.split("/") or name.startswith("/")), ""):
            raise RunError(WHERE, f"'{self.url}' has a file '{outside}'", "Files below the copy", "Remove it there")
        inner = tuple(name.removesuffix(CONFIG) for name in names if name.endswith(f"/{CONFIG}"))
        return [name for name in names if name != OWNER and not name.startswith(inner)]

    def _text(self, name: str) -> str:
        url = object_store.join(self.url, name)
        try:
            return object_store.read(url, WHERE).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except PermissionError as error:
            raise DataError(WHERE, f"'{url}': {error.strerror}", "", "Check the credentials") from error

    def _take_over(self) -> None:
        generation = 1 + int(match[0]) if (match := re.match(r"\d{1,9}\b", self._text(OWNER))) else 1
        self._owner = f"{generation} {socket.gethostname()} {os.getpid()} {uuid4().hex}"
        self._sign()

    def _sign(self) -> None:
        object_store.upload(BytesIO(self._owner.encode()), object_store.join(self.url, OWNER), WHERE)

    def _without_copy(self) -> bool:
        """Return whether this process goes on without the copy; raise where it may not."""
        if self._taken is not None and not self.shared:
            raise self._taken
        return self._taken is not None

    def _require_own(self) -> None:
        """Raise RunError if another process has taken the copy over."""
        found = self._text(OWNER)
        if not found:  # the store was emptied
            self._sign()
        elif found != self._owner:
            other, own = (" ".join(text.split()[:3])[:80] for text in (found, self._owner))
            wrong = f"another process has taken '{self.url}' over (generation, host, process: {other!r}; here {own!r})"
            remedy = f"End one of the two. The folder '{self.folder}' is whole"
            self._taken = RunError(WHERE, wrong, "One writer at a time", remedy)
            raise self._taken

    def _restore(self, names: list[str]) -> None:
        """Restore all but checkpoints that are not whole, which are removed from the copy."""
        complete = _checkpoints(names)
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)  # of a restoration that was interrupted
        for name in names:
            if name != CONFIG and (not name.startswith("checkpoints/") or name.split("/")[1] in complete):
                self._fetch(name)
        rotten = self._rotten(complete)
        for name in sorted(filter(CHECKPOINT.fullmatch, names), key=_rank, reverse=True):
            if name.split("/")[1] in rotten:
                self._remove(name)
        if CONFIG in names:  # last: with it, the folder holds a run
            self._fetch(CONFIG)
        if complete:
            log.info(f"{WHERE}: restored {max(complete - rotten)} from '{self.url}'")

    def _fetch(self, name: str) -> None:
        path = self.folder / name
        object_store.copy_here(object_store.join(self.url, name), path, WHERE)
        self._remote[name] = _mark(os.stat(path))

    def _remove(self, name: str) -> None:
        object_store.remove(object_store.join(self.url, name), WHERE)
        del self._remote[name]

    def _rotten(self, names: set[str]) -> set[str]:
        """Return the restored checkpoints that are not whole; they are removed from the folder."""
        rotten = {}
        for name in sorted(names):
            folder = self.folder / "checkpoints" / name
            try:
                checkpoint.read(folder)
            except checkpoint.Broken as error:
                rotten[name] = error.wrong
                shutil.rmtree(folder)
        if names and len(rotten) == len(names):
            wrong = f"no checkpoint in '{self.url}' is whole: {'; '.join(rotten.values())}"
            raise RunError(WHERE, wrong, "", "Choose another run.name, or remove the copy to begin anew")
        for wrong in rotten.values():
            log.warning(f"{WHERE}: in '{self.url}', {wrong}. It is removed, and the one before it is taken.")
        return set(rotten)

    def _upload(self) -> None:
        with self._lock:
            snapshot, self._waiting = self._waiting, {}
        if not snapshot:
            return
        try:
            if self._taken is not None:
                return
            for name in sorted(snapshot, key=_rank):
                mark = _mark(os.fstat(snapshot[name].fileno()))
                if self._remote.get(name) != mark:
                    self._require_own()
                    object_store.upload(snapshot[name], object_store.join(self.url, name), WHERE)
                    self._remote[name] = mark
            gone = [name for name in self._remote if CHECKPOINT.fullmatch(name) and name not in snapshot]
            for name in sorted(gone, key=_rank, reverse=True):
                self._require_own()
                self._remove(name)
        except KdError as error:
            if self._taken is None or self.shared:
                later = "The other one uploads" if self._taken else "The next checkpoint is uploaded again"
                log.warning(f"{error} The run goes on. {later}.")
            raise
        finally:
            for file in snapshot.values():
                file.close()


def _files(folder: Path) -> Iterator[str]:
    """Yield the names of the files of a run folder, without hidden ones and without folders of other runs."""
    for path, below, files in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".") and not (Path(path, name) / CONFIG).exists()]
        for name in files:
            if not name.startswith("."):
                yield Path(path, name).relative_to(folder).as_posix()


def _checkpoints(names: Iterator[str] | list[str]) -> set[str]:
    matches = map(CHECKPOINT.fullmatch, names)
    return {match[1] for match in matches if match and match[2] == "state.json"}


def _rank(name: str) -> tuple[bool, bool, str]:
    """Order uploads: config.yaml first, which makes the copy a run, and state.json last. Removals go the other way."""
    return name.endswith("/state.json"), name != CONFIG, name


def _mark(status: os.stat_result) -> Mark:
    return status.st_size, status.st_mtime_ns
