"""Draw docs/how.svg (guide: from photographs to an endpoint), docs/rooms.svg (design:
who may import whom) and docs/try-first.svg (faster runs: where is the time, which key).

    python tools/drawings.py

Both have colours for light and dark screens. The rooms and their order come from
tests/test_imports.py; what a key gave comes from the newest story_*.csv.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
STYLE = """<style>
.ground{fill:#ffffff}.box{fill:#f2f4f7;stroke:#98a2b3}.ours{fill:#e8f0fe;stroke:#2f6fde}.arrow{stroke:#475467;fill:none}
.head{fill:#475467}text{fill:#1d2939;font:14px sans-serif;text-anchor:middle}.small{fill:#475467;font-size:11.5px}
.left{text-anchor:start}
@media (prefers-color-scheme: dark){.ground{fill:#0d1117}.box{fill:#21262d;stroke:#6e7681}
.ours{fill:#14284b;stroke:#6ea8fe}.arrow{stroke:#b1bac4}.head{fill:#b1bac4}text{fill:#f0f6fc}.small{fill:#b1bac4}}
</style>"""
MEANINGS = {
    "core": "errors, types, protocols, scores",
    "files": "atomic files, run folder, checkpoints",
    "models": "networks, the frozen teacher, its cache",
    "parts": "what a kind: may name",
    "config": "YAML to one typed Config",
    "data": "views, loader, store",
    "engine": "the training loop",
    "cluster": "hosts that decode, SageMaker requests",
    "setup": "a Config becomes a Run",
    "study": "report, sweeps, audit",
    "deploy": "export, verify, serve, predict, drift",
    "jobs": "init, train, cache, check; the Python API",
    "cli": "the commands",
}

# question and its evidence, title of the answer, keys, row of the story that tried it
QUESTIONS = (
    (
        ("Do steps wait for data?", "data: at least a tenth of a step"),
        ("Decode once, or elsewhere", "data.store=ram, data.workers", "more cores: kd-launch --view-ms"),
        "fewer workers, a store",
        "loading took 1 % there",
    ),
    (
        ("Does it compute in float32?", "Precision: bfloat16 has units here"),
        ("bfloat16", "backend.precision=bf16", "teacher.precision=bf16"),
        "bfloat16",
        "",
    ),
    (
        ("Does the teacher run each epoch?", "Teacher: at least a quarter of a step"),
        ("Run it once", "teacher.cache.views=auto", "before training: kd-cache"),
        "teacher cached",
        "more once it is filled",
    ),
    (
        ("Is memory left?", "the line memory of --check"),
        ("A larger batch, several ranks", "data.batch_size=64", "optimizer.zero=true"),
        "batch by memory",
        "on two cores that were full",
    ),
    (
        ("May accuracy pay for speed?", "student: most of a step"),
        ("Fewer pixels, fewer images", "data.progressive={size: 112, until: 0.6}", "sifter.kind=history"),
        "small pictures first",
        "fewer steps gave as much",
    ),
)  # fmt: skip


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    title: str,
    *lines: str,
    kind: str = "box",
) -> str:
    """Return a box with a title and smaller lines below it."""
    first = y + height / 2 + 5 - 8 * len(lines)
    elements = [
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}"'
        f' height="{height:g}" rx="7"/>'
    ]
    elements.append(f'<text x="{x + width / 2:g}" y="{first:g}">{escape(title)}</text>')
    for number, line in enumerate(lines, 1):
        elements.append(
            f'<text class="small" x="{x + width / 2:g}"'
            f' y="{first + 16 * number:g}">{escape(line)}</text>'
        )
    return "".join(elements)


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through points, with a head that points right, up or down."""
    (x0, y0), (x, y) = points[-2:]
    dx = (x > x0) - (x < x0)
    dy = (y > y0) - (y < y0)
    head = (
        f"{x:g},{y:g} {x - 8 * dx - 4 * dy:g},{y - 8 * dy - 4 * dx:g}"
        f" {x - 8 * dx + 4 * dy:g},{y - 8 * dy + 4 * dx:g}"
    )
    line = " ".join(f"{px:g},{py:g}" for px, py in points)
    return (
        f'<polyline class="arrow" points="{line}"/><polygon class="head"'
        f' points="{head}"/>'
    )


def drawing(width: float, height: float, label: str, *elements: str) -> str:
    """Return an SVG file."""
    ground = f'<rect class="ground" width="{width:g}" height="{height:g}"/>'
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:g}'
        f' {height:g}" aria-label="{label}">'
    )
    return "\n".join([start, STYLE, ground, *elements, "</svg>", ""])


def how() -> str:
    """Draw the way from photographs and a teacher to an endpoint."""
    return drawing(
        900,
        206,
        "photographs and a teacher, stored outputs, student, checked export, endpoint",
        box(14, 16, 136, 74, "photographs", "labelled or not"),
        box(14, 116, 136, 74, "teacher", "large, frozen"),
        arrow((150, 153), (198, 153)),
        arrow((82, 90), (82, 116)),
        box(
            198,
            116,
            148,
            74,
            "stored outputs",
            "the teacher runs once",
            "per view of an image",
            kind="ours",
        ),
        arrow((150, 53), (394, 53)),
        arrow((346, 153), (460, 153), (460, 90)),
        box(394, 16, 132, 74, "student", "small", "one YAML file: a run", kind="ours"),
        arrow((526, 53), (574, 53)),
        box(
            574,
            16,
            138,
            74,
            "export",
            "ONNX or int8,",
            "compared with PyTorch",
            kind="ours",
        ),
        arrow((712, 53), (760, 53)),
        box(
            760,
            16,
            126,
            74,
            "endpoint",
            "on a CPU, without",
            "torch; drift alarms",
            kind="ours",
        ),
        arrow((643, 90), (643, 130)),
        box(574, 130, 138, 60, "model card", "kd-verify recomputes it", kind="ours"),
        '<text class="small" x="462" y="176">the student learns the outputs</text>',
    )


def rooms() -> str:
    """Draw the rooms in the order in which they may import each other."""
    text = (ROOT / "tests" / "test_imports.py").read_text()
    order = re.findall(
        r'^    "(\w+)": ',
        text.split("MAY_IMPORT = {", 1)[1].split("}\n", 1)[0],
        re.MULTILINE,
    )
    names = [name for name in order if name in MEANINGS]
    if {*names} != {*MEANINGS}:
        raise SystemExit(
            "tools/drawings.py: rooms without a meaning:"
            f" {sorted({*names} ^ {*MEANINGS})}"
        )
    elements = []
    for number, name in enumerate(names):
        column, row = divmod(number, 5)
        x = 40 + 290 * column
        y = 14 + 66 * row
        elements.append(
            box(
                x,
                y,
                250,
                50,
                f"{number + 1}  {name}/",
                MEANINGS[name],
                kind="ours" if name == "engine" else "box",
            )
        )
        if row < 4 and number + 1 < len(names):
            elements.append(arrow((x + 125, y + 50), (x + 125, y + 66)))
        elif number + 1 < len(names):
            elements.append(
                arrow(
                    (x + 250, y + 25), (x + 270, y + 25), (x + 270, 39), (x + 290, 39)
                )
            )
    note = (
        '<text class="small left" x="600" y="240">A room may import rooms with smaller'
        " numbers.</text>"
    )
    sifting_note = (
        '<text class="small left" x="600" y="258">sifting/ stands alone.</text>'
    )
    return drawing(
        900,
        350,
        "the rooms of kd/ in their import order",
        *elements,
        note,
        sifting_note,
    )


def story_gains() -> dict[str, float]:
    """Return how many times as fast each row of the newest story is as the one before."""
    newest = sorted(ROOT.glob("benchmarks/results/speed/story_*.csv"))[-1]
    rows = list(csv.DictReader(_without_comments(newest.read_text().splitlines())))
    speeds = [float(row["steady_images_per_second"]) for row in rows]
    names = [row["name"] for row in rows[1:]]
    return {
        name: after / before
        for name, before, after in zip(names, speeds, speeds[1:], strict=False)
    }


def _without_comments(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not line.startswith("#")]


def try_first() -> str:
    """Draw which key to try, by where the time of a step goes."""
    gains = story_gains()
    head = "every run prints where its time went"
    elements = [box(14, 14, 330, 50, "Measure", head, kind="ours")]
    for number, (question, answer, row, remark) in enumerate(QUESTIONS):
        y = 92 + 94 * number
        label = "" if number == 0 else "no, or done"
        elements += [
            arrow((179, y - (28 if number == 0 else 24)), (179, y)),
            f'<text class="small left" x="187" y="{y - 9}">{label}</text>',
            box(14, y, 330, 70, *question),
            arrow((344, y + 35), (414, y + 35)),
            f'<text class="small" x="376" y="{y + 28}">yes</text>',
            box(414, y, 268, 70, *answer, kind="ours"),
            f'<text x="791" y="{y + 32}">{gains[row]:.2f} times as fast</text>',
            f'<text class="small" x="791" y="{y + 50}">{remark}</text>',
        ]
    elements += [
        '<text class="small" x="548" y="72">which keys</text>',
        '<text class="small" x="791" y="56">in the example, each</text>',
        '<text class="small" x="791" y="72">on top of the last</text>',
    ]
    label = "where the time of a step goes, which key to try, and what it gave"
    return drawing(900, 92 + 94 * len(QUESTIONS), label, *elements)


DRAWINGS = {"how": how, "rooms": rooms, "try-first": try_first}


def main() -> None:
    """Write all files."""
    for name, draw in DRAWINGS.items():
        (ROOT / "docs" / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
