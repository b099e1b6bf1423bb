"""Options of a command are declared once: a dataclass field is a flag.

The string under a field is its help.
"""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, field, is_dataclass
from typing import Any


def option(
    default: Any = MISSING,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    flag: str = "",
) -> Any:
    """Declare a dataclass field that is a command-line option.

    `kd.cli.command.add_fields` adds it.

    `metavar` names the value in the help, `parse` converts the text, `flag` replaces
    the field's name. A bool is a switch. A field without a default is a positional
    argument.
    """
    return field(
        default=default,
        metadata={"option": {"metavar": metavar, "parse": parse, "flag": flag}},
    )


def field_docs(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__bases__):
        if is_dataclass(base):
            docs |= field_docs(base)
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    for node, following in itertools.pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
        ):
            docs[node.target.id] = " ".join(
                str(ast.literal_eval(following.value)).split()
            )
    return docs


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`.

    It raises ValueError for anything else.
    """

    def parse(text: str) -> int:
        if not (
            text.isascii()
            and text.isdigit()
            and len(text) < 10
            and low <= int(text) <= high
        ):
            raise ValueError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


def parse_positive(text: str) -> float:
    """Parse a number above 0; ValueError: anything else."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:  # false for NaN; larger numbers can only be typing errors
        raise ValueError(f"'{text}' is not a number above 0")
    return value


def parse_pixels(text: str) -> int:
    """Parse a number of pixels such as 25e6; ValueError: anything else."""
    return int(parse_positive(text))


def parse_size(text: str) -> int:
    """Parse a size such as 6MiB and return bytes; ValueError: anything else."""
    match = re.fullmatch(r"([0-9]{1,12})(|B|KiB|MiB|GiB)", text, re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"'{text}' is not a size such as 6MiB, 512KiB or 1000000")
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    return int(match[1]) * units[match[2].lower()]


def one_of(*words: str) -> Callable[[str], str]:
    """Return a parser that accepts only these words; ValueError: another word."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"'{text}' is not one of {', '.join(words)}")
        return text

    return parse
