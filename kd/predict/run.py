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
from kd.host import cores as usable_cores
from kd.predict import images as listing
from kd.predict.results import STAMP, WHERE, Row, check_format, opened
from kd.serve.answers import embeddings, predictions
from kd.serve.images import prepare
from kd.serve.limits import Limits
from kd.serve.model import Model, describe, load
from kd.serve.problems import Problem

CHUNK = 8
"""Images of a job. More than one, so that the main thread, which writes the rows, does not wake for each image."""
AHEAD = 3
"""Jobs that run, wait, or wait to be written, per thread."""
READERS = 32
"""Threads that wait for a network."""
PROGRESS_SECONDS = 5.0
"""Between two lines of progress."""


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
    classifier = _Classifier(images, model, Limits(max_pixels=settings.max_pixels), top)
    started = time.monotonic()
    with warnings.catch_warnings(), opened(settings.to, identity, images) as journal:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        resumed, printed = journal.done, started
        if journal.changed:
            note = f"'{journal.changed}' is not the image that its row was made of; rows from there on are made again"
            print(note, file=sys.stderr, flush=True)
        for row in classifier.all_rows(resumed, cores):
            journal.add(row)
            if (now := time.monotonic()) - printed > PROGRESS_SECONDS:
                printed = now
                journal.flush()
                speed = (journal.done - resumed) / (now - started)
                seconds_left = (len(images.names) - journal.done) / speed
                line = f"{journal.done} of {len(images.names)} images, {speed:.1f} images/s, {seconds_left:.0f} s left"
                print(line, file=out, flush=True)
        seconds = time.monotonic() - started
        journal.finish(settings.to, 0 if described.output.thresholds else top)
    shutil.rmtree(copies, ignore_errors=True)
    return Summary(len(images.names), resumed, tuple(journal.unreadable), journal.num_unreadable, seconds)


@dataclass(frozen=True, slots=True)
class _Classifier:
    """A model and the images that it classifies."""

    images: listing.Images
    model: Model
    limits: Limits
    top: int

    def all_rows(self, start: int, cores: int) -> Iterator[Row]:
        """Yield the rows of all images from `start` on, in order."""
        remote = self.images.remote
        ahead = AHEAD * cores + (READERS // CHUNK if remote else 0)
        with ThreadPoolExecutor(cores) as workers, ThreadPoolExecutor(READERS) as readers:
            window: deque[Future[list[Row]]] = deque()
            try:
                for first in range(start, len(self.images.names), CHUNK):
                    ids = range(first, min(first + CHUNK, len(self.images.names)))
                    contents = [readers.submit(self.images.content, id) for id in ids] if remote else []
                    window.append(workers.submit(self.rows, ids, contents))
                    if len(window) > ahead:
                        yield from window.popleft().result()
                while window:
                    yield from window.popleft().result()
            finally:
                for pool in (workers, readers):
                    pool.shutdown(wait=False, cancel_futures=True)

    def rows(self, ids: range, contents: Sequence[Future[bytes]]) -> list[Row]:
        """Return a row for each image, with an error where it cannot be used; `contents`: of remote images."""
        made: list[Row] = [{"image": self.images.names[id], STAMP: self.images.stamps[id]} for id in ids]
        outputs = []
        for i, (id, row) in enumerate(zip(ids, made, strict=True)):
            try:
                data = contents[i].result() if contents else self.images.content(id)
                pixels = prepare(data, self.model.size, self.model.crop, self.limits).pixels
            except listing.GONE as error:
                row["error"] = error.strerror or type(error).__name__
            except Problem as problem:
                row["error"] = problem.detail
            else:
                outputs.append(self.model.engine(pixels[None]))
        if outputs:
            values, output = np.concatenate(outputs), self.model.output
            if output.embeds:
                answers = embeddings(values)
            else:
                answers = predictions(values, self.model.labels, self.top, output.thresholds)
            usable = [row for row in made if "error" not in row]
            for row, answer in zip(usable, answers, strict=True):
                row |= answer
        return made
