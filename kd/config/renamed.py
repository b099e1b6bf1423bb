"""List the keys and kinds that were renamed in kd 0.3, and replace old names."""

import logging
import re
from typing import Any

from kd.core.errors import ConfigError, KdError

log = logging.getLogger("kd")

KEYS = {
    "optimizer": {
        "min_lr": "min_lr_ratio",
        "warmup": "warmup_ratio",
        "clip": "clip_grad_norm",
        "ema": "ema_decay",
    },
    "fit": {"warmup": "warmup_ratio"},
    "tuning": {"head_lr": "head_lr_scale"},
    "augment": {"crop": "crop_scale"},
    "data": {"eval_crop": "crop_pct"},
}
"""New names by section and old name."""
KINDS = {"losses": {"relational": "cckd"}}
"""New names by list of parts and old `kind`."""
_warned: set[str] = set()


def renamed_key(key: str, warn: bool = False) -> str:
    """Return a dotted key under its present name; `warn` logs a line for an old one."""
    parent, dot, last = key.rpartition(".")
    section = parent.rpartition(".")[2]
    new = f"{parent}{dot}{KEYS.get(section, {}).get(last, last)}"
    return _changed(key, new, f"{key} is now {new}", warn)


def with_new_names(
    value: Any, config_path: str, errors: list[KdError], warn: bool = False
) -> Any:
    """Return plain values with all names replaced by present ones.

    `config_path`: the dotted key of `value`; "" for the root. A section with both names
    of a key adds an error. `warn`: log one line for each old name.
    """
    if isinstance(value, list):
        return [
            with_new_names(item, f"{config_path}.{i}", errors, warn)
            for i, item in enumerate(value)
        ]
    if isinstance(value, str):
        match = re.fullmatch(r"(\w+)[.\[]\d+\]?\.kind", config_path)
        new = KINDS.get(match[1], {}).get(value, value) if match else value
        new = re.sub(r"\$\{([\w.]+)\}", lambda key: f"${{{renamed_key(key[1])}}}", new)
        return _changed(value, new, f"{config_path}: {value} is now {new}", warn)
    # a network's arguments have names of its own
    if not isinstance(value, dict) or config_path.endswith(".args"):
        return value
    prefix = f"{config_path}." if config_path else ""
    values: dict[Any, Any] = {}
    for key, item in value.items():
        path = f"{prefix}{key}"
        new = renamed_key(path, warn)[len(prefix) :]
        if new != str(key) and new in value:
            wrong = f"is the old name of {new}, which is set too"
            errors.append(ConfigError(path, wrong, "Use one name", f"Remove {key}"))
        else:
            new_key = new if new != str(key) else key
            values[new_key] = with_new_names(item, path, errors, warn)
    return values


def _changed(old: str, new: str, line: str, warn: bool) -> str:
    if warn and new != old and line not in _warned:
        _warned.add(line)
        log.warning(
            f"{line}. The old name still works. Rename it in the configuration."
        )
    return new
