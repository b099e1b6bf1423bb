"""Write docs/results.md, a row per published claim, and beside the CSVs tables.md, a
table per file.

    python tools/results.py           # writes the pages
    python tools/results.py --print   # prints docs/results.md

A claim's number is computed from the rows of its file; conditions that the header has
are not repeated.

A CSV's header says what was measured (`what`), what to know about it (`note`), and
which columns its table has: `show: BY BY: VALUE +VALUE | COLUMN=VALUE` makes a row for
each combination of the columns before the colon. A value is listed for up to three raw
rows, else its median with the range; `+` sums it. Behind the bar, only such rows count.
"""

from __future__ import annotations

import csv
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"  # below which the CSVs lie
# of 0.3.0, which changed the training views; what is younger was measured since
RELEASE = "2026-11-25"
STUDENT_T = {
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
}  # two-sided 95 %, by the number of seeds
LISTED = 3  # raw values in a cell; for more, the median and the range
TITLE = """# Results

One row per published claim, written by `python tools/results.py` from the files in `benchmarks/`. `±` is a 95 %
interval over seeds (Student's t), paired where two ways of training are compared; brackets are the interval over test
images; `n` counts seeds or rounds. The file has machine, commit, all arguments, versions and every raw value;
`tables.md` beside it shows them.

`since`: measured after 0.3.0 changed the training views. Most machines had two shared cores: **compare ratios within
one file, not times of two.**
"""
TABLES = """# Tables

Written by `python tools/results.py` from the CSVs in this folder. Each has command, commit, machine, versions and date
in its header, and one raw measurement per row. A cell lists up to three raw values (as a rule the seeds); for more it
has the median and the range.

Machines: `amd-epyc-2cores` has two cores of an AMD EPYC, on 2026-11-21 with AVX2, later with AVX-512 and bfloat16
units; `intel-xeon-2cores` has AMX. Both were shared unless a note says otherwise.
"""
Rows = list[dict[str, str]]
Number = Callable[[Rows], tuple[str, str]]


class Claim(NamedTuple):
    """A published number, and how it follows from the rows of a file."""

    subject: str
    conditions: str
    file: str  # its name without machine and date
    number: Number


def chosen(rows: Rows, cells: dict[str, str]) -> Rows:
    """Return the rows with these cells; there must be one."""
    matches = [
        row for row in rows if all(row[key] == value for key, value in cells.items())
    ]
    if not matches:
        raise SystemExit(f"tools/results.py: no row has {cells}")
    return matches


def spread(values: list[float], unit: str, sign: str = "") -> str:
    """Return the mean with its interval over seeds, if there are three or more."""
    digits = 2 if unit == "times" else 1
    text = f"{statistics.mean(values):{sign}.{digits}f}"
    if len(values) in STUDENT_T:
        text += f" ± {STUDENT_T[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"
    return f"{text} {unit}"


def level(column: str, times: float = 1, unit: str = "%", **cells: str) -> Number:
    """Return the mean over seeds; empty cells do not count."""

    def number(rows: Rows) -> tuple[str, str]:
        values = [
            times * float(row[column]) for row in chosen(rows, cells) if row[column]
        ]
        return spread(values, unit), str(len(values))

    return number


def gain(
    arm: str,
    over: str,
    key: str = "arm",
    column: str = "accuracy",
    times: float = 1,
    **cells: str,
) -> Number:
    """Return the paired difference over the seeds that both ways have."""

    def number(rows: Rows) -> tuple[str, str]:
        mine, theirs = (
            {
                row["seed"]: times * float(row[column])
                for row in chosen(rows, {key: name, **cells})
            }
            for name in (arm, over)
        )
        pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        return spread(pairs, "points", "+"), str(len(pairs))

    return number


def gain_of(column: str, over: str) -> Number:
    """Return the paired difference of two columns, in points."""
    return lambda rows: (
        spread(
            [100 * (float(row[column]) - float(row[over])) for row in rows],
            "points",
            "+",
        ),
        str(len(rows)),
    )


def ratio(key: str, of: str, to: str, column: str, **cells: str) -> Number:
    """Return one way over another, of medians of rounds or means of up to three seeds."""

    def number(rows: Rows) -> tuple[str, str]:
        values = [
            [float(row[column]) for row in chosen(rows, {key: name, **cells})]
            for name in (of, to)
        ]
        above, below = map(
            statistics.mean if len(values[0]) <= LISTED else statistics.median, values
        )
        return f"{above / below:.2f} times", str(len(values[0]))

    return number


def cells_of(form: str, **cells: str) -> Number:
    """Return the columns of a single row, as `form` names them."""
    return lambda rows: (
        form.format(**{k: number(v) for k, v in chosen(rows, cells)[0].items()}),
        "1",
    )


def total(form: str, column: str, **cells: str) -> Number:
    """Return the sum of a column."""
    return lambda rows: (
        form.format(sum(float(row[column]) for row in chosen(rows, cells))),
        "1",
    )


def read(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return header and rows of a CSV."""
    lines = path.read_text().splitlines()
    header = dict(re.findall(r"^# (\w+): (.*)$", "\n".join(lines), re.MULTILINE))
    return header, list(
        csv.DictReader(line for line in lines if not line.startswith("#"))
    )


def number(text: str) -> float | None:
    """Return a cell as a number, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def short(value: float) -> str:
    """Return a number with four digits."""
    return (
        f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    )


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
    return (
        f"{short(statistics.median(values))} ({short(min(values))} to"
        f" {short(max(values))})"
    )


def table(header: dict[str, str], rows: list[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a measurement's table."""
    columns, _, only = header["show"].partition(" | ")
    by, names = (titles.split() for titles in columns.split(": "))
    if only:
        column, _, value = only.partition("=")
        rows = [row for row in rows if row[column] == value]
    by = [] if by == ["all"] else by
    titles = [*by, *(name.lstrip("+") for name in names)]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(by)}{'---:|' * len(names)}"
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    for key, group in groups.items():
        cells = [
            cell([row[name.lstrip("+")] for row in group], name.startswith("+"))
            for name in names
        ]
        yield f"| {' | '.join(text.replace('|', '/') for text in (*key, *cells))} |"


def wttm(rows: Rows) -> tuple[str, str]:
    """Return the paired difference of two losses."""
    kl = {
        row["seed"]: float(row["accuracy"])
        for row in chosen(rows, {"loss": "kl", "setting": "temperature 4"})
    }
    pairs = [
        float(row["accuracy"]) - kl[row["seed"]]
        for row in chosen(rows, {"loss": "wttm", "setting": "alone"})
    ]
    return spread(pairs, "points", "+"), str(len(pairs))


def nearest(rows: Rows) -> tuple[str, str]:
    """Return the mean gain of kd's choice of a checkpoint over the highest score's.

    They choose by 111 validation images.
    """
    chosen_by_kd, highest = (
        [
            float(row["accuracy"])
            for row in chosen(rows, {"images": "111", "rule": rule})
        ]
        for rule in ("newest within one standard error", "highest")
    )
    gains = [a - b for a, b in zip(chosen_by_kd, highest, strict=True)]
    return f"{statistics.mean(gains):+.1f} points", f"{len(gains)} runs"


HELP = "Does a teacher help?"
TRAIN = "Faster training"
SHIP = "Export, endpoint, alarms"
CHECK = "Checks and scale"
FEW = "proof_few_labels"
FEWER = "proof_few_pictures"
LONG = "sifting"
ALONE = "labels only, strong"
CLAIMS = (
    Claim(
        HELP,
        "`make run`: distilled over labels alone",
        "make-run",
        gain("distilled", "strong augmentation"),
    ),
    Claim(
        HELP,
        "the same, distilled student",
        "make-run",
        level("accuracy", arm="distilled"),
    ),
    Claim(
        HELP,
        "the same with all labels",
        "make-run",
        gain("distilled, all labels", "smoothing, all labels"),
    ),
    Claim(
        HELP,
        "CIFAR-10, 25 labels per class, 48,750 pictures without",
        FEW,
        gain("soft", ALONE, labels="25"),
    ),
    Claim(
        HELP,
        "100 labels per class, 48,000 without",
        FEW,
        gain("soft", ALONE, labels="100"),
    ),
    Claim(
        HELP,
        "400 labels per class, 45,000 without",
        FEW,
        gain("soft", ALONE, labels="400"),
    ),
    Claim(
        HELP,
        "100 labels: teacher's class over its probabilities",
        FEW,
        gain("hard", "soft", labels="100"),
    ),
    Claim(
        HELP,
        "50 classes of Tiny ImageNet, 50 pictures each, no labels: over the teacher's"
        " class",
        FEWER,
        gain("soft", "hard", labels="50"),
    ),
    Claim(
        HELP,
        "the same over the true labels",
        FEWER,
        gain("soft", "labels only", labels="50"),
    ),
    Claim(
        HELP,
        "10 pictures each: over the teacher's class",
        FEWER,
        gain("soft", "hard", labels="10"),
    ),
    Claim(
        HELP,
        "probabilities and labels over the true labels",
        FEWER,
        gain("soft and labels", "labels only", labels="50"),
    ),
    Claim(
        HELP,
        "CIFAR-10, all labels, 20 epochs, equal steps",
        "full_labels",
        gain("kl", "labels only"),
    ),
    Claim(
        HELP,
        "Tiny ImageNet, all labels, 10 passes",
        "proof_tiny_imagenet",
        gain("soft", "labels only"),
    ),
    Claim(
        HELP,
        "fruit photographs, pretrained student",
        "proof_grocery",
        gain("soft", "labels only"),
    ),
    Claim(
        HELP,
        "the same, ViT-S teacher",
        "proof_grocery_vit",
        gain("vit at 168 px, soft", "labels only"),
    ),
    Claim(
        HELP,
        "the same, all at 168 px",
        "proof_grocery_sharp",
        gain("168 px, soft, 30 views", "labels only, 168 px"),
    ),
    Claim(
        HELP,
        "ten labels per kind of fruit, 168 px",
        "proof_grocery_ten",
        gain("soft", "labels only"),
    ),
    Claim(
        HELP,
        "half of the labels: over the teacher's class",
        "proof_grocery_half",
        gain("soft", "hard"),
    ),
    Claim(
        HELP,
        "fruit, random student",
        "proof_grocery",
        gain("scratch, soft", "scratch, labels only"),
    ),
    Claim(
        HELP,
        "fruit, README's commands: student",
        "from_folder",
        cells_of("{student:.1f} % ({low:.1f} to {high:.1f})"),
    ),
    Claim(
        HELP,
        "the same: accepted int8 file",
        "from_folder",
        cells_of("{file_right:.1f} %, {mb:.1f} MB"),
    ),
    Claim(
        HELP,
        "fruit, random student of kd-init",
        "init_sweep",
        cells_of(
            "{test:.1f} % ({low:.1f} to {high:.1f})",
            folder="grocery-fruit",
            temperature="2.0",
            lr="0.003",
        ),
    ),
    Claim(HELP, "`wttm` over `kl` at temperature 4, 5 epochs", "losses", wttm),
    Claim(
        HELP,
        "label sets, rendered trays, mAP",
        "multi_label",
        gain_of("distilled_map", "labels_only_map"),
    ),
    Claim(
        HELP,
        "embeddings without labels, nearest neighbours",
        "embedding",
        level("student_knn", 100),
    ),
    Claim(
        HELP,
        "CIFAR-10, 100 labels per class, after the vectors of a frozen ViT-S: over"
        " labels alone, about equal CPU time",
        "without_labels",
        gain("recipe", "labels only, whole", labels="100"),
    ),
    Claim(
        HELP,
        "students of CIFAR-10: the best",
        "frontier_cifar10",
        cells_of("{test:.3f} at {ms:.2f} ms", student="residual_16"),
    ),
    Claim(
        TRAIN,
        "timm's train.py, ViT-B teacher, kd live",
        "timm_distillation",
        ratio("which", "kd live", "timm", "images_per_second", teacher="B"),
    ),
    Claim(
        TRAIN,
        "the same, warm cache",
        "timm_distillation",
        ratio("which", "kd cached", "timm", "images_per_second", teacher="B"),
    ),
    Claim(
        TRAIN,
        "CIFAR-10 at equal accuracy (36 %), live: timm's time",
        "compare_cifar10",
        ratio("arm", "kd, teacher each step", "timm", "training_seconds", epoch="20"),
    ),
    Claim(
        TRAIN,
        "the same, cache of 4 views",
        "compare_cifar10",
        ratio("arm", "kd, cache of 4 views", "timm", "training_seconds", epoch="20"),
    ),
    Claim(
        TRAIN,
        "cached teacher, same views",
        "cached_run",
        level("accuracy", 100, run="ahead"),
    ),
    Claim(
        TRAIN,
        "fresh views, live teacher",
        "cached_run",
        level("accuracy", 100, run="fresh"),
    ),
    Claim(
        TRAIN, "8 epochs, 2 views", "views", level("accuracy", arm="8 epochs, 2 views")
    ),
    Claim(
        TRAIN,
        "photograph at 224 px from memory",
        "loading",
        ratio("which", "ram", "none", "ms"),
    ),
    Claim(
        TRAIN,
        "one H200, ViT-B to ViT-Ti at 224 px, photographs of 280 px, live",
        "gpu",
        cells_of("{value:.0f} images/s", what="kd-train, live"),
    ),
    Claim(
        TRAIN,
        "the same, cached",
        "gpu",
        cells_of("{value:.0f} images/s", what="kd-train, cached"),
    ),
    Claim(
        TRAIN,
        "compiled step, ResNet-18",
        "compile",
        cells_of("{ratio_again:.2f} times", network="resnet18"),
    ),
    Claim(
        TRAIN,
        "channels last, ResNet-18",
        "layout",
        cells_of("{step_gain:.2f} times", network="resnet18"),
    ),
    Claim(
        TRAIN,
        "64 px, 1,600 steps: half the side for 60 %, over equal CPU time",
        "small_first",
        gain("1/2 until 0.6", "fewer for 1/2 until 0.6", data="tiny50"),
    ),
    Claim(
        TRAIN,
        "the same over full size",
        "small_first",
        gain("1/2 until 0.6", "full", data="tiny50"),
    ),
    Claim(
        TRAIN,
        "32 px, 2,340 steps: the same over equal CPU time",
        "small_first",
        gain("1/2 until 0.6", "fewer for 1/2 until 0.6", data="cifar10"),
    ),
    Claim(
        TRAIN,
        "50 pictures per class, 102 passes: the same over full size",
        FEWER,
        gain("small first", "soft", labels="50"),
    ),
    Claim(
        TRAIN,
        "the same over equal CPU time",
        FEWER,
        gain("small first", "two thirds", labels="50"),
    ),
    Claim(
        TRAIN,
        "48 px first, equal CPU time, AMX",
        "tokens_cifar10_amx",
        gain("48 px first", "all patches"),
    ),
    Claim(
        TRAIN,
        "half of the patches",
        "tokens_cifar10_amx",
        gain("50 % left out", "all patches"),
    ),
    Claim(
        TRAIN,
        "`history` over fewer epochs, 100 epochs, CIFAR-10",
        LONG,
        gain("history", "fewer", data="cifar10", schedule="long"),
    ),
    Claim(
        TRAIN,
        "`relative`, beta 1: accuracy",
        "sweep_beta",
        cells_of("{accuracy:.1f} %", beta="1"),
    ),
    Claim(
        TRAIN,
        "`random` over fewer epochs",
        LONG,
        gain("random", "fewer", data="cifar10", schedule="long"),
    ),
    Claim(
        TRAIN,
        "a script with the usual mistakes, after six changes",
        "story",
        lambda rows: (
            (
                f"{float(rows[-1]['steady_images_per_second']) / float(rows[0]['steady_images_per_second']):.1f}"
                " times"
            ),
            "1",
        ),
    ),
    Claim(
        TRAIN,
        "sweep of nine runs, CPU time",
        "sweep",
        total("{:.0f} s", "cpu_s", way="kd-sweep"),
    ),
    Claim(
        SHIP,
        "student of 32 px pictures, one core",
        "endpoint_few_labels",
        cells_of("{images_per_second:.0f} images/s, p99 {p99_ms:.1f} ms"),
    ),
    Claim(
        SHIP,
        "8 clients, ViT-Ti's fastest file, over LitServe",
        "serve_litserve_pick",
        ratio("which", "kd-serve", "litserve 1 worker", "rps", clients="8"),
    ),
    Claim(
        SHIP,
        "request with 12 million pixels, reduced decoding",
        "photographs_endpoint",
        ratio("margin", "1.5", "0.0", "cpu_ms", photograph="12 MP", clients="1"),
    ),
    Claim(
        SHIP,
        "ViT-Ti's shape, OpenVINO int8",
        "variants_table",
        level(
            "times_float32",
            unit="times",
            student="vit_ti",
            file="openvino.int8.xml",
            threads="1",
        ),
    ),
    Claim(
        SHIP,
        "fruit, int8 student: its endpoint's CPU time over that of the ViT-S",
        "what_you_save",
        level("cpu_share", unit="times", system="30_views_int8"),
    ),
    Claim(
        SHIP,
        "the same, 37 % passed on to the int8 teacher",
        "what_you_save",
        level("cpu_share", unit="times", system="30_views_int8_pair_50_%"),
    ),
    Claim(
        SHIP,
        "points behind the ViT-S",
        "what_you_save",
        level("behind", unit="points", system="30_views_int8_pair_50_%"),
    ),
    Claim(
        SHIP,
        "24 % passed on",
        "what_you_save",
        level("behind", unit="points", system="30_views_int8_pair_30_%"),
    ),
    Claim(
        SHIP,
        "alarms, share of a request's CPU time",
        "shift_cost",
        cells_of("{share:.4f}"),
    ),
    Claim(
        SHIP,
        "CIFAR-10, 15 % passed on: CPU time, points behind the teacher",
        "defer_cifar10",
        lambda rows: (
            "{:.2f} to {:.2f}; {:.1f} to {:.1f}".format(
                *(
                    side(float(row["cpu"]) for row in chosen(rows, {"asked": "most"}))
                    for side in (min, max)
                ),
                *(
                    side(
                        -100 * float(row["value"])
                        for row in chosen(rows, {"asked": "most"})
                    )
                    for side in (min, max)
                ),
            ),
            "3",
        ),
    ),
    Claim(
        CHECK,
        "checkpoint by 111 images: newest near the best over the best",
        "choice_of_checkpoint",
        nearest,
    ),
    Claim(
        CHECK,
        "random wrong labels among the first listed",
        "audit_labels_peers",
        level(
            "precision_at_k",
            100,
            method="kd",
            mistakes="random",
            share="0.05",
            probabilities="in sample",
        ),
    ),
    Claim(
        CHECK,
        "accuracy's intervals from 200 images that hold",
        "intervals",
        cells_of("{held_of_100:.1f} of 100", score="accuracy (Wilson)"),
    ),
    Claim(
        CHECK,
        "estimated peak memory over the measured one, 64 images",
        "memory",
        lambda rows: (
            (
                f"{float(chosen(rows, {'batch': '64', 'attention': 'fused'})[0]['counted / taken']):.2f}"
                " times"
            ),
            "1",
        ),
    ),
    Claim(
        CHECK,
        "listing, bytes per image",
        "scale",
        cells_of("{held_bytes:.0f}", part="listing", images="1000000"),
    ),
)


def file_of(name: str) -> Path:
    """Return the CSV of a measurement, the newest of several machines' files."""
    files = [
        path
        for path in FOLDER.rglob(f"{name}_*.csv")
        if re.fullmatch(rf"{name}_[a-z0-9]+-[\w-]+\.csv", path.name)
    ]
    if not files:
        raise SystemExit(f"tools/results.py: no file {name}_*.csv")
    return max(files, key=lambda path: path.stem[-10:])


def command(header: dict[str, str]) -> str:
    """Return the command without arguments of this machine's folders."""
    words = header["command"].removeprefix("PYTHONPATH=. ").split()
    if words[0] == "make":
        return " ".join(words[:2])
    return next((word for word in words if word.endswith(".py")), words[0])


def page() -> str:
    """Return docs/results.md."""
    sections = [TITLE]
    subject = ""
    for claim in CLAIMS:
        if claim.subject != subject:
            subject = claim.subject
            sections.append(
                f"\n## {subject}\n\n|claim|number|n|command,"
                " file|since|\n|---|---:|---:|---|---|\n"
            )
        path = file_of(claim.file)
        header, rows = read(path)
        value, seeds = claim.number(rows)
        link = f"[{claim.file}]({os.path.relpath(path, ROOT / 'docs')})"
        since = "yes" if header["date"] > RELEASE else "no"
        sections.append(
            f"|{claim.conditions}|{value}|{seeds}|`{command(header)}`, {link}|{since}|\n"
        )
    return "".join(sections)


def tables() -> dict[Path, str]:
    """Return the text of tables.md in each folder that has CSVs."""
    sections: dict[Path, list[str]] = {}
    for path in sorted(FOLDER.rglob("*.csv")):
        header, rows = read(path)
        if "show" not in header:
            continue
        name = path.name.removesuffix(f"_{header['hardware']}_{header['date']}.csv")
        facts = (
            f"`{header['command']}`, commit {header['commit']}, {header['hardware']},"
            f" {header['date']}."
        )
        note = [f"*{header['note']}*", ""] if "note" in header else []
        lines = [
            f"## {name}",
            "",
            f"{header['what']}.",
            "",
            facts,
            "",
            *note,
            *table(header, rows),
            "",
        ]
        sections.setdefault(path.parent, [TABLES]).append("\n".join(lines))
    return {
        folder / "tables.md": "\n".join(texts) for folder, texts in sections.items()
    }


def main() -> None:
    """Write or print the pages."""
    if "--print" in sys.argv[1:]:
        print(page(), end="")
    else:
        (ROOT / "docs" / "results.md").write_text(page())
        for path, text in tables().items():
            path.write_text(text)


if __name__ == "__main__":
    main()
