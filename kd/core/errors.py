"""A user can cause and fix these errors; commands print them without a traceback.

`Interrupted` is not a KdError: a signal asked the process to stop.

Every message reads `<config path>: <what is wrong>. <what is allowed>. <what to do>`.
"""

import difflib
import importlib
import os
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# "what is allowed" for two keys
EXCLUSIVE = "They are mutually exclusive"


class KdError(Exception):
    """A user's error reads as one line: the fault, the allowed values, the remedy.

    Args:
        config_path: the key, option or file that is wrong.
        wrong: the fault.
        allowed: the allowed values, or a sentence; "": not stated.
        remedy: what to do; "": not stated.
    """

    exit_code = 2

    def __init__(
        self, config_path: str, wrong: str, allowed: str = "", remedy: str = ""
    ) -> None:
        self.config_path = config_path
        self.wrong = wrong
        self.allowed = allowed
        self.remedy = remedy
        if allowed and not allowed[0].isupper():
            allowed = f"Allowed: {allowed}"
        sentences = [
            _sentence(text) for text in (wrong, allowed, remedy) if text.strip()
        ]
        place = config_path if config_path.isprintable() else repr(config_path)[1:-1]
        super().__init__(f"{place}: {' '.join(sentences)}")

    def __reduce__(self):
        # The data loader's workers pickle exceptions; the four fields must survive it.
        return type(self), (self.config_path, self.wrong, self.allowed, self.remedy)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "?", "!")) else text + "."


class ConfigError(KdError):
    """A key or a value of the configuration is wrong."""


class ConfigErrors(ConfigError):
    """Several keys or values of the configuration are wrong, one per line."""

    def __init__(self, errors: Iterable[KdError]) -> None:
        self.errors = list(errors)
        first = self.errors[0]
        super().__init__(first.config_path, first.wrong, first.allowed, first.remedy)
        self.args = ("\n".join(str(error) for error in self.errors),)

    def __reduce__(self):
        return type(self), (self.errors,)


class PartNotFound(ConfigError):
    """No part of that name exists."""


class MissingExtra(KdError):
    """An optional package is not installed; the remedy names the extra."""


class DataError(KdError):
    """A dataset, an image or a label cannot be used."""


class BadImage(KdError):
    """An export refuses an image."""


class CorruptImage(DataError):
    """An image was read but cannot be decoded; `data.on_corrupt` decides.

    A failed read is a DataError instead.
    """


class NotPrepared(DataError):
    """An image has not been made by `Source.prepare` yet."""


class ModelError(KdError):
    """A model, its weights or its classes do not fit the run."""


class BackendError(KdError):
    """The processes or devices do not match the launcher or the configuration."""


class RunError(KdError):
    """The run folder, a checkpoint or the disk is not usable."""


class FolderInUse(RunError):
    """Another process is writing the run folder."""


class NonFiniteLoss(KdError):
    """A loss term became NaN or infinite."""


class Interrupted(KeyboardInterrupt):
    """The process was stopped on request; the same command resumes.

    No `except Exception` may swallow it.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


FOREIGN: set[str] = set()  # files of parts from outside kd, wherever they are installed


def error_with_line(error: BaseException) -> str:
    """Return `TYPE: message (FILE, line N, in NAME)`.

    The place is left out if `last_foreign_line` finds none.
    """
    message = error_summary(error, 1000)
    line = last_foreign_line(error)
    return f"{message} ({line})" if line else message


_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # terminal escapes: bold, colours
_END = re.compile(r"(?<=[\w)'\"\]][.!?])\s+(?=[A-Z])|\s*\n\s*\n")  # end of a sentence


def first_sentence(error: object, length: int = 200) -> str:
    """Return the first sentence of a foreign message, at most `length` characters.

    It becomes one line without control characters.
    """
    sentence = _END.split(_CODES.sub("", str(error)).strip(), maxsplit=1)[0]
    printable = "".join(char if char.isprintable() else " " for char in sentence)
    line = " ".join(printable.split())
    return line[:length].rstrip(" .:;,(") or type(error).__name__


def error_summary(error: BaseException, length: int = 200) -> str:
    """Return a foreign error as `TYPE: first sentence`."""
    return f"{type(error).__name__}: {first_sentence(error, length)}"


def import_optional(package: str, config_path: str, wrong: str, remedy: str) -> Any:
    """Import an optional package; MissingExtra: it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] != package.partition(".")[0]:
            raise  # it is installed; something that it needs is not
        raise MissingExtra(config_path, wrong, "", remedy) from error


def last_foreign_line(error: BaseException) -> str:
    """Return the last line of an error's traceback that is a user's own.

    Lines of kd, of Python and of installed packages do not count.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_foreign(frame.filename):
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return ""


def _is_foreign(file: str) -> bool:
    if file in FOREIGN:
        return True
    kd = str(Path(__file__).parents[1]) + os.sep
    python = os.path.dirname(os.__file__) + os.sep
    return not (
        file.startswith((kd, python, "<"))
        or "site-packages" in file
        or "dist-packages" in file
    )


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `Did you mean 'x'` for the nearest of `choices`, or an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"Did you mean '{near[0]}'?" if near else ""
