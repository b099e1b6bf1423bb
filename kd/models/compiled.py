"""torch.compile, and the folder of its libraries: one of this process's own, which it may clear."""

import logging
import os
import re
import shutil
from itertools import count
from pathlib import Path
from typing import IO

from torch import nn

from kd.files.storage import lock, log

WHERE = "TORCHINDUCTOR_CACHE_DIR"
OWN = re.compile(r"kd-\d+")  # name of such a folder, in torch's own: a process takes the first that no other one holds
GRAPHS = 64
"""Limit of compiled graphs in a process. At torch's default of 8, later graphs would run uncompiled: teacher, student,
training, evaluation and the copies of trials each need their own."""


def compile_forward(module: nn.Module) -> nn.Module:
    """Compile a module's forward at its first call, in place: weights keep their names, copies are not compiled."""
    # Each shape has its own graph, so that the bits of an output do not depend on earlier shapes: a resumed run gives
    # the same bits as an uninterrupted one. OSError: torch's folder for compiled libraries cannot be written.
    import torch._dynamo.config as limits  # slow to import, so only where something is compiled

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found", on a CPU
    _own_folder()
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # in older torch
    setattr(limits, name, max(getattr(limits, name), GRAPHS))
    module.compile(dynamic=False)
    return module


def clear_libraries() -> None:
    """Remove compiled libraries, so that they are compiled anew, if there are any."""
    for folder in _locks:
        shutil.rmtree(folder, ignore_errors=True)


def _own_folder() -> None:
    """Let torch keep compiled libraries in a folder that this process holds until it ends."""
    # torch writes a library under its own name and takes every file of that name for whole. A process that is killed
    # while the linker runs leaves one that can never be loaded, so that a folder which holds one is cleared.
    from torch._inductor.codecache import cache_dir  # slow to import

    if _locks:
        return
    parent = Path(cache_dir())
    if OWN.fullmatch(parent.name):  # that of the process that has started this one
        parent = parent.parent
    folder = next(path for number in count() if _hold(path := parent / f"kd-{number}"))
    os.environ[WHERE] = str(folder)
    if any(map(_unfinished, (*folder.rglob("*.so"), *folder.rglob("*.o")))):
        log.warning(f"compile: '{folder}' holds a library that was never finished; it is cleared and filled again")
        clear_libraries()


def _hold(folder: Path) -> bool:
    file = lock(folder.with_suffix(".lock"), WHERE)
    if file is not None:
        _locks[folder] = file
    return file is not None


def _unfinished(library: Path) -> bool:
    """Return whether a linker was stopped while it wrote a library: the first bytes are written last."""
    with library.open("rb") as file:
        return not any(file.read(4))


_locks: dict[Path, IO[str]] = {}
