"""Old names of keys and kinds: read as the new ones, said once, refused beside them."""

import logging

import pytest
import yaml

from kd import config
from kd.config import renamed
from kd.config.schema import Config
from kd.config.words import keys_of
from kd.config.yaml_text import examples
from kd.core.errors import ConfigErrors, KdError
from kd.parts import registry

SETTINGS = {
    "run": {"name": "tiny"},
    "data": {"kind": "food_mini", "eval_crop": 0.9, "augment": {"crop": 0.5}},
    "teacher": {
        "model": "vit_tiny_patch16_224",
        "args": {"tuning": {"head_lr": 2}},
        "fit": {
            "epochs": 1,
            "warmup": 0.2,
            "augment": {"crop": 0.6},
            "tuning": {"head_lr": 3.0},
        },
    },
    "student": {"model": "vit_tiny_patch16_224", "tuning": {"head_lr": 4.0}},
    "losses": [{"kind": "kl"}, {"kind": "relational", "weight": 0.5}],
    "optimizer": {"min_lr": 0.1, "warmup": 0.3, "clip": 2.0, "ema": 0.99},
    "backend": {"kind": "cpu"},
}


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    monkeypatch.setattr(renamed, "_warned", set())


def test_every_old_name_sets_the_value_of_its_new_name():
    loaded = config.load(SETTINGS)
    assert (loaded.data.crop_pct, loaded.data.augment.crop_scale) == (0.9, 0.5)
    fit = loaded.teacher.fit
    assert (fit.warmup_ratio, fit.augment.crop_scale, fit.tuning.head_lr_scale) == (
        0.2,
        0.6,
        3.0,
    )
    assert loaded.student.tuning.head_lr_scale == 4.0
    rates = loaded.optimizer
    assert (
        rates.min_lr_ratio,
        rates.warmup_ratio,
        rates.clip_grad_norm,
        rates.ema_decay,
    ) == (0.1, 0.3, 2.0, 0.99)
    assert [loss.kind for loss in loaded.losses] == ["kl", "cckd"]


def test_the_arguments_of_a_network_keep_their_names():
    assert config.load(SETTINGS).teacher.args == {"tuning": {"head_lr": 2}}


def test_a_section_of_several_teachers_and_its_record_read_alike():
    loaded = config.load(SETTINGS)
    assert config.load(config.to_dict(loaded)) == loaded


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.warmup=0.25",
        "optimizer={warmup: 0.25}",
        "optimizer.warmup_ratio=0.25",
    ],
)
@pytest.mark.parametrize("written", ["warmup", "warmup_ratio"])
def test_an_override_under_either_name_replaces_the_file_under_either_name(
    override, written
):
    settings = {**SETTINGS, "optimizer": {written: 0.3}}
    assert config.load(settings, [override]).optimizer.warmup_ratio == 0.25


def test_overrides_of_a_list_and_of_a_kind_are_renamed():
    assert (
        config.load(SETTINGS, ["losses=[{kind: kl}]", "losses.0.kind=relational"])
        .losses[0]
        .kind
        == "cckd"
    )
    assert (
        config.load(SETTINGS, ["losses=[{kind: relational}]"]).losses[0].kind == "cckd"
    )
    assert config.load(SETTINGS, ["losses[0].kind=relational"]).losses[0].kind == "cckd"


def test_dotted_keys_of_a_file_and_references_to_old_names_are_renamed():
    settings = {
        **SETTINGS,
        "optimizer": {"warmup": 0.3, "ema": "${optimizer.warmup}"},
        "optimizer.clip": 3.0,
    }
    optimizer = config.load(settings).optimizer
    assert (optimizer.ema_decay, optimizer.clip_grad_norm) == (0.3, 3.0)


def test_both_names_of_a_key_are_an_error():
    settings = {**SETTINGS, "optimizer": {"warmup": 0.3, "warmup_ratio": 0.2}}
    with pytest.raises(KdError, match=r"optimizer\.warmup: .*old name of warmup_ratio"):
        config.load(settings)


def test_an_old_name_of_another_section_is_an_unknown_key():
    with pytest.raises((KdError, ConfigErrors), match=r"data\.warmup: no such key"):
        config.load({**SETTINGS, "data": {"kind": "food_mini", "warmup": 1}})


def test_each_old_name_is_logged_once_except_for_recorded_runs(caplog):
    with caplog.at_level(logging.WARNING, "kd"):
        config.load(SETTINGS, here=False)
        assert not caplog.records
        config.load(SETTINGS)
        first_count = len(caplog.records)
        config.load(SETTINGS)
    lines = [record.getMessage() for record in caplog.records]
    # ten places of keys, one kind
    assert len(lines) == first_count == len(set(lines)) == 11
    assert any(
        "optimizer.min_lr is now optimizer.min_lr_ratio" in line for line in lines
    )


@pytest.mark.parametrize("name", sorted(examples()))
def test_no_configuration_of_our_own_has_an_old_name(name):
    written = yaml.safe_load(examples()[name].read_text())
    assert renamed.with_new_names(written, "", []) == written


def test_new_names_are_keys_and_kinds_and_old_ones_are_not():
    sections = {"optimizer": "optimizer", "data": "data"}
    for section, names in sections.items():
        keys = keys_of(keys_of(Config)[names].annotation)
        for old, new in renamed.KEYS[section].items():
            assert new in keys
            assert old not in keys
    assert set(renamed.KINDS["losses"].values()) <= set(registry.names("losses"))
    assert not set(renamed.KINDS["losses"]) & set(registry.names("losses"))
