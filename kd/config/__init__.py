"""Build one typed, checked `Config` from a YAML file and `key=value` overrides."""

from kd.config.load import dump, load, read, to_dict
from kd.config.schema import Config

__all__ = ["Config", "dump", "load", "read", "to_dict"]
