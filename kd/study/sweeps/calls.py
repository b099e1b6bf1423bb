"""Read the names and arguments of Optuna's samplers, pruners and ranges.

They stand in texts such as `percentile(25)`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from kd.core.errors import ConfigError, MissingExtra, did_you_mean, first_sentence

Built = TypeVar("Built")


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return name, arguments and keyword arguments of `name(1, key=2)` or of `name`.

    The name is "" for other texts.
    """
    match = re.fullmatch(r"(\w+)(\(.*\))?", text.strip())
    if match is None:
        return "", [], {}
    with suppress(SyntaxError, ValueError):
        call = ast.parse(f"name{match[2] or '()'}", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            arguments = [ast.literal_eval(argument) for argument in call.args]
            options = {
                str(keyword.arg): ast.literal_eval(keyword.value)
                for keyword in call.keywords
            }
            return match[1], arguments, options
    return "", [], {}


def construct(config_path: str, text: str, build: Callable[[], Built]) -> Built:
    """Return `build()`, which calls Optuna; turn its refusals into one line."""
    from optuna.exceptions import ExperimentalWarning

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return build()
    except ImportError as error:
        package = error.name or "what Optuna names"
        wrong = (
            f"'{text}' needs a package that is not installed ({first_sentence(error)})"
        )
        raise MissingExtra(config_path, wrong, "", f"pip install {package}") from error
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            config_path, f"'{text}' is refused by Optuna ({first_sentence(error)})"
        ) from error


def construct_named(
    classes: Mapping[str, type], config_path: str, text: str, **defaults: Any
) -> Any:
    """Build one of several classes by the name and the arguments in the text."""
    name, arguments, options = parse_call(text)
    if not name and "(" in text:
        wrong = f"is '{text}', whose arguments cannot be read"
        raise ConfigError(
            config_path,
            wrong,
            "NAME or NAME(ARGUMENT=VALUE), where a text has quotes",
            "Correct them",
        )
    plain_names = {_plain(key): cls for key, cls in classes.items()}
    cls = plain_names.get(_plain(name))
    if cls is None:
        near = did_you_mean(text, classes) or "Choose one of them"
        raise ConfigError(
            config_path, f"is '{text}'", f"Allowed: {', '.join(classes)}", near
        )
    return construct(config_path, text, lambda: cls(*arguments, **options, **defaults))


def classes_of(module: Any, end: str) -> dict[str, type]:
    """Return the classes of a module whose names end alike, by short names.

    `SuccessiveHalvingPruner` is `successive_halving`, `NSGAIISampler` is `nsga2`.
    """
    roman = {"NSGAII": "nsga2", "NSGAIII": "nsga3"}
    classes = {}
    for name in module.__all__:
        if name.endswith(end) and not name.startswith(("Base", "Partial", "Brute")):
            short = re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removesuffix(end))
            classes[roman.get(short, short.lower())] = getattr(module, name)
    return classes


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
