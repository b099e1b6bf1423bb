"""Read the table of `kd-export --values`: what responses say beside each label."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from kd.core.errors import ConfigError, did_you_mean
from kd.core.text import as_one_line, first_few, is_one_line, nfc
from kd.deploy.export.graphs import Subject
from kd.deploy.serve.model import MAX_TEXT, parse_values
from kd.deploy.serve.responses import Answer, Value, Values
from kd.files.json_file import DAMAGE
from kd.files.manifest import MANIFEST
from kd.files.tables import DELIMITERS, parse_table, read_text, require_one_line

WHERE = "--values"
FORM = "A CSV file: its first line names the columns, its first column has the labels"
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?")
"""JSON's numbers (RFC 8259), as far as a float64 keeps their whole digits (15). So 007
and a long article number are texts.
"""
DIGITS = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
NOT_FINITE = ("nan", "inf", "infinity")  # what `float` reads, and JSON has not
TAKEN = {"image", "error", "scores"} | {field.name for field in fields(Answer)}
"""Columns of kd-predict's tables, and fields of a response."""
Table = tuple[list[str], dict[str, list[str]], list[str]]
"""Columns, cells of each label, and labels of rows that are left out."""


def label_values(
    path: Path | None, target: Path, subject: Subject
) -> tuple[Values, list[str]]:
    """Return the values of each class of a subject, and a line on them.

    Without a table (`path` None) they are those of the export `target`, which is
    replaced, if its labels are the same.

    Raises ConfigError for a table that kd cannot read, or without a row for a class.
    """
    classes = subject.classes if subject.recipe.task.logits else ()
    if path is None:
        return _replaced_values(target, classes)
    if not classes:
        wrong = "this student returns vectors, not labels"
        raise ConfigError(WHERE, wrong, "A student of labels", "Leave it out")
    try:
        columns, cells, left_out = _read_table(path, classes)
        typed = _typed(columns, [cells[label] for label in classes])
    except OSError as error:
        wrong = f"'{path}' cannot be read ({error.strerror})"
        raise ConfigError(WHERE, wrong, FORM, "Check the path") from error
    except ValueError as error:
        raise ConfigError(WHERE, f"'{path}': {error}", FORM, "Correct it") from error
    values = {
        label: dict(zip(columns, row, strict=True))
        for label, row in zip(classes, zip(*typed, strict=True), strict=True)
    }
    titles = map(_title, columns, typed)
    line = f"values: {', '.join(titles)} for each of {len(classes)} labels"
    if left_out:
        names = as_one_line(first_few(left_out))
        line += f"; left out {len(left_out)} of other labels: {names}"
    return values, [line]


def recorded_values(values: Values) -> dict[str, Any]:
    """Return values for manifest.json, whose keys are sorted and columns are not."""
    columns = [*next(iter(values.values()))]
    rows = {label: [*row.values()] for label, row in values.items()}
    return {"columns": columns, "labels": rows}


def _replaced_values(target: Path, classes: Sequence[str]) -> tuple[Values, list[str]]:
    values: Values = {}
    with suppress(OSError, *DAMAGE):  # no export
        output = json.loads((target / MANIFEST).read_bytes())["output"]
        values = parse_values(output, [*output["values"]["labels"]])
    if not values:
        return {}, []
    if values.keys() != {*classes}:
        return {}, ["values: none; the replaced export's are of other labels"]
    titles = ", ".join(next(iter(values.values())))
    return values, [f"values: {titles} as in the replaced export"]


def _read_table(path: Path, classes: Sequence[str]) -> Table:
    """Return the cells of each class; ValueError: a row is missing or repeated."""
    delimiter = DELIMITERS.get(path.suffix.lower(), ",")
    (first, *header), rows = parse_table(read_text(path), delimiter)
    columns = [nfc(name) for name in header]
    _require_columns(columns)
    class_by_name = {nfc(label): label for label in classes}
    cells = dict[str, list[str]]()
    left_out = list[str]()
    for number, (name, *row) in rows:
        require_one_line(number, name, *row)
        normalized = nfc(name)
        if normalized not in class_by_name:
            normalized = normalized.strip()
        label = class_by_name.get(normalized)
        if not normalized:
            raise ValueError(f"line {number} has no label")
        if label is None:
            left_out.append(normalized)
            continue
        if label in cells:
            raise ValueError(f"line {number} is a second row for '{label}'")
        cells[label] = [cell.strip() for cell in row]
        _require_cells(number, columns, cells[label])
    missing = [label for label in classes if label not in cells]
    if missing:
        raise _missing_rows(path, first, missing, left_out, len(classes))
    return columns, cells, left_out


def _missing_rows(
    path: Path, first: str, missing: list[str], left_out: list[str], count: int
) -> ConfigError:
    names = first_few([f"'{label}'" for label in missing])
    wrong = f"'{path}' has no row for {len(missing)} of {count} labels: {names}"
    hints = (
        f"Its row '{as_one_line(name)}' is of no label. {hint}"
        for name in left_out
        if (hint := did_you_mean(name, missing[:8]))
    )
    remedy = next(hints, "Add what is missing; cells may be empty")
    if first in missing:
        remedy = f"Its first line, of '{first}', must name the columns"
    return ConfigError(WHERE, wrong, f"A row for each of the {count} labels", remedy)


def _require_columns(columns: Sequence[str]) -> None:
    numbered = {"label", "score", *columns}
    for column in columns:
        if columns.count(column) > 1:  # in two Unicode forms
            raise ValueError(f"its first line names '{column}' twice")
        if len(column) > MAX_TEXT or not is_one_line(column):
            raise ValueError(f"the column {column!r:.60} is no line of text")
        stem = re.fullmatch(r"(.+)_[0-9]+", column)
        is_taken = column in TAKEN or column.startswith("score:")
        if is_taken or (stem and stem[1] in numbered):
            raise ValueError(
                f"the column '{column}' is one that kd-predict writes itself, as are"
                f" {', '.join(sorted(TAKEN))}, score:LABEL and COLUMN_2. Rename it"
            )


def _require_cells(number: int, columns: Sequence[str], row: Sequence[str]) -> None:
    """Refuse cells that are neither text nor a number of JSON."""
    for column, cell in zip(columns, row, strict=True):
        place = f"line {number}, column '{column}'"
        if len(cell) > MAX_TEXT or not is_one_line(cell):
            wrong = f"{place}: {cell!r:.60} has control characters"
            raise ValueError(f"{wrong}, or more than {MAX_TEXT} characters")
        is_number = NUMBER.fullmatch(cell)
        if cell.lower().lstrip("+-") in NOT_FINITE or (
            is_number and not math.isfinite(float(cell))
        ):
            wrong = f"{place}: '{cell}' is no number that JSON has"
            raise ValueError(f"{wrong}. Leave the cell empty, which becomes null")


def _typed(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[Value]]:
    """Return the values by column: numbers if all its cells are, else texts.

    None stands for an empty cell.
    """
    typed = list[list[Value]]()
    for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
        _require_points(column, [cell for cell in cells if cell])
        are_numbers = all(NUMBER.fullmatch(cell) for cell in cells if cell)
        convert = json.loads if are_numbers else str
        typed.append([convert(cell) if cell else None for cell in cells])
    return typed


def _require_points(column: str, cells: Sequence[str]) -> None:
    """Refuse a column of numbers of which some have a comma; `1,3` among texts is one.

    Raises:
        ValueError: naming the first.
    """
    commas = [cell for cell in cells if DECIMAL_COMMA.fullmatch(cell)]
    numbers = [cell for cell in cells if NUMBER.fullmatch(cell)]
    if not commas or len(commas) + len(numbers) < len(cells):
        return
    cell = commas[0]
    point, whole = cell.replace(",", "."), cell.replace(",", "")
    raise ValueError(
        f"column '{column}': '{cell}' has a comma. Write {point} if it is a decimal"
        f" comma, {whole} if it separates thousands"
    )


def _title(column: str, values: Sequence[Value]) -> str:
    """Return a column's name and type, with the text that made numbers texts."""
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        return f"{column} (number)"
    odd = [text for text in texts if not NUMBER.fullmatch(text)]
    words = [text for text in odd if not DIGITS.fullmatch(text)]
    if len(words) == len(texts):
        return f"{column} (text)"
    reason = f"because of '{[*words, *odd][0]}'"
    if not words:
        reason += ", which has more than 15 digits or begins with 0"
    return f"{column} (text, {reason})"
