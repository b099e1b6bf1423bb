"""Rows on the disk: a journal that a killed command goes on with, and the file that it becomes.

The journal has one JSON object a line: first what the predictions depend on, then one row for each image, in order. So
the number of rows is the position of the next image. A row that was cut short is removed and made again.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kd.errors import FolderInUse, MissingExtra, RunError
from kd.files.storage import atomic_file, disk_error, recover, take_lock

WHERE = "--to"
SHOWN = 10
"""Unreadable images that a message names."""
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

    def resume(self, identity: Row) -> None:
        """Count the rows that are there; cut off the rest. A new journal begins with `identity`.

        Raises:
            RunError: the journal was begun with another one.
        """
        end = 0
        for row, size in _rows(self._file):
            if end:
                self._count(row)
            elif row != identity:
                changed = ", ".join(key for key in identity if row.get(key) != identity[key])
                wrong = f"'{self.path}' was begun with other values of: {changed}"
                raise RunError(WHERE, wrong, "A result has one model and one list of images", "Remove it, or set --to")
            end += size
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)
        if not end:
            self._file.write(_line(identity))
            self._file.flush()

    def add(self, row: Row) -> None:
        """Append the row of the next image.

        Raises:
            RunError: the disk is full.
        """
        try:
            self._file.write(_line(row))
        except OSError as error:
            raise disk_error(error, self.path, WHERE) from error
        self._count(row)

    def _count(self, row: Row) -> None:
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

    def finish(self, target: Path, top: int) -> None:
        """Write all rows to `target`, in the format of its ending, and remove the journal.

        Args:
            target: a file that does not exist.
            top: labels of each image; 0: as many as exceed their thresholds.

        Raises:
            RunError: the disk is full or not writable.
            MissingExtra: Parquet without pyarrow.
        """
        self.flush()
        self._file.seek(0)
        rows = (row for row, _ in _rows(self._file))
        next(rows)
        with atomic_file(target, WHERE) as draft:
            FORMATS[target.suffix](draft, rows, top)
        self.path.unlink()


@contextmanager
def opened(target: Path, identity: Mapping[str, Any]) -> Iterator[Journal]:
    """Open or begin the journal of a result, `<target>.part`.

    Raises:
        RunError: the journal is of other images or another model, or the disk is not writable or has no locks.
        FolderInUse: another process is writing it.
    """
    path = target.with_name(target.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise disk_error(error, path, WHERE) from error
    with file:
        if not take_lock(file, path, WHERE):
            raise FolderInUse(WHERE, f"another process is writing '{path}'", "", "Wait for it")
        recover(path.parent, target.name, alone=True)  # drafts of a killed process: the lock is ours
        file.seek(0)
        journal = Journal(path, file)
        journal.resume(dict(identity))
        try:
            yield journal
        finally:
            journal.flush()


def _rows(file: IO[bytes]) -> Iterator[tuple[Row, int]]:
    """Yield each row and its bytes, up to the first that was cut short."""
    for line in file:
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            return
        if not isinstance(row, dict):
            return
        yield row, len(line)


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


# ---------------------------------------------------------------------------------------------------------- formats


def _csv(draft: Path, rows: Iterator[Row], top: int) -> None:
    """Write image, label, score, label_2, score_2, ..., error; of several labels image, labels, scores, error.

    Several stand in one cell, joined by "|", as `data.kind: multilabel` reads them.
    """
    suffixes = ["", *(f"_{i}" for i in range(2, top + 1))]
    names = [f"{name}{suffix}" for suffix in suffixes for name in ("label", "score")] if top else ["labels", "scores"]
    with draft.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", *names, "error"])
        for row in rows:
            values = [answer[key] for answer in row.get("top", [])[:top] for key in ("label", "score")]
            if "labels" in row:
                values = ["|".join(str(answer[key]) for answer in row["labels"]) for key in ("label", "score")]
            writer.writerow([row["image"], *(values or [""] * len(names)), row.get("error", "")])


def _jsonl(draft: Path, rows: Iterator[Row], top: int) -> None:
    with draft.open("wb") as file:
        file.writelines(map(_line, rows))


def _parquet(draft: Path, rows: Iterator[Row], top: int) -> None:
    pyarrow, parquet = _pyarrow()
    text, answer = pyarrow.string(), {"label": pyarrow.string(), "score": pyarrow.float64()}
    answers = pyarrow.list_(pyarrow.struct(list(answer.items())))
    main = answer if top else {"labels": answers}
    schema = pyarrow.schema({"image": text, **main, "top": answers, "error": text})
    with parquet.ParquetWriter(draft, schema) as writer:
        group: list[Row] = []
        for row in rows:
            group.append({**row, "image": row["image"].encode("utf-8", "surrogateescape").decode("utf-8", "replace")})
            if len(group) == ROWS:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group.clear()
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


FORMATS = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}


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
        remedy = "pip install pyarrow, or write .csv or .jsonl"
        raise MissingExtra(WHERE, "Parquet needs pyarrow", "", remedy) from error
    return pyarrow, pyarrow.parquet
