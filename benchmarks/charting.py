"""Which library draws the report's charts: the same six charts on one page, by each
candidate, in turns.

Run: python benchmarks/charting.py [--plotly FILE] [--rounds 5] [--only NAME ...] [--pages FOLDER]

Needs matplotlib, vl-convert-python and Chromium; a candidate that is not installed is
left out. `--plotly` is `package/plotly-basic.min.js` of `npm pack
plotly.js-basic-dist-min`: the Python package has only the whole library, 4.8 MB. `own
SVG` is kd's own code until commit bfb9dacb, read from the history. Each round draws a
candidate's page in a process of its own, so that import and first drawing count as in a
command. `install_mb` is what a candidate adds to the packages that kd needs anyway.
Whether it works under the page's policy is tried in Chromium, with no network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from _record import HERE, write

sys.path.append(str(HERE.parent / "tests" / "e2e"))
BEFORE = "bfb9dacb"  # the last commit with kd's own SVG
COLORS = ("#2f6fde", "#d9822b", "#2c8a5b", "#8e5bd0", "#c4453c", "#1f8f9e")
STYLES = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SCRIPTS = f"{STYLES}; script-src 'unsafe-inline'"
Lines = dict[str, tuple[list[float], list[float]]]


class Plot(NamedTuple):
    """A chart of the page; `kind`: lines, stack or scatter (x logarithmic)."""

    kind: str
    width: int
    height: int
    lines: Lines


def plots() -> list[Plot]:
    """Return six charts as a report of one run has them: loss, score, rate, windows,
    load, a sweep's points.
    """
    steps = [float(step) for step in range(10, 4010, 10)]
    few = steps[39::40]
    windows = steps[4::5]
    seconds = [float(second) for second in range(240)]
    milliseconds = [0.4 * 1.6**i for i in range(8)]
    sections = ("data", "teacher", "forward", "backward", "optimizer", "other")
    return [
        Plot("lines", 350, 220, {"run": (steps, [2 / (1 + x / 300) + 0.1 * math.sin(x) for x in steps])}),
        Plot("lines", 350, 220, {"run": (few, [0.9 - 0.5 / (1 + x / 500) for x in few])}),
        Plot("lines", 350, 220, {"run": (steps, [1e-3 * (1 + math.cos(x / 1280)) for x in steps])}),
        Plot("stack", 1060, 240, {section: (windows, [10 + 9 * math.sin(x + i) for x in windows])
                                  for i, section in enumerate(sections)}),
        Plot("lines", 515, 200, {worker: (seconds, [0.5 + 0.1 * i + 0.1 * math.sin(x) for x in seconds])
                                 for i, worker in enumerate(("idlest", "mean", "busiest"))}),
        Plot("scatter", 720, 360, {"frontier": (milliseconds, [0.9 - 0.4 / (1 + x) for x in milliseconds])}),
    ]  # fmt: skip


def by_matplotlib() -> str:
    """Draw with matplotlib: SVG with text as text."""
    matplotlib = importlib.import_module("matplotlib")  # kd does not need it
    figure_of = importlib.import_module("matplotlib.figure").Figure
    matplotlib.rcParams["svg.fonttype"] = "none"
    drawn = []
    for plot in plots():
        figure = figure_of(
            figsize=(plot.width / 100, plot.height / 100), layout="constrained"
        )
        axes = figure.subplots()
        bottom: list[float] = [0.0] * len(next(iter(plot.lines.values()))[0])
        for (name, (x, y)), color in zip(plot.lines.items(), COLORS, strict=False):
            if plot.kind == "stack":
                axes.bar(x, y, 40, bottom, color=color, label=name)
                bottom = [low + value for low, value in zip(bottom, y, strict=True)]
            else:
                axes.plot(
                    x,
                    y,
                    "o" if plot.kind == "scatter" else "-",
                    color=color,
                    label=name,
                )
        axes.set_xscale("log" if plot.kind == "scatter" else "linear")
        if len(plot.lines) > 1:
            axes.legend()
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        drawn.append(file.getvalue().partition("<svg")[2])
    return "".join(f"<svg{text}" for text in drawn)


def by_plotly(library: Path) -> str:
    """Draw with plotly.js, inlined; the page draws itself."""
    calls = []
    for number, plot in enumerate(plots()):
        kind = {"lines": "lines", "scatter": "markers"}.get(plot.kind, "")
        traces = [
            {
                "x": x,
                "y": y,
                "name": name,
                "type": "bar" if plot.kind == "stack" else "scatter",
                "mode": kind,
            }
            for name, (x, y) in plot.lines.items()
        ]
        scale = {"type": "log" if plot.kind == "scatter" else "linear"}
        layout = {
            "width": plot.width,
            "height": plot.height,
            "barmode": "stack",
            "xaxis": scale,
        }
        calls.append(
            f"Plotly.newPlot('chart{number}', {json.dumps(traces)},"
            f" {json.dumps(layout)});"
        )
    places = "".join(f'<div id="chart{number}"></div>' for number in range(len(calls)))
    return f"{places}<script>{library.read_text()}</script><script>{''.join(calls)}</script>"


def charts() -> list[Any]:
    """Return the charts as those of the report."""
    from kd.study.report.charts import Axis, Series, lines, stack

    drawn = []
    for plot in plots():
        series = [
            Series(name, color, x, y)
            for (name, (x, y)), color in zip(plot.lines.items(), COLORS, strict=False)
        ]
        draw = stack if plot.kind == "stack" else lines
        x_axis = Axis("x", log=plot.kind == "scatter")
        drawn.append(draw(series, (plot.width, plot.height), x_axis, Axis()))
    return drawn


def by_vega_svg() -> str:
    """Draw with Vega-Lite, ahead: static SVG."""
    return "".join(chart.svg() for chart in charts())


def by_vega_script() -> str:
    """Draw with Vega-Lite's JavaScript, inlined; the page draws itself, by the
    interpreter that needs no `eval`.
    """
    import vl_convert

    calls = []
    for number, chart in enumerate(charts()):
        calls.append(
            f"vegaEmbed('#chart{number}', {json.dumps(chart.spec)}, {{ast: true,"
            " renderer: 'svg'});"
        )
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    places = "".join(f'<div id="chart{number}"></div>' for number in range(len(calls)))
    script = f"{library}\n{''.join(calls)}".replace("</script", "<\\/script")
    return f'{places}<script type="module">{script}</script>'


def old_module() -> ModuleType:
    """Return kd's own SVG of commit `BEFORE`."""
    process = subprocess.run(
        ["git", "show", f"{BEFORE}:kd/study/report/svg.py"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    module = ModuleType("own_svg")
    sys.modules["own_svg"] = module
    exec(compile(process.stdout, "svg.py", "exec"), module.__dict__)
    return module


def by_own_svg() -> str:
    """Draw with kd's own code, and the script that shows its numbers at the pointer."""
    svg = old_module()
    drawn = []
    for plot in plots():
        series = [
            svg.Series(name, f"--c{number}", x, y)
            for number, (name, (x, y)) in enumerate(plot.lines.items(), 1)
        ]
        size = plot.width, plot.height
        if plot.kind == "stack":
            drawn.append(svg.stack(series, *size, "x", ""))
        else:
            drawn.append(svg.lines(series, size, "x", log=plot.kind == "scatter"))
    script = subprocess.run(
        ["git", "show", f"{BEFORE}:kd/study/report/page.js"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    return f"{''.join(drawn)}<script>{script.stdout}</script>"


class Candidate(NamedTuple):
    """A way to draw, what it adds to kd's packages, and what was judged by eye."""

    draw: Callable[..., str]
    modules: tuple[str, ...]
    packages: tuple[str, ...]
    licence: str
    pointer: str
    dark: str
    table: str
    file: str  # whether it writes an SVG file, as a sweep's picture is


MATPLOTLIB = (
    "matplotlib",
    "contourpy",
    "cycler",
    "fonttools",
    "kiwisolver",
    "pyparsing",
    "python-dateutil",
)
CANDIDATES = {
    "matplotlib": Candidate(
        by_matplotlib, ("matplotlib.figure", "matplotlib.backends.backend_svg"), MATPLOTLIB, "PSF-based",
        "no", "by colours replaced in its output", "ours", "yes",
    ),
    "plotly, inlined": Candidate(
        by_plotly, (), (), "MIT", "yes", "by a script of ours", "ours", "only with a browser",
    ),
    "Vega-Lite, SVG": Candidate(
        by_vega_svg, ("vl_convert",), ("vl-convert-python",), "BSD-3-Clause", "no", "by CSS variables", "ours", "yes",
    ),
    "Vega-Lite, inlined": Candidate(
        by_vega_script, ("vl_convert",), ("vl-convert-python",), "BSD-3-Clause", "yes", "by CSS variables", "ours",
        "yes",
    ),
    "own SVG": Candidate(by_own_svg, (), (), "kd's", "yes, by a script of ours", "by CSS variables", "no", "yes"),
}  # fmt: skip


def page_of(name: str, plotly: Path | None) -> str:
    """Return the page of a candidate."""
    body = (
        CANDIDATES[name].draw(plotly)
        if name == "plotly, inlined"
        else CANDIDATES[name].draw()
    )
    policy = SCRIPTS if "<script" in body else STYLES
    style = (HERE.parent / "kd" / "study" / "report" / "page.css").read_text()
    head = (
        '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
        f' content="{policy}">'
    )
    return f"<!doctype html>{head}<style>{style}</style><main>{body}</main>\n"


def seconds_of(name: str, plotly: Path | None, target: Path) -> dict[str, float]:
    """Draw a candidate's page in a process of its own; return the seconds of import and
    of drawing.
    """
    command = [sys.executable, __file__, "--draw", name, "--target", str(target)]
    command += ["--plotly", str(plotly)] if plotly else []
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def draw(name: str, plotly: Path | None, target: Path) -> None:
    """Draw a candidate's page and print the seconds."""
    start = time.perf_counter()
    for module in CANDIDATES[name].modules:
        importlib.import_module(module)
    imported = time.perf_counter()
    target.write_text(page_of(name, plotly))
    print(
        json.dumps(
            {
                "import_seconds": imported - start,
                "render_seconds": time.perf_counter() - imported,
            }
        )
    )


def megabytes(packages: Sequence[str]) -> float:
    """Return the size of installed packages, 10^6 bytes."""
    files = [
        Path(str(file.locate()))
        for name in packages
        for file in importlib.metadata.files(name) or ()
    ]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def works(page: Path) -> str:
    """Return whether Chromium draws all charts of a page without a complaint or a
    request, or "" without Chromium.
    """
    import chromium

    if chromium.path() is None:
        return ""
    with (
        tempfile.TemporaryDirectory() as profile,
        chromium.Page(Path(profile)) as opened,
    ):
        opened.open(f"file://{page}")
        time.sleep(2)  # a page that draws itself needs a second
        count = opened.run("document.querySelectorAll('main svg:not(svg svg)').length")
        outside = [
            url
            for url in opened.requests
            if not url.startswith(("file:", "data:", "blob:"))
        ]
        return (
            "yes"
            if count >= len(plots()) and not outside and not opened.problems
            else "no"
        )


def page_file(folder: Path, name: str) -> Path:
    """Return the file of a candidate's page."""
    return folder / f"{name.replace(', ', '-').replace(' ', '-').lower()}.html"


def installed(name: str, plotly: Path | None) -> bool:
    """Return whether a candidate can draw here."""
    if name == "plotly, inlined":
        return plotly is not None
    return all(
        importlib.util.find_spec(module.partition(".")[0])
        for module in CANDIDATES[name].modules
    )


def measured(
    names: Sequence[str], options: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Draw the pages of the candidates in turns and return a row for each."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            seconds[name].append(
                seconds_of(name, options.plotly, page_file(folder, name))
            )
    rows = []
    for name in names:
        candidate = CANDIDATES[name]
        page = page_file(folder, name)
        megabytes_installed = (
            1.2 if name == "plotly, inlined" else megabytes(candidate.packages)
        )
        rows.append(
            {
                "candidate": name,
                "page_kb": round(page.stat().st_size / 1000, 1),
                "install_mb": round(megabytes_installed, 1),
                **{
                    key: round(statistics.median(row[key] for row in seconds[name]), 3)
                    for key in seconds[name][0]
                },
                "under_policy": works(page),
                "scripts": "yes" if "<script" in page.read_text() else "no",
                "at_the_pointer": candidate.pointer,
                "dark": candidate.dark,
                "table": candidate.table,
                "svg_file": candidate.file,
                "licence": candidate.licence,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Draw, measure, write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plotly", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES)
    )
    parser.add_argument("--pages", type=Path, help="keep the pages here")
    parser.add_argument("--draw", choices=CANDIDATES, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.draw:
        draw(options.draw, options.plotly, options.target)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.pages or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name in options.only if installed(name, options.plotly)]
        rows = measured(names, options, folder)
    print(json.dumps(rows, indent=1))
    words = [
        f"--rounds {options.rounds}",
        *(["--plotly plotly-basic.min.js"] if options.plotly else []),
    ]
    write("charting", " ".join(["python benchmarks/charting.py", *words]), rows)


if __name__ == "__main__":
    main()
