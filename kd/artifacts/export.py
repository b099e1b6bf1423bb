"""The student as a folder that timm loads: config.json, model.safetensors, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kd.artifacts.files import atomic_folder, write_json


def export(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], provenance: dict[str, Any]) -> None:
    """Write an export folder atomically, replacing an older one.

    Args:
        folder: where; `timm.create_model('local-dir:FOLDER', pretrained=True)` then loads it.
        config: contents of config.json in timm's form, `label_names` included.
        tensors: weights by timm's names.
        provenance: written to kd.json: metrics, run, hashes.

    Raises:
        RunError: the disk is full or not writable.
    """
    with atomic_folder(folder, where="export") as draft:
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        write_json(draft / "config.json", config)
        write_json(draft / "kd.json", provenance)
