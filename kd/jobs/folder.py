"""Open the folder of a run for writing; refuse to resume with another configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kd import config
from kd.core.errors import RunError
from kd.core.references import written
from kd.files.run_dir import RunDir
from kd.setup.recipe import FREE, Record, flatten


@contextmanager
def open_run(record: Record, rank: int) -> Iterator[RunDir]:
    """Open the folder of a run and close it again; refuse one that holds another run, naming the keys that differ."""
    folder = RunDir(record.path, rank, record.keep)
    try:
        stored = folder.stored_config()
        folder.open(record.yaml, differences(folder.config_file, stored, record) if stored is not None else [])
        yield folder
    finally:
        folder.close()


def differences(file: Path | str, text: str, record: Record) -> list[str]:
    """List the keys in which a stored configuration computes something else."""
    from kd.study.finished import parse  # only where a folder holds a run

    stored = flatten(config.to_dict(parse(file, text, trust=True), values=True))
    return different_keys(stored, record.keys)


def different_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List `key (stored -> now)` wherever two configurations compute different things."""
    keys = [k for k in sorted(old.keys() | new.keys()) if not k.startswith(FREE)]
    return [f"{k} ({written(old.get(k))} -> {written(new.get(k))})" for k in keys if old.get(k) != new.get(k)]


def require_same(key: str, known: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to go on with a run on other data or with another teacher."""
    if key in known and key in facts and known[key] != facts[key]:
        wrong = f"this run was started with another {key} (its content hash differs)"
        allowed = "A run goes on with what it began with"
        raise RunError("run.name", wrong, allowed, "Choose another run.name, or restore what was there")
