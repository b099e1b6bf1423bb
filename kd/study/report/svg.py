"""Charts as SVG text: lines, stacked bars, bars. Colours are CSS variables, so that a page sets them.

Each chart carries its numbers in `data-chart`; the page's script shows them where the pointer is.
"""

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 30  # room around the plot, pixels
WIDE = 600  # pixels above which a chart scrolls in a narrow page instead of shrinking
ALONE = (
    "<style>text{fill:#475467;font:13px sans-serif}.grid{stroke:#e4e7ec}.line{fill:none;stroke-width:2}"
    '.dashed{stroke-dasharray:2 5}</style><rect width="100%" height="100%" fill="#fff"/>'
)
"""The style of a chart in its own file; a page has its own style."""
POINTS = 400  # most points of a line; more are thinned evenly


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one layer of a stack."""

    name: str
    color: str  # a CSS variable, such as `--c1`
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    label: str = ""  # label beside the first point


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart; maps values to positions."""

    width: int
    height: int
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        span = (self.high_x - self.low_x) or 1.0
        return LEFT + (value - self.low_x) / span * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = (self.high_y - self.low_y) or 1.0
        return self.height - BOTTOM - (value - self.low_y) / span * (self.height - TOP - BOTTOM)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers from `low` to `high`, about `count` of them, steps of 1, 2 or 5."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float, unit: str = "") -> str:
    """Return a number in few characters, with its unit: 0.123, 12.3, 1,234, 75 %."""
    if unit == "%":
        return f"{100 * value:.3g} %"
    form = ".1e" if value and abs(value) < 0.01 else ",.0f" if abs(value) >= 1000 else ".3g"
    return f"{value:{form}} {unit}".rstrip()


def lines(
    series: Sequence[Series], size: tuple[int, int], x_name: str, unit: str = "", zero: bool = False, log: bool = False
) -> str:
    """Draw lines over a common x axis; at least one must have a point. The unit "%" is for shares.

    `size`: width and height. `zero`: the y axis begins at 0. `log`: the x axis is logarithmic, every x must be above 0,
    and there is no `data-chart`.
    """
    width, height = size
    series = [one for one in series if len(one.x)]
    for i, one in enumerate(series):
        picks = evenly(len(one.x), POINTS)
        series[i] = replace(one, x=[one.x[at] for at in picks], y=[one.y[at] for at in picks])
    series = [replace(one, x=[math.log10(x) for x in one.x]) for one in series] if log else series
    values = [value for one in series for value in one.y]
    low, high = (0.0 if zero else min(values)), max(values)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    xs = [x for one in series for x in one.x]
    low_y, high_y = 0.0 if zero else low - margin, high + margin
    if unit == "%":  # the axis of a share is within 0 to 1
        low_y, high_y = max(low_y, min(low, 0.0)), min(high_y, max(high, 1.0))
    beside = 0.05 * (max(xs) - min(xs)) + 0.1 if log else 0.0  # space for labels
    frame = Frame(width, height, min(xs) - beside, max(xs) + beside, low_y, high_y)
    parts = [*_grid(frame, unit), *_x_axis(frame, x_name, log)]
    for one in series:
        at = [(frame.x(x), frame.y(y)) for x, y in zip(one.x, one.y, strict=True)]
        points, (left, top) = " ".join(f"{x:.1f},{y:.1f}" for x, y in at), at[0]
        style = f'class="line{" dashed" if one.dashed else ""}" style="stroke:var({one.color})"'
        parts.append(f'<polyline {style} points="{points}"/>')
        if len(at) == 1 and not one.dashed:
            parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.5" style="fill:var({one.color})"/>')
        if one.label:
            parts.append(_text(left + 7, top - 5, one.label, "start"))
    return _svg(frame, parts, "" if log else _numbers(series, frame, unit, x_name))


def stack(series: Sequence[Series], width: int, height: int, x_name: str, unit: str) -> str:
    """Draw stacked bars, one per x; all series have the same x."""
    xs = series[0].x
    tops = [0.0] * len(xs)
    highest = max(map(sum, zip(*(one.y for one in series), strict=True)))
    frame = Frame(width, height, -0.5, len(xs) - 0.5, 0.0, 1.06 * highest)
    gap = min(4.0, 0.2 * (frame.x(1) - frame.x(0)))
    parts = _grid(frame, unit)
    for one in series:
        for i, value in enumerate(one.y):
            top, bottom = frame.y(tops[i] + value), frame.y(tops[i])
            if value > 0:
                left, right = frame.x(i - 0.5) + gap / 2, frame.x(i + 0.5) - gap / 2
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
                    f'style="fill:var({one.color})"/>'
                )
            tops[i] += value
    marks = range(0, len(xs), max(1, -(-len(xs) // 10)))
    parts += [_text(frame.x(i), height - BOTTOM + 16, f"{xs[i]:g}", "middle") for i in marks]
    parts.append(_text(width - RIGHT, height - 2, x_name, "end", "axis"))
    by_index = [Series(one.name, one.color, range(len(xs)), one.y) for one in series]
    return _svg(frame, parts, _numbers(by_index, frame, unit, x_name, [f"{x:g}" for x in xs]))


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str] | tuple[float, str, str]]]], unit: str) -> str:
    """Draw horizontal bars as HTML: rows of (name, [(value, colour), ...]), longest value to full width.

    An optional third entry after value and colour is a text shown instead of the value with its unit.
    """
    most = max((one[0] for _, values in rows for one in values), default=0.0) or 1.0
    rows_html = []
    for name, values in rows:
        content = "".join(
            f'<span class="bar"><i style="width:{100 * value / most:.1f}%;background:var({color})"></i>'
            f"<b>{esc(*text) if text else number(value, unit)}</b></span>"
            for value, color, *text in values
        )
        title = f'<span class="name" title="{esc(name)}">{esc(name)}</span>'
        rows_html.append(f'<div class="row">{title}<span>{content}</span></div>')
    noted = any(len(one) > 2 for _, values in rows for one in values)
    return f'<div class="bars{" noted" * noted}">{"".join(rows_html)}</div>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return a legend of names with their colours, each pair once."""
    pairs = dict.fromkeys(entries)
    items = "".join(f'<span><i style="background:var({color})"></i>{esc(name)}</span>' for name, color in pairs)
    return f'<div class="legend">{items}</div>'


def esc(text: object) -> str:
    """Escape text for HTML."""
    return html.escape(str(text), quote=True)


def evenly(count: int, most: int) -> Sequence[int]:
    """Return at most `most` of the first `count` numbers, evenly spaced, always including the last."""
    return range(count) if count <= most else [i * (count - 1) // (most - 1) for i in range(most)]


def _grid(frame: Frame, unit: str) -> list[str]:
    parts = []
    for value in ticks(frame.low_y, frame.high_y):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, number(value, unit if unit == "%" else ""), "end"))
    return parts


def _x_axis(frame: Frame, name: str, log: bool = False) -> list[str]:
    marks = [(value, number(value)) for value in ticks(frame.low_x, frame.high_x, 5)]
    if log:
        powers = range(math.floor(frame.low_x), math.ceil(frame.high_x))
        every = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        marks = [(math.log10(x), f"{x:g}") for x in every if frame.low_x <= math.log10(x) <= frame.high_x]
    parts = [_text(frame.x(at), frame.height - BOTTOM + 16, text, "middle") for at, text in marks]
    return [*parts, _text(frame.width - RIGHT, frame.height - 2, name, "end", "axis")]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{esc(text)}</text>'


def _numbers(
    series: Sequence[Series], frame: Frame, unit: str, x_name: str, labels: Sequence[str] | None = None
) -> str:
    content = {
        "plot": [LEFT, frame.width - RIGHT, TOP, frame.height - BOTTOM],
        "range": [frame.low_x, frame.high_x],
        "unit": unit,
        "x": x_name,
        "labels": labels,
        "series": [
            {"name": one.name, "color": one.color, "x": list(one.x), "y": [round(float(y), 6) for y in one.y]}
            for one in series
        ],
    }
    return json.dumps(content, separators=(",", ":"))


def _svg(frame: Frame, parts: Sequence[str], numbers: str) -> str:
    data = f' data-chart="{esc(numbers)}"' if numbers else ""
    box = f'viewBox="0 0 {frame.width} {frame.height}" style="max-width:{frame.width}px"'
    kind = "chart wide" if frame.width > WIDE else "chart"
    return f'<svg class="{kind}" role="img" {box}{data}>{"".join(parts)}</svg>'


def standalone(drawn: str, colors: Mapping[str, str], more: str = "") -> str:
    """Return a chart as an SVG file, with `more` drawn over it.

    CSS variables are replaced by colours and the background is white: image viewers would draw variables black.
    """
    drawn = re.sub(r' data-chart="[^"]*"', "", drawn).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    drawn = drawn.replace(">", f">{ALONE}", 1).replace("</svg>", f"{more}</svg>\n")
    return re.sub(r"var\((--[\w-]+)\)", lambda name: colors[name[1]], drawn)
