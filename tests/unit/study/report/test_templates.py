"""Names of strangers stay text on every page: no markup, no template, no line of their
own.
"""

import re

import pytest
from charted import charted
from PIL import Image

from kd.core.types import Decoded
from kd.deploy.export.receipt import plain
from kd.files.templates import html_table, render_template
from kd.parts.tasks import single_label
from kd.study.audit.lists import Seen, page
from kd.study.report.page import render
from kd.study.report.record import Picture, Predictions, RunRecord

HOSTILE = (
    "{{ 7*7 }}",
    "{% include 'page.css' %}",
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "a\n</title><b>",
    "\u202egnp.exe",
    "datum.value); alert(1); (",
)
MARKUP = ("<script", "<img src=x", "</title><b>", ">49<")


def run(name: str) -> RunRecord:
    """A run in which each name of a stranger is `name`."""
    classes = [name, "pear"]
    picture = Picture(
        name, name, name, 0.9, "pear", 0.6, "data:image/gif;base64,R0lGODlh"
    )
    answers = Predictions(
        classes,
        [0, 1] * 20,
        [0] * 40,
        [0, 1] * 20,
        40,
        [picture],
        student_sure=[0.5] * 40,
    )
    train = [
        {"step": step, "epoch": 0, "images": step, "seconds": 1.0, "loss": 1.0 / step}
        for step in (1, 2, 3)
    ]
    val = [
        {"step": step, "accuracy": 0.1 * step, "teacher_accuracy": 0.9}
        for step in (1, 2, 3)
    ]
    finding = {
        "rule": name,
        "severity": name,
        "evidence": name,
        "threshold": name,
        "key": name,
        "value": name,
    }
    timeline = [
        {
            "step": 3,
            "steps": 3,
            "wall_ms": 9.0,
            "kind": "steady",
            "ms": {"data": 1.0, name: 2.0},
        }
    ]
    return RunRecord(
        name,
        {"run.name": name, f"data.{name}": name},
        {"classes": classes, "environment": {"command": name}},
        train,
        val,
        [],
        single_label.SCORES,
        timeline={0: timeline},
        answers=answers,
        findings=[{**finding, "advice": f"Set {name}={name} or {name}"}],
        notes=[name],
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_report_shows_a_strangers_name_and_runs_nothing_of_it(name):
    plain_page = render([run("x")])
    plain_pair = render([run("x"), run("y")])
    for text, usual in (
        (render([run(name)]), plain_page),
        (render([run(name), run("y")]), plain_pair),
    ):
        assert not [markup for markup in MARKUP if markup in text]
        tags = [
            re.sub(r'(id|class)="[^"]*"', "", tag)
            for tag in re.findall(r"<[a-z]+", text)
        ]
        assert set(tags) == set(re.findall(r"<[a-z]+", usual))
        assert text.count("<title>") == 1
        assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in text
        assert "{{ 7*7 }}" in text or name != "{{ 7*7 }}"


@pytest.mark.parametrize("name", HOSTILE)
def test_an_audit_shows_a_strangers_name_and_runs_nothing_of_it(name):
    class Photos:
        """A split of one image."""

        def decode(self, id: int) -> Decoded:
            return Decoded(Image.new("RGB", (8, 8)), 1)

    text = page(name, [(name, [Seen("val", name, name, 0)])], {"val": Photos()}, name)  # pyright: ignore
    assert not [markup for markup in MARKUP if markup in text]
    assert text.count("<img") == 1
    assert "{{ 7*7 }}" in text or name != "{{ 7*7 }}"


def test_a_table_is_escaped_and_the_card_runs_no_template():
    assert html_table([]).strip() == ""
    table = html_table([{"<b>": "{{ 7*7 }}"}])
    assert "&lt;b&gt;" in table
    assert "{{ 7*7 }}" in table
    assert plain("{{ 7*7 }}") == "{{ 7\\*7 }}"


def test_a_missing_value_is_an_error_and_no_empty_text(tmp_path):
    (tmp_path / "page.html.jinja").write_text("{{ facts.name }}")
    assert render_template(tmp_path / "page.html.jinja", facts={"name": "<"}) == "&lt;"
    with pytest.raises(KeyError, match="name"):
        render_template(tmp_path / "page.html.jinja", facts={})


def test_a_run_of_the_name_of_its_teacher_keeps_both_in_the_numbers():
    curves = charted(render([run("teacher")]), "Validation accuracy")
    assert curves["teacher"] == [0.1, 0.2, 0.3]
    assert curves["teacher (level)"] == [0.9] * 3
