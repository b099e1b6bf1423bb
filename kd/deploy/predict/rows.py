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

# Keys that only the journal's rows have.
STAMP = "stamp"  # the image's stamp
MEASURES = "measures"  # the result of `kd.deploy.shift.measure`
ASKED = "asked"  # the first model's prediction if the second model replaced it
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
        """Return one row per image, with `error` if it cannot be read.

        `contents`: futures of remote images' bytes.
        """
        rows = []
        for i, id in enumerate(ids):
            row: Row = {"image": self.images.names[id], STAMP: self.images.stamps[id]}
            rows.append(row)
            try:
                data = contents[i].result() if contents else self.images.content(id)
                opened = self.model.open(data, self.limits)
                prediction = self.model.predict(opened, self.top)
            except GONE as error:
                row["error"] = error.strerror or type(error).__name__
            except Problem as problem:
                row["error"] = problem.detail
            else:
                row |= prediction.row
                row[MEASURES] = prediction.measures
                if row.get(MODEL) == SECOND:
                    row[ASKED] = {"top": prediction.counted["top"][:1]}
        return rows


def in_order(
    ids: range, chunk: int, submit: Callable[[range], Future[Result]], ahead: int
) -> Iterator[Result]:
    """Submit ids in chunks and yield the results in order, `ahead` chunks in flight."""
    window: deque[Future[Result]] = deque()
    for first in range(0, len(ids), chunk):
        window.append(submit(ids[first : first + chunk]))
        while len(window) > ahead:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()
