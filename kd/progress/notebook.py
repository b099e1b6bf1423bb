"""A run in a notebook: one display with a bar, a table of the evaluations, and the other lines folded away."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape

from kd.text import html_table

EVERY_SECONDS = 0.5


class Page:
    """What is shown; each change replaces it."""

    def __init__(self, title: str) -> None:
        """Show a bar at 0. A notebook's kernel always has IPython."""
        from IPython.display import HTML, display  # kd does not depend on it

        self.title, self.progress, self.text = title, 0.0, ""
        self.rows: list[dict[str, str]] = []
        self.lines: list[str] = []
        self._html, self._shown = HTML, time.monotonic()
        self._display = display(HTML(self.html()), display_id=True)

    def move(self, progress: float, text: str) -> None:
        """Move the bar; `text` stands beside it."""
        self.progress, self.text = progress, text
        if time.monotonic() - self._shown >= EVERY_SECONDS:
            self.show()

    def row(self, cells: Mapping[str, str]) -> None:
        """Add a row to the table."""
        self.rows.append(dict(cells))
        self.show()

    def line(self, text: str) -> None:
        """Add a line to those that are folded away."""
        self.lines.append(text)

    def close(self, text: str) -> None:
        """Show the last state; with a text, the bar is full and the text stands beside it."""
        self.progress, self.text = (1.0, text) if text else (self.progress, self.text)
        self.show()

    def show(self) -> None:
        """Replace what is shown."""
        self._shown = time.monotonic()
        self._display.update(self._html(self.html()))  # type: ignore[union-attr]

    def html(self) -> str:
        """Return all of it."""
        bar = f"<progress value='{self.progress:.3f}' max='1'></progress>"
        head = f"<p>{escape(self.title)} {bar} {escape(self.text)}</p>"
        body = escape("\n".join(self.lines))
        lines = f"<details><summary>{len(self.lines)} lines</summary><pre>{body}</pre></details>" if body else ""
        return head + html_table(self.rows) + lines
