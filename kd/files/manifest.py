"""An export's manifest.json and files have checksums.

This module imports nothing from kd.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"  # of all other files of an export; `kd-export --sign` writes it
DIGITS = 12  # digits of a hash as shown to users, such as the version of an export


def graphs_by_priority(manifest: Mapping[str, Any]) -> list[str]:
    """Return the graph names of an export; `kd-serve` loads the first."""
    main = manifest.get("pick", "model.onnx")
    return sorted(
        manifest.get("parity", ()),
        key=lambda name: (name != main, name != "model.onnx", name),
    )


def checksum(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without its checksum, as sorted compact JSON."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def has_valid_checksum(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest is unchanged.

    Exports of older builds have no checksum.
    """
    return manifest.get("checksum") in (None, checksum(manifest))


def sha256(path: Path) -> str:
    """Return the hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
