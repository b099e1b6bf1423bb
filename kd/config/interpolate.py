"""Resolve `${...}` in a configuration; values of the environment keep the reference."""

import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from kd.core.errors import ConfigError, KdError
from kd.core.references import Referenced

_KEY = re.compile(r"(?<!\\)\$\{([A-Za-z_][\w.\[\]-]*)\}")
"""A reference to another key of the configuration."""
DEEPEST = 20
"""Largest depth of references to references; a deeper chain is circular."""


def node_of(values: dict[str, Any]) -> Any:
    """Return plain values as an OmegaConf node.

    Raises:
        ConfigError: They hold what YAML cannot.
    """
    try:
        return OmegaConf.create(values)
    except OmegaConfBaseException as error:
        config_path = str(getattr(error, "full_key", None) or "configuration")
        raise ConfigError(
            config_path, f"cannot be read: {str(error).splitlines()[0]}"
        ) from error


def unresolved(node: Any) -> Any:
    """Return an OmegaConf node as plain values with their references."""
    return OmegaConf.to_container(node, resolve=False)


def resolve(raw: Any, errors: list[KdError], here: bool = True) -> Any:
    """Return an OmegaConf node as plain values.

    Texts from a resolver (`oc.env`) become `Referenced`. A dangling reference is an
    error. With `here=False` it is left unresolved: the run was made on another machine.
    """
    return _Resolver(raw, errors, here).container(raw, unresolved(raw), "")


class _Resolver:
    """Walk over a configuration; `config_path` is a node's path, for messages."""

    def __init__(self, root: Any, errors: list[KdError], here: bool) -> None:
        self.root = root
        self.errors = errors
        self.here = here

    def container(self, node: Any, texts: Any, config_path: str) -> Any:
        if OmegaConf.is_list(node):
            return [
                self.value(node, i, texts[i], f"{config_path}[{i}]")
                for i in range(len(node))
            ]
        prefix = f"{config_path}." if config_path else ""
        return {
            key: self.value(node, key, texts[key], f"{prefix}{key}") for key in node
        }

    def value(self, node: Any, key: Any, text: Any, config_path: str) -> Any:
        if text == "???":  # OmegaConf's word for a missing value
            self.errors.append(
                ConfigError(
                    config_path,
                    "is ???, which stands for a missing value",
                    "",
                    "Write the value",
                )
            )
        if not OmegaConf.is_interpolation(node, key):
            if isinstance(text, (dict, list)):
                return self.container(node[key], text, config_path)
            return text
        try:
            value = node[key]
            reference = _expand(text, self.root)
        except (OmegaConfBaseException, RecursionError) as error:
            if self.here:
                self.errors.append(_dangling(config_path, text, error))
            return Referenced(text, text)
        section = isinstance(value, (dict, list)) or OmegaConf.is_config(value)
        if section and "${" in reference:
            wrong = f"'{text}' stands for a whole section"
            allowed = "A reference to the environment stands for one value"
            self.errors.append(ConfigError(config_path, wrong, allowed, "Write it"))
        elif section:
            return self.container(value, unresolved(value), config_path)
        if isinstance(value, str) and "${" in reference:
            return Referenced(value, reference)
        return value


def _dangling(config_path: str, text: str, error: Exception) -> ConfigError:
    """Return the error of a reference that leads nowhere."""
    if isinstance(error, RecursionError):
        return ConfigError(config_path, f"is {text!r}, which refers to itself")
    absent = [key for key in _KEY.findall(text) if f"'{key}'" in str(error)]
    if isinstance(error, InterpolationKeyError) and absent:
        wrong = f"is {text!r}, but this configuration does not set {absent[0]}"
        return ConfigError(
            config_path,
            wrong,
            "Keys that it sets, and ${oc.env:NAME}",
            f"Write {absent[0]} too",
        )
    # the exception of `oc.env` is quoted
    line, _, quoted = str(error).splitlines()[0].partition("resolving interpolation: ")
    reason = (quoted or line).strip('"')
    return ConfigError(
        config_path,
        f"is {text!r}: {reason}",
        "Keys that the configuration sets, and ${oc.env:NAME}",
    )


def _expand(text: str, root: Any, depth: int = 0) -> str:
    """Replace references to other keys by their text; those to the environment stay."""
    if depth > DEEPEST:
        raise RecursionError
    return _KEY.sub(lambda match: _target(match[0], match[1], root, depth), text)


def _target(text: str, key: str, root: Any, depth: int) -> str:
    node = root
    steps = re.findall(r"[^.\[\]]+", key)
    for step in steps[:-1]:
        node = node[int(step) if OmegaConf.is_list(node) else step]
    last = int(steps[-1]) if OmegaConf.is_list(node) else steps[-1]
    if not OmegaConf.is_config(node):
        return text
    if OmegaConf.is_interpolation(node, last):
        return _expand(unresolved(node)[last], root, depth + 1)
    return str(node[last])
