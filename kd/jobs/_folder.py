"""A run folder and the configuration it was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kd import config
from kd.artifacts.run_dir import RunDir
from kd.config import Config
from kd.errors import KdError, RunError

# Keys that may differ when a run is entered again: they change what is shown and how fast, not what is computed.
# Where the data lies is one of them: its content is compared by its fingerprint.
FREE = (
    "run.name",
    "run.folder",
    "run.keep",
    "run.trackers",
    "run.every.",
    "data.root",
    "data.workers",
    "data.eval_batch",
    "teacher.shard",
    "teacher.pipeline",
    "backend.timeout_seconds",
    "teacher.cache.path",
)


def enter(folder: RunDir, settings: Config) -> None:
    """Open a run folder for this configuration, or say what differs."""
    stored = folder.stored_config()
    differences = different_keys(_parse(folder, stored), settings) if stored is not None else []
    folder.open(config.dump(settings), differences)


def opened_run(path: Path) -> tuple[RunDir, Config]:
    """Open a finished or interrupted run folder for reading.

    Raises:
        RunError: it is not a run folder.
    """
    folder = RunDir(path)
    stored = folder.stored_config()
    if stored is None:
        remedy = "Point at runs/NAME, the folder that `kd-train` wrote"
        raise RunError("run", f"'{path}' is not a run folder: it has no config.yaml", "", remedy)
    return folder, _parse(folder, stored)


def _parse(folder: RunDir, text: str) -> Config:
    """Load a stored configuration.

    Raises:
        RunError: it was changed by hand, or by another version of kd.
    """
    try:
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
        return config.load(content if isinstance(content, dict) else {})
    except (YAMLError, OmegaConfBaseException, KdError) as error:
        reason = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
        remedy = "Restore it, or choose another run.name"
        raise RunError(
            "run.name", f"'{folder.config_file}' is not the config of a run: {reason}", "", remedy
        ) from error


def different_keys(stored: Config, settings: Config) -> list[str]:
    """List `key (stored -> now)` wherever two configurations compute different things."""
    old, new = flatten(config.to_dict(stored)), flatten(config.to_dict(settings))
    keys = [k for k in sorted(old.keys() | new.keys()) if not k.startswith(FREE)]
    return [f"{k} ({old.get(k)} -> {new.get(k)})" for k in keys if old.get(k) != new.get(k)]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as {"section.key": value}."""
    if isinstance(value, dict) and value:
        pairs = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(f"{prefix}.{i}", item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    return {name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()}


def require_same(key: str, known: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to go on with a run on other data or with another teacher."""
    if key in known and key in facts and known[key] != facts[key]:
        raise RunError(
            "run.name",
            f"this run was started with another {key} (its content hash differs)",
            "A run goes on with what it began with",
            "Choose another run.name, or restore what was there",
        )
