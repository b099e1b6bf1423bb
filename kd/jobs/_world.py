"""The processes and the data of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kd import build
from kd.config import Config
from kd.contracts import Backend


@contextmanager
def world(settings: Config) -> Iterator[Backend]:
    """Set the backend up and take it down again.

    Raises:
        BackendError: the world is not whole, or another rank is gone.
    """
    backend = build.backend(settings)
    backend.setup()
    try:
        yield backend
    except RuntimeError as error:
        known = backend.explain(error)
        if known is None:
            raise
        raise known from error
    finally:
        backend.close()


def prepared(settings: Config, backend: Backend) -> build.Data:
    """List the data and let rank 0 make what does not exist yet."""
    data = build.data(settings)
    if backend.rank == 0:
        data.train.prepare()
        data.val.prepare()
    backend.barrier()
    return data
