"""Charts, drawn by Vega-Lite as SVG: lines over a quantity, stacked bars, points with numbers.

A function a kind returns a `Chart`: a specification of Vega-Lite, which `svg` draws, and its numbers as a table. A
further kind, such as a heat map, is a further specification (https://vega.github.io/vega-lite/docs/). A page sets the
colours by CSS variables (`PAGE`), so that one drawing serves light and dark screens; a file has them in it (`FILE`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vl_convert
from markupsafe import Markup

from kd.core.text import number

Spec = dict[str, Any]
POINTS = 400  # most points of a line: a pixel of the smallest chart has one
FEW = 12  # most points of a line that are marked: with more the marks touch
LEGEND = 200  # most width of a name in a legend, pixels: three fit below a wide chart
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
class Axis:
    """What an axis shows."""

    title: str = ""
    unit: str = ""  # "%": shares of 1
    zero: bool = False  # whether it begins at 0
    log: bool = False

    def spec(self, field: str, grid: bool) -> Spec:
        """Return the encoding of a field by this axis."""
        axis = {"grid": grid, "labelExpr": SHARE} if self.unit == "%" else {"grid": grid}
        scale: Spec = {"zero": self.zero, "nice": not self.log}
        scale |= {"type": "log"} if self.log else {}
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
        return Markup(vl_convert.vegalite_to_svg({**self.spec, "config": _config(theme)}))


def lines(
    series: Sequence[Series], size: tuple[int, int], x_axis: Axis, y_axis: Axis, levels: Sequence[Level] = ()
) -> Chart:
    """Draw lines over a common x axis; at least one has a point. `size`: width and height, pixels."""
    series = [thinned(line) for line in series if len(line.x)]
    colors = _colors([*series, *levels])
    x, y = x_axis.spec("x", grid=False), y_axis.spec("y", grid=True)
    layers: list[Spec] = []
    for line in series:
        points = [{"x": at, "y": value, "i": i} for i, (at, value) in enumerate(zip(line.x, line.y, strict=True))]
        mark = {"type": "line", "point": {"size": 24} if len(points) <= FEW else False, "aria": False}
        layers.append(_layer(points, mark, line.name, {"x": x, "y": y, "order": {"field": "i"}}))
    for level in levels:
        place = {"y": {**y, "field": "y"}} if level.y is not None else {"x": {**x, "field": "x"}}
        mark = {"type": "rule", "strokeDash": DASHES, "strokeWidth": 1.8, "aria": False}
        layers.append(_layer([{"x": level.x, "y": level.y}], mark, level.name, place))
    spec = {**_frame(size), "layer": layers, "encoding": {"color": colors}}
    return Chart(spec, _rows(series, x_axis, y_axis, [level for level in levels if level.y is not None]))


def stack(series: Sequence[Series], size: tuple[int, int], x_axis: Axis, y_axis: Axis) -> Chart:
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
            "x": {"field": "x", "type": "ordinal", "title": x_axis.title, "axis": {"labelOverlap": True}},
            "y": y_axis.spec("y", grid=True),
            "color": _colors(series),
            "order": {"field": "layer"},
        },
    }
    return Chart(spec, _rows(series, x_axis, y_axis, ()))


def thinned(line: Series) -> Series:
    """Return a line of at most `POINTS` points, evenly thinned, with the last one."""
    picks = evenly(len(line.x), POINTS)
    return Series(line.name, line.color, [float(line.x[i]) for i in picks], [float(line.y[i]) for i in picks])


def evenly(count: int, most: int) -> Sequence[int]:
    """Return at most `most` of the first `count` numbers, evenly spaced, always including the last."""
    return range(count) if count <= most else [i * (count - 1) // (most - 1) for i in range(most)]


def _frame(size: tuple[int, int]) -> Spec:
    width, height = size
    return {"width": width, "height": height, "autosize": {"type": "fit", "contains": "padding"}}


def _layer(values: Sequence[Mapping[str, Any]], mark: Spec, name: str, encoding: Spec) -> Spec:
    named = [{**value, "series": name} for value in values]
    return {"data": {"values": named}, "mark": mark, "encoding": encoding}


def _colors(series: Sequence[Series | Level]) -> Spec:
    """Return the encoding of series by their colours, with a legend below the chart if there are several."""
    colors = {line.name: line.color for line in series}
    return {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": [*colors], "range": [*colors.values()]},
        "legend": {"title": None, "orient": "bottom", "columns": 3} if len(colors) > 1 else None,
    }


def _rows(series: Sequence[Series], x_axis: Axis, y_axis: Axis, levels: Sequence[Level]) -> list[dict[str, str]]:
    """Return the numbers of a chart: a row for each x, a column for each line."""
    at = {line.name: dict(zip(line.x, line.y, strict=True)) for line in series}
    constant = {level.name: number(level.y or 0.0, y_axis.unit, DIGITS) for level in levels}
    rows = []
    for x in sorted({x for values in at.values() for x in values}):
        cells = {name: number(values[x], y_axis.unit, DIGITS) if x in values else "-" for name, values in at.items()}
        rows.append({x_axis.title: number(x, x_axis.unit), **cells, **constant})
    return rows


def _config(theme: Theme) -> Spec:
    text = {"labelColor": theme.ink, "labelFontSize": 11.5, "titleColor": theme.ink, "titleFontSize": 11.5}
    axis = {**text, "gridColor": theme.rule, "domain": False, "ticks": False, "titleFontWeight": "normal"}
    return {
        "background": theme.ground,
        "font": "sans-serif",
        "view": {"stroke": None},
        "axis": {**axis, "tickCount": 5, "labelPadding": 6},
        "axisX": {"titleAnchor": "end", "labelAngle": 0},
        "legend": {**text, "labelLimit": LEGEND, "symbolType": "square", "symbolStrokeWidth": 0},
        "line": {"strokeWidth": 2, "strokeJoin": "round", "strokeCap": "round"},
    }
