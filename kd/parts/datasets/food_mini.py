"""Render twelve dishes as JPEG files without a download, as a function of the seed.

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
from kd.parts.datasets._decode import decode_image, read_retried
from kd.parts.datasets._dishes import DISHES, VERSION, file_name

# seconds between two counts of painted files for the bar: counting 4,200 takes 10 ms
COUNT_INTERVAL = 0.2


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
    """Read one split of the painted dishes. See `kd.core.contracts.Source`."""

    # The listing is a function of the options; `prepare` paints the files.

    def __init__(self, options: Options, split: str, hidden: bool = False) -> None:
        self.options = options
        self.split = split
        self.hidden = hidden
        self.dishes = tuple(DISHES)
        self.classes = () if hidden else self.dishes
        self.folder = Path(options.root).expanduser() / folder_name(options)
        self._images = list_images(options, split)
        title = f"{folder_name(options)}/{split}" + ("/unlabelled" if hidden else "")
        self.fingerprint = hashlib.sha256(title.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._images)

    def label(self, id: int) -> Label:
        """Return the label, or a tray's set of labels; -1 if labels are withheld."""
        label, painted_dishes, *_ = self._images[id]
        if self.hidden:
            return -1
        if self.options.dishes == 1:
            return label
        tray = {self.dishes[label], *painted_dishes.split("+")[1:]}
        return np.array([dish in tray for dish in self.dishes], np.int8)

    def name(self, id: int) -> str:
        """Return the path in `root`: food_mini-1a2b3c4d/train/pizza/pizza_0007.jpg."""
        label, dish, plate, shot = self._images[id]
        file = file_name(dish, plate, shot)
        return f"{self.folder.name}/{self.split}/{self.dishes[label]}/{file}"

    def prepare(self) -> None:
        if not (self.folder / "manifest.json").is_file():
            paint(self.options, self.folder)

    def decode(self, id: int) -> Decoded:
        if not self.folder.is_dir():  # retries would not help
            raise NotPrepared(
                "data.root",
                f"'{self.folder}' is not painted yet",
                "",
                "kd-train paints it",
            )
        file = self.folder.parent / self.name(id)
        remedy = f"Remove '{self.folder}'; the next run paints it anew"
        subject = f"file '{file}'"
        data = read_retried(file.read_bytes, subject, "data.root", remedy)
        return decode_image(data, subject, "data.root")


def folder_name(options: Options) -> str:
    """Return the folder of these settings, not shared with others."""
    settings = asdict(options)
    del settings["root"]
    for key in ("redundancy", "imbalance", "dishes"):
        if settings[key] == 1:  # the images are as before these keys existed
            del settings[key]
    text = json.dumps({"version": VERSION, **settings}, sort_keys=True)
    return f"food_mini-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def list_images(options: Options, split: str) -> list[tuple[int, str, int, int]]:
    """List (label, dish, plate, photograph), sorted; "+" joins dishes of a tray."""
    dishes = tuple(DISHES)
    train = split == "train"
    rng = Random(f"{options.art_seed}/labels")
    tray_rng = Random(f"{options.art_seed}/{split}/trays")
    images = []
    for label, dish in enumerate(dishes):
        size = options.train_images * options.imbalance ** (-label / (len(dishes) - 1))
        count = max(1, round(size)) if train else options.val_images
        plates = count
        mislabelled_count = 0
        if train:
            plates = min(count, -(-options.train_images // options.redundancy))
            mislabelled_count = round(options.label_noise * count)
        mislabelled = set(rng.sample(range(count), mislabelled_count))
        for index in range(count):
            wrong_label = (label + 1 + rng.randrange(len(dishes) - 1)) % len(dishes)
            # A wrong label is on no tray.
            beside = [
                name for name in dishes if name not in (dish, dishes[wrong_label])
            ]
            tray = [dish, *tray_rng.sample(beside, tray_rng.randrange(options.dishes))]
            written_label = wrong_label if index in mislabelled else label
            images.append(
                (written_label, "+".join(tray), index % plates, index // plates)
            )
    return sorted(images)


def paint(options: Options, folder: Path) -> None:
    """Paint both splits into `folder`, atomically, with one process per core."""
    # The painters are separate programs: they need neither torch nor a guard around the
    # caller's main module.
    # a random name: processes in two containers may share a PID
    draft = folder.parent / f".{folder.name}.{uuid4().hex[:12]}.tmp"
    images = {split: list_images(options, split) for split in ("train", "val")}
    processes = cores()
    order = {
        "folder": str(draft),
        "seed": options.art_seed,
        "size": options.pixels,
        "pictures": images,
    }
    total = sum(map(len, images.values()))
    print(f"food_mini: painting {total} pictures into '{folder}' (once)", flush=True)
    try:
        draft.mkdir(parents=True)
        (draft / "work.json").write_text(json.dumps(order))
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
        outputs = [painter.communicate() for painter in painters]
        messages = [message for _, message in outputs if message]
        if not messages and any(painter.returncode for painter in painters):
            messages = ["a painter ended early"]
        if messages:
            raise OSError(0, messages[0].strip().splitlines()[-1])
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
    """Show a bar while images are painted, if the output is a terminal."""
    if not sys.stdout.isatty() or "JPY_PARENT_PID" in os.environ:
        return
    from rich.progress import Progress  # only on a terminal

    with Progress(refresh_per_second=4) as bar:
        task = bar.add_task("painting", total=total)
        while any(painter.poll() is None for painter in painters):
            bar.update(task, completed=sum(1 for _ in draft.glob("*/*/*.jpg")))
            time.sleep(COUNT_INTERVAL)
        if not any(painter.returncode for painter in painters):
            bar.update(task, completed=total)


def _move(draft: Path, folder: Path) -> None:
    try:
        if folder.exists() and not (folder / "manifest.json").is_file():
            shutil.rmtree(folder)  # from an older kd, or damaged: incomplete
        os.rename(draft, folder)
    except OSError:
        # else another process was faster, with the same images
        if not (folder / "manifest.json").is_file():
            raise


def facts(options: Options) -> DatasetFacts:
    """Return the dataset's facts."""
    return DatasetFacts(
        label="set" if options.dishes > 1 else "class", root=options.root
    )


def build(
    options: Options, split: str, classes: Sequence[str] | None, labels: str = "all"
) -> FoodMini:
    """Build one split; `classes` is not needed, since both splits have all dishes.

    All images have labels; with `labels: some` only those kept by
    `data.labels_per_class` do.
    """
    return FoodMini(options, split, hidden=labels == "none")
