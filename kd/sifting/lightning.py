"""Training times of a Lightning run, under smart sifting's metric names."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from kd.errors import MissingExtra
from kd.sifting.meter import logger

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> type[Any]:
    """Return the Callback class of the Lightning package that is imported already, or else of an installed one."""
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError:
            continue
    raise MissingExtra(
        "TrainingMetricsRecorder", "Lightning is not installed", "", "pip install lightning (or pytorch-lightning)"
    )


class TrainingMetricsRecorder:
    """Lightning callback: log how long forward, backward and optimizer take.

    `latencies` holds the latest values in seconds under smart sifting's names, measured on the host. On a GPU they are
    accurate only where the loop synchronizes. The loader's own metrics are `loader.metrics`.

    Raises:
        MissingExtra: at construction, where Lightning is not installed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        base = _callback_class()
        if not issubclass(cls, base):  # derived here, so that importing kd.sifting does not import Lightning
            cls = type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})
        return object.__new__(cls)

    def __init__(self) -> None:
        self.train_step_count = 0
        self.latencies: dict[str, float] = {}
        self._begin = self._last = 0.0

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self.latencies[f"train {name} latency"] = now - self._last
        self._last = now

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._begin = self._last = time.perf_counter()

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        self._lap("forward pass")

    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        self._lap("backprop")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._lap("optimizer step")
        self.latencies["train total step latency"] = self._last - self._begin
        self.train_step_count += 1
        logger.info("train step count: %s", self.train_step_count)
        for name, seconds in self.latencies.items():
            logger.info("%s: %s", name, seconds)
