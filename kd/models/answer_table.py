"""Read and write a table of teacher outputs by file name.

`.safetensors`, which `kd-cache --export` writes too:

    logits      float [N, C], or [V, N, C] for V views of each image; or `embeddings`
                [N, D]
    names       uint8: the N names in UTF-8, joined by zero bytes; a name is the
                image's path in the data's root
    validation.logits, validation.names
                the same for validation images that are not among `names`
    metadata    `classes`: JSON list of C names; `made_for`: JSON, the transform of the
                views' pixels; `problem_type`: transformers' name for one label per
                image, or several

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
PLAIN = {
    "crop": 1.0,
    "flip": 0.0,
    "jitter": 0.0,
    "policy": "",
    "erase": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
}
"""Transform of training images, by its keys in a table, that shows whole images."""
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
    """Hold the outputs of a teacher by file name."""

    meaning: str  # "logits" or "embeddings"
    names: Sequence[str]
    values: Tensor  # [V, N, C or D], as stored
    classes: Sequence[str] = ()  # C names; empty: the file has none
    val_names: Sequence[str] = ()
    # [M, C or D]: of validation images that are not among `names`
    val_values: Tensor | None = None
    made_for: Mapping[str, Any] = field(default_factory=dict)
    """Transform of the views' pixels; empty: outputs are for the whole image."""
    # one of `kd.models.timm_folder.PROBLEM_TYPES`; empty: unknown
    problem_type: str = ""


def augmentations(transform: Mapping[str, Any]) -> list[str]:
    """Return `key value` of what a transform changes in whole images."""
    return [
        f"{key} {transform[key]}"
        for key, plain in PLAIN.items()
        if transform.get(key, plain) != plain
    ]


def read_answers(path: str, config_path: str) -> AnswerTable:
    """Read a table of outputs."""
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
        table = _read_csv(file) if ending in (".csv", ".tsv") else _read_arrays(file)
    except FAILURES as error:
        reason = first_sentence(error)
        allowed = "logits or embeddings, with names; see docs/weights.md"
        raise ModelError(
            config_path,
            f"'{path}' cannot be read as a table of outputs ({reason})",
            allowed,
            "Write it anew",
        ) from error
    table = replace(
        table,
        names=[posixpath.normpath(name) for name in table.names],
        val_names=[posixpath.normpath(name) for name in table.val_names],
    )
    _check_table(table, path, config_path)
    return table


def strip_common_folder(names: Sequence[str], example: str) -> list[str]:
    """Strip the common folder of absolute names.

    `example` is one of the names in kd's listing, which the results then match.
    """
    if not all(name.startswith("/") for name in names):
        return list(names)
    ending = f"/{example}"
    folders = (name[: -len(example)] for name in names if name.endswith(ending))
    folder = next(folders, "")
    return [name.removeprefix(folder) for name in names]


def _check_table(table: AnswerTable, path: str, config_path: str) -> None:
    outputs = [table.values]
    if table.val_values is not None:
        outputs.append(table.val_values[None])
    splits = [table.names, table.val_names]
    problem = ""
    rows = [values.shape[1] if values.ndim == 3 else -1 for values in outputs]
    expected = [len(names) for names in splits if names or names is table.names]
    if any(values.ndim != 3 or not values.is_floating_point() for values in outputs):
        problem = "its outputs are not an array of floating point numbers"
    elif len({values.shape[2] for values in outputs}) > 1:
        problem = "it has outputs of several widths"
    elif rows != expected:
        problem = f"it has {sum(rows)} outputs and {sum(expected)} names"
    elif table.classes and len(table.classes) != table.values.shape[2]:
        problem = (
            f"it has {table.values.shape[2]} numbers per image and {len(table.classes)}"
            " classes"
        )
    elif repeated := [
        name for names in splits for name, count in Counter(names).items() if count > 1
    ]:
        problem = f"it has the image '{repeated[0]}' twice"
    elif len({*table.classes}) < len(table.classes):
        problem = (
            f"it has the class '{Counter(table.classes).most_common(1)[0][0]}' twice"
        )
    elif broken := [
        names[row]
        for names, values in zip(splits, outputs, strict=False)
        for row in _rows_not_finite(values)
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


def _rows_not_finite(values: Tensor) -> list[int]:
    return (~values.isfinite().all(2).all(0)).nonzero()[:, 0].tolist()


def write_answers(path: str | Path, answers: AnswerTable) -> None:
    """Write a table as .safetensors, without the axis V if there is one view.

    OSError: it cannot be written.
    """
    values = answers.values[0] if len(answers.values) == 1 else answers.values
    tensors = {answers.meaning: values.contiguous(), "names": _encoded(answers.names)}
    if answers.val_values is not None:
        tensors[f"validation.{answers.meaning}"] = answers.val_values.contiguous()
        tensors["validation.names"] = _encoded(answers.val_names)
    metadata = {
        "classes": json.dumps(list(answers.classes)),
        "made_for": json.dumps(dict(answers.made_for)),
        "problem_type": answers.problem_type,
    }
    try:
        save_file(tensors, str(path), metadata=metadata)
    except SafetensorError as error:  # safetensors reports the OSError only in its text
        raise OSError(errno.EIO, str(error)) from error
    share(Path(path))


def _encoded(names: Sequence[str]) -> Tensor:
    return torch.frombuffer(
        bytearray("\0".join(names).encode("utf-8", "surrogateescape")),
        dtype=torch.uint8,
    )


def _arrays(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a .npz or .safetensors file, and its metadata."""
    if file.suffix.lower() == ".npz":
        # NumPy does not close a damaged file
        with file.open("rb") as raw, np.load(raw, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}, {}
    with safe_open(str(file), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
        return tensors, opened.metadata() or {}


def _as_tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(np.ascontiguousarray(array))


def _texts(array: Any) -> list[str]:
    """Return the texts of an array or of NUL-separated bytes; [] for None."""
    if array is None or (isinstance(array, Tensor) and not array.numel()):
        return []
    if isinstance(array, Tensor):
        return array.numpy().tobytes().decode("utf-8", "surrogateescape").split("\0")
    return [str(text) for text in array]


def _class_texts(arrays: dict[str, Any], metadata: dict[str, str]) -> list[str]:
    return _texts(arrays.get("classes")) or json.loads(metadata.get("classes", "[]"))


def _read_arrays(file: Path) -> AnswerTable:
    arrays, metadata = _arrays(file)
    meanings = [meaning for meaning in MEANINGS if meaning in arrays]
    if len(meanings) != 1:
        raise ValueError(
            f"it has {', '.join(arrays) or 'nothing'}; one of logits and embeddings is"
            " expected"
        )
    [meaning] = meanings
    values = _as_tensor(arrays[meaning])
    val_values = arrays.get(f"validation.{meaning}")
    return AnswerTable(
        meaning,
        _texts(arrays.get("names")),
        values if values.ndim == 3 else values[None],
        _class_texts(arrays, metadata),
        _texts(arrays.get("validation.names")),
        None if val_values is None else _as_tensor(val_values),
        json.loads(metadata.get("made_for", "{}")),
        metadata.get("problem_type", ""),
    )


def _read_csv(file: Path) -> AnswerTable:
    with file.open(newline="", encoding="utf-8-sig") as opened:
        reader = csv.reader(
            opened, delimiter="\t" if file.suffix.lower() == ".tsv" else ","
        )
        header = [name.strip() for name in next(filter(None, reader), [])]
        if len(header) < 3 or header[0] != "name":
            raise ValueError("the first line is not `name,CLASS,CLASS,...`")
        names: list[str] = []
        values: list[np.ndarray] = []
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
    logits = np.stack(values) if values else np.zeros((0, len(header) - 1), np.float32)
    return AnswerTable("logits", names, torch.from_numpy(logits)[None], header[1:])


def read_vectors(path: str, config_path: str) -> tuple[list[str], Tensor]:
    """Read class names and vectors [C, D] from a .safetensors or .npz file.

    The names are empty if the file has none.
    """
    try:
        arrays, metadata = _arrays(Path(path).expanduser())
        vectors = _as_tensor(arrays["vectors"])
        names = _class_texts(arrays, metadata)
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
