"""Write a configuration as `key=value` texts, for a launcher that passes it to another
machine.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kd.config.load import apply_overrides, load
from kd.config.yaml_text import parse_value, read_yaml
from kd.core.errors import ConfigError, ConfigErrors, KdError
from kd.core.facts import FileKey
from kd.core.keys import declaration, fields_of
from kd.core.references import reference_or_value


def flat(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return only the keys that a configuration sets, as {"section.key": text}.

    `load({}, ["key=text", ...])` gives the same configuration. References to the
    environment and to other keys stay. `run.name` is always among the keys.
    """
    errors: list[KdError] = []
    raw = apply_overrides(read_yaml(path), overrides, errors)
    if errors:
        raise ConfigErrors(errors)
    plain: Any = OmegaConf.to_container(raw, resolve=False)
    load(plain, here=False)
    return {"run.name": _text(Path(path).stem), **dict(_leaves(plain, ""))}


def plain(path: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a YAML file, or a copy of given contents, with the name of
    the run; references stay.
    """
    found: Any = OmegaConf.to_container(read_yaml(path), resolve=False)
    own = {} if isinstance(path, dict) else {"name": Path(path).stem}
    run = found.get("run") or {}
    return {
        **found,
        "run": {**own, **run} if isinstance(run, dict) else run,
    }  # `load` reports what is allowed


def alternatives(override: str) -> list[str]:
    """Return the texts that `key=a,b,c` lists. A comma inside brackets, quotes or
    `${...}` does not separate.
    """
    key, _, text = override.partition("=")
    if "," not in text or "${" in text:
        return [text]
    try:
        values = parse_value(f"{key}=[{text}]")
        texts = [_text(value) for value in values]
    except (OmegaConfBaseException, yaml.YAMLError):
        texts = []
    if not texts or text.endswith(",") or len(set(texts)) < len(texts):
        wrong = f"lists '{text}', where a value is missing or repeated"
        raise ConfigError(
            key, wrong, "Different values with a comma between two", "Correct the list"
        )
    return texts if len(texts) > 1 else [text]


def file_keys(section: Any, config_path: str = "") -> Iterator[FileKey]:
    """Yield the keys below a section whose values name files that the run reads (see
    `kd.core.keys.file_key`).
    """
    for name, field in fields_of(type(section)).items():
        value, key, declared = (
            getattr(section, name),
            f"{config_path}.{name}".lstrip("."),
            declaration(field),
        )
        if "files" in declared and value:
            folder = declared["files"]
            yield FileKey(
                key,
                reference_or_value(value),
                folder and f"{config_path}.{folder}",
                declared["or_name"],
            )
        elif is_dataclass(value):
            yield from file_keys(value, config_path if name == "options" else key)
        elif isinstance(value, tuple):
            items = [
                (number, item)
                for number, item in enumerate(value)
                if is_dataclass(item)
            ]
            yield from (
                found
                for number, item in items
                for found in file_keys(item, f"{key}.{number}")
            )


def _leaves(value: Any, config_path: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each value. A list is one value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(
                inner, f"{config_path}.{key}" if config_path else str(key)
            )
    else:
        yield config_path, _text(value)


def _text(value: Any) -> str:
    """Return the text behind `key=`: bare if it parses to the same value, else as JSON
    or YAML.
    """
    candidates = [value] if isinstance(value, str) else []
    candidates += [
        json.dumps(value),
        yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).strip(),
    ]
    for text in candidates:
        try:
            read = parse_value(f"key={text}")
        except (OmegaConfBaseException, yaml.YAMLError):
            continue
        if type(read) is type(value) and read == value:
            return text
    raise AssertionError(f"{value!r} cannot be written as text")
