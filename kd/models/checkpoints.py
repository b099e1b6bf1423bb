"""Files of weights: recognize the format, read it without running its code, list its sets of tensors.

`kd/models/fitting.py` fits them to a network. Known files are listed in `kd/models/weights.json`.
"""

import argparse
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kd.core.errors import ModelError, in_short
from kd.models import packages
from kd.models.timm_folder import folder_classes

KNOWN: dict[str, Any] = json.loads(Path(__file__).with_name("weights.json").read_text(encoding="utf-8"))
LARGEST = 100_000  # most tensors in a file: the largest network of timm has 3,000
Tensors = dict[str, Tensor]
_CLASSES: list[Any] = [argparse.Namespace, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDSU"}]
_RENAMED: list[Any] = [(np.float64(0).__reduce__()[0], f"numpy.{at}.multiarray.scalar") for at in ("core", "_core")]
_RENAMED += [
    (getattr(pathlib, f"Pure{system}Path"), f"{module}.{pure}{system}Path")
    for system in ("Posix", "Windows")
    for module in ("pathlib", "pathlib._local")
    for pure in ("", "Pure")
]
"""Harmless types often stored beside weights, under their names in Python and numpy."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Content of a file."""

    where: str  # config path for messages
    file: Path
    sets: Mapping[str, Tensors]  # sets of tensors by their key in the file, such as `model_ema`; "": the whole file
    classes: list[str] | None  # class names recorded in its folder
    says: str = ""  # a trainer's record of network and arguments, which shapes may not reveal

    @property
    def key(self) -> str:
        """The config path of the key that chooses among them."""
        return self.where.replace(".checkpoint", ".weights")


def located(where: str, place: str) -> list[Path]:
    """Return the file of weights in a configuration, or its parts if it is split."""
    path = Path(packages.fetched(where, place))
    inside = [path / name for name in KNOWN["folder"]] if path.is_dir() else [path]
    file = next((one for one in inside if one.is_file()), inside[0])
    if not file.is_file():
        for files, line in KNOWN["divided"].items():
            if path.is_dir() and any(path.glob(files)):
                joined = f"Join them: {line.format(folder=path)}"
                raise ModelError(where, f"'{path}' has the weights in the parts of several ranks", "One file", joined)
        remedy = "Check the path" + (", or fit a teacher with `kd-teach`" if where.startswith("teacher") else "")
        raise ModelError(where, f"no file '{file}'", "A .safetensors or .pth file, or a folder with one", remedy)
    if not file.name.endswith(".index.json"):
        return [file]
    try:
        files = [file.parent / name for name in sorted(set(json.loads(file.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(where, f"'{file}' is no index of weights", "", "Write the folder anew") from error
    if away := [one for one in files if one.parent != file.parent or not one.is_file()]:
        raise ModelError(where, f"no file '{away[0]}' in the folder, which '{file.name}' names", "", "Copy all parts")
    return files


def read(where: str, place: str) -> Weights:
    """Read a file of weights by its content, not its ending, without running its code."""
    files, content = located(where, place), dict[Any, Any]()
    for file in files:
        one = READERS[_kind(where, file)](where, file)
        content |= one if isinstance(one, dict) else {}
    sets = dict(_sets(content))
    _require_few(where, files[0], max(map(len, sets.values()), default=0))
    if not sets:
        allowed = "A state_dict, alone or in a dictionary"
        raise ModelError(where, f"'{files[0]}' holds no tensors by name", allowed, "Save model.state_dict()")
    told = content.get("args")
    told = vars(told) if isinstance(told, argparse.Namespace) else told if isinstance(told, dict) else {}
    given = [f"{key} {told[key]}" for key in ("model", "model_kwargs") if told.get(key)]
    says = f"its trainer wrote: {', '.join(given)}" if given else ""
    return Weights(where, files[0], sets, folder_classes(files[0].parent, where), in_short(says) if says else "")


def _require_few(where: str, file: Path, count: int) -> None:
    if count > LARGEST:
        allowed = f"At most {LARGEST:,}; networks have some thousands"
        raise ModelError(where, f"'{file}' holds {count:,} tensors", allowed, "Save model.state_dict() of one network")


def _kind(where: str, file: Path) -> str:
    """Return the name of the reader for a file."""
    with file.open("rb") as opened:
        first = opened.read(512)
    for offset, mark, kind, remedy in KNOWN["kinds"][1:]:
        if first[offset:].startswith(mark.encode("latin-1")):
            if kind in READERS:
                return kind
            raise ModelError(where, f"'{file}' is no file of weights but {kind}", "", remedy)
    wrong = "is not whole safetensors" if file.suffix == ".safetensors" else "cannot be read as weights"
    wrong += " (its first bytes are of no format that is known)" if first else " (it is empty)"
    raise ModelError(where, f"'{file}' {wrong}", "A .safetensors file, or what torch.save wrote", "Write it anew")


def _safetensors(where: str, file: Path) -> Tensors:
    try:
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            _require_few(where, file, len(names))
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ModelError(
            where, f"'{file}' is not whole safetensors ({in_short(error)})", "", "Write the file anew"
        ) from error


def _pickle(where: str, file: Path) -> Any:
    """Read tensors and plain values from torch.save. The error names other objects and how to rewrite the file."""
    if old := torch.__version__ < "2.7":  # mmap accepts no other names
        torch.serialization.add_safe_globals(_CLASSES)
    with nullcontext() if old else torch.serialization.safe_globals([*_CLASSES, *_RENAMED]):
        try:
            with suppress(Exception):  # the format before torch 1.6, or another ending, cannot be mapped
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            with file.open("rb") as opened:
                return torch.load(opened, map_location="cpu", weights_only=True)
        except Exception as error:  # the unpickler raises many types, all caused by the file
            text, foreign = str(error) or type(error).__name__, list[str]()
            with suppress(Exception):
                foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
                foreign.sort(
                    key=lambda name: (name.startswith(("torch.", "functools.", "collections.", "builtins.")), name)
                )
    named = ", ".join(foreign[:3]) or " ".join(re.findall(r"GLOBAL (\S+)", text)[:1])
    reason = f"objects of {named}, whose reading may run code" if named else in_short(text)
    script = "TorchScript" in text
    remedy = f"If you trust its source, rewrite it: {_line(file, script)}" if named or script else "Save it anew"
    if named.startswith("ultralytics"):
        remedy = f"Write `yolo export model={file} format=onnx`, then set kind: onnx and outputs: probabilities"
    wrong = f"'{file}' cannot be read as weights ({'a TorchScript archive, which is code' if script else reason})"
    raise ModelError(where, wrong, "Tensors by name, with numbers, texts and paths beside them", remedy)


def _line(file: Path, script: bool) -> str:
    """Return the command that rewrites a file with weights only; a module becomes its state_dict."""
    loaded = f"torch.jit.load({str(file)!r})" if script else f"torch.load({str(file)!r}, 'cpu', weights_only=False)"
    code = f"import torch; c = {loaded}; c = c if isinstance(c, dict) else dict(model=c); "
    code += "s = [(k, v.state_dict() if hasattr(v, 'state_dict') else v) for k, v in c.items()]; "
    code += "ok = lambda v: torch.is_tensor(v) or (isinstance(v, dict) and all(map(torch.is_tensor, v.values()))); "
    return f'python -c "{code}torch.save({{k: v for k, v in s if ok(v)}}, {str(file.with_suffix(".weights.pth"))!r})"'


READERS: dict[str, Callable[[str, Path], Any]] = {"safetensors": _safetensors, "pickle": _pickle}
"""Readers by kind in `weights.json`: (config path, file) -> dictionaries with tensors by name."""


def _sets(content: Mapping[Any, Any], place: str = "") -> Iterator[tuple[str, Tensors]]:
    """Yield the sets of tensors in nested dictionaries; two networks in one set are separated."""
    tensors = {name: one for name, one in content.items() if isinstance(name, str) and isinstance(one, Tensor)}
    twins = sorted({*KNOWN["twins"]} & {name.partition(".")[0] for name in tensors})
    for twin in twins if len(twins) > 1 else ():
        yield f"{place}.{twin}".strip("."), {n: t for n, t in tensors.items() if n.startswith(f"{twin}.")}
    if len(twins) < 2 and any(one.ndim for one in tensors.values()):
        yield place, tensors
    for key, inside in content.items():
        if isinstance(key, str) and isinstance(inside, dict) and not key.startswith(tuple(KNOWN["beside"])):
            yield from _sets(inside, f"{place}.{key}".strip("."))
