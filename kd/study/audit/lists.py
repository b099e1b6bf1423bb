"""Write an audit: a CSV, a list for `data.exclude`, and a page with the images."""

import base64
import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from kd.core.contracts import Source
from kd.core.errors import DataError
from kd.core.text import list_line, names_in_list
from kd.core.types import Label
from kd.files.storage import write_text
from kd.files.templates import render_template
from kd.study.audit.copies import MIRRORED, Album, Pairs

FOLDER = "audit"  # in a run folder
DUPLICATES = "duplicates.csv"  # in that folder
EXCLUDE = "exclude.txt"  # in that folder
SHOWN = 200  # most findings on a page, which then has a few MB
SIDE = 160  # pixels of an image's longer side on a page: two fit side by side
# kinds of a repeat
COPY = "same bytes"
PICTURE = "same picture"
PART = "a part"
MIRROR = "mirrored"
HEAD = (
    "kind",
    "score",
    "split",
    "name",
    "label",
    "other split",
    "other name",
    "other label",
)
"""Columns of duplicates.csv."""


class Seen(NamedTuple):
    """An image of a finding."""

    split: str
    name: str
    label: str
    id: int = -1  # -1: unknown, read from a list


class Repeat(NamedTuple):
    """Two images of one photograph."""

    kind: str
    score: float
    first: Seen
    second: Seen

    @property
    def leaks(self) -> bool:
        return self.first.split != self.second.split

    @property
    def contradicts(self) -> bool:
        return self.first.label != self.second.label


def label_text(label: Label, classes: Sequence[str]) -> str:
    """Return the name of a class, of several joined by "+", or "" without a label."""
    if isinstance(label, np.ndarray):
        return "+".join(
            name for name, has in zip(classes, label, strict=True) if has > 0
        )
    return classes[label] if label >= 0 else ""


def repeats(album: Album, pairs: Pairs, splits: Mapping[str, Source]) -> list[Repeat]:
    """Return the pairs in two splits, or in one with two labels, worst first."""
    names = [*splits]

    def image_of(row: int) -> Seen:
        split = names[album.split[row]]
        source = splits[split]
        id = int(album.id[row])
        label = label_text(source.label(id), source.classes)
        return Seen(split, source.name(id), label, id)

    relevant = []
    for *rows, variant, score in zip(*pairs, strict=True):
        first, second = sorted(
            map(int, rows), key=lambda row: (album.split[row], album.id[row])
        )
        kind = _kind(album, first, second, variant)
        images = map(image_of, (first, second))
        pair = Repeat(kind, round(float(score), 3), *images)
        if pair.leaks or pair.contradicts:
            relevant.append(pair)
    return worst_first(relevant)


def _kind(album: Album, first: int, second: int, variant: int) -> str:
    """Return how the images of two rows repeat each other."""
    same_bytes = album.crc[first] and album.crc[first] == album.crc[second]
    if same_bytes and (album.luma[first] == album.luma[second]).all():
        return COPY
    if variant >= MIRRORED:
        return MIRROR
    return PART if variant else PICTURE


def worst_first(pairs: Iterable[Repeat]) -> list[Repeat]:
    """Return each pair once: pairs between splits first, then by similarity."""
    unique = {(pair.first[:2], pair.second[:2]): pair for pair in pairs}

    def severity(pair: Repeat) -> tuple:
        return (
            not pair.leaks,
            pair.kind != COPY,
            -pair.score,
            pair.first[:2],
            pair.second[:2],
        )

    return sorted(unique.values(), key=severity)


def write_repeats(
    folder: Path, pairs: Sequence[Repeat], splits: Mapping[str, Source]
) -> None:
    """Write duplicates.csv, duplicates.html and exclude.txt into a folder.

    exclude.txt keeps its existing names.
    """
    rows = [
        (pair.kind, pair.score, *pair.first[:3], *pair.second[:3]) for pair in pairs
    ]
    write_table(folder / DUPLICATES, [HEAD, *rows])
    _write_exclude(folder / EXCLUDE, pairs)
    figures = [
        (f"{pair.kind}, {pair.score:.2f}", [pair.first, pair.second]) for pair in pairs
    ]
    write_text(
        folder / "duplicates.html",
        page("Images that repeat, the worst first", figures, splits),
    )


def _write_exclude(file: Path, pairs: Sequence[Repeat]) -> None:
    """Write the lines for `data.exclude`, and keep the names in the file.

    Those of pairs with two labels are comments.
    """
    names = {f"{pair.first.split}:{pair.first.name}" for pair in pairs if pair.leaks}
    if file.is_file():
        content = file.read_text(encoding="utf-8", errors="backslashreplace")
        names |= set(names_in_list(content))
    contradicting = {
        f"{image.split}:{image.name}"
        for pair in pairs
        if not pair.leaks
        for image in (pair.first, pair.second)
    } - names
    lines = [
        "# Lines for data.exclude. Of a photograph in two splits, the copy that is"
        " trained on."
    ]
    lines += map(list_line, sorted(names))
    if contradicting:
        lines.append(
            "# One photograph with two labels. Remove the # of a line to leave that"
            " image out:"
        )
    lines += [f"# {list_line(name)}" for name in sorted(contradicting)]
    write_text(file, "\n".join([*lines, ""]))


def read_repeats(folder: Path) -> list[Repeat]:
    """Return the pairs in a folder's duplicates.csv; [] without it."""
    file = folder / DUPLICATES
    if not file.is_file():
        return []
    try:
        with file.open(
            newline="", encoding="utf-8", errors="surrogateescape"
        ) as stream:
            rows = list(csv.reader(stream))[1:]
        return [
            Repeat(kind, float(score), Seen(a, b, c), Seen(d, e, f))
            for kind, score, a, b, c, d, e, f in rows
        ]
    except (ValueError, TypeError, IndexError, csv.Error) as error:
        raise DataError(
            "audit", f"'{file}' is damaged ({error})", "", "Remove it"
        ) from error


def with_ids(pairs: Sequence[Repeat], splits: Mapping[str, Source]) -> list[Repeat]:
    """Return pairs that were read from a list with the ids of their images.

    Pairs whose images were removed are dropped.
    """
    if not pairs:
        return []
    ids = {
        (split, source.name(id)): id
        for split, source in splits.items()
        for id in range(len(source))
    }
    present = []
    for pair in pairs:
        first_id = ids.get(pair.first[:2])
        second_id = ids.get(pair.second[:2])
        if first_id is not None and second_id is not None:
            first = pair.first._replace(id=first_id)
            second = pair.second._replace(id=second_id)
            present.append(pair._replace(first=first, second=second))
    return present


def write_table(file: Path, rows: Sequence[Sequence[object]]) -> None:
    """Write rows as CSV; the first row has the column names."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())


def page(
    title: str,
    figures: Sequence[tuple[str, Sequence[Seen]]],
    splits: Mapping[str, Source],
    note: str = "",
) -> str:
    """Return a self-contained HTML page with the images of the first findings."""
    drawn = []
    for caption, images in figures[:SHOWN]:
        cells = [
            {
                "name": f"{image.split}: {image.name} ({image.label})",
                "data": _image_data(splits[image.split], image.id),
            }
            for image in images
        ]
        drawn.append((caption, cells))
    template = Path(__file__).parent / "findings.html.jinja"
    return render_template(
        template, title=title, note=note, figures=drawn, count=len(figures)
    )


def _image_data(source: Source, id: int) -> str:
    """Return a thumbnail; "" for an image that can no longer be read."""
    try:
        return thumbnail(source.decode(id).image)
    except DataError:
        return ""


def thumbnail(image: Image.Image) -> str:
    """Return a small JPEG as a data URI; the image is shrunk in place."""
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
