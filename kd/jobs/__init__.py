"""What the commands do. Each job is config -> build -> engine -> artifacts -> report."""

from kd.jobs._student import Result
from kd.jobs._world import world
from kd.jobs.cache import Cached, cache
from kd.jobs.check import check
from kd.jobs.compile import compile_only
from kd.jobs.evaluate import evaluate
from kd.jobs.export import Exported, export
from kd.jobs.export import Options as ExportOptions
from kd.jobs.ship import push, sagemaker_archives
from kd.jobs.teach import teach
from kd.jobs.train import train

__all__ = [
    "Cached",
    "ExportOptions",
    "Exported",
    "Result",
    "cache",
    "check",
    "compile_only",
    "evaluate",
    "export",
    "push",
    "sagemaker_archives",
    "teach",
    "train",
    "world",
]
