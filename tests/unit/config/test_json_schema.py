"""The schema that editors read: a real validator accepts it, and with it what kd
accepts.
"""

import json
import subprocess
import sys

import jsonschema
import pytest
import yaml

from kd.config import load, to_dict
from kd.config.explain import explain
from kd.config.json_schema import json_schema
from kd.config.renamed import KEYS
from kd.config.yaml_text import examples

VALIDATOR = jsonschema.Draft7Validator(json_schema())
MINIMAL = {
    "data": {"kind": "imagefolder", "root": "photos"},
    "student": {"model": "vit_tiny_patch16_224"},
    "losses": [{"kind": "ce"}],
}


def errors_of(raw, schema=VALIDATOR) -> list[str]:
    return [error.message for error in schema.iter_errors(raw)]


def test_it_is_a_schema():
    jsonschema.Draft7Validator.check_schema(VALIDATOR.schema)
    assert json.loads(json.dumps(VALIDATOR.schema)) == VALIDATOR.schema


@pytest.mark.parametrize("name", sorted(examples()))
def test_it_accepts_our_configurations_as_written_and_as_recorded(name, monkeypatch):
    assert not errors_of(yaml.safe_load(examples()[name].read_text()))
    assert not errors_of(json.loads(json.dumps(to_dict(load(name)))))


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"lr": "${oc.env:LR}", "betas": "${run.betas}"}},
        {"run": {"epochs": "auto", "name": 12, "trackers": []}, "optimizer.lr": 0.1},
        {
            "teacher": {
                "model": "a",
                "fit": {"augment": None},
                "also": [{"kind": "onnx", "model": "b.onnx"}],
            }
        },
        {"losses": [{"kind": "mylab.sharp", "power": 3}]},
        {"optimizer": {"warmup": 0.1}, "losses": [{"kind": "relational"}]},  # old names
        {
            "student": {
                "model": "mylab:net",
                "kind": "torch",
                "args": {"a": [1, {"b": None}]},
            }
        },
        {"backend": {"kind": "cpu", "threads": 2}},
    ],
)
def test_it_accepts_what_kd_accepts(sections):
    assert not errors_of({**MINIMAL, **sections})


@pytest.mark.parametrize(
    "sections",
    [
        {"backend": {"kind": "cuda", "threads": 2}},
        {"student": {"model": "a", "kind": "onnx"}},
        {"losses": [{"kind": "mylab"}]},
        {"teacher": {"fit": {"augment": {"flop": 1}}}},
        {"teacher": {"also": [{"model": "b", "weight": 0}]}},
        {"optimizer": {"lr": "fast"}},
    ],
)
def test_it_refuses_what_kd_refuses(sections):
    assert errors_of({**MINIMAL, **sections})


def keys_in(node, definitions) -> set[str]:
    """Return the names of all properties below a node."""
    names: set[str] = set()
    for schema in definitions.values():
        for alternative in [schema, *schema.get("oneOf", [])]:
            names |= alternative.get("properties", {}).keys()
    return names | node["properties"].keys()


def test_every_key_stands_in_it_with_its_meaning():
    schema = VALIDATOR.schema
    missing = {key.rpartition(".")[2] for key, *_ in explain()} - keys_in(
        schema, schema["definitions"]
    )
    assert not missing
    described = schema["definitions"]["OptimizerSection"]["properties"]
    rows = {key: meaning for key, _, _, meaning in explain("optimizer")}
    for key, old in (("warmup_ratio", "warmup"), ("ema_decay", "ema")):
        assert described[key]["description"] == rows[f"optimizer.{key}"]
        assert described[old]["deprecated"]
        assert KEYS["optimizer"][old] == key


def test_a_laboratorys_own_part_stands_in_it(tmp_path, monkeypatch):
    (tmp_path / "mylab.py").write_text("")
    (tmp_path / "schema_lab").mkdir()
    (tmp_path / "schema_lab" / "sharp.py").write_text(
        "from kd.core.facts import LossFacts\n"
        "from kd.core.keys import Field, Keys, keys\n"
        "facts = LossFacts(labels=True, logits='softmax')\n"
        "@keys\n"
        "class Options(Keys):\n"
        "    power: float = Field(2.0, gt=0)\n"
        '    """How sharp."""\n'
        "def build(options, dims):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    raw = {**MINIMAL, "losses": [{"kind": "schema_lab.sharp", "power": 3}]}
    schema = jsonschema.Draft7Validator(json_schema(raw))
    assert not errors_of(raw, schema)
    for wrong in ({"power": 0}, {"powr": 1}):
        assert errors_of(
            {**raw, "losses": [{"kind": "schema_lab.sharp", **wrong}]}, schema
        )
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "schema_lab"
    ]:
        del sys.modules[name]


def test_the_command_prints_it():
    argv = [sys.executable, "-m", "kd", "schema"]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == VALIDATOR.schema
