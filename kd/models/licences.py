"""Licences of weights, as declared by timm or by their folder.

Nothing is guessed.
"""

import re
from pathlib import Path

from kd.models import packages
from kd.models.timm_folder import folder_config

UNKNOWN = "unknown"
NONE = "none: random weights"
REACHING = ("dinov3",)
"""Parts of names of licences that cover models derived from the weights, such as
students.
"""
# bytes of a README searched for front matter: the hub's have a few hundred
FRONT_BYTES = 1 << 16


def licence_of(model: str, checkpoint: str, pretrained: bool) -> str:
    """Return the declared licence of the weights that a model starts with, or "".

    They are at `checkpoint`, or belong to the name or folder `model` if `pretrained`.
    """
    source = packages.local_path(checkpoint) or model.removeprefix("local-dir:")
    path = Path(source).expanduser()
    if path.exists():
        return _folder_licence(path if path.is_dir() else path.parent)
    if checkpoint or not pretrained or ":" in model:
        return ""
    from timm import get_pretrained_cfg, is_model  # type: ignore[attr-defined]  # only to look up a name

    if not is_model(model.partition(".")[0]):
        return ""
    try:
        return _one_line(getattr(get_pretrained_cfg(model), "license", ""))
    except RuntimeError:  # a known model without this tag
        return ""


def covers_derived(licence: str) -> bool:
    """Return whether a licence is known to cover derived weights."""
    return any(name in licence.lower() for name in REACHING)


def _folder_licence(folder: Path) -> str:
    """Return the licence in a folder's README.md, else in its config.json, else ""."""
    readme = folder / "README.md"
    licence = None
    if readme.is_file():
        with readme.open(encoding="utf-8", errors="replace") as file:
            front = re.match(r"---\n(.*?)\n---", file.read(FRONT_BYTES), re.DOTALL)
        keys = r"(?m)^(license|license_name): *[\"']?([^\"'\n]+)"
        values = dict(re.findall(keys, front[1] if front else ""))
        licence = values.get("license")
        if licence == "other":
            licence = values.get("license_name")
    if not licence or licence == UNKNOWN:
        licence = folder_config(folder).get("pretrained_cfg", {}).get("license")
    return _one_line(licence)


def _one_line(text: object) -> str:
    return " ".join(text.split())[:100] if isinstance(text, str) else ""
