"""Read again where a storage fails for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kd.errors import DataError

PAUSES = (0.1, 0.4, 1.5)
"""Seconds between the tries: a network storage that fails over is back within a second or two."""
REMEDY = "Bring the storage back and run the same command again: it resumes"
Result = TypeVar("Result")


def retried(
    read: Callable[[], Result],
    subject: str,
    where: str,
    *,
    allowed: str = "",
    remedy: str = REMEDY,
    final: tuple[type[OSError], ...] = (),
) -> Result:
    """Return what `read` returns; call it again after a pause where it raises an OSError.

    `subject` is the file as a message names it: "file 'apple/1.jpg'". `final` are errors that another try does
    not change; they are raised at once, as they are.
    """
    pauses = list(PAUSES)
    while True:
        try:
            return read()
        except final:
            raise
        except OSError as error:
            if not pauses:
                reason = f"({error.strerror or error}), in {len(PAUSES) + 1} tries"
                wrong = f"{subject}: it cannot be read {reason}: the storage is away, or the file is"
                raise DataError(where, wrong, allowed, remedy) from error
            time.sleep(pauses.pop(0))
