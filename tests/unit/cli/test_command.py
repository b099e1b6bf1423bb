"""Options that a dataclass declares once."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from kd.cli.command import add_fields, from_options, new_parser
from kd.core.options import option, whole_number


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of a command."""

    folder: str = option(metavar="FOLDER")
    """Without a flag."""
    inner: str = "not an option"
    count: int = option(2, "N", whole_number(1, 9))
    """How many, at most 5 % of all."""
    body_seconds: float = option(10.0, "S", float, flag="--body-timeout")
    """Of a body."""
    quiet: bool = option(False)
    """Log no requests."""
    onnx: bool = option(True)
    """JSON stays as it is."""


def test_fields_are_options_and_their_docs_the_help():
    parser = new_parser("kd-wanted", "x", "kd-wanted", with_config=False)
    add_fields(parser, Wanted)
    assert from_options(Wanted, parser.read(["here"])) == Wanted(folder="here")
    words = ["here", "--count", "3", "--body-timeout", "2", "--quiet", "--no-onnx"]
    assert from_options(Wanted, parser.read(words)) == Wanted(
        folder="here", count=3, body_seconds=2.0, quiet=True, onnx=False
    )
    help_text = " ".join(parser.format_help().split())
    assert "--count N how many, at most 5 % of all (default 2)" in help_text
    assert "FOLDER without a flag" in help_text
    assert "--onnx, --no-onnx JSON stays as it is (default: yes)" in help_text
    assert "inner" not in help_text


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("here", 0),
        ("here --drain 7", 7),
        ("serve", 5),
        ("serve --drain 7", 7),
        ("serve --drain 0", 0),
    ],
)
def test_a_server_drains_as_long_as_it_was_told_and_5_seconds_in_a_container(
    words, seconds, command, monkeypatch
):
    started = []
    monkeypatch.setattr(
        "kd.deploy.serve.server.serve", started.append
    )  # no server is needed to see what it would do
    assert command("serve", *words.split()).code == 0
    assert [settings.limits.drain_seconds for settings in started] == [seconds]


@pytest.mark.parametrize("text", ["0", "10", "x", "1.5", "-1", "٣"])
def test_a_wrong_value_is_one_line(text, capsys):
    parser = new_parser("kd-wanted", "x", "kd-wanted", with_config=False)
    add_fields(parser, Wanted)
    with pytest.raises(SystemExit):
        parser.read([f"--count={text}"])
    assert f"'{text}' is not a whole number from 1 to 9" in capsys.readouterr().err


def test_pillow_is_told_to_keep_its_pixels_before_it_is_imported():
    """It reads the variable at its import; kd-serve set it after that."""
    code = """
import os, sys
from kd.cli.serving import serve
assert "PIL" not in sys.modules
try:
    serve(["--help"])
except SystemExit:
    pass
from PIL import Image
print(Image.core.get_blocks_max(), file=sys.stderr)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stderr.strip() == "4"
