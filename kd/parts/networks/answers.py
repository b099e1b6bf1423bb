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
from kd.models.answer_table import AnswerTable, read_answers, strip_common_folder
from kd.models.spec import DatasetSpec, Spec
from kd.parts.networks._shared import columns, named, require_logits, to_logits

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

    runtime, reads_ids = "a table", True

    def __init__(
        self,
        values: Tensor,
        rows: Sequence[Tensor],
        classes: Sequence[str] = (),
        probabilities: bool = False,
        to_logits: Callable[[Tensor], Tensor] = Tensor.float,
        pick: nn.Module | None = None,
    ) -> None:
        """Store a table [V, N, C] and the row of each training, validation and test
        image.
        """
        super().__init__()
        self.network = nn.Module()
        self.values, self.rows, self.probabilities, self.to_logits = (
            values,
            rows,
            probabilities,
            to_logits,
        )
        self.classes, self.num_classes, self.pick = (
            classes,
            len(classes),
            pick or nn.Identity(),
        )
        self.features = () if classes else ("pooled",)
        self.split = 0
        self.notes: tuple[str, ...] = ()

    def validation(self, test: bool = False) -> TableTeacher:
        other = copy.copy(self)
        other.split = 2 if test else 1
        return other

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for tensor in (
            self.values,
            *self.rows[:2],
        ):  # no weight depends on outputs for test images
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
        found = self.values[number][rows_B].to(image.device, torch.float32)
        if not self.num_classes:
            return Outputs(found.new_zeros(len(found), 0), {"pooled": found})
        return Outputs(self.pick(self.to_logits(found)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TableTeacher:
        return copy.copy(self)  # it is immutable and may be large


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> TableTeacher:
    """Read the table and find the row of each image."""
    config_path = f"{spec.config_path}.model"
    spec.require_bare("a table has none")
    if spec.images is None:
        raise ModelError(
            f"{spec.config_path}.kind",
            "is answers, which needs images with names",
            "",
            "",
        )
    table = read_answers(spec.model, config_path)
    _check_views(spec.config_path, table, spec.images)
    if spec.logits == (table.meaning == "embeddings") or set(features) - (
        set() if spec.logits else {"pooled"}
    ):
        needed = " and ".join([*["logits"][: int(spec.logits)], *sorted(features)])
        wrong = f"'{spec.model}' holds {table.meaning}, but the losses need {needed}"
        raise ModelError(
            config_path,
            wrong,
            "A table of the outputs that the losses read",
            "Take other losses, or another table",
        )
    images, values = spec.images, table.values
    names = strip_common_folder([*table.names, *table.val_names], images.train.name(0))
    if table.val_values is not None:
        values = torch.cat(
            [values, table.val_values[None].expand(len(values), -1, -1)], 1
        )
    rows = {name: row for row, name in enumerate(names[: len(table.names)])}
    val_rows = {
        **rows,
        **{name: row for row, name in enumerate(names) if row >= len(rows)},
    }
    rows, val_rows = (
        {nfc(name): row for name, row in one.items()} | one for one in (rows, val_rows)
    )
    splits = {"training": images.train, "validation": images.val, "test": images.test}
    shown = {name: source for name, source in splits.items() if source is not None}
    found = [
        _rows(config_path, rows if name == "training" else val_rows, one, name)
        for name, one in shown.items()
    ]
    if spec.logits:
        for rows_N, source in zip(found, shown.values(), strict=True):
            _require_logits(spec, options.outputs, values[0], rows_N, source)
        classes, pick = named(spec, values.shape[2], table.classes, options.classes)
        spec.require_meaning(table.problem_type)
        change = to_logits(spec, options.outputs)
        model = TableTeacher(
            values, found, classes, options.outputs == "probabilities", change, pick
        )
    else:
        model = TableTeacher(values, found)
    model.notes = _unseen(table, images)
    return model


def _require_logits(
    spec: Spec, meaning: str, values: Tensor, rows_N: Tensor, source: Source
) -> None:
    for start in range(0, len(rows_N), CHECKED):
        first = max(
            0, min(start, len(rows_N) - CHECKED)
        )  # never few: one row may look like probabilities
        answer_BC = values[rows_N[first : first + CHECKED]].float()
        try:
            require_logits(spec, answer_BC, meaning)
        except ModelError as error:
            assert spec.task is not None
            wanted = meaning == "probabilities"
            other = [
                row
                for row, one in enumerate(answer_BC)
                if spec.task.are_probabilities(one[None]) != wanted
            ]
            id = first + next(iter(other), 0)
            raise ModelError(
                error.config_path,
                f"{error.wrong}: '{source.name(id)}'",
                error.allowed,
                error.remedy,
            ) from error


def _unseen(table: AnswerTable, images: DatasetSpec) -> tuple[str, ...]:
    shown = images.transform
    plain = {"crop": 1.0, "flip": 0.0, "jitter": 0.0, "policy": ""}
    changes = [
        f"{name} {shown[name]}" for name, value in plain.items() if shown[name] != value
    ]
    if table.made_for or not changes:
        return ()
    return (
        (
            "its outputs are for whole images; the student sees augmented ones"
            f" (data.augment: {', '.join(changes)})"
        ),
    )


def _rows(
    config_path: str, rows: Mapping[str, int], source: Source, split: str
) -> Tensor:
    found = [
        rows.get(source.name(id), rows.get(nfc(source.name(id)), -1))
        for id in range(len(source))
    ]
    missing = [id for id, row in enumerate(found) if row < 0]
    if missing:
        there = next(iter(rows), "nothing")
        first = source.name(missing[0])
        wrong = (
            f"has no output for {len(missing)} of {len(found)} {split} images, the"
            f" first '{first}'"
        )
        allowed = f"Names as kd lists them; the table's first is '{there}'"
        raise ModelError(
            config_path,
            wrong,
            allowed,
            "Name its rows so, or drop those images from the data",
        )
    return torch.tensor(found)


def _check_views(config_path: str, table: AnswerTable, images: DatasetSpec) -> None:
    shown = json.loads(json.dumps(images.pixel_facts()))
    if not table.made_for:
        mixes = (shown["transform"]["mixup"] or shown["transform"]["cutmix"]) and shown[
            "transform"
        ]["mix_probability"]
        if mixes or len(table.values) > 1:
            if mixes:
                wrong = "mixes images, but the table has outputs of single images"
                raise ModelError(
                    "data.augment",
                    wrong,
                    "",
                    "Set data.augment.mixup=0 data.augment.cutmix=0",
                )
            wrong = (
                f"is a table of {len(table.values)} views that does not describe its"
                " views"
            )
            raise ModelError(
                f"{config_path}.model", wrong, "", "Export it with kd-cache --export"
            )
        return
    for name, value in shown.items():
        if table.made_for.get(name) != value:
            wrong = (
                f"has outputs for views of another {name} ({table.made_for.get(name)});"
                f" this run has {value}"
            )
            raise ModelError(
                f"{config_path}.model",
                wrong,
                "The views for which it was exported",
                "Set the same, or export",
            )
