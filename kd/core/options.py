"""Options of a command, written once: a field of a dataclass is a flag, the string under it is the help."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any


def option(
    default: Any = MISSING, metavar: str | None = None, parse: Callable[[str], Any] | None = None, flag: str = ""
) -> Any:
    """Declare a field that a command has as an option; `kd.cli.command.add_fields` adds it.

    `metavar` stands for the value in the help, `parse` makes the value of the text, `flag` is another name than the
    field's. A bool is a switch.
    """
    return field(default=default, metadata={"option": {"metavar": metavar, "parse": parse, "flag": flag}})


def field_docs(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            docs[node.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return the parser of a whole number from `low` to `high`; ValueError: it is none."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
            raise ValueError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Return a number above 0; ValueError: it is none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:  # false for NaN; beyond lies only what somebody mistyped
        raise ValueError(f"'{text}' is not a number above 0")
    return value
