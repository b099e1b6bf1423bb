"""The splits of a configuration, the views of their images, the division of the batch,
and the loaders.
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
    """The opened splits of a run."""

    plan: DataPlan
    train: Source
    val: Source
    test: Source | None = (
        # test images, if a test split is named or set aside; read only at the end of a
        # run
        None
    )
    stored: tuple[Source, Source] | None = None
    """Training and validation images behind a store of decoded pixels, if there
    is one.
    """
    teacher_classes: tuple[
        str, ...
    ] = ()  # the teacher's classes, if the images are unlabelled
    contents: Mapping[str, int] = field(
        default_factory=dict
    )  # see `kd.setup.same_data`

    @property
    def fingerprint(self) -> str:
        """A hash of the listings of training and validation, and of the class order."""
        text = "\n".join(
            [self.train.fingerprint, self.val.fingerprint, *self.train.classes]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def classes(self) -> Sequence[str]:
        """Class names in the order of the labels; for unlabelled images the teacher's,
        once it is loaded.
        """
        return self.teacher_classes or self.train.classes

    @property
    def required_classes(self) -> Sequence[str] | None:
        """Class names that the teacher must have. None: the images are unlabelled and
        the teacher's names are used.
        """
        return self.classes if self.labelled else self.teacher_classes or None

    @property
    def splits(self) -> dict[str, Source]:
        return {
            "train": self.train,
            "val": self.val,
            **({} if self.test is None else {"test": self.test}),
        }

    @property
    def notes(self) -> list[str]:
        """Notes on files left out of the listings, one per line."""
        notes = [
            note
            for one in self.splits.values()
            if isinstance(one, HasWarnings)
            for note in one.notes
        ]
        names = self.train.classes
        if list(names) != sorted(names) and list(names) == class_order(names):
            text = f"classes in the order of numbers: {', '.join(names[:3])}, ...; "
            notes.append(
                f"{text}as text it would be {', '.join(sorted(names)[:3])}, ..."
            )
        if getattr(self.plan.options, "group", ""):
            splits: Any = self.splits.values()
            train, *others = (
                {one.group(id) for id in range(len(one))} for one in splits
            )
            shared = sorted(train & set().union(*others))
            more = len(shared) - 1
            notes += [
                f"data.group: '{one}' and {more} more are in training and in another"
                " split"
                for one in shared[:1]
            ]
        return [*dict.fromkeys(notes)]

    def images(self) -> DatasetSpec:
        """Return facts of the dataset for a teacher that looks up outputs by
        image id.
        """
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
        changes["crop"] = changes.pop(
            "crop_scale"
        )  # its name in the caches and tables of kd 0.3
        found = {
            "image_size": self.plan.image_size,
            **changes,
            "margin": MARGIN,
            "format": FORMAT,
        }
        if not found["erase"]:  # the pixels are as before this key existed
            del found["erase"]
        if self.plan.store in ("ram", "disk"):  # a store of decoded pixels changes them
            from kd.setup.open_store import keep_rules

            found["store"] = list(asdict(keep_rules(self.plan)[0]).values())
        return found

    @property
    def labelled(self) -> bool:
        return self.plan.labels != "none"

    def labelled_share(self) -> float:
        """Return the expected share of training images with a label, including the
        mixing partner's.
        """
        if self.plan.labels != "some":
            return 1.0
        share, augment = (self.labels() >= 0).float().mean().item(), self.plan.augment
        return (
            share * (1 - (1 - share) * augment.mix_probability)
            if augment.mixes
            else share
        )

    def labels(self, val: bool = False) -> torch.Tensor:
        """Return the label of every image of a split, int64 [N] or int8 [N, C]; -1:
        unlabelled.
        """
        source = self.val if val else self.train
        first = np.asarray(source.label(0))
        labels = map(source.label, range(len(source)))
        return torch.from_numpy(
            np.fromiter(labels, np.dtype((first.dtype, first.shape)))
        )

    def with_labels(self) -> Data:
        """Return only the training images with a label, for training on
        labels alone.
        """
        if self.plan.labels != "some":
            return self
        from kd.data.subset import Subset  # only if some are unlabelled

        labels = self.labels()
        ids = (
            (labels if labels.ndim == 1 else labels.amax(1))
            .ge(0)
            .nonzero()
            .flatten()
            .numpy()
        )
        stored = self.stored and (Subset(self.stored[0], ids), self.stored[1])
        plan = replace(self.plan, labels="all", labels_per_class=0)
        return replace(self, plan=plan, train=Subset(self.train, ids), stored=stored)

    def evaluate(self) -> EvalTransform:
        return EvalTransform(self.plan.image_size, self.plan.crop_pct)

    def shown(self, source: Source, on_corrupt: str = "") -> Views:
        """Return evaluation's view of a split, decoded from files; `on_corrupt` "": as
        configured.
        """
        plan = self.plan
        return Views(
            source,
            self.evaluate(),
            plan.image_size,
            plan.seed,
            on_corrupt=on_corrupt or plan.on_corrupt,
        )

    def views(self) -> tuple[Views, Views]:
        """Return the views of both splits, from the store of pixels if there is one."""
        plan, val = self.plan, self.stored[1] if self.stored else self.val
        crop = (
            EvalTransform(plan.image_size, 1.0) if self.stored else self.evaluate()
        )  # the stored pixels are the crop
        train = self._training(plan.image_size)
        train.small = (
            self._training(plan.progressive.size) if plan.progressive.size else None
        )
        return train, Views(
            val, crop, plan.image_size, plan.seed, on_corrupt=plan.on_corrupt
        )

    def _training(self, size: int) -> Views:
        plan, augment = self.plan, self.plan.augment
        mixing = (
            MixupCutmix(augment.mixup, augment.cutmix, augment.mix_probability)
            if augment.mixes
            else None
        )
        shown = replace(train_transform(size, augment), drawn=plan.image_size)
        train = self.stored[0] if self.stored else self.train
        return Views(
            train, shown, size, plan.seed, mixing, plan.on_corrupt, plan.image_size
        )


def open_sources(plan: DataPlan) -> Data:
    """List all splits; nothing is decoded or rendered yet."""
    more = {} if plan.labels == "all" else {"labels": plan.labels}

    def listed(split: str, classes: Sequence[str] | None) -> Source:
        source = registry.build(
            "datasets",
            plan.kind,
            plan.options,
            "data.kind",
            split=split,
            classes=classes,
            **more,
        )
        return source if plan.bits == 16 else _of_bits(source, plan)

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
    named = registry.facts("datasets", plan.kind, plan.options, "data.kind").test
    splits = {
        "train": train,
        "val": val,
        **({"test": listed("test", train.classes)} if named else {}),
    }
    if plan.exclude:
        from kd.data.subset import exclude_images  # only if images are left out

        splits = exclude_images(plan.exclude, splits)
    train, val = splits["train"], splits["val"]
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
    """Refuse a class name that no export could have as a label: logs and responses
    repeat it.
    """
    if odd := [name for name in classes if not is_one_line(name)]:
        wrong = f"the class {odd[0]!a:.200} has a control character or a line break"
        raise DataError(
            "data.kind", wrong, "Class names that are printed as one line", "Rename it"
        )


def _of_bits(source: Any, plan: DataPlan) -> Source:
    """Let a source read images of 16 bits per channel in the range of `data.bits`,
    which enters its fingerprint.
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
    """List the splits, let rank 0 create missing images, open the store of pixels if
    `fill`. All ranks must call this.

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
    from kd.setup.open_store import open_store  # only if pixels are stored

    return replace(
        data,
        stored=open_store(plan, (data.train, data.val), plan.folder, backend, fill),
    )


def train_transform(
    size: int, augment: Augment, config_path: str = "data.augment"
) -> TrainTransform:
    """Build the transform of training images; `config_path`: the config path of its
    section.
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
    """The division of the global batch over ranks and micro-batches."""

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
    """Divide the global batch over ranks and micro-batches; errors name its key and the
    `kind` of images.
    """
    batch_size = section.batch_size
    share, rest = divmod(batch_size, world_size)
    micro = section.micro_batch or share
    if rest or not share or share % micro:
        near = (
            max(1, round(batch_size / (world_size * micro or 1)))
            * world_size
            * (micro or 1)
        )
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
        return _remote(both, section, split, backend)
    count, shown = workers_of(section, backend), both[0]
    if section.store == "views" and section.views:
        from kd.setup.open_store import store_views  # only if views are stored

        shown = store_views(shown, section.views, backend)
    train = _local(
        shown,
        _share(backend, split.batch_size, split.accumulate),
        section,
        backend,
        timeout_seconds,
    )
    val = evaluation_loader(both[1], section, split, backend, timeout_seconds)
    # Both are open together: an evaluation may interrupt an epoch.
    sizes = section.image_size, section.progressive.size
    needed = sum(map(train.batch_bytes, filter(None, sizes))) + val.batch_bytes(
        section.image_size
    )
    require_shared_memory(needed * backend.local_world_size, shared_memory_mib(), count)
    return train, val


def _remote(
    both: tuple[Views, Views], section: DataSection, split: BatchSplit, backend: Backend
) -> tuple[LocalLoader, LocalLoader]:
    """Build loaders on a pool of decoders, which rank 0 starts."""
    from kd.cluster.decoders import Pool  # Ray: 1 s of imports, and an extra
    from kd.cluster.remote import RemoteLoader

    token = secrets.randbelow(2**24)
    pools = [Pool(both, 0, token, section.deadline)] if backend.rank == 0 else []
    [shared] = numbers_of_rank_0(backend, [token])
    pool = (
        pools[0] if pools else Pool(both, backend.rank, int(shared), section.deadline)
    )
    common, share = (
        _loading(section, backend),
        _share(backend, split.batch_size, split.accumulate),
    )
    train = RemoteLoader(pool, 0, both[0], share, **common)
    return train, RemoteLoader(
        pool, 1, both[1], _share(backend, split.eval_batch * split.world_size), **common
    )


def evaluation_loader(
    shown: Views,
    section: DataSection,
    split: BatchSplit,
    backend: Backend,
    timeout_seconds: float,
) -> LocalLoader:
    """Build a loader of this rank's evaluation batches."""
    share = _share(backend, split.eval_batch * split.world_size)
    return _local(shown, share, section, backend, timeout_seconds)


def _local(
    shown: Dataset,
    share: Share,
    section: DataSection,
    backend: Backend,
    timeout_seconds: float,
) -> LocalLoader:
    more = {"timeout_seconds": timeout_seconds, **_loading(section, backend)}
    return LocalLoader(shown, share, workers_of(section, backend), **more)


def _share(backend: Backend, batch_size: int, accumulate: int = 1) -> Share:
    return Share(batch_size, accumulate, backend.rank, backend.world_size)


def _loading(section: DataSection, backend: Backend) -> dict[str, Any]:
    return {"pin_memory": backend.facts.cuda, "max_skipped": section.max_skipped}
