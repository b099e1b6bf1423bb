"""Smart sifting has these configuration classes and three exceptions."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from kd.core.errors import KdError, did_you_mean


class SiftConfigValidationException(KdError):
    """A key of the sift configuration or its value is wrong.

    The key is missing or unknown, or the value is of a wrong type or size.
    """


class UnsupportedDataFormatException(KdError):
    """A batch cannot be cut into samples."""


class LossImplementationNotProvidedException(KdError):
    """There is no `Loss`, or it does not return one value per sample."""


# a missing key raises our exception, of keyword arguments and of dicts
_REQUIRED: Any = object()


@dataclass(frozen=True)
class SiftingBaseConfig:
    """This configuration sets the delay before sifting begins.

    Args:
        sift_delay: training steps on all samples before sifting begins.
        repeat_delay_per_epoch: apply the delay at the start of each epoch.

    Raises:
        SiftConfigValidationException: a value is not allowed.
    """

    sift_delay: int = 1000
    repeat_delay_per_epoch: bool = False

    def __post_init__(self) -> None:
        require_integer("SiftingBaseConfig.sift_delay", self.sift_delay, least=0)
        repeat = self.repeat_delay_per_epoch
        key = "SiftingBaseConfig.repeat_delay_per_epoch"
        require(key, repeat, isinstance(repeat, bool), "True or False")


@dataclass(frozen=True)
class LossConfig:
    """This configuration selects sifting by loss.

    Args:
        sift_config: a `SiftingBaseConfig` or a dict of its keys; required.

    Raises:
        SiftConfigValidationException: `sift_config` is missing or not allowed.
    """

    sift_config: SiftingBaseConfig | Mapping[str, Any] = _REQUIRED

    def __post_init__(self) -> None:
        config = from_dict(
            SiftingBaseConfig, self.sift_config, "LossConfig.sift_config"
        )
        # the class is frozen; this replaces a dict by its class
        object.__setattr__(self, "sift_config", config)


@dataclass(frozen=True)
class RelativeProbabilisticSiftConfig:
    """Keep a sample with probability q**beta.

    q (0 to 1) is the rank of its loss among recent ones, so that 1 / (1 + beta) of all
    are kept.

    Args:
        beta_value: above 0: 0.5 keeps 67 %, 1 keeps 50 %, 2 keeps 33 %, 3 keeps 25 %.
        loss_history_length: number of previous losses that a new one is compared with.
        loss_based_sift_config: a `LossConfig` or a dict of its keys.

    Raises:
        SiftConfigValidationException: a key is missing, or its value is not allowed.
    """

    beta_value: float = _REQUIRED
    loss_history_length: int = _REQUIRED
    loss_based_sift_config: LossConfig | Mapping[str, Any] = _REQUIRED

    def __post_init__(self) -> None:
        name = "RelativeProbabilisticSiftConfig"
        beta = self.beta_value
        valid = (
            isinstance(beta, Real)
            and not isinstance(beta, bool)
            and 0 < float(beta) < math.inf
        )
        require(f"{name}.beta_value", beta, valid, "a number > 0")
        require_integer(
            f"{name}.loss_history_length", self.loss_history_length, least=1
        )
        config = from_dict(
            LossConfig, self.loss_based_sift_config, f"{name}.loss_based_sift_config"
        )
        object.__setattr__(self, "loss_based_sift_config", config)

    @property
    def base(self) -> SiftingBaseConfig:
        """The innermost configuration: the delay before sifting begins."""
        assert isinstance(self.loss_based_sift_config, LossConfig)
        assert isinstance(self.loss_based_sift_config.sift_config, SiftingBaseConfig)
        return self.loss_based_sift_config.sift_config


Config = TypeVar(
    "Config", SiftingBaseConfig, LossConfig, RelativeProbabilisticSiftConfig
)


def from_dict(kind: type[Config], value: object, config_path: str) -> Config:
    """Return `value` if it has that class already, or build it from a dict."""
    require(config_path, value, valid=True, allowed="")  # refuses a missing one
    if isinstance(value, kind):
        return value
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(value, Mapping):
        allowed = f"Allowed: a {kind.__name__} or a dict with {', '.join(names)}"
        raise SiftConfigValidationException(
            config_path, f"is a {type(value).__name__}", allowed
        )
    for key in value:
        if key not in names:
            raise SiftConfigValidationException(
                config_path,
                f"has an unknown key {key!r}",
                f"Allowed: {', '.join(names)}",
                did_you_mean(str(key), names),
            )
    return kind(**value)


def require(config_path: str, value: object, valid: bool, allowed: str) -> None:
    """Raise SiftConfigValidationException if a value is missing or not valid."""
    if value is _REQUIRED:
        raise SiftConfigValidationException(
            config_path, "is missing", "It has no default", "Give it a value"
        )
    if not valid:
        short = isinstance(value, (str, int, float, type(None)))
        wrong = f"is {value!r}" if short else f"is a {type(value).__name__}"
        raise SiftConfigValidationException(config_path, wrong, f"Allowed: {allowed}")


def require_integer(config_path: str, value: object, least: int) -> None:
    """Raise SiftConfigValidationException unless a value is an integer.

    It must be `least` or more.
    """
    valid = (
        isinstance(value, Integral)
        and not isinstance(value, bool)
        and int(value) >= least
    )
    require(config_path, value, valid, f"a whole number >= {least}")
