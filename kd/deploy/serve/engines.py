"""Open a graph by the name of its file, in the runtime that its exporter names."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kd.core.errors import MissingExtra
from kd.core.host import versions
from kd.parts import registry

WHERE = "export"
Engine = Callable[[np.ndarray], np.ndarray]  # uint8 [B, 3, S, S] to logits [B, C] or vectors [B, D]; thread-safe


def require_version(file: str, least: str) -> None:
    """Refuse a runtime older than a graph needs."""
    runtime = registry.graphs()[file].runtime
    here = versions(runtime)[runtime]
    if _digits(here) and _digits(here) < _digits(least):
        wrong, allowed = f"'{file}' needs {runtime} {least}, and {here} is here", f"{runtime} {least} or newer"
        raise MissingExtra(WHERE, wrong, allowed, f"pip install '{runtime}>={least}'")


def _digits(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def open_graph(path: Path) -> Engine:
    """Open a graph file with its weights beside it, for one call at a time."""
    weights = registry.graphs()[path.name].weights
    beside = path.with_name(weights).read_bytes() if weights else b""
    return registry.exporter(path.name).load(path.name, path.read_bytes(), beside, 1, 1)
