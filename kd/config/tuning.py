"""The sections for optimizer, tuning of layers, augmentation and a teacher's fit."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from kd.core.keys import (
    Auto,
    Field,
    Fraction,
    Keys,
    PositiveFraction,
    ProperFraction,
    keys,
)

FROM_SCRATCH = 1e-3  # the student's default too
FROM_PRETRAINED = 5e-5
"""Learning rates for `teacher.fit.lr: 0`. The second is the default of transformers'
TrainingArguments (5.23), whose examples fine-tune ViTs with AdamW; not measured here.
"""


@keys
class Tuning(Keys):
    """Learning rates of single layers, for a network that starts from pretrained
    weights.
    """

    layer_decay: PositiveFraction = 1.0
    """Ratio of a layer's learning rate to that of the next deeper layer
    (arXiv:2003.10555), in timm's layer groups; 0.75 is usual for a ViT. 1.0: one rate
    for all layers.
    """
    head_lr_scale: PositiveFloat = 1.0
    """Factor of the classifier's learning rate."""
    freeze: tuple[str, ...] = ()
    """Name patterns of frozen parameters, such as `patch_embed.*` or `blocks.[0-5].*`
    (fnmatch).
    Batch norm whose parameters are all frozen keeps its statistics.
    """
    freeze_epochs: NonNegativeInt = 0
    """Number of first epochs in which `freeze` holds. 0: the whole run; frozen layers
    at the input then need no backward.
    """


@keys
class OptimizerSection(Keys):
    """The student's optimizer and learning rate schedule."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """The optimizer; fused kernels where the device has them. muon: timm's, which
    orthogonalizes
    the updates of matrices and convolutions (arXiv:2502.16982); AdamW for the rest. Not
    on XLA.
    """
    lr: PositiveFloat = 1e-3
    """Peak learning rate, at the batch size `lr_batch` if `lr_scaling` is set."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How `lr` follows `data.batch_size`. linear: in proportion (arXiv:1706.02677).
    sqrt: by the square root of the ratio, for Adam-like optimizers (arXiv:2205.10343,
    which changes betas and epsilon too; here they stay). none: not at all.
    """
    lr_batch: NonNegativeInt = 0
    """Batch size that `lr` was chosen for; `lr_scaling` needs it. 0: not known."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end, as a share of `lr`."""
    warmup_ratio: Fraction = 0.05
    """Share of the run in which the learning rate rises linearly from 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up, over the progress of the run."""
    weight_decay: NonNegativeFloat = 0.05
    """Decoupled weight decay; not applied to biases, norms, tokens and position
    embeddings.
    """
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """AdamW's decay rates."""
    momentum: Annotated[float, Field(ge=0.0, le=0.9999)] = 0.9
    """SGD's momentum (Nesterov)."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Largest gradient norm. 0: do not clip."""
    on_nonfinite: Literal["error", "skip"] = "error"
    """What to do if a step's gradient is NaN or infinite; it never reaches weights or
    optimizer. skip: leave the step out and count it. More than 10 skipped steps in a
    row end the run; more than half of all steps are an error.
    """
    zero: bool = False
    """Shard the optimizer state over the ranks (ZeRO-1, arXiv:1910.02054)."""
    ema_decay: Annotated[float, Field(ge=0.0, le=0.99999)] = 0.0
    """Decay of the averaged weights (EMA), which are evaluated and exported. 0: no
    averaging.
    """

    def scaled_lr(self, batch_size: int, scaling: str = "") -> float:
        """Return the peak learning rate at a batch size.

        `scaling`: another rule than `lr_scaling`.
        """
        scaling = scaling or self.lr_scaling
        if scaling == "none":
            return self.lr
        ratio = batch_size / self.lr_batch
        return self.lr * (ratio if scaling == "linear" else ratio**0.5)


@keys
class Augment(Keys):
    """Augmentation of a training image; a pure function of (seed, view, image id)."""

    crop_scale: PositiveFraction = 0.35
    """Smallest share of the area that a random crop keeps. 1.0: no random crop."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    jitter: Fraction = 0.3
    """Strength of the random change of brightness, contrast and saturation. 0: none."""
    policy: str = ""
    """A timm auto-augment policy such as `rand-m9-mstd0.5`. Empty: none."""
    erase: Fraction = 0.0
    """Probability that a rectangle of 2 to 33 % of the area becomes noise (random
    erasing, arXiv:1708.04896).
    """
    mixup: NonNegativeFloat = 0.0
    """Alpha of mixup (arXiv:1710.09412). 0: none. Both models see the mixed pixels."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of CutMix (arXiv:1905.04899). 0: none. With mixup on too, each image gets
    one of them.
    """
    mix_probability: Fraction = 1.0
    """Probability that an image is mixed at all, where mixup or cutmix is on."""

    @property
    def mixes(self) -> bool:
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0


@keys
class Fit(Keys):
    """How `kd-train` and `kd-teach` fit a teacher on the labels if it has no
    checkpoint.
    """

    epochs: Auto | NonNegativeInt = 0
    """Passes over the labelled training images. `auto`: by their number
    (kd/core/recommended.py). 0: never fit, unless `steps` is set; a checkpoint is
    required.
    """
    steps: NonNegativeInt = 0
    """Length of the fit in optimizer steps, instead of epochs. 0: use `epochs`."""
    lr: NonNegativeFloat = 0.0
    """Peak learning rate. 0: 1e-3 from scratch, 5e-5 from pretrained weights."""
    weight_decay: NonNegativeFloat = 0.05
    """Decoupled weight decay."""
    batch_size: NonNegativeInt = 0
    """Images per optimizer step. 0: as in `data.batch_size`."""
    label_smoothing: Annotated[float, Field(ge=0.0, le=0.999)] = 0.1
    """Label smoothing of the cross-entropy."""
    warmup_ratio: Fraction = 0.05
    """Share of the fit in which the learning rate rises."""
    evaluate: NonNegativeInt = 0
    """Steps between evaluations, which choose the weights. 0: at the end of
    each epoch.
    """
    patience: NonNegativeInt = 0
    """End after this many evaluations in a row without a new best. 0: never."""
    tuning: Tuning = Tuning()
    """Learning rates of single layers of the teacher, and frozen layers."""
    augment: Augment | None = None
    """Augmentation during the fit, with the keys of `data.augment`. null:
    `data.augment` without mixing, and a random crop keeps at least 0.35 of the area.
    Augmentation strong enough for the student makes a worse teacher.
    """
    seed: NonNegativeInt = 0
    """Seed of the fit. It differs from `run.seed`, so runs of several seeds share a
    teacher.
    """
    folder: str = "runs/teachers"
    """Folder of fitted teachers, one subfolder per content hash; later runs find them
    there.
    """

    def augmented(self, student: Augment) -> Augment:
        """Return the augmentation of the fit, given the student's."""
        if self.augment is not None:
            return self.augment
        return replace(
            student,
            crop_scale=max(student.crop_scale, Augment().crop_scale),
            mixup=0.0,
            cutmix=0.0,
            mix_probability=1.0,
        )

    @property
    def length(self) -> str:
        """Return the length of the fit as text, or "" if nothing is fitted."""
        if self.steps:
            return f"{self.steps} steps"
        return f"{self.epochs} epochs" if self.epochs else ""
