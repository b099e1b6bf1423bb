"""Hold what a page shows: sections of cards, laid out by `page.html.jinja`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kd.study.report.charts import Chart

COLORS = ("var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)")


def color(number: int) -> str:
    """Return the colour of a run."""
    return COLORS[number % len(COLORS)]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with its text; `percent` of the longest one."""

    percent: float
    color: str
    text: str


@dataclass(frozen=True, slots=True)
class TimeShare:
    """A part of a whole, percent."""

    name: str
    percent: float
    color: str


@dataclass(frozen=True, slots=True)
class Card:
    """A card; it shows what it has, in the order of its fields."""

    title: str = ""
    hints: Sequence[str] = ()
    shares: Sequence[TimeShare] = ()
    total_ms: float = 0.0  # of the shares
    chart: Chart | None = None
    bars: Mapping[str, Sequence[Bar]] | None = None
    dumbbells: Sequence[Any] = ()
    confusion: Sequence[Any] = ()
    pictures: Sequence[Any] = ()
    legend: Sequence[tuple[str, str]] = ()  # names with their colours
    table: Sequence[Mapping[str, Any]] = ()
    left_columns: Sequence[str] = ()  # columns that are aligned to the left
    text: str = ""  # keeps its spaces
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Cards beside each other; `columns`: at most three on a wide screen."""

    cards: Sequence[Card]
    columns: int = 1


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page."""

    title: str
    grids: Sequence[Grid]
    hint: str = ""
    notes: Sequence[str] = ()


def section(title: str, cards: Sequence[Card], hint: str = "") -> list[Section]:
    """Return a section of cards below each other; [] without cards."""
    return [Section(title, [Grid(cards)], hint)] if cards else []


def scaled_bars(
    rows: Mapping[str, Sequence[tuple[float, str, str]]],
) -> dict[str, list[Bar]]:
    """Return bars by name, from values with colour and text, scaled to the longest."""
    longest = max(
        (value for values in rows.values() for value, *_ in values), default=0.0
    )
    longest = longest or 1.0
    return {
        name: [Bar(100 * value / longest, *style) for value, *style in values]
        for name, values in rows.items()
    }
