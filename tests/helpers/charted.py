"""The numbers of a chart on a page, as its table shows them."""

from __future__ import annotations

import html
import re


def number(text: str) -> float | None:
    """Return a cell's number: 0.25 of `25 %`, None of `-`."""
    value, _, unit = text.replace(",", "").partition(" ")
    if value == "-":
        return None
    return float(value) / 100 if unit == "%" else float(value)


def charted(page: str, title: str) -> dict[str, list[float | None]]:
    """Return the columns of the first chart below a title; the first one has its x."""
    body = page[page.index(f"<h3>{title}</h3>") :]
    drawing, _, below = body.partition("</svg>")
    assert 'role="img"' in drawing
    table = below[below.index("<table>") : below.index("</table>")]
    heads = [html.unescape(head) for head in re.findall(r"<th>(.*?)</th>", table)]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    return {head: [number(row[i]) for row in rows] for i, head in enumerate(heads)}
