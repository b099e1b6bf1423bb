"""The typed configuration: everything that is wrong in one report, and a round trip
that loses nothing.
"""

import dataclasses
import math
import re
import sys
import typing

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from kd import config
from kd.config import Config, dump, load, to_dict
from kd.config.explain import explain
from kd.config.tuning import Augment
from kd.core.errors import ConfigError, ConfigErrors, KdError
from kd.core.host import environment
from kd.core.keys import declaration, fields_of
from kd.core.references import redact
from kd.parts import registry
from kd.setup.recipe import resolve

MINIMAL = {
    "data": {"kind": "imagefolder", "root": "photos"},
    "student": {"model": "vit_tiny_patch16_224"},
    "losses": [{"kind": "ce"}],
}


LEARNABLE = ("sifter.kind=teacher", "sifter.score=learnable")


def minimal(**sections) -> dict:
    return {**MINIMAL, **sections}


def errors_of(raw, *overrides) -> dict[str, str]:
    """Return every error of a configuration, by its config path."""
    with pytest.raises(ConfigErrors) as caught:
        load(raw, overrides)
    assert str(caught.value).splitlines() == [
        str(error) for error in caught.value.errors
    ]
    return {error.config_path: str(error) for error in caught.value.errors}


def test_everything_wrong_is_in_one_report():
    raw = {
        "run": {"epoks": 3, "seed": -1, "every": {"log": 0}},
        "data": {"kind": "imagefolder", "batch_size": "many", "augment": {"flip": 2}},
        "student": {"model": "vit_tiny_patch16_224", "init": "magic"},
        "teacher": {"fit": {"lr": -1}},
        "losses": [
            {"kind": "kll"},
            {"kind": "ce", "wieght": 2},
            {"kind": "kl", "temperature": -1},
        ],
        "optimiser": {"lr": 1},
        "optimizer": {"zero": "perhaps", "betas": "high"},
        "sifter": "none",
    }
    errors = errors_of(raw)
    expected = {
        "run.epoks": (
            "run.epoks: no such key. Allowed: baseline, baseline_steps, epochs, every,"
            " folder, keep, name, patience, seed, steps, times, trackers. Did you mean"
            " 'epochs'?"
        ),
        "run.seed": "run.seed: is -1. Allowed: a whole number >= 0.",
        "run.every.log": "run.every.log: is 0. Allowed: a whole number > 0.",
        "data.batch_size": "data.batch_size: is 'many'. Allowed: a whole number > 0.",
        "data.augment.flip": (
            "data.augment.flip: is 2. Allowed: a number >= 0 and <= 1."
        ),
        "data.root": "data.root: is missing. Allowed: text.",
        "student.init": (
            "student.init: is 'magic'. Allowed: one of scratch, pretrained."
        ),
        "teacher.fit.lr": "teacher.fit.lr: is -1. Allowed: a number >= 0.",
        "losses[1].wieght": (
            "losses[1].wieght: no such key. Allowed: class_weights, kind,"
            " label_smoothing, weight. Did you mean 'weight'?"
        ),
        "losses[2].temperature": "losses[2].temperature: is -1. Allowed: a number > 0.",
        "optimizer.zero": "optimizer.zero: is 'perhaps'. Allowed: true or false.",
        "optimizer.betas": (
            "optimizer.betas: is 'high'. Allowed: a list of 2 values, each a number >="
            " 0 and < 1."
        ),
    }
    assert {key: errors.get(key) for key in expected} == expected
    assert errors["losses[0].kind"].startswith(
        "losses[0].kind: is 'kll'. Allowed: bce, "
    )
    assert errors["losses[0].kind"].endswith("Did you mean 'kl'?")
    assert errors["optimiser"].endswith("Did you mean 'optimizer'?")
    assert (
        errors["sifter"] == "sifter: is 'none'. A section with keys is expected: kind."
    )
    assert len(errors) == len(expected) + 3


@pytest.mark.parametrize(
    ("kind", "key", "wrong"),
    [
        ("kl", "temperature", (0, -1, math.inf, math.nan)),
        ("binary_kl", "temperature", (0, math.inf)),
        ("dist", "temperature", (0,)),
        ("dist", "beta", (-1, math.inf)),
        ("dist", "gamma", (-1,)),
        ("dkd", "temperature", (0,)),
        ("dkd", "alpha", (-1, math.nan)),
        ("dkd", "beta", (-1,)),
        ("wttm", "gamma", (0, -1, math.inf)),
        ("ce", "label_smoothing", (-0.1, 1.1, math.nan)),
        ("bce", "label_smoothing", (-0.1, 1.1)),
    ],
)
def test_an_option_of_a_loss_that_is_out_of_range_is_refused_by_its_key(
    kind, key, wrong
):
    for value in wrong:
        errors = errors_of(minimal(losses=[{"kind": kind, key: value}]))
        assert "Allowed: a number >" in errors[f"losses[0].{key}"]


def test_a_sifter_of_stored_answers_needs_a_cache():
    sifted = minimal(sifter={"kind": "teacher"})
    assert "reads stored teacher logits" in errors_of(sifted)["sifter.kind"]
    assert load(sifted, ["teacher.cache.views=2"]).sifter.kind == "teacher"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.epochs", 2.5),
        ("run.epochs", True),
        ("run.baseline", 3),
        ("run.trackers", "tensorboard"),
        ("run.every", 5),
        ("data.image_size", 7),
        ("data.crop_pct", 0),
        ("data.workers", "many"),
        ("data.batch_size", "many"),
        ("data.on_corrupt", "ignore"),
        ("data.augment.crop_scale", 0.0),
        ("data.augment.mixup", ".nan"),
        ("data.augment.jitter", float("nan")),
        ("teacher.args", "depth"),
        ("teacher.precision", "fp16"),
        ("optimizer.lr", float("inf")),
        ("optimizer.lr", "1e-3x"),
        ("optimizer.betas", ["high", 0.9]),
        ("optimizer.betas", [0.9, 0.99, 0.999]),
        ("optimizer.betas", [0.9, 1.0]),
        ("optimizer.momentum", 1.0),
        ("optimizer.ema_decay", 1),
        ("backend.timeout_seconds", 0),
        ("losses", {"kind": "kl"}),
        ("losses", "kl"),
        ("losses", []),
        ("losses", [{"kind": "ce", "weight": 0}]),
        ("losses", [{"weight": 1}]),
        ("data", "imagefolder"),
        ("student.model", "???"),
    ],
)
def test_wrong_values_are_one_line_that_names_the_key(key, value):
    raw = section_values = minimal()
    *sections, last = key.split(".")
    for section in sections:
        section_values[section] = dict(section_values.get(section, {}))
        section_values = section_values[section]
    section_values[last] = value
    errors = errors_of(raw)
    assert len(errors) == 1, errors
    config_path, message = errors.popitem()
    assert config_path.startswith(key)
    assert "\n" not in message


def test_a_part_outside_the_repository_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "sharp.py").write_text(
        "from dataclasses import dataclass\n"
        "from kd.core.facts import LossFacts\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Options:\n"
        "    power: float = 2.0\n"
        '    """How sharp."""\n'
        "class Sharp:\n"
        "    def __init__(self, power):\n"
        "        self.power = power\n"
        "def facts(options):\n"
        "    return LossFacts(labels=True, logits='softmax')\n"
        "def build(options, dims):\n"
        "    return Sharp(options.power)\n"
    )
    (tmp_path / "mylab" / "dull.py").write_text("Options = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load(minimal(losses=[{"kind": "mylab.sharp", "power": 3}]))
    assert (
        registry.build(
            "losses",
            "mylab.sharp",
            loaded.losses[0].options,
            "losses[0].kind",
            dims=None,
        ).power
        == 3.0
    )
    assert to_dict(loaded)["losses"] == [
        {"kind": "mylab.sharp", "weight": 1.0, "power": 3.0}
    ]
    message = errors_of(minimal(losses=[{"kind": "mylab.sharp", "powr": 3}]))[
        "losses[0].powr"
    ]
    assert "no such key. Allowed: kind, power, weight. Did you mean 'power'?" in message
    for name, words in (("dull", "is not a part"), ("shrap", "cannot be imported")):
        message = errors_of(minimal(losses=[{"kind": f"mylab.{name}"}]))[
            "losses[0].kind"
        ]
        assert f"the module 'mylab.{name}' {words}" in message
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["..", ".kl", "kl.", "kd..losses", 3, None, ["ce"]])
def test_kinds_that_are_no_module_path_are_refused(kind):
    assert list(errors_of(minimal(losses=[{"kind": kind}]))) == ["losses[0].kind"]


THAWED = (
    "backend.kind=xla",
    "optimizer.zero=true",
    "student.tuning={freeze: [patch_embed.*], freeze_epochs: 1}",
)


@pytest.mark.parametrize(
    ("overrides", "config_path", "words"),
    [
        (("backend.kind=cpu", "backend.threads=-1"), "backend.threads", "number >= 0"),
        (("sifter.kind=history", "sifter.keep=0.1"), "sifter", "floor=0.15"),
        (
            ("student.init=scratch", "student.checkpoint=a"),
            "student.init",
            "is 'scratch', but checkpoint is set.",
        ),
        (("student.init=teacher",), "student.init", "scratch, pretrained"),
        (
            ("teacher.shard=true", "teacher.pipeline=2"),
            "teacher.shard",
            "mutually exclusive",
        ),
        (
            ("teacher.fit.tuning.freeze_epochs=2",),
            "teacher.fit.tuning.freeze_epochs",
            "is 2, ",
        ),
        (
            (
                "losses=[{kind: tokens}]",
                "student.args.patch_drop_rate=0.75",
            ),  # of 16 patches 4, a square, may be left
            "student.args.patch_drop_rate",
            "is 0.75, but a loss compares the tokens",
        ),
        (THAWED, "student.tuning.freeze_epochs", "is 1, but torch_xla"),
        (
            ("data.progressive={size: 0, until: 0.6}",),
            "data.progressive.size",
            "is 0, but data.image_size is 224",
        ),
        (
            ("data.progressive={size: 224, until: 0.6}",),
            "data.progressive.size",
            "Allowed: >= 8 and < 224",
        ),
        (
            ("data.progressive={size: -1, until: 0.6}",),
            "data.progressive.size",
            "number >= 0",
        ),
        (
            ("data.progressive={size: 112}",),
            "data.progressive.until",
            "is 0, but data.progressive.size is 112",
        ),
        (
            ("data.progressive={size: 112, until: 1.2}",),
            "data.progressive.until",
            "number >= 0 and <= 1",
        ),
        (
            ("data.progressive={size: 112, until: 0.6}", "losses=[{kind: tokens}]"),
            "data.progressive.size",
            "tokens",
        ),
        (
            ("data.progressive={size: 112, until: 0.6}", "data.loader=ray"),
            "data.progressive.size",
            "of one size",
        ),
        (
            ("optimizer.kind=muon", "backend.kind=xla"),
            "optimizer.kind",
            "is muon, which is untested on xla",
        ),
        (
            ("data.balance=0.5", "sifter.kind=history"),
            "data.balance",
            "is 0.5, but sifter.kind is history",
        ),
        (
            ("data.balance=0.5", "data.labels=some"),
            "data.labels",
            "is some, but data.balance reads",
        ),
        (
            ("data.labels=some", "teacher.cache.views=2", *LEARNABLE),
            "data.labels",
            "is some, but sifter.kind reads",
        ),
        (
            ("data.test_split=exam", "data.test_fraction=0.2"),
            "data.test_fraction",
            "but data.test_split names a test",
        ),
    ],
)
def test_contradictions_between_keys_are_refused(overrides, config_path, words):
    assert (
        words
        in errors_of(minimal(teacher={"model": "vit_tiny_patch16_224"}), *overrides)[
            config_path
        ]
    )


def test_xla_with_zero_cannot_skip_steps():
    """torch_xla's ZeRO applies each step."""
    overrides = (
        "backend.kind=xla",
        "optimizer.zero=true",
        "optimizer.on_nonfinite=skip",
    )
    errors = errors_of(minimal(), *overrides)
    assert list(errors) == ["optimizer.on_nonfinite"]
    assert "optimizer.zero=false" in errors["optimizer.on_nonfinite"]
    for remedy in (
        "backend.kind=cpu",
        "optimizer.zero=false",
        "optimizer.on_nonfinite=error",
    ):
        load(minimal(), [*overrides, remedy])


def test_missing_file_suggests_a_neighbour(tmp_path):
    (tmp_path / "vit_food.yaml").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"vit_fod.yaml: no such file\. .* Did you mean 'vit_food.yaml'\?",
    ):
        load(tmp_path / "vit_fod.yaml")
    with pytest.raises(ConfigError, match=r"no such file\. .* Check the path\."):
        load(tmp_path / "nowhere" / "vit_food.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path)


def test_configurations_of_kd_itself_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("vit_food", ["run.epochs=2"]).run.name == "vit_food"
    with pytest.raises(
        ConfigError,
        match=(
            r"^vit_fod: no such file\. .*one of kd's own: .*grocery.*vit_food.* Did you"
            r" mean 'vit_food'"
        ),
    ):
        load("vit_fod")
    # a file of that name comes first
    (tmp_path / "vit_food").write_text("losses: [{kind: kd}]")
    with pytest.raises(KdError, match="losses"):
        load("vit_food")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {name: a\nlosses: [", "not readable as YAML"),
        ("run:\n\tname: a\n", "not readable as YAML"),
        ("run: {name: a}\nrun: {name: b}\n", "not readable as YAML"),
        ("- a\n- b\n", "holds no sections"),
        ("\x00", "not readable as YAML"),
    ],
)
def test_files_that_are_not_a_configuration(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_empty_file_lists_what_is_missing(tmp_path):
    (tmp_path / "a.yaml").write_text("")
    assert list(errors_of(tmp_path / "a.yaml")) == ["data.kind"]


def test_the_name_is_that_of_the_file(tmp_path):
    (tmp_path / "vit_pears.yaml").write_text(yaml.safe_dump(MINIMAL))
    assert load(tmp_path / "vit_pears.yaml").run.name == "vit_pears"
    assert load(tmp_path / "vit_pears.yaml", ["run.name=x"]).run.name == "x"


def test_overrides_go_before_the_file():
    loaded = load(
        minimal(
            losses=[{"kind": "ce"}, {"kind": "kl"}],
            teacher={"model": "vit"},
            optimizer={"lr": 0.1},
        ),
        [
            "optimizer.lr=1e-4",
            "run.every.log=7",
            "losses[0].weight=2",
            "losses.1.temperature=4",
            "optimizer.betas=[0.8,0.9]",
            "run.trackers=[tensorboard]",
            "student.args.depth=3",
            "student.args={depth: 4}",
            "data.root=a=b c",
            "optimizer.zero=true",
        ],
    )
    assert loaded.optimizer.lr == 1e-4
    assert loaded.run.every.log == 7
    assert [term.weight for term in loaded.losses] == [2.0, 1.0]
    assert loaded.losses[1].options.temperature == 4.0
    assert loaded.optimizer.betas == (0.8, 0.9)
    assert loaded.run.trackers == ("tensorboard",)
    assert loaded.student.args == {"depth": 4}
    assert loaded.data.options.root == "a=b c"
    assert loaded.optimizer.zero is True


def test_a_list_or_a_mapping_can_be_emptied():
    """`student.args={}` once left the file's arguments."""
    raw = minimal(
        run={"trackers": ["wandb"]}, student={"model": "vit", "args": {"depth": 2}}
    )
    assert load(raw, ["run.trackers=[]"]).run.trackers == ()
    emptied = load(raw, ["student.args={}"]).student
    assert (emptied.model, emptied.args) == ("vit", {})
    assert load({**raw, "student.args": {}}).student.args == {}
    assert load(raw, ["student.args={}", "student.args={width: 3}"]).student.args == {
        "width": 3
    }


def test_an_override_of_the_student_is_merged_and_takes_over_nothing_of_another_network():
    file = minimal(student={"model": "vit", "args": {"depth": 2}, "attention": "fused"})
    same = load(file, ["student={args: {width: 3}}"]).student
    assert (same.model, same.args, same.attention) == (
        "vit",
        {"depth": 2, "width": 3},
        "fused",
    )
    changed = load(file, ["student={model: lcnet_050}"]).student
    assert (changed.model, changed.args, changed.attention) == (
        "lcnet_050",
        {},
        "fused",
    )


def test_all_wrong_overrides_are_reported():
    errors = errors_of(
        minimal(), "optimizer.lr", "=3", "losses[5].weight=2", "run.name.deep=1"
    )
    assert list(errors) == ["optimizer.lr", "=3", "losses[5].weight", "run.name"]
    assert errors["optimizer.lr"].endswith(
        "Overrides read key=value. Add the `=value`."
    )
    errors = errors_of(minimal(), "optimizer.rl=3", "data.augment.flop=1")
    assert list(errors) == ["data.augment.flop", "optimizer.rl"]


@pytest.mark.parametrize(
    "override", ["run.name=[", "run.name={a", "a b=c", "[0]=1", "..=1", "run..name=2"]
)
def test_overrides_that_are_not_yaml_are_refused_in_one_line(override):
    assert all(
        "\n" not in message for message in errors_of(minimal(), override).values()
    )


def test_interpolations_are_resolved_or_errors(monkeypatch):
    monkeypatch.setenv("KD_TEST_ROOT", "elsewhere")
    assert (
        load(minimal(), ["data.root=${oc.env:KD_TEST_ROOT}/a"]).data.options.root
        == "elsewhere/a"
    )
    assert "no_such" in str(errors_of(minimal(), "data.root=${no_such.key}"))


TRICKY = [
    "1e5",
    "on",
    "null",
    "~",
    "007",
    "0x1f",
    "1_000",
    "",
    " ",
    "a: b",
    "#a",
    "'",
    '"',
    "ä",
    "true",
    "-",
    "1:30",
]


@pytest.mark.parametrize("text", TRICKY)
def test_text_stays_text_through_a_round_trip(text):
    loaded = load(
        {
            **minimal(),
            "data": {
                "kind": "imagefolder",
                "root": text or "x",
                "train_split": text or "y",
            },
        }
    )
    assert loaded.data.options.root == (text or "x")
    assert load(OmegaConf.to_container(OmegaConf.create(dump(loaded)))) == loaded


@pytest.mark.parametrize("loss", registry.names("losses"))
def test_dump_is_accepted_and_equal(loss, tmp_path):
    raw = minimal(
        losses=[{"kind": loss, "weight": 1e-7}],
        data=(
            {"kind": "food_mini", "dishes": 2}
            if loss in ("bce", "binary_kl")
            else MINIMAL["data"]
        ),
        teacher={"model": "vit", "args": {"a": [1, {"b": None}], "c": "1e5"}},
        optimizer={"betas": [0.5, 0.6], "lr": 1.2345678901234567e-5},
        backend={"kind": "cpu", "threads": 2},
        run={"trackers": ["a", "b"], "name": "1e5"},
    )
    loaded = load(raw)
    (tmp_path / "config.yaml").write_text(dump(loaded))
    again = load(tmp_path / "config.yaml")
    assert again == loaded
    assert dump(again) == dump(loaded)
    assert load(to_dict(loaded)) == loaded


def sections(cls: type = Config) -> list[type]:
    """Return every dataclass of the schema."""
    classes = [cls]
    for hint in typing.get_type_hints(cls).values():
        # a section that may be null is one key
        several = typing.get_origin(hint) is tuple
        inner = [
            arg
            for arg in typing.get_args(hint)
            if several and dataclasses.is_dataclass(arg)
        ]
        for section in [hint] if dataclasses.is_dataclass(hint) else inner:
            classes += sections(section)
    return classes


PARTS = [
    (folder, name)
    for folder in registry.FOLDERS
    if folder != "exporters"
    for name in registry.names(folder)
]


def test_explain_covers_every_key_with_a_meaning():
    rows = explain()
    fields = sum(
        len([f for f in dataclasses.fields(cls) if f.name != "options"])
        for cls in sections()
    )
    nested = len(sections()) - 1  # a field that holds a section has no row of its own
    options = sum(
        len(dataclasses.fields(registry.options_type(folder, name, "")))
        for folder, name in PARTS
    )
    also = sum(
        len(dataclasses.fields(registry.options_type("networks", name, "")))
        for name in registry.names("networks")
    )
    student = sum(
        len(dataclasses.fields(registry.options_type("networks", name, "")))
        for name in ("timm", "torch", "transformers")
    )
    # a teacher's keys stand in teacher and in teacher.also, those of what can be
    # trained in student too
    # teacher.fit.augment, which may be null, has a row of its own
    fitted = len(dataclasses.fields(Augment))
    assert len(rows) == fields - nested + options + also + student + fitted
    for key, allowed, default, meaning in rows:
        assert allowed.startswith("Allowed: "), key
        assert not re.search("typing|<class", allowed), (key, allowed)
        assert default, key
        words = meaning.partition("] ")[2] if meaning.startswith("[kind: ") else meaning
        assert len(words) > 8, f"{key} says nothing"
        assert words.rstrip().endswith((".", ")", "?")), f"{key}: {words}"


def test_explain_shows_the_keys_below_a_prefix():
    assert [key for key, *_ in explain("run.every")] == [
        "run.every.log",
        "run.every.evaluate",
        "run.every.checkpoint",
    ]
    assert {key.split(".")[0] for key, *_ in explain("losses")} == {"losses[]"}
    assert explain("lr") == []


@pytest.mark.parametrize(("folder", "name"), PARTS)
def test_a_parts_keys_never_collide_with_those_of_its_section(folder, name):
    section = next(
        cls
        for cls in sections()
        for f in fields_of(cls).values()
        if declaration(f).get("parts") == folder
    )
    keys = {f.name for f in dataclasses.fields(section)}
    assert not keys & {
        f.name for f in dataclasses.fields(registry.options_type(folder, name, ""))
    }


@pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
def test_defaults_lie_within_their_ranges(cls):
    for name, field in fields_of(cls).items():
        if not field.is_required() and field.default_factory is None:
            kind = (
                typing.Annotated[(field.annotation, *field.metadata)]
                if field.metadata
                else field.annotation
            )
            assert TypeAdapter(kind).validate_python(field.default) == field.default, (
                name
            )


def test_a_bare_off_is_a_word(settings):
    assert config.load(settings, ["student.compile=off"]).student.compile == "off"
    with pytest.raises(
        ConfigErrors,
        match=r"student\.attention: is True\. Allowed: one of auto, fused, unfused",
    ):
        config.load(settings, ["student.attention=on"])


SECRET = "s3cret-value-of-a-token"


def test_a_text_from_the_environment_is_used_but_its_reference_is_written(monkeypatch):
    monkeypatch.setenv("KD_TOKEN", SECRET)
    monkeypatch.setenv("KD_LR", "0.5")
    args = {
        "a": ["${oc.env:KD_TOKEN}", {"b": "x-${oc.env:KD_TOKEN}"}],
        "c": "${teacher.args.a[0]}",
    }
    loaded = load(
        minimal(teacher={"model": "vit", "args": args}, losses=[{"kind": "kl"}]),
        [
            "data.root=/data/${oc.env:KD_TOKEN}",
            "optimizer.lr=${oc.env:KD_LR}",
            "data.val_split=${data.root}",
        ],
    )
    assert (
        loaded.data.options.root == loaded.data.options.val_split == f"/data/{SECRET}"
    )
    assert loaded.teacher.args == {"a": [SECRET, {"b": f"x-{SECRET}"}], "c": SECRET}
    assert loaded.optimizer.lr == 0.5
    text = dump(loaded)
    assert SECRET not in text
    recorded = yaml.safe_load(text)
    assert (
        recorded["data"]["root"]
        == recorded["data"]["val_split"]
        == "/data/${oc.env:KD_TOKEN}"
    )
    assert recorded["teacher"]["args"]["a"] == [
        "${oc.env:KD_TOKEN}",
        {"b": "x-${oc.env:KD_TOKEN}"},
    ]
    # a number is no secret, and the run folder says what was trained
    assert recorded["optimizer"]["lr"] == 0.5
    assert load(recorded) == loaded
    assert SECRET not in str(errors_of(minimal(), "optimizer.lr=${oc.env:KD_TOKEN}"))


def test_the_runs_made_from_a_run_write_no_secret_either(monkeypatch):
    monkeypatch.setenv("KD_TOKEN", SECRET)
    overrides = [
        "teacher.model=${oc.env:KD_TOKEN}",
        "teacher.fit.epochs=1",
        "losses=[{kind: kl}]",
        "run.baseline=true",
    ]
    overrides += ["run.epochs=1"]  # `auto` would look for the images
    recipe = resolve(load(minimal(), [*overrides, "data.root=${oc.env:KD_TOKEN}"]))
    assert recipe.baseline is not None
    for stage in (recipe, resolve(recipe.fits["teacher"]), resolve(recipe.baseline)):
        assert SECRET not in stage.record.yaml
        assert SECRET not in str(stage.record.display_keys)
        assert SECRET in stage.record.keys.values()
    assert (
        resolve(recipe.fits["teacher"]).record.display_keys["student.model"]
        == "${oc.env:KD_TOKEN}"
    )


def test_the_record_of_a_run_is_read_where_its_variables_are_not_set():
    raw = minimal(data={"kind": "imagefolder", "root": "${oc.env:KD_NOT_SET}"})
    assert "KD_NOT_SET" in str(errors_of(raw))
    assert load(raw, here=False).data.options.root == "${oc.env:KD_NOT_SET}"


def test_the_environment_gives_one_value_and_no_section(monkeypatch):
    monkeypatch.setenv("KD_ARGS", "{a: 1}")
    assert "one value" in str(
        errors_of(minimal(), "student.args=${oc.decode:${oc.env:KD_ARGS}}")
    )


def test_values_of_references_are_kept_out_of_text(monkeypatch, tmp_path):
    monkeypatch.setenv("KD_TOKEN", SECRET)
    monkeypatch.setenv("KD_FOLDER", str(tmp_path))
    load(minimal(), ["data.root=${oc.env:KD_FOLDER}/${oc.env:KD_TOKEN}"])
    assert (
        redact(f"cannot open {tmp_path}/{SECRET}/a.jpg")
        == f"cannot open {tmp_path}/${{oc.env:KD_TOKEN}}/a.jpg"
    )
    monkeypatch.setattr(
        "sys.argv", ["kd-train", f"data.root={SECRET}", "optimizer.lr=0.1"]
    )
    assert (
        environment()["command"]
        == "kd-train data.root=${oc.env:KD_TOKEN} optimizer.lr=0.1"
    )


@pytest.mark.parametrize("text", [",", "|", ";", "/", ">", "&", "*", "-", "#"])
def test_a_separator_is_given_as_it_is(settings, text):
    """YAML takes most of these for syntax; a shell keeps no quotes for it."""
    labels = {
        "kind": "multilabel",
        "root": ".",
        "train_labels": "a.csv",
        "val_labels": "b.csv",
    }
    loaded = load(
        {**settings, "data": labels, "losses": [{"kind": "bce"}]},
        [f"data.separator={text}"],
    )
    assert loaded.data.options.separator == text


@pytest.mark.parametrize(("kind", "fits"), [("timm", True), ("onnx", False)])
def test_one_of_several_teachers_may_be_of_a_kind_that_is_fitted(kind, fits):
    also = {"kind": kind, "model": "vit_tiny_patch16_224" if fits else "b.onnx"}
    raw = minimal() | {"losses": [{"kind": "kl"}]}
    raw["teacher"] = {
        "kind": "onnx",
        "model": "a.onnx",
        "fit": {"epochs": 1},
        "also": [also],
    }
    if fits:
        assert load(raw).teacher.also[0].kind == "timm"
    else:
        assert (
            "does not fit a teacher of kind 'onnx'"
            in errors_of(raw)["teacher.fit.epochs"]
        )
