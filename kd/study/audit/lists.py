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
DUPLICATES, EXCLUDE = "duplicates.csv", "exclude.txt"  # files in that folder
SHOWN = 200  # most findings on a page, which then has a few MB
SIDE = 160  # pixels of an image's longer side on a page: two fit side by side
COPY, PICTURE, PART, MIRROR = "same bytes", "same picture", "a part", "mirrored"
"""Kinds of a repeat."""
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
    """Return the relevant pairs, worst first: in two splits, or in one split with two
    labels.
    """
    names, sources = [*splits], [*splits.values()]

    def seen(row: int) -> Seen:
        split, id = int(album.split[row]), int(album.id[row])
        source = sources[split]
        return Seen(
            names[split],
            source.name(id),
            label_text(source.label(id), source.classes),
            id,
        )

    found = []
    for row, other_row, variant, score in zip(*pairs, strict=True):
        first, second = sorted(
            (int(row), int(other_row)),
            key=lambda row: (album.split[row], album.id[row]),
        )
        pair = Repeat(
            _kind(album, first, second, variant),
            round(float(score), 3),
            seen(first),
            seen(second),
        )
        if pair.leaks or pair.contradicts:
            found.append(pair)
    return worst_first(found)


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
    """Write duplicates.csv, duplicates.html and exclude.txt into a folder; exclude.txt
    keeps its existing names.
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
    """Write the lines for `data.exclude`, those of pairs with two labels as comments;
    keep the names in the file.
    """
    names = {f"{pair.first.split}:{pair.first.name}" for pair in pairs if pair.leaks}
    if file.is_file():
        names |= set(
            names_in_list(file.read_text(encoding="utf-8", errors="backslashreplace"))
        )
    torn = {
        f"{seen.split}:{seen.name}"
        for pair in pairs
        if not pair.leaks
        for seen in (pair.first, pair.second)
    }
    lines = [
        "# Lines for data.exclude. Of a photograph in two splits, the copy that is"
        " trained on."
    ]
    lines += map(list_line, sorted(names))
    if torn - names:
        lines.append(
            "# One photograph with two labels. Remove the # of a line to leave that"
            " image out:"
        )
    lines += [f"# {list_line(name)}" for name in sorted(torn - names)]
    write_text(file, "\n".join([*lines, ""]))


def read_repeats(folder: Path) -> list[Repeat]:
    """Return the pairs in a folder's duplicates.csv; [] without it."""
    file = folder / DUPLICATES
    if not file.is_file():
        return []
    try:
        with file.open(
            newline="", encoding="utf-8", errors="surrogateescape"
        ) as opened:
            rows = list(csv.reader(opened))[1:]
        return [
            Repeat(kind, float(score), Seen(a, b, c), Seen(d, e, f))
            for kind, score, a, b, c, d, e, f in rows
        ]
    except (ValueError, TypeError, IndexError, csv.Error) as error:
        raise DataError(
            "audit", f"'{file}' is damaged ({error})", "", "Remove it"
        ) from error


def with_ids(pairs: Sequence[Repeat], splits: Mapping[str, Source]) -> list[Repeat]:
    """Return pairs that were read from a list with the ids of their images; drop those
    whose images were removed.
    """
    if not pairs:
        return []
    ids = {
        (split, source.name(id)): id
        for split, source in splits.items()
        for id in range(len(source))
    }
    kept = []
    for pair in pairs:
        first, second = (
            seen._replace(id=ids.get(seen[:2], -1))
            for seen in (pair.first, pair.second)
        )
        if first.id >= 0 and second.id >= 0:
            kept.append(pair._replace(first=first, second=second))
    return kept


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
    drawn = [
        (
            caption,
            [
                {
                    "name": f"{seen.split}: {seen.name} ({seen.label})",
                    "data": _decoded(splits[seen.split], seen.id),
                }
                for seen in images
            ],
        )
        for caption, images in figures[:SHOWN]
    ]
    template = Path(__file__).parent / "findings.html.jinja"
    return render_template(
        template, title=title, note=note, figures=drawn, count=len(figures)
    )


def _decoded(source: Source, id: int) -> str:
    try:
        return thumbnail(source.decode(id).image)
    except DataError:  # it could be read a moment ago
        return ""


def thumbnail(image: Image.Image) -> str:
    """Return a small JPEG as a data URI; the image is shrunk in place."""
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
