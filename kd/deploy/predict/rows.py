"""Classify images into result rows, in chunks and in input order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kd.deploy.predict.image_list import GONE, ImageList
from kd.deploy.serve.limits import Limits, Problem
from kd.deploy.serve.model import LoadedGraph

STAMP, MEASURES, ASKED = "stamp", "measures", "asked"
"""Keys that only the journal's rows have: the image's stamp, the result of `kd.deploy.shift.measure`, and the first
model's prediction if the second model replaced it."""
BY, FIRST, SECOND = "answered_by", "first", "second"  # a row's key and values: the model, if there are two
Row = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Predictor:
    """Classifies images into rows. Thread-safe."""

    images: ImageList
    model: LoadedGraph
    limits: Limits
    top: int
    second: Predictor | None = None  # for images on which `model` is unsure

    def rows(self, ids: Sequence[int], contents: Sequence[Future[bytes]] = ()) -> list[Row]:
        """Return one row per image, with `error` if it cannot be read; `contents`: futures of remote images' bytes."""
        made: list[Row] = [{"image": self.images.names[id], STAMP: self.images.stamps[id]} for id in ids]
        outputs = []
        for i, (id, row) in enumerate(zip(ids, made, strict=True)):
            try:
                data = contents[i].result() if contents else self.images.content(id)
                picture = self.model.decode(self.model.open(data, self.limits))
            except GONE as error:
                row["error"] = error.strerror or type(error).__name__
            except Problem as problem:
                row["error"] = problem.detail
            else:
                row[MEASURES] = picture.measures
                outputs.append(self.model.engine(picture.pixels[None]))
        if outputs:
            answers = self.model.answers(np.concatenate(outputs), self.top)
            usable = [row for row in made if "error" not in row]
            for row, answer in zip(usable, answers, strict=True):
                row |= answer
        return self._passed_on(made, ids, contents) if self.second else made

    def _passed_on(self, made: list[Row], ids: Sequence[int], contents: Sequence[Future[bytes]]) -> list[Row]:
        """Return the rows with the second model's predictions for images on which the first is unsure."""
        assert self.second is not None
        unsure = [i for i, row in enumerate(made) if row.get("sure") is False]
        answers = self.second.rows([ids[i] for i in unsure], [contents[i] for i in unsure] if contents else ())
        made = [row if "error" in row else {**row, BY: FIRST} for row in made]
        for i, answer in zip(unsure, answers, strict=True):
            if "error" in answer:
                made[i] = answer
            else:
                own = {"top": made[i]["top"][:1]}
                made[i] = {**answer, BY: SECOND, MEASURES: made[i][MEASURES], ASKED: own}
        return made


def in_order(ids: range, chunk: int, submit: Callable[[range], Future[Result]], ahead: int) -> Iterator[Result]:
    """Submit ids in chunks and yield the results in order; `ahead` chunks are in flight."""
    window: deque[Future[Result]] = deque()
    for first in range(0, len(ids), chunk):
        window.append(submit(ids[first : first + chunk]))
        while len(window) > ahead:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()
