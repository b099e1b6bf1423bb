"""Show a run's progress as a bar on a terminal, as plain lines elsewhere."""

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
from kd.core.text import format_seconds, percent
from kd.core.types import State

if TYPE_CHECKING:
    from kd.jobs.progress.trackers import Trackers


# keys of a training row that are not shown as a term
HIDDEN = {
    "loss",
    "lr",
    "images_per_second",
    "grad_norm",
    "step_ms",
    "data_wait",
    "optimizer_mib",
    "cpu_seconds",
}


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
        """Prepare the output; `quiet` for ranks other than 0.

        Without `scores`, every key of a row is shown. `filled`: spans of a step that
        only fill a cache or store, each with the share of the run at which it ends.
        """
        self.title = title
        self.quiet = quiet
        self.trackers = trackers
        self.scores = scores
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
        self._first_epoch: int | None = None  # epoch at the start of this process
        self._row_progress = 0.0  # progress at the last row
        self._warm_seconds = 0.0  # of a step that fills nothing
        self._filling_seconds = 0.0  # that filling adds to the rest of the run
        self._step_time = time.monotonic()  # of the last step
        self._evaluated_step = 0
        self._evaluation_seconds = 0.0  # of the last evaluation, per step

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
            console = self._bar.console if self._bar is not None else self._console
            console.print(redact(text), markup=False)

    def step(self, state: State, progress: float) -> None:
        if self._first_epoch is None:
            self._first_epoch = _epoch_of_step(state)
            self._evaluated_step = state.step - 1
        self._step_time = time.monotonic()
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
            self._brief = (
                f", loss {values.get('loss', math.nan):.3f},"
                f" {values['images_per_second']:.0f} images/s{self._time_left(state)}"
            )
        else:
            steps = max(1, state.step - self._evaluated_step)
            self._evaluation_seconds = (time.monotonic() - self._step_time) / steps
            self._evaluated_step = state.step
            show = _pairs_text if self.scores is None else self.scores.text
            text = f"val {show(values)}"
        if self._bar is None:
            share = ""
            if self._progress:
                share = f"({100 * self._progress:.0f} %{self._time_left(state)}) "
            print(f"{self.title} | step {state.step} {share}| {text}", flush=True)
        elif kind != "train":
            self.info(f"{self.title} | step {state.step} | {text}")

    def _training_text(self, values: Mapping[str, float]) -> str:
        """Return a row as text without unchanged values, which shows counts once."""
        columns = self.scores.own if self.scores is not None else ()
        hidden = HIDDEN | {column.key for column in columns}
        terms = _pairs_text(
            {
                name: value
                for name, value in values.items()
                if name not in hidden
                and not name.startswith("ms_")
                and self._last_row.get(name) != value
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
        """Record the seconds of a step from a row: the mean, at first the median."""
        if _epoch_of_step(state) == self._first_epoch:
            step_seconds = values.get("step_ms", 0.0) / 1000
        else:
            images_per_second = max(values["images_per_second"], 1e-9)
            step_seconds = state.images / state.step / images_per_second
        self._warm_seconds = step_seconds
        self._filling_seconds = 0.0
        spans_ms = sum(
            value for name, value in values.items() if name.startswith("ms_")
        )
        for span, end in self.filled.items():
            if self._row_progress < end:
                share = values.get(f"ms_{span}", 0.0)
                seconds = step_seconds * share / (spans_ms or 1.0)
                self._warm_seconds -= seconds
                growth = max(0.0, end / self._progress - 1)
                self._filling_seconds += seconds * state.step * growth
        self._row_progress = self._progress

    def _time_left(self, state: State) -> str:
        """Return the estimated remaining time, with evaluations; "" if unknown."""
        if not (0 < self._progress < 1 and self._warm_seconds):
            return ""
        step_seconds = self._warm_seconds + self._evaluation_seconds
        seconds = step_seconds * state.step * (1 / self._progress - 1)
        return f", about {format_seconds(seconds + self._filling_seconds)} left"


def _epoch_of_step(state: State) -> int:
    """Return the epoch of the last step; after an epoch's end `epoch` is the next."""
    return state.epoch - (state.step_in_epoch == 0)


def _pairs_text(values: Mapping[str, float]) -> str:
    """Return values with their names; others than whole numbers have three decimals."""
    return " ".join(
        f"{name} {value:.0f}" if float(value).is_integer() else f"{name} {value:.3f}"
        for name, value in values.items()
    )
