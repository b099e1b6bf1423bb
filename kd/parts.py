"""Find and build parts by their file names. The folder is the registry.

`kind: kl` in the section `losses` is `kd/losses/kl.py`; `kind: mylab.losses.foo` is a module outside the repository.
A part needs two public names: `Options`, a frozen dataclass of its YAML keys, and `build`. A class variable
`Options.REMOVED` says of keys that it once had what to do instead.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from kd.errors import PartNotFound, did_you_mean
from kd.types import BackendFacts, DatasetFacts, SifterFacts, TeacherFacts

FOLDERS = ("tasks", "losses", "sifters", "datasets", "teachers", "backends")
FACTS = {"datasets": DatasetFacts, "sifters": SifterFacts, "teachers": TeacherFacts, "backends": BackendFacts}
"""What a part without a function `facts` is taken for."""


def names(folder: str) -> list[str]:
    """List the parts of a folder: its public modules."""
    package = importlib.import_module(f"kd.{folder}")
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))


def find(folder: str, kind: str, where: str) -> ModuleType:
    """Import the module of a part.

    Args:
        folder: one of `FOLDERS`.
        kind: a file name without its suffix, or a dotted module path outside the repository.
        where: config path for error messages.

    Raises:
        PartNotFound: no such file, or the module lacks `Options` or `build`.
    """
    path = kind if "." in kind else f"kd.{folder}.{kind}"
    known = names(folder)
    if "." not in kind and kind not in known:
        remedy = did_you_mean(kind, known) or "Run `kd-parts` to list them"
        raise PartNotFound(where, f"no part named '{kind}' in {folder}", f"Allowed: {', '.join(known)}", remedy)
    try:
        if not all(piece.isidentifier() for piece in path.split(".")):
            raise ModuleNotFoundError(name=path)
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and not (path == error.name or path.startswith(error.name + ".")):
            raise  # the part exists, but a package that it imports does not
        raise PartNotFound(
            where,
            f"the module '{path}' cannot be imported",
            f"Allowed: {', '.join(known)}, or the dotted path of an importable module",
            "Check the spelling and PYTHONPATH",
        ) from error
    options = getattr(module, "Options", None)
    if not (dataclasses.is_dataclass(options) and callable(getattr(module, "build", None))):
        raise PartNotFound(
            where,
            f"the module '{path}' is not a part",
            "A part has a frozen dataclass `Options` and a function `build`",
            f"Add them, or choose one of: {', '.join(known)}",
        )
    return module


def options_type(folder: str, kind: str, where: str) -> type[Any]:
    """Return the Options dataclass of a part."""
    return find(folder, kind, where).Options


def default_options(folder: str, kind: str, **changes: Any) -> Any:
    """Return default Options of a part of kd, with `changes`, for runs that are derived from another."""
    return options_type(folder, kind, folder)(**changes)


def build(folder: str, kind: str, options: Any, where: str, **context: Any) -> Any:
    """Build a part from checked options and the arguments of its contract."""
    return find(folder, kind, where).build(options, **context)


def facts(folder: str, kind: str, options: Any, where: str) -> Any:
    """Return what others must know of a part's options: what its function `facts(options)` says, or the defaults."""
    stated = getattr(find(folder, kind, where), "facts", None)
    return stated(options) if stated is not None else FACTS[folder]()


def describe(folder: str) -> list[tuple[str, str]]:
    """Return (name, first docstring line) of every part of a folder."""
    rows = []
    for name in names(folder):
        doc = importlib.import_module(f"kd.{folder}.{name}").__doc__ or ""
        rows.append((name, doc.strip().splitlines()[0] if doc.strip() else ""))
    return rows
