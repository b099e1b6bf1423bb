"""A table of given outputs: logits or embeddings by file name, from an API, another
team, or `kd-cache --export`.

An output belongs to the whole image, while the student sees crops: Beyer et al. 2021
(arXiv:2106.05237) call this a fixed teacher and find it worse than a teacher on the
same crop. A table from `kd-cache --export` has an output per view and requires the same
views.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kd.core.contracts import Source
from kd.core.errors import ModelError
from kd.core.keys import Keys, file_key, keys
from kd.core.text import nfc
from kd.core.types import Outputs
from kd.models.answer_table import (
    AnswerTable,
    augmentations,
    read_answers,
    strip_common_folder,
)
from kd.models.spec import DatasetSpec, Spec
from kd.parts.networks._shared import (
    columns,
    needed_outputs,
    require_logits,
    select_classes,
    to_logits,
)

CHECKED = 64  # outputs checked at a time


@keys
class Options(Keys):
    """Options of a table."""

    outputs: Literal["logits", "probabilities"] = "logits"
    """Content of the column `logits`."""
    classes: str = file_key("")
    """Text file of its class names, one per line, if it has no names or other names
    than the data.
    """


class TableTeacher(nn.Module):
    """Looks up outputs by image id. See `kd.core.contracts.TeacherModel`."""

    runtime = "a table"
    reads_ids = True

    def __init__(
        self,
        values: Tensor,
        rows: Sequence[Tensor],
        classes: Sequence[str] = (),
        probabilities: bool = False,
        to_logits: Callable[[Tensor], Tensor] = Tensor.float,
        pick: nn.Module | None = None,
    ) -> None:
        """Store a table.

        Args:
            values: outputs by view, row and class, [V, N, C].
            rows: the row of each training, validation and test image.
            classes: names of the selected logits; empty: values are embeddings.
            probabilities: whether values are probabilities.
            to_logits: makes logits of values.
            pick: selects logits.
        """
        super().__init__()
        self.network = nn.Module()
        self.values = values
        self.rows = rows
        self.probabilities = probabilities
        self.to_logits = to_logits
        self.classes = classes
        self.num_classes = len(classes)
        self.pick = pick or nn.Identity()
        self.features = () if classes else ("pooled",)
        self.split = 0
        self.notes: tuple[str, ...] = ()

    def validation(self, test: bool = False) -> TableTeacher:
        teacher = copy.copy(self)
        teacher.split = 2 if test else 1
        return teacher

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        # no weight depends on outputs for test images
        for tensor in (self.values, *self.rows[:2]):
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        architecture = {"answers": self.probabilities, **columns(self.pick)}
        return {
            "teacher": digest.hexdigest(),
            "architecture": architecture,
            "input": [],
        }

    def forward(self, image: Tensor, ids: Tensor, view: int = 0) -> Outputs:
        rows_B = self.rows[self.split][ids.cpu()]
        number = 0 if self.split else view % len(self.values)
        answer_BC = self.values[number][rows_B].to(image.device, torch.float32)
        if not self.num_classes:
            return Outputs(answer_BC.new_zeros(len(rows_B), 0), {"pooled": answer_BC})
        return Outputs(self.pick(self.to_logits(answer_BC)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TableTeacher:
        return copy.copy(self)  # it is immutable and may be large


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> TableTeacher:
    """Read the table and find the row of each image."""
    config_path = f"{spec.config_path}.model"
    spec.require_bare("a table has none")
    images = spec.images
    if images is None:
        wrong = "is answers, which needs images with names"
        raise ModelError(f"{spec.config_path}.kind", wrong, "", "")
    table = read_answers(spec.model, config_path)
    _check_views(spec.config_path, table, images)
    _require_outputs(spec, table, features)
    values = table.values
    if table.val_values is not None:
        val_values = table.val_values[None].expand(len(values), -1, -1)
        values = torch.cat([values, val_values], 1)
    names = strip_common_folder([*table.names, *table.val_names], images.train.name(0))
    train_rows = _rows_by_name(names[: len(table.names)])
    val_rows = _rows_by_name(names)
    splits = {"training": images.train, "validation": images.val, "test": images.test}
    sources = {split: source for split, source in splits.items() if source is not None}
    rows = []
    for split, source in sources.items():
        split_rows = train_rows if split == "training" else val_rows
        rows.append(_find_rows(config_path, split_rows, source, split))
    if spec.logits:
        for rows_N, source in zip(rows, sources.values(), strict=True):
            _require_logits(spec, options.outputs, values[0], rows_N, source)
        classes, pick = select_classes(
            spec, values.shape[2], table.classes, options.classes
        )
        spec.require_meaning(table.problem_type)
        teacher = TableTeacher(
            values,
            rows,
            classes,
            options.outputs == "probabilities",
            to_logits(spec, options.outputs),
            pick,
        )
    else:
        teacher = TableTeacher(values, rows)
    teacher.notes = _augmentation_notes(table, images)
    return teacher


def _require_outputs(spec: Spec, table: AnswerTable, features: Collection[str]) -> None:
    """Require that a table has the outputs that the losses read."""
    surplus = set(features) - (set() if spec.logits else {"pooled"})
    if surplus or spec.logits == (table.meaning == "embeddings"):
        needed = needed_outputs(spec, features)
        wrong = f"'{spec.model}' holds {table.meaning}, but the losses need {needed}"
        allowed = "A table of the outputs that the losses read"
        remedy = "Take other losses, or another table"
        raise ModelError(f"{spec.config_path}.model", wrong, allowed, remedy)


def _rows_by_name(names: Sequence[str]) -> dict[str, int]:
    """Return the row of each name and of its NFC; an exact name comes before that."""
    rows = {name: row for row, name in enumerate(names)}
    return {nfc(name): row for name, row in rows.items()} | rows


def _require_logits(
    spec: Spec, meaning: str, values: Tensor, rows_N: Tensor, source: Source
) -> None:
    """Require that the outputs for each image are what `meaning` says."""
    for start in range(0, len(rows_N), CHECKED):
        # never few: one row may look like probabilities
        first = max(0, min(start, len(rows_N) - CHECKED))
        answer_BC = values[rows_N[first : first + CHECKED]].float()
        try:
            require_logits(spec, answer_BC, meaning)
        except ModelError as error:
            assert spec.task is not None
            expected = meaning == "probabilities"
            wrong_rows = [
                row
                for row in range(len(answer_BC))
                if spec.task.are_probabilities(answer_BC[row : row + 1]) != expected
            ]
            id = first + (wrong_rows[0] if wrong_rows else 0)
            wrong = f"{error.wrong}: '{source.name(id)}'"
            raise ModelError(
                error.config_path, wrong, error.allowed, error.remedy
            ) from error


def _augmentation_notes(table: AnswerTable, images: DatasetSpec) -> tuple[str, ...]:
    """Return a note if the student sees other views than the whole images."""
    changes = augmentations(images.transform)
    if table.made_for or not changes:
        return ()
    note = (
        "its outputs are for whole images; the student sees augmented ones"
        f" (data.augment: {', '.join(changes)})"
    )
    return (note,)


def _find_rows(
    config_path: str, rows: Mapping[str, int], source: Source, split: str
) -> Tensor:
    """Return the row of each image [N] of a split."""
    names = [source.name(id) for id in range(len(source))]
    found_N = [rows.get(name, rows.get(nfc(name), -1)) for name in names]
    missing = [name for name, row in zip(names, found_N, strict=True) if row < 0]
    if missing:
        wrong = (
            f"has no output for {len(missing)} of {len(names)} {split} images, the"
            f" first '{missing[0]}'"
        )
        first = next(iter(rows), "nothing")
        allowed = f"Names as kd lists them; the table's first is '{first}'"
        remedy = "Name its rows so, or drop those images from the data"
        raise ModelError(config_path, wrong, allowed, remedy)
    return torch.tensor(found_N)


def _check_views(config_path: str, table: AnswerTable, images: DatasetSpec) -> None:
    """Require that a table was made for the views of this run."""
    views = json.loads(json.dumps(images.pixel_facts()))
    model_path = f"{config_path}.model"
    if table.made_for:
        for key, value in views.items():
            if table.made_for.get(key) != value:
                wrong = (
                    f"has outputs for views of another {key}"
                    f" ({table.made_for.get(key)}); this run has {value}"
                )
                allowed = "The views for which it was exported"
                raise ModelError(model_path, wrong, allowed, "Set the same, or export")
        return
    transform = views["transform"]
    if (transform["mixup"] or transform["cutmix"]) and transform["mix_probability"]:
        wrong = "mixes images, but the table has outputs of single images"
        remedy = "Set data.augment.mixup=0 data.augment.cutmix=0"
        raise ModelError("data.augment", wrong, "", remedy)
    if len(table.values) > 1:
        wrong = (
            f"is a table of {len(table.values)} views that does not describe its views"
        )
        raise ModelError(model_path, wrong, "", "Export it with kd-cache --export")
