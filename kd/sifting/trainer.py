"""Sifting in the Hugging Face `Trainer`, which is only duck-typed here: transformers is never imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kd.sifting.config import RelativeProbabilisticSiftConfig, SiftConfigValidationException
from kd.sifting.loader import SiftingDataloader


def enable_sifting(
    trainer: Any,
    sift_config: RelativeProbabilisticSiftConfig | Mapping[str, Any],
    loss: Any = None,
    set_epochs: bool = False,
    **options: Any,
) -> None:
    """Let a Hugging Face Trainer train on sifted batches.

    As in smart sifting, the Trainer is given no length. Set `max_steps`, or `set_epochs=True` to train for
    `num_train_epochs`: `max_steps` becomes the exact number of steps that sifting leaves of them, so that the
    learning rate decays to its end (smart sifting sets it to the largest integer, with which it never decays).

    Not handled: `resume_from_checkpoint` continues the weights and the steps, but begins an epoch of the data and an
    empty window. Skipping batches of a sifted loader would mean nothing, so `ignore_data_skip` is turned on.

    Args:
        trainer: a `transformers.Trainer`. `trainer.sifting_dataloader` is the loader, once training has begun.
        sift_config: see `SiftingDataloader`.
        loss: an object with `loss(model, transformed_batch, original_batch)`.
        set_epochs: train for `num_train_epochs`.
        options: further arguments of `SiftingDataloader`.

    Raises:
        SiftConfigValidationException: with `set_epochs`, later, if the loader's length is not known.
    """
    original = trainer.get_train_dataloader

    def get_train_dataloader() -> SiftingDataloader:
        loader = SiftingDataloader(sift_config, original(), trainer.model, loss, **options)
        if set_epochs:
            trainer.args.max_steps = _steps(loader, trainer.args)
        # With a length of its first epoch the Trainer would count epochs by it, and stop early after a delay.
        loader.sized = False
        trainer.sifting_dataloader = loader
        return loader

    trainer.args.ignore_data_skip = True
    trainer.get_train_dataloader = get_train_dataloader


def _steps(loader: SiftingDataloader, args: Any) -> int:
    """Return the optimizer steps of all epochs; what is left of an accumulation at the end of one is no step."""
    epochs, accumulate = args.num_train_epochs, args.gradient_accumulation_steps
    whole = int(epochs)
    try:
        lengths = loader.epoch_lengths(whole + 1)
    except TypeError:
        raise SiftConfigValidationException(
            "enable_sifting.set_epochs",
            "is True, but the number of batches of an epoch is not known",
            "It needs pick='fixed' and a dataset with a length",
            "Set max_steps in the TrainingArguments instead",
        ) from None
    part = int(lengths[whole] * (epochs - whole))
    return max(1, sum(length // accumulate for length in [*lengths[:whole], part]))
