"""torch.compile with a folder of compiled libraries per process, which it may clear."""

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
# name of such a folder inside torch's: a process takes the first that is not locked
OWN = re.compile(r"kd-\d+")
GRAPHS = 64
"""Limit of compiled graphs per process. At torch's default of 8, later graphs would run
uncompiled: teacher, student, training, evaluation and trial copies each need their own.
"""


def compile_forward(module: nn.Module) -> nn.Module:
    """Compile a module's forward at its first call, in place.

    Weights keep their names; copies are not compiled.
    """
    # Each shape has its own graph, so outputs do not depend on earlier shapes: a
    # resumed run is bit-identical to an uninterrupted one. OSError: torch's folder for
    # compiled libraries cannot be written.
    import torch._dynamo.config as limits  # slow import, needed only to compile

    # "No CUDA runtime is found", on a CPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _claim_folder()
    limit = "recompile_limit"
    if not hasattr(limits, limit):  # in older torch
        limit = "cache_size_limit"
    setattr(limits, limit, max(getattr(limits, limit), GRAPHS))
    module.compile(dynamic=False)
    return module


def clear_libraries() -> None:
    """Remove compiled libraries, so that they are compiled again."""
    for folder in _locks:
        shutil.rmtree(folder, ignore_errors=True)


def _claim_folder() -> None:
    """Set torch's folder of compiled libraries to one locked by this process."""
    # torch links a library under its final name and trusts every file of that name. A
    # process killed while the linker runs leaves a library that can never be loaded, so
    # a folder with such a file is cleared.
    from torch._inductor.codecache import cache_dir  # slow to import

    if _locks:
        return
    parent = Path(cache_dir())
    if OWN.fullmatch(parent.name):  # the folder of the parent process
        parent = parent.parent
    folder = next(filter(_lock_folder, (parent / f"kd-{number}" for number in count())))
    os.environ[WHERE] = str(folder)
    if any(map(_unfinished, (*folder.rglob("*.so"), *folder.rglob("*.o")))):
        log.warning(
            f"compile: '{folder}' holds a library that was never finished; it is"
            " cleared and filled again"
        )
        clear_libraries()


def _lock_folder(folder: Path) -> bool:
    file = lock(folder.with_suffix(".lock"), WHERE)
    if file is not None:
        _locks[folder] = file
    return file is not None


def _unfinished(library: Path) -> bool:
    """Return whether a linker was killed while it wrote a library.

    It writes the first bytes last.
    """
    with library.open("rb") as file:
        return not any(file.read(4))


_locks: dict[Path, IO[str]] = {}
