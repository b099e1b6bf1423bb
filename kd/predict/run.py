"""Classify many images: each is read, decoded, cropped and classified on one of as many threads as there are cores."""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from kd.errors import RunError
from kd.predict import images as listing
from kd.predict.results import WHERE, Journal, Row, check_format, opened
from kd.serve.answers import embeddings, predictions
from kd.serve.limits import Limits, usable_cores
from kd.serve.model import Model, describe, load

CHUNK = 8
"""Images of a job. More than one, so that the main thread, which writes the rows, does not wake for each image."""
AHEAD = 3
"""Jobs that run, wait, or wait to be written, per thread."""
READERS = 32
"""Threads that wait for a network."""
SHOW_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to classify, and how."""

    export: Path
    images: str
    to: Path = Path("predictions.csv")
    file: str = "model.onnx"
    top: int = 1
    """Labels of each image, best first. 0: all."""
    cores: int = 0
    """0: as many as the affinity and the cgroup allow."""
    max_pixels: int = 100_000_000


@dataclass(frozen=True, slots=True)
class Summary:
    """What was done."""

    images: int
    resumed: int
    """Images that an earlier start had classified."""
    unreadable: tuple[str, ...]
    """Name and error of the first few."""
    num_unreadable: int
    seconds: float


def predict(settings: Settings, out: IO[str] = sys.stdout) -> Summary:
    """Classify images, or embed them, and write one row for each, in the order of their names.

    Raises:
        ModelError: the folder is not a whole export.
        DataError: there are no images, or the storage is away.
        RunError: the disk is full, or the result exists or belongs to something else.
        MissingExtra: a package is not installed.
    """
    os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")  # see kd.serve.server
    check_format(settings.to)
    described = describe(settings.export, settings.file)
    if described.output.embeds and settings.to.suffix != ".jsonl":
        wrong = f"'{settings.to}' has no place for the vectors of an embedding model"
        raise RunError(WHERE, wrong, "A file that ends in .jsonl", "Choose --to vectors.jsonl")
    cores = settings.cores or usable_cores()
    copies = settings.to.with_name(settings.to.name + ".shards")
    images = listing.find(settings.images, copies)
    top = min(settings.top or len(described.labels), len(described.labels))  # beside all labels above a threshold
    identity = {
        "model": described.name,
        "version": described.version,
        "top": top,
        "images": len(images.names),
        "names": images.fingerprint,
        "max_pixels": settings.max_pixels,
    }
    model = load(described, threads=1, slots=cores)
    model.warm_up(1)
    limits = Limits(max_pixels=settings.max_pixels)
    started = time.monotonic()
    with warnings.catch_warnings(), opened(settings.to, identity) as journal:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        resumed, shown = journal.done, started
        for row in _classified(images, model, limits, top, cores, resumed):
            journal.add(row)
            if time.monotonic() - shown > SHOW_SECONDS:
                shown = time.monotonic()
                _show(journal, len(images.names), resumed, shown - started, out)
        seconds = time.monotonic() - started
        journal.finish(settings.to, top, several=bool(described.output.thresholds))
    shutil.rmtree(copies, ignore_errors=True)
    return Summary(len(images.names), resumed, tuple(journal.unreadable), journal.num_unreadable, seconds)


def _classified(
    images: listing.Images, model: Model, limits: Limits, top: int, cores: int, start: int
) -> Iterator[Row]:
    """Yield the rows of all images from `start` on, in order."""

    def rows(ids: range, contents: Sequence[Future[bytes] | None]) -> list[Row]:
        made, outputs = _run(images, model, limits, ids, contents)
        if not outputs:
            return made
        values, output = np.concatenate(outputs), model.output
        given = (model.labels, top, output.thresholds)
        found = iter(embeddings(values) if output.embeds else predictions(values, *given))
        return [row if "error" in row else {**row, **next(found)} for row in made]

    ahead = AHEAD * cores + (READERS // CHUNK if images.remote else 0)
    with ThreadPoolExecutor(cores) as workers, ThreadPoolExecutor(READERS) as readers:
        window: deque[Future[list[Row]]] = deque()
        try:
            for first in range(start, len(images.names), CHUNK):
                ids = range(first, min(first + CHUNK, len(images.names)))
                contents = [readers.submit(images.content, id) if images.remote else None for id in ids]
                window.append(workers.submit(rows, ids, contents))
                if len(window) > ahead:
                    yield from window.popleft().result()
            while window:
                yield from window.popleft().result()
        finally:
            for pool in (workers, readers):
                pool.shutdown(wait=False, cancel_futures=True)


def _run(
    images: listing.Images, model: Model, limits: Limits, ids: range, contents: Sequence[Future[bytes] | None]
) -> tuple[list[Row], list[np.ndarray]]:
    """Return a row for each image, with the error of one that cannot be read, and the outputs of the others."""
    from kd.serve.images import prepare
    from kd.serve.problems import Problem

    made: list[Row] = [{"image": images.names[id]} for id in ids]
    outputs = []
    for id, content, row in zip(ids, contents, made, strict=True):
        try:
            data = images.content(id) if content is None else content.result()
            pixels = prepare(data, model.size, model.crop, limits).pixels
        except listing.GONE as error:
            row["error"] = error.strerror or type(error).__name__
        except Problem as problem:
            row["error"] = problem.detail
        else:
            outputs.append(model.engine(pixels[None]))
    return made, outputs


def _show(journal: Journal, total: int, resumed: int, seconds: float, out: IO[str]) -> None:
    journal.flush()
    speed = (journal.done - resumed) / seconds
    left = (total - journal.done) / max(speed, 1e-9)
    print(f"{journal.done} of {total} images, {speed:.1f} images/s, {left:.0f} s left", file=out, flush=True)
