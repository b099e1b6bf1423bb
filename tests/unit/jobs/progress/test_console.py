"""Progress, tables and percentages."""

import io
import re
import statistics
from contextlib import suppress

import pytest
from rich.console import Console as RichConsole

from kd.core.text import markdown_table
from kd.core.types import State
from kd.jobs.progress.console import Console
from kd.parts.tasks.embedding import SCORES as EMBEDDING
from kd.parts.tasks.label_sets import SCORES as LABEL_SETS
from kd.parts.tasks.single_label import SCORES as SINGLE_LABEL

TRAIN = {
    "loss": 1.5,
    "kl": 1.25,
    "accuracy": 0.5,
    "lr": 1e-3,
    "images_per_second": 123.4,
    "grad_norm": 2.0,
}
VAL = {"accuracy": 0.934, "teacher_accuracy": 0.95, "agreement": 0.9}


def test_plain_lines_where_there_is_no_terminal(capsys):
    with Console("food", scores=SINGLE_LABEL) as console:
        for step in range(1, 5):
            console.step(State(step=step), step / 8)
        console.log(
            "train", State(step=4), {**TRAIN, "step_ms": 2000.0, "data_wait": 0.1}
        )
        console.log("val", State(step=4), VAL)
        console.info("[/bold] and {brackets}")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "food | step 4 (50 %, about 8 s left) | loss 1.500 kl 1.250 lr 0.001 123"
        " images/s"
    )
    assert second.endswith("| val accuracy 93.4 % (teacher 95.0 %), agreement 90.0 %")
    assert third == "[/bold] and {brackets}"


def test_quiet_ranks_print_nothing(capsys):
    with Console("food", quiet=True) as console:
        console.info("hello")
        console.step(State(step=1), 0.5)
        console.log("train", State(step=1), TRAIN)
    assert capsys.readouterr().out == ""


def in_terminal(name: str) -> tuple[Console, io.StringIO]:
    """Return a console in a terminal of 80 columns, and what the terminal shows."""
    text = io.StringIO()
    console = Console(name)
    console._console = RichConsole(
        file=text, force_terminal=True, width=80, color_system=None
    )
    return console, text


def test_a_terminal_of_80_columns_shows_a_whole_bar_and_keeps_evaluations():
    console, text = in_terminal("food")
    console.scores = SINGLE_LABEL  # known after the set-up
    with console:
        console.log("train", State(step=13000), TRAIN)
        console.step(State(step=13000), 0.25)
        console.log("val", State(step=13000), VAL)
        console.info("a line")
    output = text.getvalue()
    assert "a line\n" in output
    assert (
        "food | step 13000 | val accuracy 93.4 % (teacher 95.0 %), agreement 90.0 %\n"
        in output
    )
    assert re.search("food .* 100 % step 13000, loss 1.500, 123 images/s", output)


@pytest.mark.parametrize(("fails", "end"), [(False, "100 %"), (True, "95 %")])
def test_a_bar_ends_at_100_percent_where_the_run_did(fails, end):
    """Also where it ended early."""
    console, text = in_terminal("food")
    with suppress(KeyError), console:
        console.step(State(step=1), 0.95)
        if fails:
            raise KeyError
    assert re.findall(r"\d+ %", text.getvalue())[-1] == end


def test_a_name_with_brackets_is_shown_as_it_is():
    console, text = in_terminal("kl[fast] [/b]")
    with console:
        console.step(State(step=1), 0.5)
    assert "kl[fast] [/b]" in text.getvalue()


def test_a_notebook_gets_plain_lines(capsys, monkeypatch):
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    with Console("food", scores=SINGLE_LABEL) as console:
        console.log("val", State(step=4), VAL)
    assert capsys.readouterr().out.startswith("food | step 4 | val accuracy")


@pytest.mark.parametrize(
    ("scores", "row", "text"),
    [
        (SINGLE_LABEL, {"accuracy": 0.5}, "accuracy 50.0 %"),
        (
            SINGLE_LABEL,
            {"agreement": 0.9, "kl": 0.25},
            "agreement 90.0 %, KL 0.2500 nats",
        ),
        (
            LABEL_SETS,
            {"map": 0.5, "teacher_map": 0.75, "agreement": 0.25},
            "mAP 50.0 % (teacher 75.0 %), agreement 25.0 %",
        ),
        (
            EMBEDDING,
            {
                "agreement": 0.9,
                "knn": 0.5,
                "teacher_knn": 0.75,
                "teacher_probe": 0.5,
                "teacher_knn_2": 0.25,
            },
            (
                "nearest neighbours 50.0 % (teacher 75.0 %, teacher 2 25.0 %),"
                " agreement 0.9000"
            ),
        ),
        (None, {"accuracy": 0.5, "steps": 3.0}, "accuracy 0.500 steps 3"),
    ],
)
def test_a_validation_row_is_one_line(capsys, scores, row, text):
    Console("food", scores=scores).log("val", State(step=4), row)
    assert capsys.readouterr().out == f"food | step 4 | val {text}\n"


def test_the_table_is_aligned_markdown():
    rows = [
        {"model": "teacher", "accuracy": "97.0 %"},
        {"model": "student", "accuracy": "9.1 %"},
    ]
    assert markdown_table(rows).splitlines() == [
        "| model   | accuracy |",
        "| ------- | -------: |",
        "| teacher |   97.0 % |",
        "| student |    9.1 % |",
    ]


def seconds_left(
    capsys, lengths, cold_epochs, row_steps, filled, cold=3.0, warm=0.5
) -> dict[int, float]:
    """Train epochs of so many steps, the first `cold_epochs` at `cold` seconds a step;
    return the seconds told to be left by step, as rows of `row_steps` steps tell them.
    """
    console = Console("food", scores=SINGLE_LABEL, filled=filled)
    elapsed = 0.0
    step = 0
    window = []
    for epoch, length in enumerate(lengths):
        for number in range(length):
            seconds = cold if epoch < cold_epochs else warm
            step += 1
            window.append(seconds)
            elapsed += seconds
            ends_epoch = number + 1 == length
            state = State(
                step,
                epoch + ends_epoch,
                0 if ends_epoch else number + 1,
                images=8 * step,
                seconds=elapsed,
            )
            console.step(state, step / sum(lengths))
            if step % row_steps == 0:
                mean = sum(window) / len(window)
                row = TRAIN | {
                    "images_per_second": 8 / mean,
                    "data_wait": 0.0,
                    "ms_forward": 1000 * warm,
                }
                row |= {
                    "step_ms": 1000 * statistics.median(window),
                    "ms_teacher": 1000 * (mean - warm),
                }
                console.log("train", state, row)
                window = []
    lines = re.findall(
        r"step (\d+) \(\d+ %, about (?:(\d+) min )?([\d.]+) s left\)",
        capsys.readouterr().out,
    )
    return {
        int(step_told): 60 * int(minutes or 0) + float(seconds)
        for step_told, minutes, seconds in lines
    }


@pytest.mark.parametrize("row_steps", [5, 15, 20, 30])
def test_the_time_left_counts_cold_steps_as_cold_and_warm_ones_as_warm(
    capsys, row_steps
):
    """A cache of two views is filled in the first two of ten epochs: 56 s were told
    where 21 s came, since the cold steps stayed in the mean, above all in rows as long
    as an epoch or longer.
    """
    remaining = seconds_left(capsys, [10] * 10, 2, row_steps, {"teacher": 0.2})
    assert remaining == {
        step: pytest.approx(
            3.0 * max(0, 20 - step) + 0.5 * (100 - max(20, step)), abs=0.5
        )
        for step in remaining
    }
    assert list(remaining) == list(range(row_steps, 100, row_steps))


def test_the_time_left_is_that_of_recent_steps_and_of_the_sifters_plan(capsys):
    """Epochs of 10, 6, 6 and 10 steps. The teacher runs in the first one only, which
    the console does not know.
    """
    remaining = seconds_left(capsys, (10, 6, 6, 10), 1, 2, {})
    assert remaining == {
        step: pytest.approx((3.0 if step <= 10 else 0.5) * (32 - step), abs=0.5)
        for step in remaining
    }


def test_a_resumed_run_counts_its_own_steps_alone(capsys):
    console = Console("food", scores=SINGLE_LABEL, filled={"teacher": 0.2})
    for step in range(71, 76):
        console.step(
            State(step, 7, step - 70, images=8 * step, seconds=500.0 + step), step / 100
        )
    row = TRAIN | {
        "images_per_second": 8.0,
        "step_ms": 1000.0,
        "data_wait": 0.0,
        "ms_forward": 1000.0,
    }
    console.log("train", State(75, 7, 5, images=600, seconds=575.0), row)
    assert "(75 %, about 25 s left)" in capsys.readouterr().out
