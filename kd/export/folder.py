"""The student as a folder: what timm loads, what an endpoint serves, where it came from, and a hash of every file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from kd.artifacts.checkpoint import save_tensors
from kd.errors import RunError
from kd.files.manifest import MANIFEST, checksum, sha256
from kd.files.storage import atomic_folder, write_json


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    provenance: dict[str, Any],
    extras: Path | None = None,
    facts: dict[str, Any] | None = None,
) -> None:
    """Write an export folder atomically, replacing an older one.

    Args:
        folder: where; `timm.create_model('local-dir:FOLDER', pretrained=True)` then loads it.
        config: contents of config.json in timm's form, `label_names` included.
        tensors: weights by timm's names.
        provenance: written to kd.json: metrics, run, hashes.
        extras: a flat folder whose files are added: graphs, the model card.
        facts: written to manifest.json, beside size and sha256 of every other file and a checksum of all this.

    Raises:
        RunError: something else lies at `folder`, the disk is full or not writable.
    """
    refuse_other(folder)
    with atomic_folder(folder, where="export") as draft:
        save_tensors(draft / "model.safetensors", tensors, metadata={"format": "pt"})
        (draft / "model.safetensors").chmod(0o644)  # safetensors lets only its owner read, and a server is another user
        write_json(draft / "config.json", config)
        write_json(draft / "kd.json", provenance)
        if extras is not None:
            for path in extras.iterdir():
                shutil.copyfile(path, draft / path.name)
        files = {path.relative_to(draft).as_posix(): _entry(path) for path in draft.rglob("*") if path.is_file()}
        content = json.loads(json.dumps({**(facts or {}), "files": files}))  # as it will be read
        write_json(draft / MANIFEST, {**content, "checksum": checksum(content)})


def refuse_other(folder: Path) -> None:
    """Refuse to replace what is not an export.

    Raises:
        RunError: something else lies at `folder`.
    """
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not empty and not (folder / "kd.json").is_file():
        allowed = "A new or empty folder, or an older export, which is replaced"
        raise RunError("export", f"'{folder}' exists and is not an exported model", allowed, "Choose another folder")


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
