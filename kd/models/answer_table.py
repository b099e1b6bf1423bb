"""Read and write a table of teacher outputs by file name.

`.safetensors`, which `kd-cache --export` writes too:

    logits             float [N, C], or [V, N, C] for V views of each image; or `embeddings` [N, D]
    names              uint8: the N names in UTF-8, joined by zero bytes; a name is the image's path in the data's root
    validation.logits, validation.names      the same for validation images that are not among `names`
    metadata           `classes`: JSON list of C names; `made_for`: JSON, the transform of the views' pixels;
                       `problem_type`: transformers' name for one label per image, or several

`.npz` has the arrays `logits` or `embeddings`, `names` and `classes`, the latter two as
text. `.csv` and `.tsv` begin with `name,CLASS,CLASS,...`, one image a line.

Shape legend: N images, V views, C classes, D width of an embedding.
"""

import csv
import errno
import json
import posixpath
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kd.core.errors import ModelError, first_sentence
from kd.files.storage import share

ENDINGS = (".safetensors", ".npz", ".csv", ".tsv")
MEANINGS = ("logits", "embeddings")
FAILURES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    SafetensorError,
    EOFError,
    csv.Error,
    BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """A table of outputs."""

    meaning: str  # "logits" or "embeddings"
    names: Sequence[str]
    values: Tensor  # [V, N, C or D], as stored
    classes: Sequence[str] = ()  # C names; empty: the file has none
    val_names: Sequence[str] = ()
    val_values: Tensor | None = (
        None  # [M, C or D]: of validation images that are not among `names`
    )
    made_for: Mapping[str, Any] = field(default_factory=dict)
    """Transform of the views' pixels; empty: outputs are for the whole image."""
    problem_type: str = (
        ""  # one of `kd.models.timm_folder.PROBLEM_TYPES`; empty: unknown
    )


def read(path: str, config_path: str) -> AnswerTable:
    """Read a table."""
    file = Path(path).expanduser()
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        remedy = "See docs/weights.md"
        if ending == ".npy":
            remedy = (
                "It names no images: write np.savez('FILE.npz', logits=..., names=...,"
                " classes=...)"
            )
        raise ModelError(
            config_path,
            f"is '{path}'",
            f"A file that ends in {', '.join(ENDINGS)}",
            remedy,
        )
    try:
        found = (_csv if ending in (".csv", ".tsv") else _binary)(file)
    except FAILURES as error:
        reason = first_sentence(error)
        allowed = "logits or embeddings, with names; see docs/weights.md"
        raise ModelError(
            config_path,
            f"'{path}' cannot be read as a table of outputs ({reason})",
            allowed,
            "Write it anew",
        ) from error
    names, val_names = (
        [posixpath.normpath(name) for name in each]
        for each in (found.names, found.val_names)
    )
    found = replace(found, names=names, val_names=val_names)
    _check(found, path, config_path)
    return found


def below(names: Sequence[str], example: str) -> list[str]:
    """Strip the common folder from absolute names, so that they match `example`, a name
    in kd's listing.
    """
    absolute = all(name.startswith("/") for name in names)
    folder = next(
        (
            name[: -len(example)]
            for name in names
            if absolute and name.endswith(f"/{example}")
        ),
        "",
    )
    return [name.removeprefix(folder) for name in names]


def _check(found: AnswerTable, path: str, config_path: str) -> None:
    tables = [
        found.values,
        *([] if found.val_values is None else [found.val_values[None]]),
    ]
    both, problem = [found.names, found.val_names], ""
    rows = [one.shape[1] if one.ndim == 3 else -1 for one in tables]
    expected = [len(names) for names in both if names or names is found.names]
    if any(one.ndim != 3 or not one.is_floating_point() for one in tables):
        problem = "its outputs are not an array of floating point numbers"
    elif len({one.shape[2] for one in tables}) > 1:
        problem = "it has outputs of several widths"
    elif rows != expected:
        problem = f"it has {sum(rows)} outputs and {sum(expected)} names"
    elif found.classes and len(found.classes) != found.values.shape[2]:
        problem = (
            f"it has {found.values.shape[2]} numbers per image and {len(found.classes)}"
            " classes"
        )
    elif twice := [
        name for names in both for name, count in Counter(names).items() if count > 1
    ]:
        problem = f"it has the image '{twice[0]}' twice"
    elif len({*found.classes}) < len(found.classes):
        problem = (
            f"it has the class '{Counter(found.classes).most_common(1)[0][0]}' twice"
        )
    elif broken := [
        names[row]
        for names, one in zip(both, tables, strict=False)
        for row in _not_finite(one)
    ]:
        problem = (
            f"it has NaN or infinity for '{broken[0]}', with {len(broken) - 1} more"
            " images"
        )
    if problem:
        raise ModelError(
            config_path,
            f"'{path}': {problem}",
            "One finite output for each name",
            "Correct the table",
        )


def _not_finite(values: Tensor) -> list[int]:
    return (~values.isfinite().all(2).all(0)).nonzero()[:, 0].tolist()


def write(path: str | Path, answers: AnswerTable) -> None:
    """Write a table as .safetensors, without the axis V if there is one view. OSError:
    it cannot be written.
    """
    values = answers.values[0] if len(answers.values) == 1 else answers.values
    tensors = {answers.meaning: values.contiguous(), "names": _joined(answers.names)}
    if answers.val_values is not None:
        tensors |= {f"validation.{answers.meaning}": answers.val_values.contiguous()}
        tensors |= {"validation.names": _joined(answers.val_names)}
    text = {
        "classes": json.dumps(list(answers.classes)),
        "made_for": json.dumps(dict(answers.made_for)),
    }
    text |= {"problem_type": answers.problem_type}
    try:
        save_file(tensors, str(path), metadata=text)
    except SafetensorError as error:  # safetensors reports the OSError only in its text
        raise OSError(errno.EIO, str(error)) from error
    share(Path(path))


def _joined(names: Sequence[str]) -> Tensor:
    return torch.frombuffer(
        bytearray("\0".join(names).encode("utf-8", "surrogateescape")),
        dtype=torch.uint8,
    )


def _arrays(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a .npz file, or the tensors of a .safetensors file and its
    metadata.
    """
    if file.suffix.lower() == ".npz":
        with (
            file.open("rb") as raw,
            np.load(raw, allow_pickle=False) as opened,
        ):  # NumPy does not close a damaged file
            return {name: opened[name] for name in opened.files}, {}
    with safe_open(str(file), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
        return tensors, opened.metadata() or {}


def _tensor(found: Any) -> Tensor:
    return (
        found
        if isinstance(found, Tensor)
        else torch.from_numpy(np.ascontiguousarray(found))
    )


def _texts(found: Any) -> list[str]:
    """Return the texts of an array or of a tensor of NUL-separated bytes; []
    for None.
    """
    if isinstance(found, Tensor):
        return (
            found.numpy().tobytes().decode("utf-8", "surrogateescape").split("\0")
            if found.numel()
            else []
        )
    return [] if found is None else [str(one) for one in found]


def _binary(file: Path) -> AnswerTable:
    found, text = _arrays(file)
    there = [meaning for meaning in MEANINGS if meaning in found]
    if len(there) != 1:
        raise ValueError(
            f"it has {', '.join(found) or 'nothing'}; one of logits and embeddings is"
            " expected"
        )
    values, val_values = _tensor(found[there[0]]), found.get(f"validation.{there[0]}")
    return AnswerTable(
        there[0],
        _texts(found.get("names")),
        values if values.ndim == 3 else values[None],
        _texts(found.get("classes")) or json.loads(text.get("classes", "[]")),
        _texts(found.get("validation.names")),
        None if val_values is None else _tensor(val_values),
        json.loads(text.get("made_for", "{}")),
        text.get("problem_type", ""),
    )


def _csv(file: Path) -> AnswerTable:
    with file.open(newline="", encoding="utf-8-sig") as opened:
        reader = csv.reader(
            opened, delimiter="\t" if file.suffix.lower() == ".tsv" else ","
        )
        header = [name.strip() for name in next(filter(None, reader), [])]
        if len(header) < 3 or header[0] != "name":
            raise ValueError("the first line is not `name,CLASS,CLASS,...`")
        names, values = list[str](), list[np.ndarray]()
        for row in filter(None, reader):
            if len(row) != len(header):
                raise ValueError(
                    f"line {reader.line_num} has {len(row)} fields, the first line has"
                    f" {len(header)}"
                )
            try:
                values.append(np.array(row[1:], np.float32))
            except ValueError as error:
                raise ValueError(f"line {reader.line_num}: {error}") from error
            names.append(row[0])
    table = np.stack(values) if values else np.zeros((0, len(header) - 1), np.float32)
    return AnswerTable("logits", names, torch.from_numpy(table)[None], header[1:])


def read_vectors(path: str, config_path: str) -> tuple[list[str], Tensor]:
    """Return class names (empty: the file has none) and vectors [C, D] of a
    .safetensors or .npz file.
    """
    try:
        found, text = _arrays(Path(path).expanduser())
        vectors = _tensor(found["vectors"])
        names = _texts(found.get("classes")) or json.loads(text.get("classes", "[]"))
    except FAILURES as error:
        reason = first_sentence(error)
        allowed = "A .safetensors or .npz file with `vectors` [classes, width]"
        raise ModelError(
            config_path,
            f"'{path}' cannot be read ({reason})",
            allowed,
            "Check the path",
        ) from error
    if (
        vectors.ndim != 2
        or not vectors.is_floating_point()
        or not vectors.isfinite().all()
    ):
        wrong = f"'{path}' holds `vectors` of shape {list(vectors.shape)}"
        raise ModelError(
            config_path, wrong, "Finite numbers [classes, width]", "Write it anew"
        )
    if names and len(names) != len(vectors):
        wrong = f"'{path}' names {len(names)} classes and holds {len(vectors)} vectors"
        raise ModelError(
            config_path, wrong, "One vector for each class", "Write it anew"
        )
    return names, vectors
