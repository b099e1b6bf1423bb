"""The processes and the data of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kd import build
from kd.config import Config
from kd.contracts import Backend
from kd.start.loading import stored


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


def prepared(settings: Config, backend: Backend, fill: bool = True) -> build.Data:
    """List the data, let rank 0 make what does not exist yet, and put the store of decoded pixels before it.

    Args:
        settings: the configuration.
        backend: set up; all ranks must call this.
        fill: whether pixels are kept; False for who looks at them once.

    Raises:
        KdError: the data is not usable, or the store does not fit.
    """
    data = build.data(settings)
    if backend.rank == 0:
        data.train.prepare()
        data.val.prepare()
    backend.barrier()
    if settings.data.store == "none":
        return data
    kept, told = stored(settings, data.train, data.val, backend, fill)
    if told and backend.rank == 0:
        print(told, flush=True)
    return replace(data, kept=kept)
