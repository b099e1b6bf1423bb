"""Sifting in the Hugging Face `Trainer`, by duck typing: transformers is not imported."""

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

    As in smart sifting, the loader has no length. Set `max_steps`, or `set_epochs=True` to train for
    `num_train_epochs`: then `max_steps` becomes the exact number of steps after sifting, so that the learning rate
    decays fully. Smart sifting sets it to the largest integer, with which the rate never decays.

    Not handled: `resume_from_checkpoint` restores weights and step count, but starts a new epoch with an empty window.
    Batches of a sifted loader cannot be skipped, so `ignore_data_skip` is set.

    Args:
        trainer: a `transformers.Trainer`. During training, `trainer.sifting_dataloader` is the loader.
        sift_config: see `SiftingDataloader`.
        loss: an object with `loss(model, transformed_batch, original_batch)`.
        set_epochs: train for `num_train_epochs`.
        options: further arguments of `SiftingDataloader`.

    Raises:
        SiftConfigValidationException: at the start of training, with `set_epochs`, if the loader's length is unknown.
    """
    original = trainer.get_train_dataloader

    def get_train_dataloader() -> SiftingDataloader:
        loader = SiftingDataloader(sift_config, original(), trainer.model, loss, **options)
        if set_epochs:
            trainer.args.max_steps = _steps(loader, trainer.args)
        # The Trainer would count epochs by the length of the first one, and stop early after a delay.
        loader.sized = False
        trainer.sifting_dataloader = loader
        return loader

    trainer.args.ignore_data_skip = True
    trainer.get_train_dataloader = get_train_dataloader


def _steps(loader: SiftingDataloader, args: Any) -> int:
    """Return the optimizer steps of all epochs; an incomplete gradient accumulation at the end of one is no step."""
    epochs, accumulate = args.num_train_epochs, args.gradient_accumulation_steps
    num_full = int(epochs)
    try:
        lengths = loader.epoch_lengths(num_full + 1)
    except TypeError:
        raise SiftConfigValidationException(
            "enable_sifting.set_epochs",
            "is True, but the number of batches of an epoch is not known",
            "It needs pick='fixed' and a dataset with a length",
            "Set max_steps in the TrainingArguments instead",
        ) from None
    last = int(lengths[num_full] * (epochs - num_full))
    return max(1, sum(length // accumulate for length in [*lengths[:num_full], last]))
