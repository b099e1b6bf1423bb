"""Draw charts by Vega-Lite as SVG.

The kinds are lines over a quantity, stacked bars, points with numbers, and heat maps. A
function of each returns a `Chart`: a specification of Vega-Lite, which `svg` draws, and
its numbers as a table. A further kind is a further specification
(https://vega.github.io/vega-lite/docs/). A page sets the colours by CSS variables
(`PAGE`), so that one drawing serves light and dark screens; a file has them in it
(`FILE`).
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import vl_convert
from markupsafe import Markup
from PIL import Image

from kd.core.text import format_number

Spec = dict[str, Any]
POINTS = 300  # most points of a line: a pixel of the smallest chart has one
BESIDE = 16  # room for texts at the ends of a logarithmic axis, pixels
FEW = 12  # most points of a line that are marked: with more the marks touch
LETTER = 7  # width of a letter in a legend, pixels
SYMBOL = 46  # width of what stands around a name in a legend, pixels
DIGITS = 4  # of the numbers in a table
HEAT = (47, 111, 222)  # red, green, blue of a heat map, over light and dark grounds
FAINTEST = 0.1  # opacity of a cell of 0 %: a cell without a value has none
ROW = 16  # pixels of a heat map's row, as of a line of small text
LABELS = 8  # most numbers beside the rows
MOST_ROWS = 384  # of all its rows together: two for each of 192 cores
BELOW = 52  # of the axis below them
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
    """Points of one colour, each with a text and an upright interval if it is known."""

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
    end: float | None = None  # where it ends, if not at the last value; it begins at 0

    def spec(self, field: str, grid: bool) -> Spec:
        """Return the encoding of a field; an axis with a grid ends at round numbers."""
        axis: Spec = {"grid": grid}
        if self.unit == "%":
            axis["labelExpr"] = SHARE
        scale: Spec = {"zero": self.zero, "nice": grid and not self.log}
        if self.end is not None:
            scale["domain"] = [0, self.end]
        if self.log:
            scale |= {"type": "log", "padding": BESIDE}
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
    """Draw lines over a common x axis; at least one has a point.

    `size`: width and height, pixels.
    """
    series = [thinned(line) for line in series if len(line.x)]
    names = {line.name for line in series}  # a run may be called "teacher"
    levels = [
        replace(level, name=f"{level.name} (level)") if level.name in names else level
        for level in levels
    ]
    x = x_axis.spec("x", grid=False)
    y = y_axis.spec("y", grid=True)
    encoding = {"x": x, "y": y, "order": {"field": "i"}}
    layers = _level_layers(levels, x, y)
    for line in series:
        point = {"size": 24} if len(line.x) <= FEW else False
        mark = {"type": "line", "point": point, "aria": False}
        layers.append(_layer(_values(line), mark, line.name, encoding))
    colors = _colors([*series, *levels], size[0], "stroke")
    spec = {**_frame(size), "layer": layers, "encoding": {"color": colors}}
    horizontal = [level for level in levels if level.y is not None]
    return Chart(spec, _rows(series, x_axis, y_axis, horizontal))


def points(
    groups: Sequence[Points],
    size: tuple[int, int],
    axes: tuple[Axis, Axis],
    levels: Sequence[Level],
    stairs: Series,
    notes: Sequence[str],
) -> Chart:
    """Draw points with their texts and intervals.

    `stairs` join some, `notes` are lines of text below.
    """
    x = axes[0].spec("x", grid=False)
    y = axes[1].spec("y", grid=True)
    groups = [group for group in groups if group.at]
    rows = []
    for group in groups:
        for at, text, interval in zip_longest(group.at, group.texts, group.intervals):
            low, high = interval or (at[1], at[1])
            values = {"x": at[0], "y": at[1], "low": low, "high": high}
            rows.append({**values, "text": text or "", "series": group.name})
    data = {"values": rows}
    place = {"x": x, "y": y}
    ends = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    circle = {"type": "circle", "size": 50, "opacity": 1, "aria": False}
    text_mark = {"type": "text", "align": "left", "dx": 7, "dy": -6, "aria": False}
    texts = {**place, "text": {"field": "text"}}
    layers = [
        {"data": data, "mark": {"type": "rule", "aria": False}, "encoding": ends},
        {"data": data, "mark": circle, "encoding": place},
        {"data": data, "mark": text_mark, "encoding": texts},
        *_level_layers(levels, x, y),
    ]
    if stairs.x:
        mark = {"type": "line", "interpolate": "step-after", "aria": False}
        layers.append(_layer(_values(stairs), mark, stairs.name, place))
    title = {
        "text": [*notes],
        "orient": "bottom",
        "anchor": "start",
        "fontWeight": "normal",
        "offset": 12,
    }
    colors = _colors([*groups, *levels], size[0], "circle")
    # the size of the plot: the notes are as high as they are
    frame = {"width": size[0], "height": size[1]}
    return Chart(
        {**frame, "layer": layers, "encoding": {"color": colors}, "title": title}
    )


def stack(
    series: Sequence[Series], size: tuple[int, int], x_axis: Axis, y_axis: Axis
) -> Chart:
    """Draw stacked bars, one per x; all series have the same x."""
    bars = [
        {"x": x, "y": y, "series": layer.name, "layer": i}
        for i, layer in enumerate(series)
        for x, y in zip(layer.x, layer.y, strict=True)
        if y > 0
    ]
    x_encoding = {
        "field": "x",
        "type": "ordinal",
        "title": x_axis.title,
        "axis": {"labelOverlap": True, "labelSeparation": 14},
    }
    spec = {
        **_frame(size),
        "data": {"values": bars},
        "mark": {"type": "bar", "aria": False},
        "encoding": {
            "x": x_encoding,
            "y": y_axis.spec("y", grid=True),
            "color": _colors(series, size[0], "square"),
            "order": {"field": "layer"},
        },
    }
    return Chart(spec, _rows(series, x_axis, y_axis, ()))


def heat(shares_RC: np.ndarray, name: str, width: int, x_axis: Axis) -> Chart:
    """Draw shares as the opacity of cells, a row for each device called `name`.

    `shares_RC`: 0 to 1, float [rows, columns]; NaN: unknown. `x_axis` has an `end`.
    """
    count = len(shares_RC)
    x = x_axis.spec("x", grid=False)
    y = Axis().spec("y", grid=False)
    numbers = [*range(0, count, math.ceil(count / LABELS))]
    y["axis"] |= {"values": numbers, "format": "d"}
    y["scale"] |= {"domain": [-0.5, count - 0.5], "reverse": True}
    # an image of one byte per cell: an SVG's rectangle takes a hundred
    mark = {
        "type": "image",
        "url": _cells_url(shares_RC),
        "align": "left",
        "baseline": "top",
        "aspect": False,
        "smooth": False,
        "width": {"expr": "width"},
        "height": {"expr": "height"},
        "aria": False,
    }
    spec = {
        **_frame((width, min(ROW * count, MOST_ROWS) + BELOW)),
        "data": {"values": [{"x": 0, "y": -0.5}]},
        "mark": mark,
        "encoding": {"x": x, "y": y},
    }
    rows = []
    for number, shares_C in enumerate(shares_RC):
        known_C = shares_C[~np.isnan(shares_C)]
        statistics = {"mean": known_C.mean(), "least": known_C.min()}
        statistics |= {"most": known_C.max()}
        cells = {key: format_number(value, "%") for key, value in statistics.items()}
        rows.append({name: str(number), **cells})
    return Chart(spec, rows)


def _opacity(shares: np.ndarray) -> np.ndarray:
    return np.nan_to_num(FAINTEST + (1 - FAINTEST) * shares)


def heat_legend() -> list[tuple[str, str]]:
    """Return shares as text, each with its colour in a heat map."""
    shares = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    return [
        (format_number(share, "%"), f"rgb({' '.join(map(str, HEAT))} / {opacity:.3f})")
        for share, opacity in zip(shares, _opacity(shares), strict=True)
    ]


def _cells_url(shares_RC: np.ndarray) -> str:
    """Return a PNG with a pixel for each cell, as data URI."""
    levels_RC = np.rint(255 * _opacity(shares_RC)).astype(np.uint8)
    image = Image.fromarray(levels_RC).convert("P")
    image.putpalette(HEAT * 256)
    file = io.BytesIO()
    image.save(file, "PNG", transparency=bytes(range(256)))
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def thinned(line: Series) -> Series:
    """Return a line of at most `POINTS` points, evenly thinned, with the last one."""
    picks = evenly(len(line.x), POINTS)
    x = [float(line.x[i]) for i in picks]
    y = [float(line.y[i]) for i in picks]
    return replace(line, x=x, y=y)


def evenly(count: int, limit: int) -> Sequence[int]:
    """Return at most `limit` of the first `count` numbers, evenly, with the last."""
    if count <= limit:
        return range(count)
    return [i * (count - 1) // (limit - 1) for i in range(limit)]


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
    rows = [{**value, "series": name} for value in values]
    return {"data": {"values": rows}, "mark": mark, "encoding": encoding}


def _values(line: Series) -> list[Spec]:
    return [
        {"x": x, "y": y, "i": i}
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True))
    ]


def _level_layers(levels: Sequence[Level], x: Spec, y: Spec) -> list[Spec]:
    """Return a layer for each dashed line."""
    mark = {"type": "rule", "strokeDash": DASHES, "strokeWidth": 1.8, "aria": False}
    layers = []
    for level in levels:
        encoding = {"x": x} if level.y is None else {"y": y}
        values = [{"x": level.x, "y": level.y}]
        layers.append(_layer(values, mark, level.name, encoding))
    return layers


def _colors(series: Sequence[Series | Level | Points], width: int, symbol: str) -> Spec:
    """Return the encoding of series by colours; a legend, if there are several."""
    colors = {line.name: line.color for line in series}
    column_width = LETTER * max(map(len, colors)) + SYMBOL
    legend = {
        "title": None,
        "orient": "bottom",
        "columns": max(1, width // column_width),
        "labelLimit": width - SYMBOL,
        "columnPadding": 16,
        "symbolType": symbol,
    }
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
    curves = {line.name: dict(zip(line.x, line.y, strict=True)) for line in series}
    constant = {
        level.name: format_number(level.y or 0.0, y_axis.unit, DIGITS)
        for level in levels
    }
    rows = []
    for x in sorted({x for curve in curves.values() for x in curve}):
        cells = {
            name: format_number(curve[x], y_axis.unit, DIGITS) if x in curve else "-"
            for name, curve in curves.items()
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
