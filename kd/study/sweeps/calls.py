"""Read texts such as `percentile(25)`: the names and arguments of Optuna's samplers,
pruners and ranges.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kd.core.errors import ConfigError, MissingExtra, did_you_mean, first_sentence

Built = TypeVar("Built")


def call_of(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return name, arguments and keyword arguments of `name(1, key=2)` or of `name`;
    the name is "" for other texts.
    """
    match = re.fullmatch(r"(\w+)(\(.*\))?", text.strip())
    if match is None:
        return "", [], {}
    try:
        call = ast.parse(f"name{match[2] or '()'}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return "", [], {}
        options = {
            str(keyword.arg): ast.literal_eval(keyword.value)
            for keyword in call.keywords
        }
        return match[1], [ast.literal_eval(argument) for argument in call.args], options
    except (SyntaxError, ValueError):
        return "", [], {}


def constructed(config_path: str, text: str, build: Callable[[], Built]) -> Built:
    """Return `build()`, which calls Optuna; turn what it refuses, or lacks a package
    for, into one line.
    """
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


def named(classes: Mapping[str, type], config_path: str, text: str, **more: Any) -> Any:
    """Build one of several classes by its name in `classes` and the arguments in the
    text.
    """
    name, arguments, options = call_of(text)
    if not name and "(" in text:
        wrong = f"is '{text}', whose arguments cannot be read"
        raise ConfigError(
            config_path,
            wrong,
            "NAME or NAME(ARGUMENT=VALUE), where a text has quotes",
            "Correct them",
        )
    known = {_plain(key): cls for key, cls in classes.items()}
    if _plain(name) not in known:
        near = did_you_mean(text, classes) or "Choose one of them"
        raise ConfigError(
            config_path, f"is '{text}'", f"Allowed: {', '.join(classes)}", near
        )
    return constructed(
        config_path, text, lambda: known[_plain(name)](*arguments, **options, **more)
    )


def classes_of(module: Any, end: str) -> dict[str, type]:
    """Return the classes of a module whose names end alike, by short names:
    `SuccessiveHalvingPruner` is `successive_halving`, `NSGAIISampler` is `nsga2`.
    """
    names = [
        name
        for name in module.__all__
        if name.endswith(end) and not name.startswith(("Base", "Partial", "Brute"))
    ]
    short = {
        re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removesuffix(end)): name
        for name in names
    }
    roman = {"NSGAII": "nsga2", "NSGAIII": "nsga3"}
    return {
        roman.get(key, key.lower()): getattr(module, name)
        for key, name in short.items()
    }


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
