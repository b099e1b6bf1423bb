"""Names of images in a text file, a line each: any name can be said, and a name is read as it was written."""

from __future__ import annotations

import json


def quoted(name: str) -> str:
    """Return the line of a name: the name itself, or JSON where a line could not hold it or would be read otherwise."""
    plain = name == name.strip() and name.isprintable() and name[:1] not in ("", '"', "#")
    return name if plain else json.dumps(name)


def names_of(text: str) -> list[str]:
    """Return the names in a text. Empty lines and those that begin with "#" say nothing."""
    found = []
    for line in (line.strip() for line in text.split("\n")):  # not splitlines: a name may hold U+2028 or U+0085
        if line and not line.startswith("#"):
            found.append(_unquoted(line))
    return found


def _unquoted(line: str) -> str:
    if line.startswith('"'):
        try:
            return str(json.loads(line))
        except ValueError:  # a name that begins with a quotation mark, written by hand
            pass
    return line
