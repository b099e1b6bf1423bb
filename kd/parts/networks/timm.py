"""Any timm classifier: by name, from a folder that timm or `kd-export` wrote, or from the hub."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kd.core.facts import NetworkFacts
from kd.models.classifier import Classifier
from kd.models.load import load
from kd.models.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """No options beside those of every teacher."""


def facts(options: Options) -> NetworkFacts:
    """Return what others must know of it."""
    return NetworkFacts(trains=True)


def build(options: Options, spec: Spec, image_size: int, features: Collection[str]) -> Classifier:
    """Load the classifier."""
    return load(spec, image_size, features)
