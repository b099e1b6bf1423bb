"""Find and build parts by their file names. The folder is the registry.

`kind: kl` in the section `losses` is `kd/parts/losses/kl.py`; `kind: mylab.losses.foo`
is a module from outside. A part needs two public names: `Options`, a frozen dataclass
of its YAML keys, and `build`.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from types import ModuleType
from typing import Any

from kd.core.errors import FOREIGN, PartNotFound, did_you_mean, raised
from kd.core.facts import (
    BackendFacts,
    DatasetFacts,
    ExporterFacts,
    GraphFile,
    LossFacts,
    NetworkFacts,
    NoOptions,
    SifterFacts,
)

FOLDERS = (
    "tasks",
    "losses",
    "sifters",
    "datasets",
    "networks",
    "backends",
    "exporters",
)
FACTS: dict[str, type[Any]] = {
    "losses": LossFacts,
    "sifters": SifterFacts,
    "datasets": DatasetFacts,
    "networks": NetworkFacts,
    "backends": BackendFacts,
    "exporters": ExporterFacts,
}  # type of a part's `facts`. A part without `facts` has the defaults; a loss must have them.


def names(folder: str) -> list[str]:
    """List the parts of a folder: its public modules."""
    package = importlib.import_module(f"kd.parts.{folder}")
    return sorted(
        info.name
        for info in pkgutil.iter_modules(package.__path__)
        if not info.name.startswith("_")
    )


def find(folder: str, kind: str, config_path: str) -> ModuleType:
    """Import the module of a part; `kind` is its file name without the suffix, or a
    dotted path outside kd.
    """
    path = kind if "." in kind else f"kd.parts.{folder}.{kind}"
    known = names(folder)
    if "." not in kind and kind not in known:
        remedy = did_you_mean(kind, known) or "Run `kd-parts` to list them"
        raise PartNotFound(
            config_path,
            f"no part named {kind!r} in {folder}",
            f"Allowed: {', '.join(known)}",
            remedy,
        )
    module = (
        _import_part(path, config_path, known)
        if path not in sys.modules
        else sys.modules[path]
    )
    options = getattr(module, "Options", None)
    if not (
        dataclasses.is_dataclass(options) and callable(getattr(module, "build", None))
    ):
        allowed = "A part has a frozen dataclass `Options` and a function `build`"
        remedy = f"Add them, or choose one of: {', '.join(known)}"
        raise PartNotFound(
            config_path, f"the module {kind!r} is not a part", allowed, remedy
        )
    return module


def named_module(path: str) -> ModuleType:
    """Import a module named in a configuration; the working folder is searched last, as
    with `python -m kd`.
    """
    # Only during this import: a folder there must not replace a package that is not
    # installed.
    here = [""] if "" not in sys.path else []
    sys.path += here
    try:
        return importlib.import_module(path)
    finally:
        for folder in here:
            sys.path.remove(folder)


def _import_part(path: str, config_path: str, known: list[str]) -> ModuleType:
    try:
        if not all(piece.isidentifier() for piece in path.split(".")):
            raise ModuleNotFoundError(name=path)
        module = named_module(path)
    except (Exception, SystemExit) as error:  # a foreign module may raise anything
        absent = isinstance(error, ModuleNotFoundError) and error.name
        if absent and (path == absent or path.startswith(absent + ".")):
            allowed = (
                f"Allowed: {', '.join(known)}, or the dotted path of an importable"
                " module"
            )
            wrong = f"the module {path!r} cannot be imported"
            raise PartNotFound(
                config_path, wrong, allowed, "Check the spelling and PYTHONPATH"
            ) from error
        if path.startswith("kd."):
            raise  # the part exists, but a package that it imports does not
        wrong = f"importing {path!r} raises {raised(error)}"
        raise PartNotFound(config_path, wrong, "", "Correct the module") from error
    if not path.startswith("kd."):
        FOREIGN.add(str(module.__file__))
    return module


def options_type(folder: str, kind: str, config_path: str) -> type[Any]:
    """Return the Options dataclass of a part."""
    return find(folder, kind, config_path).Options


def default_options(folder: str, kind: str, /, **changes: Any) -> Any:
    """Return default Options of one of kd's parts, with `changes`, for derived runs."""
    from kd.core.keys import checked  # kd-serve lists the exporters without Pydantic

    return checked(options_type(folder, kind, folder), changes)


def build(
    folder: str, kind: str, options: Any, config_path: str, **context: Any
) -> Any:
    """Build a part from checked options and the arguments of its contract."""
    made = find(folder, kind, config_path).build
    try:
        inspect.signature(made).bind(options, **context)
    except TypeError as error:
        wrong = f"the function build of '{kind}' cannot be called ({error})"
        raise PartNotFound(
            config_path,
            wrong,
            f"build(options, {', '.join(context)})",
            "Correct its arguments",
        ) from error
    return made(options, **context)


def facts(folder: str, kind: str, options: Any, config_path: str) -> Any:
    """Return the facts of a part with these options: its `facts`, or the result of
    `facts(options)`.
    """
    cls = FACTS[folder]
    value = getattr(
        find(folder, kind, config_path), "facts", None if cls is LossFacts else cls()
    )
    value = value(options) if callable(value) else value
    if not isinstance(value, cls):
        wrong = (
            f"'{kind}' does not declare its inputs"
            if value is None
            else f"facts of '{kind}' returns {value!r}"
        )
        allowed = (
            f"A function `facts(options)` that returns a kd.core.facts.{cls.__name__},"
            " or one as `facts`"
        )
        raise PartNotFound(
            config_path, wrong, allowed, "Add it; CONTRIBUTING.md has an example"
        )
    return value


def graphs() -> dict[str, GraphFile]:
    """Return the facts of all formats of graphs by file name, cheap ones first."""
    none, found = NoOptions(), dict[str, GraphFile]()
    for kind in names("exporters"):
        own = facts("exporters", kind, none, "export").graphs
        found |= {
            file: dataclasses.replace(graph, kind=kind) for file, graph in own.items()
        }
    return dict(sorted(found.items(), key=lambda one: one[1].cost))


def graph_files(file: str) -> tuple[str, ...]:
    """Return the names of a graph's files: itself, and that of its weights if they are
    in a second file.
    """
    graph = graphs().get(file)  # None: another version of kd wrote it
    return (file, graph.weights) if graph is not None and graph.weights else (file,)


def exporter(file: str) -> Any:
    """Return the exporter of a graph in `graphs`."""
    return build("exporters", graphs()[file].kind, NoOptions(), "export")


def describe(folder: str) -> list[tuple[str, str]]:
    """Return (name, first docstring line) of every part of a folder."""
    return [
        (name, summary(importlib.import_module(f"kd.parts.{folder}.{name}")))
        for name in names(folder)
    ]


def summary(module: ModuleType) -> str:
    """Return the first docstring line of a part."""
    paragraph = inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.split())
