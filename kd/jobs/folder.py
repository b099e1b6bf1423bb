"""Open the folder of a run for writing: what it was started with must be what goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kd import config
from kd.core.errors import RunError
from kd.core.references import written
from kd.files.run_dir import RunDir
from kd.setup.recipe import FREE, Record, flatten, hashes


@contextmanager
def open_run(record: Record, rank: int, shared: bool = False) -> Iterator[RunDir]:
    """Open the folder of a run and close it again; refuse one that holds another run, naming the keys that differ."""
    folder = RunDir(record.path, rank, record.keep, record.mirror, shared)
    try:
        require_own_copy(folder, record)
        folder.restore_copy()
        stored = folder.stored_config()
        folder.open(record.yaml, differences(folder.config_file, stored, record) if stored is not None else [])
        yield folder
        folder.complete_copy()
    finally:
        folder.close()


def require_own_copy(folder: RunDir, record: Record) -> None:
    """Require the copy to be that of this run, where it has a checkpoint to lose."""
    text = folder.copied("config.yaml")
    if not text:
        return
    keys = differences(f"{record.mirror}/config.yaml", text, record)
    try:
        facts = dict(json.loads(folder.copied("manifest.json") or "{}"))
    except (ValueError, TypeError, RecursionError):  # damaged: the configuration alone is compared
        facts = {}
    here = folder.manifest()
    both = facts.keys() & here.keys()
    keys += [f"{key} (its content hash)" for key in ("data", "teacher") if key in both and facts[key] != here[key]]
    if keys:
        wrong = f"'{record.mirror}' is the copy of another run; it differs in {', '.join(keys)}"
        allowed = "One copy, one run"
        raise RunError("run.mirror", wrong, allowed, "Choose another run.name or run.mirror, or remove the copy")


def differences(file: Path | str, text: str, record: Record) -> list[str]:
    """List the keys in which a stored configuration computes something else."""
    from kd.study.finished import parse  # only where a folder holds a run

    stored = flatten(config.to_dict(parse(file, text, trust=True), values=True))
    return [*different_keys(stored, record.keys), *changed_values(text, record)]


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
        wrong = f"this run was started with another {key} (its content hash differs)"
        allowed = "A run goes on with what it began with"
        raise RunError("run.name", wrong, allowed, "Choose another run.name, or restore what was there")
