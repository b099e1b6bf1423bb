"""Parts pass these frozen dataclasses to each other.

Shape legend: B images of a batch, C classes, D feature width, H W pixels, N images of a
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, sub
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Label = int | np.ndarray
"""A class, -1 if unlabelled. With several labels per image int8 [C]: 1 for each class
in the image, all -1 if unlabelled.
"""
# names of the tensor fields of every batch
TENSORS = ("ids", "image", "label", "partner_label", "lam", "weight")


class Decoded(NamedTuple):
    """A source returns a decoded image."""

    image: Image.Image  # RGB, 8 bits a channel
    crc: int  # CRC-32 of the encoded bytes; 0 if unknown
    used_bits: int = 0
    """For 16 bits per channel: bits of the image's largest value, negative for colour.
    0: an image of 8 bits.
    """
    format: str = ""  # file format, as Pillow names it: "JPEG"; "": unknown
    file_bytes: int = 0  # size of the encoded image; 0 if unknown


class Sample(NamedTuple):
    """A training image is a view of one id, possibly mixed with a partner."""

    pixels: Tensor  # uint8 [3, H, W], RGB
    label: Label
    # the label of the mixup partner; equal to `label` without mixing
    partner_label: Label
    lam: float  # the share of `label` in the pixels, 0 to 1; 1.0 without mixing
    # False: decoding failed with `data.on_corrupt: skip`, and the pixels are grey
    readable: bool = True
    # CRC-32 of the encoded bytes, of both images if they are mixed; 0 if unknown
    crc: int = 0


class Loading(NamedTuple):
    """Batches took these seconds to make; zeros if not counted."""

    seconds: float = 0.0
    busy: float = 0.0  # the loading thread computed or waited for a core
    decoding: float = 0.0  # reading and decoding images
    resizing: float = 0.0  # cutting and resizing crops
    # part of `decoding`: images that a JPEG decoder could reduce to half the sides
    whole: float = 0.0

    def plus(self, loading: Loading) -> Loading:
        return Loading(*map(add, self, loading))

    def minus(self, loading: Loading) -> Loading:
        return Loading(*map(sub, self, loading))


UNKNOWN = Loading()


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch has the ids of its images; it is always full and of one shape."""

    ids: Tensor  # int64 [B], positions in the dataset
    image: Tensor  # uint8 [B, 3, H, W]; each model normalizes and resizes them itself
    label: Tensor  # int64 [B], or int8 [B, C] for several labels per image: see `Label`
    partner_label: Tensor  # like `label`, and equal to it without mixing
    lam: Tensor  # float32 [B], the share of `label`; 1.0 without mixing
    weight: Tensor  # float32 [B], from the sifter's plan; 0.0 marks padding
    view: int = 0  # number of the view: `epoch mod views`, or the epoch itself
    # ids of images that could not be decoded; their weight is 0
    unreadable: tuple[int, ...] = ()
    # `Sample.crc` of each image; empty if unknown. Only the host reads it.
    crc: tuple[int, ...] = ()
    loading: Loading = UNKNOWN  # of this batch; the loader adds it up
    # known outputs, from a cache or a scoring pass
    teacher_outputs: TeacherOutputs | None = None
    small: bool = False  # `image` has the small size of `data.progressive`
    # with `small`: the same views at full size, if the teacher predicts some of them
    full_size: Tensor | None = None

    @property
    def labelled(self) -> Tensor:
        """Whether an image and its mixing partner are labelled, bool [B]."""
        lowest = torch.minimum(self.label, self.partner_label)
        return (lowest.view(len(lowest), -1) >= 0).all(1)

    @classmethod
    def of(cls, image: Tensor, label: Tensor, ids: Tensor | None = None) -> Batch:
        """Make a batch of unmixed images [B, ...] with weight 1.

        Labels are int64 [B] or int8 [B, C], `ids` int64 [B].
        """
        ones = torch.ones(len(label), device=label.device)
        if ids is None:
            ids = torch.arange(len(label), device=label.device)
        return cls(ids, image, label, label, ones, ones)

    def map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in TENSORS}
        if self.teacher_outputs is not None:
            moved["teacher_outputs"] = self.teacher_outputs.map(move)
        if self.full_size is not None:
            moved["full_size"] = move(self.full_size)
        return replace(self, **moved)

    def take(self, rows: Tensor) -> Batch:
        """Return the given rows (int64 [K]) of the batch.

        `rows` must be on the CPU only if the batch has `crc` or missing outputs.
        """
        index = rows.to(self.image.device, non_blocking=True)
        batch = self.map(lambda tensor: tensor.index_select(0, index))
        if self.crc:
            batch = replace(batch, crc=tuple(self.crc[row] for row in rows.tolist()))
        if self.teacher_outputs is None or not self.teacher_outputs.missing:
            return batch
        ids = dict(self.teacher_outputs.missing)
        missing = tuple(
            (new, ids[old]) for new, old in enumerate(rows.tolist()) if old in ids
        )
        assert batch.teacher_outputs is not None
        outputs = replace(batch.teacher_outputs, missing=missing)
        return replace(batch, teacher_outputs=outputs)

    @classmethod
    def cat(cls, batches: Sequence[Batch]) -> Batch:
        """Concatenate batches of one view.

        Teacher outputs are kept if all batches have them.
        """
        joined: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for batch in batches])
            for name in TENSORS
        }
        outputs = [
            batch.teacher_outputs
            for batch in batches
            if batch.teacher_outputs is not None
        ]
        joined["teacher_outputs"] = None
        if len(outputs) == len(batches):
            joined["teacher_outputs"] = TeacherOutputs.cat(outputs)
        sized = [batch.full_size for batch in batches if batch.full_size is not None]
        if sized:
            # Zeros stand for a batch without them: all its rows have outputs.
            joined["full_size"] = torch.cat(
                [
                    sized[0].new_zeros(len(batch.ids), *sized[0].shape[1:])
                    if batch.full_size is None
                    else batch.full_size
                    for batch in batches
                ]
            )
        joined["unreadable"] = tuple(id for batch in batches for id in batch.unreadable)
        joined["crc"] = ()
        if all(batch.crc for batch in batches):
            joined["crc"] = tuple(crc for batch in batches for crc in batch.crc)
        return replace(batches[0], **joined)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; torch's DataLoader calls this by name."""
        return self.map(
            lambda tensor: tensor.pin_memory() if tensor.numel() else tensor
        )


@dataclass(frozen=True, slots=True)
class Outputs:
    """A model returns these outputs for a batch."""

    # [B, C], any float dtype. [B, 0] for a model without classes, which returns
    # features only.
    logits: Tensor
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """Features that a loss needs, by name: "pooled" [B, D], the classifier's input;
    "tokens" [B, N, D], patch tokens or positions of a feature map, row by row. The
    names for `teacher.also[i]` end in `.i+1`: "pooled.1".
    """

    @property
    def main(self) -> Tensor:
        """The logits, or the first features of a model without classes."""
        if self.logits.shape[1] or not self.features:
            return self.logits
        return next(iter(self.features.values()))

    def of(self, member: int) -> Outputs:
        """Return the outputs with the features of one of several teachers.

        The features get their plain names.
        """
        if not any("." in name for name in self.features):
            return self
        member_number = str(member) if member else ""
        features = {}
        for key, tensor in self.features.items():
            name, _, number = key.partition(".")
            if number == member_number:
                features[name] = tensor
        return Outputs(self.logits, features)

    def map(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        return Outputs(
            change(self.logits),
            {name: change(tensor) for name, tensor in self.features.items()},
        )

    @classmethod
    def cat(cls, outputs: Sequence[Outputs]) -> Outputs:
        """Concatenate the outputs of several batches.

        Features are kept if all batches have them.
        """
        features = {
            name: torch.cat([output.features[name] for output in outputs])
            for name in outputs[0].features
            if all(name in output.features for output in outputs)
        }
        return cls(torch.cat([output.logits for output in outputs]), features)


@dataclass(frozen=True, slots=True)
class TeacherOutputs:
    """Some of the teacher's outputs are known before its forward."""

    outputs: Outputs
    # (row, id) of the images without outputs; their rows in `outputs` are 0
    missing: tuple[tuple[int, int], ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> TeacherOutputs:
        return replace(self, outputs=self.outputs.map(change))

    @classmethod
    def cat(cls, batches: Sequence[TeacherOutputs]) -> TeacherOutputs:
        missing = []
        start = 0
        for batch in batches:
            missing += [(start + row, id) for row, id in batch.missing]
            start += len(batch.outputs.logits)
        return cls(Outputs.cat([batch.outputs for batch in batches]), tuple(missing))


@dataclass(frozen=True, slots=True)
class Dims:
    """A loss's inputs have these shapes, for learned projectors; classes have names."""

    num_classes: int
    student_features: int  # width of the pooled features; 0 if no loss needs them
    teacher_features: int  # same for the teacher; 0 if the run has no teacher
    # number N and width D of the tokens; (0, 0) if no loss needs them
    student_tokens: tuple[int, int] = (0, 0)
    teacher_tokens: tuple[int, int] = (0, 0)
    classes: tuple[str, ...] = ()  # class names; empty: unknown
    labels: Callable[[], Tensor] | None = None
    """Return every training image's label, as in a batch, int64 [num_images]; None:
    unknown.
    """


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan has the images of an epoch in order, with weights, equal on all ranks."""

    ids: Tensor  # int64 [N]; N is a multiple of the global batch size
    weights: Tensor  # float32 [N]; 1.0 without reweighting
    # exact number of optimizer steps if the sifter's stream drops images. 0: N / batch
    # size.
    steps: int = 0


class Small(NamedTuple):
    """The first steps of an epoch's plan may show small images."""

    steps: int  # number of first steps with small images
    needs_full_size: Tensor  # bool [N]: images that the teacher needs at full size


@dataclass(frozen=True, slots=True)
class Costs:
    """An image was measured to cost these milliseconds."""

    teacher: float  # forward of the teacher; 0 if its outputs are cached
    forward: float  # forward of the student without gradients (scoring pass)
    step: float  # forward, backward and optimizer of the student
    load: float  # decoding and augmentation, divided by the number of worker processes
    overlapped: bool  # whether workers load while the device computes

    def per_image(self, forward: float = 0.0, step: float = 1.0) -> float:
        """Return the milliseconds per image of the dataset.

        Args:
            forward: forwards of the scoring pass per image.
            step: training steps per image.
        """
        compute = self.teacher + forward * self.forward + step * self.step
        return max(compute, self.load) if self.overlapped else compute + self.load


@dataclass(frozen=True, slots=True)
class SiftContext:
    """A sifter plans this dataset, split into batches and ranks."""

    num_images: int
    batch_size: int  # images per optimizer step, over all ranks
    micro_batch: int
    rank: int
    world_size: int
    seed: int
    labels: Callable[[], Tensor]
    """Return every image's class, int64 [num_images]; called only by sifters that need
    it. Data with several labels per image does not allow such sifters.
    """
    # mean of a CPU tensor over the ranks; all must call it
    reduce_sum: Callable[[Tensor], Tensor]
    views: int = 0  # number of views per image; 0: a new view every epoch
    # share of the images drawn for an unsifted epoch, balanced over classes; 0: all
    balance: float = 0.0
    answers: Callable[[int, Sequence[int]], tuple[Tensor, Tensor]] | None = None
    """Return the teacher's stored logits [K, C] for one view of images, and a mask of
    those stored, bool [K].
    """
    # whether the device has float64 and sorting; else losses are copied to the host for
    # a draw
    on_device: bool = False

    @classmethod
    def alone(cls, labels: Tensor, batch_size: int, seed: int = 0) -> SiftContext:
        """Return the context of a single process without micro-batches.

        `labels` is int64 [num_images].
        """
        return cls(
            len(labels),
            batch_size,
            batch_size,
            0,
            1,
            seed,
            lambda: labels,
            lambda tensor: tensor,
        )


@dataclass(frozen=True, slots=True)
class State:
    """A run has this progress; all randomness is a function of (seed, State)."""

    step: int = 0  # completed optimizer steps
    epoch: int = 0
    step_in_epoch: int = 0  # completed steps of the current epoch's plan
    images: int = 0  # images trained on, over all ranks
    seconds: float = 0.0  # training time so far, without evaluation and checkpoints
    # CPU time of training, over all ranks and their worker processes
    cpu_seconds: float = 0.0
    best: float = -1.0  # best `Evaluator.selection_metric` so far; -1: none
    no_better: int = 0  # latest evaluations in a row without a new best
    # the run stopped before a due evaluation; the resumed run begins with it
    unevaluated: bool = False
    # latest steps in a row that were skipped because of a non-finite gradient
    skipped: int = 0
    skipped_in_all: int = 0  # all skipped steps so far
