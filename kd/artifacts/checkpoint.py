"""A checkpoint is a folder: tensors.safetensors and state.json. No pickle; whole or absent."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kd.errors import RunError
from kd.storage import atomic_folder, write_json
from kd.types import State

FORMAT = 1


def write(folder: Path, state: State, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Write a checkpoint folder atomically, tensors as CPU copies.

    Raises:
        RunError: the disk is full or not writable.
    """
    whole = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with atomic_folder(folder) as draft:
        save_tensors(draft / "tensors.safetensors", whole)
        size = (draft / "tensors.safetensors").stat().st_size
        write_json(draft / "state.json", {"format": FORMAT, "bytes": size, "state": asdict(state), "info": info})


def read(folder: Path) -> tuple[State, dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint folder.

    Raises:
        RunError: it is cut short or of another format; the remedy names what to remove.
    """
    try:
        content = json.loads((folder / "state.json").read_text())
        size = (folder / "tensors.safetensors").stat().st_size
        if content["format"] != FORMAT:
            raise _broken(folder, f"has format {content['format']}, this version reads {FORMAT}")
        if size != content["bytes"]:
            raise _broken(folder, f"is cut short: {size} of {content['bytes']} bytes")
        tensors = load_file(folder / "tensors.safetensors")
        return State(**content["state"]), tensors, content["info"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _broken(folder, f"cannot be read ({type(error).__name__}: {error})") from error


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, inside of `atomic_folder`.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # safetensors hides the OSError in its text
        raise OSError(errno.ENOSPC if "No space" in str(error) else errno.EIO, str(error)) from error


def _broken(folder: Path, wrong: str) -> RunError:
    remedy = f"Remove '{folder}'; the same command then resumes from the checkpoint before it"
    return RunError("run.folder", f"checkpoint '{folder}' {wrong}", "", remedy)
