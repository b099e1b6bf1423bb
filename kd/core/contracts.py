"""The protocols between the parts of kd. Read this first; a task's protocols are in
`kd/core/evaluation.py`.

The engine depends on these protocols only. A part is one file in the folder of its
contract (`tasks/`, `losses/`, `sifters/`, `datasets/`, `networks/`, `backends/`;
`exporters/` has its own). It has two public names: `Options`, a frozen dataclass whose
fields are its YAML keys, with a docstring under each, and `build(options, ...)`. If
other rooms must know something about the options, `facts(options)` returns it as a
value of `kd.core.facts`, or `facts` is that value.

Shape legend: B images of a batch, C classes, D feature width, H W pixels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kd.core.errors import KdError
from kd.core.facts import BackendFacts
from kd.core.types import Batch, Costs, Decoded, Label, Outputs, Plan, Sample, Small


@runtime_checkable
class Source(Protocol):
    """Images, with labels or without: `datasets/NAME.py: build(options, split, classes,
    labels="all") -> Source`.

    `labels` is `data.labels`: "all", "some" or "none"; it is passed unless it is "all".
    `split` is "train" or "val", or "test" where `facts(options).test` names a key. The
    training split gets no `classes` and defines their order. Other splits get its
    classes and must use them, even if they lack some. An unlistable folder, or a class
    that training does not have, is a DataError. `recognizes(folder)`, where a module
    has it, returns the keys of `data` for a folder of its layout, or None: `kd init`
    tries all kinds.

    A source may have `encoded(id)`, the bytes of a file without decoding it; `sizes`,
    the bytes of all files at listing, int64 [N]; `group(id)`, what an image belongs to
    by `data.group`.
    """

    # a hash of the listing (names, labels, sizes of all files), independent of the
    # folder's path
    fingerprint: str

    @property
    def classes(self) -> Sequence[str]:
        """Class names; the position is the label. Empty if images are unlabelled."""
        ...

    def __len__(self) -> int: ...

    def label(self, id: int) -> Label:
        """Return the label of one image without decoding it, or its set of labels; see
        `kd.core.types.Label`.
        """
        ...

    def name(self, id: int) -> str:
        """Return a readable name of this image (a path, a key), for messages."""
        ...

    def prepare(self) -> None:
        """Create missing images (render, unpack) on rank 0, before any is decoded.
        Listing must work without it.
        """

    def decode(self, id: int) -> Decoded:
        """Return the image as RGB, 8 bits a channel, and the CRC-32 of its encoded
        bytes.

        Raises:
            CorruptImage: all bytes were read and cannot be decoded; `data.on_corrupt`
                decides.
            NotPrepared: `prepare` has not made them yet; `--check` then looks at no
                image.
            DataError: the bytes cannot be read; the run ends.
        """
        ...


@runtime_checkable
class Reducing(Protocol):
    """A source that decodes a large JPEG at reduced size, as `kd.files.pixels.reduce`
    does.
    """

    def decode_reduced(
        self, id: int, least: Callable[[int, int], float] | None
    ) -> Decoded:
        """Like `Source.decode`, but keep only the share `least(width, height)` of the
        sides, or more.
        """
        ...


@runtime_checkable
class Stamped(Protocol):
    """A source that tells which files may have changed. For any other source a store
    compares a sample of images.
    """

    def stamp(self, id: int) -> int:
        """Return 64 bits made of the file times at listing. A changed stamp is a hint
        to read the file and compare.
        """
        ...


@runtime_checkable
class HasWarnings(Protocol):
    """A source or a teacher's model with warnings to show before training, such as
    files that are no images.
    """

    notes: Sequence[str]  # one line each; shown by `--check` and in a run's first lines


@runtime_checkable
class Dataset(Protocol):
    """Views of a source. Pure: equal (id, view) give equal bits in any process and any
    order.
    """

    classes: Sequence[str]

    def __len__(self) -> int: ...

    def load(self, id: int, view: int) -> Sample: ...


class Loader(Protocol):
    """Turns a plan into this rank's micro-batches, in the plan's order, on this machine
    or elsewhere.
    """

    # ids of images that could not be decoded, among those loaded so far
    unreadable: set[int]

    def epoch(
        self, plan: Plan, view: int, start: int = 0, small: Small | None = None
    ) -> Iterator[Batch]:
        """Yield the micro-batches of all steps of the plan, from optimizer step `start`
        on.
        """
        ...


class Score(Protocol):
    """The scoring pass that the engine gives to a sifter: eval mode, no gradients,
    deterministic.
    """

    def __call__(
        self, batches: Sequence[Batch], shrink: int = 1
    ) -> tuple[Tensor, list[Batch]]:
        """Return the unweighted losses of all images of one step; `batches` are this
        rank's micro-batches.

        The student sees images whose sides are divided by `shrink`; the returned
        batches have all pixels.

        The losses of all ranks are float32 [global batch] in the plan's order. The
        returned batches carry the teacher's outputs, which the step reuses.
        """
        ...

    def cut(self) -> None:
        """Mark the end of assembling batches; XLA cuts its graph here."""


class Sifter(Protocol):
    """Decides which images are used in each epoch: `sifters/NAME.py: build(options,
    context) -> Sifter`.
    """

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return the plan of an epoch: equal on all ranks, its length a multiple of the
        global batch size.

        All ranks must call it. After a resume, the same epoch (from 0) gives the same
        plan. `progress` is the share of the run that is done when the epoch begins, 0
        to 1.
        """
        ...

    def steps(self, epoch: int, progress: float) -> int:
        """Return the number of optimizer steps per epoch, at any time and without a
        plan.
        """
        ...

    def stream(
        self, batches: Iterable[Batch], score: Score, start: int
    ) -> Iterator[Batch]:
        """Yield full batches of one shape from `batches`, the same number on every
        rank.

        `batches` are this rank's micro-batches of the plan, from step `first(start)`
        on; `start` optimizer steps of the epoch are already done.
        """
        ...

    def first(self, start: int) -> int:
        """Return the step of the plan at which the loader must begin so that training
        begins at step `start`.
        """
        ...

    def cost(self, costs: Costs) -> float:
        """Return the milliseconds per image of the dataset in a sifted epoch; it
        decides whether sifting pays.
        """
        ...

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Record the unweighted losses [B] of a step without waiting for the device."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a resumed run needs. All ranks must call it."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class TeacherModel(Protocol):
    """A frozen model: `networks/NAME.py: build(options, spec, image_size, features) ->
    TeacherModel`, an nn.Module.

    `spec` is a `kd.models.spec.Spec`: `teacher.model`, `args` and `checkpoint`, the
    data's classes and images. `image_size` is the side of the delivered images, pixels;
    `features` names the features that a loss needs.
    """

    runtime: str
    """"torch" if precision, kernel and compiler can be chosen, else the runtime that
    executes it as it is, such as "onnxruntime".
    """
    reads_ids: bool
    """Whether outputs are looked up by image id: forward takes `(image, ids, view)`,
    and `validation(test)` returns the module for ids of the validation or test split.
    """

    @property
    def network(self) -> nn.Module:
        """The module that is cast to `teacher.precision`; normalization stays
        float32.
        """
        ...

    @property
    def classes(self) -> Sequence[str]:
        """Class names in the order of the logits; empty: it has features only."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return all that the outputs depend on, as JSON values; `teacher` is a hash of
        the weights or outputs.
        """
        ...

    def __call__(self, image: Tensor) -> Outputs:
        """Predict uint8 images [B, 3, H, W] as they come from the data pipeline."""
        ...


class Teacher(Protocol):
    """Outputs of one or several models for a batch, live or cached. Not trained, not
    checkpointed, outside DDP.
    """

    @property
    def images(self) -> int:
        """Number of images predicted by its forward on this rank."""
        ...

    def lookup(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Add stored outputs to batches that are still on the host."""
        ...

    def unanswered(self, view: int, ids: Tensor) -> Tensor:
        """Return which images [N] still need the forward, bool [N]."""
        ...

    def __call__(self, batch: Batch) -> Outputs: ...

    def flush(self) -> None:
        """Store outputs that are still on the device; called when the loop syncs with
        the device anyway.
        """


class Loss(Protocol):
    """One loss term: `losses/NAME.py: build(options, dims) -> Loss`, an nn.Module;
    `facts(options) -> LossFacts`.

    Inputs are the outputs of both models in any float dtype. The result is float32 [B],
    one value per image: the engine weights it and a sifter reads it. A divergence is in
    nats. If the paper's formula is a mean over the batch, it equals the mean over B.
    Only the student gets gradients.
    """

    def __call__(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor: ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class Backend(Protocol):
    """One process and its device: `backends/NAME.py: build(options, precision,
    timeout_seconds) -> Backend`.

    All differences between machines are here; the engine imports neither
    torch.distributed nor torch_xla.
    """

    kind: str
    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # ranks on this machine
    autocast_dtype: torch.dtype | None  # bfloat16, or None for float32
    # meaning of `auto` on this device, `precision+attention`, such as bf16+unfused
    auto_mode: str
    facts: BackendFacts  # the module's `facts`

    def bf16_pays(
        self, made_of: Callable[[], tuple[float, float]], trained: bool
    ) -> bool:
        """Return whether bf16 of `auto_mode` pays for a network; see
        `kd.core.host.bf16_pays`.
        """
        ...

    def setup(self) -> None:
        """Join the process group and check it: all-reduce a 1 and require the
        launcher's WORLD_SIZE.

        Raises:
            BackendError: fewer processes joined than the launcher started, or the
                device is missing.
        """

    def seed(self, seed: int) -> None:
        """Seed the generators of this process, including the device's."""

    def put(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Move batches to the device, ahead of their use where possible."""
        ...

    def wrap(self, module: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights and set up the gradient all-reduce, for example by
        DDP.
        """
        ...

    def check_divided(self, stages: int) -> None:
        """Raise BackendError if a frozen module cannot run in this many pipeline
        stages; 0: if it cannot be sharded.
        """

    def shard(self, module: nn.Module, source: Mapping[str, Tensor]) -> nn.Module:
        """Shard a frozen module on the meta device, and load rank 0's `source`. All
        ranks must call it.
        """
        ...

    def pipeline(self, module: nn.Module) -> nn.Module:
        """Split a frozen module on the CPU into one pipeline stage per rank. All ranks
        must call it.
        """
        ...

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Skip the gradient all-reduce: used for all but the last micro-batch of a step
        (gradient accumulation).
        """
        ...

    def autocast(self) -> AbstractContextManager[Any]: ...

    def optimizer(
        self,
        groups: list[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        zero: bool,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Build the optimizer; `zero` shards its state over the ranks (ZeRO-1)."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip (0: no clipping), step, set gradients to None; return the norm before
        clipping, on the device.

        The norm is equal on all ranks. A step with a non-finite norm changes neither
        weights nor state; the host does not sync to find out.
        """
        ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the complete state on rank 0 (others: empty), as an unsharded
        optimizer's. All ranks must call it.
        """
        ...

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load what `optimizer_state` returned, on this number of ranks or
        another one.
        """

    def counters(self) -> dict[str, float]:
        """Return values of this rank for the log: memory, compilations. Must not wait
        for the device.
        """
        ...

    def communication_ms(self) -> float:
        """Return the mean time per step that backward waited for other ranks since the
        last call, ms; 0: unknown.
        """
        ...

    def end_step(self) -> None:
        """Mark the end of a step; XLA cuts its graph here."""

    def reduce_mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over ranks (all-reduce SUM, then divide)."""
        ...

    def reduce_sum(self, tensor: Tensor) -> Tensor: ...

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0."""

    def barrier(self) -> None: ...

    def explain(self, error: Exception) -> KdError | None:
        """Return a KdError for a failed collective (another rank has ended), or None
        for any other error.
        """
        ...

    def close(self) -> None: ...
