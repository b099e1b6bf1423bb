"""From the two splits of a configuration to batches: augmentation, the store of decoded pixels, the loaders."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kd.config import Config
from kd.contracts import Backend, Source
from kd.data.loader import LocalLoader
from kd.data.store import PIXELS, Cropped, Shrunk, Slots, Stored, identity, open_disk, open_ram, slot_bytes
from kd.data.transforms import Evaluate, Train, build_policy
from kd.data.views import Mixing, Views
from kd.errors import ConfigError, DataError, RunError
from kd.host import free_mib
from kd.start.batch import BatchSplit
from kd.storage import hashed_folder

SAMPLE = 16
"""Training images that are decoded to see how large a store becomes."""


def augmentation(config: Config) -> Train:
    """Build what happens to a training image.

    Raises:
        ConfigError: timm does not know the policy.
    """
    section, augment = config.data, config.data.augment
    if augment.policy:
        try:
            build_policy(augment.policy, section.image_size)
        except ValueError as error:
            remedy = "Try rand-m9-mstd0.5, or leave it empty"
            raise ConfigError("data.augment.policy", str(error), "A timm policy", remedy) from error
    return Train(section.image_size, augment.crop, augment.flip, augment.jitter, augment.policy)


def views(config: Config, train: Source, val: Source) -> tuple[Views, Views]:
    """Return the views of both splits; with a store, of what `stored` returned."""
    section, augment = config.data, config.data.augment
    mixing = Mixing(augment.mixup, augment.cutmix, augment.mix_probability)
    common = {"size": section.image_size, "seed": config.run.seed, "on_corrupt": section.on_corrupt}
    assert isinstance(train, Stored) == isinstance(val, Stored) == (section.store != "none")
    crop = 1.0 if isinstance(val, Stored) else section.eval_crop  # what is kept is the crop already
    return (
        Views(train, augmentation(config), mixing=mixing, **common),
        Views(val, Evaluate(section.image_size, crop), **common),
    )


def loaders(
    both: tuple[Views, Views], backend: Backend, split: BatchSplit, workers: int
) -> tuple[LocalLoader, LocalLoader]:
    """Build the training and the validation loader, each with so many workers on this rank."""
    place = {"rank": backend.rank, "world_size": backend.world_size, "workers": workers}
    pin = backend.device.type == "cuda"
    return (
        LocalLoader(both[0], split.batch_size, split.accumulate, pin_memory=pin, **place),
        LocalLoader(both[1], split.eval_batch * split.world_size, 1, pin_memory=pin, **place),
    )


# ---------------------------------------------------------------------------------------------------------- store


def kept(config: Config) -> tuple[Shrunk, Cropped]:
    """Return what a store keeps of a training image and of a validation image."""
    section = config.data
    side, crop = (section.store_size, 1.0) if section.store_size else (section.image_size, section.augment.crop)
    return Shrunk(side, crop), Cropped(section.image_size, section.eval_crop)


def stored(
    config: Config, train: Source, val: Source, backend: Backend, fill: bool = True
) -> tuple[tuple[Source, Source], str]:
    """Put the store of a configuration before both splits; all ranks must call it, after the images exist.

    Args:
        config: `data.store` says whether and where.
        train: decodes the training images.
        val: decodes the validation images.
        backend: its ranks agree on whether there is room.
        fill: keep pixels. False: the same pixels, decoded each time, for who looks at them once.

    Returns:
        The sources to train with, and what the store will take, for a person; empty without a store.

    Raises:
        RunError: the store does not fit into the memory, or onto the disk.
    """
    section, rules, sources = config.data, kept(config), (train, val)
    if section.store == "none":
        return sources, ""
    if not fill:
        return (Stored(train, rules[0]), Stored(val, rules[1])), ""
    made_from = [identity(train, "train", asdict(rules[0])), identity(val, "val", asdict(rules[1]))]
    told = _fitting(config, *_room(config, sources, made_from, backend), ranks=backend.local_world_size)
    slots = [_slots(config, each, rule.most) for each, rule in zip(made_from, rules, strict=True)]
    return (Stored(train, rules[0], slots[0]), Stored(val, rules[1], slots[1])), told


def _slots(config: Config, made_from: dict[str, Any], pixels: int) -> Slots:
    if config.data.store == "ram":
        return open_ram(pixels, made_from["split"])
    return open_disk(place(config, made_from), made_from, pixels)


def place(config: Config, made_from: dict[str, Any]) -> Path:
    """Return the folder of a split's pixels, to which only runs with the same identity come."""
    return hashed_folder(Path(config.run.folder) / "stores", made_from["split"], made_from)


def _fitting(config: Config, whole: float, there: float, left: float, ranks: int) -> str:
    """Require room for a store, MiB; return what it takes, for a person."""
    ram = config.data.store == "ram"
    needed = whole * ranks if ram else max(0.0, whole - there)
    if needed > left:
        copies = f" on each of {ranks} ranks, {_size(needed)} in all" if ram and ranks > 1 else ""
        kept_there = f", {_size(there)} of it there already" if there and not ram else ""
        where = "of memory are left here" if ram else f"are free at '{config.run.folder}'"
        remedy = "Set data.store=disk" if ram else "Free space, choose another run.folder"
        raise RunError(
            "data.store",
            f"is {config.data.store}, and the decoded images take about {_size(whole)}{copies}{kept_there}; "
            f"{_size(left)} {where}",
            "One of none, ram and disk",
            f"{remedy}, or a data.store_size near data.image_size, or data.store=none",
        )
    where = "in memory" + (" of each rank" if ranks > 1 else "") if ram else f"below '{config.run.folder}/stores'"
    return f"store: about {_size(whole)} of decoded images {where}, {_size(there)} of it there already"


def _room(
    config: Config, sources: tuple[Source, Source], made_from: list[dict[str, Any]], backend: Backend
) -> list[float]:
    """Return what all pixels take, what is there already, and what is left for more, in MiB, as rank 0 found them."""
    numbers = [0.0, 0.0, 0.0]
    if backend.rank == 0:
        rules = kept(config)
        each = _mean_bytes(sources[0], rules[0]), slot_bytes(rules[1].most)
        numbers[0] = sum(size * len(source) for size, source in zip(each, sources, strict=True))
        if config.data.store == "ram":
            numbers[2] = free_mib() * 2**20
        else:
            files = [place(config, each) / PIXELS for each in made_from]
            numbers[1] = sum(file.stat().st_blocks * 512 for file in files if file.is_file())
            numbers[2] = shutil.disk_usage(_existing(files[0])).free
    found = torch.tensor(numbers, dtype=torch.float32, device=backend.device) / 2**20
    backend.broadcast_([found])
    return found.tolist()


def _mean_bytes(source: Source, rule: Shrunk) -> float:
    """Return the mean bytes that a training image takes in its slot, from a few evenly spaced ones."""
    found = []
    for id in sample(len(source), SAMPLE):
        try:
            image = rule(source.decode(id))
        except DataError:
            continue  # training will ask for it, and data.on_corrupt decide
        found.append(slot_bytes(image.width * image.height))
    return sum(found) / len(found) if found else float(slot_bytes(rule.most))


def sample(length: int, count: int) -> list[int]:
    """Return up to `count` evenly spaced ids: listings lie by class, and the first images look alike."""
    count = min(count, length)
    return [number * length // count for number in range(count)]


def _existing(folder: Path) -> Path:
    """Return the nearest folder above that is there already."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
