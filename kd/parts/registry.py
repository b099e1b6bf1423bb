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

from kd.core.errors import FOREIGN, PartNotFound, did_you_mean, error_with_line
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

# type of a part's `facts`. A part without `facts` has the defaults; a loss must have
# them.
FACTS: dict[str, type[Any]] = {
    "losses": LossFacts,
    "sifters": SifterFacts,
    "datasets": DatasetFacts,
    "networks": NetworkFacts,
    "backends": BackendFacts,
    "exporters": ExporterFacts,
}
FOLDERS = ("tasks", *FACTS)


def names(folder: str) -> list[str]:
    """List the parts of a folder, which are its public modules."""
    package = importlib.import_module(f"kd.parts.{folder}")
    return sorted(
        info.name
        for info in pkgutil.iter_modules(package.__path__)
        if not info.name.startswith("_")
    )


def find(folder: str, kind: str, config_path: str) -> ModuleType:
    """Import the module of a part.

    Args:
        folder: the kind of part, one of `FOLDERS`.
        kind: its file name without the suffix, or a dotted path outside kd.
        config_path: config path of the errors.

    Returns:
        The module, which has `Options` and `build`.

    Raises:
        PartNotFound: there is no such part, or it cannot be imported.
    """
    is_outside = "." in kind
    path = kind if is_outside else f"kd.parts.{folder}.{kind}"
    if path in sys.modules and (is_outside or not kind.startswith("_")):
        module = sys.modules[path]  # listing a folder costs 0.3 ms
    elif not is_outside and kind not in (kinds := names(folder)):
        wrong = f"no part named {kind!r} in {folder}"
        allowed = f"Allowed: {', '.join(kinds)}"
        remedy = did_you_mean(kind, kinds) or "Run `kd-parts` to list them"
        raise PartNotFound(config_path, wrong, allowed, remedy)
    else:
        module = _import_part(path, config_path, names(folder))
    is_part = dataclasses.is_dataclass(getattr(module, "Options", None))
    if not is_part or not callable(getattr(module, "build", None)):
        wrong = f"the module {kind!r} is not a part"
        allowed = "A part has a frozen dataclass `Options` and a function `build`"
        remedy = f"Add them, or choose one of: {', '.join(names(folder))}"
        raise PartNotFound(config_path, wrong, allowed, remedy)
    return module


def named_module(path: str) -> ModuleType:
    """Import a module named in a configuration, if needed from the working folder."""
    # That is searched last, as with `python -m kd`, and only during this import: a
    # folder there must not replace a package that is not installed.
    if "" in sys.path:
        return importlib.import_module(path)
    sys.path.append("")
    try:
        return importlib.import_module(path)
    finally:
        sys.path.remove("")


def _import_part(path: str, config_path: str, kinds: list[str]) -> ModuleType:
    try:
        if not all(piece.isidentifier() for piece in path.split(".")):
            raise ModuleNotFoundError(name=path)
        module = named_module(path)
    except (Exception, SystemExit) as error:  # a foreign module may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{path}.".startswith(f"{absent}."):
            wrong = f"the module {path!r} cannot be imported"
            allowed = (
                f"Allowed: {', '.join(kinds)}, or the dotted path of an importable"
                " module"
            )
            remedy = "Check the spelling and PYTHONPATH"
            raise PartNotFound(config_path, wrong, allowed, remedy) from error
        if path.startswith("kd."):
            raise  # the part exists, but a package that it imports does not
        wrong = f"importing {path!r} raises {error_with_line(error)}"
        raise PartNotFound(config_path, wrong, "", "Correct the module") from error
    if not path.startswith("kd."):
        FOREIGN.add(str(module.__file__))
    return module


def options_type(folder: str, kind: str, config_path: str) -> type[Any]:
    """Return the Options dataclass of a part."""
    return find(folder, kind, config_path).Options


def default_options(folder: str, kind: str, /, **changes: Any) -> Any:
    """Return default Options of one of kd's parts, with `changes`, for derived runs."""
    from kd.core.keys import (
        build_checked,  # kd-serve lists the exporters without Pydantic
    )

    return build_checked(options_type(folder, kind, folder), changes)


def build(
    folder: str, kind: str, options: Any, config_path: str, **context: Any
) -> Any:
    """Build a part from checked options and the arguments of its contract.

    Args:
        folder: the kind of part, one of `FOLDERS`.
        kind: its file name without the suffix, or a dotted path outside kd.
        options: an instance of its `Options`.
        config_path: config path of the errors.
        context: the further arguments of its `build`.

    Returns:
        The part; its type is that of the folder's contract.

    Raises:
        PartNotFound: there is no such part, or its `build` takes other arguments.
    """
    build_part = find(folder, kind, config_path).build
    try:
        inspect.signature(build_part).bind(options, **context)
    except TypeError as error:
        wrong = f"the function build of '{kind}' cannot be called ({error})"
        allowed = f"build(options, {', '.join(context)})"
        remedy = "Correct its arguments"
        raise PartNotFound(config_path, wrong, allowed, remedy) from error
    return build_part(options, **context)


def facts(folder: str, kind: str, options: Any, config_path: str) -> Any:
    """Return the facts of a part with these options.

    They are its `facts`, or the result of its `facts(options)`.

    Args:
        folder: the kind of part, a key of `FACTS`.
        kind: its file name without the suffix, or a dotted path outside kd.
        options: an instance of its `Options`.
        config_path: config path of the errors.

    Returns:
        An instance of the folder's type in `FACTS`.

    Raises:
        PartNotFound: there is no such part, or its facts have another type.
    """
    cls = FACTS[folder]
    default = None if cls is LossFacts else cls()
    value = getattr(find(folder, kind, config_path), "facts", default)
    if callable(value):
        value = value(options)
    if not isinstance(value, cls):
        wrong = f"facts of '{kind}' returns {value!r}"
        if value is None:
            wrong = f"'{kind}' does not declare its inputs"
        allowed = (
            f"A function `facts(options)` that returns a kd.core.facts.{cls.__name__},"
            " or one as `facts`"
        )
        remedy = "Add it; CONTRIBUTING.md has an example"
        raise PartNotFound(config_path, wrong, allowed, remedy)
    return value


def graphs() -> dict[str, GraphFile]:
    """Return the facts of all formats of graphs by file name, cheap ones first."""
    formats: dict[str, GraphFile] = {}
    for kind in names("exporters"):
        graphs_of_kind = facts("exporters", kind, NoOptions(), "export").graphs
        for file, graph in graphs_of_kind.items():
            formats[file] = dataclasses.replace(graph, kind=kind)
    return dict(sorted(formats.items(), key=lambda item: item[1].cost))


def graph_files(file: str) -> tuple[str, ...]:
    """Return the names of a graph's file, and of its weights if they have one."""
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
