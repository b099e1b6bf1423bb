"""The length of a run, as it is foretold and shown, beside the steps that it makes."""

import re

import pytest
from pieces import teacher_at

from kd import config
from kd.engine.loop import train
from kd.jobs.description import describe
from kd.setup.recipe import resolve

KINDS = {
    "none": (),
    "balanced": ("data.balance=0.5",),
    "history": ("sifter.kind=history", "sifter.keep=0.5"),
    "random": ("sifter.kind=random", "sifter.keep=0.3", "sifter.warmup=0"),
    "relative": ("sifter.kind=relative", "sifter.sift_delay=6"),
    "its delay is longer": ("sifter.kind=relative", "sifter.sift_delay=60"),
    "teacher": ("sifter.kind=teacher", "sifter.keep=0.5", "teacher.cache.views=2"),
    "steps": ("run.steps=11", "sifter.kind=history", "sifter.keep=0.5"),
}


class Seen:
    """A logger that keeps the shares that it was shown."""

    def __init__(self) -> None:
        self.shares = []

    def step(self, state, progress):
        self.shares.append((state.step, progress))

    def log(self, kind, state, values):
        """Nothing."""

    def info(self, text):
        """Nothing."""


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS)
def test_the_length_that_check_says_is_that_of_the_run(
    make, settings, teacher, tmp_path, overrides
):
    """Issue 62: 350 steps were foretold where a sifter made 238, and the last step was
    shown as 99 %.
    """
    settings["teacher"] = {
        **teacher_at(teacher),
        "cache": {"path": str(tmp_path / "answers")},
    }
    settings["run"]["epochs"] = 6
    description = describe(resolve(config.load(settings, overrides)))
    logger = Seen()
    built = make(*overrides, logger=logger)
    state = train(built.run)
    steps, epochs = re.findall(
        r"length    (\d+) steps of 8 images \(([\d.]+) epochs?\)", description
    )[0]
    assert int(steps) == state.step
    assert float(epochs) == pytest.approx(
        state.epoch + state.step_in_epoch / 4,
        abs=0.51 if "run.steps=11" in overrides else 1e-9,
    )
    assert [share for _, share in logger.shares] == pytest.approx(
        [step / state.step for step, _ in logger.shares]
    )
    assert logger.shares[-1] == (state.step, 1.0)
