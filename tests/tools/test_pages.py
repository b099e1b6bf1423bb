"""Two pages are written by tools: what is committed is what they print."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name):
    spec = importlib.util.spec_from_file_location(
        f"{name}_tool", ROOT / "tools" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["keys", "results"])
def test_the_committed_page_is_what_the_tool_prints(name):
    assert (ROOT / "docs" / f"{name}.md").read_text() == tool(name).page(), (
        f"run python tools/{name}.py"
    )


def test_the_committed_tables_are_what_the_tool_prints():
    for path, text in tool("results").tables().items():
        assert path.read_text() == text, "run python tools/results.py"


def test_a_claim_follows_from_its_rows():
    results = tool("results")
    rows = [
        {"seed": seed, "arm": arm, "accuracy": value}
        for seed, arm, value in (
            ("0", "a", "3"),
            ("1", "a", "5"),
            ("2", "a", "7"),
            ("0", "b", "2"),
            ("1", "b", "4"),
        )
    ]
    assert results.level("accuracy", arm="a")(rows) == (
        "5.0 ± 5.0 %",
        "3",
    )  # 4.303 * 2 / sqrt(3)
    assert results.gain("a", "b")(rows) == ("+1.0 points", "2")  # seed 2 has no pair
    assert results.ratio("arm", "a", "b", "accuracy")(rows) == ("1.67 times", "3")
    with pytest.raises(SystemExit):
        results.level("accuracy", arm="c")(rows)


def test_the_committed_drawings_are_what_the_tool_draws():
    drawings = tool("drawings")
    for name, draw in drawings.DRAWINGS.items():
        drawn = draw()
        assert (ROOT / "docs" / f"{name}.svg").read_text() == drawn, (
            "run python tools/drawings.py"
        )
        assert "prefers-color-scheme: dark" in drawn


def test_the_drawing_of_what_to_try_first_names_keys_and_the_gains_of_the_story():
    drawn = tool("drawings").try_first()
    keys = re.findall(r"\b([a-z]+(?:\.[a-z_]+)+)(?==|,)", drawn)
    known = (ROOT / "docs" / "keys.md").read_text()
    assert len(keys) > 7
    assert [key for key in keys if f"`{key}" not in known] == []
    # benchmarks/results/speed/story_amd-epyc-2cores_2026-11-28.csv: 13.73 / 6.99
    assert "1.96 times as fast" in drawn


def test_every_file_says_what_it_is():
    for path in (ROOT / "benchmarks").rglob("*.csv"):
        header, rows = tool("results").read(path)
        assert {
            "what",
            "show",
            "command",
            "commit",
            "hardware",
            "versions",
            "date",
        } <= set(header), path.name
        assert path.name.endswith(f"_{header['hardware']}_{header['date']}.csv")
        assert rows, path.name


@pytest.mark.parametrize(
    ("texts", "summed", "expected"),
    [
        (["1", "2", "3"], False, "1, 2, 3"),
        (["2", "2"], False, "2"),
        (["1", "2", "3", "10"], False, "2.5 (1 to 10)"),
        (["1", "2"], True, "3"),
        (["True", "True", ""], False, "True"),
        (["", ""], False, ""),
    ],
)
def test_a_cell_shows_its_raw_values(texts, summed, expected):
    assert tool("results").cell(texts, summed) == expected


def test_rows_are_grouped_and_filtered():
    raw = (("a", "1", "9"), ("a", "2", "4"), ("b", "2", "5"))
    rows = [{"arm": arm, "epoch": epoch, "ms": ms} for arm, epoch, ms in raw]
    lines = [*tool("results").table({"show": "arm: ms | epoch=2"}, rows)]
    assert lines == ["| arm | ms |", "|---|---:|", "| a | 4 |", "| b | 5 |"]


@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("docs/*.svg"), *ROOT.glob("benchmarks/**/*.svg")],
    ids=lambda path: path.stem,
)
def test_a_picture_has_its_colours_in_it(path):
    """Image viewers know no CSS variables, and draw them black."""
    assert "var(" not in path.read_text()
