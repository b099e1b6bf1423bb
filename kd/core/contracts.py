"""Parts of kd meet at these protocols; read this file first.

A task's protocols are in `kd/core/evaluation.py`.

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
    """A source lists and decodes images, with labels or without.

    A module `datasets/NAME.py` has `build(options, split, classes, labels="all") ->
    Source`.

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
        """Return the label of one image without decoding it.

        Args:
            id: position of the image, 0 to `len(self) - 1`.

        Returns:
            A class, -1 if unlabelled, or a set of labels; see `kd.core.types.Label`.
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
        """Decode one image.

        Args:
            id: position of the image.

        Returns:
            The image as RGB, 8 bits a channel, and the CRC-32 of its encoded bytes.

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
    """This source decodes large JPEGs at reduced size: see `kd.files.pixels.reduce`."""

    def decode_reduced(
        self, id: int, least: Callable[[int, int], float] | None
    ) -> Decoded:
        """Decode one image like `Source.decode`, perhaps at a reduced size.

        Args:
            id: position of the image.
            least: returns for (width, height), pixels, the smallest share of the sides
                to keep; None: decode at full size.

        Returns:
            The image at that share of its sides, or more, and the CRC-32 of its encoded
            bytes.

        Raises:
            CorruptImage, NotPrepared, DataError: as `Source.decode`.
        """
        ...


@runtime_checkable
class Stamped(Protocol):
    """This source tells which files may have changed.

    For any other source a store compares a sample of images.
    """

    def stamp(self, id: int) -> int:
        """Return a stamp of 64 bits, made of the file times at listing.

        A changed stamp is a hint to read the file and compare.
        """
        ...


@runtime_checkable
class HasWarnings(Protocol):
    """A source or a teacher's model has warnings to show before training.

    For example, it found files that are no images.
    """

    notes: Sequence[str]  # one line each; shown by `--check` and in a run's first lines


@runtime_checkable
class Dataset(Protocol):
    """A dataset makes the views of a source.

    It is pure: equal (id, view) give equal bits in any process and any order.
    """

    classes: Sequence[str]

    def __len__(self) -> int: ...

    def load(self, id: int, view: int) -> Sample:
        """Load one view of an image.

        Args:
            id: position of the image in the source.
            view: number of the view.

        Returns:
            Pixels uint8 [3, H, W] with the image's label.
        """
        ...


class Loader(Protocol):
    """A loader turns a plan into this rank's micro-batches, in the plan's order.

    It loads on this machine or elsewhere.
    """

    # ids of images that could not be decoded, among those loaded so far
    unreadable: set[int]

    def epoch(
        self, plan: Plan, view: int, start: int = 0, small: Small | None = None
    ) -> Iterator[Batch]:
        """Yield the micro-batches of a plan's steps.

        Args:
            plan: the images of the epoch, equal on all ranks.
            view: number of the view of each image.
            start: optimizer step at which the loader begins.
            small: first steps of the epoch that show small images; None: no step does.

        Yields:
            Full micro-batches on the host, `accumulate` per step; image is uint8 [B, 3,
            H, W].
        """
        ...


class Score(Protocol):
    """The engine gives this scoring pass to a sifter.

    It runs in eval mode, without gradients, and is deterministic.
    """

    def __call__(
        self, batches: Sequence[Batch], shrink: int = 1
    ) -> tuple[Tensor, list[Batch]]:
        """Score the images of one step with the current student.

        Args:
            batches: this rank's micro-batches of the step.
            shrink: the student sees images whose sides are divided by it.

        Returns:
            The unweighted losses of all ranks' images, float32 [global batch] in the
            plan's order; and the batches at all pixels with the teacher's outputs,
            which the step reuses.
        """
        ...

    def cut(self) -> None:
        """Mark the end of assembling batches; XLA cuts its graph here."""


class Sifter(Protocol):
    """A sifter decides which images are used in each epoch.

    A module `sifters/NAME.py` has `build(options, context) -> Sifter`.
    """

    def plan(self, epoch: int, progress: float) -> Plan:
        """Return the plan of an epoch, equal on all ranks.

        All ranks must call it. After a resume, the same epoch gives the same plan.

        Args:
            epoch: number of the epoch, from 0.
            progress: share of the run that is done when the epoch begins, 0 to 1.

        Returns:
            A plan whose length is a multiple of the global batch size.
        """
        ...

    def steps(self, epoch: int, progress: float) -> int:
        """Return the optimizer steps of an epoch, at any time and without a plan.

        Args:
            epoch: number of the epoch, from 0.
            progress: share of the run that is done when the epoch begins, 0 to 1.
        """
        ...

    def stream(
        self, batches: Iterable[Batch], score: Score, start: int
    ) -> Iterator[Batch]:
        """Yield full batches of one shape, the same number on every rank.

        Args:
            batches: this rank's micro-batches of the plan, from step `first(start)` on.
            score: the engine's scoring pass.
            start: optimizer steps of the epoch that are already done.

        Yields:
            Batches to train on.
        """
        ...

    def first(self, start: int) -> int:
        """Return the plan's step at which the loader must begin.

        Args:
            start: optimizer step at which training begins.
        """
        ...

    def cost(self, costs: Costs) -> float:
        """Return the cost of a sifted epoch; it decides whether sifting pays.

        Args:
            costs: measured costs per image, milliseconds.

        Returns:
            Milliseconds per image of the dataset.
        """
        ...

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Record the losses of a step without waiting for the device.

        Args:
            ids: the images, int64 [B].
            losses: their unweighted losses, float32 [B].
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a resumed run needs. All ranks must call it."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class TeacherModel(Protocol):
    """A teacher's model is frozen; it is an nn.Module.

    A module `networks/NAME.py` has `build(options, spec, image_size, features) ->
    TeacherModel`.

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
        """The module that is cast to `teacher.precision`.

        Normalization stays float32.
        """
        ...

    @property
    def classes(self) -> Sequence[str]:
        """Class names in the order of the logits; empty: it has features only."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return all that the outputs depend on, as JSON values.

        Returns:
            Values by name; `teacher` is a hash of the weights or outputs.
        """
        ...

    def __call__(self, image: Tensor) -> Outputs:
        """Predict a batch of images.

        Args:
            image: uint8 [B, 3, H, W], as they come from the data pipeline.

        Returns:
            Logits [B, C] and the features that a loss needs.
        """
        ...


class Teacher(Protocol):
    """A teacher gives the outputs of one or several models for a batch, live or cached.

    It is not trained, not checkpointed, and outside DDP.
    """

    @property
    def images(self) -> int:
        """Number of images predicted by its forward on this rank."""
        ...

    def lookup(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Add stored outputs to batches that are still on the host.

        Args:
            batches: micro-batches of the loader.

        Yields:
            The same batches, with `teacher_outputs` where some are stored.
        """
        ...

    def unanswered(self, view: int, ids: Tensor) -> Tensor:
        """Return which images still need the forward.

        Args:
            view: number of the view.
            ids: the images, int64 [N].

        Returns:
            A mask on the host, bool [N].
        """
        ...

    def __call__(self, batch: Batch) -> Outputs:
        """Return the outputs for a batch on the device, stored ones and predictions."""
        ...

    def flush(self) -> None:
        """Store outputs that are still on the device.

        It is called when the loop syncs with the device anyway.
        """


class Loss(Protocol):
    """A loss term returns one value per image; it is an nn.Module.

    A module `losses/NAME.py` has `build(options, dims) -> Loss` and `facts(options) ->
    LossFacts`.

    Inputs are the outputs of both models in any float dtype. The result is float32 [B],
    one value per image: the engine weights it and a sifter reads it. A divergence is in
    nats. If the paper's formula is a mean over the batch, it equals the mean over B.
    Only the student gets gradients.
    """

    def __call__(self, student: Outputs, teacher: Outputs, batch: Batch) -> Tensor:
        """Return the loss of each image, float32 [B].

        Args:
            student: the student's outputs for the batch.
            teacher: the teacher's outputs for the batch.
            batch: the micro-batch on the device, with its labels.
        """
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class Backend(Protocol):
    """A backend is one process and its device.

    A module `backends/NAME.py` has `build(options, precision, timeout_seconds) ->
    Backend`.

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
        """Return whether bf16 of `auto_mode` pays for a network.

        Args:
            made_of: returns the shares of its multiplications in convolutions and in
                depthwise ones, 0 to 1.
            trained: whether its backward runs too.

        Returns:
            Whether bfloat16 is faster; see `kd.core.host.bf16_pays`.
        """
        ...

    def setup(self) -> None:
        """Join the process group and check it by an all-reduce of a 1.

        Raises:
            BackendError: fewer processes joined than the launcher's WORLD_SIZE, or the
                device is missing.
        """

    def seed(self, seed: int) -> None:
        """Seed the generators of this process, including the device's.

        Args:
            seed: 0 to 2^63 - 1, of `kd.core.seeds.seed_from`.
        """

    def put(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Move batches to the device, ahead of their use where possible.

        Args:
            batches: micro-batches on the host.

        Yields:
            The same batches on the device.
        """
        ...

    def wrap(self, module: nn.Module) -> nn.Module:
        """Prepare a module for training on all ranks, for example by DDP.

        Args:
            module: student and criterion on the device.

        Returns:
            The module with rank 0's weights, whose gradients are all-reduced.
        """
        ...

    def check_divided(self, stages: int) -> None:
        """Require that a frozen module can be divided among the ranks.

        Args:
            stages: number of pipeline stages; 0: the module is sharded.

        Raises:
            BackendError: the backend cannot do it.
        """

    def shard(self, module: nn.Module, source: Mapping[str, Tensor]) -> nn.Module:
        """Shard a frozen module over the ranks; all must call it.

        Args:
            module: the module on the meta device.
            source: rank 0's weights by name.

        Returns:
            The sharded module with those weights.
        """
        ...

    def pipeline(self, module: nn.Module) -> nn.Module:
        """Split a frozen module into one pipeline stage per rank; all must call it.

        Args:
            module: the module on the CPU.

        Returns:
            This rank's part, to be called like the module.
        """
        ...

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Skip the gradient all-reduce in this block (gradient accumulation).

        It is used for all but the last micro-batch of a step.

        Args:
            module: the result of `wrap`.
        """
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Cast operators in this block to `autocast_dtype`; None: do nothing."""
        ...

    def optimizer(
        self,
        groups: list[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        zero: bool,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Build the optimizer of the student.

        Args:
            groups: parameter groups as torch's optimizers take them.
            cls: class of the optimizer.
            zero: whether its state is sharded over the ranks (ZeRO-1).
            options: further arguments of the class.
        """
        ...

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the gradients, step, and set them to None.

        A step with a non-finite norm changes neither weights nor state; the host does
        not sync to find out.

        Args:
            optimizer: an optimizer that this backend has made.
            max_norm: largest norm of all gradients together; 0: no clipping.

        Returns:
            The norm before clipping, a scalar on the device, equal on all ranks.
        """
        ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the complete state of an optimizer; all ranks must call it.

        Returns:
            The state as an unsharded optimizer's on rank 0, an empty dict on others.
        """
        ...

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load the result of `optimizer_state`, on any number of ranks."""

    def counters(self) -> dict[str, float]:
        """Return values of this rank for the log, without waiting for the device.

        Returns:
            Memory, MiB, compilations and others by name.
        """
        ...

    def communication_ms(self) -> float:
        """Return the mean time that backward waited for other ranks.

        Returns:
            Milliseconds per step since the last call; 0: unknown.
        """
        ...

    def end_step(self) -> None:
        """Mark the end of a step; XLA cuts its graph here."""

    def reduce_mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over ranks (all-reduce SUM, then divide)."""
        ...

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on the device."""
        ...

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0."""

    def barrier(self) -> None: ...

    def explain(self, error: Exception) -> KdError | None:
        """Return a KdError for a failed collective, or None for any other error.

        Args:
            error: the error of a step; a collective fails where another rank has ended.
        """
        ...

    def close(self) -> None: ...
