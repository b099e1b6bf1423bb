"""A YAML file and `key=value` overrides become one typed, checked `Config`, or all errors at once."""

from kd.config.load import dump, load, to_dict
from kd.config.schema import Config

__all__ = ["Config", "dump", "load", "to_dict"]
