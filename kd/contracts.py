"""What the parts promise each other. Read this first.

The engine knows these protocols and nothing concrete; a part is one file in the folder of its contract
(`losses/`, `sifters/`, `datasets/`, `backends/`) with exactly two public names: `Options`, a frozen dataclass
whose fields are its YAML keys with a docstring under each, and `build(options, ...)`.

Shape legend: B images of a batch, C classes, D feature width, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kd.errors import KdError
from kd.types import Batch, Costs, Decoded, Outputs, Plan, Sample, State


@runtime_checkable
class Source(Protocol):
    """Where images lie: `datasets/NAME.py: build(options, split, classes) -> Source`.

    `split` is "train" or "val". `classes` is None for the training split, which defines the class order; the
    validation split gets the training classes and must label by them, whichever of them it lacks.
    """

    classes: Sequence[str]
    """Class names; the position is the label."""
    fingerprint: str
    """A hash of the listing (names, labels, the sizes of all files), the same wherever the data lies."""

    def __len__(self) -> int: ...

    def label(self, id: int) -> int:
        """Return the label of one image without decoding it."""
        ...

    def name(self, id: int) -> str:
        """Return what a person would call this image (a path, a key), for messages."""
        ...

    def prepare(self) -> None:
        """Make the images exist (render, unpack) where they do not; called by rank 0 before anything is decoded.

        Listing must not need it, so that `--check` answers at once.
        """
        ...

    def decode(self, id: int) -> Decoded:
        """Return the image as RGB, 8 bits a channel, and the CRC-32 of its encoded bytes.

        Raises:
            CorruptImage: the bytes were read whole and cannot be decoded; `data.on_corrupt` decides.
            DataError: they cannot be read. It ends the run.
        """
        ...


@runtime_checkable
class Dataset(Protocol):
    """Views of a source. Pure: the same (id, view) gives the same bits, whoever asks, in whatever order."""

    classes: Sequence[str]

    def __len__(self) -> int: ...

    def load(self, id: int, view: int) -> Sample: ...


class Loader(Protocol):
    """Turns a plan into this rank's micro-batches, in the plan's order, on this machine or elsewhere."""

    unreadable: set[int]
    """Ids of images that could not be decoded, as far as they were asked for."""

    def epoch(self, plan: Plan, view: int, start: int = 0) -> Iterator[Batch]:
        """Yield the micro-batches of all steps from optimizer step `start` of the plan on."""
        ...


class Score(Protocol):
    """The scoring pass that the engine lends to a sifter: eval mode, no gradients, nothing random."""

    def __call__(self, batches: Sequence[Batch], by: str) -> tuple[Tensor, list[Batch]]:
        """Score the micro-batches of one step's worth of images.

        Args:
            batches: this rank's micro-batches of the step, all of them.
            by: "loss" (the distillation loss, unweighted) or "entropy" (the student's; the teacher is not asked).

        Returns:
            float32 [global batch] on the CPU, of all ranks, in the plan's order; and the batches, which now carry the
            teacher's answer where it was asked, so that it is never asked twice.
        """
        ...

    def cut(self) -> None:
        """Mark the end of what was computed to put batches together; XLA cuts its graph here."""
        ...


class Sifter(Protocol):
    """Decides which images an epoch visits: `sifters/NAME.py: build(options, context) -> Sifter`."""

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return the plan of an epoch: identical on all ranks, its length a multiple of the global batch size.

        All ranks must call it. The same epoch asked for again, after a resume, is the same plan.

        Args:
            epoch: counts from 0.
            progress: share of the run that is done when the epoch begins, 0 to 1.
        """
        ...

    def stream(self, batches: Iterable[Batch], score: Score, start: int) -> Iterator[Batch]:
        """Yield full batches of one shape out of `batches`, as many on every rank.

        Args:
            batches: this rank's micro-batches of the plan, from step `first(start)` on.
            score: the scoring pass.
            start: optimizer steps of the epoch done before.
        """
        ...

    def first(self, start: int) -> int:
        """Return from which step of the plan the loader must begin, for optimizer step `start` of the epoch."""
        ...

    def cost(self, costs: Costs) -> float:
        """Return the milliseconds of an image of the dataset in a sifted epoch, for the gate."""
        ...

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Remember the per-image losses [B], unweighted, of a step; must not wait for the device."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed run must know. All ranks must call it."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class Teacher(Protocol):
    """Outputs for a batch: live, cached, sharded, several. Never trained, never checkpointed, outside DDP."""

    @property
    def images(self) -> int:
        """How many images its forward has run on, this rank."""
        ...

    def lookup(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Add the outputs that are stored already to batches that are still on the host."""
        ...

    def __call__(self, batch: Batch) -> Outputs: ...

    def flush(self) -> None:
        """Store the outputs that are still on the device; called where the loop waits for the device anyway."""
        ...


class Loss(Protocol):
    """One loss term: `losses/NAME.py: build(options, dims) -> Loss`, an nn.Module.

    Inputs are the two models' outputs in any float dtype; the result is float32 [B], one value an image, in
    nats where it is a divergence, so that a sifter can see it and weights can be applied. A term whose formula is
    a mean over the batch spreads it so that the mean over B is the paper's number. Gradients reach the student only.
    """

    needs: frozenset[str]
    """What it reads: "teacher", "hard_labels" (which excludes mixup), and features by name, such as "pooled"."""

    def __call__(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor: ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class Backend(Protocol):
    """One process and its device: `backends/NAME.py: build(options, precision, timeout_seconds) -> Backend`, and FACTS.

    The engine asks it for whatever differs between machines; it imports neither torch.distributed nor torch_xla.
    """

    kind: str
    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Ranks on this machine."""
    autocast_dtype: torch.dtype | None
    """bfloat16, or None for float32."""
    fixed_mode: str
    """`precision+attention` that `auto` means where each candidate would have to be compiled; "" where it measures."""

    def setup(self) -> None:
        """Join the world and prove it: all-reduce a 1 and require the launcher's WORLD_SIZE.

        Raises:
            BackendError: the world is smaller than the launcher promised, or the device is missing.
        """
        ...

    def seed(self, seed: int) -> None:
        """Seed this process's generators, the device's too."""
        ...

    def put(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Move batches to the device, ahead of their use where the device can."""
        ...

    def wrap(self, module: nn.Module) -> nn.Module:
        """Make all ranks start equal and give the gradient reduction its one owner."""
        ...

    def free_mib(self) -> float:
        """Return the memory that this rank may still take, MiB; infinity where taking too much raises an error."""
        ...

    def check_divided(self, stages: int) -> None:
        """Raise BackendError where this world cannot run a frozen module in so many stages; 0: cannot shard it."""

    def shard(self, module: nn.Module, source: Mapping[str, Tensor]) -> nn.Module:
        """Spread a frozen module, on the meta device, over the ranks; rank 0's `source` fills it. All call it alike."""
        ...

    def pipeline(self, module: nn.Module) -> nn.Module:
        """Cut a frozen module, on the CPU of all ranks, into one stage a rank. All ranks call it alike."""
        ...

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Hold the reduction back: all but the last micro-batch of a step."""
        ...

    def autocast(self) -> AbstractContextManager[Any]: ...

    def optimizer(
        self, groups: list[dict[str, Any]], cls: type[torch.optim.Optimizer], zero: bool, **options: Any
    ) -> torch.optim.Optimizer:
        """Build the optimizer, with its state sharded over the ranks where `zero`."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip (0 = do not), step, drop the gradients; return the norm before clipping, on the device."""
        ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state on rank 0 (others: empty), as a plain optimizer's. All ranks must call it."""
        ...

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` returned, in this world or in one of another size."""
        ...

    def counters(self) -> dict[str, float]:
        """Return what this rank counts, for the log: memory, compilations. Must not wait for the device."""
        ...

    def end_step(self) -> None:
        """Mark the end of a step; XLA cuts its graph here."""
        ...

    def reduce_mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over ranks (SUM, then divide)."""
        ...

    def reduce_sum(self, tensor: Tensor) -> Tensor: ...

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0."""
        ...

    def barrier(self) -> None: ...

    def explain(self, error: Exception) -> KdError | None:
        """Return what a failure of this world means to a user (another rank is gone), or None for any other error."""
        ...

    def close(self) -> None: ...


class Logger(Protocol):
    """Shows a person how a run goes; never waits for the device."""

    def step(self, state: State, progress: float) -> None: ...

    def log(self, kind: str, state: State, values: dict[str, float]) -> None: ...

    def info(self, text: str) -> None:
        """Show a line; an empty one is not shown."""
        ...


class RunStore(Protocol):
    """Where a run keeps its metrics and checkpoints; rank 0 writes one folder."""

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        """Write a row of metrics: `kind` is "train" or "val"."""
        ...

    def checkpoint(self, state: State, tensors: dict[str, Tensor], info: dict[str, Any], best: bool) -> None:
        """Write a checkpoint, atomically: after a crash there is the old one or the new one."""
        ...

    def restore(self) -> tuple[State, dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest whole checkpoint, or None for a fresh run."""
        ...
