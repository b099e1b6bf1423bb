"""Read YAML and overrides as one typed, checked `Config`, or raise all errors at once."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kd.config.interpolate import resolve
from kd.config.reads import resolved_task
from kd.config.renamed import renamed, renamed_key
from kd.config.schema import BackendSection, Config, RunSection
from kd.config.tuning import allows, section_of, types_of
from kd.config.validate import validate
from kd.config.yaml_text import parse_value, read_yaml
from kd.core.errors import ConfigError, ConfigErrors, KdError, did_you_mean
from kd.core.references import Referenced, written
from kd.parts import registry


def load(
    path: str | Path | dict[str, Any], overrides: Sequence[str] = (), here: bool = True, cluster: bool = True
) -> Config:
    """Read a configuration: schema default < YAML < overrides.

    `overrides` are `key=value` with a dotted key (`losses.0.weight=2`, `losses[0].weight=2`). `here`: require the
    packages that the configuration names; False for a run made on another machine. `cluster`: also require the
    cluster's address.
    """
    errors: list[KdError] = []
    factors = [factor for override in overrides if (factor := FACTOR.fullmatch(override))]
    others = [override for override in overrides if not FACTOR.fullmatch(override)]
    raw = resolve(apply_overrides(read_yaml(path), others, errors, say=here), errors, here)
    config = _fill(Config, raw, "", errors)
    if not errors:
        stem = "run" if isinstance(path, dict) else Path(path).stem
        run = config.run if config.run.name else dataclasses.replace(config.run, name=stem)
        run = lengthened(run, factors, any(override.startswith("run.name=") for override in others), errors)
        config = dataclasses.replace(config, run=run)
        try:
            config = dataclasses.replace(config, task=resolved_task(config.task, config.losses, config.data))
            errors.extend(validate(config, here, cluster))
        except ConfigError as error:  # a part from outside that breaks its contract
            errors.append(error)
    if errors:
        raise ConfigErrors(errors) if len(errors) > 1 or isinstance(errors[0], ConfigError) else errors[0]
    return config


def to_dict(config: Any, values: bool = False) -> Any:
    """Return a configuration as plain values, with a part's options beside its `kind`; valid input for `load`."""
    if dataclasses.is_dataclass(config):
        found = {f.name: to_dict(getattr(config, f.name), values) for f in dataclasses.fields(config)}
        options = found.pop("options", None)
        return {**found, **(options or {})}
    if isinstance(config, (list, tuple)):
        return [to_dict(item, values) for item in config]
    if isinstance(config, dict):
        return {key: to_dict(item, values) for key, item in config.items()}
    return config if values else written(config)


def dump(config: Config) -> str:
    """Return a configuration as YAML with every key; references to the environment stay."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


# ---------------------------------------------------------------------------------------------------- reading


def apply_overrides(raw: Any, overrides: Sequence[str], errors: list[KdError], say: bool = False) -> Any:
    """Return an OmegaConf node with the `key=value` overrides set. Dotted keys at its top are expanded first; old names
    are replaced.

    Errors are added to `errors`. `say`: log one line for each old name of a key.
    """
    values: Any = renamed(OmegaConf.to_container(raw, resolve=False), "", errors, say)
    dotted = {key: values.pop(key) for key in list(values) if isinstance(key, str) and "." in key}
    raw = OmegaConf.create(values)
    for key, value in dotted.items():
        _update(raw, key, lambda value=value: value, errors, say)
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            errors.append(ConfigError(override, "not an override", "Overrides read key=value", "Add the `=value`"))
            continue
        _update(raw, key, partial(parse_value, override), errors, say)
    return raw


FACTOR = re.compile(r"(run\.(?:epochs|steps))=(\d+(?:\.\d+)?)x", re.IGNORECASE)


def lengthened(run: RunSection, factors: Sequence[re.Match[str]], named: bool, errors: list[KdError]) -> RunSection:
    """Return the section with the factor of `run.epochs=3x` or `run.steps=3x`, whichever decides the length.

    The longer run is another run: unless an override names it, its name gets the factor, as in `food-3x`.
    """
    decides = "run.steps" if run.steps else "run.epochs"
    for factor in factors:
        key, times = factor[1].lower(), factor[2]
        if key != decides or float(times) <= 0:
            wrong = f"is {times}x" + (f", but {decides} decides the length of this run" if key != decides else "")
            errors.append(ConfigError(key, wrong, f"A factor above 0 of {decides}", f"Write {decides}=3x"))
            continue
        name = run.name if named else f"{run.name}-{times}x"
        if isinstance(run.name, Referenced) and not named:
            name = Referenced(name, f"{run.name.reference}-{times}x")
        run = dataclasses.replace(run, times=run.times * float(times), name=name)
    return run


OF_ANY_STUDENT = ("attention", "compile", "tuning")
"""Keys of a student that control its training and apply to any network."""


def _update(raw: Any, key: str, value: Callable[[], Any], errors: list[KdError], say: bool) -> None:
    """Set a dotted key to a value that may be unreadable. A mapping is merged into the present one; `{}` empties it.

    If the override changes the student's network, only the keys `OF_ANY_STUDENT` are kept.
    """
    key = renamed_key(key, say)
    try:
        given = renamed(value(), key, errors, say)
        before = OmegaConf.to_container(raw, resolve=False).get(key) if key == "student" else None  # type: ignore
        if isinstance(given, dict) and isinstance(before, dict) and _other_network(before, given):
            raw[key] = {name: before[name] for name in OF_ANY_STUDENT if name in before}
        OmegaConf.update(raw, key, given, merge=given != {})
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, IndexError, TypeError) as error:
        reason = str(error).splitlines()[0]
        errors.append(ConfigError(key, f"cannot be overridden: {reason}", "", "See `kd-train --help-keys`"))


def _other_network(before: dict[str, Any], given: dict[str, Any]) -> bool:
    kind, model = before.get("kind", "timm"), before.get("model", "")
    return (given.get("kind", kind), given.get("model", model)) != (kind, model)


# --------------------------------------------------------------------------------------------------- checking


def _fill(cls: type, raw: Any, where: str, errors: list[KdError]) -> Any:
    """Build `cls` from plain values, adding errors to `errors` instead of stopping."""
    if not isinstance(raw, dict):
        errors.append(ConfigError(where, f"is {raw!r}", f"A section with keys is expected: {', '.join(types_of(cls))}"))
        return None
    annotations, values, foreign = types_of(cls), {}, {}
    part_type = _part_options(cls, raw, where, errors)
    part_types = types_of(part_type) if part_type else {}
    absent = {key: {} for key, annotation in annotations.items() if dataclasses.is_dataclass(annotation)}
    for key, value in {**absent, **raw}.items():
        path = f"{where}.{key}" if where else str(key)
        if key in annotations:
            values[key] = _value(cls, key, annotations[key], value, path, errors)
        elif part_type is not None and key in part_types:
            foreign[key] = _value(part_type, key, part_types[key], value, path, errors)
        elif part_type is not None or not any("parts" in f.metadata for f in dataclasses.fields(cls)):
            known = [*annotations, *part_types]
            remedy = did_you_mean(str(key), known) or "Remove it"
            errors.append(ConfigError(path, "no such key", f"Allowed: {', '.join(sorted(known))}", remedy))
    if part_type is not None:
        values["options"] = _construct(part_type, foreign, where, errors)
    if cls is BackendSection and raw.get("kind", "auto") == "auto":
        values["kind"] = _auto_backend()
    return _construct(cls, values, where, errors)


def _construct(cls: type, values: dict[str, Any], where: str, errors: list[KdError]) -> Any:
    """Build a dataclass from checked values; its own __post_init__ may still refuse them."""
    if any(value is _INVALID for value in values.values()):
        return None
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        errors.extend(ConfigError(f"{where}.{name}", "is missing", allows(cls, name), "Add it") for name in missing)
        return None
    try:
        return cls(**values)
    except ValueError as error:
        errors.append(ConfigError(where, str(error), "", "Change the value"))
        return None


_INVALID = object()


def _value(cls: type, key: str, annotation: Any, value: Any, where: str, errors: list[KdError]) -> Any:
    """Convert and check one value; return `_INVALID` after adding an error."""
    if (section := section_of(annotation)) and (value is not None or section is annotation):
        before = len(errors)
        filled = _fill(section, value, where, errors)
        return _INVALID if len(errors) > before else filled
    if get_origin(annotation) is tuple and dataclasses.is_dataclass(get_args(annotation)[0]):
        if not isinstance(value, list):
            errors.append(ConfigError(where, f"is {value!r}", "A list of sections is expected", "Start each with '- '"))
            return _INVALID
        item, before = get_args(annotation)[0], len(errors)
        filled = tuple(_fill(item, entry, f"{where}[{i}]", errors) for i, entry in enumerate(value))
        return _INVALID if len(errors) > before else filled
    value = _as_written(annotation, value)
    try:
        if _fits(annotation, value):
            converted = value
        else:  # a schema of this key alone: merging into the whole section's takes ten times as long
            node: Any = OmegaConf.merge(OmegaConf.structured(_alone(cls, key)), {key: _plain(value)}).get(key)  # type: ignore
            converted = OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
    except (OmegaConfBaseException, TypeError):  # a section in place of a list is a TypeError
        errors.append(ConfigError(where, f"is {value!r}", allows(cls, key), "Change the value"))
        return _INVALID
    if annotation is str and isinstance(value, bool):
        errors.append(ConfigError(where, f"is {value!r}: YAML reads a bare no or off as a boolean", "Text", "Quote it"))
        return _INVALID
    bounds = allows(cls, key) if _too_lenient(annotation, value, converted) else _out_of_range(cls, key, converted)
    if bounds:
        errors.append(ConfigError(where, f"is {value!r}", bounds, "Change the value"))
        return _INVALID
    return converted if key == "kind" or get_origin(annotation) is Literal else _referenced(value, converted)


def _fits(annotation: Any, value: Any) -> bool:
    """Return whether OmegaConf would return the value unchanged; it interprets dollars and question marks."""
    if type(value) is str and not {"$", "?"}.isdisjoint(value):
        return False
    if get_origin(annotation) is Literal:
        return type(value) is str and value in get_args(annotation)
    return type(value) is annotation and annotation in (bool, int, float, str)


@cache
def _alone(cls: type, key: str) -> type:
    """Return a dataclass with a single field of another one."""
    return dataclasses.make_dataclass("Alone", [(key, types_of(cls)[key], dataclasses.field(default=MISSING))])


def _plain(value: Any) -> Any:
    """Return a value without its references, as OmegaConf takes it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    # A value that looks like a reference is text: it came from an environment variable or a recorded run.
    return value.replace("${", "\\${") if isinstance(value, Referenced) else value


def _referenced(value: Any, converted: Any) -> Any:
    """Return the converted value with the references of its texts. Numbers and enumerated words need no reference."""
    if isinstance(value, dict) and isinstance(converted, dict):
        return {key: _referenced(value.get(key), item) for key, item in converted.items()}
    if isinstance(value, list) and isinstance(converted, (list, tuple)):
        return type(converted)(_referenced(*pair) for pair in zip(value, converted, strict=True))
    if isinstance(value, Referenced) and isinstance(converted, str):
        return Referenced(converted, value.reference)
    return converted


def _as_written(annotation: Any, value: Any) -> Any:
    """Return the word that YAML parsed as another type: an empty value (`key=`, `key:`) or a bare `off` (false)."""
    if value is None and annotation is str:
        return ""
    if isinstance(value, bool) and get_origin(annotation) is Literal:
        word = "on" if value else "off"
        return word if word in get_args(annotation) else value
    return value


def _too_lenient(annotation: Any, value: Any, converted: Any) -> bool:
    """Return whether OmegaConf accepted a wrong type: a number as a boolean, a list in a list, any value as text."""
    if annotation == int | str:
        return isinstance(value, bool) or (isinstance(converted, str) and converted != "auto")
    if annotation is bool:
        return not isinstance(value, bool)
    if get_origin(annotation) is tuple:
        return not all(isinstance(item, get_args(annotation)[0]) for item in converted)
    return False


def _out_of_range(cls: type, key: str, value: Any) -> str:
    metadata = next(f for f in dataclasses.fields(cls) if f.name == key).metadata
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return ""
    low, high, above, below = (metadata.get(name) for name in ("low", "high", "above", "below"))
    wrong = not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high)
    wrong = wrong or (above is not None and value <= above) or (below is not None and value >= below)
    return allows(cls, key) if wrong else ""


def _part_options(cls: type, raw: dict[str, Any], where: str, errors: list[KdError]) -> type | None:
    """Return the Options type of a section's `kind`, or None if the section is not a part."""
    field = next((f for f in dataclasses.fields(cls) if f.name == "kind" and "parts" in f.metadata), None)
    if field is None:
        return None
    kind, folder = raw.get("kind", field.default), field.metadata["parts"]
    if kind == "auto" and folder in ("backends", "tasks"):  # the losses choose the task; kd's have no options
        kind = _auto_backend() if folder == "backends" else registry.names(folder)[0]
    try:
        if not isinstance(kind, str) or not kind:
            allowed = f"Allowed: {', '.join(registry.names(folder))}"
            raise ConfigError(f"{where}.kind", "is missing" if not kind else f"is {kind!r}", allowed, "Set it")
        return registry.options_type(folder, kind, f"{where}.kind")
    except KdError as error:
        errors.append(error)
        return None


def _auto_backend() -> str:
    import torch  # a slow import, needed only for `auto`

    return "cuda" if torch.cuda.is_available() else "cpu"
