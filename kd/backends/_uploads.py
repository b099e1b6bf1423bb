"""Batches for torch_xla's device loader, which moves lists of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from kd.types import Batch


class Uploads:
    """Batches in the device loader's form, a list of tensors and a number; keeps all other fields of a batch."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches
        self.heads: dict[int, Batch] = {}
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[tuple[list[Tensor], int]]:
        try:
            for number, batch in enumerate(self.batches):
                self.heads[number] = batch
                yield _tensors(batch), number
        except Exception as error:
            self.error = error

    def on_device(self, tensors: list[Tensor], number: int) -> Batch:
        """Return batch `number` with its tensors on the device."""
        arrived = iter(tensors)
        return self.heads.pop(number).map(lambda _: next(arrived))


def _tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch, in the order of `map`."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    batch.map(collect)
    return tensors
