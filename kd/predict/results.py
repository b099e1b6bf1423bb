"""Rows on the disk: a journal that a killed command goes on with, and the file that it becomes.

The journal has one JSON object a line: first what the predictions depend on, then one row for each image, in order. So
the number of whole rows is the position of the next image. Rows that were written in part are cut off and made again.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kd.errors import FolderInUse, MissingExtra, RunError
from kd.files.storage import atomic_file, disk_error

WHERE = "--to"
FORMATS = (".csv", ".jsonl", ".parquet")
SHOWN = 10
"""Unreadable images whose names are kept for messages."""
ROWS = 65_536
"""Rows of a group of a Parquet file."""
Row = dict[str, Any]


class Journal:
    """The rows so far. Made by `opened`."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file = path, file
        self.done = self.num_unreadable = 0
        self.unreadable: list[str] = []
        """Name and error of the first few."""

    def add(self, row: Row) -> None:
        """Append the row of the next image.

        Raises:
            RunError: the disk is full.
        """
        try:
            self._file.write(_line(row))
        except OSError as error:
            raise disk_error(error, self.path, WHERE) from error
        self.count(row)

    def count(self, row: Row) -> None:
        """Note a row that is in the file."""
        self.done += 1
        if "error" in row:
            self.num_unreadable += 1
            self.unreadable = [*self.unreadable, f"{row['image']}: {row['error']}"][:SHOWN]

    def flush(self) -> None:
        """Give the rows to the system, where they survive the end of this process.

        Raises:
            RunError: the disk is full.
        """
        try:
            self._file.flush()
        except OSError as error:
            raise disk_error(error, self.path, WHERE) from error

    def finish(self, target: Path, top: int, several: bool = False) -> None:
        """Write all rows to `target`, in the format of its ending, and remove the journal.

        Args:
            target: a file that does not exist.
            top: labels of each image.
            several: an image has as many labels as exceed their thresholds; `top` is for JSON lines alone.

        Raises:
            RunError: the disk is full or not writable.
            MissingExtra: Parquet without pyarrow.
        """
        self.flush()
        with atomic_file(target, WHERE) as draft:
            {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}[target.suffix](
                draft, self.path, 0 if several else top
            )
        self.path.unlink()


@contextmanager
def opened(target: Path, identity: Mapping[str, Any]) -> Iterator[Journal]:
    """Open or begin the journal of a result, `<target>.part`.

    Args:
        target: the result.
        identity: what its rows depend on (JSON values).

    Raises:
        RunError: the journal is of other images or another model, or the disk is not writable.
        FolderInUse: another process is writing it.
    """
    path = target.with_name(target.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise disk_error(error, path, WHERE) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUse(WHERE, f"another process is writing '{path}'", "", "Wait for it") from error
        journal = Journal(path, file)
        _resume(journal, file, dict(identity))
        try:
            yield journal
        finally:
            journal.flush()


def _resume(journal: Journal, file: IO[bytes], identity: Row) -> None:
    """Count the rows that are there; cut off what is not whole."""
    whole = 0
    file.seek(0)
    for line in file:
        content = _parsed(line)
        if content is None:
            break
        if whole:
            journal.count(content)
        elif content != json.loads(_line(identity)):
            changed = ", ".join(key for key in identity if content.get(key) != identity[key])
            wrong = f"'{journal.path}' was begun with other values of: {changed}"
            raise RunError(WHERE, wrong, "A result has one model and one list of images", "Remove it, or set --to")
        whole += len(line)
    file.truncate(whole)
    file.seek(0, os.SEEK_END)
    if not whole:
        file.write(_line(identity))
        file.flush()


def _parsed(line: bytes) -> Row | None:
    try:
        content = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _line(content: Row) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        next(file)
        yield from map(json.loads, file)


# ---------------------------------------------------------------------------------------------------------- formats


def _csv(draft: Path, journal: Path, top: int) -> None:
    """Write image, label, score, label_2, score_2, ..., error; of several labels image, labels, scores, error.

    Several stand in one cell, joined by "|", as `data.kind: multilabel` reads them.
    """
    names = [
        name for i in range(1, top + 1) for name in (("label", "score") if i == 1 else (f"label_{i}", f"score_{i}"))
    ]
    names = names or ["labels", "scores"]
    with draft.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", *names, "error"])
        for row in _rows(journal):
            values = [found[key] for found in row.get("top", [])[:top] for key in ("label", "score")]
            if "labels" in row:
                values = ["|".join(str(found[key]) for found in row["labels"]) for key in ("label", "score")]
            writer.writerow([row["image"], *(values or [""] * len(names)), row.get("error", "")])


def _jsonl(draft: Path, journal: Path, top: int) -> None:
    with draft.open("wb") as file:
        file.writelines(map(_line, _rows(journal)))


def _parquet(draft: Path, journal: Path, top: int) -> None:
    pyarrow, parquet = _pyarrow()
    text, found = pyarrow.string(), {"label": pyarrow.string(), "score": pyarrow.float64()}
    top_type = pyarrow.list_(pyarrow.struct(list(found.items())))
    main = found if top else {"labels": top_type}
    schema = pyarrow.schema({"image": text, **main, "top": top_type, "error": text})
    with parquet.ParquetWriter(draft, schema) as writer:
        group: list[Row] = []
        for row in _rows(journal):
            group.append({**row, "image": row["image"].encode("utf-8", "surrogateescape").decode("utf-8", "replace")})
            if len(group) == ROWS:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group.clear()
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


def check_format(target: Path) -> None:
    """Refuse a result that could not be written in the end.

    Raises:
        RunError: an unknown ending, or the result is there already.
        MissingExtra: Parquet without pyarrow.
    """
    if target.suffix not in FORMATS:
        raise RunError(WHERE, f"'{target}' has no known ending", f"One of {', '.join(FORMATS)}", "Choose one")
    if target.exists():
        raise RunError(WHERE, f"'{target}' exists", "A file that does not exist", "Remove it, or choose another --to")
    if target.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            WHERE, "Parquet needs pyarrow", "", "pip install pyarrow, or write .csv or .jsonl"
        ) from error
    return pyarrow, pyarrow.parquet
