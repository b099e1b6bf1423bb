"""Check the arguments of `kd.distill` before anything runs; errors use their names."""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from kd import config
from kd.core.contracts import Backend, Loader, Sifter
from kd.core.errors import (
    ConfigError,
    ConfigErrors,
    DataError,
    KdError,
    ModelError,
    named,
)
from kd.core.seeds import evenly_spaced
from kd.data.loader import LocalLoader, Share, evaluation_plan
from kd.data.map_dataset import BatchLoader, Labels, MapDataset
from kd.engine.criterion import Criterion
from kd.models.classifier import LogitsModel
from kd.models.examination import examine, require_apart
from kd.models.examined import IMAGES
from kd.setup.auto import completed
from kd.setup.finished import MAP_DATASET
from kd.setup.recipe import Recipe, resolve
from kd.setup.same_data import require_equal

LABELS = ("all", "some", "none", "sets")
ARGUMENT_NAMES = (
    (r"\b(?:run|data)\.(epochs|steps|seed|batch_size|workers|labels)\b", r"\1"),
    (r"\brun\.(?:name|folder)\b", "folder"),
    (r"\bstudent\.model\b", "student"),
    (r"\b(losses\[\d+\]|sifter|backend)\.kind\b", r"\1"),
    (r"\b(losses\[\d*\]|sifter|backend|optimizer)\.(\w+)", r"\1['\2']"),
    (r"\blabels=(\w+)", r"labels='\1'"),
)
"""Maps configuration keys to arguments of `kd.distill`."""


@contextmanager
def name_arguments() -> Iterator[None]:
    """Let errors in this block name arguments of `kd.distill` instead of configuration
    keys.
    """
    try:
        yield
    except KdError as error:
        raise _translate_error(error).with_traceback(
            error.__traceback__
        ) from error.__cause__


def _translate_error(error: KdError) -> KdError:
    if isinstance(error, ConfigErrors):
        return ConfigErrors([_translate_error(one) for one in error.errors])
    return type(error)(
        *map(
            translate_config_keys,
            (error.config_path, error.wrong, error.allowed, error.remedy),
        )
    )


def translate_config_keys(text: str) -> str:
    """Return a text with arguments of `kd.distill` in place of configuration keys."""
    for pattern, name in ARGUMENT_NAMES:
        text = re.sub(pattern, name, text)
    return text


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `distill` that may be objects."""

    teachers: Sequence[nn.Module]
    student: nn.Module
    train: Any
    val: Any
    losses: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | Criterion
    sifter: str | Mapping[str, Any] | Sifter
    labels: str  # one of `LABELS`
    workers: int
    seed: int

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise ConfigError(
                "labels", f"is {self.labels!r}", f"Allowed: {', '.join(LABELS)}"
            )
        if not isinstance(self.workers, int) or self.workers < 0:
            raise ConfigError("workers", f"is {self.workers!r}", "A whole number >= 0")
        for config_path, model in self.models.items():
            if not isinstance(model, nn.Module):
                wrong = f"is {type(model).__name__}"
                raise ConfigError(
                    config_path,
                    wrong,
                    "An nn.Module",
                    "Build the model first; kd.train takes its name",
                )
        if not self.teachers:
            raise ConfigError(
                "teacher",
                "is an empty list",
                "One module, or several",
                "Pass a teacher",
            )
        _require_trainable(self.student)
        if self.labels == "none" and isinstance(self.losses, Criterion):
            _require_unlabelled(self.losses)
        _require_items("train", self.train)
        if isinstance(self.train, DataLoader) and self.sifter not in (
            "none",
            {"kind": "none"},
        ):
            remedy = "Pass train.dataset instead of the DataLoader"
            raise ConfigError(
                "sifter",
                "needs ids, and a DataLoader has none",
                "A map-style dataset has",
                remedy,
            )

    @property
    def models(self) -> dict[str, nn.Module]:
        """Student and teachers by argument name."""
        several = len(self.teachers) > 1
        named = {
            f"teacher[{i}]" if several else "teacher": one
            for i, one in enumerate(self.teachers)
        }
        return {"student": self.student, **named}

    def recipe(
        self, image: Tensor, batch_size: int, **sections: Mapping[str, Any]
    ) -> Recipe:
        """Check the arguments, and keys of `run`, `optimizer` and `backend`, with the
        schema of a configuration.
        """
        losses: Any = self.losses
        if isinstance(
            losses, Criterion
        ):  # one of kd's losses that reads logits in the same way
            losses = (
                "binary_kl"
                if any(term.facts.logits == "sigmoid" for term in losses.all)
                else "kl"
            )
        terms = (
            losses
            if isinstance(losses, Sequence) and not isinstance(losses, str)
            else [losses]
        )
        sets, sifter = self.labels == "sets", self.sifter
        shape = f"{str(image.dtype).removeprefix('torch.')} {list(image.shape)}"
        data = {
            "kind": MAP_DATASET,
            "images": shape,
            "label": "set" if sets else "class",
            "batch_size": batch_size,
        }
        if image.ndim == 3:
            data["image_size"] = max(8, *image.shape[1:])
        teachers = " + ".join(type(one).__qualname__ for one in self.teachers)
        settings = config.load(
            {
                "run": {"name": "distill", "seed": self.seed, **sections["run"]},
                "data": {**data, "labels": "all" if sets else self.labels},
                "teacher": {"kind": "torch", "model": teachers},
                "student": {"kind": "torch", "model": type(self.student).__qualname__},
                "losses": [_as_section(one) for one in terms],
                "sifter": {} if hasattr(sifter, "plan") else _as_section(sifter),
                "optimizer": _as_section(sections["optimizer"]),
                "backend": _as_section(sections["backend"]),
            }
        )
        return resolve(completed(settings, len(self.items)))

    @property
    def items(self) -> Any:
        """The training images without a loader."""
        return self.train.dataset if isinstance(self.train, DataLoader) else self.train

    def classes(self, count: int) -> list[str]:
        """Return `count` class names: the training data's, or numbered ones."""
        names = getattr(self.items, "classes", ())
        named = isinstance(names, Collection) and len(names) == count
        return (
            [str(name) for name in names]
            if named
            else [f"class_{number}" for number in range(count)]
        )

    def fingerprint(self, world: Backend) -> str:
        """Return a hash of both splits' data; DataError: it differs between ranks. All
        ranks must call this.
        """
        hashes = [
            (
                f"loader {len(items.dataset)}"  # type: ignore[arg-type]
                if isinstance(items, DataLoader)
                else MapDataset(
                    items, self.seed, config_path, self.labels
                ).fingerprint()
            )
            for config_path, items in (("train", self.train), ("val", self.val))
        ]
        digest = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
        require_equal(
            digest,
            map("split {} with the hash {}".format, ("train", "val"), hashes),
            world,
        )
        return digest

    def loader(
        self, config_path: str, batch_size: int, num_classes: int, world: Backend
    ) -> tuple[Loader, int]:
        """Return the loader of a split and its number of images."""
        items = getattr(self, config_path)
        if not isinstance(items, DataLoader):
            dataset = MapDataset(
                items, self.seed, config_path, self.labels, num_classes
            )
            share = Share(batch_size, 1, world.rank, world.world_size)
            return LocalLoader(
                dataset, share, getattr(items, "workers", self.workers)
            ), len(dataset)
        if world.world_size > 1:
            remedy = "Pass the dataset: kd divides it over the ranks"
            raise ConfigError(
                config_path,
                "a DataLoader does not know the ranks",
                "A map-style dataset",
                remedy,
            )
        num_images = images_per_epoch(items) // batch_size * batch_size
        return (
            BatchLoader(items, batch_size, config_path, self.labels, num_classes),
            num_images,
        )

    def images(self) -> Tensor:
        """Return the images for an examination [N, ...]: two of a dataset, the first
        batch of a DataLoader.
        """
        if not isinstance(self.train, DataLoader):
            dataset = MapDataset(self.train, self.seed, "train", "none")
            return torch.stack(
                [
                    dataset.load(id, 0).pixels
                    for id in evenly_spaced(len(dataset), IMAGES)
                ]
            )
        size = batch_size_of(self.train, 1)
        batches = BatchLoader(self.train, size, "train", "none").epoch(
            evaluation_plan(size, size), 0
        )
        return next(batches).image


def criterion_fingerprint(criterion: Criterion) -> str:
    """Return a hash of a criterion's terms: name, weight, and the numbers and texts
    that each loss was built with.
    """
    found = []
    for name, term in zip(criterion.names, criterion.all, strict=True):
        loss = term.loss
        options = {
            k: v
            for k, v in vars(loss).items()
            if isinstance(v, (int, float, str)) and k != "training"
        }
        learned = loss.state_dict()
        fixed = {k: v.tolist() for k, v in loss.named_buffers() if k not in learned}
        found.append(
            (
                name,
                term.weight,
                term.teacher,
                type(loss).__qualname__,
                sorted(options.items()),
                fixed,
            )
        )
    return hashlib.sha256(repr(found).encode()).hexdigest()


def batch_size_of(items: Any, otherwise: int) -> int:
    """Return the batch size of a DataLoader; `otherwise` for a dataset."""
    own = getattr(items, "batch_size", None) or getattr(
        getattr(items, "batch_sampler", None), "batch_size", None
    )
    return own if own and isinstance(items, DataLoader) else otherwise


def images_per_epoch(items: Any) -> int:
    """Return the number of images per epoch of a DataLoader, from its sampler."""
    sampler = getattr(items.batch_sampler, "sampler", items.sampler)
    return len(sampler if hasattr(sampler, "__len__") else items.dataset)


class SampledItems:
    """The images that a DataLoader's sampler draws now, also those that `drop_last`
    drops, as a map-style dataset.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.workers, batches = (
            loader,
            loader.num_workers,
            loader.batch_sampler,
        )
        ids = getattr(batches, "sampler", None) or chain.from_iterable(batches)  # type: ignore[arg-type]
        self.ids = sorted(islice(ids, images_per_epoch(loader)))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Any:
        batch = self.loader.collate_fn([self.loader.dataset[self.ids[number]]])
        return (
            tuple(part[0] for part in batch)
            if isinstance(batch, (tuple, list))
            else batch[0]
        )


def map_style(config_path: str, items: Any) -> Any:
    """Return a dataset, or the images of a DataLoader as one; refuse anything else."""
    _require_items(config_path, items)
    return SampledItems(items) if isinstance(items, DataLoader) else items


def training_labels(items: Any, kind: str, num_classes: int) -> Tensor:
    """Return the class of every training item, from the dataset's `targets` if it has
    them, else by reading items.
    """
    labels = Labels("train", kind, num_classes)
    targets = getattr(items, "targets", None)
    if targets is not None and getattr(items, "target_transform", None) is None:
        return labels.check(targets, "targets")
    dataset = MapDataset(map_style("train", items), 0, "train", kind, num_classes)
    return torch.tensor([dataset.load(id, 0).label for id in range(len(dataset))])


def examine_models(
    arguments: Arguments, images: Tensor, micro_batch: int, device: torch.device
) -> tuple[list[LogitsModel], int]:
    """Examine all models on images [N, ...]; return them, the student first, and their
    number of classes.
    """
    models = [
        LogitsModel(module, config_path)
        for config_path, module in arguments.models.items()
    ]
    student, *teachers = models
    counts: dict[str, int] = {}
    for model in models:
        model.to(device)
        trained = micro_batch if model is student else 0
        outputs = examine(
            model,
            model.config_path,
            images,
            True,
            trained,
            partial(_model_error, model.config_path, images),
        )
        counts[model.config_path] = outputs["logits"].shape[1]
    others = {
        model.config_path: model
        for model in teachers
        if model.network is not student.network
    }
    require_apart(
        student, others, "student"
    )  # the student itself as the teacher is its caller's choice
    for config_path, count in counts.items():
        if count != counts["student"]:
            wrong = f"returns {count} classes, the student {counts['student']}"
            raise ConfigError(
                config_path,
                wrong,
                "Both must be equal, in the same order",
                "Change the last layer of one",
            )
    return models, counts["student"]


def _model_error(config_path: str, images: Tensor, error: Exception) -> ModelError:
    pixels = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape[1:])}"
    remedy = "Resize in the transform, or in the module"
    if not images.is_floating_point():
        remedy = "End the transform in float pixels: image.float() / 255"
    wrong = f"fails on images of train, {pixels}: {named(error)}"
    return ModelError(
        config_path, wrong, "Both models take the images of train as they are", remedy
    )


def _as_section(value: Any) -> Any:
    """Return the section of a part given only by name, such as "kl"."""
    return (
        {"kind": value}
        if isinstance(value, str)
        else dict(value)
        if isinstance(value, Mapping)
        else value
    )


def _require_trainable(student: nn.Module) -> None:
    trained = {
        parameter.dtype for parameter in student.parameters() if parameter.requires_grad
    }
    if not trained:
        wrong = "has no parameter that requires a gradient"
        raise ConfigError(
            "student",
            wrong,
            "A module that can be trained",
            "Call student.requires_grad_()",
        )
    if small := trained & {torch.bfloat16, torch.float16}:
        wrong = (
            f"has weights in {str(small.pop()).removeprefix('torch.')}, which lose"
            " small updates"
        )
        allowed = "float32; backend={'precision': 'bf16'} computes in bfloat16"
        raise ConfigError("student", wrong, allowed, "Call student.float()")


def _require_unlabelled(losses: Criterion) -> None:
    for name, term in zip(losses.names, losses.all, strict=True):
        if term.facts.labels:
            wrong = f"'{name}' learns from labels, but labels='none'"
            raise ConfigError(
                "losses", wrong, "Terms on the teacher's outputs", "Drop it"
            )


def _require_items(config_path: str, items: Any) -> None:
    source = items.dataset if isinstance(items, DataLoader) else items
    allowed = "A map-style dataset (len and [i]), or a DataLoader of one"
    if isinstance(source, IterableDataset) or not all(
        hasattr(source, name) for name in ("__len__", "__getitem__")
    ):
        wrong = f"is {type(source).__name__}, which has no length or no items by number"
        raise DataError(
            config_path, wrong, allowed, "Wrap it, or put its items into a list"
        )
    if not len(source):  # type: ignore[arg-type]
        raise DataError(
            config_path, "is empty", allowed, "Check where its items come from"
        )
    if isinstance(items, DataLoader):
        size, images = batch_size_of(items, 0), images_per_epoch(items)
        if not size or (config_path == "train" and images < size):
            wrong = f"has {images} images, and a batch {size or 'no fixed size'}"
            raise ConfigError(
                config_path,
                wrong,
                "One full batch or more",
                "Pass another batch_size to the DataLoader",
            )
