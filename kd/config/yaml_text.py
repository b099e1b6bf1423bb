"""Read YAML text of configurations: files, kd's own examples, values of overrides."""

import io
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kd.config.interpolate import node_of, unresolved
from kd.config.schema import Config
from kd.core.errors import ConfigError, did_you_mean, first_sentence
from kd.core.keys import fields_of

_ODD_KEY = re.compile(
    r"(?im)(?:^|[{,?\s])(?:y|n|yes|no|on|off|true|false|null|~|[-+.\d][-+.:\w]*)\s*:(?:\s|$)"
)
"""A key that YAML may not read as text."""
_ODD_NUMBER = re.compile(r"(?:\+\d|-?0[\w:]|-0|\d+[_:])[\w:]*(?=[\s,\]}#]|$)")
"""A whole number unlike its text, such as octal 010, 2024_01_15, +5, 1:30 (base 60)."""


_TAG = "tag:yaml.org,2002:"


def examples() -> dict[str, Path]:
    """Return kd's own configurations by name."""
    package = Path(__file__).parents[1]
    folder = package / "configs"
    if not folder.is_dir():  # a checkout has them beside the package, a wheel in it
        folder = package.parent / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def read_yaml(path: str | Path | dict[str, Any]) -> Any:
    """Return a YAML file, or its contents, as an OmegaConf node."""
    if isinstance(path, dict):
        return node_of(path)
    file = Path(path)
    configs = examples() if file.name == str(path) and not file.suffix else {}
    if not file.is_file():
        file = configs.get(file.name, file)
    if not file.is_file():
        neighbours = [neighbour.name for neighbour in file.parent.glob("*.yaml")]
        near = did_you_mean(file.name, [*neighbours, *configs])
        allowed = (
            f"A YAML file is expected, or one of kd's own: {', '.join(examples())}"
        )
        raise ConfigError(str(path), "no such file", allowed, near or "Check the path")
    try:
        raw = OmegaConf.load(io.StringIO(as_written(file.read_text(encoding="utf-8"))))
    except OmegaConfBaseException as error:
        config_path = str(getattr(error, "full_key", None) or path)
        wrong = f"cannot be read: {first_sentence(str(error).splitlines()[0])}"
        raise ConfigError(config_path, wrong) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        wrong = f"not readable as YAML: {first_sentence(error, 400)}"
        raise ConfigError(str(path), wrong) from error
    if not OmegaConf.is_dict(raw):
        raise ConfigError(
            str(path),
            "holds no sections",
            f"Allowed: {', '.join(fields_of(Config))}",
            "Add them",
        )
    return raw


def as_written(text: str) -> str:
    """Return YAML whose keys are read as text.

    A class may be called no, null, 1e3 or 007. Values such as 010, which YAML reads as
    8, and 2024_01_15 are read as text too. Where a number belongs, text becomes one.
    """
    if not (_ODD_KEY.search(text) or _ODD_NUMBER.search(text)):
        return text
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    nodes = [root]
    visited: set[int] = set()
    while nodes:
        node = nodes.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if node.tag == f"{_TAG}int" and _ODD_NUMBER.fullmatch(node.value):
            _make_text(node)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                    _make_text(key)
                nodes.append(value)
    return yaml.serialize(root)


def _make_text(node: yaml.ScalarNode) -> None:
    node.tag = f"{_TAG}str"
    node.style = '"'


SEPARATORS = ",|;:/\\&*#%@!?>-+=_.^`$"
"""Single characters that are taken as text; YAML takes some of them for syntax."""


def parse_value(override: str) -> Any:
    """Parse the value of `key=value` as YAML; references in it stay."""
    if override.endswith("=[]"):
        return []
    text = override.partition("=")[2]
    if len(text) == 1 and text in SEPARATORS:
        return text
    node = OmegaConf.from_dotlist([f"value={as_written(text)}"])
    return unresolved(node)["value"]
