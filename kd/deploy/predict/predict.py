"""Classify many images into one file, with one thread per core."""

import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from kd.core.errors import RunError
from kd.core.host import cores as usable_cores
from kd.core.options import option, parse_pixels, whole_number
from kd.deploy.predict.image_list import ImageList, find
from kd.deploy.predict.results import (
    WHERE,
    Journal,
    ResultLayout,
    check_format,
    open_journal,
)
from kd.deploy.predict.rows import ASKED, MEASURES, Predictor, Row, in_order
from kd.deploy.serve.cascade import describe_pair, load_pair
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import Description
from kd.deploy.serve.responses import MODEL
from kd.files.manifest import checksum

# images per job: the main thread, which writes rows, does not wake for each image
CHUNK = 8
AHEAD = 3  # running, waiting and unwritten jobs per thread
READERS = 32  # threads for network reads
PROGRESS_SECONDS = 5.0  # seconds between two lines of progress


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions:
    """Options of kd-predict."""

    export: Path = option(metavar="EXPORT", parse=Path)
    """folder written by kd-export"""
    images: str = option(metavar="IMAGES")
    """a folder, an image, a list (one path per line), shards (train-{000..009}.tar), a
    URL such as s3://BUCKET/PREFIX, or -: an image or a list on standard input
    """
    to: Path = option(Path("predictions.csv"), "FILE", Path)
    """.csv, .jsonl or .parquet"""
    file: str = option("", "FILE")
    """the graph (default: the one that kd-export --accept chose, or model.onnx)"""
    second: Path | None = option(None, "EXPORT", Path)
    """another export, such as the teacher's, for images on which the first is unsure
    (kd-export --defer)
    """
    top: int = option(1, "N", whole_number(0, 10**9))
    """labels of each image, best first; 0: all"""
    cores: int = option(0, "N", whole_number(0, 10**9), flag="--threads")
    """cores to use; 0: all that affinity and cgroup allow"""
    max_pixels: int = option(100_000_000, "N", parse_pixels)
    """most pixels of an image (default 1e8)"""
    self_check: bool = option(True)
    """run the self-check first; exit with code 3 if it fails"""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a finished job."""

    images: int
    resumed: int  # images classified by an earlier start
    unreadable: tuple[str, ...]  # name and error of the first few
    num_unreadable: int
    seconds: float
    passed_on: int  # images predicted by the second model
    notes: tuple[str, ...]  # expected accuracy, and differences from validation


def predict(settings: PredictOptions, out: IO[str] = sys.stdout) -> Summary:
    """Classify or embed images and write one row each, in the order of their names."""
    os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")  # see kd.deploy.serve.server
    check_format(settings.to)
    first, second = describe_pair(
        settings.export, settings.file, settings.second, settings.self_check
    )
    if first.output.embeds and settings.to.suffix != ".jsonl":
        wrong = f"'{settings.to}' has no place for the vectors of an embedding model"
        allowed = "A file that ends in .jsonl"
        raise RunError(WHERE, wrong, allowed, "Choose --to vectors.jsonl")
    copies = settings.to.with_name(settings.to.name + ".shards")
    images = find(settings.images, copies)
    num_labels = len(first.labels)
    top = min(settings.top or num_labels, num_labels)  # beside labels above a threshold
    identity = _identity(settings, first, second, images, top)
    cores = settings.cores or usable_cores()
    model = load_pair(first, second, threads=1, slots=cores)
    model.warm_up(1)
    model.check_itself()
    predictor = Predictor(images, model, Limits(max_pixels=settings.max_pixels), top)
    # Only the first model's predictions are counted: the reference has no others.
    reference = first.reference
    tally = reference.empty() if reference else None

    def count_row(row: Row) -> None:
        if reference and tally and MEASURES in row:
            reference.count(tally, row.get(ASKED, row), row[MEASURES])

    started = time.monotonic()
    with (
        warnings.catch_warnings(),
        open_journal(settings.to, identity, images, count_row) as journal,
    ):
        warnings.filterwarnings("ignore", module=r"PIL\.")
        resumed = journal.done
        if journal.changed:
            note = (
                f"'{journal.changed}' has changed since its row was written; rows from"
                " there on are made again"
            )
            print(note, file=sys.stderr)
        _write_rows(journal, predictor, cores, started, out)
        seconds = time.monotonic() - started
        journal.finish(settings.to, _layout(first, second, top))
    shutil.rmtree(copies, ignore_errors=True)
    return Summary(
        images=len(images.names),
        resumed=resumed,
        unreadable=tuple(journal.unreadable),
        num_unreadable=journal.num_unreadable,
        seconds=seconds,
        passed_on=journal.passed_on,
        notes=(*images.notes, *(reference.notes(tally) if reference and tally else ())),
    )


def _layout(first: Description, second: Description | None, top: int) -> ResultLayout:
    """Return the columns of the result."""
    columns = ["sure"] if first.output.unsure else []
    columns += [MODEL] if second else []
    values = first.output.values
    if not first.output.thresholds:
        return ResultLayout(top, (), columns, values)
    scored = first.labels if top == len(first.labels) else ()
    return ResultLayout(0, scored, columns, values)


def _write_rows(
    journal: Journal, predictor: Predictor, cores: int, started: float, out: IO[str]
) -> None:
    """Classify the images without a row, and print the progress."""
    total = len(predictor.images.names)
    resumed = journal.done
    printed = started
    for row in chain.from_iterable(_by_threads(predictor, resumed, cores)):
        journal.add(row)
        now = time.monotonic()
        if now - printed > PROGRESS_SECONDS:
            printed = now
            journal.flush()
            speed = (journal.done - resumed) / (now - started)
            seconds_left = (total - journal.done) / speed
            progress = f"{journal.done} of {total} images, {speed:.1f} images/s"
            print(f"{progress}, {seconds_left:.0f} s left", file=out, flush=True)


def _identity(
    settings: PredictOptions,
    first: Description,
    second: Description | None,
    images: ImageList,
    top: int,
) -> Row:
    """Return all that rows depend on; only a journal with the same is resumed."""
    identity: Row = {
        "model": first.name,
        "version": first.version,
        "top": top,
        "images": len(images.names),
        "names": images.fingerprint,
        "max_pixels": settings.max_pixels,
    }
    if first.output.unsure:
        identity["unsure"] = _bands(first)
    if first.output.thresholds:
        identity["thresholds"] = list(first.output.thresholds)
    if first.output.values:
        identity["values"] = checksum({"of": first.output.values})
    if second:
        identity["second"] = _bands(second)
    return identity


def _bands(description: Description) -> list[list[float]]:
    return [list(band) for band in description.output.unsure]


def _by_threads(predictor: Predictor, start: int, cores: int) -> Iterator[list[Row]]:
    """Yield the rows of all images from `start` on, in order, computed in chunks."""
    images = predictor.images
    workers = ThreadPoolExecutor(cores)
    readers = ThreadPoolExecutor(READERS)

    def submit(ids: range) -> Future[list[Row]]:
        contents = []
        if images.remote:
            contents = [readers.submit(images.content, id) for id in ids]
        return workers.submit(predictor.rows, ids, contents)

    ahead = AHEAD * cores + (READERS // CHUNK if images.remote else 0)
    try:
        yield from in_order(range(start, len(images.names)), CHUNK, submit, ahead)
    finally:  # do not wait for a hanging storage
        for pool in (workers, readers):
            pool.shutdown(wait=False, cancel_futures=True)
