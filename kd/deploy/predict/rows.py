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
"""Keys of an image's stamp, of the result of `kd.deploy.shift.measure`, and of the first model's prediction where the
second one predicted. Only rows of the journal have them."""
BY, FIRST, SECOND = "answered_by", "first", "second"  # key of a row where a second model is used, and its values
Row = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model and the images that it classifies. Thread-safe."""

    images: ImageList
    model: LoadedGraph
    limits: Limits
    top: int
    second: Predictor | None = None  # for images of which `model` is not sure

    def rows(self, ids: Sequence[int], contents: Sequence[Future[bytes]] = ()) -> list[Row]:
        """Return a row per image, with `error` if it cannot be read; `contents`: futures of remote images' bytes."""
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
        """Return the same rows, with the second model's predictions where the first is not sure."""
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
    """Submit ids in chunks and yield the results in their order; `ahead` are under way at the same time."""
    window: deque[Future[Result]] = deque()
    for first in range(0, len(ids), chunk):
        window.append(submit(ids[first : first + chunk]))
        while len(window) > ahead:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()
