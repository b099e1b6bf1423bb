"""What sifting did and what it cost: the metrics under the names that smart sifting logs, and the cost check."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger("kd.sifting")
PILOT = 24
"""Scored batches that are timed before the cost is judged; the first quarter warms up and does not count."""


class Meter:
    """Counts and times; `metrics` is the dict that a user sees."""

    def __init__(self, log_batch_data: bool) -> None:
        self.log_batch_data = log_batch_data
        self.metrics: dict[str, Any] = {"num_orig_samples_seen": 0, "num_orig_samples_kept": 0}
        self.scoring: list[float] = []
        """Seconds a scored sample, of the pilot."""
        self.training: list[float] = []
        """Seconds a trained sample, of the pilot."""
        self.saving: float | None = None
        """The predicted share of the time of the epochs that sifting saves; below 0 it costs time."""

    def count(self, seen: int, kept: int) -> None:
        """Count samples of the original loader and those of them that go on to training."""
        self.metrics["num_orig_samples_seen"] += seen
        self.metrics["num_orig_samples_kept"] += kept

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time one function of the sifting, as the host sees it."""
        start = time.perf_counter()
        yield
        self.metrics[f"func:{name} latency"] = time.perf_counter() - start

    @contextmanager
    def scored(self, size: int, device: torch.device) -> Iterator[None]:
        """Time the scoring of a candidate batch; in the pilot to the end of the device's work."""
        pilot = self.saving is None
        start = now(device, pilot)
        yield
        seconds = now(device, pilot) - start
        self.metrics["func:calculate_relevance_values latency"] = seconds
        if pilot:
            self.scoring.append(seconds / size)

    def trained(self, seconds: float, size: int, keep: float) -> None:
        """Note the time that the user's loop took for a batch; after the pilot say what sifting saves."""
        if self.saving is not None:
            return
        self.training.append(seconds / size)
        if min(len(self.scoring), len(self.training)) >= PILOT:
            self._judge(keep)

    def _judge(self, keep: float) -> None:
        score, train = (statistics.median(times[PILOT // 4 :]) for times in (self.scoring, self.training))
        self.saving = 1 - keep - score / train
        self.metrics["predicted_saving"] = self.saving
        text = (
            f"scoring takes {score * 1e3:.3g} ms a sample, a training step {train * 1e3:.3g} ms a sample, "
            f"{keep:.1%} are kept: 1 - {keep:.3f} - {score / train:.3f} = {self.saving:+.1%} of the time is saved"
        )
        if self.saving > 0:
            logger.info(text)
        else:
            logger.warning(f"sifting saves nothing here: {text}. Raise beta_value, or train without sifting")

    def data(self, relevance: torch.Tensor, index: torch.Tensor) -> None:
        """Keep and log the losses of a candidate batch and of what is kept of it; copies them from the device."""
        if self.log_batch_data:
            self.metrics["relevance_values"] = relevance.tolist()
            self.metrics["relevance_values_kept"] = relevance.index_select(0, index.to(relevance.device)).tolist()

    def log(self, size: int, seconds: float) -> None:
        """Log one sifted batch."""
        self.metrics["Batch size for next sifted batch"] = size
        self.metrics["sifted_batch_creation_latency"] = seconds
        if logger.isEnabledFor(logging.INFO):
            for name, value in self.metrics.items():
                logger.info("%s: %s", name, value)


def now(device: torch.device, wait: bool) -> float:
    """Return the time, after the device has done all its work if asked to wait."""
    if wait and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
