"""The configuration classes of smart sifting, and its three exceptions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from kd.errors import KdError, did_you_mean


class SiftConfigValidationException(KdError):
    """A key of the sift configuration is missing or unknown, or its value is of a wrong type or size."""


class UnsupportedDataFormatException(KdError):
    """A batch cannot be cut into samples."""


class LossImplementationNotProvidedException(KdError):
    """There is no `Loss`, or it does not return one value per sample."""


_REQUIRED: Any = object()
"""Marks a required key, so that a missing one raises our exception both for keyword arguments and for dicts."""


@dataclass(frozen=True)
class SiftingBaseConfig:
    """The delay before sifting begins.

    Raises:
        SiftConfigValidationException: a value is not allowed.
    """

    sift_delay: int = 1000
    """Number of training steps on all samples before sifting begins."""
    repeat_delay_per_epoch: bool = False
    """Apply the delay at the start of each epoch."""

    def __post_init__(self) -> None:
        _whole(self, "sift_delay", least=0)
        if not isinstance(self.repeat_delay_per_epoch, bool):
            raise _refusal(self, "repeat_delay_per_epoch", "True or False")


@dataclass(frozen=True)
class LossConfig:
    """Sifting by loss.

    Raises:
        SiftConfigValidationException: `sift_config` is missing or not allowed.
    """

    sift_config: SiftingBaseConfig | Mapping[str, Any] = _REQUIRED
    """A `SiftingBaseConfig` or a dict of its keys."""

    def __post_init__(self) -> None:
        _nest(self, "sift_config", SiftingBaseConfig)


@dataclass(frozen=True)
class RelativeProbabilisticSiftConfig:
    """Keep a sample with probability percentile**beta of its loss among recent losses: 1 / (1 + beta) of all.

    Raises:
        SiftConfigValidationException: a key is missing, or its value is not allowed.
    """

    beta_value: float = _REQUIRED
    """Above 0: 0.5 keeps 67 %, 1 keeps 50 %, 2 keeps 33 %, 3 keeps 25 %."""
    loss_history_length: int = _REQUIRED
    """Number of previous losses that a new one is compared with."""
    loss_based_sift_config: LossConfig | Mapping[str, Any] = _REQUIRED
    """A `LossConfig` or a dict of its keys."""

    def __post_init__(self) -> None:
        beta = _given(self, "beta_value")
        if not isinstance(beta, Real) or isinstance(beta, bool) or not 0 < float(beta) < math.inf:
            raise _refusal(self, "beta_value", "a number > 0")
        _whole(self, "loss_history_length", least=1)
        _nest(self, "loss_based_sift_config", LossConfig)

    @property
    def base(self) -> SiftingBaseConfig:
        """The innermost configuration: the delay before sifting begins."""
        assert isinstance(self.loss_based_sift_config, LossConfig)
        assert isinstance(self.loss_based_sift_config.sift_config, SiftingBaseConfig)
        return self.loss_based_sift_config.sift_config


Config = TypeVar("Config", SiftingBaseConfig, LossConfig, RelativeProbabilisticSiftConfig)


def from_dict(kind: type[Config], value: object, where: str) -> Config:
    """Return `value` if it has that class already, or build it from a dict.

    Raises:
        SiftConfigValidationException: a key is unknown, or `value` is neither.
    """
    if isinstance(value, kind):
        return value
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(value, Mapping):
        allowed = f"Allowed: a {kind.__name__} or a dict with {', '.join(names)}"
        raise SiftConfigValidationException(where, f"is a {type(value).__name__}", allowed)
    for key in value:
        if key not in names:
            wrong = f"has an unknown key {key!r}"
            raise SiftConfigValidationException(
                where, wrong, f"Allowed: {', '.join(names)}", did_you_mean(str(key), names)
            )
    return kind(**value)


def _given(config: Any, name: str) -> Any:
    value = getattr(config, name)
    if value is _REQUIRED:
        where = f"{type(config).__name__}.{name}"
        raise SiftConfigValidationException(where, "is missing", "It has no default", "Give it a value")
    return value


def _refusal(config: Any, name: str, allowed: str) -> SiftConfigValidationException:
    where = f"{type(config).__name__}.{name}"
    return SiftConfigValidationException(
        where, f"is {getattr(config, name)!r}", f"Allowed: {allowed}", "Change the value"
    )


def _whole(config: Any, name: str, least: int) -> None:
    value = _given(config, name)
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise _refusal(config, name, f"a whole number >= {least}")


def _nest(config: Any, name: str, kind: type[Any]) -> None:
    value = from_dict(kind, _given(config, name), f"{type(config).__name__}.{name}")
    object.__setattr__(config, name, value)  # the only write to the frozen class: replaces a dict by its class
