"""Evaluate a running endpoint on labelled folders. Needs only the standard library."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kd.core.errors import DataError, KdError, did_you_mean
from kd.files.pixels import ENDINGS

CLIENTS, TIMEOUT, RETRIES = 4, 60.0, 50
MAX_PAUSE = 30.0
KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
ALL_LABELS = 999_999
NAME_THE_FOLDER = "Name the folder whose folders are the classes: images/val"
EVALUATE_THE_RUN = "Evaluate the run: kd-evaluate RUN"


class Endpoint:
    """One connection to an endpoint, by its address with or without /invocations. Not thread-safe."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            kind = KINDS[parts.scheme if parts.hostname else ""]
            self._connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT)
        except (ValueError, KeyError) as error:  # ValueError: of the port, or a bracket
            raise KdError("--endpoint", f"'{url}' is not an address", "http://host:port", "Correct it") from error
        self.url, self.path = url, parts.path if parts.path.strip("/") else "/invocations"
        self.close = self._connection.close

    def classify(self, image: bytes, top: int = 5) -> tuple[int, dict[str, Any]]:
        """Send an image file, again after a 503, and return the status and the JSON answer."""
        headers = {"content-type": "application/x-image", "accept": "application/json"}
        for _ in range(RETRIES):
            try:
                self._connection.request("POST", f"{self.path}?top={top}", image, headers)
                response = self._connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                remedy = "Start one: kd-serve runs/NAME/export"
                raise KdError("--endpoint", f"'{self.url}' does not answer ({error})", "", remedy) from error
            if response.status == 503:  # before JSON is parsed: a proxy may send HTML
                seconds = response.headers.get("retry-after", "").strip()  # or a date, which no server of kd's sends
                time.sleep(min(MAX_PAUSE, float(seconds)) if seconds.isdecimal() else 1.0)
                continue
            try:
                return response.status, json.loads(body)
            except ValueError as error:
                raise _stranger(self.url) from error
        raise KdError("--endpoint", f"'{self.url}' is busy or not ready", "", "Try again when it has less to do")


def evaluate(url: str, folder: Path) -> dict[str, float]:
    """Evaluate an endpoint on images at `folder/<label>/...`. A label may be a path, as in training.

    Return `images` (number answered), `accuracy` and `top5` (shares of those), `refused` (number of images that the
    endpoint rejected), `images_per_second`.
    """
    files = sorted(_listing(folder))
    if not files:
        allowed = f"Allowed: {', '.join(ENDINGS)}"
        raise DataError("--data", f"'{folder}' has no class folders with images", allowed, NAME_THE_FOLDER)
    _check_labels(url, folder, files)
    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        counts = sum(pool.map(lambda i: _score(url, files[i::CLIENTS]), range(CLIENTS)), Counter())
    seconds, answered = time.perf_counter() - start, counts["answered"]
    return {
        "images": answered,
        "accuracy": counts["correct"] / max(1, answered),
        "top5": counts["in top 5"] / max(1, answered),
        "refused": counts["refused"],
        "images_per_second": answered / seconds,
    }


def _listing(folder: Path) -> Iterator[tuple[Path, str]]:
    for parent, _, names in os.walk(folder, followlinks=True):
        label = Path(parent).relative_to(folder).as_posix()
        images = [name for name in names if name.rpartition(".")[2].lower() in ENDINGS and label != "."]
        yield from ((Path(parent, name), label) for name in images)


def _check_labels(url: str, folder: Path, files: list[tuple[Path, str]]) -> None:
    """Get all labels of the model with the first image that the endpoint accepts, and compare the folders' names."""
    prediction = _first_prediction(url, folder, files)
    wrong = {
        "embedding": "serves an embedding model, which has no labels to be right about",
        "labels": "answers with several labels an image, but a folder names one",
    }
    for key in wrong.keys() & prediction.keys():
        raise KdError("--endpoint", f"'{url}' {wrong[key]}", "A classifier of one label an image", EVALUATE_THE_RUN)
    labels = {entry["label"] for entry in prediction["top"]}
    unknown = sorted({label for _, label in files} - labels)
    if unknown:
        remedy = did_you_mean(unknown[0], labels) or NAME_THE_FOLDER
        allowed = f"Its labels are {', '.join(sorted(labels)[:8])}{', ...' if len(labels) > 8 else ''}"
        raise DataError("--data", f"the folder '{unknown[0]}' is no label of the endpoint", allowed, remedy)


def _first_prediction(url: str, folder: Path, files: list[tuple[Path, str]]) -> dict[str, Any]:
    with closing(Endpoint(url)) as endpoint:
        for path, _ in files:
            status, answer = endpoint.classify(_content(path), ALL_LABELS)
            if status == 200:
                try:
                    return answer["predictions"][0]
                except (LookupError, TypeError) as error:
                    raise _stranger(url) from error
            if status in (404, 405):
                remedy = "Give the address that kd-serve printed"
                raise KdError("--endpoint", f"'{url}' has no /invocations", "", remedy)
    raise DataError("--data", f"the endpoint refuses every image in '{folder}'", "", "See its log for why")


def _stranger(url: str) -> KdError:
    return KdError("--endpoint", f"what answers at '{url}' is not kd-serve", "", "Correct it")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        wrong = f"'{path}' cannot be read ({error.strerror})"
        raise DataError("--data", wrong, "", "Remove it, or bring it back") from error


def _score(url: str, files: list[tuple[Path, str]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    with closing(Endpoint(url)) as endpoint:
        for path, label in files:
            status, answer = endpoint.classify(_content(path))
            labels = [entry["label"] for entry in answer["predictions"][0]["top"]] if status == 200 else []
            counts += Counter({"answered" if labels else "refused": 1, "in top 5": label in labels})
            counts["correct"] += labels[:1] == [label]
    return counts
