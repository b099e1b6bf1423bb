"""Pictures of a laboratory as one NumPy file a split: uint8 [N, H, W, 3] and the names
of their classes.
"""

import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from kd.core.facts import DatasetFacts
from kd.core.keys import Keys, file_key, keys
from kd.core.types import Decoded

facts = DatasetFacts()


@keys
class Options(Keys):
    """The YAML keys of `kind: arrays`."""

    folder: str = file_key()
    """Folder of train.npz and val.npz."""


def recognizes(folder: Path) -> dict[str, str] | None:
    """Return the keys of a folder with both files."""
    if {"train.npz", "val.npz"} <= {path.name for path in folder.iterdir()}:
        return {"folder": str(folder)}
    return None


class Arrays:
    """The pictures of a split."""

    def __init__(self, options, split, classes):
        with np.load(Path(options.folder) / f"{split}.npz") as file:
            self.pixels = file["pixels"]
            self.labels = file["labels"].tolist()
        self.classes = classes or sorted({*self.labels})
        self.fingerprint = f"{zlib.crc32(self.pixels.tobytes()):x}"

    def __len__(self):
        return len(self.labels)

    def label(self, id):
        return self.classes.index(self.labels[id])

    def name(self, id):
        return f"{id}.npy"

    def prepare(self):
        pass

    def decode(self, id):
        return Decoded(
            Image.fromarray(self.pixels[id]), zlib.crc32(self.pixels[id].tobytes())
        )


def build(options, split, classes, labels="all"):
    return Arrays(options, split, classes)
