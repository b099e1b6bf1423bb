"""The values passed between parts: frozen dataclasses.

Shape legend: B images of a batch, C classes, D feature width, H W pixels, N images of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Label = int | np.ndarray
"""A class, -1 for none; of an image with several int8 [C]: 1 for each class that it shows, all -1 if unknown."""
TENSORS = ("ids", "image", "label", "partner_label", "lam", "weight")  # the tensor fields of every batch


class Decoded(NamedTuple):
    """One image as its source has it."""

    image: Image.Image  # RGB, 8 bits a channel
    crc: int  # CRC-32 of the encoded bytes that it was decoded from; 0 where unknown
    used: int = 0
    """Bits that the largest value of an image of 16 bits a channel takes, below 0 in colour; 0: it has 8."""
    format: str = ""  # of the file, as Pillow names it: "JPEG"; "": unknown


class Sample(NamedTuple):
    """One training image: a view of one id, possibly mixed with a partner."""

    pixels: Tensor  # uint8 [3, H, W], RGB
    label: Label
    partner_label: Label  # the label of the mixup partner; equal to `label` without mixing
    lam: float  # the share of `label` in the pixels, 0 to 1; 1.0 without mixing
    readable: bool = True  # False: it could not be decoded, `data.on_corrupt` is `skip`, and the pixels are grey
    crc: int = 0  # CRC-32 of the encoded bytes, of both images where they are mixed; 0 where unknown


class Loading(NamedTuple):
    """How long batches took to make, seconds; zeros where not counted."""

    seconds: float = 0.0
    busy: float = 0.0  # in which the loading thread computed, or waited for a core
    decoding: float = 0.0  # in which images were read and decoded
    resizing: float = 0.0  # in which crops were cut out and resized
    whole: float = 0.0  # of `decoding`: of images of twice the sides that a view needs, which a JPEG's decoder reduces

    def plus(self, other: Loading) -> Loading:
        return Loading(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Loading) -> Loading:
        return Loading(*(a - b for a, b in zip(self, other, strict=True)))


UNKNOWN = Loading()


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: always full and of one shape, with the ids of its images."""

    ids: Tensor  # int64 [B], positions in the dataset
    image: Tensor  # uint8 [B, 3, H, W]; each model normalizes and resizes them itself
    label: Tensor  # int64 [B], or int8 [B, C] where an image has several: see `Label`
    partner_label: Tensor  # like `label`, and equal to it without mixing
    lam: Tensor  # float32 [B], the share of `label`; 1.0 without mixing
    weight: Tensor  # float32 [B], from the sifter's plan; 0.0 marks padding
    view: int = 0  # number of the view: `epoch mod views`, or the epoch itself
    unreadable: tuple[int, ...] = ()  # ids of images that could not be decoded; their weight is 0
    crc: tuple[int, ...] = ()  # `Sample.crc` of each image; empty if unknown. Only the host reads it.
    loading: Loading = UNKNOWN  # of this batch; the loader adds it up
    teacher_outputs: TeacherOutputs | None = None  # known already, from a cache or a scoring pass
    small: bool = False  # `image` has the size of `data.progressive`
    whole: Tensor | None = None  # then the same views at full size, where a teacher will predict some of them

    @property
    def labelled(self) -> Tensor:
        """Whether an image, and its partner where it is mixed, has a label, bool [B]."""
        whole = torch.minimum(self.label, self.partner_label)
        return (whole.view(len(whole), -1) >= 0).all(1)

    @classmethod
    def of(cls, image: Tensor, label: Tensor, ids: Tensor | None = None) -> Batch:
        """Make a batch of unmixed images [B, ...] of weight 1; labels are int64 [B] or int8 [B, C], `ids` int64 [B]."""
        ones = torch.ones(len(label), device=label.device)
        numbers = torch.arange(len(label), device=label.device)
        return cls(numbers if ids is None else ids, image, label, label, ones, ones)

    def map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in TENSORS}
        if self.teacher_outputs is not None:
            moved["teacher_outputs"] = self.teacher_outputs.map(move)
        if self.whole is not None:
            moved["whole"] = move(self.whole)
        return replace(self, **moved)

    def take(self, rows: Tensor) -> Batch:
        """Return some rows of the batch, int64 [K]; on the CPU where it has `crc` or missing outputs."""
        index = rows.to(self.image.device, non_blocking=True)
        taken = self.map(lambda tensor: tensor.index_select(0, index))
        if self.crc:
            taken = replace(taken, crc=tuple(self.crc[row] for row in rows.tolist()))
        if self.teacher_outputs is None or not self.teacher_outputs.missing:
            return taken
        ids = dict(self.teacher_outputs.missing)
        missing = tuple((new, ids[old]) for new, old in enumerate(rows.tolist()) if old in ids)
        assert taken.teacher_outputs is not None
        return replace(taken, teacher_outputs=replace(taken.teacher_outputs, missing=missing))

    @classmethod
    def cat(cls, batches: Sequence[Batch]) -> Batch:
        """Concatenate batches of one view; teacher outputs are kept if all batches have them."""
        joined: dict[str, Any] = {n: torch.cat([getattr(batch, n) for batch in batches]) for n in TENSORS}
        known = [batch.teacher_outputs for batch in batches if batch.teacher_outputs is not None]
        joined["teacher_outputs"] = TeacherOutputs.cat(known) if len(known) == len(batches) else None
        if any(batch.whole is not None for batch in batches):  # rows without one have outputs
            sized = next(batch.whole for batch in batches if batch.whole is not None)
            empty = (sized.new_zeros(len(batch.ids), *sized.shape[1:]) for batch in batches)
            wholes = [one if batch.whole is None else batch.whole for one, batch in zip(empty, batches, strict=True)]
            joined["whole"] = torch.cat(wholes)
        joined["unreadable"] = tuple(id for batch in batches for id in batch.unreadable)
        joined["crc"] = tuple(c for batch in batches for c in batch.crc) if all(batch.crc for batch in batches) else ()
        return replace(batches[0], **joined)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; torch's DataLoader calls this by name."""
        return self.map(lambda tensor: tensor.pin_memory() if tensor.numel() else tensor)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a model for a batch."""

    logits: Tensor  # [B, C], raw, any float dtype. [B, 0] of a model without classes: one that gives features alone.
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """Features that a loss needs, by name: "pooled" [B, D], before the classifier; "tokens" [B, N, D], of the patches
    or the places of a feature map, row by row. Of several teachers, those of `teacher.also[i]` end in `.i+1`:
    "pooled.1"."""

    @property
    def main(self) -> Tensor:
        """The logits, or the first features of a model without classes."""
        return self.logits if self.logits.shape[1] else next(iter(self.features.values()), self.logits)

    def of(self, member: int) -> Outputs:
        """Return the outputs with the features of one of several teachers alone, under their plain names."""
        if not any("." in name for name in self.features):
            return self
        named = {tuple(name.partition(".")[::2]): tensor for name, tensor in self.features.items()}
        end = str(member) if member else ""
        return Outputs(self.logits, {name: tensor for (name, number), tensor in named.items() if number == end})

    def map(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        return Outputs(change(self.logits), {name: change(tensor) for name, tensor in self.features.items()})

    @classmethod
    def cat(cls, parts: Sequence[Outputs]) -> Outputs:
        """Concatenate the outputs of several batches, with the features that all of them have."""
        names = [name for name in parts[0].features if all(name in part.features for part in parts)]
        features = {name: torch.cat([part.features[name] for part in parts]) for name in names}
        return cls(torch.cat([part.logits for part in parts]), features)


@dataclass(frozen=True, slots=True)
class TeacherOutputs:
    """The teacher's outputs for a batch that are known before its forward."""

    outputs: Outputs
    missing: tuple[tuple[int, int], ...] = ()  # (row, id) of the images without outputs; their rows in `outputs` are 0

    def map(self, change: Callable[[Tensor], Tensor]) -> TeacherOutputs:
        return replace(self, outputs=self.outputs.map(change))

    @classmethod
    def cat(cls, parts: Sequence[TeacherOutputs]) -> TeacherOutputs:
        missing, start = [], 0
        for part in parts:
            missing += [(start + row, id) for row, id in part.missing]
            start += len(part.outputs.logits)
        return cls(Outputs.cat([part.outputs for part in parts]), tuple(missing))


@dataclass(frozen=True, slots=True)
class Dims:
    """The shape of a loss's inputs: the sizes of learned projectors, and the classes."""

    num_classes: int
    student_features: int  # width of the pooled features; 0 where no loss needs them
    teacher_features: int  # the same; 0 where the run has no teacher
    student_tokens: tuple[int, int] = (0, 0)  # number N and width D of the tokens; (0, 0) where no loss needs them
    teacher_tokens: tuple[int, int] = (0, 0)
    classes: tuple[str, ...] = ()  # their names; empty: not known
    labels: Callable[[], Tensor] | None = None
    """Return every training image's label, as in a batch, int64 [num_images]; None: not known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The images of an epoch, in order, with weights. Equal on all ranks."""

    ids: Tensor  # int64 [N]; N is a multiple of the global batch size
    weights: Tensor  # float32 [N]; 1.0 where images are not reweighted
    steps: int = 0  # exact number of optimizer steps where the sifter's stream drops images. 0: N / batch size.


class Small(NamedTuple):
    """Where an epoch's plan shows small images."""

    steps: int  # its first so many steps
    asked: Tensor  # bool [N]: the images of which a teacher needs the whole view


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs per image, in milliseconds."""

    teacher: float  # forward of the teacher; 0 where its outputs are cached
    forward: float  # forward of the student without gradients, as in a scoring pass
    step: float  # forward, backward and optimizer of the student
    load: float  # decoding and augmentation, divided by the number of worker processes
    overlapped: bool  # whether workers load while the device computes

    def per_image(self, teacher: float = 1.0, forward: float = 0.0, step: float = 1.0, load: float = 1.0) -> float:
        """Return the milliseconds per image of the dataset; each argument is a number of operations per image."""
        compute = teacher * self.teacher + forward * self.forward + step * self.step
        return max(compute, load * self.load) if self.overlapped else compute + load * self.load


@dataclass(frozen=True, slots=True)
class SiftContext:
    """The dataset of a sifter, and its split into batches and ranks."""

    num_images: int
    batch_size: int  # images per optimizer step, over all ranks
    micro_batch: int
    rank: int
    world_size: int
    seed: int
    labels: Callable[[], Tensor]
    """Return every image's class, int64 [num_images]; called only by sifters that need it. Where images have several
    labels, no such sifter is allowed."""
    reduce_sum: Callable[[Tensor], Tensor]  # of a CPU tensor over the ranks; all must call it
    views: int = 0  # number of views of an image; 0: a new one every epoch
    balance: float = 0.0  # share of the images that an unsifted epoch draws, as many of each class; 0: all
    answers: Callable[[int, Sequence[int]], tuple[Tensor, Tensor]] | None = None
    """Return the teacher's stored logits [K, C] to a view of images, and which are stored, bool [K]."""
    on_device: bool = False  # whether the device has float64 and a sort; else the losses come to the host for a draw

    @classmethod
    def alone(cls, labels: Tensor, batch_size: int, seed: int = 0) -> SiftContext:
        """Return the context of a single process without micro-batches; `labels` is int64 [num_images]."""
        return cls(len(labels), batch_size, batch_size, 0, 1, seed, lambda: labels, lambda tensor: tensor)


@dataclass(frozen=True, slots=True)
class State:
    """Progress of a run. All randomness is a function of (seed, State)."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    step_in_epoch: int = 0  # steps done of the current epoch's plan
    images: int = 0  # images trained on, over all ranks
    seconds: float = 0.0  # training time so far, without evaluation and checkpoints
    cpu_seconds: float = 0.0  # CPU time of the same, over all ranks and their worker processes
    best: float = -1.0  # the best value that decides (`Evaluator.selection_metric`) so far; -1: none
    no_better: int = 0  # evaluations in a row, up to the last one, that were no better than the best before
    unevaluated: bool = False  # stopped before a due evaluation; a resumed run makes it first
    skipped: int = 0  # steps in a row, up to this one, that were not applied because their gradient was not finite
    skipped_in_all: int = 0  # all such steps of the run so far
