"""Sources of images. A source of your own is a `Storage` that reads one image, and a call of `source`."""

from kd.parts.datasets._columns import Names, Repeated
from kd.parts.datasets._source import LabelColumn, Listed, SplitRequest, Storage, source

__all__ = ["LabelColumn", "Listed", "Names", "Repeated", "SplitRequest", "Storage", "source"]
