"""Intervals of a run's actions: the section `run.every`."""

from kd.core.keys import Field, Keys, keys


@keys
class Intervals(Keys):
    """Intervals in optimizer steps. Each action also happens at the last step."""

    log: int = Field(20, ge=1)
    """Write a row of training metrics, which waits for the device."""
    evaluate: int = Field(0, ge=0)
    """Evaluate on the validation split. 0: at the end of each epoch."""
    checkpoint: int = Field(0, ge=0)
    """Write a checkpoint. 0: at each evaluation."""
