"""Intervals of a run's actions: the section `run.every`."""

from pydantic import NonNegativeInt, PositiveInt

from kd.core.keys import Keys, keys


@keys
class Intervals(Keys):
    """Intervals in optimizer steps. Each action also happens at the last step."""

    log: PositiveInt = 20
    """Write a row of training metrics, which waits for the device."""
    evaluate: NonNegativeInt = 0
    """Evaluate on the validation split. 0: at the end of each epoch."""
    checkpoint: NonNegativeInt = 0
    """Write a checkpoint. 0: at each evaluation."""
