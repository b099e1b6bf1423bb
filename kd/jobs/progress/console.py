"""Progress of a run: a bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

from kd.core.references import redact
from kd.core.scores import Scores
from kd.core.text import clock, percent
from kd.core.types import State

if TYPE_CHECKING:
    from kd.jobs.progress.trackers import Trackers


class Console:
    """Show the progress of a run. See `kd.engine.run.Logger`."""

    def __init__(
        self,
        title: str,
        quiet: bool = False,
        trackers: Trackers | None = None,
        scores: Scores | None = None,
        filled: Mapping[str, float] = {},
    ) -> None:
        """Prepare the output; `quiet` for ranks other than 0. Without `scores`, every
        key of a row is shown.

        `filled`: spans of a step that only fill a cache or store, each with the share
        of the run at which it ends.
        """
        self.title, self.quiet, self.trackers, self.scores = (
            title,
            quiet,
            trackers,
            scores,
        )
        self.filled = filled
        # A notebook's shell is a terminal, but the notebook would keep all control
        # codes.
        terminal = False if "JPY_PARENT_PID" in os.environ else None
        self._console = RichConsole(
            highlight=False,
            soft_wrap=True,
            force_terminal=terminal,
            force_jupyter=False,
        )
        self._bar: Progress | None = None
        self._brief = ""
        self._last_row: Mapping[str, float] = {}
        self._progress = 0.0
        self._began: int | None = None  # epoch at the start of this process
        self._row = 0.0  # progress at the last row
        self._warm, self._filling = (
            0.0,
            0.0,
        )  # seconds of a warm step; seconds that filling adds to the rest of the run
        self._clock, self._evaluated, self._evaluation = time.monotonic(), 0, 0.0

    def __enter__(self) -> Console:
        if not self.quiet and self._console.is_terminal:
            columns = [
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                TextColumn("{task.percentage:3.0f} %"),
                TextColumn("{task.fields[text]}"),
            ]
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task(self.title, total=1.0, text="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            if exception[0] is None:  # it may have ended early
                self._bar.update(self._task, completed=1.0)
            self._bar.stop()
        if self.trackers is not None:
            self.trackers.close()

    def info(self, text: str) -> None:
        """Print a line above the bar; an empty text prints nothing."""
        if text and not self.quiet:
            (self._bar.console if self._bar is not None else self._console).print(
                redact(text), markup=False
            )

    def step(self, state: State, progress: float) -> None:
        if self._began is None:
            self._began, self._evaluated = (
                state.epoch - (state.step_in_epoch == 0),
                state.step - 1,
            )
        self._clock = time.monotonic()
        if self._bar is not None:
            self._bar.update(
                self._task, completed=progress, text=f"step {state.step}{self._brief}"
            )
        self._progress = progress

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        if self.quiet:
            return
        if self.trackers is not None:
            self.trackers.log(kind, state.step, values)
        if kind == "train":
            text = self._training_text(values)
            self._last_row = values
            self._record_times(state, values)
            speed = f"{values['images_per_second']:.0f} images/s"
            self._brief = f", loss {values.get('loss', math.nan):.3f}, {speed}{self._time_left(state)}"
        else:
            self._evaluation = (time.monotonic() - self._clock) / max(
                1, state.step - self._evaluated
            )
            self._evaluated = state.step
            text = f"val {_pairs_text(values) if self.scores is None else self.scores.text(values)}"
        if self._bar is None:
            share = (
                f"({100 * self._progress:.0f} %{self._time_left(state)}) "
                if self._progress
                else ""
            )
            print(f"{self.title} | step {state.step} {share}| {text}", flush=True)
        elif kind != "train":
            self.info(f"{self.title} | step {state.step} | {text}")

    def _training_text(self, values: Mapping[str, float]) -> str:
        """Return a row as text; unchanged values are omitted, so that counts are shown
        once.
        """
        hidden = (
            {column.key for column in self.scores.own}
            if self.scores is not None
            else set()
        )
        hidden |= {
            "loss",
            "lr",
            "images_per_second",
            "grad_norm",
            "step_ms",
            "data_wait",
            "optimizer_mib",
            "cpu_seconds",
        }
        changed = {
            name: value
            for name, value in values.items()
            if self._last_row.get(name) != value
        }
        terms = _pairs_text(
            {
                n: value
                for n, value in changed.items()
                if n not in hidden and not n.startswith("ms_")
            }
        )
        loss = values.get("loss", math.nan)  # no step of the window was applied
        text = (
            f"loss {loss:.3f} {terms} lr {values['lr']:.2g}"
            f" {values['images_per_second']:.0f} images/s"
        )
        if "step_ms" in values:
            text += (
                f", {values['step_ms']:.1f} ms per step, data wait"
                f" {percent(values['data_wait'])}"
            )
        return text

    def _record_times(self, state: State, values: Mapping[str, float]) -> None:
        """Record the seconds of a step from the last row alone: the mean, in the first
        epoch the median.
        """
        step_seconds = (
            state.images / state.step / max(values["images_per_second"], 1e-9)
        )
        if state.epoch - (state.step_in_epoch == 0) == self._began:
            step_seconds = values.get("step_ms", 0.0) / 1000
        before, self._row = self._row, self._progress
        self._warm, self._filling = step_seconds, 0.0
        whole = (
            sum(value for name, value in values.items() if name.startswith("ms_"))
            or 1.0
        )
        for span, end in self.filled.items():
            if before < end:
                seconds = step_seconds * values.get(f"ms_{span}", 0.0) / whole
                self._warm -= seconds
                self._filling += (
                    seconds * state.step * max(0.0, end / self._progress - 1)
                )

    def _time_left(self, state: State) -> str:
        """Return the estimated remaining time, with evaluations; "" if unknown."""
        if not (0 < self._progress < 1 and self._warm):
            return ""
        seconds = (self._warm + self._evaluation) * state.step * (
            1 / self._progress - 1
        ) + self._filling
        return f", about {clock(seconds)} left"


def _pairs_text(values: Mapping[str, float]) -> str:
    """Return values with their names: whole numbers without decimals, others with
    three.
    """
    return " ".join(
        f"{name} {value:.0f}" if float(value).is_integer() else f"{name} {value:.3f}"
        for name, value in values.items()
    )
