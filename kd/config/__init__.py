"""A YAML file and `key=value` overrides become one typed, checked `Config`, or all errors at once."""

from kd.config.explain import explain
from kd.config.load import dump, load, to_dict
from kd.config.schema import Config

__all__ = ["Config", "dump", "explain", "load", "to_dict"]
