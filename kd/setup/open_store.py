"""Open the store of decoded pixels.

kd chooses the stored image size and checks the free space.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

from kd.config.schema import DataSection
from kd.core.contracts import Backend, Source
from kd.core.errors import CorruptImage, RunError
from kd.core.host import free_mib
from kd.core.ranks import numbers_of_rank_0
from kd.core.seeds import evenly_spaced
from kd.data.store import (
    PIXELS,
    Shrunk,
    Slots,
    Stored,
    StoredViews,
    identity,
    open_disk,
    open_ram,
    slot_bytes,
    view_bytes,
)
from kd.data.views import EvalTransform, Views
from kd.files.records import record_bytes
from kd.files.storage import hashed_folder, log

SAMPLE = 16  # training images decoded to estimate the size of a store
Splits = tuple[Source, Source]  # those of training and validation


def keep_rules(section: DataSection) -> tuple[Shrunk, EvalTransform]:
    """Return the stored form of training and validation images."""
    if section.store_size:
        shrunk = Shrunk(section.store_size, 1.0)
    else:
        shrunk = Shrunk(section.image_size, section.augment.crop_scale)
    return shrunk, EvalTransform(section.image_size, section.crop_pct)


def open_pixel_store(
    section: DataSection,
    splits: Splits,
    run_folder: str,
    backend: Backend,
    fill: bool = True,
) -> Splits:
    """Put the store before both splits, empty unless `fill`.

    All ranks must call it after the images exist.
    """
    rules = keep_rules(section)
    ram = section.store == "ram"
    train, val = splits
    if not fill:
        return Stored(train, rules[0]), Stored(val, rules[1])
    identities = [
        identity(train, "train", asdict(rules[0])),
        identity(val, "val", asdict(rules[1])),
    ]
    folders = [
        hashed_folder(Path(run_folder) / "stores", content["split"], content)
        for content in identities
    ]
    _require_room(splits, rules, ram, folders, backend)
    slots: list[Slots] = []
    for content, folder, rule in zip(identities, folders, rules, strict=True):
        if ram:
            slots.append(open_ram(rule.max_pixels, content["split"]))
        else:
            slots.append(open_disk(folder, content, rule.max_pixels))
    opened = Stored(train, rules[0], slots[0]), Stored(val, rules[1], slots[1])
    if backend.rank == 0 and not ram:
        for split, stored in zip(("training", "validation"), opened, strict=True):
            sample = evenly_spaced(len(stored), SAMPLE)
            if changed := stored.refresh(sample):
                log.warning(
                    f"data.store: {changed} of {len(sample)} sampled {split} images"
                    " have changed since they were decoded: all are decoded again"
                )
    backend.barrier()
    return opened


def decoded_bytes(splits: Splits, rules: tuple[Shrunk, EvalTransform]) -> float:
    """Return the estimated bytes of all records of a store.

    They are estimated from decoded training images.
    """
    train, val = splits
    train_bytes = _mean_bytes(train, rules[0]) * len(train)
    return train_bytes + slot_bytes(rules[1].max_pixels) * len(val)


def _require_room(
    splits: Splits,
    rules: tuple[Shrunk, EvalTransform],
    ram: bool,
    folders: list[Path],
    backend: Backend,
) -> None:
    ranks = backend.local_world_size
    folder = folders[0].parents[1]
    sizes = [0.0, 0.0, 0.0]
    if backend.rank == 0:
        sizes[0] = decoded_bytes(splits, rules)
        if ram:
            sizes[2] = free_mib() * 2**20
        else:
            files = [path / PIXELS for path in folders]
            sizes[1] = sum(
                file.stat().st_blocks * 512 for file in files if file.is_file()
            )
            existing = folder.absolute()
            while not existing.is_dir():
                existing = existing.parent
            sizes[2] = shutil.disk_usage(existing).free
    total, stored, free = (size / 2**20 for size in numbers_of_rank_0(backend, sizes))
    needed = total * ranks if ram else max(0.0, total - stored)
    if needed > free:
        size = _size(total)
        if ram and ranks > 1:
            size += f" on each of {ranks} ranks, {_size(needed)} in all"
        if stored and not ram:
            size += f", {_size(stored)} already stored"
        space = "of memory are left here" if ram else f"are free at '{folder}'"
        remedy = (
            "Set data.store=disk or none"
            if ram
            else "Set data.store=none, free space, choose another run.folder"
        )
        raise RunError(
            "data.store",
            f"is {'ram' if ram else 'disk'}, and the decoded images take about {size};"
            f" {_size(free)} {space}",
            "What fits",
            f"{remedy}, or a data.store_size near data.image_size",
        )
    if backend.rank == 0:
        place = f"below '{folder}/stores'"
        if ram:
            place = "in memory of each rank" if ranks > 1 else "in memory"
        log.info(
            "store: about %s of decoded images %s, %s already stored",
            _size(total),
            place,
            _size(stored),
        )


def store_views(views: Views, number: int, backend: Backend) -> StoredViews:
    """Keep the first `number` views of each image in memory.

    ConfigError: too little memory. All ranks must call it.
    """
    each = record_bytes(view_bytes(views))
    if views.small is not None:
        each += record_bytes(view_bytes(views.small))
    total = number * len(views) * each / 2**20
    [free] = numbers_of_rank_0(backend, [free_mib()])
    if total * backend.local_world_size > free:
        wrong = (
            f"is views, and {number} views of {len(views)} images take {_size(total)}"
            f" on each rank of this host; {_size(free)} of memory are left"
        )
        remedy = "Set data.store=ram or disk, which keep decoded pixels, or fewer views"
        raise RunError("data.store", wrong, "What fits", remedy)
    if backend.rank == 0:
        log.info(
            "store: %s of views in memory, once all %d of each image are made",
            _size(total),
            number,
        )
    return StoredViews(views, number)


def _mean_bytes(source: Source, rule: Shrunk) -> float:
    sizes = []
    for id in evenly_spaced(len(source), SAMPLE):
        try:
            image = rule(source.decode(id).image)
        except CorruptImage:
            continue  # training will decode it, and data.on_corrupt decides
        sizes.append(slot_bytes(image.width * image.height))
    return sum(sizes) / len(sizes) if sizes else float(slot_bytes(rule.max_pixels))


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
