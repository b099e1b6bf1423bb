"""How a section declares a key whose value is a number with a range, or the name of a part."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def ranged(default: Any, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """Declare a number with its range, for the check and for `kd help`."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def chosen(part_folder: str, default: str, only: tuple[str, ...] = ()) -> Any:
    """Declare the `kind` of a part section; `only`: these of kd's parts."""
    return field(default=default, metadata={"parts": part_folder, "only": only})
