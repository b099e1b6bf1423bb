"""The sifter of a run: what it costs by the model of the literature, and a delay that
leaves it nothing to do.
"""

import pytest
import torch

from kd.core.types import Costs, SiftContext
from kd.jobs.progress.console import Console
from kd.parts.sifters import history, random, relative
from kd.parts.sifters.none import Everything
from kd.study.sifting import sifting_text


def context() -> SiftContext:
    return SiftContext.alone(torch.zeros(64, dtype=torch.int64), 16)


def costs(teacher: float, load: float = 0.0, overlapped: bool = False) -> Costs:
    """A student whose backward costs twice its forward."""
    return Costs(
        teacher=teacher, forward=1.0, step=3.0, load=load, overlapped=overlapped
    )


def saved(sifter, measured: Costs) -> float:
    return 1 - sifter.cost(measured) / measured.per_image()


@pytest.mark.parametrize(
    ("beta", "teacher", "expected"),
    [
        (
            0.5,
            0.0,
            0.0,
        ),  # SageMaker's documented example, teacher's answers stored: exactly nothing
        (1.0, 0.0, 1 / 6),
        (3.0, 0.0, 5 / 12),
        (1.0, 3.0, 1 / 12),  # answers reused: T + S + 3rS of T + 3S
        (0.5, 3.0, 0.0),
    ],
)
def test_relative_costs_what_the_model_says(beta, teacher, expected):
    sifter = relative.build(relative.Options(beta_value=beta), context())
    assert saved(sifter, costs(teacher)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("teacher", [0.0, 1.0, 10.0])
def test_history_and_random_save_what_they_leave_out(teacher):
    for sifter in (
        history.build(history.Options(keep=0.6), context()),
        random.Random(random.Options(), context()),
    ):
        assert saved(sifter, costs(teacher)) == pytest.approx(0.4)


def test_a_run_that_waits_for_its_loader_gains_only_what_is_not_loaded():
    starved = costs(1.0, load=8.0, overlapped=True)
    assert (
        saved(relative.build(relative.Options(beta_value=3.0), context()), starved)
        == 0.0
    )
    assert saved(
        history.build(history.Options(keep=0.5), context()), starved
    ) == pytest.approx(0.5)


def test_check_says_what_a_sifter_saves_or_costs():
    loses = relative.build(relative.Options(beta_value=0.4), context())
    text = sifting_text(loses.cost(costs(0.0)) / costs(0.0).per_image(), 1, 3)
    assert (
        text
        == "a sifted epoch takes 4.8 % longer than a full one. Set sifter.kind=none"
    )
    pays = history.build(history.Options(keep=0.6), context())
    text = sifting_text(pays.cost(costs(1.0)) / costs(1.0).per_image(), 2, 5)
    assert text.startswith("a sifted epoch saves 40.0 % of a full epoch's time")
    assert text.endswith("run.epochs=5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.steps=4"], "the run has 4"),
        (["run.epochs=3", "sifter.repeat_delay_per_epoch=true"], "an epoch has 4"),
    ],
)
@pytest.mark.parametrize(
    ("delay", "expected_type"), [(4, Everything), (3, relative.Relative)]
)
def test_a_delay_as_long_as_the_run_or_each_epoch_sifts_nothing_and_says_so(
    make, delay, expected_type, overrides, message, capsys
):
    run = make(
        "sifter.kind=relative",
        f"sifter.sift_delay={delay}",
        *overrides,
        logger=Console(""),
    ).run
    assert isinstance(run.sifter, expected_type)
    assert (f"waits for 4 steps and {message}" in capsys.readouterr().out) == (
        delay == 4
    )


def test_a_batch_that_does_not_divide_the_images_is_counted_in_whole_steps(
    make, capsys
):
    """36 images in batches of 8 are 4 steps, and 3 epochs are 12, not 13."""
    run = make(
        "sifter.kind=relative",
        "sifter.sift_delay=12",
        "run.epochs=3",
        logger=Console(""),
    ).run
    assert isinstance(run.sifter, Everything)
    assert "waits for 12 steps and the run has 12" in capsys.readouterr().out
