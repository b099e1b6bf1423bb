"""Check the arguments of `kd.distill` before anything runs; errors use their names."""

import hashlib
import random
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
    error_summary,
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
    (r"\bteacher\.precision=fp32\b", "teacher=teacher.float()"),
    (r"\bteacher\.cache\.path\b", "cache"),
    (r"\bteacher\.cache\.(\w+)", r"cache['\1']"),
)
"""Maps configuration keys to arguments of `kd.distill` and `kd.Distiller`."""
Losses = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | Criterion
"""Terms by name, as sections of a configuration, or built."""


@contextmanager
def name_arguments() -> Iterator[None]:
    """Let errors in this block name arguments, not configuration keys."""
    try:
        yield
    except KdError as error:
        raise _translate_error(error).with_traceback(
            error.__traceback__
        ) from error.__cause__


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Give torch's and Python's global generators their state again at the end."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(state)


def _translate_error(error: KdError) -> KdError:
    if isinstance(error, ConfigErrors):
        return ConfigErrors([_translate_error(inner) for inner in error.errors])
    texts = (error.config_path, error.wrong, error.allowed, error.remedy)
    return type(error)(*map(translate_config_keys, texts))


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
    losses: Losses
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
        require_teachers(self.teachers)
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
        return {"student": self.student, **by_argument(self.teachers)}

    def recipe(
        self, image: Tensor, batch_size: int, **sections: Mapping[str, Any]
    ) -> Recipe:
        """Check arguments by the schema of a configuration, and return its recipe.

        `sections`: keys of `run`, `optimizer` and `backend`.
        """
        data = {**data_section(image, self.labels), "batch_size": batch_size}
        teachers = " + ".join(type(model).__qualname__ for model in self.teachers)
        is_object = hasattr(self.sifter, "plan")
        settings = config.load(
            {
                "run": {"name": "distill", "seed": self.seed, **sections["run"]},
                "data": data,
                "teacher": {"kind": "torch", "model": teachers},
                "student": {"kind": "torch", "model": type(self.student).__qualname__},
                "losses": loss_sections(self.losses),
                "sifter": {} if is_object else _as_section(self.sifter),
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
        if isinstance(names, Collection) and len(names) == count:
            return [str(name) for name in names]
        return [f"class_{number}" for number in range(count)]

    def fingerprint(self, world: Backend) -> str:
        """Return a hash of both splits' data. All ranks must call this.

        Raises:
            DataError: it differs between ranks.
        """
        hashes = []
        for split, items in (("train", self.train), ("val", self.val)):
            if isinstance(items, DataLoader):
                hashes.append(f"loader {len(items.dataset)}")  # type: ignore[arg-type]
            else:
                dataset = MapDataset(items, self.seed, split, self.labels)
                hashes.append(dataset.fingerprint())
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
            workers = getattr(items, "workers", self.workers)
            return LocalLoader(dataset, share, workers), len(dataset)
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
        """Return the images for an examination [N, ...].

        They are two of a dataset, or the first batch of a DataLoader.
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


def require_teachers(teachers: Sequence[Any]) -> None:
    """Require one teacher or more."""
    if not teachers:
        allowed = "One module, or several"
        raise ConfigError("teacher", "is an empty list", allowed, "Pass a teacher")


def by_argument(teachers: Sequence[Any]) -> dict[str, Any]:
    """Return teachers by argument name."""
    if len(teachers) == 1:
        return {"teacher": teachers[0]}
    return {f"teacher[{i}]": model for i, model in enumerate(teachers)}


def loss_sections(losses: Losses) -> list[Any]:
    """Return the `losses` section; of a Criterion, one that reads logits alike."""
    if isinstance(losses, Criterion):
        reads_sets = any(term.facts.logits == "sigmoid" for term in losses.all)
        return [_as_section("binary_kl" if reads_sets else "kl")]
    if isinstance(losses, str) or not isinstance(losses, Sequence):
        return [_as_section(losses)]
    return [_as_section(term) for term in losses]


def data_section(image: Tensor, labels: str) -> dict[str, Any]:
    """Return the `data` section for images like this one, with labels of `LABELS`."""
    label_sets = labels == "sets"
    section: dict[str, Any] = {
        "kind": MAP_DATASET,
        "images": image_text(image),
        "label": "set" if label_sets else "class",
        "labels": "all" if label_sets else labels,
    }
    if image.ndim == 3:
        section["image_size"] = max(8, *image.shape[1:])
    return section


def criterion_fingerprint(criterion: Criterion) -> str:
    """Return a hash of a criterion's terms and the options of their losses."""
    terms = []
    for name, term in zip(criterion.names, criterion.all, strict=True):
        loss = term.loss
        options = {
            key: value
            for key, value in vars(loss).items()
            if isinstance(value, (int, float, str)) and key != "training"
        }
        learned = loss.state_dict()
        fixed = {
            key: buffer.tolist()
            for key, buffer in loss.named_buffers()
            if key not in learned
        }
        terms.append(
            (
                name,
                term.weight,
                term.teacher,
                type(loss).__qualname__,
                sorted(options.items()),
                fixed,
            )
        )
    return hashlib.sha256(repr(terms).encode()).hexdigest()


def image_text(image: Tensor) -> str:
    """Return the dtype and shape of an image as text."""
    return f"{_dtype_name(image.dtype)} {list(image.shape)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def batch_size_of(items: Any, otherwise: int) -> int:
    """Return the batch size of a DataLoader; `otherwise` for a dataset."""
    if not isinstance(items, DataLoader):
        return otherwise
    sampler = getattr(items, "batch_sampler", None)
    return items.batch_size or getattr(sampler, "batch_size", None) or otherwise


def images_per_epoch(items: Any) -> int:
    """Return the number of images per epoch of a DataLoader, from its sampler."""
    sampler = getattr(items.batch_sampler, "sampler", items.sampler)
    return len(sampler if hasattr(sampler, "__len__") else items.dataset)


class SampledItems:
    """The images that a DataLoader's sampler draws now, as a map-style dataset.

    It has also those that `drop_last` drops.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.workers = loader.num_workers
        batches = loader.batch_sampler
        ids = getattr(batches, "sampler", None) or chain.from_iterable(batches)  # type: ignore[arg-type]
        self.ids = sorted(islice(ids, images_per_epoch(loader)))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Any:
        batch = self.loader.collate_fn([self.loader.dataset[self.ids[number]]])
        if isinstance(batch, (tuple, list)):
            return tuple(field[0] for field in batch)
        return batch[0]


def map_style(config_path: str, items: Any) -> Any:
    """Return a dataset, or the images of a DataLoader as one; refuse anything else."""
    _require_items(config_path, items)
    return SampledItems(items) if isinstance(items, DataLoader) else items


def training_labels(items: Any, kind: str, num_classes: int) -> Tensor:
    """Return the class of every training item, from the dataset's `targets` if any."""
    labels = Labels("train", kind, num_classes)
    targets = getattr(items, "targets", None)
    if targets is not None and getattr(items, "target_transform", None) is None:
        return labels.check(targets, "targets")
    dataset = MapDataset(map_style("train", items), 0, "train", kind, num_classes)
    return torch.tensor([dataset.load(id, 0).label for id in range(len(dataset))])


def examine_models(
    arguments: Arguments, images: Tensor, micro_batch: int
) -> tuple[list[LogitsModel], int]:
    """Examine all models on images [N, ...], and return them, the student first.

    Returned with them: their number of classes.
    """
    models = [
        LogitsModel(module, config_path)
        for config_path, module in arguments.models.items()
    ]
    student, *teachers = models
    counts = [
        count_classes(model, images, micro_batch if model is student else 0)
        for model in models
    ]
    # the student itself as the teacher is its caller's choice
    other_teachers = {
        model.config_path: model
        for model in teachers
        if model.network is not student.network
    }
    require_apart(student, other_teachers, "student")
    for model, count in zip(models, counts, strict=True):
        require_classes(model.config_path, count, counts[0])
    return models, counts[0]


def count_classes(
    model: LogitsModel,
    images: Tensor,
    micro_batch: int = 0,
    source: str = "images of train",
) -> int:
    """Examine a model on images [N, ...] and return its number of classes.

    It is moved to their device. `micro_batch`: see `examine`; `source` names the images
    in an error.
    """
    model.to(images.device)
    explain = partial(_model_error, model.config_path, images, source)
    outputs = examine(model, model.config_path, images, True, micro_batch, explain)
    return outputs["logits"].shape[1]


def require_classes(config_path: str, count: int, student_classes: int) -> None:
    """Require a model to have as many classes as the student."""
    if count != student_classes:
        wrong = f"returns {count} classes, the student {student_classes}"
        allowed = "Both must be equal, in the same order"
        remedy = "Change the last layer of one"
        raise ConfigError(config_path, wrong, allowed, remedy)


def _model_error(
    config_path: str, images: Tensor, source: str, error: Exception
) -> ModelError:
    remedy = "Resize in the transform, or in the module"
    if "when training" in str(error):  # torch's batch norm, of one value per channel
        remedy = "Call .eval() on the module that the function runs"
    elif not images.is_floating_point():
        remedy = "End the transform in float pixels: image.float() / 255"
    wrong = f"fails on {source}, {image_text(images[0])}: {error_summary(error)}"
    return ModelError(
        config_path, wrong, f"Both models take {source} as they are", remedy
    )


def _as_section(value: Any) -> Any:
    """Return the section of a part given only by name, such as "kl"."""
    if isinstance(value, str):
        return {"kind": value}
    return dict(value) if isinstance(value, Mapping) else value


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
    half = trained & {torch.bfloat16, torch.float16}
    if half:
        wrong = f"has weights in {_dtype_name(half.pop())}, which lose small updates"
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
        size = batch_size_of(items, 0)
        images = images_per_epoch(items)
        if not size or (config_path == "train" and images < size):
            wrong = f"has {images} images, and a batch {size or 'no fixed size'}"
            raise ConfigError(
                config_path,
                wrong,
                "One full batch or more",
                "Pass another batch_size to the DataLoader",
            )
