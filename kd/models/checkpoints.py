"""Read files of weights without running their code, and list their sets of tensors.

`kd/models/fitting.py` fits them to a network. Known files are listed in
`kd/models/weights.json`.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kd.core.errors import ModelError, first_sentence
from kd.models import packages
from kd.models.timm_folder import folder_classes

KNOWN: dict[str, Any] = json.loads(
    Path(__file__).with_name("weights.json").read_text(encoding="utf-8")
)
LARGEST = 100_000  # most tensors in a file: the largest network of timm has 3,000
CLASSES = re.compile(KNOWN["classes"], re.IGNORECASE).fullmatch
PART = re.compile(r"-\d{5}-of-(\d{5})")  # in the name of a part of a file
Tensors = dict[str, Tensor]
_CLASSES: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDSU"},
]
_RENAMED: list[Any] = [
    (np.float64(0).__reduce__()[0], f"numpy.{at}.multiarray.scalar")
    for at in ("core", "_core")
]
_RENAMED += [
    (PureWindowsPath if "Windows" in name else PurePosixPath, name)
    for name in KNOWN["harmless"].split()
]
"""Harmless types often stored beside weights, under their names in Python and numpy."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Hold the content of a file of weights."""

    config_path: str  # config path for messages
    file: Path
    # sets of tensors by their key in the file, such as `model_ema`; "": the whole file
    sets: Mapping[str, Tensors]
    # class names recorded in it or in its folder, in the order of its logits
    classes: list[str] | None
    # what its trainer wrote of network and pixels, which shapes may not reveal
    trainer: Mapping[str, Any]

    @property
    def section(self) -> str:
        """Return the config path of its model."""
        return self.config_path.removesuffix(".checkpoint").lstrip("-")

    @property
    def architecture(self) -> str:
        """Return the name of the network that its trainer wrote; "" if none.

        A tag such as `.augreg_in1k` is left out.
        """
        return str(self.trainer.get("model", "")).partition(".")[0]

    def arguments(self, model: str) -> dict[str, Any]:
        """Return the arguments with which its trainer built a network of timm.

        They are {} if it built another network.

        Without those that kd sets itself: a file names no other file, no weights to
        fetch and no number of classes.
        """
        if self.architecture != model.partition(".")[0]:
            return {}
        # options of timm's train.py
        arguments = {"gp": "global_pool", "bn_eps": "bn_eps"}
        written = {
            argument: self.trainer[option]
            for option, argument in arguments.items()
            if option in self.trainer
        }
        keywords = self.trainer.get("model_kwargs", {})
        if isinstance(keywords, dict):
            written |= keywords
        return {
            key: value
            for key, value in written.items()
            if key not in KNOWN["set_by_kd"]
        }

    def named_among(self, networks: Iterable[str]) -> list[str]:
        """Return the networks named by the trainer or the file, the likeliest first.

        A file's name may leave out the `tf_` of networks that pad as TensorFlow does.
        """
        trained = letters_of(self.architecture)
        stem = letters_of(self.file.stem)
        named = [
            name
            for name in networks
            if letters_of(name) == trained
            or letters_of(name.removeprefix("tf_")) in stem
        ]
        named.sort(
            key=lambda name: (
                letters_of(name) != trained,
                letters_of(name) not in stem,
                -len(name),
            )
        )
        return named


def letters_of(name: str) -> str:
    """Return the letters and digits of a name in lower case."""
    return re.sub("[^a-z0-9]", "", name.lower())


def weight_files(config_path: str, place: str) -> list[Path]:
    """Return the file of weights in a configuration, or all of its parts."""
    path = Path(packages.fetch(config_path, place))
    path = path.parent if path.name.endswith(".index.json") else path
    require_no_adapter(config_path, path)
    pattern = PART.sub(r"-*-of-\1", path.name)
    if path.is_dir():
        listings = (sorted(path.glob(names)) for names in KNOWN["folder"])
        files = next(filter(None, listings), [])
    else:
        files = [path] if pattern == path.name else sorted(path.parent.glob(pattern))
    if not all(file.is_file() for file in files or [path]):
        for names, remedy in KNOWN["divided"].items():
            if any(path.glob(names)):
                raise ModelError(
                    config_path,
                    f"'{path}' has the weights in parts",
                    "One file",
                    remedy.format(folder=path),
                )
        allowed = (
            "A .safetensors or .pth file, or a folder with one; `kd-teach` fits a"
            " teacher"
        )
        raise ModelError(config_path, f"no file '{path}'", allowed, "Check the path")
    numbered = PART.search(files[0].name)
    if numbered and len(files) != int(numbered[1]):
        wrong = (
            f"'{files[0]}' is one of {int(numbered[1])} parts, of which"
            f" {len(files)} are in its folder"
        )
        raise ModelError(config_path, wrong, "All of them", "Copy the others beside it")
    return files


def require_no_adapter(config_path: str, folder: Path) -> None:
    """Refuse a folder whose weights need an adapter beside them."""
    if (folder / "adapter_config.json").is_file():
        wrong = (
            f"'{folder}' has an adapter (LoRA), so that the weights beside it are not"
            " those that were trained"
        )
        remedy = (
            "Merge it, `model.merge_and_unload().save_pretrained('merged')`, and name"
            " that folder"
        )
        raise ModelError(config_path, wrong, "Weights with the adapter merged", remedy)


def read_weights(config_path: str, place: str) -> Weights:
    """Read a file of weights by its content, not its ending.

    Its code is not run.
    """
    files = weight_files(config_path, place)
    content: dict[Any, Any] = {}
    for file in files:
        loaded = READERS[_kind(config_path, file)](config_path, file)
        if isinstance(loaded, dict):
            content |= loaded
    nested = dict(_nested(content))
    named = {
        place: _tensors_by_name(inside)
        for place, inside in nested.items()
        if not re.search(KNOWN["beside"], place)
    }
    sets = {
        place: tensors
        for place, tensors in named.items()
        if any(tensor.ndim for tensor in tensors.values())
    }
    _require_few(config_path, files[0], max(map(len, sets.values()), default=0))
    if not sets:
        allowed = "A state_dict, alone or in a dictionary"
        raise ModelError(
            config_path,
            f"'{files[0]}' holds no tensors by name",
            allowed,
            "Save model.state_dict()",
        )
    recorded = [
        _class_list(value)
        for inside in nested.values()
        for key, value in inside.items()
        if CLASSES(str(key))
    ]
    classes = next(filter(None, recorded), None) or folder_classes(
        files[0].parent, config_path
    )
    wrote = {"model": content.get("arch"), **nested.get("args", {})}
    trainer = {key: wrote[key] for key in KNOWN["recorded"] if wrote.get(key)}
    return Weights(config_path, files[0], sets, classes, trainer)


def _require_few(config_path: str, file: Path, count: int) -> None:
    if count > LARGEST:
        allowed = f"At most {LARGEST:,}; networks have some thousands"
        raise ModelError(
            config_path,
            f"'{file}' holds {count:,} tensors",
            allowed,
            "Save model.state_dict() of one network",
        )


def _kind(config_path: str, file: Path) -> str:
    """Return the name of the reader for a file."""
    with file.open("rb") as opened:
        first = opened.read(512)
    for mark, kind, remedy in KNOWN["kinds"][1:]:
        if re.match(mark, first.decode("latin-1"), re.S):
            if kind in READERS:
                return kind
            raise ModelError(
                config_path,
                f"'{file}' is no file of weights but {kind}",
                "",
                remedy.format(file=file),
            )
    wrong = "its first bytes are of no format that is known" if first else "it is empty"
    raise ModelError(
        config_path,
        f"'{file}' cannot be read as weights ({wrong})",
        "A .safetensors file, or what torch.save wrote",
        "Write it anew",
    )


def _metadata(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the network's name and the class names, written as JSON, of a header."""
    recorded: dict[str, Any] = {key: texts[key] for key in ("arch",) if key in texts}
    for key in filter(CLASSES, texts):
        # other programs write other texts
        with suppress(ValueError, RecursionError):
            recorded[key] = _class_list(json.loads(texts[key]))
    return recorded


def _safetensors(config_path: str, file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            _require_few(config_path, file, len(names))
            tensors = {name: opened.get_tensor(name) for name in names}
            return {**_metadata(opened.metadata() or {}), **tensors}
    except (SafetensorError, OSError) as error:
        raise ModelError(
            config_path,
            f"'{file}' is not whole safetensors ({first_sentence(error)})",
            "",
            "Write the file anew",
        ) from error


def _pickle(config_path: str, file: Path) -> Any:
    """Read tensors and plain values from torch.save.

    The error names other objects and how to rewrite the file.
    """
    # older versions take no other names
    torch.serialization.add_safe_globals(
        _CLASSES + _RENAMED * (torch.__version__ >= "2.7")
    )
    try:
        # the format before torch 1.6, or another ending, cannot be mapped
        with suppress(Exception):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        with file.open("rb") as opened:
            return torch.load(opened, map_location="cpu", weights_only=True)
    # the unpickler raises many types, all caused by the file
    except Exception as error:
        message = str(error) or type(error).__name__
    foreign = ", ".join(_foreign_objects(file)[:3])
    foreign = foreign or " ".join(re.findall(r"GLOBAL (\S+)", message)[:1])
    script = "TorchScript" in message
    if script:
        reason = "a TorchScript archive, which is code"
    elif foreign:
        reason = f"objects of {foreign}, whose reading may run code"
    else:
        reason = first_sentence(message)
    remedy = "Save it anew"
    if foreign or script:
        command = _rewriting_command(file, script)
        remedy = f"If you trust its source, rewrite it: {command}"
    if foreign.startswith("ultralytics"):
        remedy = (
            f"Write `yolo export model={file} format=onnx`, then set kind: onnx and"
            " outputs: probabilities"
        )
    raise ModelError(
        config_path,
        f"'{file}' cannot be read as weights ({reason})",
        "Tensors by name, with numbers, texts and paths beside them",
        remedy,
    )


def _foreign_objects(file: Path) -> list[str]:
    """Return the names of objects that are not weights; those of libraries last."""
    libraries = ("torch.", "functools.", "collections.", "builtins.")
    with suppress(Exception):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
        return sorted(names, key=lambda name: (name.startswith(libraries), name))
    return []


def _rewriting_command(file: Path, script: bool) -> str:
    """Return the command that rewrites a file with weights only.

    A module becomes its state_dict.
    """
    loaded = (
        f"torch.jit.load({str(file)!r})"
        if script
        else f"torch.load({str(file)!r}, 'cpu', weights_only=False)"
    )
    code = (
        f"import torch; c = {loaded}; c = c if isinstance(c, dict) else dict(model=c); "
    )
    code += (
        "s = [(k, v.state_dict() if hasattr(v, 'state_dict') else v) for k, v in"
        " c.items()]; "
    )
    code += (
        "ok = lambda v: torch.is_tensor(v) or (isinstance(v, dict) and"
        " all(map(torch.is_tensor, v.values()))); "
    )
    return (
        f'python -c "{code}torch.save({{k: v for k, v in s if ok(v)}},'
        f' {str(file.with_suffix(".weights.pth"))!r})"'
    )


READERS: dict[str, Callable[[str, Path], Any]] = {
    "safetensors": _safetensors,
    "pickle": _pickle,
}
"""Readers by kind in `weights.json`: (config path, file) -> dictionaries with tensors
by name.
"""


def _nested(
    content: dict[Any, Any], place: str = ""
) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield nested dictionaries by their place in the file."""
    yield place, content
    for key, value in content.items():
        inside = vars(value) if isinstance(value, argparse.Namespace) else value
        if isinstance(key, str) and isinstance(inside, dict):
            yield from _nested(inside, f"{place}.{key}".strip("."))


def _tensors_by_name(inside: dict[Any, Any]) -> Tensors:
    return {
        name: value
        for name, value in inside.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }


def _class_list(value: Any) -> list[str]:
    """Return class names in the order of the logits, or [].

    `value` is a list, {name: position} or {position: name}.
    """
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return []
    positions: list[tuple[str, Any]] = [
        (str(key), item) if isinstance(item, str) else (str(item), key)
        for key, item in value.items()
    ]
    if not all(
        place.isdecimal() and isinstance(name, str) for place, name in positions
    ):
        return []
    return [name for _, name in sorted(positions, key=lambda pair: int(pair[0]))]
