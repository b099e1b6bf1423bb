"""Write raw measurements as CSV, with what they depend on in the header."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import timm
import torch

from kd.core.host import processor

HERE = Path(__file__).parent
RESULTS = HERE / "results"  # a folder per subject


def hardware() -> str:
    """Return a short name of this machine: processor and cores, or the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    name = re.sub(r"\(\w+\)|processor", "", processor().lower())
    return "-".join([*name.split(), f"{os.cpu_count()}cores"])


def commit() -> str:
    """Return the commit of this copy: the variable COMMIT where it was brought without
    its history.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=HERE,
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", ":/kd"],
            capture_output=True,
            text=True,
            cwd=HERE,
        )
    except OSError:
        return "unknown"
    changed = " (with uncommitted changes)" if dirty.stdout.strip() else ""
    return (head.stdout.strip() or "unknown") + changed


def newest(theme: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the head and the rows, numbers read, of the newest CSV of a theme on this
    hardware; empty without one.
    """
    files = sorted(
        RESULTS.rglob(f"{theme}_{hardware()}_*.csv"), key=lambda path: path.name
    )
    text = files[-1].read_text().splitlines() if files else []
    head = [line for line in text if line.startswith("# ")]
    return head, [
        {k: v if k == "commit" else number(v) for k, v in row.items()}
        for row in csv.DictReader(text[len(head) :])
    ]


def folder_of(theme: str) -> Path:
    """Return the folder of a theme's earlier CSVs, or of those with its first word;
    without any, `RESULTS`.
    """
    earlier = (
        sorted(RESULTS.rglob(f"{name}_*.csv"))
        for name in (theme, theme.partition("_")[0])
    )
    return next((files[0].parent for files in earlier if files), RESULTS)


def number(text: str) -> int | float | str:
    """Return what a cell of a CSV was before it was written."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write(
    theme: str, command: str, rows: list[dict[str, Any]], folder: Path | None = None
) -> Path:
    """Write `theme_hardware_date.csv`: command, commit, hardware, versions and date as
    comments, then the rows.

    What people wrote in the head of the file before it (what, note, show) is carried
    over. `folder`: by default the one that the variable OUT names, else that of the
    subject.
    """
    date = datetime.date.today().isoformat()
    path = (
        folder or Path(os.environ.get("OUT") or folder_of(theme))
    ) / f"{theme}_{hardware()}_{date}.csv"
    facts = {
        "command": command,
        "commit": commit(),
        "hardware": hardware(),
        "versions": (
            f"torch {torch.__version__}, timm {timm.__version__}, python"
            f" {platform.python_version()}"
        ),
        "date": date,
    }
    written = [
        line for line in newest(theme)[0] if line[2:].partition(":")[0] not in facts
    ]
    with path.open("w", newline="") as file:
        for line in [
            *(f"# {name}: {value}" for name, value in facts.items()),
            *written,
        ]:
            file.write(f"{line}\n")
        writer = csv.DictWriter(
            file,
            list(dict.fromkeys(key for row in rows for key in row)),
            lineterminator="\n",
        )
        writer.writeheader()
        writer.writerows(rows)
    print(
        f"wrote {path.name}"
        f" ({', '.join(f'{k} {v}' for k, v in facts.items() if k != 'command')})"
    )
    return path
