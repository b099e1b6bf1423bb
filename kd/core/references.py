"""Values of environment variables are kept out of files and messages.

A configuration refers to them.
"""

from __future__ import annotations

import os
import re
from typing import Any

# shortest value kept out of messages, characters: shorter ones (a rank, a port) would
# match anywhere
SHORTEST = 6
_VARIABLE = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")
# names of environment variables used by a configuration of this process
_variables: set[str] = set()


class Referenced(str):
    """A text came from a reference such as `${oc.env:TOKEN}`.

    Its `repr`, and the text in run folders, is the reference.
    """

    reference: str

    def __new__(cls, value: str, reference: str) -> Referenced:
        referenced = super().__new__(cls, value)
        referenced.reference = reference
        _variables.update(_VARIABLE.findall(reference))
        return referenced

    def __repr__(self) -> str:
        return repr(self.reference)

    def __reduce__(self):
        return Referenced, (str(self), self.reference)


def reference_or_value(value: Any) -> Any:
    """Return the reference in place of its value; return anything else unchanged."""
    return value.reference if isinstance(value, Referenced) else value


def redact(text: str) -> str:
    """Replace values of a configuration's environment variables by references.

    Paths and short values are left as they are.
    """
    for name in sorted(_variables):
        value = os.environ.get(name, "")
        if (
            len(value) >= SHORTEST
            and not os.path.isabs(value)
            and not os.path.exists(value)
        ):
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text
