"""Classify images into result rows, in chunks and in input order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kd.deploy.predict.image_list import GONE, ImageList
from kd.deploy.serve.limits import Limits, Problem
from kd.deploy.serve.model import LoadedGraph
from kd.deploy.serve.responses import MODEL, SECOND

STAMP, MEASURES, ASKED = "stamp", "measures", "asked"
"""Keys that only the journal's rows have: the image's stamp, the result of
`kd.deploy.shift.measure`, and the first model's prediction if the second model replaced
it.
"""
Row = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Predictor:
    """Classifies images into rows. Thread-safe."""

    images: ImageList
    model: LoadedGraph
    limits: Limits
    top: int

    def rows(
        self, ids: Sequence[int], contents: Sequence[Future[bytes]] = ()
    ) -> list[Row]:
        """Return one row per image, with `error` if it cannot be read; `contents`:
        futures of remote images' bytes.
        """
        made: list[Row] = [
            {"image": self.images.names[id], STAMP: self.images.stamps[id]}
            for id in ids
        ]
        for i, (id, row) in enumerate(zip(ids, made, strict=True)):
            try:
                data = contents[i].result() if contents else self.images.content(id)
                prediction = self.model.predict(
                    self.model.open(data, self.limits), self.top
                )
            except GONE as error:
                row["error"] = error.strerror or type(error).__name__
            except Problem as problem:
                row["error"] = problem.detail
            else:
                row |= prediction.row
                row[MEASURES] = prediction.measures
                if row.get(MODEL) == SECOND:
                    row[ASKED] = {"top": prediction.counted["top"][:1]}
        return made


def in_order(
    ids: range, chunk: int, submit: Callable[[range], Future[Result]], ahead: int
) -> Iterator[Result]:
    """Submit ids in chunks and yield the results in order; `ahead` chunks are in
    flight.
    """
    window: deque[Future[Result]] = deque()
    for first in range(0, len(ids), chunk):
        window.append(submit(ids[first : first + chunk]))
        while len(window) > ahead:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()
