"""tools/mutants.py draws and counts; mutmut itself is not installed with the tests."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools" / "mutants.py"


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants_tool", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_longer_sample_holds_the_shorter_one(mutants):
    names = [f"kd.m.x_f__mutmut_{i}" for i in range(500)]
    short = mutants.sample(names, 50, 0)
    long = mutants.sample(names[::-1], 80, 0)
    assert long[:50] == short
    assert len(set(long)) == 80
    assert mutants.sample(names, 50, 1) != short


def test_the_table_counts_what_ran(mutants):
    codes = {"a": 1, "b": 0, "c": 33, "d": 0, "e": None, "f": 36, "g": -11}
    lines = mutants.table(
        codes,
        [*codes],
        {"d": "the same number", "a": "listed, and noticed all the same"},
    )
    assert lines[:2] == ["missed: b", "missed: c (no test calls it)"]
    assert (
        lines[2]
        == "7 mutants: 3 noticed, 2 missed, 1 equivalent, 1 not run: 60.0 % noticed"
    )


def test_every_pattern_names_a_file(mutants):
    root = PATH.parents[1]
    for pattern in (*mutants.FILES, *mutants.TESTS):
        assert [*root.glob(pattern)], pattern


def test_a_failure_is_shown_without_progress_bars(mutants, tmp_path):
    log = tmp_path / "tests.log"
    log.write_text(
        "first\n"
        + "⠋ Running stats\r⠙ Running stats\r"
        + "FAILED test_x\nrunner returned 1\n",
        "utf-8",
    )
    assert mutants.ending(log, 2).splitlines() == [
        f"The end of {log}:",
        "FAILED test_x",
        "runner returned 1",
    ]
