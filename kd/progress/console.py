"""Progress of a run: a bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kd.progress.trackers import Trackers
from kd.references import redact
from kd.text import percent
from kd.types import State

NAMES = {"accuracy": "accuracy", "map": "mAP", "knn": "knn"}
"""The scores that are computed with labels, as a person reads them."""
COLUMNS = {
    "accuracy": {"accuracy": "accuracy", "top5": "top-5", "ece": "calibration error"},
    "map": {"map": "mAP", "f1_macro": "F1 (macro)", "f1_micro": "F1 (micro)"},
}
"""What the table shows of models that answer with one label, or with several."""


class Console:
    """Show the progress of a run. See `kd.contracts.Logger`."""

    def __init__(self, title: str, quiet: bool = False, trackers: Trackers | None = None) -> None:
        """Prepare the output.

        Args:
            title: name of the run, at the start of each line.
            quiet: show nothing (ranks other than 0).
            trackers: get every row of metrics; closed at the end.
        """
        self.title, self.quiet, self.trackers = title, quiet, trackers
        # The shell of a notebook is a terminal whose control codes would all be kept in the notebook.
        terminal = False if "JPY_PARENT_PID" in os.environ else None
        self._console = RichConsole(stderr=False, highlight=False, soft_wrap=True, force_terminal=terminal)
        self._bar: Progress | None = None
        self._brief = ""
        self._shown: Mapping[str, float] = {}
        self._started = time.monotonic()
        self._first_progress: float | None = None

    def __enter__(self) -> Console:
        if not self.quiet and self._console.is_terminal:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                TextColumn("{task.percentage:3.0f} %"),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            ]
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task(self.title, total=1.0, text="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.trackers is not None:
            self.trackers.close()

    def info(self, text: str) -> None:
        """Print a line above the bar; an empty text prints nothing."""
        if text and not self.quiet:
            (self._bar.console if self._bar is not None else self._console).print(redact(text), markup=False)

    def step(self, state: State, progress: float) -> None:
        """Move the bar."""
        if self._first_progress is None:
            self._first_progress = progress
            self._started = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=progress, text=f"step {state.step}{self._brief}")
        self._progress = progress

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        """Show a row of metrics and pass it to the trackers."""
        if self.quiet:
            return
        if self.trackers is not None:
            self.trackers.log(kind, state.step, values)
        if kind == "train":
            news = {name: value for name, value in values.items() if self._shown.get(name) != value}
            text = _training_text(values, news)
            self._shown = values
            self._brief = f", loss {values.get('loss', math.nan):.3f}, {values['images_per_second']:.0f} images/s"
        else:
            text = _validation_text(values)
        if self._bar is None:
            print(f"{self.title} | step {state.step} {self._left()}| {text}", flush=True)
        elif kind != "train":
            self.info(f"{self.title} | step {state.step} | {text}")

    def _left(self) -> str:
        """Return the remaining time as text, from the speed since this process started."""
        done = getattr(self, "_progress", 0.0) - (self._first_progress or 0.0)
        if done <= 0:
            return ""
        left = (time.monotonic() - self._started) / done * (1 - self._progress)
        return f"({100 * self._progress:.0f} %, {left:.0f} s left) "


def _training_text(values: Mapping[str, float], news: Mapping[str, float]) -> str:
    """Return a row as text; `news` has the values that changed, so that constant counts are shown once."""
    skip = ("loss", "accuracy", "lr", "images_per_second", "grad_norm", "step_ms", "data_wait", "optimizer_mib")
    shown = {name: value for name, value in news.items() if name not in skip and not name.startswith("ms_")}
    terms = " ".join(f"{name} {_number(value)}" for name, value in shown.items())
    loss = values.get("loss", math.nan)  # no step of the window was applied
    text = f"loss {loss:.3f} {terms} lr {values['lr']:.2g} {values['images_per_second']:.0f} images/s"
    if "step_ms" in values:
        text += f", {values['step_ms']:.1f} ms a step, data wait {percent(values['data_wait'])}"
    return text


def _number(value: float) -> str:
    """Return a whole number without decimals, any other with three."""
    return f"{value:.0f}" if value.is_integer() else f"{value:.3f}"


def embedding_text(values: Mapping[str, float]) -> str:
    """Return the scores of an embedding model and its teachers as text."""
    text = f"agreement {values['agreement']:.4f}"
    if "knn" in values:
        text = f"knn {percent(values['knn'])}, probe {percent(values['probe'])}, {text}"
    of_teacher = [percent(value) for name, value in values.items() if name.startswith("teacher_knn")]
    return text + (f" (teacher knn {', '.join(of_teacher)})" if of_teacher else "")


def _validation_text(values: Mapping[str, float]) -> str:
    score = scored_by(values)
    if score == "knn" or (score == "agreement" and "kl" not in values):
        return f"val {embedding_text(values)}"
    if score == "agreement":
        return f"val agreement with the teacher {percent(values['agreement'])}, KL {values['kl']:.3f}"
    text = f"val {NAMES[score]} {percent(values[score])}"
    text += f", F1 {percent(values['f1_macro'])}" if "f1_macro" in values else ""
    if f"teacher_{score}" in values:
        text += f" (teacher {percent(values[f'teacher_{score}'])}, agreement {percent(values['agreement'])})"
    return text


def scored_by(values: Mapping[str, float]) -> str:
    """Return the name of the value that says how good a validation row is."""
    return next((name for name in NAMES if name in values), "agreement")
