"""Write docs/results.md: every measurement of benchmarks/, from the headers and rows of its CSV.

    python tools/results.py           # writes the page
    python tools/results.py --print   # prints it

A CSV's header says what was measured (`what`), what to know of it (`note`), and which columns stand here:
`show: BY BY: VALUE +VALUE | COLUMN=VALUE` makes a row for each combination of the columns before the colon. A value is
listed for up to three raw rows, else its median with the range; `+` sums it. Behind the bar, only such rows count.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTED = 3  # raw values in a cell; of more a reader wants the middle
TITLE = """# Results

Written by `python tools/results.py` from the files in `benchmarks/`. Each has command, commit, machine, versions and
date in its header, and one raw measurement a row. A cell lists up to three raw values (as a rule the seeds); of more it
has the median and the range.

Machines: `amd-epyc-2cores` has two cores of an AMD EPYC, on 2026-11-21 with AVX2, later with AVX-512 and bfloat16
units; `intel-xeon-2cores` has AMX. Both were shared unless a note says otherwise. **Compare ratios within one file, not
times of two.**
"""


def read(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return header and rows of a CSV."""
    lines = path.read_text().splitlines()
    header = dict(re.findall(r"^# (\w+): (.*)$", "\n".join(lines), re.MULTILINE))
    return header, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def number(text: str) -> float | None:
    """Return a cell as a number, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def short(value: float) -> str:
    """Return a number with four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def cell(texts: list[str], summed: bool) -> str:
    """Return what stands in a cell for the raw values of its rows."""
    texts = [text for text in texts if text]
    values = [value for value in map(number, texts) if value is not None]
    if len(values) < len(texts) or not values:
        return ", ".join(dict.fromkeys(texts))
    if summed:
        return short(sum(values))
    if len(values) <= LISTED or len({*values}) == 1:
        return ", ".join(map(short, values if len({*values}) > 1 else values[:1]))
    return f"{short(statistics.median(values))} ({short(min(values))} to {short(max(values))})"


def table(header: dict[str, str], rows: list[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a measurement's table."""
    shown, _, only = header["show"].partition(" | ")
    by, names = (part.split() for part in shown.split(": "))
    if only:
        column, _, wanted = only.partition("=")
        rows = [row for row in rows if row[column] == wanted]
    by = [] if by == ["all"] else by
    titles = [*by, *(name.lstrip("+") for name in names)]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(by)}{'---:|' * len(names)}"
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    for key, group in groups.items():
        cells = [cell([row[name.lstrip("+")] for row in group], name.startswith("+")) for name in names]
        yield f"| {' | '.join(text.replace('|', '/') for text in (*key, *cells))} |"


def page() -> str:
    """Return the page."""
    parts = [TITLE]
    for path in sorted((ROOT / "benchmarks").glob("*.csv")):
        header, rows = read(path)
        name = path.name.removesuffix(f"_{header['hardware']}_{header['date']}.csv")
        facts = f"`{header['command']}`, commit {header['commit']}, {header['hardware']}, {header['date']}."
        note = [f"*{header['note']}*", ""] if "note" in header else []
        parts.append(
            "\n".join([f"## {name}", "", f"{header['what']}.", "", facts, "", *note, *table(header, rows), ""])
        )
    return "\n".join(parts)


def main() -> None:
    """Write or print the page."""
    if "--print" in sys.argv[1:]:
        print(page(), end="")
    else:
        (ROOT / "docs" / "results.md").write_text(page())


if __name__ == "__main__":
    main()
