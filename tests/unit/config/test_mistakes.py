"""The forty commonest mistakes in a configuration: what kd says, and which of them an
editor marks by the schema.
"""

import re
from typing import Any

import jsonschema
import pytest
import yaml
from omegaconf import OmegaConf

from kd.cli.__main__ import main
from kd.config import Config, dump, load, to_dict
from kd.config.json_schema import json_schema
from kd.config.load import apply_overrides
from kd.core.errors import ConfigErrors, KdError

RIGHT: dict[str, Any] = {
    "data": {"kind": "imagefolder", "root": "photos"},
    "student": {"model": "vit_tiny_patch16_224"},
    "losses": [{"kind": "kl"}],
    "teacher": {"model": "vit_small_patch16_224"},
}
LOSSES = "bce, binary_kl, cckd, ce, cosine, dist, dkd, kl, tokens, wttm"
DATA = "csv, food_mini, hf, imagefolder, multilabel, webdataset"
MISTAKES: list[tuple[str, Any, list[tuple[str, tuple[str, ...]]], bool]] = [
    # mistake, sections or override, (key, words) of each error, whether the schema
    # finds it too
    (
        "a section misspelt",
        "optimiser.lr=1",
        [("optimiser", ("no such key", "'optimizer'?"))],
        True,
    ),
    (
        "a key misspelt",
        "optimizer.learning_rate=0.1",
        [("optimizer.learning_rate", ("no such key", " lr,"))],
        True,
    ),
    (
        "a letter missing",
        "run.epoks=3",
        [("run.epoks", ("no such key", "'epochs'?"))],
        True,
    ),
    (
        "another section's key",
        "run.batch_size=32",
        [("run.batch_size", ("no such key", "'data.batch_size'?"))],
        True,
    ),
    (
        "another trainer's key",
        "run.max_epochs=10",
        [("run.max_epochs", ("no such key", "'epochs'?"))],
        True,
    ),
    (
        "another loss's key",
        "losses=[{kind: ce, temperature: 2}]",
        [
            (
                "losses[0].temperature",
                ("no such key", "Kinds with this key: binary_kl, dist, dkd, kl"),
            )
        ],
        True,
    ),
    (
        "another dataset's key",
        "data.train_list=a.csv",
        [("data.train_list", ("Kinds with this key: csv",))],
        True,
    ),
    (
        "a similar key exists",
        "sifter.keep=0.5",
        [("sifter.keep", ("key: history, random, teacher",))],
        True,
    ),
    (
        "a key below",
        "teacher.patience=3",
        [("teacher.patience", ("no such key", "'teacher.fit.patience'?"))],
        True,
    ),
    (
        "a key of a list",
        "run.weight=2",
        [("run.weight", ("no such key", "'losses[].weight'?"))],
        True,
    ),
    (
        "no section",
        "temperature=3",
        [("temperature", ("no such key", "'losses[].temperature'?"))],
        True,
    ),
    ("capitals", "run.SEED=3", [("run.SEED", ("no such key", "'seed'?"))], True),
    (
        "the name of a field",
        "losses=[{kind: kl, options: 3}]",
        [("losses[0].options", ("no such key",))],
        True,
    ),
    (
        "the same elsewhere",
        "sifter={options: {a: 1}}",
        [("sifter.options", ("no such key",))],
        True,
    ),
    (
        "one of a pair",
        "optimizer.betas=[0.9]",
        [("optimizer.betas", ("is [0.9]", "a list of 2 values"))],
        True,
    ),
    (
        "a kind misspelt",
        "losses=[{kind: kll}]",
        [("losses[0].kind", ("is 'kll'", LOSSES, "'kl'?"))],
        True,
    ),
    (
        "no such kind",
        "data.kind=folder",
        [("data.kind", ("is 'folder'", DATA, "'imagefolder'?"))],
        True,
    ),
    (
        "no kind",
        {"data": {"root": "photos"}},
        [("data.kind", ("is missing", DATA))],
        True,
    ),
    ("no data", {"data": None}, [("data.kind", ("is missing", DATA))], False),
    (
        "no root",
        {"data": {"kind": "imagefolder"}},
        [("data.root", ("is missing", "text"))],
        True,
    ),
    (
        "no student",
        {"student": {}},
        [("student.model", ("is missing", "timm model name"))],
        False,
    ),
    (
        "a loss as text",
        "losses=kl",
        [("losses", ("is 'kl'", "list of sections", "- "))],
        True,
    ),
    (
        "losses as a section",
        {"losses": {"kind": "kl"}},
        [("losses", ("list of sections", "- "))],
        True,
    ),
    (
        "a loss by its name",
        {"losses": ["kl"]},
        [("losses[0]", ("is 'kl'", "section with keys", "kind"))],
        True,
    ),
    ("no losses", {"losses": []}, [("losses", ("is empty", LOSSES))], False),
    (
        "a section as text",
        "sifter=none",
        [("sifter", ("is 'none'", "section with keys", "kind"))],
        True,
    ),
    (
        "a section as a list",
        {"optimizer": [{"lr": 0.1}]},
        [("optimizer", ("section with keys", "lr"))],
        True,
    ),
    (
        "text for a number",
        "data.batch_size=many",
        [("data.batch_size", ("'many'", "a whole number > 0"))],
        True,
    ),
    (
        "a fraction",
        "run.epochs=2.5",
        [("run.epochs", ("2.5", "auto or a whole number > 0"))],
        True,
    ),
    (
        "a number misspelt",
        "optimizer.lr=1e-3x",
        [("optimizer.lr", ("'1e-3x'", "a number > 0"))],
        True,
    ),
    (
        "below its range",
        "optimizer.lr=-1",
        [("optimizer.lr", ("is -1", "a number > 0"))],
        True,
    ),
    (
        "a share in percent",
        "data.augment.flip=50",
        [("data.augment.flip", ("is 50", ">= 0 and <= 1"))],
        True,
    ),
    (
        "zero",
        "data.batch_size=0",
        [("data.batch_size", ("is 0", "a whole number > 0"))],
        True,
    ),
    (
        "not a number",
        "optimizer.lr=.nan",
        [("optimizer.lr", ("is nan", "a number > 0"))],
        False,
    ),
    (
        "text for true",
        "optimizer.zero=perhaps",
        [("optimizer.zero", ("'perhaps'", "true or false"))],
        True,
    ),
    (
        "a number for true",
        "run.baseline=1",
        [("run.baseline", ("is 1", "true or false"))],
        True,
    ),
    (
        "no such word",
        "backend.precision=fp16",
        [("backend.precision", ("'fp16'", "auto, fp32, bf16"))],
        True,
    ),
    (
        "true for a word",
        "student.attention=on",
        [("student.attention", ("True", "auto, fused, unfused"))],
        True,
    ),
    (
        "a bare no",
        "run.name=no",
        [("run.name", ("False", "a boolean without quotes", "Quote it"))],
        True,
    ),
    (
        "text for a list",
        "run.trackers=wandb",
        [("run.trackers", ("'wandb'", "a list of text"))],
        True,
    ),
    (
        "three for a pair",
        "optimizer.betas=[0.9,0.99,0.999]",
        [("optimizer.betas", ("a list of 2 values",))],
        True,
    ),
    (
        "a pair out of range",
        "optimizer.betas=[0.9,1.0]",
        [("optimizer.betas", (">= 0 and < 1",))],
        True,
    ),
    (
        "a rule of a part",
        "losses=[{kind: kl, hard: true, temperature: 4}]",
        [("losses[0].temperature", ("must be 1",))],
        False,
    ),
    (
        "a version as a name",
        "run.name=1.10",
        [("run.name", ("1.1", "a number without quotes", "Quote it"))],
        True,
    ),
    (
        "a word as a key",
        "student.pretrained=true",
        [("student.pretrained", ("Did you mean 'init: pretrained'?",))],
        True,
    ),
    (
        "a dotted key in a section",
        {"run": {"every.log": 9}},
        [("run.every.log", ("no such key", "top of a file"))],
        True,
    ),
    (
        "an item of no list",
        "optimizer.betas[0]=0.5",
        [("optimizer.betas", ("a list of 2 values",))],
        True,
    ),
    (
        "a further teacher of none",
        "teacher.also[0].model=x",
        [("teacher.also", ("list of sections", "[{...}]"))],
        True,
    ),
    (
        "a kind for others alone",
        "student.kind=onnx",
        [("student.kind", ("is 'onnx'", "Allowed: timm, torch, transformers"))],
        True,
    ),
    (
        "no such variable",
        "run.name=${oc.env:KD_NONE}",
        [("run.name", ("KD_NONE", "not found", "oc.env"))],
        False,
    ),
    (
        "a key that is not set",
        "run.name=a-${run.seed}",
        [("run.name", ("does not set run.seed",))],
        False,
    ),
    (
        "a checkpoint alone",
        "student.checkpoint=a.pth",
        [("student.init", ("'scratch'", "init: pretrained"))],
        False,
    ),
    (
        "no teacher",
        {"teacher": {}},
        [("teacher.model", ("is missing", "losses[0]", "{kind: ce}"))],
        False,
    ),
    (
        "divided twice",
        "teacher={shard: true, pipeline: 2}",
        [("teacher.shard", ("mutually exclusive",))],
        False,
    ),
    (
        "tested twice",
        "data={test_split: a, test_fraction: 0.2}",
        [("data.test_fraction", ("names a test",))],
        False,
    ),
    (
        "three at once",
        {
            "run": {"seed": -1},
            "optimizer": {"lrr": 1},
            "losses": [{"kind": "kl", "weight": -1}],
        },
        [
            ("run.seed", ("is -1", ">= 0")),
            ("optimizer.lrr", ("no such key", "'lr'?")),
            ("losses[0].weight", ("is -1", ">= 0")),
        ],
        True,
    ),
]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("losses.temperature=3", ("losses is a list", "losses[0]")),
        ("losses[1].kind=ce", ("losses is a list", "from 0")),
        ("losses={kind: kl}", ("losses is a list", "losses=[...]")),
        ("losses=[{kind: kl}", ("not readable as YAML", "expected ',' or ']'")),
        ("optimizer.lr=${oc.env:KD_NO_SUCH}", ("'KD_NO_SUCH' not found",)),
        ("optimizer.lr=???", ("stands for a missing value",)),
    ],
)
def test_an_override_that_cannot_be_set_is_one_line(override, words):
    with pytest.raises(ConfigErrors) as caught:
        load(RIGHT, [override])
    (error,) = caught.value.errors
    assert all(word in str(error) for word in (override.partition("=")[0], *words)), (
        error
    )
    assert "\n" not in str(error)


def errors_of(raw: dict[str, Any]) -> list[KdError]:
    with pytest.raises(KdError) as caught:
        load(raw)
    return getattr(caught.value, "errors", [caught.value])


def plain(change: Any) -> dict[str, Any]:
    """Return the right configuration with a mistake."""
    if isinstance(change, str):
        node = apply_overrides(OmegaConf.create(RIGHT), [change], [])
        return OmegaConf.to_container(node)  # type: ignore[return-value]
    return {
        key: value for key, value in {**RIGHT, **change}.items() if value is not None
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [row[1:3] for row in MISTAKES],
    ids=[row[0] for row in MISTAKES],
)
def test_a_mistake_is_one_line_that_says_what_is_allowed(change, expected):
    errors = {error.config_path: str(error) for error in errors_of(plain(change))}
    assert errors.keys() == {key for key, _ in expected}
    for key, words in expected:
        assert errors[key].startswith(f"{key}: ")
        assert all(word in errors[key] for word in words), errors[key]
        assert "\n" not in errors[key]


@pytest.mark.parametrize(
    ("change", "marked"),
    [row[1::2] for row in MISTAKES],
    ids=[row[0] for row in MISTAKES],
)
def test_an_editor_marks_every_mistake_of_one_key(change, marked):
    """It does not know rules between keys, and a section that is left out."""
    errors = [*jsonschema.Draft7Validator(json_schema()).iter_errors(plain(change))]
    assert bool(errors) == marked, errors
    assert not [*jsonschema.Draft7Validator(json_schema()).iter_errors(RIGHT)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("010", "010"),
        ("2024_01_15", "2024_01_15"),
        ("1:30", "1:30"),
        ("0x1f", "0x1f"),
        ("7", "7"),
    ],
)
def test_a_text_is_kept_as_it_is_written(tmp_path, text, expected):
    """YAML reads 010 as 8 and 2024_01_15 as 20240115."""
    assert load(plain("run.seed=0"), [f"run.name={text}"]).run.name == expected
    (tmp_path / "a.yaml").write_text(
        "data: {kind: imagefolder, root: ROOT}\nstudent: {model: resnet10t}\nlosses:"
        " [{kind: ce}]\n".replace("ROOT", text)
    )
    assert load(tmp_path / "a.yaml").data.options.root == expected


def test_a_number_is_read_from_its_text():
    read = load(plain("run.seed=1_000"), ["optimizer.lr=1e-3", "data.batch_size=032"])
    assert (read.run.seed, read.optimizer.lr, read.data.batch_size) == (1000, 0.001, 32)


def test_an_empty_section_has_its_defaults():
    assert load({**RIGHT, "run": None}).run.seed == 0


OUTSIDE = """
import dataclasses
from collections.abc import Callable
from kd.core.facts import LossFacts
facts = LossFacts(labels=True, logits="softmax")
@dataclasses.dataclass(frozen=True)
class Options:
    power: float = 2.0
    {field}
    def __post_init__(self, start=0):
        assert self.power
def build(options, dims):
    pass
"""


@pytest.mark.parametrize(
    "field",
    [
        "start: dataclasses.InitVar[int] = 3",
        "call: Callable = abs",
        "where: type = int",
    ],
)
def test_a_dataclass_from_outside_may_hold_what_yaml_cannot(
    tmp_path, monkeypatch, field
):
    module = "outside_" + field.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(OUTSIDE.format(field=field))
    (tmp_path / "holder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "holder" / f"{module}.py").write_text(OUTSIDE.format(field=field))
    raw = {**RIGHT, "losses": [{"kind": f"holder.{module}", "power": 3}]}
    assert load(raw).losses[0].options.power == 3
    schema = jsonschema.Draft7Validator(json_schema(raw))
    assert not [*schema.iter_errors(raw)]
    assert [
        *schema.iter_errors(
            {**raw, "losses": [{"kind": f"holder.{module}", "power": "much"}]}
        )
    ]


def test_a_key_of_the_section_is_no_key_of_a_part(tmp_path, monkeypatch):
    (tmp_path / "shadows").mkdir()
    (tmp_path / "shadows" / "part.py").write_text(
        OUTSIDE.format(field="weight: float = 3.0")
    )
    monkeypatch.syspath_prepend(tmp_path)
    (error,) = errors_of({**RIGHT, "losses": [{"kind": "shadows.part"}]})
    assert error.config_path == "losses[0].kind"
    assert "weight" in error.wrong


def test_a_schema_is_written_while_the_configuration_is_wrong():
    assert "definitions" in json_schema(
        {"losses": [{"kind": "kl", "temprature": 2}, "kl"], "data": "photos", "run": 3}
    )


def test_python_reads_references_and_old_names(monkeypatch):
    monkeypatch.setenv("KD_TEST_SEED", "7")
    values: dict[str, Any] = {
        "data": {"kind": "food_mini"},
        "losses": [{"kind": "relational"}],
    }
    optimizer = {"lr": "${run.seed}", "ema": 0.5}
    loaded = Config(
        **values, run={"seed": "${oc.env:KD_TEST_SEED}"}, optimizer=optimizer
    )  # type: ignore[arg-type]
    assert (loaded.run.seed, loaded.optimizer.lr, loaded.optimizer.ema_decay) == (
        7,
        7.0,
        0.5,
    )
    assert loaded.losses[0].kind == "cckd"
    with pytest.raises(ConfigErrors, match=r"run\.seed: .*does not set run\.epochs"):
        Config(**values, run={"seed": "${run.epochs}"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "options", "allowed"),
    [
        ("where: pathlib.Path = pathlib.Path('x')", {"where": 3}, "a path"),
        ("several: Sequence[int] = ()", {"several": "x"}, "a list of a whole number"),
        (
            "shade: enum.Enum('Shade', {'RED': 'red'}) = None",
            {"shade": "blue"},
            "one of red",
        ),
        (
            "pair: tuple[int, str] = (1, 'a')",
            {"pair": [1, [2]]},
            "2 values: a whole number, text",
        ),
        (
            "by_name: dict[str, float] = None",
            {"by_name": {"a": "x"}},
            "a section of key: a number",
        ),
        (
            "made: int = dataclasses.field(default=4, init=False)",
            {"made": 5},
            "no such key",
        ),
        ("late: 'NoSuchType' = None", {}, "types .* cannot be read"),
    ],
)
def test_a_type_from_outside_is_told_in_words(
    tmp_path, monkeypatch, field, options, allowed
):
    (tmp_path / "typed").mkdir()
    name = f"part_{abs(hash(field))}"
    text = (
        "import enum, pathlib\nfrom collections.abc import Sequence\n"
        + OUTSIDE.format(field=field)
    )
    (tmp_path / "typed" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    values = {**RIGHT, "losses": [{"kind": f"typed.{name}", **options}]}
    (error,) = errors_of(values)
    assert re.search(allowed, str(error)), error
    assert "\n" not in str(error)


def test_the_last_length_counts():
    assert load(RIGHT, ["run.epochs=3x", "run.epochs=5"]).run.times == 1.0
    assert load(RIGHT, ["run.epochs=3x", "run.epochs=2x"]).run.times == 2.0


def test_a_dotted_key_at_the_top_counts_before_its_section():
    """Findings and pages name such keys, to be pasted at the end of the file."""
    assert load({**RIGHT, "run": {"name": "a"}, "run.name": "b"}).run.name == "b"


def test_a_text_that_looks_like_a_reference_is_written_as_a_text():
    config = load(RIGHT, [r"run.name=\${run.seed}"])
    assert config.run.name == "${run.seed}"
    assert load(to_dict(config)).run.name == "${run.seed}"
    assert load(yaml.safe_load(dump(config))).run.name == "${run.seed}"


@pytest.mark.parametrize(
    "sections",
    [
        {"run": None},
        {"sifter": None},
        {"data": {**RIGHT["data"], "batch_size": "32"}},
        {"optimizer": {"lr": "1e-3"}},
    ],
)
def test_an_editor_accepts_what_kd_accepts(sections):
    load({**RIGHT, **sections})
    assert not [
        *jsonschema.Draft7Validator(json_schema()).iter_errors({**RIGHT, **sections})
    ]


def test_the_environment_may_hold_a_boolean(monkeypatch):
    monkeypatch.setenv("KD_TEST_BASELINE", "true")
    assert (
        load(RIGHT, ["optimizer.zero=${oc.env:KD_TEST_BASELINE}"]).optimizer.zero
        is True
    )


def test_a_secret_is_in_no_message_of_a_command(tmp_path, monkeypatch, command):
    monkeypatch.setenv("KD_TEST_SECRET", "hunter2secret")
    file = tmp_path / "a.yaml"
    file.write_text(
        "data: {kind: webdataset, train: 'x-${oc.env:KD_TEST_SECRET}.tar', val:"
        " v.tar}\nstudent: {model: resnet10t}\nlosses: [{kind: ce}]\n"
    )
    answer = command("train", file, "--check")
    assert answer.code == 2
    assert "KD_TEST_SECRET" in answer.err
    assert "hunter2" not in answer.out + answer.err


def test_an_override_beyond_a_list_says_how_many_items_it_has():
    with pytest.raises(
        ConfigErrors, match=r"^losses\.x: .*is a list.*counted from 0; it has 1"
    ):
        load(RIGHT, ["losses.x={kind: ce}"])


def test_help_finds_keys_by_a_word_of_their_meaning(capsys):
    assert main(["help", "wandb"]) == 0
    assert "run.trackers" in capsys.readouterr().out
    assert main(["help", "batch size"]) == 0
    assert "data.batch_size" in capsys.readouterr().out
    assert main(["help", "trackerz"]) == 2
