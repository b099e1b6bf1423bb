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


def hardware() -> str:
    """Return a short name of this machine: processor and cores, or the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    name = re.sub(r"\(\w+\)|processor", "", processor().lower())
    return "-".join([*name.split(), f"{os.cpu_count()}cores"])


def commit() -> str:
    """Return the commit of this copy: the variable COMMIT where it was brought without its history."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
        dirty = subprocess.run(["git", "status", "--porcelain", ":/kd"], capture_output=True, text=True, cwd=HERE)
    except OSError:
        return "unknown"
    changed = " (with uncommitted changes)" if dirty.stdout.strip() else ""
    return (head.stdout.strip() or "unknown") + changed


def write(theme: str, command: str, rows: list[dict[str, Any]], folder: Path | None = None) -> Path:
    """Write `theme_hardware_date.csv`: command, commit, hardware, versions and date as comments, then the rows.

    `folder`: by default the one that the variable OUT names, else this one.
    """
    date = datetime.date.today().isoformat()
    path = (folder or Path(os.environ.get("OUT") or HERE)) / f"{theme}_{hardware()}_{date}.csv"
    facts = {
        "command": command,
        "commit": commit(),
        "hardware": hardware(),
        "versions": f"torch {torch.__version__}, timm {timm.__version__}, python {platform.python_version()}",
        "date": date,
    }
    with path.open("w", newline="") as file:
        for name, value in facts.items():
            file.write(f"# {name}: {value}\n")
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path.name} ({', '.join(f'{k} {v}' for k, v in facts.items() if k != 'command')})")
    return path
