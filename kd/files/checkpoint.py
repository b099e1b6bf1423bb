"""A checkpoint is a folder with tensors.safetensors and state.json, without pickle.

It is whole or absent.
"""

import errno
import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kd.core.errors import RunError
from kd.core.types import State
from kd.files.json_file import read_json
from kd.files.storage import atomic_folder, share, write_json

FORMAT = 3  # format of state.json; another number is an error that names it
TENSORS = "tensors.safetensors"  # weights and optimizer state
STATE = "state.json"  # progress, and checksums of the tensors


class Broken(RunError):
    """A checkpoint is truncated or damaged. Another format raises a plain RunError."""


def write(
    folder: Path,
    state: State,
    tensors: dict[str, Tensor],
    info: dict[str, Any],
    best: bool = False,
) -> None:
    """Write a checkpoint folder atomically.

    Tensors are copied to the CPU, `info` holds JSON values, and `best` is recorded.
    """
    on_cpu = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    content = {"format": FORMAT, "best": best, "state": asdict(state), "info": info}
    with atomic_folder(folder) as draft:
        save_tensors(draft / TENSORS, on_cpu)
        content["bytes"] = (draft / TENSORS).stat().st_size
        content["crc32"] = {name: crc32(tensor) for name, tensor in on_cpu.items()}
        write_json(draft / STATE, {**content, "checksum": _checksum(content)})


def head(folder: Path) -> tuple[State, dict[str, Any]]:
    """Read a checkpoint's state and the content of its state.json.

    `Broken`: it is damaged.
    """

    def build(content: Any) -> tuple[State, dict[str, Any]]:
        if content["format"] != FORMAT:
            wrong = (
                f"checkpoint '{folder}' has format {content['format']}, this version"
                f" reads {FORMAT}"
            )
            remedy = f"Choose another run.name, or remove '{folder}'"
            raise RunError("run.folder", wrong, "", remedy)
        if content.pop("checksum") != _checksum(content):
            raise ValueError("its content has changed")
        return State(**content["state"]), content

    try:
        return read_json(
            folder / STATE, "run.folder", _removal_remedy(folder), build, Broken
        )
    except OSError as error:
        raise _read_error(folder, error) from error


def read(folder: Path) -> tuple[State, dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint folder.

    `Broken`, which names the tensor: it is truncated or damaged.
    """
    state, content = head(folder)
    try:
        # safetensors reports an unreadable file as missing
        with (folder / TENSORS).open("rb") as file:
            size = file.seek(0, 2)
        if size != content["bytes"]:
            raise _broken(folder, f"is cut short: {size} of {content['bytes']} bytes")
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _read_error(folder, error) from error
    for name in tensors.keys() | content["crc32"].keys():
        if name not in tensors or crc32(tensors[name]) != content["crc32"].get(name):
            wrong = f"is damaged: the content of tensor '{name}' has changed"
            raise _broken(folder, wrong)
    return state, tensors, content["info"]


def crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's type, shape and bytes.

    A damaged header may leave the bytes unchanged.
    """
    layout = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, layout)


def _checksum(content: dict[str, Any]) -> int:
    """Return the CRC-32 of JSON values, equal before writing and after reading."""
    reread = json.loads(json.dumps(content))
    return zlib.crc32(json.dumps(reread, sort_keys=True).encode())


def save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors as safetensors; call it inside `atomic_folder`."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # safetensors reports the OSError only in its text
        number = errno.ENOSPC if "No space" in str(error) else errno.EIO
        raise OSError(number, str(error)) from error
    share(path)


def _read_error(folder: Path, error: Exception) -> RunError:
    """Return the error for a checkpoint that cannot be read.

    It is `Broken` if the checkpoint is truncated or corrupt, else a RunError.
    """
    wrong = f"cannot be read ({type(error).__name__}: {error})"
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return _broken(folder, wrong)
    remedy = (
        "It may be whole: let this user read it, or bring the storage back, and run the"
        " same command again"
    )
    return RunError("run.folder", f"checkpoint '{folder}' {wrong}", "", remedy)


def _broken(folder: Path, wrong: str) -> Broken:
    return Broken(
        "run.folder", f"checkpoint '{folder}' {wrong}", "", _removal_remedy(folder)
    )


def _removal_remedy(folder: Path) -> str:
    return (
        f"Remove '{folder}'; the same command then resumes from the checkpoint"
        " before it"
    )
