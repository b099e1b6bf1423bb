"""Charts, drawn by Vega-Lite as SVG: lines over a quantity, stacked bars, points with
numbers.

A function a kind returns a `Chart`: a specification of Vega-Lite, which `svg` draws,
and its numbers as a table. A further kind, such as a heat map, is a further
specification (https://vega.github.io/vega-lite/docs/). A page sets the colours by CSS
variables (`PAGE`), so that one drawing serves light and dark screens; a file has them
in it (`FILE`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import vl_convert
from markupsafe import Markup

from kd.core.text import format_number

Spec = dict[str, Any]
POINTS = 300  # most points of a line: a pixel of the smallest chart has one
BESIDE = 16  # room for texts at the ends of a logarithmic axis, pixels
FEW = 12  # most points of a line that are marked: with more the marks touch
LETTER, SYMBOL = (
    7,
    46,
)  # widths in a legend, pixels: of a letter, and of what stands around a name
DIGITS = 4  # of the numbers in a table
DASHES = [2, 4]  # pixels drawn and left out of a level's line
SHARE = "format(datum.value * 100, '~g') + ' %'"
"""The labels of an axis of shares."""


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of what is no series."""

    ink: str
    rule: str
    ground: str | None


PAGE = Theme("var(--soft)", "var(--rule)", None)
FILE = Theme("#475467", "#e4e7ec", "#ffffff")


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one layer of a stack."""

    name: str
    color: str  # a colour of CSS, such as `var(--c1)` in a page
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Level:
    """A dashed line through the whole chart: level at `y`, or upright at `x`."""

    name: str
    color: str
    y: float | None = None
    x: float | None = None


@dataclass(frozen=True, slots=True)
class Points:
    """Points of one colour, each with a text beside it and an upright interval where it
    is known.
    """

    name: str
    color: str
    at: Sequence[tuple[float, float]]  # x, y
    texts: Sequence[str] = ()
    intervals: Sequence[Sequence[float] | None] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows."""

    title: str = ""
    unit: str = ""  # "%": shares of 1
    zero: bool = False  # whether it begins at 0
    log: bool = False

    def spec(self, field: str, grid: bool) -> Spec:
        """Return the encoding of a field by this axis; one with a grid ends at round
        numbers.
        """
        axis = (
            {"grid": grid, "labelExpr": SHARE} if self.unit == "%" else {"grid": grid}
        )
        scale: Spec = {"zero": self.zero, "nice": grid and not self.log}
        scale |= {"type": "log", "padding": BESIDE} if self.log else {}
        return {
            "field": field,
            "type": "quantitative",
            "title": self.title or None,
            "axis": axis,
            "scale": scale,
        }


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing and its numbers."""

    spec: Spec
    table: Sequence[Mapping[str, str]] = ()

    def svg(self, theme: Theme = PAGE) -> Markup:
        """Draw the chart. Vega-Lite escapes the names in it."""
        return Markup(
            vl_convert.vegalite_to_svg({**self.spec, "config": _config(theme)})
        )


def lines(
    series: Sequence[Series],
    size: tuple[int, int],
    x_axis: Axis,
    y_axis: Axis,
    levels: Sequence[Level] = (),
) -> Chart:
    """Draw lines over a common x axis; at least one has a point. `size`: width and
    height, pixels.
    """
    series = [thinned(line) for line in series if len(line.x)]
    names = {line.name for line in series}  # a run may be called "teacher"
    levels = [
        replace(level, name=f"{level.name} (level)") if level.name in names else level
        for level in levels
    ]
    colors = _colors([*series, *levels], size[0], "stroke")
    x, y = x_axis.spec("x", grid=False), y_axis.spec("y", grid=True)
    layers = _levels(levels, x, y)
    for line in series:
        mark = {
            "type": "line",
            "point": {"size": 24} if len(line.x) <= FEW else False,
            "aria": False,
        }
        layers.append(
            _layer(
                _points_of(line),
                mark,
                line.name,
                {"x": x, "y": y, "order": {"field": "i"}},
            )
        )
    spec = {**_frame(size), "layer": layers, "encoding": {"color": colors}}
    return Chart(
        spec,
        _rows(
            series, x_axis, y_axis, [level for level in levels if level.y is not None]
        ),
    )


def points(
    groups: Sequence[Points],
    size: tuple[int, int],
    axes: tuple[Axis, Axis],
    levels: Sequence[Level] = (),
    stairs: Series | None = None,
    notes: Sequence[str] = (),
) -> Chart:
    """Draw points with their texts and intervals; `stairs` join some, `notes` are lines
    of text below.
    """
    x, y = axes[0].spec("x", grid=False), axes[1].spec("y", grid=True)
    groups = [group for group in groups if group.at]
    rows = [
        {
            "x": at[0],
            "y": at[1],
            "text": text or "",
            "low": ends[0] if ends else at[1],
            "high": ends[1] if ends else at[1],
            "series": group.name,
        }
        for group in groups
        for at, text, ends in zip_longest(group.at, group.texts, group.intervals)
    ]
    interval = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers = [
        {
            "data": {"values": rows},
            "mark": {"type": "rule", "aria": False},
            "encoding": interval,
        },
        {
            "data": {"values": rows},
            "mark": {"type": "circle", "size": 50, "opacity": 1, "aria": False},
            "encoding": {"x": x, "y": y},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "text", "align": "left", "dx": 7, "dy": -6, "aria": False},
            "encoding": {"x": x, "y": y, "text": {"field": "text"}},
        },
        *_levels(levels, x, y),
    ]
    if stairs is not None and stairs.x:
        mark = {"type": "line", "interpolate": "step-after", "aria": False}
        layers.append(_layer(_points_of(stairs), mark, stairs.name, {"x": x, "y": y}))
    title = {
        "text": [*notes],
        "orient": "bottom",
        "anchor": "start",
        "fontWeight": "normal",
        "offset": 12,
    }
    colors = _colors([*groups, *levels], size[0], "circle")
    frame = {
        "width": size[0],
        "height": size[1],
    }  # of the plot: the notes are as high as they are
    return Chart(
        {**frame, "layer": layers, "encoding": {"color": colors}, "title": title}
    )


def stack(
    series: Sequence[Series], size: tuple[int, int], x_axis: Axis, y_axis: Axis
) -> Chart:
    """Draw stacked bars, one per x; all series have the same x."""
    bars = [
        {"x": at, "y": value, "series": layer.name, "layer": i}
        for i, layer in enumerate(series)
        for at, value in zip(layer.x, layer.y, strict=True)
        if value > 0
    ]
    spec = {
        **_frame(size),
        "data": {"values": bars},
        "mark": {"type": "bar", "aria": False},
        "encoding": {
            "x": {
                "field": "x",
                "type": "ordinal",
                "title": x_axis.title,
                "axis": {"labelOverlap": True, "labelSeparation": 14},
            },
            "y": y_axis.spec("y", grid=True),
            "color": _colors(series, size[0], "square"),
            "order": {"field": "layer"},
        },
    }
    return Chart(spec, _rows(series, x_axis, y_axis, ()))


def thinned(line: Series) -> Series:
    """Return a line of at most `POINTS` points, evenly thinned, with the last one."""
    picks = evenly(len(line.x), POINTS)
    return Series(
        line.name,
        line.color,
        [float(line.x[i]) for i in picks],
        [float(line.y[i]) for i in picks],
    )


def evenly(count: int, most: int) -> Sequence[int]:
    """Return at most `most` of the first `count` numbers, evenly spaced, always
    including the last.
    """
    return (
        range(count)
        if count <= most
        else [i * (count - 1) // (most - 1) for i in range(most)]
    )


def _frame(size: tuple[int, int]) -> Spec:
    width, height = size
    return {
        "width": width,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
    }


def _layer(
    values: Sequence[Mapping[str, Any]], mark: Spec, name: str, encoding: Spec
) -> Spec:
    named = [{**value, "series": name} for value in values]
    return {"data": {"values": named}, "mark": mark, "encoding": encoding}


def _points_of(line: Series) -> list[Spec]:
    return [
        {"x": x, "y": y, "i": i}
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True))
    ]


def _levels(levels: Sequence[Level], x: Spec, y: Spec) -> list[Spec]:
    """Return a layer for each dashed line."""
    mark = {"type": "rule", "strokeDash": DASHES, "strokeWidth": 1.8, "aria": False}
    return [
        _layer(
            [{"x": level.x, "y": level.y}],
            mark,
            level.name,
            {"x": x} if level.y is None else {"y": y},
        )
        for level in levels
    ]


def _colors(series: Sequence[Series | Level | Points], width: int, symbol: str) -> Spec:
    """Return the encoding of series by their colours, with a legend below the chart if
    there are several.
    """
    colors = {line.name: line.color for line in series}
    longest = LETTER * max(len(name) for name in colors) + SYMBOL
    columns = max(1, width // longest)
    legend = {
        "title": None,
        "orient": "bottom",
        "columns": columns,
        "labelLimit": width - SYMBOL,
    }
    legend |= {"columnPadding": 16, "symbolType": symbol}
    return {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": [*colors], "range": [*colors.values()]},
        "legend": legend if len(colors) > 1 else None,
    }


def _rows(
    series: Sequence[Series], x_axis: Axis, y_axis: Axis, levels: Sequence[Level]
) -> list[dict[str, str]]:
    """Return the numbers of a chart: a row for each x, a column for each line."""
    at = {line.name: dict(zip(line.x, line.y, strict=True)) for line in series}
    constant = {
        level.name: format_number(level.y or 0.0, y_axis.unit, DIGITS)
        for level in levels
    }
    rows = []
    for x in sorted({x for values in at.values() for x in values}):
        cells = {
            name: format_number(values[x], y_axis.unit, DIGITS) if x in values else "-"
            for name, values in at.items()
        }
        rows.append({x_axis.title: format_number(x, x_axis.unit), **cells, **constant})
    return rows


def _config(theme: Theme) -> Spec:
    text = {
        "labelColor": theme.ink,
        "labelFontSize": 11.5,
        "titleColor": theme.ink,
        "titleFontSize": 11.5,
    }
    axis = {
        **text,
        "gridColor": theme.rule,
        "domain": False,
        "ticks": False,
        "titleFontWeight": "normal",
    }
    return {
        "background": theme.ground,
        "font": "sans-serif",
        "title": {"color": theme.ink, "fontSize": 12.5},
        "view": {"stroke": None},
        "axis": {**axis, "tickCount": 5, "labelPadding": 6},
        "axisX": {"titleAnchor": "end", "labelAngle": 0},
        "legend": {**text, "symbolStrokeWidth": 2.5},
        "line": {"strokeWidth": 2, "strokeJoin": "round", "strokeCap": "round"},
    }
