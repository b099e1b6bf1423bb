"""What code and pages point to exists: files, names, extras, example runs, image
formats.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from kd.cli.__main__ import COMMANDS
from kd.files import pixels
from kd.parts import registry

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "benchmarks" / "README.md",
]
CODE = [
    *(ROOT / "kd").rglob("*.py"),
    *(ROOT / "tools").glob("*.py"),
    *(ROOT / "configs").glob("*.yaml"),
]
NOT_A_FILE = {"kd/attempt_", "tools/mutants.txt"}
"""A key of torch's store; what `make mutants` writes."""
EXTRA = re.compile(r"pip install '(\S*?)\[([\w,-]+)\]'")


def lines(paths):
    """Yield file, number and text of each line."""
    for path in sorted(paths):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module, or a module or class has it."""
    names = name.split(".")
    for end in range(len(names), 0, -1):
        try:
            value = importlib.import_module(".".join(names[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in names[end:]:
            if attribute in getattr(value, "__annotations__", {}):
                return True
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False


def test_a_file_that_the_code_names_exists():
    wrong = []
    for place, line in lines(CODE):
        for name in re.findall(
            r"(?<![/\w])(?:kd|docs|tests|tools|configs|examples|benchmarks)/[\w./*-]*[\w*]",
            line,
        ):
            if name not in NOT_A_FILE and not [*ROOT.glob(name.rstrip("*") + "*")]:
                wrong.append(f"{place}: {name}")
    assert not wrong


def test_a_heading_that_the_code_names_exists():
    """docs/PAGE.md, "HEADING"."""
    wrong = []
    for place, line in lines(CODE):
        for page, heading in re.findall(r'(docs/\w+\.md), \\?"([^"\\]+)\\?"', line):
            if not re.search(
                rf"^#+ {re.escape(heading)}$",
                (ROOT / page).read_text(),
                re.MULTILINE | re.IGNORECASE,
            ):
                wrong.append(f"{place}: {page}, {heading}")
    assert not wrong


def test_a_dotted_name_in_backticks_exists():
    files = {"kd.json", "kd.serve", "kd.predict"}  # a file of an export; loggers
    places = [
        (place, name)
        for place, line in lines(CODE)
        for name in re.findall(r"`(kd(?:\.\w+)+)`", line)
    ]
    assert len(places) > 30
    assert not [
        f"{place}: {name}"
        for place, name in places
        if name not in files and not resolves(name)
    ]


def test_an_extra_that_is_advised_exists_and_is_installed_from_a_clone():
    """An index that knows a package named kd has another one."""
    extras = re.findall(
        r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    wrong = []
    for place, line in lines([*CODE, *PAGES]):
        for source, names in EXTRA.findall(line):
            ours = source.startswith((".", "PATH/", "{")) or source == "torch"
            if not ours or not {*names.split(",")} <= {*extras, "{extra}"}:
                wrong.append(f"{place}: pip install '{source}[{names}]'")
        if re.search(r"pip install kd\b", line) and not place.startswith(
            "CONTRIBUTING.md"
        ):  # which says why not
            wrong.append(f"{place}: pip install kd")
    assert not wrong


def test_the_runs_of_examples_are_of_configurations_or_losses_that_exist(command):
    """`kd-report runs/vit_food runs/zscore` named a loss that had been removed."""
    run_names = {path.stem for path in (ROOT / "configs").glob("*.yaml")} | {
        *registry.names("losses"),
        "food",
        "photos",
    }
    texts = {name: command(name, "--help").out for name in COMMANDS}
    named = {
        (name, run)
        for name, text in texts.items()
        for run in re.findall(r"\bruns/(\w+)", text)
    }
    assert len(named) > 3
    assert not {(name, run) for name, run in named if run not in run_names}


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/guide.md"])
def test_the_formats_of_images_are_all_named(page):
    text = (ROOT / page).read_text().lower()
    assert not [
        name
        for name in (*pixels.FORMATS, "avif")
        if name.lower().replace("heif", "heic") not in text
    ]
