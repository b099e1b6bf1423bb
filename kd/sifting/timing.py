"""Metrics of sifting have smart sifting's names; a check says if it saves time."""

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger("kd.sifting")
# number of scored batches timed for the prediction of the saving; the first quarter is
# warm-up
PILOT = 24


class Meter:
    """A meter has counts and times; users read the dict `metrics`."""

    def __init__(self, log_batch_data: bool) -> None:
        self.log_batch_data = log_batch_data
        self.metrics: dict[str, Any] = {
            "num_orig_samples_seen": 0,
            "num_orig_samples_kept": 0,
        }
        self.scoring: list[float] = []  # seconds per scored sample, in the pilot
        self.training: list[float] = []  # seconds per trained sample, in the pilot
        # predicted share of an epoch's time; None during the pilot
        self.saving: float | None = None

    def count(self, candidates: int, selected: int) -> None:
        self.metrics["num_orig_samples_seen"] += candidates
        self.metrics["num_orig_samples_kept"] += selected

    @contextmanager
    def timed(self, name: str, wait_for: torch.device | None = None) -> Iterator[None]:
        """Time one function of sifting, on the host.

        The pilot waits for a device if one is given.
        """
        device = wait_for if self.saving is None else None
        start = now(device)
        yield
        self.metrics[f"func:{name} latency"] = now(device) - start

    def score(self, size: int) -> None:
        if self.saving is None:
            self.scoring.append(
                self.metrics["func:calculate_relevance_values latency"] / size
            )

    def train(self, seconds: float, size: int, keep: float) -> None:
        """Record the time of a training step.

        At the end of the pilot, log the predicted saving.
        """
        self.training.append(seconds / size)
        if min(len(self.scoring), len(self.training)) >= PILOT:
            self._log_saving(keep)

    def _log_saving(self, keep: float) -> None:
        score, train = (
            statistics.median(times[PILOT // 4 :])
            for times in (self.scoring, self.training)
        )
        self.saving = 1 - keep - score / train
        self.metrics["predicted_saving"] = self.saving
        text = (
            f"scoring takes {score * 1e3:.3g} ms per sample, a training step"
            f" {train * 1e3:.3g} ms per sample, {keep:.1%} are kept: 1 - {keep:.3f} -"
            f" {score / train:.3f} = {self.saving:+.1%} of the time is saved"
        )
        if self.saving > 0:
            logger.info(text)
        else:
            logger.warning(
                f"sifting saves nothing here: {text}. Raise beta_value, or train"
                " without sifting"
            )

    def record_losses(self, losses: torch.Tensor, index: torch.Tensor) -> None:
        """Record the losses of a candidate batch and its selected samples.

        They are copied from the device.
        """
        if self.log_batch_data:
            self.metrics["relevance_values"] = losses.tolist()
            selected = losses[index.to(losses.device)]
            self.metrics["relevance_values_kept"] = selected.tolist()

    def log(self, size: int, seconds: float) -> None:
        self.metrics["Batch size for next sifted batch"] = size
        self.metrics["sifted_batch_creation_latency"] = seconds
        if logger.isEnabledFor(logging.INFO):
            for name, value in self.metrics.items():
                logger.info("%s: %s", name, value)


def now(device: torch.device | None = None) -> float:
    """Return the time in seconds, after synchronizing the device if one is given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
