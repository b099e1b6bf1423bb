"""Open a graph by the name of its file, in the runtime that its exporter names."""

import ctypes
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kd.core.errors import MissingExtra
from kd.core.host import package_versions
from kd.parts import registry

WHERE = "export"
# uint8 [B, 3, S, S] to logits [B, C] or vectors [B, D]; thread-safe
Engine = Callable[[np.ndarray], np.ndarray]


class PerProcess:
    """An engine that a forked process opens anew, at its first call.

    A runtime's threads stay in their process.
    """

    def __init__(self, opener: Callable[[], Engine]) -> None:
        self.opener = opener
        self.lock = threading.Lock()
        self.engine: Engine | None = opener()
        OPENED.add(self)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        with self.lock:
            self.engine = self.engine or self.opener()
        return self.engine(pixels)


OPENED = weakref.WeakSet[PerProcess]()


def forget_engines() -> None:
    """Leave the parent's engines to the parent, in a forked process."""
    for engine in OPENED:
        # Never freed: the destructor would wait for the parent's threads, and the
        # process would not end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine.engine))
        engine.engine = None
        engine.lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=forget_engines)


def require_version(file: str, least: str) -> None:
    """Refuse a runtime older than a graph needs."""
    runtime = registry.graphs()[file].runtime
    installed = package_versions(runtime)[runtime]
    if _digits(installed) and _digits(installed) < _digits(least):
        wrong = f"'{file}' needs {runtime} {least}, and {installed} is here"
        allowed = f"{runtime} {least} or newer"
        raise MissingExtra(WHERE, wrong, allowed, f"pip install '{runtime}>={least}'")


def _digits(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def open_graph(path: Path) -> Engine:
    """Open a graph file with its weights beside it, for one call at a time."""
    graph = path.read_bytes()
    file = registry.graphs()[path.name].weights
    weights = path.with_name(file).read_bytes() if file else b""
    return registry.exporter(path.name).load(path.name, graph, weights, 1, 1)
