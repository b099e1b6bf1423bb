"""The facts about the images.

They are equal on all ranks at a start, and equal to the run's at a resume.
"""

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import numpy as np

from kd.core.contracts import Backend, Source
from kd.core.errors import CorruptImage, DataError
from kd.core.ranks import differing_ranks
from kd.core.seeds import evenly_spaced
from kd.core.text import list_line

SAMPLED = 64
"""Files of a split whose bytes are compared. If one in twenty has changed, that is
noticed with a probability of 96 %. 64 photographs of 12 megapixels take 0.06 CPU
seconds from the file cache (`same_data_*.csv`).
"""


def same_contents(splits: Mapping[str, Source], backend: Backend) -> dict[str, int]:
    """Compare the images of all ranks; return the CRC-32 of some files by name.

    All ranks must call this.

    Raises:
        DataError: names, labels, sizes or some of the contents differ between ranks;
            every rank raises it.
    """
    contents: dict[str, int] = {}
    for split, source in splits.items():
        encoded = getattr(source, "encoded", None)
        for id in evenly_spaced(len(source), SAMPLED):
            with suppress(CorruptImage):
                crc = zlib.crc32(encoded(id)) if encoded else source.decode(id).crc
                contents[list_line(f"{split}:{source.name(id)}")] = crc
    digest = f"{[source.fingerprint for source in splits.values()]} {contents}"
    require_equal(digest, image_facts(splits, contents), backend)
    return contents


def image_facts(
    splits: Mapping[str, Source], contents: Mapping[str, int]
) -> Iterator[str]:
    """Yield the classes of each split, then each image with its label and contents.

    The contents are size and CRC-32 as far as they are known.
    """
    for split, source in splits.items():
        yield f"'{split}' with the classes {', '.join(source.classes)}"
        for id, size in enumerate(getattr(source, "sizes", ["?"] * len(source))):
            name = list_line(f"{split}:{source.name(id)}")
            label = np.asarray(source.label(id)).tolist()
            yield (
                f"{name} ({size} bytes, CRC-32 {contents.get(name, '?')}, label"
                f" {label})"
            )


def require_equal(digest: str, image_facts: Iterable[str], backend: Backend) -> None:
    """Raise DataError on every rank if a digest is not rank 0's.

    Each rank names its first fact that differs.

    All ranks must call this. It costs one small reduction; the facts are drawn only if
    digests differ.
    """
    if not differing_ranks(backend, digest):
        return
    lines = [*image_facts, digest]  # the last ones differ in any case
    place = bisect_left(
        range(2**28),
        1,
        key=lambda place: bool(differing_ranks(backend, f"{lines[: place + 1]}")),
    )
    rank = differing_ranks(backend, lines[place])[0]
    wrong = (
        f"rank {rank} has other images than rank 0; the first that differs is on this"
        f" rank {lines[place]:.300}"
    )
    allowed = "The same names, labels, sizes and contents on all ranks"
    raise DataError(
        "data", wrong, allowed, "Copy rank 0's images to the other machines"
    )
