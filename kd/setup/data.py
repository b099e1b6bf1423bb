"""The splits of a configuration, and what a run makes of them.

These are the views of their images, the division of the batch, and the loaders.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kd.config.schema import DataSection
from kd.config.tuning import Augment
from kd.core.contracts import Backend, Dataset, HasWarnings, Source
from kd.core.errors import ConfigError, DataError
from kd.core.host import cores, shared_memory_mib
from kd.core.ranks import numbers_of_rank_0
from kd.core.text import class_order, is_one_line
from kd.data.loader import LocalLoader, Share
from kd.data.views import (
    FORMAT,
    EvalTransform,
    MixupCutmix,
    TrainTransform,
    Views,
    build_policy,
)
from kd.data.workers import require_shared_memory
from kd.files.pixels import MARGIN
from kd.models.spec import DatasetSpec
from kd.parts import registry
from kd.setup.data_plan import DataPlan

# most worker processes beside an accelerator; hosts with eight GPUs have 24 cores per
# GPU
MOST_WORKERS = 32

log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class Data:
    """Hold the opened splits of a run."""

    plan: DataPlan
    train: Source
    val: Source
    # test images, if a test split is named or set aside; read only at the end of a run
    test: Source | None = None
    stored: tuple[Source, Source] | None = None
    """Training and validation images behind a store of decoded pixels, if there
    is one.
    """
    # the teacher's classes, if the images are unlabelled
    teacher_classes: tuple[str, ...] = ()
    # see `kd.setup.same_data`
    contents: Mapping[str, int] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the class order and of the training and validation data."""
        text = "\n".join(
            [self.train.fingerprint, self.val.fingerprint, *self.train.classes]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def classes(self) -> Sequence[str]:
        """Return class names in the order of the labels.

        For unlabelled images they are the teacher's, once it is loaded.
        """
        return self.teacher_classes or self.train.classes

    @property
    def required_classes(self) -> Sequence[str] | None:
        """Return class names that the teacher must have.

        None: the images are unlabelled and the teacher's names are used.
        """
        return self.classes if self.labelled else self.teacher_classes or None

    @property
    def splits(self) -> dict[str, Source]:
        splits = {"train": self.train, "val": self.val}
        if self.test is not None:
            splits["test"] = self.test
        return splits

    @property
    def notes(self) -> list[str]:
        """Return notes on files left out of the listings, one per line."""
        notes = [
            note
            for source in self.splits.values()
            if isinstance(source, HasWarnings)
            for note in source.notes
        ]
        names = list(self.train.classes)
        by_text = sorted(names)
        if names != by_text and names == class_order(names):
            notes.append(
                f"classes in the order of numbers: {', '.join(names[:3])}, ...; as text"
                f" it would be {', '.join(by_text[:3])}, ..."
            )
        if getattr(self.plan.options, "group", ""):
            sources: Any = self.splits.values()
            train, *heldout = (
                {source.group(id) for id in range(len(source))} for source in sources
            )
            if shared := sorted(train & set().union(*heldout)):
                notes.append(
                    f"data.group: '{shared[0]}' and {len(shared) - 1} more are in"
                    " training and in another split"
                )
        return [*dict.fromkeys(notes)]

    def images(self) -> DatasetSpec:
        """Return facts of the dataset for a teacher that looks up outputs by id."""
        return DatasetSpec(
            self.train,
            self.val,
            self.plan.seed,
            self.plan.views,
            self.transform(),
            self.test,
        )

    def transform(self) -> dict[str, Any]:
        """Return the transform of training images, as JSON values."""
        changes = asdict(self.plan.augment)
        # its name in the caches and tables of kd 0.3
        changes["crop"] = changes.pop("crop_scale")
        if not changes["erase"]:  # the pixels are as before this key existed
            del changes["erase"]
        transform = {
            "image_size": self.plan.image_size,
            **changes,
            "margin": MARGIN,
            "format": FORMAT,
        }
        if self.plan.store in ("ram", "disk"):  # a store of decoded pixels changes them
            from kd.setup.open_store import keep_rules

            transform["store"] = list(asdict(keep_rules(self.plan)[0]).values())
        return transform

    @property
    def labelled(self) -> bool:
        return self.plan.labels != "none"

    def labelled_share(self) -> float:
        """Return the expected share of training images with a label.

        A mixing partner's label counts too.
        """
        if self.plan.labels != "some":
            return 1.0
        share = (self.labels() >= 0).float().mean().item()
        augment = self.plan.augment
        if augment.mixes:
            return share * (1 - (1 - share) * augment.mix_probability)
        return share

    def labels(self, val: bool = False) -> torch.Tensor:
        """Return the label of every image of a split.

        They are int64 [N] or int8 [N, C]; -1: unlabelled.
        """
        source = self.val if val else self.train
        first = np.asarray(source.label(0))
        dtype = np.dtype((first.dtype, first.shape))
        labels = map(source.label, range(len(source)))
        return torch.from_numpy(np.fromiter(labels, dtype))

    def with_labels(self) -> Data:
        """Return only the training images with a label, for training on them alone."""
        if self.plan.labels != "some":
            return self
        from kd.data.subset import Subset  # only if some are unlabelled

        labels = self.labels()
        if labels.ndim > 1:
            labels = labels.amax(1)
        ids = labels.ge(0).nonzero().flatten().numpy()
        stored = self.stored and (Subset(self.stored[0], ids), self.stored[1])
        plan = replace(self.plan, labels="all", labels_per_class=0)
        return replace(self, plan=plan, train=Subset(self.train, ids), stored=stored)

    def evaluation_views(self, source: Source, on_corrupt: str = "") -> Views:
        """Return evaluation's view of a split, decoded from files.

        `on_corrupt` "": as configured.
        """
        plan = self.plan
        return Views(
            source,
            EvalTransform(plan.image_size, plan.crop_pct),
            plan.image_size,
            plan.seed,
            on_corrupt=on_corrupt or plan.on_corrupt,
        )

    def views(self) -> tuple[Views, Views]:
        """Return the views of both splits, from the store of pixels if there is one."""
        plan = self.plan
        train = self._train_views(plan.image_size)
        if plan.progressive.size:
            train.small = self._train_views(plan.progressive.size)
        if not self.stored:
            return train, self.evaluation_views(self.val)
        crop = EvalTransform(plan.image_size, 1.0)  # the stored pixels are the crop
        return train, Views(
            self.stored[1],
            crop,
            plan.image_size,
            plan.seed,
            on_corrupt=plan.on_corrupt,
        )

    def _train_views(self, size: int) -> Views:
        plan = self.plan
        augment = plan.augment
        mixing = None
        if augment.mixes:
            mixing = MixupCutmix(augment.mixup, augment.cutmix, augment.mix_probability)
        transform = replace(train_transform(size, augment), drawn=plan.image_size)
        train = self.stored[0] if self.stored else self.train
        return Views(
            train, transform, size, plan.seed, mixing, plan.on_corrupt, plan.image_size
        )


def open_sources(plan: DataPlan) -> Data:
    """List all splits; nothing is decoded or rendered yet."""
    labels = {} if plan.labels == "all" else {"labels": plan.labels}

    def listed(split: str, classes: Sequence[str] | None) -> Source:
        source = registry.build(
            "datasets",
            plan.kind,
            plan.options,
            "data.kind",
            split=split,
            classes=classes,
            **labels,
        )
        return source if plan.bits == 16 else _set_bits(source, plan)

    train = listed("train", None)
    val = listed("val", train.classes)
    if len(train.classes) < 2 and plan.labels != "none":
        wrong = (
            f"the training split has {len(train.classes)} class"
            f" ({', '.join(train.classes)})"
        )
        remedy = (
            "Check that each class has a folder of its own; without labels, set"
            " data.labels=none"
        )
        raise DataError("data.kind", wrong, "At least two classes", remedy)
    if plan.named:
        _require_printable(train.classes)
    if list(val.classes) != list(train.classes):
        raise DataError(
            "data.kind",
            "the validation split has other classes than the training split",
            "",
        )
    splits = {"train": train, "val": val}
    if registry.facts("datasets", plan.kind, plan.options, "data.kind").test:
        splits["test"] = listed("test", train.classes)
    if plan.exclude:
        from kd.data.subset import exclude_images  # only if images are left out

        splits = exclude_images(plan.exclude, splits)
    train = splits["train"]
    val = splits["val"]
    if plan.labels_per_class:
        from kd.data.subset import keep_labels  # only if labels are withheld

        train = keep_labels(
            train, plan.labels_per_class, plan.seed, hide=plan.labels == "some"
        )
    if plan.test_fraction:
        from kd.data.subset import set_aside  # only if images are set aside

        return Data(plan, train, *set_aside(val, plan.test_fraction))
    return Data(plan, train, val, splits.get("test"))


def _require_printable(classes: Sequence[str]) -> None:
    """Refuse a class name that no export could have as a label.

    Logs and responses repeat it.
    """
    if unprintable := [name for name in classes if not is_one_line(name)]:
        wrong = (
            f"the class {unprintable[0]!a:.200} has a control character or a line break"
        )
        raise DataError(
            "data.kind", wrong, "Class names that are printed as one line", "Rename it"
        )


def _set_bits(source: Any, plan: DataPlan) -> Source:
    """Let a source read images of 16 bits per channel in the range of `data.bits`.

    The range enters its fingerprint.
    """
    if not hasattr(source, "bits"):
        wrong = f"is {plan.bits}, but data.kind={plan.kind} decodes its images itself"
        raise ConfigError("data.bits", wrong, "16", "Leave data.bits out")
    source.bits = plan.bits
    source.fingerprint = hashlib.sha256(
        f"{plan.bits} bits {source.fingerprint}".encode()
    ).hexdigest()
    return source


def open_data(
    plan: DataPlan, backend: Backend, fill: bool = True, listed: Data | None = None
) -> Data:
    """List the splits, and open the store of pixels if `fill`.

    Rank 0 creates missing images. All ranks must call this.

    `listed`: the result of an earlier `open_sources`.
    """
    data = listed or open_sources(plan)
    if backend.rank == 0:
        for note in data.notes:
            log.info("data: %s", note)
        for source in data.splits.values():
            source.prepare()
    backend.barrier()
    if plan.store in ("none", "views"):
        return data
    from kd.setup.open_store import open_pixel_store  # only if pixels are stored

    splits = (data.train, data.val)
    return replace(
        data, stored=open_pixel_store(plan, splits, plan.folder, backend, fill)
    )


def train_transform(
    size: int, augment: Augment, config_path: str = "data.augment"
) -> TrainTransform:
    """Build the transform of training images.

    `config_path` is the config path of its section.
    """
    if augment.policy:
        try:
            build_policy(augment.policy, size)
        except ValueError as error:
            remedy = "Try rand-m9-mstd0.5, or leave it empty"
            raise ConfigError(
                f"{config_path}.policy", str(error), "A timm policy", remedy
            ) from error
    return TrainTransform(
        size,
        augment.crop_scale,
        augment.flip,
        augment.jitter,
        augment.policy,
        augment.erase,
    )


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Describe the division of the global batch over ranks and micro-batches."""

    batch_size: int
    world_size: int
    micro_batch: int
    accumulate: int
    eval_batch: int

    def __str__(self) -> str:
        if self.world_size == self.accumulate == 1:
            return f"{self.batch_size} images"
        return (
            f"{self.batch_size} images = {self.world_size} ranks x {self.accumulate}"
            f" micros x {self.micro_batch}"
        )


def split_batch(
    section: DataSection,
    world_size: int,
    num_images: int,
    key: str = "data.batch_size",
    kind: str = "",
) -> BatchSplit:
    """Divide the global batch over ranks and micro-batches.

    Errors name its key and the `kind` of images.
    """
    batch_size = section.batch_size
    share, remainder = divmod(batch_size, world_size)
    micro = section.micro_batch or share
    if remainder or not share or share % micro:
        least = world_size * (micro or 1)
        near = max(1, round(batch_size / (world_size * micro or 1))) * least
        wrong = (
            f"{batch_size} images cannot be divided into {world_size} ranks x"
            f" micro-batches of {micro}"
        )
        allowed = "batch_size = ranks x micros x micro_batch, all whole"
        raise ConfigError(
            key, wrong, allowed, f"Set {key}={near}, or change data.micro_batch"
        )
    if num_images < batch_size:
        wrong = f"is {batch_size}, but the training split has {num_images} {kind}images"
        remedy = f"Set {key}={max(world_size, num_images // world_size * world_size)}"
        raise ConfigError(
            key, wrong, f"At most the number of {kind}training images", remedy
        )
    return BatchSplit(
        batch_size, world_size, micro, share // micro, section.eval_batch or micro
    )


def workers_of(section: DataSection, backend: Backend) -> int:
    """Return the number of worker processes of this rank.

    `auto`: on a CPU one, which hides reading (more would take cores from the step);
    none on one or two cores. Beside an accelerator all of this rank's cores but one, at
    most `MOST_WORKERS`.
    """
    if section.loader == "ray":
        return 0  # a fork of a process with Ray's threads may hang
    if section.workers != "auto":
        return int(section.workers)
    share = max(1, cores() // backend.local_world_size)
    if backend.facts.cpu:
        return 1 if share > 2 else 0
    return max(1, min(MOST_WORKERS, share - 1))


def loaders(
    both: tuple[Views, Views],
    section: DataSection,
    split: BatchSplit,
    backend: Backend,
    timeout_seconds: float,
) -> tuple[LocalLoader, LocalLoader]:
    """Build the training and the validation loader of this rank."""
    if section.loader == "ray":
        return _remote_loaders(both, section, split, backend)
    train_views, val_views = both
    if section.store == "views" and section.views:
        from kd.setup.open_store import store_views  # only if views are stored

        train_views = store_views(train_views, section.views, backend)
    share = _share(backend, split.batch_size, split.accumulate)
    train = _local_loader(train_views, share, section, backend, timeout_seconds)
    val = evaluation_loader(val_views, section, split, backend, timeout_seconds)
    # Both are open together: an evaluation may interrupt an epoch.
    sizes = filter(None, (section.image_size, section.progressive.size))
    needed = sum(map(train.batch_bytes, sizes)) + val.batch_bytes(section.image_size)
    require_shared_memory(
        needed * backend.local_world_size,
        shared_memory_mib(),
        workers_of(section, backend),
    )
    return train, val


def _remote_loaders(
    both: tuple[Views, Views], section: DataSection, split: BatchSplit, backend: Backend
) -> tuple[LocalLoader, LocalLoader]:
    """Build loaders on a pool of decoders, which rank 0 starts."""
    from kd.cluster.decoders import Pool  # Ray: 1 s of imports, and an extra
    from kd.cluster.remote import RemoteLoader

    token = secrets.randbelow(2**24)
    pools = [Pool(both, 0, token, section.deadline)] if backend.rank == 0 else []
    [shared] = numbers_of_rank_0(backend, [token])
    if pools:
        pool = pools[0]
    else:
        pool = Pool(both, backend.rank, int(shared), section.deadline)
    pool.wait_for_decoders()
    options = _loader_options(section, backend)
    train_share = _share(backend, split.batch_size, split.accumulate)
    val_share = _share(backend, split.eval_batch * split.world_size)
    return (
        RemoteLoader(pool, 0, both[0], train_share, **options),
        RemoteLoader(pool, 1, both[1], val_share, **options),
    )


def evaluation_loader(
    views: Views,
    section: DataSection,
    split: BatchSplit,
    backend: Backend,
    timeout_seconds: float,
) -> LocalLoader:
    """Build a loader of this rank's evaluation batches."""
    share = _share(backend, split.eval_batch * split.world_size)
    return _local_loader(views, share, section, backend, timeout_seconds)


def _local_loader(
    views: Dataset,
    share: Share,
    section: DataSection,
    backend: Backend,
    timeout_seconds: float,
) -> LocalLoader:
    return LocalLoader(
        views,
        share,
        workers_of(section, backend),
        timeout_seconds=timeout_seconds,
        **_loader_options(section, backend),
    )


def _share(backend: Backend, batch_size: int, accumulate: int = 1) -> Share:
    return Share(batch_size, accumulate, backend.rank, backend.world_size)


def _loader_options(section: DataSection, backend: Backend) -> dict[str, Any]:
    return {"pin_memory": backend.facts.cuda, "max_skipped": section.max_skipped}
