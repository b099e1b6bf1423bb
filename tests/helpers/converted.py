"""Convert each program to ONNX once: most tests export the same few networks, and a
conversion takes a CPU second.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram


def fingerprint(program: ExportedProgram, options: dict[str, Any]) -> str:
    """Return a hash of all that a conversion reads: nodes with shapes and names of
    layers, weights, constants and options.
    """
    whole = hashlib.sha256(repr(sorted(options.items())).encode())
    whole.update(f"{program.graph_signature}{program.range_constraints}".encode())
    for node in program.graph.nodes:
        # a node's repr is its name: of a call the target and the arguments count
        parts = (node.format_node(), node.target, node.args, node.kwargs)
        layers = node.meta.get("nn_module_stack")
        whole.update(repr((*parts, node.meta.get("val"), layers)).encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        whole.update(f"{name} {type(value)}".encode())
        if not isinstance(value, torch.Tensor):
            whole.update(repr(value).encode())
            continue
        whole.update(f"{value.dtype} {value.shape}".encode())
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        whole.update(array.numpy().tobytes())
    return whole.hexdigest()


def once(folder: Path, export: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.onnx.export, which copies a file of `folder` if it has written the
    same program before.
    """

    @functools.wraps(export)
    def converted(model: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(model, ExportedProgram) or args:
            return export(model, *args, **options)
        file = options.pop("f")
        kept = folder / f"{fingerprint(model, options)}.onnx"
        if kept.is_file():
            shutil.copyfile(kept, file)
            return None
        export(model, f=file, **options)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{kept.name}.{os.getpid()}"
        shutil.copyfile(file, part)
        part.replace(kept)  # other workers see a whole file
        return None

    return converted
