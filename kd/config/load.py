"""Read YAML and overrides as one typed, checked `Config`, or raise all errors
at once.
"""

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

from kd.config.interpolate import resolve
from kd.config.reads import resolved_task
from kd.config.renamed import renamed, renamed_key
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
    others = [override for override in overrides if not FACTOR.fullmatch(override)]
    last = {
        override.partition("=")[0].lower(): override for override in overrides
    }  # of each key, the last counts
    factors = [
        factor for override in last.values() if (factor := FACTOR.fullmatch(override))
    ]
    raw = resolve(
        apply_overrides(read_yaml(path), others, errors, say=here), errors, here
    )
    config: Any = None
    try:
        config = CHECK.validate_python(raw)
    except ConfigErrors as error:
        told = {
            known.config_path for known in errors
        }  # such as a reference that leads nowhere
        errors.extend(other for other in error.errors if other.config_path not in told)
    if not errors:
        stem = "run" if isinstance(path, dict) else Path(path).stem
        run = (
            config.run
            if config.run.name
            else dataclasses.replace(config.run, name=stem)
        )
        run = lengthened(
            run,
            factors,
            any(override.startswith("run.name=") for override in others),
            errors,
        )
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
    if errors:
        raise (
            ConfigErrors(errors)
            if len(errors) > 1 or isinstance(errors[0], ConfigError)
            else errors[0]
        )
    return config


def read(path: str | Path) -> dict[str, Any]:
    """Return the values of a configuration that may be wrong, such as one that is being
    written.
    """
    return resolve(apply_overrides(read_yaml(path), (), []), [], here=False)


def to_dict(config: Any, values: bool = False) -> Any:
    """Return a configuration as plain values, with a part's options beside its `kind`;
    valid input for `load`.
    """
    if dataclasses.is_dataclass(config):
        found = {
            f.name: to_dict(getattr(config, f.name), values)
            for f in dataclasses.fields(config)
        }
        options = found.pop("options", None)
        return {**found, **(options or {})}
    if isinstance(config, (list, tuple)):
        return [to_dict(item, values) for item in config]
    if isinstance(config, dict):
        return {key: to_dict(item, values) for key, item in config.items()}
    if values or not isinstance(config, str) or isinstance(config, Referenced):
        return config if values else reference_or_value(config)
    return config.replace("${", "\\${")  # as YAML holds a text that is no reference


def dump(config: Config) -> str:
    """Return a configuration as YAML with every key; references to the environment
    stay.
    """
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


# --------------------------------------------------------------------------------
# reading


def apply_overrides(
    raw: Any, overrides: Sequence[str], errors: list[KdError], say: bool = False
) -> Any:
    """Return an OmegaConf node with the `key=value` overrides set. Dotted keys at its
    top are expanded first; old names are replaced.

    Errors are added to `errors`. `say`: log one line for each old name of a key.
    """
    values: Any = renamed(OmegaConf.to_container(raw, resolve=False), "", errors, say)
    dotted = {
        key: values.pop(key)
        for key in list(values)
        if isinstance(key, str) and "." in key
    }
    raw = OmegaConf.create(values)
    for key, value in dotted.items():
        _update(raw, key, lambda value=value: value, errors, say)
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
        _update(raw, key, partial(parse_value, override), errors, say)
    return raw


FACTOR = re.compile(r"(run\.(?:epochs|steps))=(\d+(?:\.\d+)?)x", re.IGNORECASE)


def lengthened(
    run: RunSection,
    factors: Sequence[re.Match[str]],
    named: bool,
    errors: list[KdError],
) -> RunSection:
    """Return the section with the factor of `run.epochs=3x` or `run.steps=3x`,
    whichever decides the length.

    The longer run is another run: unless an override names it, its name gets the
    factor, as in `food-3x`.
    """
    decides = "run.steps" if run.steps else "run.epochs"
    for factor in factors:
        key, times = factor[1].lower(), factor[2]
        if key != decides or float(times) <= 0:
            wrong = f"is {times}x" + (
                f", but {decides} decides the length of this run"
                if key != decides
                else ""
            )
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
    raw: Any, key: str, value: Callable[[], Any], errors: list[KdError], say: bool
) -> None:
    """Set a dotted key to a value that may be unreadable. A mapping is merged into the
    present one; `{}` empties it.

    If the override changes the student's network, only the keys `OF_ANY_STUDENT` are
    kept.
    """
    key = renamed_key(key, say)
    try:
        given = renamed(value(), key, errors, say)
        before = None
        if key == "student":
            unresolved: Any = OmegaConf.to_container(raw, resolve=False)
            before = unresolved.get(key)
        if (
            isinstance(given, dict)
            and isinstance(before, dict)
            and _other_network(before, given)
        ):
            raw[key] = {name: before[name] for name in OF_ANY_STUDENT if name in before}
        OmegaConf.update(raw, key, given, merge=given != {})
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", "") or str(error).splitlines()[0]
        errors.append(ConfigError(key, f"is not readable as YAML: {reason}"))
    except (OmegaConfBaseException, ValueError, IndexError, TypeError) as error:
        if entered := _list_on(raw, key):
            count = len(OmegaConf.select(raw, entered))
            wrong, remedy = (
                f"cannot be set, because {entered} is a list",
                f"Write {entered}[0], or {entered}=[...]",
            )
            errors.append(
                ConfigError(
                    key, wrong, f"Its items are counted from 0; it has {count}", remedy
                )
            )
        else:
            errors.append(
                ConfigError(key, f"cannot be overridden: {str(error).splitlines()[0]}")
            )


def _list_on(raw: Any, key: str) -> str:
    """Return the path of the list that a dotted key enters or replaces, or an empty
    text.
    """
    value, path = OmegaConf.to_container(raw, resolve=False), ""
    for name in re.split(r"[.\[]", key):
        value, path = (
            (value.get(name) if isinstance(value, dict) else None),
            f"{path}.{name}".lstrip("."),
        )
        if isinstance(value, list):
            return path
    return ""


def _other_network(before: dict[str, Any], given: dict[str, Any]) -> bool:
    kind, model = before.get("kind", "timm"), before.get("model", "")
    return (given.get("kind", kind), given.get("model", model)) != (kind, model)
