"""What a listener of the loop is told: parts of a step, and the ends of log windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from kd.types import State

Span = Callable[[str], AbstractContextManager[object]]
"""`with span(NAME):` around a part of a step: data, sifting, teacher, forward, backward, optimizer, wait, evaluation,
checkpoint. Spans may be nested."""
Window = Callable[[State], Mapping[str, float]]
"""Called where a log window ends, after the device was waited for; returns what to add to the training row."""

_NOTHING = nullcontext()


def no_span(name: str) -> AbstractContextManager[object]:
    """Mark nothing."""
    return _NOTHING


def no_window(state: State) -> Mapping[str, float]:
    """Add nothing."""
    return {}
