"""A filled cache as a table of answers by file name, for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kd.contracts import Backend, Source, Teacher
from kd.data.loader import LocalLoader, evaluation_plan
from kd.errors import ModelError, RunError
from kd.models.answers import Answers, write
from kd.models.cache import Store
from kd.models.load import Images
from kd.types import Outputs

ROWS = 1024
"""Records that are read at once."""


@dataclass(frozen=True, slots=True)
class Described:
    """What a table of answers says about itself."""

    images: Images
    """Of both splits, and what the views show."""
    classes: Sequence[str]
    """Of the logits; empty: there are none."""
    views: int
    problem_type: str
    """What the logits answer; "": there are none."""


def export_answers(
    path: Path, store: Store, live: Teacher, backend: Backend, loader: LocalLoader, described: Described
) -> None:
    """Write the records of all views, and the teacher's answers for the validation images; all ranks must call it.

    The table is held in memory: views x images x classes, as the cache keeps them.
    """
    if backend.world_size > 1:
        raise RunError("--export", "is written by one process", "", "Fill the cache on all ranks, then export on one")
    arrays = (["logits"] if store.codec.num_classes else []) + list(store.codec.features)
    if arrays not in (["logits"], ["pooled"]):
        wrong = f"the cache keeps {' and '.join(arrays)}"
        raise ModelError("--export", wrong, "Logits alone, or pooled features alone", "Change the losses")
    images = described.images
    values = torch.stack([torch.cat(list(_stored(store, view))) for view in range(described.views)])
    train, val = ([source.name(id) for id in range(len(source))] for source in (images.train, images.val))
    table = Answers(
        meaning="logits" if arrays == ["logits"] else "embeddings",
        names=train,
        values=values,
        classes=list(described.classes),
        val_names=val,
        val_values=_validation(live, backend, loader, len(images.val)).to(values.dtype),
        made_for=images.shown(),
        problem_type=described.problem_type,
    )
    try:
        write(path, table)
    except OSError as error:
        raise RunError("--export", f"'{path}' cannot be written ({error.strerror or error})", "", "") from error


def _stored(store: Store, view: int) -> Iterator[Tensor]:
    for start in range(0, store.num_images, ROWS):
        parts, _, _ = store.parts(view, range(start, min(store.num_images, start + ROWS)))
        yield _only(store.codec.unpack(parts))


def _validation(live: Teacher, backend: Backend, loader: LocalLoader, count: int) -> Tensor:
    found = []
    for batch in backend.put(loader.epoch(evaluation_plan(count, loader.batch_size), 0)):
        found.append(_only(live(batch)).cpu())
    return torch.cat(found)[:count]


def _only(outputs: Outputs) -> Tensor:
    """Return the one array: logits, or pooled features."""
    return outputs.logits if outputs.logits.shape[1] else outputs.features["pooled"]


def require_path(path: str, where: str = "--export") -> Path:
    """Return the file to write, before minutes are spent on the cache."""
    file = Path(path).expanduser()
    if file.suffix != ".safetensors" or not file.parent.is_dir():
        raise RunError(where, f"'{path}' cannot be written", "A .safetensors file in a folder that exists", "")
    return file


def complete(source: Source, missing: int) -> None:
    """Require that no record is missing."""
    if missing:
        wrong = f"{missing} of the records of {len(source)} images are missing: those images cannot be decoded"
        raise RunError("--export", wrong, "Every image has an answer", "Drop them from the data")
