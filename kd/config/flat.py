"""Write a configuration as `key=value` texts, to pass it to another machine."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from kd.config.interpolate import unresolved
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
    values = unresolved(raw)
    load(values, here=False)
    return {"run.name": _text(Path(path).stem), **dict(_leaves(values, ""))}


def plain(path: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return a YAML file, or given contents, as plain values with the run's name.

    References stay.
    """
    values = unresolved(read_yaml(path))
    run = values.get("run") or {}
    # `load` reports what else than a section is there
    if isinstance(run, dict) and not isinstance(path, dict):
        run = {"name": Path(path).stem, **run}
    return {**values, "run": run}


def alternatives(override: str) -> list[str]:
    """Return the texts that `key=a,b,c` lists.

    A comma inside brackets, quotes or `${...}` does not separate.
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
    """Yield the keys below a section whose values name files that the run reads."""
    # see `kd.core.keys.file_key`
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        key = f"{config_path}.{name}".lstrip(".")
        declared = declaration(field)
        if "files" in declared and value:
            folder = declared["files"]
            within = folder and f"{config_path}.{folder}"
            yield FileKey(key, reference_or_value(value), within, declared["or_name"])
        elif is_dataclass(value):
            yield from file_keys(value, config_path if name == "options" else key)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                if is_dataclass(item):
                    yield from file_keys(item, f"{key}.{number}")


def _leaves(value: Any, config_path: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each value; a list is one value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(
                inner, f"{config_path}.{key}" if config_path else str(key)
            )
    else:
        yield config_path, _text(value)


def _text(value: Any) -> str:
    """Return the text behind `key=`, bare if that parses to the value, else as YAML."""
    candidates = [value] if isinstance(value, str) else []
    candidates += [
        json.dumps(value),
        yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).strip(),
    ]
    for text in candidates:
        try:
            parsed = parse_value(f"key={text}")
        except (OmegaConfBaseException, yaml.YAMLError):
            continue
        if type(parsed) is type(value) and parsed == value:
            return text
    raise AssertionError(f"{value!r} cannot be written as text")
