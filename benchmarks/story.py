"""From 300 days to one: a script with the usual mistakes, and six changes that its
findings name, each of them run.

Run: python benchmarks/story.py [--work FOLDER] [--images 640] [key=value ...]

Row 0 is `configs/story.yaml`: 16 workers on the cores of this machine, student and
teacher in float32, a live teacher. Each later row keeps the changes before it. `images`
are trained in each row, so that a larger batch makes fewer steps. The teacher is fitted
once, in bfloat16, before row 0. A row is one run in processes of its own; `finding` is
what its findings.json says and `check`, of rows 0 and 4, what `kd-train --check` says
about time, memory and keys. Times are of steady steps, in milliseconds per image, from
the timeline; operators are those of `profile/operators.json`. Accuracy has its 95 %
interval on validation images. `optimizer_mib` is of one rank.

Rows are kept in WORK/rows.jsonl, and a row that is there is not made again. `--page`
writes table and picture into docs/faster.md. Not here: several GPUs, and a network
between them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from _record import HERE, write
from kd import config
from kd.core.text import markdown_table
from kd.engine.monitor.evidence import Evidence
from kd.files.json_file import read_json
from kd.files.run_dir import RunDir
from kd.files.storage import append_rows, read_rows
from kd.study.report.charts import FILE, Axis, Series, stack

CONFIG = HERE.parent / "configs" / "story.yaml"
PAGE = HERE.parent / "docs" / "faster.md"
PICTURE = "story.svg"
BEGIN = "<!-- written by benchmarks/story.py -->\n"
END = "<!-- end -->"
COLORS = ("#d9822b", "#8e5bd0", "#2f6fde", "#1f8f9e", "#cfd5de")  # of `PARTS`
PARTS = {
    "data": ("data",),
    "teacher": ("teacher",),
    "student": ("forward", "backward"),
    "update": ("optimizer", "communication"),
    "other": ("sifting", "wait", "other"),
}
TOP = 5


class Step(NamedTuple):
    """A row: its name, the keys that it changes, and how many ranks it has."""

    name: str
    change: tuple[str, ...] = ()
    ranks: int = 1
    check: bool = False


STEPS = (
    Step("as it was", check=True),
    Step("fewer workers, a store", ("data.workers=1", "data.store=ram")),
    Step("bfloat16", ("backend.precision=bf16", "teacher.precision=bf16")),
    Step("teacher cached", ("teacher.cache.views=2",)),
    Step(
        "ZeRO on two ranks",
        ("optimizer.zero=true", "data.store=disk"),
        ranks=2,
        check=True,
    ),
    Step("batch by memory", ("data.batch_size=32", "data.micro_batch=16"), ranks=2),
    Step(
        "small pictures first",
        ("data.progressive.size=112", "data.progressive.until=0.6"),
        ranks=2,
    ),
)


def kd(arguments: list[str], ranks: int = 1) -> str:
    """Run a command of kd in processes of its own and return what it prints."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launch, "-m", "kd.cli", *arguments]
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True
    )
    if process.returncode:
        raise SystemExit(
            f"{' '.join(command)}: exit code {process.returncode}\n{process.stdout}"
        )
    return process.stdout


def keys_of(number: int, options: argparse.Namespace, teacher: Path) -> list[str]:
    """Return the overrides of a row: those of the rows before it too."""
    keys = [key for step in STEPS[: number + 1] for key in step.change]
    keys_of_step = [
        f"run.folder={options.work}",
        f"run.name=story_{number}",
        "teacher.fit.steps=0",
        f"teacher.model={teacher}",
    ]
    keys_of_step += [
        "teacher.checkpoint=",
        "teacher.pretrained=false",
        "teacher.args={}",
    ]
    keys = [*options.overrides, *keys_of_step, *keys]
    steps = max(4, options.images // config.load(str(CONFIG), keys).data.batch_size)
    log = max(1, min(4, steps // 8))
    return [
        *keys,
        f"run.steps={steps}",
        f"run.every.log={log}",
        f"profile.steps=[{max(1, steps - 3)}, {steps - 1}]",
    ]


def measured(folder: RunDir, batch: int) -> dict[str, Any]:
    """Return what the files of a run say."""
    rows = folder.metrics("train")
    scored = folder.scored()
    assert scored is not None
    step = Evidence({0: read_rows(folder.path / "timeline_0.jsonl")}, ()).step()
    shares = {
        section: sum(step.get(name, 0.0) for name in names) / batch
        for section, names in PARTS.items()
    }
    profile = read_json(
        folder.path / "profile" / "operators.json", "story", "Remove the run"
    )
    sums: dict[str, float] = {}
    for operator in profile["operators"]:
        name = " ".join(
            [operator["name"].rpartition("::")[2], operator["dtype"]]
        ).strip()
        sums[name] = sums.get(name, 0.0) + operator["ms"] / profile["wall_ms"]
    top = sorted(sums.items(), key=lambda operator: -operator[1])[:TOP]
    low, high = scored.samples["accuracy"].interval()
    return {
        "images_per_second": round(rows[-1]["images"] / rows[-1]["seconds"], 2),
        "steady_images_per_second": (
            round(1000 / sum(shares.values()), 2) if sum(shares.values()) else 0.0
        ),
        **{f"{section}_ms": round(ms, 3) for section, ms in shares.items()},
        "cpu_seconds": rows[-1]["cpu_seconds"],
        "peak_mib": folder.manifest()["peak_mib"],
        "optimizer_mib": round(rows[-1]["optimizer_mib"], 2),
        "accuracy": round(100 * scored.row["accuracy"], 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "top": "; ".join(f"{name} {100 * share:.0f} %" for name, share in top),
    }


def text_of_findings(findings: list[dict[str, Any]]) -> str:
    """Return the findings of a run as one text."""
    return " | ".join(
        f"{finding['rule']}: {finding['evidence']}. {finding['advice']}"
        for finding in findings
    )


def play(number: int, options: argparse.Namespace, teacher: Path) -> dict[str, Any]:
    """Make a row."""
    step = STEPS[number]
    keys = keys_of(number, options, teacher)
    lines = (
        kd(["train", str(CONFIG), *keys, "--check"]).splitlines() if step.check else []
    )
    kd(["train", str(CONFIG), *keys, "--no-test"], step.ranks)
    folder = RunDir(options.work / f"story_{number}")
    batch = config.load(str(CONFIG), keys).data.batch_size
    findings = read_json(folder.path / "findings.json", "story", "Remove the run", list)
    return {
        "step": number,
        "name": step.name,
        "change": " ".join(step.change),
        "ranks": step.ranks,
        "batch": batch,
        **measured(folder, batch),
        "finding": text_of_findings(findings),
        "check": " | ".join(
            " ".join(line.split())
            for line in lines
            if line.startswith(("time ", "memory ", "keys "))
        ),
    }


def table_of(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    first = rows[0]["steady_images_per_second"] or 1.0
    lines = []
    for row in rows:
        milliseconds = {name: row[f"{name}_ms"] for name in PARTS}
        shares = [
            f"{100 * milliseconds[name] / (sum(milliseconds.values()) or 1):.0f}"
            for name in ("data", "teacher", "student")
        ]
        lines.append(
            {
                "row": str(row["step"]),
                "what changes": (
                    (f"`{row['change']}`" if row["change"] else row["name"])
                    + (f", {row['ranks']:.0f} ranks" if row["ranks"] > 1 else "")
                ),
                "images/s": f"{row['steady_images_per_second']:.1f}",
                "times": f"{row['steady_images_per_second'] / first:.2f}",
                "data, teacher, student, %": ", ".join(shares),
                "optimizer, MiB per rank": f"{row['optimizer_mib']:.1f}",
                "accuracy, %": (
                    f"{row['accuracy']:.0f} ({row['low']:.0f} to {row['high']:.0f})"
                ),
                "found": (
                    " ".join(
                        finding.split(":")[0]
                        for finding in row["finding"].split(" | ")
                        if finding
                    )
                    or "-"
                ),
            }
        )
    return markdown_table(lines)


def drawn(rows: list[dict[str, Any]]) -> str:
    """Return the picture: milliseconds per image of each row, by part of a step."""
    xs = [float(row["step"]) for row in rows]
    layers = [
        Series(name, color, xs, [row[f"{name}_ms"] for row in rows])
        for name, color in zip(PARTS, COLORS, strict=True)
    ]
    return stack(
        layers, (700, 290), Axis("row of the table"), Axis("ms per image", zero=True)
    ).svg(FILE)


def main() -> None:
    """Fit the teacher, make the rows that are missing, show the table, write
    the CSV.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/story"))
    parser.add_argument(
        "--images", type=int, default=640, help="images that each row trains on"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="write table and picture into docs/faster.md",
    )
    parser.add_argument("--no-record", action="store_true", help="write no CSV")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    rows_file = options.work / "rows.jsonl"
    fitted = [
        "backend.precision=bf16",
        "teacher.precision=auto",
        "data.workers=1",
        f"run.folder={options.work}",
    ]
    fitted += [f"teacher.fit.folder={options.work / 'teachers'}", *options.overrides]
    rows = (
        {row["step"]: row for row in read_rows(rows_file)}
        if rows_file.is_file()
        else {}
    )
    missing = [number for number in range(len(STEPS)) if number not in rows]
    if missing:
        teacher = Path(kd(["teach", str(CONFIG), *fitted]).splitlines()[-1]).absolute()
    for number in missing:
        rows[number] = play(number, options, teacher)
        append_rows(rows_file, rows[number])
        print(json.dumps(rows[number], indent=1), flush=True)
    table_rows = [rows[number] for number in sorted(rows)]
    text = table_of(table_rows)
    cpu_seconds = 0.0
    for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(process)
        cpu_seconds += usage.ru_utime + usage.ru_stime
    print(f"{text}\n\n{cpu_seconds / 60:.1f} CPU minutes")
    if not options.no_record:
        write(
            "story", " ".join(["python benchmarks/story.py", *sys.argv[1:]]), table_rows
        )
    if options.page:
        page = PAGE.read_text()
        head = page[: page.index(BEGIN) + len(BEGIN)]
        tail = page[page.index(END) :]
        PAGE.with_name(PICTURE).write_text(drawn(table_rows))
        PAGE.write_text(
            f"{head}\n{text}\n\n![milliseconds per image, by part of a"
            f" step]({PICTURE})\n\n{tail}"
        )


if __name__ == "__main__":
    main()
