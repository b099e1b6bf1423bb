"""Pages, and the strings and docstrings of kd/, are in plain words: the phrases of
tests/words.py are not in them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from words import faults, prose

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "benchmarks/README.md",
        )
    ),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "keys"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_phrase_that_readers_stop_at(page):
    assert not faults(prose(page.read_text()))


def test_strings_and_docstrings_of_kd_have_no_such_phrase():
    wrong_places = {}
    for path in sorted((ROOT / "kd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and (wrong := faults(node.value))
            ):
                wrong_places[f"{path.relative_to(ROOT)}:{node.lineno}"] = wrong
    assert not wrong_places


@pytest.mark.parametrize(
    "text",
    [
        "25 labels a class",
        "12 ms a step",
        "the teacher answers twice",
        "nobody asked the teacher",
        "One of the two. Leave one out.",
        "the images that tell what was measured",
        "guessing has 4 %",
    ],
)
def test_a_phrase_is_found(text):
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "25 labels per class",
        "the loss is a part of the step",
        "as a class of its own",
        "it returns a view of the image",
    ],
)
def test_plain_words_are_left_alone(text):
    assert not faults(text)
