"""Open the folder of a run for writing: what it was started with must be what goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kd import config
from kd.artifacts.run_dir import RunDir
from kd.errors import RunError
from kd.references import written
from kd.setup.finished import parse
from kd.setup.fit import FREE
from kd.setup.recipe import Record, flatten, hashes


@contextmanager
def open_run(record: Record, rank: int) -> Iterator[RunDir]:
    """Open the folder of a run and close it again; refuse one that holds another run, naming the keys that differ."""
    folder = RunDir(record.path, rank, record.keep, record.mirror)
    folder.restore_copy()
    stored = folder.stored_config()
    differences = different_keys(stored_keys(folder, stored), record.keys) if stored is not None else []
    folder.open(record.yaml, [*differences, *changed_values(stored or "", record)])
    try:
        yield folder
        folder.complete_copy()
    finally:
        folder.close()


def stored_keys(folder: RunDir, text: str) -> dict[str, Any]:
    """Return a stored configuration as {"section.key": value}."""
    return flatten(config.to_dict(parse(folder, text, trust=True), values=True))


def different_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List `key (stored -> now)` wherever two configurations compute different things."""
    keys = [k for k in sorted(old.keys() | new.keys()) if not k.startswith(FREE)]
    return [f"{k} ({written(old.get(k))} -> {written(new.get(k))})" for k in keys if old.get(k) != new.get(k)]


def changed_values(stored: str, record: Record) -> list[str]:
    """List the keys whose value from the environment is not the one that the run began with."""
    lines = [line.split() for line in stored.splitlines() if line.startswith("# sha256 ")]
    old, new = {key: text for _, _, key, text in lines}, hashes(record.keys)
    changed = [key for key in sorted(old.keys() & new.keys()) if old[key] != new[key] and not key.startswith(FREE)]
    return [f"{key} (another value of {record.shown[key]})" for key in changed]


def require_same(key: str, known: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to go on with a run on other data or with another teacher."""
    if key in known and key in facts and known[key] != facts[key]:
        raise RunError(
            "run.name",
            f"this run was started with another {key} (its content hash differs)",
            "A run goes on with what it began with",
            "Choose another run.name, or restore what was there",
        )
