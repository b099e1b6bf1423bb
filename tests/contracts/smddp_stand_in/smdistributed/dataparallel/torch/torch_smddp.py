"""A STAND-IN for SageMaker's library, for tests: the name `smddp` over gloo, strict about what the real one refuses.

It proves the import, the name, the set of calls and that there is one group. It proves nothing about CUDA tensors, EFA,
speed, or the operations of the real wheel, which was not at hand. Refused, as documented or reported for the real one:
a second group, any reduction but SUM, `_allgather_base`, barrier with device_ids.

A subclass of ProcessGroup, whose methods C++ calls too; those of a subclass of ProcessGroupGloo it would pass by.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

OPERATIONS: Counter[str] = Counter()
"""How often each collective was called in this process."""
_groups: list[Any] = []


class StandIn(dist.ProcessGroup):
    """Forward to gloo what the real library does, refuse the rest by name."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        if hasattr(self, "_set_default_backend"):
            self._register_backend(torch.device("cpu"), kind, self.inner)
            self._set_default_backend(kind)

    def getBackendName(self) -> str:
        return "smddp"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        OPERATIONS["allreduce"] += 1
        options = options if isinstance(options, dist.AllreduceOptions) else dist.AllreduceOptions()
        if options.reduceOp != dist.ReduceOp.SUM:
            raise RuntimeError("SMDDP does not support: ReduceOp")
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        OPERATIONS["broadcast"] += 1
        return self.inner.broadcast(tensors, options)

    def allgather(self, output: Any, tensors: Any, options: Any = None) -> Any:
        OPERATIONS["allgather"] += 1
        return self.inner.allgather(output, tensors)

    def barrier(self, opts: Any = None) -> Any:
        OPERATIONS["barrier"] += 1
        if opts is not None and opts.device_ids:
            raise RuntimeError("SMDDP does not support: barrier(device_ids)")
        return self.inner.barrier()


def _refused(name: str) -> Any:
    def refuse(self: StandIn, *arguments: Any) -> Any:
        raise RuntimeError(f"SMDDP does not support: {name}")

    return refuse


for _name in (
    "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter", "reduce", "gather", "scatter", "send", "recv",
    "alltoall", "alltoall_base", "all_to_all_single", "allreduce_coalesced",
):  # fmt: skip
    setattr(StandIn, _name, _refused(_name))


def _create(store: Any, rank: int, size: int, timeout: Any) -> StandIn:
    if _groups:
        raise RuntimeError("SMDDP does not support: new_group")
    _groups.append(StandIn(store, rank, size, timeout))
    return _groups[-1]


dist.Backend.register_backend("smddp", _create, devices=["cpu", "cuda"])
