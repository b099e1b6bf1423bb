"""Decode images before a run; find damaged, repeated and unservable ones."""

import logging
import random
import shlex
import time
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from kd.core.contracts import Source
from kd.core.errors import CorruptImage, DataError, NotPrepared
from kd.core.text import list_line
from kd.data.loader import most_skipped
from kd.deploy.serve.decoding import refusal
from kd.deploy.serve.limits import Limits
from kd.files.storage import write_text
from kd.jobs.description import bit_depth_lines
from kd.study.audit import lists
from kd.study.audit.copies import Album, copies

LOOK_SECONDS = 5.0  # of a sample
MOST_LOOKED = 100_000  # images of a sample
PROGRESS_SECONDS = 10.0  # between two lines of progress
NAMED = 3  # pairs in the output
DAMAGED = "damaged.txt"  # file in `audit`
MOST_NAMED = 20  # damaged images named on the terminal

log = logging.getLogger("kd")


@dataclass
class DecodedImages:
    """The images of splits that were decoded."""

    album: Album
    damaged: dict[str, CorruptImage] = field(default_factory=dict)  # by split and name
    used_bits: Counter[int] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # kd-serve's reasons

    def __len__(self) -> int:
        return len(self.album) + len(self.damaged)

    def decode(
        self, split_number: int, split: str, source: Source, id: int, limits: Limits
    ) -> None:
        """Decode an image and note its findings."""
        try:
            decoded = source.decode(id)
        except CorruptImage as error:
            self.damaged[f"{split}:{source.name(id)}"] = error
            return
        self.album.add(split_number, id, decoded)
        self.used_bits[decoded.used_bits] += 1
        if reason := refusal(decoded, limits):
            self.refusals[reason] += 1


def scan(
    splits: Mapping[str, Source],
    max_skipped: float,
    folder: Path,
    everything: bool = False,
    bits: int = 16,
) -> list[str]:
    """Decode all images, or a sample; report damaged and repeated ones.

    A sample is random and takes five seconds.
    The share `max_skipped` of a split may be damaged, as in the run; below 0: no image.
    Damaged images, and pairs in two splits or with two labels, are listed in `audit` of
    the run folder. Nothing is removed.
    """
    images = _decode_images(splits, everything)
    if not len(images):  # not rendered or unpacked yet
        return ["images    not decoded: kd-train makes them"] if everything else []
    audit = folder / lists.FOLDER
    total = sum(map(len, splits.values()))
    partly = len(images) < total
    scope = f"{len(images)} of {total}" if partly else f"all {total}"
    damage = "none is damaged"
    if images.damaged:
        damage = f"{len(images.damaged)} damaged, to be skipped"
    lines = [
        f"images    decoded {scope}: {damage}",
        *bit_depth_lines(images.used_bits, bits),
    ]
    if images.refusals:
        reasons = ", ".join(
            f"{count} {reason}" for reason, count in images.refusals.most_common()
        )
        lines.append(
            f"endpoint  kd-serve refuses {images.refusals.total()} of {scope} by its"
            f" default limits: {reasons}"
        )
    if images.damaged:
        file = audit / DAMAGED
        lines += _damage_lines(images.damaged, splits, max_skipped, scope, file)
    repeats = lists.repeats(images.album, copies(images.album), splits)
    lines += _repeat_lines(repeats, scope)
    if partly:
        lines.append("          --check=all compares all of them")
    if repeats:
        earlier = lists.with_ids(lists.read_repeats(audit), splits) if partly else []
        lists.write_repeats(audit, lists.worst_first([*earlier, *repeats]), splits)
        lines.append(
            "          data.group keeps frames of a clip, or pieces of a plate, in one"
            " split"
        )
        exclude = shlex.quote(str(audit / lists.EXCLUDE))
        lines.append(
            f"          listed in '{audit}', with pictures; data.exclude={exclude}"
        )
    return lines


def _repeat_lines(repeats: Sequence[lists.Repeat], scope: str) -> list[str]:
    """Return the number of repeated images, and the first of them."""
    if not repeats:
        return [
            f"repeats   none among {scope}: no photograph is in two splits, or has two"
            " labels"
        ]
    leaks = [pair for pair in repeats if pair.leaks]
    contradictions = [pair for pair in repeats if not pair.leaks]
    exact = sum(pair.kind == lists.COPY for pair in leaks)
    lines = [
        f"repeats   {len(leaks)} pairs in two splits ({exact} with the same bytes),"
        f" {len(contradictions)} with two labels in one"
    ]
    for pair in [*leaks[:NAMED], *contradictions[:NAMED]]:
        first = pair.first
        second = pair.second
        labels = (
            f", labelled {first.label} and {second.label}" if pair.contradicts else ""
        )
        names = f"{first.split}:{first.name} = {second.split}:{second.name}"
        lines.append(f"          {names} ({pair.kind}, {pair.score:.2f}{labels})")
    return lines


def _damage_lines(
    damaged: Mapping[str, CorruptImage],
    splits: Mapping[str, Source],
    max_skipped: float,
    scope: str,
    file: Path,
) -> list[str]:
    """List damaged images in a file; refuse more than the run may skip."""
    names = list(damaged)
    first = damaged[names[0]]
    write_text(
        file,
        "\n".join(["# Damaged images, for data.exclude.", *map(list_line, names), ""]),
    )
    listed = ", ".join(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        listed += f", ... (all in '{file}')"
    remedy = f"Repair them, or leave them out: data.exclude={shlex.quote(str(file))}"
    if max_skipped < 0:
        if len(names) == 1:
            raise first
        wrong = (
            f"{len(names)} images among {scope} are damaged: {listed}. The first:"
            f" {first.wrong}"
        )
        raise CorruptImage(first.config_path, wrong, first.allowed, remedy)
    for split, source in splits.items():
        count = sum(name.startswith(f"{split}:") for name in names)
        limit = most_skipped(max_skipped, len(source))
        if count > limit:
            wrong = (
                f"{count} of the {len(source)} images of '{split}' are damaged:"
                f" {listed}"
            )
            allowed = f"At most {limit} (a share of {max_skipped:g}, and always one)"
            raise DataError(
                "data.max_skipped",
                wrong,
                allowed,
                f"{remedy}, or raise data.max_skipped",
            )
    errors = [f"          {error.wrong}" for error in damaged.values()]
    return [*errors[:MOST_NAMED], f"          listed in '{file}'"]


def _decode_images(splits: Mapping[str, Source], everything: bool) -> DecodedImages:
    """Decode images and return their findings, none if they do not exist yet."""
    names = [*splits]
    sources = [*splits.values()]
    *starts, total = accumulate(map(len, sources), initial=0)
    positions: Sequence[int] = range(total)
    if not everything:
        positions = random.Random(0).sample(positions, min(total, MOST_LOOKED))
    images = DecodedImages(Album(len(positions)))
    limits = Limits()
    start = logged = time.monotonic()
    for position in positions:
        number = bisect(starts, position) - 1
        id = position - starts[number]
        try:
            images.decode(number, names[number], sources[number], id, limits)
        except NotPrepared:
            return DecodedImages(Album(0))
        now = time.monotonic()
        if everything and now > logged + PROGRESS_SECONDS:
            logged = now
            log.info(
                "images    decoded %d of %d, %.0f s", len(images), total, now - start
            )
        if not everything and now > start + LOOK_SECONDS:
            break
    return images
