"""The environment variables that a configuration refers to: their values stay out of files and messages."""

from __future__ import annotations

import os
import re
from typing import Any

SHORTEST = 6  # characters of a value that is kept out of messages: shorter ones (a rank, a port) would match anywhere
_VARIABLE = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")
_variables: set[str] = set()  # names of environment variables that a configuration of this process refers to


class Referenced(str):
    """The value of a reference such as `${oc.env:TOKEN}`. Its `repr` is the reference; so is what run folders hold."""

    reference: str

    def __new__(cls, value: str, reference: str) -> Referenced:
        made = super().__new__(cls, value)
        made.reference = reference
        _variables.update(_VARIABLE.findall(reference))
        return made

    def __repr__(self) -> str:
        return repr(self.reference)

    def __reduce__(self):
        return Referenced, (str(self), self.reference)


def written(value: Any) -> Any:
    """Return the reference instead of its value; anything else as it is."""
    return value.reference if isinstance(value, Referenced) else value


def redact(text: str) -> str:
    """Return a text with references for the values of variables of a configuration, paths and short ones apart."""
    for name in sorted(_variables):
        value = os.environ.get(name, "")
        if len(value) >= SHORTEST and not os.path.isabs(value) and not os.path.exists(value):
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text
