"""Classify many images, on as many threads as there are cores or on the hosts of a Ray cluster, into one file."""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

from kd.errors import MissingExtra, RunError
from kd.host import cores as usable_cores
from kd.predict import images as listing
from kd.predict.classifier import MEASURES, Classifier, Row, in_order
from kd.predict.results import WHERE, check_format, opened
from kd.serve.limits import Limits
from kd.serve.model import Description, describe, load

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
    ray: bool = False
    """Use all hosts of the cluster that RAY_ADDRESS names, and not the cores of this machine."""


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
    hosts: int
    """Machines that have classified some."""
    notes: tuple[str, ...]
    """The expected accuracy, and how the images differ from those of validation."""


def predict(settings: Settings, out: IO[str] = sys.stdout) -> Summary:
    """Classify images, or embed them, and write one row for each, in the order of their names.

    Raises:
        ModelError: the folder is not a whole export.
        DataError: there are no images, or the storage is away.
        RunError: the disk is full, the result exists or belongs to something else, or there is no cluster.
        MissingExtra: a package is not installed.
    """
    os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")  # see kd.serve.server
    check_format(settings.to)
    described = describe(settings.export, settings.file)
    if described.output.embeds and settings.to.suffix != ".jsonl":
        wrong = f"'{settings.to}' has no place for the vectors of an embedding model"
        raise RunError(WHERE, wrong, "A file that ends in .jsonl", "Choose --to vectors.jsonl")
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
    rows, hosts = _classify(settings, described, images, top)
    reference = described.reference
    tally = reference.empty() if reference else None

    def seen(row: Row) -> None:
        if reference and tally and MEASURES in row:
            reference.count(tally, row, row[MEASURES])

    started = time.monotonic()
    with warnings.catch_warnings(), opened(settings.to, identity, images, seen) as journal:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        resumed, printed = journal.done, started
        if journal.changed:
            note = f"'{journal.changed}' is not the image that its row was made of; rows from there on are made again"
            print(note, file=sys.stderr, flush=True)
        for row in chain.from_iterable(rows(resumed)):
            journal.add(row)
            if (now := time.monotonic()) - printed > PROGRESS_SECONDS:
                printed = now
                journal.flush()
                speed = (journal.done - resumed) / (now - started)
                seconds_left = (len(images.names) - journal.done) / speed
                line = f"{journal.done} of {len(images.names)} images, {speed:.1f} images/s, {seconds_left:.0f} s left"
                print(line, file=out, flush=True)
        seconds = time.monotonic() - started
        several = bool(described.output.thresholds)
        scored = described.labels if several and top == len(described.labels) else ()
        journal.finish(settings.to, 0 if several else top, scored)
    shutil.rmtree(copies, ignore_errors=True)
    unreadable = tuple(journal.unreadable)
    notes = reference.notes(tally) if reference and tally else ()
    unread = journal.num_unreadable
    return Summary(len(images.names), resumed, unreadable, unread, seconds, len(hosts) or 1, notes)


def _classify(
    settings: Settings, described: Description, images: listing.Images, top: int
) -> tuple[Callable[[int], Iterator[list[Row]]], set[str]]:
    """Return what yields the rows of all images from a number on, in order, and a set that gets the hosts that help."""
    limits, hosts = Limits(max_pixels=settings.max_pixels), set[str]()
    if settings.ray:
        try:
            from kd.predict.hosts import Job, by_hosts
        except ImportError as error:
            raise MissingExtra("--ray", f"Ray cannot be imported ({error})", "", "pip install 'kd[ray]'") from error
        return partial(by_hosts, Job.of(described, images, limits, top), hosts), hosts
    cores = settings.cores or usable_cores()
    model = load(described, threads=1, slots=cores)
    model.warm_up(1)
    return partial(_by_threads, Classifier(images, model, limits, top), cores=cores), hosts


def _by_threads(classifier: Classifier, start: int, cores: int) -> Iterator[list[Row]]:
    """Yield the rows of all images from `start` on, in order, a chunk at a time."""
    images, workers, readers = classifier.images, ThreadPoolExecutor(cores), ThreadPoolExecutor(READERS)

    def submit(ids: range) -> Future[list[Row]]:
        contents = [readers.submit(images.content, id) for id in ids] if images.remote else []
        return workers.submit(classifier.rows, ids, contents)

    ahead = AHEAD * cores + (READERS // CHUNK if images.remote else 0)
    try:
        yield from in_order(range(start, len(images.names)), CHUNK, submit, lambda: ahead)
    finally:  # nobody waits for a storage that does not answer
        for pool in (workers, readers):
            pool.shutdown(wait=False, cancel_futures=True)
