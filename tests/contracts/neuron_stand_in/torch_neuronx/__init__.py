"""A STAND-IN for native torch-neuronx (Neuron SDK 2.33) in tests: the names `neuron`
and `torch.neuron`, and its group.

What is documented: the device is PrivateUse1, named "neuron"; importing the package
registers it and the process group "neuron"; each new shape is compiled; the group's
broadcast is an all-reduce (read in accelerate 1.15.0). Documents promise DDP, FSDP2 and
pipelines, so their collectives work here. All others, a second group and reductions but
SUM are refused, because no document that was read promises them.

It tests the import, the names, the set of calls and their shapes. It does not test
tensors on a NeuronCore, the compiler or speed: `on_cpu.py` is kd's backend with its
tensors on the CPU.
"""

from collections import Counter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

OPERATIONS: Counter[str] = Counter()
"""Number of calls of each collective in this process."""
SHAPES: set[tuple[str, torch.dtype, tuple[int, ...]]] = set()
"""What the device would have compiled for collectives."""
SEEDS: list[int] = []
"""What torch.manual_seed handed on to the device."""
_groups: list[Any] = []


def _count(name: str, tensors: Any) -> None:
    OPERATIONS[name] += 1
    SHAPES.update((name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


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
        return "neuron"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        _count("allreduce", tensors)
        options = (
            options
            if isinstance(options, dist.AllreduceOptions)
            else dist.AllreduceOptions()
        )
        if options.reduceOp != dist.ReduceOp.SUM:
            raise RuntimeError("the stand-in for Neuron does not support: ReduceOp")
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        _count("broadcast", tensors)
        if options.rootRank != self.rank():
            for tensor in tensors:
                tensor.detach().zero_()
        return self.inner.allreduce(tensors, dist.AllreduceOptions())

    def allgather(self, output: Any, tensors: Any, options: Any = None) -> Any:
        _count("allgather", tensors)
        return self.inner.allgather(output, tensors)

    def _allgather_base(self, output: Any, tensor: Any, options: Any = None) -> Any:
        _count("allgather", [tensor])
        return self.inner._allgather_base(output, tensor)

    all_gather_single = _allgather_base

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        _count("send", tensors)
        return self.inner.send(tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        _count("recv", tensors)
        return self.inner.recv(tensors, rank, tag)


def _refused(name: str) -> Any:
    def refuse(self: StandIn, *arguments: Any) -> Any:
        raise RuntimeError(f"the stand-in for Neuron does not support: {name}")

    return refuse


for _name in (
    "reduce", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single", "allreduce_coalesced",
    "allgather_coalesced", "barrier",
):  # fmt: skip
    setattr(StandIn, _name, _refused(_name))


def _create(store: Any, rank: int, size: int, timeout: Any) -> StandIn:
    if _groups:
        raise RuntimeError("the stand-in for Neuron does not support: new_group")
    _groups.append(StandIn(store, rank, size, timeout))
    return _groups[-1]


class _Neuron(ModuleType):
    """`torch.neuron`."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        SEEDS.append(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_module = _Neuron("torch.neuron")
if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    backend_registration._setup_privateuseone_for_python_backend("neuron", _module)
else:  # older torch
    torch.utils.rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", _module)
dist.Backend.register_backend("neuron", _create, devices=["cpu", "neuron"])
