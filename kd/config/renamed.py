"""The only list of keys and kinds that were renamed in kd 0.3."""

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
_said: set[str] = set()


def renamed_key(key: str, say: bool = False) -> str:
    """Return a dotted key under its present name. `say`: log one line for an
    old name.
    """
    parent, dot, last = key.rpartition(".")
    section = parent.rpartition(".")[2]
    new = f"{parent}{dot}{KEYS.get(section, {}).get(last, last)}"
    return _changed(key, new, f"{key} is now {new}", say)


def renamed(
    value: Any, config_path: str, errors: list[KdError], say: bool = False
) -> Any:
    """Return plain values with all names replaced by present ones. `config_path`: the dotted
    key of `value`; "" for the root.

    A section with both names of a key adds an error. `say`: log one line for each old
    name.
    """
    if isinstance(value, list):
        return [
            renamed(item, f"{config_path}.{i}", errors, say)
            for i, item in enumerate(value)
        ]
    if isinstance(value, str):
        parts = re.fullmatch(r"(\w+)[.\[]\d+\]?\.kind", config_path)
        new = KINDS.get(parts[1], {}).get(value, value) if parts else value
        new = re.sub(
            r"\$\{([\w.]+)\}", lambda found: f"${{{renamed_key(found[1])}}}", new
        )
        return _changed(value, new, f"{config_path}: {value} is now {new}", say)
    if not isinstance(value, dict) or config_path.endswith(
        ".args"
    ):  # a network's arguments have names of its own
        return value
    made: dict[Any, Any] = {}
    for key, item in value.items():
        path = f"{config_path}.{key}" if config_path else str(key)
        new = renamed_key(path, say)[len(config_path) + 1 if config_path else 0 :]
        if new != str(key) and new in value:
            wrong = f"is the old name of {new}, which is set too"
            errors.append(ConfigError(path, wrong, "Use one name", f"Remove {key}"))
        else:
            made[new if new != str(key) else key] = renamed(item, path, errors, say)
    return made


def _changed(old: str, new: str, line: str, say: bool) -> str:
    if say and new != old and line not in _said:
        _said.add(line)
        log.warning(
            f"{line}. The old name still works. Rename it in the configuration."
        )
    return new
