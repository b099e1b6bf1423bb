"""Read text files and tables from editors and spreadsheets.

They differ in encodings, delimiters, and a first line `sep=;`.
"""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Delimiter by ending. Spreadsheets in languages with decimal commas write ";" into a
.csv, some write tabs.
"""
SEPARATOR = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)  # Excel's own first line
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: str | Path) -> str:
    """Read a text in UTF-8, or in UTF-16 with a BOM.

    Encodings are not guessed. ValueError: it is in neither.
    """
    data = Path(path).read_bytes()
    if data.startswith(UTF_16):
        return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        start = max(start, error.start - 20)
        excerpt = data[start : error.start + 10].partition(b"\n")[0]
        latin_1 = excerpt.decode("latin-1").strip()
        wrong = (
            f"line {line} is not UTF-8 ('{latin_1}' where it is read as Latin-1)."
            " UTF-8, or UTF-16 as Excel writes it"
        )
        raise ValueError(
            f"{wrong}. Save it as 'CSV UTF-8', or run: iconv -f cp1252 -t utf-8 FILE"
            " > NEW"
        ) from error


def parse_table(
    text: str, delimiter: str
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return a table's column names and its lines by number; empty lines are skipped.

    The delimiter is given by a line `sep=;`, else it is the one of `,`, `;` and tab
    that is most frequent in the first line (`delimiter` in a tie). ValueError: fewer
    than two columns, an empty or repeated name, or a line of another length.
    """
    separator = SEPARATOR.match(text)
    skipped = 0
    if separator:
        text = text[separator.end() :]
        delimiter = separator[1]
        skipped = 1
    else:
        first = next((line for line in text.splitlines() if line.strip()), "")
        delimiter = max((delimiter, ",", ";", "\t"), key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines = _numbered_rows(reader, skipped)
    header = [name.strip() for name in next((row for _, row in lines if row), [])]
    if len(header) < 2:
        wrong = "its first line does not name two columns or more"
        if header:
            wrong += f": it is '{header[0]}'"
        raise ValueError(wrong)
    if "" in header[1:]:
        raise ValueError("a column has no name")
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"its first line names '{twice[0]}' twice")

    def rows() -> Iterator[tuple[int, list[str]]]:
        for number, row in lines:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(header):
                raise ValueError(
                    f"line {number} has {len(row)} fields, the first line has"
                    f" {len(header)}"
                )
            yield number, row

    return header, rows()


def _numbered_rows(reader: Any, skipped: int) -> Iterator[tuple[int, list[str]]]:
    """Yield rows by the number of their last line.

    ValueError: a quote is unclosed, or text follows a closing quote.
    """
    try:
        for row in reader:
            yield reader.line_num + skipped, row
    except csv.Error as error:
        wrong = (
            f"line {reader.line_num + skipped}: a quote is not closed, or text follows"
            f" a closing one ({error})"
        )
        raise ValueError(
            f"{wrong}. Write a quote inside a value twice, and the value in quotes"
        ) from error


def require_one_line(number: int, *cells: str) -> None:
    """Refuse values with a line break.

    An unclosed quote swallows the lines below it.
    """
    for cell in cells:
        if "\n" in cell or "\r" in cell:
            lines = cell.splitlines()
            raise ValueError(
                f"a quoted value goes over {len(lines)} lines, '{lines[0][:40]}' to"
                f" '{lines[-1][:40]}', and ends in line {number}"
            )
