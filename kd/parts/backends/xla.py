"""AWS Trn1 (Neuron SDK up to 2.29), and the CPU for tests: torch_xla up to 2.9, one
process per device (PJRT_DEVICE).

There is no DDP: parameters are broadcast once, and `xm.optimizer_step` reduces
gradients, clips them and steps. With ZeRO, torch_xla's optimizer reduces and clips.
Only `end_step` cuts the graph.
"""

# pyright: reportMissingImports=false

import importlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kd.core.errors import BackendError, MissingExtra
from kd.core.facts import BackendFacts
from kd.core.facts import NoOptions as Options
from kd.core.types import Batch
from kd.parts.backends._ddp import DDPBackend
from kd.parts.backends._launch import set_rendezvous
from kd.parts.backends._optimizers import (
    copy_before_step,
    parameters,
    set_group_options,
)

try:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.runtime as xr
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer
except ImportError as error:
    _import_error: ImportError | None = error
else:
    _import_error = None

NEVER = 2**31  # batches between the device loader's own graph cuts: practically never

facts = BackendFacts(
    compiles=True,
    inference=False,  # torch_xla does not support views there
    muon=False,
    own_zero="torch_xla's ZeRO",
    instances=("ml.trn",),
    chosen_on=("ml.trn1",),
)


class XLA(DDPBackend):
    """Train in one process, alone or in a torch_xla world."""

    # Its device is the CPU until `setup`: on Neuron the runtime must not start before
    # the process group.

    kind = "xla"

    @property
    def auto_mode(self) -> str:
        is_neuron = self.device.type == "xla" and xr.device_type() != "CPU"
        return "bf16+unfused" if is_neuron else "fp32+unfused"

    def setup(self) -> None:
        """Join the process group and check that it reduces."""
        # On the CPU torch_xla joins but silently does not reduce.
        _skip_llvm_passes(os.environ)
        # autocast decides what is bfloat16; the compiler must not lower the rest
        flags = os.environ.get("NEURON_CC_FLAGS", "")
        if "--auto-cast" not in flags:
            os.environ["NEURON_CC_FLAGS"] = f"{flags} --auto-cast=none".strip()
        # torch warns of the gradient of torch_xla's kl_div kernel; tests/xla compares
        # it with the CPU's
        warnings.filterwarnings("ignore", message="aten::kl_div", category=UserWarning)
        if self.world_size > 1:
            set_rendezvous(self.launch)
            # registers the process group
            importlib.import_module("torch_xla.distributed.xla_backend")
            dist.init_process_group("xla", timeout=self.timeout)
            self._joined = True
        self.device = torch_xla.device()
        present = self.reduce_sum(torch.ones(1, device=self.device))
        joined = int(present.item())
        if joined != self.world_size or xr.world_size() != self.world_size:
            self.close()
            wrong = (
                f"is 'xla', but {joined} of the {self.world_size} processes that"
                f" {self.launch.launcher} started take part in an all-reduce on device"
                f" {xr.device_type()}"
            )
            allowed = (
                "All ranks must take part; torch_xla reduces between processes on"
                " Neuron, not on the CPU"
            )
            remedy = "Start one process, or set backend.kind=cpu"
            raise BackendError("backend.kind", wrong, allowed, remedy)

    def seed(self, seed: int) -> None:
        """Seed torch's generator and the device's, which torch.manual_seed omits."""
        torch.manual_seed(seed)
        xm.set_rng_state(seed)

    def put(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Upload batches from a thread, ahead of their use."""
        # torch_xla's thread drops exceptions and ends; they are stored and raised here.
        source = Uploads(batches)
        # inside MpDeviceLoader
        loader = pl.ParallelLoader(source, [self.device], batches_per_execution=NEVER)
        try:
            for tensors, number in loader.per_device_loader(self.device):
                yield source.on_device(tensors, number)
        finally:
            loader.close()
        if source.error is not None:
            raise source.error

    def wrap(self, module: nn.Module) -> nn.Module:
        """Broadcast rank 0's parameters and return the module; `step` reduces."""
        self.broadcast_([*module.parameters(), *module.buffers()])
        return module

    def check_divided(self, stages: int) -> None:
        """Refuse to divide a teacher."""
        if stages:
            key = "teacher.pipeline"
            wrong = (
                f"is {stages}, but torch_xla ends with torch 2.9, and this needs 2.13"
            )
        else:
            key = "teacher.shard"
            wrong = "is true, but torch_xla does not support FSDP2"
        allowed = "Backends that support it: cpu, cuda, neuron"
        remedy = (
            "Remove the key; set teacher.micro_batch where the activations do not fit"
        )
        raise BackendError(key, wrong, allowed, remedy)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast("xla", torch.bfloat16)

    def optimizer(
        self,
        groups: list[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        zero: bool,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Build the optimizer; with `zero` torch_xla's, which shards first axes."""
        # Its state is created here. Created in the first step, it would be constants of
        # that step's graph, and the largest graph of a run would be compiled again for
        # the later steps.
        if zero:
            # save_master_weights affects only its state_dict, which is not used here;
            # without it torch_xla warns
            optimizer = ZeroRedundancyOptimizer(
                groups, cls, pin_layout=False, save_master_weights=True, **options
            )
            inner = optimizer.base_optimizer
        else:
            optimizer = inner = cls(groups, **options)
        inner.load_state_dict(_fresh_state(inner))
        self._optimizer = inner
        return optimizer

    def step(self, optimizer: Any, max_norm: float) -> Tensor:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            # infinity: the norm is computed only with clipping
            optimizer.grad_clipping = True
            optimizer.max_norm = max_norm if max_norm > 0 else math.inf
            optimizer.step()
            norm = optimizer.grad_norm
        else:
            restore_unless_finite = copy_before_step(optimizer)
            # torch calls a closure before the update, so here after the reduction, and
            # returns its value
            clip = partial(
                nn.utils.clip_grad_norm_,
                parameters(optimizer),
                max_norm or math.inf,
                foreach=False,
            )
            norm = xm.optimizer_step(optimizer, optimizer_args={"closure": clip})
            restore_unless_finite(norm)
        optimizer.zero_grad(set_to_none=True)
        return norm.detach()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        torch_xla.sync()
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            return _on_cpu(optimizer.state_dict()) if self.rank == 0 else {}
        shards = parameters(optimizer.base_optimizer)
        state: dict[int, dict[str, Tensor]] = {}
        for index, (parameter, shard) in enumerate(
            zip(parameters(optimizer), shards, strict=True)
        ):
            entries = optimizer.base_optimizer.state.get(shard, {})
            state[index] = {
                name: self._gather_shards(value, shard, parameter)
                for name, value in entries.items()
            }
        groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
        torch_xla.sync()
        return (
            _on_cpu({"state": state, "param_groups": groups}) if self.rank == 0 else {}
        )

    def _gather_shards(self, value: Any, shard: Tensor, parameter: Tensor) -> Tensor:
        if (
            not isinstance(value, Tensor)
            or value.shape != shard.shape
            or not value.dim()
        ):
            return torch.as_tensor(value)
        if self.world_size > 1:
            value = xm.all_gather(value, dim=0, pin_layout=False)
        return value[: parameter.shape[0]]

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.load_state_dict(state)
            return
        # its shards are still copies of the weights before the restore
        optimizer.init_zero()
        self._optimizer = optimizer.base_optimizer
        unsharded = parameters(optimizer)
        shared = {
            index: {
                name: self._take_shard(value, unsharded[index])
                for name, value in entries.items()
            }
            for index, entries in state["state"].items()
        }
        optimizer.base_optimizer.load_state_dict(
            {"state": shared, "param_groups": state["param_groups"]}
        )
        set_group_options(optimizer, state["param_groups"])

    def _take_shard(self, value: Tensor, parameter: Tensor) -> Tensor:
        if value.shape != parameter.shape or not value.dim():
            return value
        padded = nn.functional.pad(
            value, [0, 0] * (value.dim() - 1) + [0, -value.shape[0] % self.world_size]
        )
        return padded.chunk(self.world_size)[self.rank].clone()

    def counters(self) -> dict[str, float]:
        return {
            "compiles": float(_metric_samples("CompileTime")),
            "executions": float(_metric_samples("ExecuteTime")),
            **super().counters(),
        }

    def end_step(self) -> None:
        """Cut the graph: compile it if it is new, and start it."""
        torch_xla.sync()

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        if self._joined:
            xm.all_reduce(xm.REDUCE_SUM, [total])
        return total

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        if self._joined:
            xm.collective_broadcast([tensor.data for tensor in tensors])
            torch_xla.sync()

    def barrier(self) -> None:
        if self._joined:
            xm.rendezvous("kd")


class Uploads:
    """Convert batches to the device loader's form, and keep their other fields.

    That form is a list of tensors and a number.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches
        self.heads: dict[int, Batch] = {}
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[tuple[list[Tensor], int]]:
        try:
            for number, batch in enumerate(self.batches):
                self.heads[number] = batch
                yield _batch_tensors(batch), number
        except Exception as error:
            self.error = error

    def on_device(self, tensors: list[Tensor], number: int) -> Batch:
        arrived = iter(tensors)
        return self.heads.pop(number).map(lambda _: next(arrived))


def _batch_tensors(batch: Batch) -> list[Tensor]:
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    batch.map(collect)
    return tensors


def _skip_llvm_passes(environ: MutableMapping[str, str]) -> None:
    """Switch off LLVM's passes in XLA's CPU compiler, unless XLA_FLAGS has a level."""
    # A small XCiT's step then compiles in a third of the time and runs as fast, since
    # library calls take most of it.
    flags = environ.get("XLA_FLAGS", "")
    if environ.get("PJRT_DEVICE") == "CPU" and _LEVEL_FLAG not in flags:
        environ["XLA_FLAGS"] = f"{flags} {_LEVEL_FLAG}=0".strip()


_LEVEL_FLAG = "--xla_backend_optimization_level"


def _fresh_state(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state before its first step, as CPU tensors."""
    # It comes from one step of a copy on the CPU.
    groups = []
    for group in optimizer.param_groups:
        copies = [
            torch.zeros(parameter.shape, dtype=parameter.dtype)
            for parameter in group["params"]
        ]
        for tensor in copies:
            tensor.grad = torch.zeros_like(tensor)
        groups.append({**group, "params": copies})
    copy = type(optimizer)(groups)  # a group holds every option
    copy.step()
    state = copy.state_dict()
    for entries in state["state"].values():
        if "step" in entries:
            entries["step"].zero_()
    return state


def _metric_samples(metric: str) -> int:
    data = met.metric_data(metric)
    return data[0] if data else 0


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    entries = {
        index: {name: torch.as_tensor(value).cpu() for name, value in named.items()}
        for index, named in state["state"].items()
    }
    return {**state, "state": entries}


def build(options: Options, precision: str, timeout_seconds: float) -> XLA:
    """Build the torch_xla backend; `setup` joins the world."""
    if _import_error is not None:
        wrong = f"is 'xla', but torch_xla cannot be imported ({_import_error})"
        allowed = (
            "torch_xla ends with torch 2.9; on Trn2 and Trn3 with newer torch use"
            " backend.kind=neuron"
        )
        remedy = "pip install 'PATH/kd[xla]' in its own environment"
        raise MissingExtra("backend.kind", wrong, allowed, remedy)
    return XLA(torch.device("cpu"), precision, timeout_seconds)
