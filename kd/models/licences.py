"""Licences of weights, as declared by timm or by their folder. Nothing is guessed."""

import re
from pathlib import Path

from kd.models import packages
from kd.models.timm_folder import folder_config

UNKNOWN, NONE = "unknown", "none: random weights"
REACHING = ("dinov3",)
"""Parts of names of licences that cover models derived from the weights, such as
students.
"""
FRONT_BYTES = (
    1 << 16
)  # bytes of a README searched for front matter: the hub's have a few hundred


def licence_of(model: str, checkpoint: str, pretrained: bool) -> str:
    """Return the licence of the weights that a model starts with, as declared; "" if
    undeclared.

    They are at `checkpoint`, or belong to the name or folder `model` if `pretrained`.
    """
    place = Path(
        packages.place(checkpoint) or model.removeprefix("local-dir:")
    ).expanduser()
    if place.exists():
        return _of_folder(place if place.is_dir() else place.parent)
    if checkpoint or not pretrained or ":" in model:
        return ""
    from timm import get_pretrained_cfg, is_model  # type: ignore[attr-defined]  # only to look up a name

    try:
        known = get_pretrained_cfg(model) if is_model(model.partition(".")[0]) else None
    except RuntimeError:  # a known model without this tag
        known = None
    return _line(getattr(known, "license", ""))


def reaches(licence: str) -> bool:
    """Return whether a licence is known to cover derived weights."""
    return any(name in licence.lower() for name in REACHING)


def _of_folder(folder: Path) -> str:
    """Return the licence in the front matter of a folder's README.md, else in its
    config.json, else "".
    """
    readme, found = folder / "README.md", dict[str, str]()
    if readme.is_file():
        with readme.open(encoding="utf-8", errors="replace") as file:
            front = re.match(r"---\n(.*?)\n---", file.read(FRONT_BYTES), re.DOTALL)
        found = dict(
            re.findall(
                r"(?m)^(license|license_name): *[\"']?([^\"'\n]+)",
                front[1] if front else "",
            )
        )
    own = (
        found.get("license_name")
        if found.get("license") == "other"
        else found.get("license")
    )
    own = own if own != UNKNOWN else ""
    return _line(own or folder_config(folder).get("pretrained_cfg", {}).get("license"))


def _line(text: object) -> str:
    return " ".join(text.split())[:100] if isinstance(text, str) else ""
