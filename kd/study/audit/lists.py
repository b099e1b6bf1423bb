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
from kd.core.text import names_of, quoted
from kd.core.types import Label
from kd.files.storage import write_text
from kd.files.templates import rendered
from kd.study.audit.copies import MIRRORED, Album, Pairs

FOLDER, DUPLICATES, EXCLUDE = "audit", "duplicates.csv", "exclude.txt"  # folder in a run folder; file in that folder
SHOWN, SIDE = 200, 160
"""Most findings on a page, which then has a few MB; longer side of an image in pixels: two fit side by side."""
COPY, PICTURE, PART, MIRROR = "same bytes", "same picture", "a part", "mirrored"


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
    one: Seen
    other: Seen

    @property
    def leaks(self) -> bool:
        return self.one.split != self.other.split

    @property
    def contradicts(self) -> bool:
        return self.one.label != self.other.label


def label_text(label: Label, classes: Sequence[str]) -> str:
    """Return the name of a class, of several joined by "+", or "" without a label."""
    if isinstance(label, np.ndarray):
        return "+".join(name for name, has in zip(classes, label, strict=True) if has > 0)
    return classes[label] if label >= 0 else ""


def repeats(album: Album, pairs: Pairs, splits: Mapping[str, Source]) -> list[Repeat]:
    """Return the relevant pairs, worst first: in two splits, or in one split with two labels."""
    names, sources = [*splits], [*splits.values()]

    def seen(row: int) -> Seen:
        split, id = int(album.split[row]), int(album.id[row])
        source = sources[split]
        return Seen(names[split], source.name(id), label_text(source.label(id), source.classes), id)

    found = []
    for first, second, variant, score in zip(*pairs, strict=True):
        one, other = sorted((int(first), int(second)), key=lambda row: (album.split[row], album.id[row]))
        kind = MIRROR if variant >= MIRRORED else PART if variant else PICTURE
        if album.crc[one] and album.crc[one] == album.crc[other] and (album.luma[one] == album.luma[other]).all():
            kind = COPY
        pair = Repeat(kind, round(float(score), 3), seen(one), seen(other))
        if pair.leaks or pair.contradicts:
            found.append(pair)
    return worst_first(found)


def worst_first(found: Iterable[Repeat]) -> list[Repeat]:
    """Return each pair once: pairs between splits first, then by similarity."""
    once = {(pair.one[:2], pair.other[:2]): pair for pair in found}
    return sorted(once.values(), key=lambda p: (not p.leaks, p.kind != COPY, -p.score, p.one[:2], p.other[:2]))


def write_repeats(folder: Path, found: Sequence[Repeat], splits: Mapping[str, Source]) -> None:
    """Write duplicates.csv, duplicates.html and exclude.txt into a folder; exclude.txt keeps its existing names."""
    rows = [(one.kind, one.score, *one.one[:3], *one.other[:3]) for one in found]
    head = ("kind", "score", "split", "name", "label", "other split", "other name", "other label")
    write_table(folder / DUPLICATES, [head, *rows])
    lines = ["# Lines for data.exclude. Of a photograph in two splits, the copy that is trained on."]
    names, before = {f"{one.one.split}:{one.one.name}" for one in found if one.leaks}, folder / EXCLUDE
    names |= set(names_of(before.read_text(encoding="utf-8", errors="backslashreplace"))) if before.is_file() else set()
    lines += map(quoted, sorted(names))
    unsure = {f"{seen.split}:{seen.name}" for one in found if not one.leaks for seen in one[2:]}
    doubtful = [f"# {quoted(name)}" for name in sorted(unsure - names)]
    lines += ["# One photograph with two labels. Remove the # of a line to leave that image out:"] * bool(doubtful)
    write_text(folder / EXCLUDE, "\n".join([*lines, *doubtful, ""]))
    figures = [(f"{one.kind}, {one.score:.2f}", [one.one, one.other]) for one in found]
    write_text(folder / "duplicates.html", page("Images that repeat, the worst first", figures, splits))


def read_repeats(folder: Path) -> list[Repeat]:
    """Return the pairs in a folder's duplicates.csv; [] without it."""
    file = folder / DUPLICATES
    if not file.is_file():
        return []
    try:
        with file.open(newline="", encoding="utf-8", errors="surrogateescape") as opened:
            rows = list(csv.reader(opened))[1:]
        return [Repeat(kind, float(score), Seen(a, b, c), Seen(d, e, f)) for kind, score, a, b, c, d, e, f in rows]
    except (ValueError, TypeError, IndexError, csv.Error) as error:
        raise DataError("audit", f"'{file}' is damaged ({error})", "", "Remove it") from error


def with_ids(found: Sequence[Repeat], splits: Mapping[str, Source]) -> list[Repeat]:
    """Return pairs that were read from a list with the ids of their images; drop those whose images were removed."""
    if not found:
        return []
    ids = {(split, one.name(id)): id for split, one in splits.items() for id in range(len(one))}
    return [
        pair._replace(one=pair.one._replace(id=ids[pair.one[:2]]), other=pair.other._replace(id=ids[pair.other[:2]]))
        for pair in found
        if pair.one[:2] in ids and pair.other[:2] in ids
    ]


def write_table(file: Path, rows: Sequence[Sequence[object]]) -> None:
    """Write rows as CSV; the first row has the column names."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text.getvalue())


def page(
    title: str, figures: Sequence[tuple[str, Sequence[Seen]]], splits: Mapping[str, Source], note: str = ""
) -> str:
    """Return a self-contained HTML page with the images of the first findings."""
    drawn = [
        (
            caption,
            [
                {"name": f"{seen.split}: {seen.name} ({seen.label})", "data": _decoded(splits[seen.split], seen.id)}
                for seen in images
            ],
        )
        for caption, images in figures[:SHOWN]
    ]
    template = Path(__file__).parent / "findings.html.jinja"
    return rendered(template, title=title, note=note, figures=drawn, count=len(figures))


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
