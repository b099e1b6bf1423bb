"""The model card says what was measured, of any task, and holds no text that does
something.
"""

from dataclasses import replace

import pytest

from kd.config.schema import TaskSection
from kd.deploy.export.card import card as drawn
from kd.deploy.export.graphs import ExportArtifacts
from kd.deploy.export.receipt import plain, plain_name, receipt
from kd.parts.tasks.embedding import Embedding
from kd.parts.tasks.single_label import SingleLabel


@pytest.fixture
def card(subject, tmp_path):
    """Return the text of a card; `task` and fields of `ExportArtifacts` and of the manifest's
    facts.
    """

    def draw(
        task=None,
        artifacts: ExportArtifacts | None = None,
        facts: dict | None = None,
        license: str = "",
        **fields,
    ):
        source = subject(**fields)
        source = replace(
            source, provenance={**subject().provenance, **source.provenance}
        )
        kind = (task or SingleLabel()).__class__.__module__.rpartition(".")[2]
        recipe = source.recipe.with_(task=TaskSection(kind=kind))
        source = replace(source, recipe=recipe)
        artifacts = artifacts or ExportArtifacts()
        for name in artifacts.parity:
            (tmp_path / name).touch()
        output = {
            "name": "embedding" if isinstance(task, Embedding) else "logits",
            "width": 24,
        }
        output |= {"thresholds": artifacts.thresholds} if artifacts.thresholds else {}
        content = {
            "name": recipe.name,
            "version": "0123",
            "input": {"crop": 0.875, "size": 16},
            "output": output,
        }
        content |= {
            "parity": artifacts.parity,
            "environment": {"machine": {"processor": "a processor"}},
        }
        content |= receipt(source, artifacts, tmp_path, license)
        return drawn({**content, **(facts or {})})

    return draw


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_card_explains_the_outputs(card):
    calibration = {
        "temperature": 1.5,
        "images": 200,
        "ece": 0.1,
        "calibrated_ece": 0.02,
    }
    metrics = {"metrics": {"accuracy": 0.5, "top5": 1.0, "ece": 0.1}}
    text = words(
        card(artifacts=ExportArtifacts(calibration=calibration), provenance=metrics)
    )
    assert "divide them by 1.5, fitted on 200 validation images" in text
    assert "from 10.0 % to 2.0 %" in text
    assert "Every image is assigned one of the classes" in text
    limits = {
        "fig": {"threshold": 0.3, "chosen": True, "f1": 0.8},
        "pear": {"threshold": 0.5, "chosen": False},
    }
    text = words(card(artifacts=ExportArtifacts(thresholds=limits)))
    assert "1 of 2 thresholds have the largest F1" in text
    assert "the mean F1 is 80.0 %" in text
    vectors = words(card(Embedding()))
    assert "pipeline_tag: image-feature-extraction" in vectors
    assert "Output: a vector of 24 numbers" in vectors
    assert "they do not compare with the teacher's" in vectors
    assert "so that an index of the teacher's vectors" in words(
        card(
            Embedding(),
            facts={"output": {"name": "embedding", "width": 24, "space": "teacher"}},
        )
    )


def test_a_name_is_shown_and_does_nothing(card):
    """Issue 49: before, `run.name` came as it was, and the path of a local teacher with
    it.
    """
    name = "a\n# [click](http://b) <script>|`x`"
    text = card(
        facts={"name": name},
        license="mit\nextra: 1",
        teacher="/home/someone/secret/vit",
    )
    (title,) = [line for line in text.splitlines() if line.startswith("# ")]
    assert title == r"# a \# \[click\](http://b) &lt;script&gt;\|\`x\`"
    assert "\nlicense: mit extra: 1\n" in text
    assert "secret" not in text
    assert "distilled from `vit`" in text
    assert plain("vit_food-2 (b)") == "vit_food-2 (b)"
    assert plain("a\u2028b\x1b") == "a b?"
    assert plain_name("local-dir:/home/a/vit") == "vit"
    assert plain_name("hf_hub:timm/vit`x") == "hf_hub:timm/vit'x"


def test_a_class_that_looks_like_a_template_is_text(card):
    text = card(facts={"name": "{{ 7*7 }}{% raw %}"})
    assert "# {{ 7\\*7 }}{% raw %}\n" in text
