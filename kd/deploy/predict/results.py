"""Rows on disk: a journal from which a killed command resumes, and the final file.

The journal is JSON lines: first the identity of the predictions, then one row per image
in order, with the image's name and stamp. The first row that is incomplete, or does not
match the present image at its position, is removed with all later rows; these are made
again.
"""

import csv
import errno
import filecmp
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kd.core.errors import DataError, FolderInUse, RunError, import_optional
from kd.core.text import FORMULA, table_cell
from kd.deploy.predict.image_list import ImageList
from kd.deploy.predict.rows import ASKED, MEASURES, STAMP, Row
from kd.deploy.serve.responses import MODEL, SECOND
from kd.files.storage import (
    REMEDY,
    atomic_file,
    disk_error,
    on_disk,
    recover,
    take_lock,
)

WHERE = "--to"
SHOWN = 10  # most unreadable images in a message
ROWS = 65_536  # rows per Parquet row group


class Journal:
    """The rows so far. Created by `opened`."""

    def __init__(
        self, path: Path, file: IO[bytes], seen: Callable[[Row], None]
    ) -> None:
        self.path, self._file, self._seen = path, file, seen
        self.done = self.num_unreadable = self.passed_on = 0
        self.unreadable: list[str] = []  # name and error of the first few
        # name of the first image that differs from its row; "": none differs
        self.changed = ""

    def resume(self, identity: Row, images: ImageList) -> None:
        """Count the valid rows and cut off the rest. A new journal begins with
        `identity`.
        """
        end = 0
        for row, size in _rows(self._file):
            if end:
                if self.done == len(images.names):
                    break
                name, stamp = images.names[self.done], images.stamps[self.done]
                if row.get("image") == name and row.get(STAMP) and not stamp:
                    wrong = (
                        f"'{name}' has a row and cannot be found any more: the storage"
                        " is away, or the file is"
                    )
                    raise DataError(WHERE, wrong, "", REMEDY)
                if (row.get("image"), row.get(STAMP)) != (name, stamp):
                    self.changed = name
                    break
                self._count(row)
            elif row != identity:
                changed = ", ".join(
                    key for key in identity if row.get(key) != identity[key]
                )
                wrong = f"'{self.path}' was begun with other values of: {changed}"
                raise RunError(
                    WHERE,
                    wrong,
                    "A result has one model and one list of images",
                    "Remove it, or set --to",
                )
            end += size
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)
        if not end:
            self._write(identity)
            self.flush()

    def add(self, row: Row) -> None:
        self._write(row)
        self._count(row)

    def _write(self, row: Row) -> None:
        with on_disk(self.path, WHERE):
            self._file.write(_line(row))

    def _count(self, row: Row) -> None:
        self.done += 1
        self.passed_on += row.get(MODEL) == SECOND
        self._seen(row)
        if "error" in row:
            self.num_unreadable += 1
            self.unreadable = [*self.unreadable, f"{row['image']}: {row['error']}"][
                :SHOWN
            ]

    def flush(self) -> None:
        """Flush the rows to the system, so that they survive the end of this
        process.
        """
        with on_disk(self.path, WHERE):
            self._file.flush()

    def finish(
        self,
        target: Path,
        top: int,
        scored: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        """Write all rows to `target`, in the format of its ending, and remove the
        journal.

        If the file exists, it has these rows: an earlier start was killed here. `top`,
        `scored` and `more`: see `_csv`.
        """
        self.flush()
        self._file.seek(0)
        rows = (
            {**row, "image": _printed(row.get("image", ""))}
            for row, _ in _rows(self._file)
        )
        rows = (
            {
                key: value
                for key, value in row.items()
                if key not in (STAMP, MEASURES, ASKED)
            }
            for row in rows
        )
        next(rows)
        with atomic_file(target, WHERE) as draft:
            FORMATS[target.suffix](draft, rows, top, scored, more)
            if target.exists() and not filecmp.cmp(draft, target, shallow=False):
                raise _exists(target)
        self.path.unlink()


@contextmanager
def opened(
    target: Path,
    identity: Mapping[str, Any],
    images: ImageList,
    seen: Callable[[Row], None],
) -> Iterator[Journal]:
    """Open or create the journal of a result, `<target>.part`. `seen` gets every row,
    including an earlier start's.
    """
    path = _journal(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another user with access to the folder could place a link of this name, and
        # its target would be overwritten.
        file = os.fdopen(
            os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666),
            "a+b",
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunError(
                WHERE,
                f"'{path}' is a link",
                "A file that kd-predict makes itself",
                "Remove it",
            ) from error
        raise disk_error(error, path, WHERE) from error
    try:
        if not take_lock(file, path, WHERE):
            raise FolderInUse(
                WHERE, f"another process is writing '{path}'", "", "Wait for it"
            )
        recover(
            path.parent, target.name, alone=True
        )  # drafts of a killed process, since this process has the lock
        file.seek(0)
        journal = Journal(path, file, seen)
        journal.resume(dict(identity), images)
        if target.exists() and journal.done < len(images.names):
            raise _exists(target)
        try:
            yield journal
        finally:
            journal.flush()
    finally:
        with suppress(OSError):  # disk full: the rows that `flush` could not write
            file.close()


def _journal(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _exists(target: Path) -> RunError:
    return RunError(
        WHERE,
        f"'{target}' exists",
        "A file that does not exist",
        "Remove it, or choose another --to",
    )


def _rows(file: IO[bytes]) -> Iterator[tuple[Row, int]]:
    """Yield each row and its bytes, up to the first truncated one."""
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


def _printed(name: str) -> str:
    """Return a name as valid UTF-8; other bytes become a backslash, x and two
    digits.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _csv(
    draft: Path,
    rows: Iterator[Row],
    top: int,
    scored: Sequence[str],
    more: Sequence[str],
) -> None:
    """Write image, label, score, label_2, score_2, ..., error, the keys `more`, and the
    score of each of `scored`.

    `top` 0: all labels in one cell, joined by "|", as `data.kind: multilabel` reads
    them. A name that a spreadsheet would run as a formula becomes ./NAME, the same
    file, and a label 'LABEL.
    """
    suffixes = ["", *(f"_{i}" for i in range(2, top + 1))]
    names = (
        [f"{name}{suffix}" for suffix in suffixes for name in ("label", "score")]
        if top
        else ["labels", "scores"]
    )
    with draft.open("w", newline="", encoding="utf-8") as file:
        columns = [
            "image",
            *names,
            "error",
            *more,
            *(f"score:{label}" for label in scored),
        ]
        csv.writer(file, lineterminator="\n").writerow(columns)
        for row in rows:
            pairs = (
                (table_cell(answer["label"]), answer["score"])
                for answer in row.get("top", [])[:top]
            )
            values = [value for pair in pairs for value in pair]
            if "labels" in row:
                joined = (
                    "|".join(str(answer[key]) for answer in row["labels"])
                    for key in ("label", "score")
                )
                values = [*map(table_cell, joined)]
            scores = {answer["label"]: answer["score"] for answer in row.get("top", [])}
            cells = [
                (
                    f"./{row['image']}"
                    if row["image"].startswith(FORMULA)
                    else row["image"]
                )
            ]
            cells += [
                *(values or [""] * len(names)),
                row.get("error", ""),
                *(_cell(row.get(key)) for key in more),
            ]
            cells += [scores.get(one, "") for one in scored]
            # The csv module does not quote "\r", which readers treat as the end of a
            # row.
            quoting = (
                csv.QUOTE_ALL
                if any("\r" in str(cell) for cell in cells)
                else csv.QUOTE_MINIMAL
            )
            csv.writer(file, lineterminator="\n", quoting=quoting).writerow(cells)


def _cell(value: str | bool | None) -> str:
    return str(value).lower() if isinstance(value, bool) else value or ""


def _jsonl(
    draft: Path,
    rows: Iterator[Row],
    top: int,
    scored: Sequence[str],
    more: Sequence[str],
) -> None:
    with draft.open("wb") as file:
        file.writelines(map(_line, rows))


def _parquet(
    draft: Path,
    rows: Iterator[Row],
    top: int,
    scored: Sequence[str],
    more: Sequence[str],
) -> None:
    pyarrow, parquet = _pyarrow()
    text, answer = (
        pyarrow.string(),
        {
            "label": pyarrow.string(),
            "score": pyarrow.float64(),
        },
    )
    added = {key: text if key == MODEL else pyarrow.bool_() for key in more}
    own = {
        key: kind for key, kind in added.items() if not top and key != MODEL
    }  # with several labels each has its own
    answers = pyarrow.list_(pyarrow.struct([*answer.items(), *own.items()]))
    main = answer if top else {"labels": answers}
    schema = pyarrow.schema(
        {"image": text, **main, "top": answers, "error": text, **added}
    )
    with parquet.ParquetWriter(draft, schema) as writer:
        group: list[Row] = []
        for row in rows:
            group.append(row)
            if len(group) == ROWS:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group.clear()
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


FORMATS = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}


def check_format(target: Path) -> None:
    """Refuse a target that could not be written at the end."""
    if target.suffix not in FORMATS:
        raise RunError(
            WHERE,
            f"'{target}' has no known ending",
            f"One of {', '.join(FORMATS)}",
            "Choose one",
        )
    if target.exists() and not _journal(target).exists():
        raise _exists(target)
    if target.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    remedy = "pip install pyarrow, or write .csv or .jsonl"
    parquet = import_optional("pyarrow.parquet", WHERE, "Parquet needs pyarrow", remedy)
    return sys.modules["pyarrow"], parquet
