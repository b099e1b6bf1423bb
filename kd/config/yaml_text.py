"""Read configurations as YAML text: files, kd's own examples, values of overrides, keys
as written.
"""

import io
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kd.config.interpolate import node_of
from kd.config.schema import Config
from kd.core.errors import ConfigError, did_you_mean, first_sentence
from kd.core.keys import fields_of

_ODD_KEY = re.compile(
    r"(?im)(?:^|[{,?\s])(?:y|n|yes|no|on|off|true|false|null|~|[-+.\d][-+.:\w]*)\s*:(?:\s|$)"
)
"""A key that YAML may not read as text."""
_ODD_NUMBER = re.compile(r"(?:\+\d|-?0[\w:]|-0|\d+[_:])[\w:]*(?=[\s,\]}#]|$)")
"""A whole number that its text does not show: octal 010, 2024_01_15, 1:30 in base 60,
+5.
"""


def examples() -> dict[str, Path]:
    """Return kd's own configurations by name. A wheel has them in the package, a
    checkout beside it.
    """
    package = Path(__file__).parents[1]
    folder = (
        package / "configs"
        if (package / "configs").is_dir()
        else package.parent / "configs"
    )
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def read_yaml(path: str | Path | dict[str, Any]) -> Any:
    """Return a YAML file, or its contents, as an OmegaConf node."""
    if isinstance(path, dict):
        return node_of(path)
    file = Path(path)
    own = examples() if file.name == str(path) and not file.suffix else {}
    if not file.is_file():
        file = own.get(file.name, file)
    if not file.is_file():
        here = (
            [p.name for p in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
        )
        near = did_you_mean(file.name, [*here, *own])
        allowed = (
            f"A YAML file is expected, or one of kd's own: {', '.join(examples())}"
        )
        raise ConfigError(str(path), "no such file", allowed, near or "Check the path")
    try:
        raw = OmegaConf.load(io.StringIO(as_written(file.read_text(encoding="utf-8"))))
    except OmegaConfBaseException as error:
        config_path = str(getattr(error, "full_key", None) or path)
        raise ConfigError(
            config_path, f"cannot be read: {first_sentence(str(error).splitlines()[0])}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            str(path), f"not readable as YAML: {first_sentence(error, 400)}"
        ) from error
    if not OmegaConf.is_dict(raw):
        raise ConfigError(
            str(path),
            "holds no sections",
            f"Allowed: {', '.join(fields_of(Config))}",
            "Add them",
        )
    return raw


def as_written(text: str) -> str:
    """Return YAML whose keys are read as text: a class may be called no, null, 1e3 or
    007.

    So are values such as 010, which YAML reads as 8, and 2024_01_15. Where a number
    belongs, text becomes one.
    """
    if not (_ODD_KEY.search(text) or _ODD_NUMBER.search(text)):
        return text
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.tag == "tag:yaml.org,2002:int" and _ODD_NUMBER.fullmatch(node.value):
            node.tag, node.style = "tag:yaml.org,2002:str", '"'
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if (
                isinstance(key, yaml.ScalarNode)
                and key.tag != "tag:yaml.org,2002:merge"
            ):
                key.tag, key.style = "tag:yaml.org,2002:str", '"'
            todo.append(value)
        todo += node.value if isinstance(node, yaml.SequenceNode) else ()
    return yaml.serialize(root)


SEPARATORS = ",|;:/\\&*#%@!?>-+=_.^`$"
"""Single characters that are taken as text; YAML takes some of them for syntax."""


def parse_value(override: str) -> Any:
    """Parse the value of `key=value` as YAML; references in it stay."""
    if override.endswith("=[]"):
        return []
    given = override.partition("=")[2]
    if len(given) == 1 and given in SEPARATORS:
        return given
    text = as_written(given)
    parsed: Any = OmegaConf.to_container(
        OmegaConf.from_dotlist([f"value={text}"]), resolve=False
    )
    return parsed["value"]
