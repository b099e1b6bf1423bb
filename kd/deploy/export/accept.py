"""`--accept "drop<=2 ms<=5 mb<=4"`: a sentence says what a graph must keep; the first that does is exported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kd.core.errors import ModelError, did_you_mean

HIGHEST = {"drop": 100.0, "teacher-drop": 100.0, "ece": 100.0, "ms": 1e6, "mb": 1e6}
"""The words of a sentence, and the largest number behind each: points of 100, a quarter of an hour, a terabyte."""
EXAMPLE = 'such as "drop<=2 ms<=5 mb<=4"'


class NotAcceptedError(ModelError):
    """No graph keeps the sentence."""

    exit_code = 3


def limits(sentence: str) -> dict[str, float]:
    """Return the largest number of each word; ValueError: it is no such sentence."""
    found: dict[str, float] = {}
    for part in sentence.split():
        match = re.fullmatch(r"([a-z-]+)<=([0-9]{1,9}(?:\.[0-9]{1,9})?)", part)
        if match is None:
            raise ValueError(f"'{part}' is not WORD<=NUMBER, {EXAMPLE}")
        word, limit = match[1], float(match[2])
        if word not in HIGHEST:
            near = did_you_mean(word, HIGHEST)
            raise ValueError(f"'{word}' is not one of {', '.join(HIGHEST)}" + (f". {near}" if near else ""))
        if limit > HIGHEST[word] or (word in ("ms", "mb") and not limit):
            raise ValueError(f"'{part}' is no sense: {word} has a number up to {HIGHEST[word]:g}")
        if word in found:
            raise ValueError(f"'{word}' stands there twice")
        found[word] = limit
    if not found:
        raise ValueError(f"an empty sentence says nothing; {EXAMPLE}")
    return found


def sentence(text: str) -> str:
    """Return a sentence with single blanks; ValueError: it is none."""
    limits(text)
    return " ".join(text.split())


def misses(found: Mapping[str, float], wanted: Mapping[str, float]) -> list[str]:
    """Return by how much what was found misses what is wanted."""
    return [
        f"{word} by {found[word] - most:.3g} ({found[word]:.4g})"
        for word, most in wanted.items()
        if word in found and not found[word] <= most  # true for NaN
    ]


def line(accepted: Mapping[str, Any]) -> str:
    """Return what was accepted, for a person."""
    found = ", ".join(f"{word} {value:.4g}" for word, value in accepted["found"].items())
    return f'accepted "{accepted["sentence"]}": {accepted["file"]} with {found}, on {accepted["threads"]} threads'
