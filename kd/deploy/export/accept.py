"""`--accept "drop<=2 ms<=5 mb<=4"`: a sentence says what a graph must keep; the first that does is exported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kd.core.errors import ModelError, did_you_mean

HIGHEST = {"drop": 100.0, "teacher-drop": 100.0, "ece": 100.0, "ms": 1e6, "mb": 1e6}
"""The words of a sentence, and the largest number behind each: points of 100, a quarter of an hour, a terabyte."""
EXAMPLE = 'such as "drop<=2 ms<=5 mb<=4"'
Found = dict[str, float]


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


def first(
    text: str, names: Iterable[str], steps: Iterable[Callable[[str], Found | str]], reject: Callable[[str, str], None]
) -> dict[str, Any]:
    """Return the first graph that keeps a sentence, as JSON values: `file`, and what was `found` of it.

    `steps` find numbers of a graph by its name, the cheap ones first; the later ones are left out where a number
    misses. Text in their place says why there is no such graph. `reject` gets the name of each other graph and why.

    Raises:
        NotAcceptedError: none keeps it.
    """
    wanted, told, steps = limits(text), [], list(steps)
    for name in names:
        found, missed = Found(), list[str]()
        for step in steps:
            new = step(name)
            missed = [new] if isinstance(new, str) else misses(new, wanted)
            found |= {} if isinstance(new, str) else new
            if missed:
                break
        if not missed:
            return {"file": name, "found": {word: round(found[word], 4) for word in wanted}}
        told.append(f"{name} misses {', '.join(missed)}" if found else f"{name}: {missed[0]}")
        reject(name, told[-1])
    remedy = "Nothing was written; allow more, use more --threads, or train another student"
    raise NotAcceptedError("--accept", f'nothing keeps "{text}"', "; ".join(told), remedy)


def line(accepted: Mapping[str, Any]) -> str:
    """Return what was accepted, for a person."""
    found = ", ".join(f"{word} {value:.4g}" for word, value in accepted["found"].items())
    return f'accepted "{accepted["sentence"]}": {accepted["file"]} with {found}, on {accepted["threads"]} threads'
