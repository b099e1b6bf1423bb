"""Implement what all torch.distributed backends share.

They differ in device and process group.

Rules: SUM then divide, never AVG; no second process group; world collectives only; only
DDP reduces gradients; an all-reduce checks the world size before training starts.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kd.core.errors import BackendError, KdError, ModelError, first_sentence
from kd.core.facts import BackendFacts
from kd.core.host import bf16_pays, bf16_units
from kd.core.text import author_name
from kd.core.types import Batch
from kd.parts.backends import _optimizers as states
from kd.parts.backends._launch import read_launch, set_rendezvous


class DDPBackend:
    """Train in one process, alone or in a torch.distributed world.

    See `kd.core.contracts.Backend`.
    """

    kind = ""
    init = ""  # name of the torch.distributed backend
    facts = BackendFacts()

    def __init__(
        self, device: torch.device, precision: str, timeout_seconds: float
    ) -> None:
        self.launch = read_launch()
        self.device = device
        self.rank = self.launch.rank
        self.world_size = self.launch.world_size
        self.local_rank = self.launch.local_rank
        self.local_world_size = self.launch.local_world_size
        self.autocast_dtype = torch.bfloat16 if precision == "bf16" else None
        self.timeout = timedelta(seconds=timeout_seconds)
        self._joined = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._teacher: nn.Module | None = None
        self._module: nn.Module | None = None
        self._waits: list[float] = []
        self._last_wait = 0

    @property
    def auto_mode(self) -> str:
        """The mode of `auto`: bfloat16 if the device has units for it."""
        # Attention: `mfu_*.csv` for CPUs, torch's choice for GPUs.
        if self.device.type != "cuda":
            return "bf16+unfused" if bf16_units() else "fp32+unfused"
        has_bf16 = torch.cuda.get_device_capability(self.device) >= (8, 0)
        return "bf16+fused" if has_bf16 else "fp32+fused"

    def bf16_pays(
        self, made_of: Callable[[], tuple[float, float]], trained: bool
    ) -> bool:
        return self.device.type != "cpu" or bf16_pays(
            *made_of(), trained, torch.get_num_threads()
        )

    def setup(self) -> None:
        if self.world_size == 1:
            return
        set_rendezvous(self.launch)
        try:
            self._join()
            self._joined = True
        except (dist.DistError, RuntimeError, ValueError) as error:
            wrong = (
                f"the ranks that {self.launch.launcher} started did not connect within"
                f" {self.timeout.total_seconds():g} s ({first_sentence(error)})"
            )
            allowed = "All ranks must reach MASTER_ADDR:MASTER_PORT"
            remedy = (
                "Start all ranks with the same command, and check that they can reach"
                " that address"
            )
            raise BackendError("backend", wrong, allowed, remedy) from error
        present = torch.ones(1, device=self.device)
        dist.all_reduce(present)
        joined = int(present.item())
        if joined != self.world_size or dist.get_world_size() != self.world_size:
            wrong = (
                f"{joined} processes joined, but {self.launch.launcher} set world size"
                f" {self.world_size}"
            )
            allowed = "Every rank must take part in the reduction"
            remedy = "Start all ranks with the same command and the same `backend.kind`"
            raise BackendError("backend.kind", wrong, allowed, remedy)

    def _join(self) -> None:
        """Join the process group, with store keys that no earlier attempt used."""
        # torchrun keeps one store across restarts, with `--standalone` too. Without the
        # prefix a restarted rank may read the address of a dead rank and wait for it.
        store, rank, world_size = next(dist.rendezvous("env://", timeout=self.timeout))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            self.init,
            store=dist.PrefixStore(f"kd/attempt_{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=self.timeout,
            # nccl then connects here, where an error is one line, instead of in the
            # first reduction
            device_id=self.device if self.init == "nccl" else None,
        )

    def seed(self, seed: int) -> None:
        # see map_dataset.py
        generator = torch.default_generator if self.device.type == "cpu" else torch
        generator.manual_seed(seed)

    def put(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            # stored outputs are not pinned yet, and copying them waits for the device
            if self.device.type == "cuda":
                batch = batch.pin_memory()
            yield batch.to(self.device, non_blocking=True)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap in DDP, which broadcasts the initial weights and reduces gradients.

        With one rank, the module is returned.
        """
        if self.world_size == 1:
            return module
        # torch warns about the strides of a depthwise kernel's gradient, which differ
        # only in a dimension of size 1
        warnings.filterwarnings(
            "ignore",
            message="Grad strides do not match bucket view strides",
            category=UserWarning,
        )
        wrapped = _DDP(
            module,
            device_ids=[self.device.index] if self.device.index is not None else None,
            gradient_as_bucket_view=True,
            # else DDP waits for each parameter's gradient
            find_unused_parameters=bool(getattr(module, "unused", ())),
        )
        # on a device DDP's timers sync, so only one step in a hundred is timed
        if self.device.type == "cpu":
            # not public, see `end_step`
            wrapped._set_ddp_runtime_logging_sample_rate(1)
        self._module = wrapped
        return wrapped

    def check_divided(self, stages: int) -> None:
        """Require one rank per stage; to shard (0 stages), at least two ranks."""
        if stages:
            _require_torch(_PIPELINE, "teacher.pipeline", str(stages), off="0")
            if stages != self.world_size or stages < 2:
                wrong = f"is {stages}, but the number of processes is {self.world_size}"
                allowed = "One stage per process, two or more"
                remedy = "Start as many processes as stages, or set teacher.pipeline=0"
                raise BackendError("teacher.pipeline", wrong, allowed, remedy)
            return
        _require_torch(_FSDP2, "teacher.shard", "true", off="false")
        if self.world_size == 1:
            wrong = "is true, but there is one process"
            allowed = "Sharding needs two ranks or more"
            remedy = (
                "Start with torchrun --nproc-per-node 2, or set teacher.shard=false"
            )
            raise BackendError("teacher.shard", wrong, allowed, remedy)

    def shard(self, module: nn.Module, source: Mapping[str, Tensor]) -> nn.Module:
        self.check_divided(0)
        # older torch lacks what it imports
        from kd.parts.backends._divided import shard

        self._teacher = shard(module, source, self.device)
        return self._teacher

    def pipeline(self, module: nn.Module) -> nn.Module:
        self.check_divided(self.world_size)
        # older torch lacks what it imports
        from kd.parts.backends._divided import Pipelined

        self._teacher = Pipelined(module, self.device)
        return self._teacher

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.autocast_dtype is not None
        )

    def optimizer(
        self,
        groups: list[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        zero: bool,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Build the optimizer; with `zero` a rank keeps its share's state (ZeRO-1)."""
        if not zero or self.world_size == 1:
            self._optimizer = cls(groups, **options)
            return self._optimizer
        # as in `is_divided`
        from torch.distributed.optim import ZeroRedundancyOptimizer

        strides = [
            (parameter, torch.empty_like(parameter, device="meta").stride())
            for group in groups
            for parameter in group["params"]
        ]
        # parameters_as_bucket_view: one broadcast per rank and step instead of one per
        # parameter.
        optimizer = ZeroRedundancyOptimizer(
            groups, cls, parameters_as_bucket_view=True, **options
        )
        # a bucket's view is row-major; the gradient keeps the old strides
        for parameter, stride in strides:
            values = parameter.data.clone()
            view = parameter.data.as_strided(parameter.shape, stride)
            parameter.data = view.copy_(values)
        self._optimizer = optimizer.optim
        return optimizer

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip, step and set gradients to None.

        DDP has already reduced the gradients, so all ranks have the same norm.
        """
        with_gradient = [
            parameter
            for parameter in states.parameters(optimizer)
            if parameter.grad is not None
        ]
        norm = nn.utils.clip_grad_norm_(with_gradient, max_norm or math.inf)
        inner = optimizer.optim if states.is_divided(optimizer) else optimizer
        if inner.defaults.get("fused"):
            states.skip_fused_unless_finite(inner, norm)
            optimizer.step()
        else:
            restore_unless_finite = states.copy_before_step(inner)
            optimizer.step()
            restore_unless_finite(norm)
        optimizer.zero_grad(set_to_none=True)
        return norm.detach()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if states.is_divided(optimizer):
            return states.gather(optimizer, self.device)
        return optimizer.state_dict() if self.rank == 0 else {}

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        if states.is_divided(optimizer):
            states.scatter(optimizer, state)
        else:
            states.load_state(optimizer, state)

    def counters(self) -> dict[str, float]:
        memory = {"optimizer_mib": 0.0}
        if self._optimizer is not None:
            memory["optimizer_mib"] = states.mib(states.state_tensors(self._optimizer))
        if self._teacher is not None:
            from kd.parts.backends._divided import local_tensors

            memory["teacher_mib"] = states.mib(local_tensors(self._teacher))
        return memory

    def communication_ms(self) -> float:
        """Return the mean wait for gradients in steps timed since the last call, ms."""
        # DDP times the all-reduces and their overlap with the gradients' computation;
        # the rest is the wait. It publishes a step's times in the next step. On a
        # device it times the first ten steps and then one in a hundred.
        waits = self._waits
        self._waits = []
        return sum(waits) / len(waits) if waits else 0.0

    def end_step(self) -> None:
        """Read DDP's timers, in about 20 microseconds and without a sync."""
        if isinstance(self._module, DistributedDataParallel):
            # torch has no public access (searched in 2.15); this one works with 2.4.1,
            # 2.9.1 and 2.15
            times = self._module._get_ddp_logging_data()
            end = times.get("backward_comm_time_end", 0)
            # absent before the first timed step
            if end != self._last_wait and "backward_comm_time" in times:
                self._last_wait = end
                exposed = (
                    times["backward_comm_time"]
                    - times["backward_compute_comm_overlap_time"]
                )
                self._waits.append(max(0.0, exposed / 1e6))

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        if self._joined:
            dist.all_reduce(total)
        return total

    def reduce_mean(self, tensor: Tensor) -> Tensor:  # smddp refuses AVG
        return self.reduce_sum(tensor) / self.world_size

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        if self._joined:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        # By an all-reduce: the barriers of the backends take different arguments.
        self.reduce_sum(torch.zeros(1, device=self.device)).item()

    def explain(self, error: Exception) -> KdError | None:
        message = str(error)
        if "did not receive grad" in message and self._module is not None:
            return self._missing_gradient_error(message, self._module)
        lost = isinstance(error, dist.DistError) or any(
            sign in message for sign in _PEER_ENDED
        )
        if not (self._joined and lost):
            return None
        lines = [line for line in message.splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        wrong = f"rank {self.rank} lost the other ranks ({reason[:200]})"
        remedy = (
            "Read the error of the rank that ended first; the same command resumes from"
            " the last checkpoint"
        )
        return BackendError("backend", wrong, "", remedy)

    def _missing_gradient_error(self, message: str, module: nn.Module) -> ModelError:
        """Name the parameters whose numbers DDP gives."""
        trained = [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        numbers = map(int, match[1].split() if match else ())
        names = ", ".join(author_name(trained[number]) for number in numbers)
        wrong = f"in this step no gradient reached {names}, which had one at the start"
        allowed = "On several ranks each parameter has a gradient in each step"
        remedy = "Use every layer in every step, or call requires_grad_(False) on those"
        return ModelError("student", wrong, allowed, remedy)

    def close(self) -> None:
        if self._joined:
            self._joined = False
            if torch.__version__ < _FSDP2:
                _ENDED.append(dist.group.WORLD)
            dist.destroy_process_group()


def select_gpu(kind: str, local_rank: int, tf32: bool) -> torch.device:
    if local_rank >= torch.cuda.device_count():
        wrong = (
            f"is '{kind}', but local rank {local_rank} finds"
            f" {torch.cuda.device_count()} GPUs"
        )
        remedy = "Start fewer processes, or set backend.kind=cpu"
        raise BackendError("backend.kind", wrong, "One process per GPU", remedy)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return device


_ENDED: list[object] = []
"""Process groups of an older torch, kept alive. If freed right after a collective, gloo
of torch 2.4.1 may hang: it waits for its thread, which waits for Python's lock to free
a tensor.
"""
_FSDP2 = "2.9"  # oldest torch for it: older ones are untested
_PIPELINE = "2.13"  # the pipelines of 2.9 abort in a forward over gloo

# Buffers are constants, or statistics of a rank's own images. torch 2.13 renamed the
# argument.
_DDP = (
    partial(DistributedDataParallel, broadcast_buffers=False)
    if torch.__version__ < "2.13"
    else partial(DistributedDataParallel, forward_sync_buffers=False)
)

# gloo's messages if a peer has ended or does not respond; nccl raises a DistError.
_PEER_ENDED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
)


def _require_torch(oldest: str, key: str, value: str, off: str) -> None:
    if torch.__version__ < oldest:  # compared as versions
        wrong = f"is {value}, but this is torch {torch.__version__}"
        raise BackendError(key, wrong, f"torch {oldest} or newer", f"Set {key}={off}")
