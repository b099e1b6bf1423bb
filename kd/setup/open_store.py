"""Open the store of decoded pixels: choose the stored image size and check the free
space.
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
    side, crop = (
        (section.store_size, 1.0)
        if section.store_size
        else (section.image_size, section.augment.crop_scale)
    )
    return Shrunk(side, crop), EvalTransform(section.image_size, section.crop_pct)


def open_store(
    section: DataSection,
    splits: Splits,
    run_folder: str,
    backend: Backend,
    fill: bool = True,
) -> Splits:
    """Put the store before both splits, empty unless `fill`. All ranks must call it
    after the images exist.
    """
    rules, ram, (train, val) = keep_rules(section), section.store == "ram", splits
    if not fill:
        return Stored(train, rules[0]), Stored(val, rules[1])
    made_from = [
        identity(train, "train", asdict(rules[0])),
        identity(val, "val", asdict(rules[1])),
    ]
    folders = [
        hashed_folder(Path(run_folder) / "stores", each["split"], each)
        for each in made_from
    ]
    _require_room(splits, rules, ram, folders, backend)
    slots: list[Slots] = []
    for each, path, rule in zip(made_from, folders, rules, strict=True):
        slots.append(
            open_ram(rule.max_pixels, each["split"])
            if ram
            else open_disk(path, each, rule.max_pixels)
        )
    opened = Stored(train, rules[0], slots[0]), Stored(val, rules[1], slots[1])
    for split, stored in (
        zip(("training", "validation"), opened, strict=True)
        if backend.rank == 0 and not ram
        else ()
    ):
        sample = evenly_spaced(len(stored), SAMPLE)
        if changed := stored.refresh(sample):
            text = (
                f"data.store: {changed} of {len(sample)} sampled {split} images have"
                " changed"
            )
            log.warning(f"{text} since they were decoded: all are decoded again")
    backend.barrier()
    return opened


def decoded_bytes(splits: Splits, rules: tuple[Shrunk, EvalTransform]) -> float:
    """Return the bytes of all records of a store, estimated from decoded training
    images.
    """
    train, val = splits
    return _mean_bytes(train, rules[0]) * len(train) + slot_bytes(
        rules[1].max_pixels
    ) * len(val)


def _require_room(
    splits: Splits,
    rules: tuple[Shrunk, EvalTransform],
    ram: bool,
    folders: list[Path],
    backend: Backend,
) -> None:
    ranks, folder = backend.local_world_size, folders[0].parents[1]
    numbers = [0.0, 0.0, 0.0]
    if backend.rank == 0:
        numbers[0] = decoded_bytes(splits, rules)
        if ram:
            numbers[2] = free_mib() * 2**20
        else:
            files = [path / PIXELS for path in folders]
            numbers[1] = sum(
                file.stat().st_blocks * 512 for file in files if file.is_file()
            )
            existing = next(
                path
                for path in (folder.absolute(), *folder.absolute().parents)
                if path.is_dir()
            )
            numbers[2] = shutil.disk_usage(existing).free
    total, there, left = (
        number / 2**20 for number in numbers_of_rank_0(backend, numbers)
    )
    needed = total * ranks if ram else max(0.0, total - there)
    if needed > left:
        copies = (
            f" on each of {ranks} ranks, {_size(needed)} in all"
            if ram and ranks > 1
            else ""
        )
        already = f", {_size(there)} already stored" if there and not ram else ""
        config_path = "of memory are left here" if ram else f"are free at '{folder}'"
        wrong = (
            f"is {'ram' if ram else 'disk'}, and the decoded images take about"
            f" {_size(total)}{copies}{already}; "
        )
        wrong += f"{_size(left)} {config_path}"
        remedy = (
            "Set data.store=disk" if ram else "Free space, choose another run.folder"
        )
        remedy += ", or a data.store_size near data.image_size, or data.store=none"
        raise RunError("data.store", wrong, "One of none, ram and disk", remedy)
    if backend.rank == 0:
        config_path = (
            "in memory" + (" of each rank" if ranks > 1 else "")
            if ram
            else f"below '{folder}/stores'"
        )
        log.info(
            "store: about %s of decoded images %s, %s already stored",
            _size(total),
            config_path,
            _size(there),
        )


def store_views(views: Views, number: int, backend: Backend) -> StoredViews:
    """Keep the first `number` views of each image in memory; ConfigError: too little
    memory. All ranks must call it.
    """
    sizes = (
        record_bytes(view_bytes(one)) for one in (views, views.small) if one is not None
    )
    total = number * len(views) * sum(sizes) / 2**20
    [left] = numbers_of_rank_0(backend, [free_mib()])
    if total * backend.local_world_size > left:
        wrong = (
            f"is views, and {number} views of {len(views)} images take {_size(total)}"
            " on each rank of this host; "
        )
        remedy = "Set data.store=ram or disk, which keep decoded pixels, or fewer views"
        raise RunError(
            "data.store",
            f"{wrong}{_size(left)} of memory are left",
            "What fits",
            remedy,
        )
    if backend.rank == 0:
        log.info(
            "store: %s of views in memory, once all %d of each image are made",
            _size(total),
            number,
        )
    return StoredViews(views, number)


def _mean_bytes(source: Source, rule: Shrunk) -> float:
    found = []
    for id in evenly_spaced(len(source), SAMPLE):
        try:
            image = rule(source.decode(id).image)
        except CorruptImage:
            continue  # training will decode it, and data.on_corrupt decides
        found.append(slot_bytes(image.width * image.height))
    return sum(found) / len(found) if found else float(slot_bytes(rule.max_pixels))


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
