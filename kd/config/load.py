"""Read YAML and overrides as one typed, checked `Config`, or raise all errors."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from kd.config.interpolate import resolve, unresolved
from kd.config.reads import resolved_task
from kd.config.refusals import with_new_errors
from kd.config.renamed import renamed_key, with_new_names
from kd.config.schema import BackendSection, Config, RunSection
from kd.config.validate import validate
from kd.config.yaml_text import parse_value, read_yaml
from kd.core.errors import ConfigError, ConfigErrors, KdError
from kd.core.references import Referenced, reference_or_value

CHECK = TypeAdapter(Config)


def load(
    path: str | Path | dict[str, Any],
    overrides: Sequence[str] = (),
    here: bool = True,
    cluster: bool = True,
) -> Config:
    """Read a configuration: schema default < YAML < overrides.

    `overrides` are `key=value` with a dotted key (`losses.0.weight=2`,
    `losses[0].weight=2`). `here`: require the packages that the configuration names;
    False for a run made on another machine. `cluster`: also require the cluster's
    address.
    """
    errors: list[KdError] = []
    plain = [override for override in overrides if not FACTOR.fullmatch(override)]
    # of each key, the last counts
    last = {override.partition("=")[0].lower(): override for override in overrides}
    factors = [
        factor for override in last.values() if (factor := FACTOR.fullmatch(override))
    ]
    raw = apply_overrides(read_yaml(path), plain, errors, warn=here)
    values = resolve(raw, errors, here)
    config: Any = None
    try:
        config = CHECK.validate_python(values)
    except ConfigErrors as error:
        errors = with_new_errors(errors, error.errors)
    if not errors:
        run = config.run
        if not run.name:
            stem = "run" if isinstance(path, dict) else Path(path).stem
            run = dataclasses.replace(run, name=stem)
        named = any(override.startswith("run.name=") for override in plain)
        run = lengthened(run, factors, named, errors)
        config = dataclasses.replace(config, run=run)
        try:
            backend = dataclasses.replace(
                config.backend, kind=BackendSection.present(config.backend.kind)
            )
            task = resolved_task(config.task, config.losses, config.data)
            config = dataclasses.replace(config, backend=backend, task=task)
            errors.extend(validate(config, here, cluster))
        except ConfigError as error:  # a part from outside that breaks its contract
            errors.append(error)
    if len(errors) == 1 and not isinstance(errors[0], ConfigError):
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)
    return config


def read(path: str | Path) -> dict[str, Any]:
    """Return the values of a configuration that may be wrong."""
    return resolve(apply_overrides(read_yaml(path), (), []), [], here=False)


def to_dict(config: Any, values: bool = False) -> Any:
    """Return a configuration as plain values, valid input for `load`.

    A part's options stand beside its `kind`.
    """
    if dataclasses.is_dataclass(config):
        keys = {
            field.name: to_dict(getattr(config, field.name), values)
            for field in dataclasses.fields(config)
        }
        options = keys.pop("options", None)
        return {**keys, **(options or {})}
    if isinstance(config, (list, tuple)):
        return [to_dict(item, values) for item in config]
    if isinstance(config, dict):
        return {key: to_dict(item, values) for key, item in config.items()}
    if values:
        return config
    if not isinstance(config, str) or isinstance(config, Referenced):
        return reference_or_value(config)
    return config.replace("${", "\\${")  # as YAML holds a text that is no reference


def dump(config: Config) -> str:
    """Return a configuration as YAML with every key and its references."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


# --------------------------------------------------------------------------------
# reading


def apply_overrides(
    raw: Any, overrides: Sequence[str], errors: list[KdError], warn: bool = False
) -> Any:
    """Return an OmegaConf node with the `key=value` overrides set.

    Dotted keys at its top are expanded first; old names are replaced. Errors are added
    to `errors`. `warn`: log one line for each old name of a key.
    """
    values: Any = with_new_names(unresolved(raw), "", errors, warn)
    dotted = {
        key: values.pop(key)
        for key in list(values)
        if isinstance(key, str) and "." in key
    }
    raw = OmegaConf.create(values)
    for key, value in dotted.items():
        _update(raw, key, lambda value=value: value, errors, warn)
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip(".[]"):
            errors.append(
                ConfigError(
                    override,
                    "not an override",
                    "Overrides read key=value",
                    "Add the `=value`",
                )
            )
            continue
        _update(raw, key, partial(parse_value, override), errors, warn)
    return raw


FACTOR = re.compile(r"(run\.(?:epochs|steps))=(\d+(?:\.\d+)?)x", re.IGNORECASE)


def lengthened(
    run: RunSection,
    factors: Sequence[re.Match[str]],
    named: bool,
    errors: list[KdError],
) -> RunSection:
    """Return the section with the factor of `run.epochs=3x` or `run.steps=3x`.

    The longer run is another run: unless an override names it, its name gets the
    factor, as in `food-3x`.
    """
    decides = "run.steps" if run.steps else "run.epochs"
    for factor in factors:
        key = factor[1].lower()
        times = factor[2]
        if key != decides or float(times) <= 0:
            wrong = f"is {times}x"
            if key != decides:
                wrong += f", but {decides} decides the length of this run"
            errors.append(
                ConfigError(
                    key, wrong, f"A factor above 0 of {decides}", f"Write {decides}=3x"
                )
            )
            continue
        name = run.name if named else f"{run.name}-{times}x"
        if isinstance(run.name, Referenced) and not named:
            name = Referenced(name, f"{run.name.reference}-{times}x")
        run = dataclasses.replace(run, times=run.times * float(times), name=name)
    return run


OF_ANY_STUDENT = ("attention", "compile", "tuning")
"""Keys of a student that control its training and apply to any network."""


def _update(
    raw: Any, key: str, value: Callable[[], Any], errors: list[KdError], warn: bool
) -> None:
    """Set a dotted key to a value that may be unreadable.

    A mapping is merged into the present one; `{}` empties it. If the override changes
    the student's network, only the keys `OF_ANY_STUDENT` are kept.
    """
    key = renamed_key(key, warn)
    try:
        new = with_new_names(value(), key, errors, warn)
        if key == "student" and isinstance(new, dict):
            old = unresolved(raw).get(key)
            if isinstance(old, dict) and _changes_network(old, new):
                raw[key] = {name: old[name] for name in OF_ANY_STUDENT if name in old}
        OmegaConf.update(raw, key, new, merge=new != {})
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", "") or str(error).splitlines()[0]
        errors.append(ConfigError(key, f"is not readable as YAML: {reason}"))
    except (OmegaConfBaseException, ValueError, IndexError, TypeError) as error:
        list_key = _list_on(raw, key)
        if list_key:
            count = len(OmegaConf.select(raw, list_key))
            wrong = f"cannot be set, because {list_key} is a list"
            allowed = f"Its items are counted from 0; it has {count}"
            remedy = f"Write {list_key}[0], or {list_key}=[...]"
            errors.append(ConfigError(key, wrong, allowed, remedy))
        else:
            wrong = f"cannot be overridden: {str(error).splitlines()[0]}"
            errors.append(ConfigError(key, wrong))


def _list_on(raw: Any, key: str) -> str:
    """Return the path of the list that a dotted key enters or replaces, or ""."""
    value = unresolved(raw)
    path = ""
    for name in re.split(r"[.\[]", key):
        value = value.get(name) if isinstance(value, dict) else None
        path = f"{path}.{name}".lstrip(".")
        if isinstance(value, list):
            return path
    return ""


def _changes_network(old: dict[str, Any], new: dict[str, Any]) -> bool:
    kind = old.get("kind", "timm")
    model = old.get("model", "")
    return new.get("kind", kind) != kind or new.get("model", model) != model
