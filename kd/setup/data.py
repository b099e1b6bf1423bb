"""From the two splits of a configuration to batches: sources, the store of decoded pixels, views, loaders."""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kd import parts
from kd.config.schema import Augment, DataSection
from kd.contracts import Backend, Source
from kd.data.loader import LocalLoader
from kd.data.store import PIXELS, Cropped, Shrunk, Slots, Stored, identity, open_disk, open_ram, slot_bytes
from kd.data.views import Evaluate, Mixing, Train, Views, build_policy
from kd.data.workers import require_shared_memory
from kd.errors import ConfigError, CorruptImage, DataError, RunError
from kd.files.storage import hashed_folder
from kd.host import cores, free_mib, shared_memory_mib
from kd.models.load import Images

SAMPLE = 16
"""Training images that are decoded to estimate the size of a store."""
MOST_WORKERS = 16
"""Worker processes beside an accelerator at most."""

log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class Data:
    """The two splits of a run, and what their images go through."""

    section: DataSection
    train: Source
    val: Source
    kept: tuple[Source, Source] | None = None
    """The same splits behind a store of decoded pixels, where there is one."""
    named: tuple[str, ...] = ()
    """The teacher's classes, where the images have no labels."""

    @property
    def fingerprint(self) -> str:
        """A hash of both listings and the class order."""
        text = "\n".join([self.train.fingerprint, self.val.fingerprint, *self.train.classes])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def classes(self) -> Sequence[str]:
        """Class names, in the order of the labels; without labels the teacher's, once it is loaded."""
        return self.named or self.train.classes

    @property
    def asked(self) -> Sequence[str] | None:
        """The classes that a teacher must have; None: it names them."""
        return self.classes if self.section.labels != "none" else self.named or None

    def with_classes(self, classes: Sequence[str]) -> Data:
        """Return the same with a teacher's classes, where its images have no labels."""
        return replace(self, named=tuple(classes)) if self.section.labels == "none" else self

    def images(self, seed: int, views: int) -> Images:
        """Return what a teacher may want to know of its images, for a run with this seed and so many views."""
        return Images(self.train, self.val, seed, views, self.transform())

    def transform(self) -> dict[str, Any]:
        """Return what a training image goes through, as JSON values."""
        found = {"image_size": self.section.image_size, **asdict(self.section.augment)}
        if self.section.store != "none":  # a store changes the pixels
            found["store"] = list(asdict(keep_rules(self.section)[0]).values())
        return found

    @property
    def labelled(self) -> bool:
        """Whether images have labels, all or some."""
        return self.section.labels != "none"

    def labelled_share(self) -> float:
        """Return the share of the training images that have a label; 1.0 where none is asked for."""
        return (self.labels() >= 0).float().mean().item() if self.section.labels == "some" else 1.0

    def labels(self, val: bool = False) -> torch.Tensor:
        """Return the label of every image of a split, int64 [N] or int8 [N, C]; -1: it has none."""
        source = self.val if val else self.train
        return torch.from_numpy(np.array([source.label(id) for id in range(len(source))]))

    def evaluate(self) -> Evaluate:
        """Return what evaluation does to an image."""
        return Evaluate(self.section.image_size, self.section.eval_crop)


def open_sources(section: DataSection) -> Data:
    """List both splits; nothing is decoded or rendered yet.

    Raises:
        DataError: missing or empty folders, fewer than two classes.
    """
    more = {} if section.labels == "all" else {"labels": section.labels}
    part = ("datasets", section.kind, section.options, "data.kind")
    train = parts.build(*part, split="train", classes=None, **more)
    val = parts.build(*part, split="val", classes=train.classes, **more)
    if len(train.classes) < 2 and section.labels != "none":
        raise DataError(
            "data.kind",
            f"the training split has {len(train.classes)} class ({', '.join(train.classes)})",
            "At least two classes",
            "Check that each class has a folder of its own; without labels, set data.labels=none",
        )
    if list(val.classes) != list(train.classes):
        raise DataError("data.kind", "the validation split has other classes than the training split", "", "Correct it")
    return Data(section, train, val)


def open_data(section: DataSection, folder: str, backend: Backend, fill: bool = True) -> Data:
    """List both splits, let rank 0 make the images that do not exist yet, and open the store of decoded pixels.

    Args:
        section: of the configuration.
        folder: `run.folder`, below which a store on disk lies.
        backend: set up; all ranks must call this.
        fill: whether the store keeps pixels; False for a job that reads each image once.

    Raises:
        KdError: the data is not usable, or the store does not fit.
    """
    data = open_sources(section)
    if backend.rank == 0:
        data.train.prepare()
        data.val.prepare()
    backend.barrier()
    return data if section.store == "none" else replace(data, kept=open_store(data, Path(folder), backend, fill))


def train_transform(size: int, augment: Augment) -> Train:
    """Build what happens to a training image.

    Raises:
        ConfigError: timm does not know the policy.
    """
    if augment.policy:
        try:
            build_policy(augment.policy, size)
        except ValueError as error:
            remedy = "Try rand-m9-mstd0.5, or leave it empty"
            raise ConfigError("data.augment.policy", str(error), "A timm policy", remedy) from error
    return Train(size, augment.crop, augment.flip, augment.jitter, augment.policy)


def views(data: Data, seed: int) -> tuple[Views, Views]:
    """Return the views of both splits, of the kept pixels where there is a store."""
    section, augment = data.section, data.section.augment
    train, val = data.kept or (data.train, data.val)
    mixing = Mixing(augment.mixup, augment.cutmix, augment.mix_probability)
    common = {"size": section.image_size, "seed": seed, "on_corrupt": section.on_corrupt}
    shown = Evaluate(section.image_size, 1.0) if data.kept else data.evaluate()  # what is kept is the crop already
    return (
        Views(train, train_transform(section.image_size, augment), mixing=mixing, **common),
        Views(val, shown, **common),
    )


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How the global batch is divided over ranks and micro-batches."""

    batch_size: int
    world_size: int
    micro_batch: int
    accumulate: int
    eval_batch: int

    def __str__(self) -> str:
        if self.world_size == self.accumulate == 1:
            return f"{self.batch_size} images"
        return f"{self.batch_size} images = {self.world_size} ranks x {self.accumulate} micros x {self.micro_batch}"


def split_batch(section: DataSection, world_size: int, num_images: int, batch_size: int = 0) -> BatchSplit:
    """Divide the global batch over ranks and micro-batches.

    Args:
        section: its sizes.
        world_size: ranks.
        num_images: of the training split.
        batch_size: the global batch, where `data.batch_size` is auto.

    Raises:
        ConfigError: it does not divide, there are fewer images than a batch, or nobody has searched for its size.
    """
    batch_size = batch_size or fixed_batch(section)
    share, rest = divmod(batch_size, world_size)
    micro = section.micro_batch or share
    if rest or not share or share % micro:
        near = max(1, round(batch_size / (world_size * micro or 1))) * world_size * (micro or 1)
        raise ConfigError(
            "data.batch_size",
            f"{batch_size} images cannot be divided into {world_size} ranks x micro-batches of {micro}",
            "batch_size = ranks x micros x micro_batch, all whole",
            f"Set data.batch_size={near}, or change data.micro_batch",
        )
    if num_images < batch_size:
        raise ConfigError(
            "data.batch_size",
            f"is {batch_size}, but the training split has {num_images} images",
            "At most the size of the training split",
            f"Set data.batch_size={max(world_size, num_images // world_size * world_size)}",
        )
    return BatchSplit(batch_size, world_size, micro, share // micro, section.eval_batch or micro)


def fixed_batch(section: DataSection) -> int:
    """Return the global batch size.

    Raises:
        ConfigError: it is `auto`, and nobody has searched.
    """
    if isinstance(section.batch_size, str):
        remedy = "Set a number here"
        raise ConfigError("data.batch_size", "is auto, and is found only by a training run", "A number", remedy)
    return section.batch_size


def default_workers(backend: Backend) -> int:
    """Return the number of worker processes of this rank that `data.workers: auto` means.

    On a CPU one, which hides reading, since more would take the step's cores; none on one or two cores. Beside an
    accelerator all of this rank's cores but one, at most `MOST_WORKERS`.
    """
    share = max(1, cores() // backend.local_world_size)
    if backend.device.type == "cpu":
        return 1 if share > 2 else 0
    return max(1, min(MOST_WORKERS, share - 1))


def loaders(
    both: tuple[Views, Views], section: DataSection, split: BatchSplit, backend: Backend, timeout_seconds: float
) -> tuple[LocalLoader, LocalLoader]:
    """Build the training and the validation loader of this rank.

    Raises:
        RunError: the batches of their workers do not fit into the shared memory.
    """
    if section.loader == "ray":
        return _remote(both, section, split, backend)
    count = _workers(section, backend)
    place = (backend.rank, backend.world_size, count)
    common = {**_loading(section, backend), "timeout_seconds": timeout_seconds}
    train = LocalLoader(both[0], split.batch_size, split.accumulate, *place, **common)
    val = evaluation_loader(both[1], section, split, backend, timeout_seconds)
    # Both at once: an evaluation may take place in the middle of an epoch.
    needed = train.batch_bytes(section.image_size) + val.batch_bytes(section.image_size)
    require_shared_memory(needed * backend.local_world_size, shared_memory_mib(), count)
    return train, val


def _remote(
    both: tuple[Views, Views], section: DataSection, split: BatchSplit, backend: Backend
) -> tuple[LocalLoader, LocalLoader]:
    """Build loaders of one pool of decoders, which rank 0 starts."""
    from kd.data.decoders import Pool  # Ray: 1 s of imports, and an extra
    from kd.data.remote import RemoteLoader

    token = torch.tensor([secrets.randbelow(2**24)], dtype=torch.float32, device=backend.device)
    pools = [Pool(both, 0, int(token.item()), section.deadline)] if backend.rank == 0 else []
    backend.broadcast_([token])
    pool = pools[0] if pools else Pool(both, backend.rank, int(token.item()), section.deadline)
    place, common = (backend.rank, backend.world_size), _loading(section, backend)
    train = RemoteLoader(pool, 0, both[0], split.batch_size, split.accumulate, *place, **common)
    val = RemoteLoader(pool, 1, both[1], split.eval_batch * split.world_size, 1, *place, **common)
    return train, val


def evaluation_loader(
    shown: Views, section: DataSection, split: BatchSplit, backend: Backend, timeout_seconds: float
) -> LocalLoader:
    """Build a loader of this rank's batches of an evaluation."""
    place = (backend.rank, backend.world_size, _workers(section, backend))
    common = {**_loading(section, backend), "timeout_seconds": timeout_seconds}
    return LocalLoader(shown, split.eval_batch * split.world_size, 1, *place, **common)


def _workers(section: DataSection, backend: Backend) -> int:
    if section.loader == "ray":
        return 0  # a fork of a process with Ray's threads may never run
    return default_workers(backend) if section.workers == "auto" else int(section.workers)


def _loading(section: DataSection, backend: Backend) -> dict[str, Any]:
    return {"pin_memory": backend.device.type == "cuda", "max_skipped": section.max_skipped}


# ---------------------------------------------------------------------------------------------------------- store


def keep_rules(section: DataSection) -> tuple[Shrunk, Cropped]:
    """Return what a store keeps of a training image and of a validation image."""
    side, crop = (section.store_size, 1.0) if section.store_size else (section.image_size, section.augment.crop)
    return Shrunk(side, crop), Cropped(section.image_size, section.eval_crop)


def open_store(data: Data, folder: Path, backend: Backend, fill: bool = True) -> tuple[Source, Source]:
    """Put the store of decoded pixels before both splits; all ranks must call it, after the images exist.

    Args:
        data: the splits; with `data.store`, where their pixels are kept.
        folder: below which a store on disk lies.
        backend: its ranks agree on whether there is room.
        fill: keep pixels. False: the same pixels, decoded each time.

    Raises:
        RunError: the store does not fit into the memory, or onto the disk.
    """
    rules, ram = keep_rules(data.section), data.section.store == "ram"
    if not fill:
        return Stored(data.train, rules[0]), Stored(data.val, rules[1])
    made_from = [identity(data.train, "train", asdict(rules[0])), identity(data.val, "val", asdict(rules[1]))]
    folders = [hashed_folder(folder / "stores", each["split"], each) for each in made_from]
    _require_room(data, rules, folder, folders, backend)
    slots: list[Slots] = []
    for each, path, rule in zip(made_from, folders, rules, strict=True):
        slots.append(open_ram(rule.most, each["split"]) if ram else open_disk(path, each, rule.most))
    kept = Stored(data.train, rules[0], slots[0]), Stored(data.val, rules[1], slots[1])
    if backend.rank == 0 and not ram:
        for split, stored in zip(("training", "validation"), kept, strict=True):
            sample = evenly_spaced(len(stored), SAMPLE)
            if changed := stored.refresh(sample):
                told = "%d of %d sampled %s images have changed since they were decoded: all are decoded again"
                log.warning("data.store: " + told, changed, len(sample), split)
    backend.barrier()
    return kept


def _require_room(
    data: Data, rules: tuple[Shrunk, Cropped], folder: Path, folders: list[Path], backend: Backend
) -> None:
    """Require room for a store, as rank 0 finds it, and log what it takes."""
    ram, ranks = data.section.store == "ram", backend.local_world_size
    numbers = [0.0, 0.0, 0.0]
    if backend.rank == 0:
        each = _mean_bytes(data.train, rules[0]), slot_bytes(rules[1].most)
        numbers[0] = each[0] * len(data.train) + each[1] * len(data.val)
        if ram:
            numbers[2] = free_mib() * 2**20
        else:
            files = [path / PIXELS for path in folders]
            numbers[1] = sum(file.stat().st_blocks * 512 for file in files if file.is_file())
            numbers[2] = shutil.disk_usage(_existing(folder)).free
    found = torch.tensor(numbers, dtype=torch.float32, device=backend.device) / 2**20
    backend.broadcast_([found])
    whole, there, left = found.tolist()
    needed = whole * ranks if ram else max(0.0, whole - there)
    if needed > left:
        copies = f" on each of {ranks} ranks, {_size(needed)} in all" if ram and ranks > 1 else ""
        kept_there = f", {_size(there)} of it there already" if there and not ram else ""
        where = "of memory are left here" if ram else f"are free at '{folder}'"
        remedy = "Set data.store=disk" if ram else "Free space, choose another run.folder"
        raise RunError(
            "data.store",
            f"is {data.section.store}, and the decoded images take about {_size(whole)}{copies}{kept_there}; "
            f"{_size(left)} {where}",
            "One of none, ram and disk",
            f"{remedy}, or a data.store_size near data.image_size, or data.store=none",
        )
    if backend.rank == 0:
        where = "in memory" + (" of each rank" if ranks > 1 else "") if ram else f"below '{folder}/stores'"
        log.info("store: about %s of decoded images %s, %s of it there already", _size(whole), where, _size(there))


def _mean_bytes(source: Source, rule: Shrunk) -> float:
    """Return the mean bytes that a training image takes in its slot, from a few evenly spaced ones."""
    found = []
    for id in evenly_spaced(len(source), SAMPLE):
        try:
            image = rule(source.decode(id).image)
        except CorruptImage:
            continue  # training will ask for it, and data.on_corrupt decide
        found.append(slot_bytes(image.width * image.height))
    return sum(found) / len(found) if found else float(slot_bytes(rule.most))


def evenly_spaced(length: int, count: int) -> list[int]:
    """Return up to `count` evenly spaced ids: listings lie by class, and the first images look alike."""
    count = min(count, length)
    return [number * length // count for number in range(count)]


def _existing(folder: Path) -> Path:
    """Return the nearest folder above that is there already."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
