"""The student as a folder that timm loads: config.json, model.safetensors, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kd.artifacts.files import atomic_folder, save_tensors, write_json
from kd.errors import RunError


def export(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], provenance: dict[str, Any]) -> None:
    """Write an export folder atomically, replacing an older one.

    Args:
        folder: where; `timm.create_model('local-dir:FOLDER', pretrained=True)` then loads it.
        config: contents of config.json in timm's form, `label_names` included.
        tensors: weights by timm's names.
        provenance: written to kd.json: metrics, run, hashes.

    Raises:
        RunError: something else lies at `folder`, the disk is full or not writable.
    """
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not empty and not (folder / "kd.json").is_file():
        allowed = "A new or empty folder, or an older export, which is replaced"
        raise RunError("export", f"'{folder}' exists and is not an exported model", allowed, "Choose another folder")
    with atomic_folder(folder, where="export") as draft:
        save_tensors(draft / "model.safetensors", tensors, metadata={"format": "pt"})
        write_json(draft / "config.json", config)
        write_json(draft / "kd.json", provenance)
