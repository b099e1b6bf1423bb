"""A STAND-IN for SageMaker's library in tests: the name `smddp` over gloo, without what
the real one does not support.

It tests the import, the name, the set of calls and the single process group. It does
not test CUDA tensors, EFA, speed or the real wheel, which was not available. Refused,
as documented or reported for the real library: a second group, reductions other than
SUM, barrier with device_ids. With SMDDP_REFUSES_ALLGATHER=1 also `_allgather_base`: AWS
documents AllGather, and one release was reported to refuse it.

It derives from ProcessGroup, because C++ calls its methods too, but not those of a
subclass of ProcessGroupGloo.
"""

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

OPERATIONS: Counter[str] = Counter()
"""Number of calls of each collective in this process."""
_groups: list[Any] = []


class StandIn(dist.ProcessGroup):
    """Forward supported operations to gloo; refuse all others by name."""

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
        options = (
            options
            if isinstance(options, dist.AllreduceOptions)
            else dist.AllreduceOptions()
        )
        if options.reduceOp != dist.ReduceOp.SUM:
            raise RuntimeError("SMDDP does not support: ReduceOp")
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        OPERATIONS["broadcast"] += 1
        return self.inner.broadcast(tensors, options)

    def allgather(self, output: Any, tensors: Any, options: Any = None) -> Any:
        OPERATIONS["allgather"] += 1
        return self.inner.allgather(output, tensors)

    def _allgather_base(self, output: Any, tensor: Any, options: Any = None) -> Any:
        if os.environ.get("SMDDP_REFUSES_ALLGATHER") == "1":
            raise RuntimeError("SMDDP does not support: _allgather_base")
        OPERATIONS["allgather"] += 1
        return self.inner._allgather_base(output, tensor)

    all_gather_single = _allgather_base

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
    "allgather_coalesced", "allgather_into_tensor_coalesced",
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
