"""Every configuration that we ship is well-formed and says how to run it and what to
expect.
"""

import re
from pathlib import Path

import pytest

from kd import config
from kd.core.recommended import stored_views

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize(
    "path", CONFIGS, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_config_loads_and_survives_a_round_trip(path, tmp_path):
    loaded = config.load(path)
    (tmp_path / "again.yaml").write_text(config.dump(loaded))
    assert config.load(tmp_path / "again.yaml") == loaded


@pytest.mark.parametrize(
    "path", CONFIGS, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_it_has_the_recommended_views_or_says_that_it_has_not(path):
    loaded = config.load(path)
    views = loaded.teacher.cache.num_views
    passes = re.search(r"steps: \d+  # (\d+) (?:passes|epochs)", path.read_text())
    epochs = 0
    if passes:
        epochs = int(passes[1])
    elif not loaded.run.steps:
        epochs = int(loaded.run.epochs)
    if views and epochs:
        assert views == stored_views(epochs) or "`auto` would be" in path.read_text()


@pytest.mark.parametrize(
    "path", CONFIGS, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_header_gives_the_command_and_the_expectation(path):
    header = "".join(
        line for line in path.read_text().splitlines(True) if line.startswith("#")
    )
    name = path.relative_to(ROOT).as_posix()
    assert f"kd-train {name}" in header or f"kd.cli train {name}" in header
    assert "Expect:" in header
    measured = all(word in header for word in ("%", "commit"))
    assert measured or "NOT MEASURED" in header, (
        "a number without command, commit, hardware and date does not exist"
    )
