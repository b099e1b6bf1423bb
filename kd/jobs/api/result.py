"""Hold the results of `kd.train` and `kd.distill`, and export their student."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from kd.core.errors import ConfigError
from kd.core.host import environment
from kd.core.scores import Scores, Trained, samples_of
from kd.core.seeds import evenly_spaced
from kd.core.types import State
from kd.data.loader import batches_of
from kd.data.map_dataset import MapDataset
from kd.files.run_dir import RunDir
from kd.files.templates import html_table
from kd.jobs.api.arguments import Arguments, image_text, map_style
from kd.models.classifier import Classifier, Network, digest, resized
from kd.setup.finished import opened_run
from kd.setup.recipe import Recipe, resolve
from kd.setup.student import best_student

if TYPE_CHECKING:
    from kd.deploy.export.export import WrittenExport

BATCH = 16  # batch size for comparing graphs
LEVEL_TOLERANCE = 0.05
"""Largest distance of a pixel from a whole grey level; 8-bit pixels normalized in
float32 stay within 1e-4.
"""


@dataclass(frozen=True, slots=True, repr=False)
class Result(Trained):
    """Results of a finished run."""

    @classmethod
    def of(cls, trained: Trained) -> Result:
        baseline = cls.of(trained.baseline) if trained.baseline is not None else None
        values = {field.name: getattr(trained, field.name) for field in fields(trained)}
        return cls(**{**values, "baseline": baseline})

    def export(self, target: str | Path | None = None, **options: Any) -> WrittenExport:
        """Export the best student like `kd-export`; code named by the run is executed.

        Args:
            target: the new folder; None: `export` in the run folder.
            options: fields of `kd.deploy.export.flags`, such as `int8=True`.

        Returns:
            The written export.

        Raises:
            KdError: anything that the user can fix, in one line.
        """
        # most callers do not export
        from kd.deploy.export.export import ExportOptions, export

        return export(
            self.folder,
            Path(target) if target else None,
            ExportOptions(**options),
            trust=True,
        )

    @property
    def student(self) -> nn.Module:
        """The best student, from the run folder; code named by the run is executed."""
        folder, stored = opened_run(self.folder, trust=True)
        return best_student(folder, resolve(stored), folder.manifest()["classes"])[0]

    def __repr__(self) -> str:
        return (
            f"Result(folder='{self.folder}', steps={self.steps},"
            f" parameters={self.parameters}, metrics: {_metrics_text(self.metrics)})"
        )

    def _repr_html_(self) -> str:
        scores = Scores.read(RunDir(self.folder).manifest()["scores"])
        row = self.metrics if self.scored is None else self.scored.row
        teachers = scores.of_teachers(row)
        return html_table(
            scores.table(
                {**teachers, "student": row},
                samples_of(self.scored, teachers, "student"),
            )
        )


@dataclass(frozen=True, slots=True, repr=False)
class Distilled:
    """Results of `distill`."""

    # the passed module, trained in place; with `ema` it has the averaged weights
    student: nn.Module
    metrics: dict[str, float]  # the last validation row
    # every row of metrics, oldest first; training rows include the timing
    rows: list[dict[str, Any]]
    state: State
    folder: Path | None  # folder of checkpoints and metrics; None: not written
    arguments: Arguments
    recipe: Recipe
    classes: Sequence[str]  # the training data's class names, or class_0, class_1, ...
    data: str  # a hash of the data; "": unknown

    def export(
        self,
        folder: str | Path,
        mean: Sequence[float],
        std: Sequence[float],
        classes: Sequence[str] = (),
        **options: Any,
    ) -> WrittenExport:
        """Export the student as `kd-export` does: weights, graphs, model card.

        The graph for `kd-serve` and `kd-predict` takes 8-bit pixels and normalizes
        them. Each graph is compared with PyTorch on images of `val`, converted back to
        8 bits with `mean` and `std`; it is refused if its outputs differ.

        Args:
            folder: the new folder; an earlier export there is replaced.
            mean: per channel, for pixels in 0..1, as in the transform of `val`.
            std: standard deviation per channel, likewise.
            classes: names in the order of the logits; empty: the `classes` of the
                training dataset, or numbered.
            options: fields of `kd.deploy.export.flags.ExportOptions` by their own
                names, such as `int8=True`.

        Returns:
            The written export.

        Raises:
            ConfigError: images that are not square RGB pixels, or have another
                normalization.
            ModelError: a graph's outputs differ from PyTorch's.
            RunError: something else lies at `folder`, or the disk is full.
        """
        # most callers do not export
        from kd.deploy.export.export import ExportOptions, Subject, write

        recipe = self.recipe
        names = list(classes or self.classes)
        if len(names) != len(self.classes):
            wrong = (
                f"names {len(names)} classes, but the student returns"
                f" {len(self.classes)}"
            )
            raise ConfigError(
                "classes", wrong, "One name for each logit", "Correct the names"
            )
        pixels = Pixels(self.arguments, tuple(mean), tuple(std))
        size = next(pixels.batches(1))[0].shape[-1]
        network = Network(copy.deepcopy(self.student).cpu().eval())
        student = Classifier(
            network,
            len(names),
            size,
            mean,
            std,
            architecture={"module": type(self.student).__qualname__},
            classes=names,
        )
        run = replace(recipe.config.run, name=Path(folder).resolve().name)
        data = replace(recipe.config.data, image_size=size)
        subject = Subject(
            recipe=recipe.with_(run=run, data=data),
            student=student,
            classes=names,
            data=self.data or "not recorded",
            provenance={
                "kd": environment()["packages"]["kd"],
                "step": self.state.step,
                "metrics": self.metrics,
                "run": run.name,
                "digest": digest(network),
                "eval_crop": 1.0,
            },
            origin="those of the module that was passed to kd.distill",
            images=lambda: nullcontext(pixels.batches),
        )
        return write(subject, Path(folder), ExportOptions(**options))

    def __repr__(self) -> str:
        folder = f"'{self.folder}'" if self.folder is not None else None
        return (
            f"Distilled(folder={folder}, steps={self.state.step},"
            f" metrics: {_metrics_text(self.metrics)})"
        )

    def _repr_html_(self) -> str:
        scores = self.recipe.task.scores
        table = ""
        if scores.own[0].key in self.metrics:
            rows = {**scores.of_teachers(self.metrics), "student": self.metrics}
            table = html_table(scores.table(rows))
        return f"{table}<p>{scores.against_teacher(self.metrics)}</p>"


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}"
        for name, value in metrics.items()
        if isinstance(value, float)
    )


@dataclass(frozen=True, slots=True)
class Pixels:
    """The images as 8-bit pixels."""

    arguments: Arguments
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def batches(
        self, limit: int, training: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield uint8 images [B, 3, S, S] with labels [B] of validation images.

        They are `limit` evenly spaced images; 0: all. `training`: training images
        instead, augmented, then rounded to 8 bits and cropped to the others' size.
        """
        if not training:
            for image, label in self._read(self.arguments.val, "val", limit):
                yield self.levels(image), label
            return
        size = next(self.batches(1))[0].shape[-1]
        # augmented: not on grey levels
        for image, label in self._read(self.arguments.train, "train", limit):
            levels = resized(self._scaled(image).clamp(0, 255), size).round()
            yield levels.to(torch.uint8).numpy(), label

    def _read(
        self, items: Any, split: str, limit: int
    ) -> Iterator[tuple[Tensor, np.ndarray]]:
        dataset = MapDataset(
            map_style(split, items), self.arguments.seed, split, self.arguments.labels
        )
        ids = evenly_spaced(len(dataset), limit or len(dataset))
        for batch in batches_of(dataset, ids, BATCH):
            yield batch.image, batch.label.numpy()

    def levels(self, image: Tensor) -> np.ndarray:
        """Return normalized images [B, 3, S, S] as uint8.

        Raises:
            ConfigError: no square RGB images, or another normalization than by `mean`
                and `std`.
        """
        if (
            image.ndim != 4
            or image.shape[1] != 3
            or image.shape[2] != image.shape[3]
            or not image.is_floating_point()
        ):
            raise ConfigError(
                "val",
                f"has images {image_text(image[0])}",
                "An endpoint takes square float [3, S, S]",
                "Write your own export with torch.onnx",
            )
        if (
            len(self.mean) != 3
            or len(self.std) != 3
            or not all(value > 0 for value in self.std)
        ):
            raise ConfigError(
                "mean", "and std are no triples", "Three numbers each, std above 0"
            )
        levels = self._scaled(image)
        rounded = levels.round()
        distance = (levels - rounded).abs().max()
        # "not <=" is also true of nan
        if not distance <= LEVEL_TOLERANCE or rounded.min() < 0 or rounded.max() > 255:
            position = (levels - rounded.clamp(0, 255)).abs().argmax()
            worst = levels.flatten()[position].item()
            wrong = f"and std make a grey level {worst:.2f} of a pixel of val"
            allowed = (
                "Whole numbers 0 to 255: the mean and std with which the transform"
                " normalizes 8-bit pixels"
            )
            raise ConfigError(
                "mean",
                wrong,
                allowed,
                "Pass those, and resize before the conversion to float",
            )
        return rounded.to(torch.uint8).numpy()

    def _scaled(self, image: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(value, dtype=torch.float64).view(3, 1, 1)
            for value in (self.mean, self.std)
        )
        return 255 * (image.cpu().double() * std + mean)
