"""The plan of a run's images.

It is their section of the configuration, with what other sections add.
"""

from dataclasses import fields

from kd.config.reads import build_task
from kd.config.schema import Config, DataSection
from kd.core.keys import keys


@keys
class DataPlan(DataSection):
    """Describe the images of a run and their form.

    `views` defaults to the teacher's cache's.
    """

    seed: int = 0  # the run's seed; views and order depend on it
    folder: str = ""  # `run.folder`, which contains stores and caches
    named: bool = True  # whether the classes' names are the labels of an export


def plan_of(config: Config) -> DataPlan:
    """Return the plan of a configuration's images."""
    section = config.data
    cached = config.teacher.cache.views
    values = {key.name: getattr(section, key.name) for key in fields(section)}
    values["views"] = section.views or (0 if cached == "auto" else cached)
    named = bool(build_task(config.task).logits)
    return DataPlan(
        **values, seed=config.run.seed, folder=config.run.folder, named=named
    )
