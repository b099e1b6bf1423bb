"""Write rows to a journal, from which a killed command resumes, then to the result.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from kd.core.errors import DataError, FolderInUse, RunError, import_optional
from kd.core.text import FORMULA, table_cell
from kd.deploy.predict.image_list import ImageList
from kd.deploy.predict.rows import ASKED, MEASURES, STAMP, Row
from kd.deploy.serve.responses import (
    MODEL,
    SECOND,
    Value,
    Values,
    label_cells,
    text_cell,
)
from kd.files.storage import (
    REMEDY,
    atomic_file,
    disk_error,
    on_disk,
    recover,
    take_lock,
)

WHERE = "--to"
MAX_LISTED = 10  # most unreadable images in a message
ROWS = 65_536  # rows per Parquet row group


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """The columns of a result."""

    top: int  # labels of each image, best first; 0: all, in one cell
    scored: Sequence[str] = ()  # labels whose score is a column
    columns: Sequence[str] = ()  # further keys of a row
    values: Values = field(default_factory=dict)  # of each label

    @property
    def value_types(self) -> dict[str, type]:
        """`float` or `str` by column of the values."""
        rows = [*self.values.values()]
        return {
            column: str if any(isinstance(row[column], str) for row in rows) else float
            for column in (rows[0] if rows else ())
        }


class Journal:
    """The rows so far. Created by `open_journal`."""

    def __init__(
        self, path: Path, file: IO[bytes], on_row: Callable[[Row], None]
    ) -> None:
        self.path = path
        self._file = file
        self._on_row = on_row
        self.done = 0
        self.num_unreadable = 0
        self.passed_on = 0
        self.unreadable: list[str] = []  # name and error of the first few
        # name of the first image that differs from its row; "": none differs
        self.changed = ""

    def resume(self, identity: Row, images: ImageList) -> None:
        """Count the valid rows and cut off all others.

        A new journal begins with `identity`.
        """
        end = 0
        for row, size in _journal_rows(self._file):
            if end:
                if self.done == len(images.names):
                    break
                name = images.names[self.done]
                stamp = images.stamps[self.done]
                if row.get("image") == name and row.get(STAMP) and not stamp:
                    wrong = (
                        f"'{name}' has a row and cannot be found any more: the storage"
                        " is away, or the file is"
                    )
                    raise DataError(WHERE, wrong, "", REMEDY)
                if (row.get("image"), row.get(STAMP)) != (name, stamp):
                    self.changed = name
                    break
                self._count_row(row)
            elif row != identity:
                keys = [key for key in identity if row.get(key) != identity[key]]
                wrong = f"'{self.path}' was begun with other values of: "
                allowed = "A result has one model and one list of images"
                remedy = "Remove it, or set --to"
                raise RunError(WHERE, wrong + ", ".join(keys), allowed, remedy)
            end += size
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)
        if not end:
            self._write(identity)
            self.flush()

    def add(self, row: Row) -> None:
        self._write(row)
        self._count_row(row)

    def _write(self, row: Row) -> None:
        with on_disk(self.path, WHERE):
            self._file.write(_line(row))

    def _count_row(self, row: Row) -> None:
        self.done += 1
        self.passed_on += row.get(MODEL) == SECOND
        self._on_row(row)
        if "error" in row:
            self.num_unreadable += 1
            if len(self.unreadable) < MAX_LISTED:
                self.unreadable.append(f"{row['image']}: {row['error']}")

    def flush(self) -> None:
        """Flush the rows to the system: they survive the end of this process."""
        with on_disk(self.path, WHERE):
            self._file.flush()

    def finish(self, target: Path, layout: ResultLayout) -> None:
        """Write all rows to `target`, in its format, and remove the journal.

        If the file exists, it has these rows: an earlier start was killed here.
        """
        self.flush()
        self._file.seek(0)
        rows = _journal_rows(self._file)
        next(rows)
        with atomic_file(target, WHERE) as draft:
            result = (_result_row(row) for row, _ in rows)
            FORMATS[target.suffix](draft, result, layout)
            if target.exists() and not filecmp.cmp(draft, target, shallow=False):
                raise _target_exists(target)
        self.path.unlink()


def _result_row(row: Row) -> Row:
    """Return a journal's row without the keys that only a journal has.

    The name becomes valid UTF-8; other bytes become a backslash, x and two digits.
    """
    result = {
        key: value for key, value in row.items() if key not in (STAMP, MEASURES, ASKED)
    }
    name = row["image"].encode("utf-8", "surrogateescape")
    return {**result, "image": name.decode("utf-8", "backslashreplace")}


@contextmanager
def open_journal(
    target: Path,
    identity: Row,
    images: ImageList,
    on_row: Callable[[Row], None],
) -> Iterator[Journal]:
    """Open or create the journal of a result, `<target>.part`.

    `on_row` is called with each row, including an earlier start's.
    """
    path = _journal_path(target)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another user with access to the folder could place a link of this name, and
        # its target would be overwritten.
        file = os.fdopen(os.open(path, flags, 0o666), "a+b")
    except OSError as error:
        if error.errno == errno.ELOOP:
            allowed = "A file that kd-predict makes itself"
            wrong = f"'{path}' is a link"
            raise RunError(WHERE, wrong, allowed, "Remove it") from error
        raise disk_error(error, path, WHERE) from error
    try:
        if not take_lock(file, path, WHERE):
            wrong = f"another process is writing '{path}'"
            raise FolderInUse(WHERE, wrong, "", "Wait for it")
        # Drafts of a killed process, since this process has the lock.
        recover(path.parent, target.name, alone=True)
        file.seek(0)
        journal = Journal(path, file, on_row)
        journal.resume(identity, images)
        if target.exists() and journal.done < len(images.names):
            raise _target_exists(target)
        try:
            yield journal
        finally:
            journal.flush()
    finally:
        with suppress(OSError):  # disk full: the rows that `flush` could not write
            file.close()


def _journal_path(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _target_exists(target: Path) -> RunError:
    remedy = "Remove it, or choose another --to"
    return RunError(WHERE, f"'{target}' exists", "A file that does not exist", remedy)


def _journal_rows(file: IO[bytes]) -> Iterator[tuple[Row, int]]:
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


def _csv(draft: Path, rows: Iterator[Row], layout: ResultLayout) -> None:
    """Write image, label, score, label_2, score_2, ..., error, and further columns.

    A label's values follow its score. `layout.top` 0: all labels in one cell, joined by
    "|", as `data.kind: multilabel` reads them, and so are scores and values. A name
    that a spreadsheet would run as a formula becomes ./NAME, the same file, and a text
    'TEXT.
    """
    top = layout.top
    columns = layout.columns
    titles = ["labels", "scores", *layout.value_types]
    if top:
        suffixes = ["", *(f"_{i}" for i in range(2, top + 1))]
        keys = ["label", "score", *layout.value_types]
        titles = [f"{key}{suffix}" for suffix in suffixes for key in keys]
    score_titles = (f"score:{label}" for label in layout.scored)
    with draft.open("w", newline="", encoding="utf-8") as file:
        header = ["image", *titles, "error", *columns, *score_titles]
        csv.writer(file, lineterminator="\n").writerow(header)
        for row in rows:
            answers = row.get("top", [])
            values = []
            for answer in answers[:top]:
                values += map(text_cell, label_cells(answer))
            if "labels" in row:
                values = map(
                    _joined, zip(*map(label_cells, row["labels"]), strict=True)
                )
            image = row["image"]
            cells = [f"./{image}" if image.startswith(FORMULA) else image]
            cells += [*values] or [""] * len(titles)
            cells += [row.get("error", ""), *(_cell(row.get(key)) for key in columns)]
            scores = {answer["label"]: answer["score"] for answer in answers}
            cells += [scores.get(label, "") for label in layout.scored]
            # The csv module does not quote "\r", which readers treat as the end of a
            # row.
            quoting = csv.QUOTE_MINIMAL
            if any("\r" in str(cell) for cell in cells):
                quoting = csv.QUOTE_ALL
            csv.writer(file, lineterminator="\n", quoting=quoting).writerow(cells)


def _joined(cells: Sequence[Value]) -> str:
    """Return values of several labels as one cell."""
    text = "|".join("" if cell is None else str(cell) for cell in cells)
    return table_cell(text) if any(isinstance(cell, str) for cell in cells) else text


def _cell(value: str | bool | None) -> str:
    return str(value).lower() if isinstance(value, bool) else value or ""


def _jsonl(draft: Path, rows: Iterator[Row], layout: ResultLayout) -> None:
    with draft.open("wb") as file:
        file.writelines(map(_line, rows))


def _parquet(draft: Path, rows: Iterator[Row], layout: ResultLayout) -> None:
    pyarrow, parquet = _pyarrow()
    string = pyarrow.string()
    label = {"label": string, "score": pyarrow.float64()}
    if layout.values:
        arrow_types = {str: string, float: pyarrow.float64()}
        columns = layout.value_types.items()
        label["values"] = pyarrow.struct(
            [(column, arrow_types[kind]) for column, kind in columns]
        )
    types = {key: string if key == MODEL else pyarrow.bool_() for key in layout.columns}
    # With several labels each has its own `sure`.
    label_types = dict(label)
    if not layout.top and "sure" in types:
        label_types["sure"] = types["sure"]
    answers = pyarrow.list_(pyarrow.struct([*label_types.items()]))
    main = label if layout.top else {"labels": answers}
    schema = pyarrow.schema(
        {"image": string, **main, "top": answers, "error": string, **types}
    )
    with parquet.ParquetWriter(draft, schema) as writer:
        while group := list(islice(rows, ROWS)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


FORMATS = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}


def check_format(target: Path) -> None:
    """Refuse a target that could not be written at the end."""
    if target.suffix not in FORMATS:
        wrong = f"'{target}' has no known ending"
        raise RunError(WHERE, wrong, f"One of {', '.join(FORMATS)}", "Choose one")
    if target.exists() and not _journal_path(target).exists():
        raise _target_exists(target)
    if target.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    remedy = "pip install pyarrow, or write .csv or .jsonl"
    parquet = import_optional("pyarrow.parquet", WHERE, "Parquet needs pyarrow", remedy)
    return sys.modules["pyarrow"], parquet
