"""Pages and cards are rendered from Jinja2's templates.

HTML is escaped by Jinja; a name that a template misses is an error.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    UndefinedError,
    select_autoescape,
)

HERE = Path(__file__).parent


@cache
def templates_of(folder: Path) -> Environment:
    """Return the templates of a folder, and those beside this file.

    Those beside this file are everyone's.
    """
    return Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_template(template: Path, **values: Any) -> str:
    """Return the text of a template; what `*.html.jinja` shows is escaped.

    Raises:
        KeyError: a value is missing, such as a key that was cut from a file.
    """
    try:
        return templates_of(template.parent).get_template(template.name).render(values)
    except UndefinedError as error:
        raise KeyError(str(error)) from error


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table, "" without rows."""
    return render_template(HERE / "rows.html.jinja", rows=rows)
