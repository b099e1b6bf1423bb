"""Format numbers, rows and names as text. Imports nothing from kd."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

# first characters of cells that spreadsheets run as formulas
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def percent(share: float) -> str:
    """Return 0.934 as `93.4 %`."""
    return f"{100 * share:.1f} %"


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Return rows as an aligned Markdown table, for terminals and report.md."""
    columns = list(rows[0])
    cells = [columns, *[[str(row[column]) for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        [line[0].ljust(widths[0])]
        + [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
        for line in cells
    ]
    lines.insert(1, ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


AS_TRAINED = "as trained"  # title of the share of images with PyTorch's prediction


def variant_rows(manifest: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the measurements of `kd-export --compare` as rows of a table.

    The fastest on one thread is first.

    A score with the title `AS_TRAINED`, of images without labels, has one column.
    """
    rows = []
    variants = manifest.get("variants", {})
    for file, variant in sorted(
        variants.items(), key=lambda item: item[1]["speed"]["1"]["p50_ms"]
    ):
        mark = " (accepted)" if file == manifest.get("pick") else ""
        show = percent if variant["unit"] == "%" else "{:.4f}".format
        for threads, speed in variant["speed"].items():
            rows.append(
                {
                    "file": file + mark,
                    "threads": threads,
                    "p50 ms": f"{speed['p50_ms']:.2f}",
                    "p99 ms": f"{speed['p99_ms']:.2f}",
                    "images/s": f"{speed['images_per_second']:.1f}",
                    "MB": f"{variant['bytes'] / 1e6:.2f}",
                    "memory MB": f"{speed['memory_mb']:.0f}",
                    variant["title"]: show(variant["score"]),
                    "95 %": " to ".join(map(show, variant["interval"])),
                    AS_TRAINED: show(variant["agreement"]),
                }
            )
    return rows


VARIANTS_NOTE = (
    "p50 and p99: latency of one image for one client of kd-serve (JPEG, S x S pixels),"
    " with the given number of threads. images/s: with as many images at a time as"
    " threads. MB: on disk. memory: of the server. as trained: the same prediction as"
    " the student in PyTorch before the export. 95 %: of the score."
)
"""Legend under the table of `variant_rows`."""


def format_number(value: float, unit: str = "", digits: int = 3) -> str:
    """Return a number in few characters, with its unit: 0.123, 12.3, 1,234, 75 %.

    The unit "%" is for shares.
    """
    if unit == "%":
        return f"{100 * value:.{digits}g} %"
    form = f".{digits}g"
    if value and abs(value) < 0.01:
        form = f".{digits - 2}e"
    elif abs(value) >= 1000:
        form = ",.0f"
    return f"{value:{form}} {unit}".rstrip()


def format_dollars(dollars: float) -> str:
    """Return dollars with enough digits to compare: 12.34, 0.00123."""
    return f"{dollars:,.2f}" if dollars >= 1 else f"{dollars:.3g}"


def format_seconds(seconds: float) -> str:
    """Return seconds as text: 42 s, 4 min 42 s, 3 h 05 min."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def nfc(name: str) -> str:
    """Return the normalized form (NFC) in which names are compared.

    macOS writes é as two characters.
    """
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def first_few(names: Sequence[str]) -> str:
    """Return up to eight names in a line."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


JOINERS = "\u200c\u200d"  # inside words of Persian and in emoji


def is_one_line(text: str) -> bool:
    """Return whether a text is one line without control characters.

    It may have wide spaces such as U+3000.
    """
    return text.isprintable() or all(
        char.isprintable() or unicodedata.category(char) == "Zs" or char in JOINERS
        for char in text
    )


def as_one_line(text: str) -> str:
    """Return a stranger's text as one line for terminals.

    "?" stands for each character that is not printed.
    """
    if text.isprintable():
        return text
    return "".join(char if is_one_line(char) else "?" for char in text)


def table_cell(text: str) -> str:
    """Return a text for a CSV cell.

    A spreadsheet runs one such as =A1 as a formula, unless an apostrophe precedes.
    """
    return f"'{text}" if text.startswith(FORMULA) and not text[1:].isdecimal() else text


def class_order(names: Iterable[str]) -> list[str]:
    """Return class names in order: numeric if all are digits, else alphabetical."""
    order = sorted(names)
    return sorted(order, key=int) if all(name.isdecimal() for name in order) else order


def list_line(name: str) -> str:
    """Return a name as a line of a list, as JSON where a bare name would be misread."""
    plain = (
        name == name.strip() and name.isprintable() and name[:1] not in ("", '"', "#")
    )
    return name if plain else json.dumps(name)


def names_in_list(text: str) -> list[str]:
    """Return the names in a list with one name per line.

    Empty lines and lines that begin with "#" are ignored.
    """
    names = []
    # not splitlines: a name may contain U+2028 or U+0085
    for line in (line.strip() for line in text.split("\n")):
        if line and not line.startswith("#"):
            # a handwritten name that begins with a quotation mark
            with suppress(ValueError):
                line = str(json.loads(line)) if line.startswith('"') else line
            names.append(line)
    return names


def author_name(name: str) -> str:
    """Return a parameter's name as the network's author wrote it.

    Names of wrappers before it are dropped.
    """
    wrapper, _, inner = name.partition(".")
    if wrapper in ("module", "student", "network", "inner") and inner:
        return author_name(inner)
    return name
