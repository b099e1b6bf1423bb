"""The distillation loss of a batch, for a training loop that is not kd's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kd import config
from kd.core.errors import ConfigError, DataError
from kd.core.evaluation import Task
from kd.core.types import Batch, Dims, Outputs
from kd.data.map_dataset import Labels
from kd.engine.criterion import Criterion
from kd.jobs.api.arguments import (
    Losses,
    by_argument,
    count_classes,
    data_section,
    loss_sections,
    name_arguments,
    preserve_random_state,
    require_classes,
    require_teachers,
)
from kd.jobs.api.stored_views import StoredViews
from kd.models.classifier import Ensemble, LogitsModel, main_output
from kd.models.live_teacher import LiveTeacher
from kd.setup.auto import completed
from kd.setup.recipe import Recipe, resolve
from kd.setup.student import build_criterion

Teacher = nn.Module | Callable[[Tensor], Any]
"""From images [B, ...] to logits [B, C]: a tensor, a tuple that begins with it, or an
object with `.logits`.
"""


class _Function(nn.Module):
    """Let a callable without weights stand where a module is asked for."""

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.call = call

    def __deepcopy__(self, memo: Any) -> "_Function":
        return self  # it may hold what cannot be copied, such as a session

    @torch.no_grad()
    def forward(self, images: Tensor) -> Any:
        return self.call(images)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Everything that the first batch decides."""

    task: Task
    criterion: Criterion
    labels: Labels
    live: LiveTeacher
    stored: StoredViews | None  # None: no cache


class Distiller:
    """Compute a distillation loss in the loop of your own or of another library.

        distiller = kd.Distiller(teacher, losses="kl", cache="answers")
        loss = distiller(images, student(images), labels, ids, view=epoch % 4)
        loss.backward()

    It is no module: a trainer neither trains nor saves the teacher. Its first call
    examines the teacher on that batch, and freezes a copy on the images' device.

    Attributes:
        per_image: the last batch's loss of each image, float32 [B], detached.
        terms: the losses of each term by name, unweighted; for logging.
    """

    @name_arguments()
    def __init__(
        self,
        teacher: Teacher | Sequence[Teacher],
        losses: Losses = "kl",
        cache: str | Path | Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the arguments; nothing is run before the first batch.

        Args:
            teacher: maps images [B, ...] to logits: a module, or any callable, whose
                weights are its caller's to freeze. Several: their probabilities are
                averaged.
            losses: as in `kd.distill`, on logits and labels; a loss on features is
                refused.
            cache: a folder for the teacher's outputs, by (id, view), or keys of the
                section `teacher.cache`: `{"path": "answers", "dtype": "fp32"}`.

        Raises:
            ConfigError: a teacher is not callable, an unknown loss or option, or
                `cache` names no folder.
        """
        teachers: Any = teacher if isinstance(teacher, (list, tuple)) else [teacher]
        require_teachers(teachers)
        self._teachers = by_argument(teachers)
        for argument, model in self._teachers.items():
            if not callable(model):
                wrong = f"is {type(model).__name__}"
                allowed = "A module, or a function of a batch of images"
                raise ConfigError(argument, wrong, allowed, "Build the model first")
        self._losses = losses
        self._cache = {"path": str(cache)} if isinstance(cache, (str, Path)) else cache
        if self._cache is not None and not self._cache.get("path"):
            allowed = "A folder, or {'path': FOLDER, ...}"
            raise ConfigError("cache", "names no folder", allowed, "Choose a folder")
        self._kind = self._labels_kind()
        self._parts: _Parts | None = None
        self.per_image = torch.zeros(0)
        self.terms: dict[str, Tensor] = {}

    @name_arguments()
    def __call__(
        self,
        images: Tensor,
        student_outputs: Any,
        labels: Tensor | None = None,
        ids: Tensor | Sequence[int] | None = None,
        view: int = 0,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return the batch's mean loss, a float32 scalar with a gradient.

        Args:
            images: [B, ...], as student and teacher take them.
            student_outputs: the student's logits [B, C] for them, in any form that a
                teacher may return. NaN makes the loss NaN, as in torch's losses.
            labels: class numbers [B], or 0 and 1 for each class [B, C]; None if no loss
                reads them.
            ids: whole numbers >= 0 [B] that say which image is which in each epoch;
                with `cache`, the teacher runs only for a pair of id and view that is
                not stored. None: the teacher runs, and nothing is stored, as for
                evaluation.
            view: number >= 0 of the augmentation. An id with a view always has the same
                pixels; those of the first image are compared.
            weight: float >= 0 [B], by which the images' losses are multiplied, such as
                a sifter's; None: 1.

        Raises:
            ConfigError: an unknown loss, or one that needs more than logits.
            DataError: labels or ids that do not belong to the images; other pixels than
                were stored for an id and view.
            ModelError: the teacher failed an examination, or has other classes than the
                student.
            RunError: the folder holds the outputs of another teacher.
        """
        student = main_output(student_outputs, "student_outputs")
        if student.ndim != 2 or len(student) != len(images):
            wrong = f"has the shape {list(student.shape)} for {len(images)} images"
            raise DataError("student_outputs", wrong, "Logits [images, classes]")
        if self._parts is None:
            kind = self._kind
            if labels is not None:
                kind = "sets" if getattr(labels, "ndim", 1) == 2 else "all"
            self._parts = self._build(images, student.shape[1], kind)
            if labels is not None:
                labels = self._parts.labels.check(labels, "this batch")
        parts = self._parts
        batch = Batch.of(images, _labels(parts, labels, images))
        if weight is not None:
            _require_weight(weight, images)
            batch = replace(batch, weight=weight.to(images.device, torch.float32))
        if ids is None or parts.stored is None:
            teacher = parts.live(batch)
        else:
            teacher = parts.stored(images, ids, view)
        scores = parts.criterion(Outputs(student), teacher, batch)
        self.per_image = scores["per_image"]
        self.terms = {name: scores[name].detach() for name in parts.criterion.names}
        return scores["loss"].mean()

    @preserve_random_state()
    def _labels_kind(self) -> str:
        """Check losses and cache on placeholders; return the first fitting `labels`."""
        errors = []
        for kind in ("all", "sets"):
            try:
                self._criterion(self._recipe(torch.zeros(1, 3, 32, 32), kind), 2)
            except ConfigError as error:
                errors.append(error)
            else:
                return kind
        raise errors[0]

    def _recipe(self, images: Tensor, labels: str) -> Recipe:
        """Check losses and cache by the schema of a configuration."""
        model = " + ".join(map(_name, self._teachers.values()))
        section: dict[str, Any] = {"kind": "torch", "model": model}
        if self._cache is not None:
            section["cache"] = {"views": 1, **self._cache}
        data = {**data_section(images[0], labels), "batch_size": len(images)}
        settings = config.load(
            {
                "run": {"name": "distiller"},
                "data": data,
                "teacher": section,
                "student": {"kind": "torch", "model": "student"},
                "losses": loss_sections(self._losses),
            }
        )
        return resolve(completed(settings, len(images)))

    def _criterion(self, recipe: Recipe, num_classes: int) -> Criterion:
        criterion = self._losses
        if not isinstance(criterion, Criterion):
            dims = Dims(num_classes, 0, 0, labels=_all_labels)
            criterion = build_criterion(recipe.losses, [dims], recipe.seed)
        _require_logits(criterion)
        return criterion

    @preserve_random_state()
    def _build(self, images: Tensor, num_classes: int, kind: str) -> _Parts:
        recipe = self._recipe(images, kind)
        models = [
            LogitsModel(
                model if isinstance(model, nn.Module) else _Function(model), name
            )
            for name, model in self._teachers.items()
        ]
        for model in models:
            count = count_classes(model, images, source="images")
            require_classes(model.config_path, count, num_classes)
        teacher: Any = models[0]
        if len(models) > 1:
            teacher = Ensemble(models, [1.0] * len(models), recipe.task.average)
        # not every device supports torch's inference mode
        live = LiveTeacher(teacher, images.device, inference=False)
        stored = None
        if self._cache is not None:
            names = [_name(model) for model in self._teachers.values()]
            identity = {**teacher.identity(), "model": names}
            stored = StoredViews(live, recipe, identity, num_classes)
        criterion = self._criterion(recipe, num_classes)
        remedy = "Leave images without a label out, or drop the loss on labels"
        checked = Labels("labels", kind, num_classes, remedy)
        return _Parts(recipe.task, criterion.to(images.device), checked, live, stored)


def _name(teacher: Teacher) -> str:
    return getattr(teacher, "__qualname__", type(teacher).__qualname__)


def _labels(parts: _Parts, labels: Any, images: Tensor) -> Tensor:
    """Return labels on the images' device; placeholders if none are read."""
    if labels is not None:
        # reading labels on an accelerator waits for it: there only the first batch's
        # are checked
        if not isinstance(labels, Tensor) or labels.is_cpu:
            labels = parts.labels.check(labels, "this batch")
        _require_rows("labels", labels, images)
        label_dtype = torch.int8 if parts.labels.kind == "sets" else torch.int64
        return labels.to(images.device, label_dtype)
    for name, term in zip(parts.criterion.names, parts.criterion.all, strict=True):
        if term.facts.labels:
            wrong = f"was not given, but '{name}' learns from labels"
            allowed = "A label of each image"
            raise DataError("labels", wrong, allowed, "Pass them, or drop the loss")
    no_labels = parts.task.no_labels(len(images), parts.labels.num_classes)
    return no_labels.to(images.device)


def _require_rows(argument: str, values: Tensor, images: Tensor) -> None:
    if len(values) != len(images):
        wrong = f"has {len(values)} rows for {len(images)} images"
        raise DataError(argument, wrong, "A row for each image")


def _require_weight(weight: Tensor, images: Tensor) -> None:
    _require_rows("weight", weight, images)
    # reading values on an accelerator waits for it
    if weight.is_cpu and not ((weight >= 0) & weight.isfinite()).all():
        wrong = "has a value that is negative, infinite or NaN"
        raise DataError("weight", wrong, "Numbers >= 0", "Correct them")


def _require_logits(criterion: Criterion) -> None:
    for name, term in zip(criterion.names, criterion.all, strict=True):
        if term.facts.features:
            wrong = f"'{name}' reads features, and a Distiller gets logits alone"
            raise ConfigError("losses", wrong, "Losses on logits", "Drop it")


def _all_labels() -> Tensor:
    """Refuse a loss that counts the labels of the training set."""
    wrong = "class_weights count all training labels, and a Distiller sees batches"
    remedy = "Leave class_weights out, or use kd.distill"
    raise ConfigError("losses", wrong, "Losses on the labels of a batch", remedy)
