"""Twelve dishes rendered by kd: real JPEG files without a download, a function of the
seed.

The pictures vary in shape, colour, light, table, crockery and clutter, and some dishes
look alike (risotto and curry, spaghetti and ramen), so a small model trained on labels
is worse than a large one. Validation labels are clean; `label_noise` puts a share of
the training pictures into a wrong folder, as in Food-101, whose training split is known
to be noisy.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Annotated
from uuid import uuid4

import numpy as np
from pydantic import PositiveInt

from kd.core.errors import DataError, NotPrepared
from kd.core.facts import DatasetFacts
from kd.core.host import cores
from kd.core.keys import Field, Keys, keys
from kd.core.types import Decoded, Label
from kd.parts.datasets._decode import decode, read
from kd.parts.datasets._dishes import DISHES, VERSION, file_name

# seconds between two counts of painted files for the bar: counting 4,200 takes 10 ms
SECONDS = 0.2


@keys
class Options(Keys):
    """The YAML keys of `kind: food_mini`."""

    root: str = "data/food_mini"
    """Folder of the rendered pictures; each combination of the other keys gets a folder
    of its own in it.
    """
    train_images: PositiveInt = 250
    """Training pictures per dish."""
    val_images: PositiveInt = 100
    """Validation pictures per dish."""
    pixels: Annotated[int, Field(ge=16, le=512)] = 64
    """Side of the stored pictures."""
    art_seed: int = 0
    """Seed of the pictures; `run.seed` does not change them."""
    label_noise: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
    """Share of the training pictures with the label of another dish."""
    redundancy: PositiveInt = 1
    """Photographs of each plate in the largest class, which are near-duplicates. No
    class has more plates than another, so a class is large because its plates were
    photographed more often.
    """
    imbalance: Annotated[float, Field(ge=1.0)] = 1.0
    """Training pictures of the largest class (`train_images`) over those of the
    smallest; the sizes between fall geometrically (arXiv:1901.05555). Validation stays
    balanced.
    """
    dishes: Annotated[int, Field(ge=1, le=4)] = 1
    """Most dishes on a tray; above 1, a picture has a set of labels."""

    def __post_init__(self) -> None:
        if self.train_images < max(self.redundancy, self.imbalance):
            values = f"{self.redundancy}, {self.imbalance:g}"
            raise ValueError(
                f"redundancy and imbalance must be 1 to train_images, are {values}"
            )
        if self.dishes > 1 and max(self.redundancy, self.imbalance) > 1:
            raise ValueError(
                "redundancy and imbalance need dishes: 1, are for pictures of one label"
            )


class FoodMini:
    """One split of the painted dishes. See `kd.core.contracts.Source`."""

    # The listing is a function of the options; `prepare` paints the files.

    def __init__(self, options: Options, split: str, hidden: bool = False) -> None:
        self.options, self.split, self.hidden = options, split, hidden
        self.dishes = tuple(DISHES)
        self.classes = () if hidden else self.dishes
        self.folder = Path(options.root).expanduser() / folder_name(options)
        self._pictures = pictures(options, split)
        title = f"{folder_name(options)}/{split}" + ("/unlabelled" if hidden else "")
        self.fingerprint = hashlib.sha256(title.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._pictures)

    def label(self, id: int) -> Label:
        """Return the label, or the set of labels of a tray; -1 if labels are
        withheld.
        """
        label, dish, *_ = self._pictures[id]
        if self.hidden or self.options.dishes == 1:
            return -1 if self.hidden else label
        there = {self.dishes[label], *dish.split("+")[1:]}
        return np.array([one in there for one in self.dishes], np.int8)

    def name(self, id: int) -> str:
        """Return the path below `root`, such as
        food_mini-1a2b3c4d/train/pizza/pizza_0007.jpg.
        """
        label, dish, plate, shot = self._pictures[id]
        return f"{self.folder.name}/{self.split}/{self.dishes[label]}/{file_name(dish, plate, shot)}"

    def prepare(self) -> None:
        if not (self.folder / "manifest.json").is_file():
            paint(self.options, self.folder)

    def decode(self, id: int) -> Decoded:
        if (
            not self.folder.is_dir()
        ):  # retries, as for a missing storage, would not help
            raise NotPrepared(
                "data.root",
                f"'{self.folder}' is not painted yet",
                "",
                "kd-train paints it",
            )
        file = self.folder.parent / self.name(id)
        remedy = f"Remove '{self.folder}'; the next run paints it anew"
        subject = f"file '{file}'"
        return decode(
            read(file.read_bytes, subject, "data.root", remedy), subject, "data.root"
        )


def folder_name(options: Options) -> str:
    """Return the folder of these settings, not shared with others."""
    later = (
        "redundancy",
        "imbalance",
        "dishes",
    )  # at 1 the pictures are as before these keys existed
    settings = {
        k: v
        for k, v in asdict(options).items()
        if k != "root" and not (k in later and v == 1)
    }
    text = json.dumps({"version": VERSION, **settings}, sort_keys=True)
    return f"food_mini-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def pictures(options: Options, split: str) -> list[tuple[int, str, int, int]]:
    """List (label, painted dish, plate, photograph) by label and dish; a tray's dishes
    are joined by "+".
    """
    dishes, train = tuple(DISHES), split == "train"
    rng, trays = (
        Random(f"{options.art_seed}/labels"),
        Random(f"{options.art_seed}/{split}/trays"),
    )
    listed = []
    for label, dish in enumerate(dishes):
        size = options.train_images * options.imbalance ** (-label / (len(dishes) - 1))
        count = max(1, round(size)) if train else options.val_images
        plates = (
            min(count, -(-options.train_images // options.redundancy))
            if train
            else count
        )
        wrong = set(
            rng.sample(range(count), round(options.label_noise * count) if train else 0)
        )
        for index in range(count):
            other = (label + 1 + rng.randrange(len(dishes) - 1)) % len(dishes)
            beside = [
                one for one in dishes if one not in (dish, dishes[other])
            ]  # a wrong label is on no tray
            more = trays.sample(beside, trays.randrange(options.dishes))
            named = other if index in wrong else label
            listed.append(
                (named, "+".join([dish, *more]), index % plates, index // plates)
            )
    return sorted(listed)


def paint(options: Options, folder: Path) -> None:
    """Paint both splits into `folder`, atomically, with one process per core."""
    # The painters are separate programs: they need neither torch nor a guard around the
    # caller's main module.
    draft = (
        folder.parent / f".{folder.name}.{uuid4().hex[:12]}.tmp"
    )  # processes in two containers may share a PID
    listed, processes = (
        {split: pictures(options, split) for split in ("train", "val")},
        cores(),
    )
    work = {
        "folder": str(draft),
        "seed": options.art_seed,
        "size": options.pixels,
        "pictures": listed,
    }
    total = sum(map(len, listed.values()))
    print(f"food_mini: painting {total} pictures into '{folder}' (once)", flush=True)
    try:
        draft.mkdir(parents=True)
        (draft / "work.json").write_text(json.dumps(work))
        command = [
            sys.executable,
            "-m",
            "kd.parts.datasets._dishes",
            str(draft / "work.json"),
            str(processes),
        ]
        painters = [
            subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True)
            for i in range(processes)
        ]
        _show_progress(painters, draft, total)
        failures = [
            text for _, text in [painter.communicate() for painter in painters] if text
        ]
        if failures or any(painter.returncode for painter in painters):
            reason = (failures or ["a painter ended early"])[0].strip().splitlines()[-1]
            raise OSError(0, reason)
        (draft / "work.json").unlink()
        (draft / "manifest.json").write_text(
            json.dumps({"version": VERSION, **asdict(options)}, indent=2)
        )
        _move(draft, folder)
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "Free space or set data.root to a folder that you may write"
        raise DataError(
            "data.root", f"cannot paint into '{folder}' ({reason})", "", remedy
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _show_progress(
    painters: Sequence[subprocess.Popen], draft: Path, total: int
) -> None:
    """Show a bar while pictures are painted, if the output is a terminal."""
    if not sys.stdout.isatty() or "JPY_PARENT_PID" in os.environ:
        return
    from rich.progress import Progress  # only on a terminal

    with Progress(refresh_per_second=4) as bar:
        task = bar.add_task("painting", total=total)
        while any(painter.poll() is None for painter in painters):
            bar.update(task, completed=sum(1 for _ in draft.glob("*/*/*.jpg")))
            time.sleep(SECONDS)
        if not any(painter.returncode for painter in painters):
            bar.update(task, completed=total)


def _move(draft: Path, folder: Path) -> None:
    try:
        if folder.exists() and not (folder / "manifest.json").is_file():
            shutil.rmtree(folder)  # from an older kd, or damaged: incomplete
        os.rename(draft, folder)
    except OSError:
        if not (
            folder / "manifest.json"
        ).is_file():  # else another process was faster, with the same pictures
            raise


def facts(options: Options) -> DatasetFacts:
    """Return the dataset's facts."""
    return DatasetFacts(
        label="set" if options.dishes > 1 else "class", root=options.root
    )


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> FoodMini:
    """Build one split; `classes` is not needed, since both splits have all dishes. All
    images have labels; with `labels: some` only those kept by `data.labels_per_class`
    do.
    """
    return FoodMini(options, split, hidden=labels == "none")
