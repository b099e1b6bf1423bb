"""The configuration of smart sifting: documented defaults, dicts, and what is
refused.
"""

import inspect

import pytest
import torch
from torch import nn

import kd.sifting
from kd.sifting import (
    Loss,
    LossConfig,
    LossImplementationNotProvidedException,
    RelativeProbabilisticSiftConfig,
    SiftConfigValidationException,
    SiftingBaseConfig,
    SiftingDataloader,
)

BASE = {"sift_config": {"sift_delay": 0}}


class Some(Loss):
    def loss(self, model, transformed_batch, original_batch=None):
        return model(original_batch[0]).flatten()


def test_the_defaults_are_the_documented_ones():
    assert (
        SiftingBaseConfig().sift_delay,
        SiftingBaseConfig().repeat_delay_per_epoch,
    ) == (1000, False)


def test_dicts_are_the_classes():
    base = {"sift_delay": 7, "repeat_delay_per_epoch": True}
    nested = {"sift_config": base}
    config = RelativeProbabilisticSiftConfig(
        beta_value=1,
        loss_history_length=500,
        loss_based_sift_config=LossConfig(SiftingBaseConfig(**base)),
    )
    assert config == RelativeProbabilisticSiftConfig(1, 500, nested)
    settings = {
        "beta_value": 1,
        "loss_history_length": 500,
        "loss_based_sift_config": nested,
    }
    loader = SiftingDataloader(settings, [[torch.ones(4, 2)]], nn.Linear(2, 1), Some())
    assert loader.sift_config == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"beta_value": 0},
            "RelativeProbabilisticSiftConfig.beta_value: is 0. Allowed: a number > 0",
        ),
        ({"beta_value": -1.0}, "beta_value: is -1.0"),
        ({"beta_value": float("nan")}, "beta_value: is nan"),
        ({"beta_value": float("inf")}, "beta_value: is inf"),
        ({"beta_value": "1"}, "beta_value: is '1'"),
        ({"beta_value": True}, "beta_value: is True"),
        (
            {"loss_history_length": 0},
            "loss_history_length: is 0. Allowed: a whole number >= 1.",
        ),
        ({"loss_history_length": 10.5}, "loss_history_length: is 10.5"),
        (
            {"loss_based_sift_config": None},
            "RelativeProbabilisticSiftConfig.loss_based_sift_config: is a NoneType",
        ),
        ({"loss_based_sift_config": {}}, "LossConfig.sift_config: is missing."),
        (
            {"loss_based_sift_config": {"sift_config": 3}},
            "LossConfig.sift_config: is a int",
        ),
        (
            {"loss_based_sift_config": {"sift_config": {"sift_delay": -1}}},
            "SiftingBaseConfig.sift_delay: is -1",
        ),
        (
            {"loss_based_sift_config": {"sift_config": {"repeat_delay_per_epoch": 1}}},
            "repeat_delay_per_epoch: is 1. Allowed: True or False.",
        ),
        (
            {"loss_based_sift_config": {"sift_config": {"sift_dely": 3}}},
            (
                "unknown key 'sift_dely'. Allowed: sift_delay, repeat_delay_per_epoch."
                " Did you mean 'sift_delay'?"
            ),
        ),
    ],
)
def test_invalid_values_are_one_line_errors(keys, message):
    settings = {
        "beta_value": 1.0,
        "loss_history_length": 5,
        "loss_based_sift_config": BASE,
        **keys,
    }
    with pytest.raises(SiftConfigValidationException) as caught:
        RelativeProbabilisticSiftConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["beta_value", "loss_history_length", "loss_based_sift_config"]
)
def test_a_missing_key_is_named(key):
    settings = {
        "beta_value": 1.0,
        "loss_history_length": 5,
        "loss_based_sift_config": BASE,
    }
    del settings[key]
    with pytest.raises(SiftConfigValidationException, match=f"{key}: is missing"):
        RelativeProbabilisticSiftConfig(**settings)
    with pytest.raises(SiftConfigValidationException, match=f"{key}: is missing"):
        SiftingDataloader(settings, [], nn.Linear(1, 1), Some())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": print}, "SiftingDataloader.model: is a builtin_function_or_method"),
        ({"orig_dataloader": 3}, "orig_dataloader: is 3"),
        ({"batch_transforms": object()}, "batch_transforms: is a object"),
        ({"batch_format_index": 2}, "batch_format_index: is 2. Allowed: 0 or 1."),
        ({"pick": "best"}, "pick: is 'best'. Allowed: 'fixed' or 'bernoulli'."),
        ({"sift_config": None}, "sift_config: is a NoneType"),
    ],
)
def test_wrong_arguments_of_the_loader_are_refused(arguments, message):
    config = RelativeProbabilisticSiftConfig(1.0, 5, BASE)
    loader_arguments = {
        "sift_config": config,
        "orig_dataloader": [],
        "model": nn.Linear(1, 1),
        "loss_impl": Some(),
        **arguments,
    }
    with pytest.raises(SiftConfigValidationException) as caught:
        SiftingDataloader(**loader_arguments)
    assert message in str(caught.value)


class Hidden(Loss):
    """The first example of Amazon's documentation, whose attribute hides the method."""

    def __init__(self):
        self.loss = nn.CrossEntropyLoss(reduction="none")


@pytest.mark.parametrize(
    ("loss_impl", "message"),
    [
        (None, "loss_impl: is missing"),
        (Some, "loss_impl: is the class Some"),
        (Loss(), "does not implement loss()"),
        (Hidden(), "an attribute of that name set in __init__"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss does not implement loss()"),
    ],
)
def test_a_loss_must_be_implemented(loss_impl, message):
    with pytest.raises(LossImplementationNotProvidedException) as caught:
        SiftingDataloader(
            RelativeProbabilisticSiftConfig(1.0, 5, BASE),
            [],
            nn.Linear(1, 1),
            loss_impl,
        )
    assert message in str(caught.value)


MORE = ["batch_transforms", "log_batch_data", "batch_format_index"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "RelativeProbabilisticSiftConfig",
            ["beta_value", "loss_history_length", "loss_based_sift_config"],
        ),
        ("LossConfig", ["sift_config"]),
        ("SiftingBaseConfig", ["sift_delay", "repeat_delay_per_epoch"]),
        (
            "SiftingDataloader",
            ["sift_config", "orig_dataloader", "model", "loss_impl", *MORE],
        ),
        ("ListBatch", ["inputs", "labels"]),
        ("TensorBatch", ["inputs", "labels"]),
        ("enable_sifting", ["trainer", "sift_config", "loss", "set_epochs"]),
    ],
)
def test_names_and_parameters_are_the_documented_ones(name, parameters):
    signature = inspect.signature(getattr(kd.sifting, name)).parameters.values()
    assert [
        p.name for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD
    ] == parameters


def test_the_public_names_are_the_documented_ones():
    classes = (
        "Loss SiftingBatch SiftingBatchTransform ListBatch TensorBatch"
        " SiftingDataloader TrainingMetricsRecorder"
    )
    configured = "RelativeProbabilisticSiftConfig LossConfig SiftingBaseConfig"
    errors = "SiftConfigValidation UnsupportedDataFormat LossImplementationNotProvided"
    exceptions = {f"{name}Exception" for name in errors.split()}
    added = {"enable_sifting", "install_as_smart_sifting"}
    assert set(kd.sifting.__all__) == {
        *classes.split(),
        *configured.split(),
        *exceptions,
        *added,
    }
    assert all(hasattr(kd.sifting, name) for name in kd.sifting.__all__)
