"""Numbers for the lengths that a configuration leaves to kd: `run.epochs: auto` and `teacher.cache.views: auto`."""

from dataclasses import replace

from kd.config.reads import reads
from kd.config.schema import BackendSection, Config
from kd.core import recommended
from kd.parts import registry
from kd.setup.data import open_sources
from kd.setup.data_plan import plan_of

AUTO = "auto"
WITHOUT_EPOCHS = 10  # recorded for a run whose steps decide; nothing reads it


def completed(config: Config, images: int = 0) -> Config:
    """Return the configuration with numbers in place of `auto`.

    `images`: number of training images; 0: they are listed if the numbers depend on them.
    """
    run, cache = config.run, config.teacher.cache
    if AUTO not in (run.epochs, cache.views) and run.times == 1:
        return config
    epochs: float = WITHOUT_EPOCHS if run.epochs == AUTO else int(run.epochs)
    views = 0 if cache.views == AUTO else int(cache.views)
    asks = cache.views == AUTO and stores_outputs(config)
    if not images and AUTO in (run.epochs, cache.views) and (asks or not run.steps):
        images = len(open_sources(plan_of(config)).train)
    if run.epochs == AUTO and not run.steps:
        epochs = length_of(config, images).epochs
    if asks:
        seen = run.steps * config.data.batch_size / images if run.steps else epochs
        views = config.data.views or recommended.stored_views(seen)
    return replace(
        config,
        run=replace(run, epochs=multiplied(epochs, run.times), steps=multiplied(run.steps, run.times), times=1.0),
        teacher=replace(config.teacher, cache=replace(cache, views=views)),
    )


def multiplied(number: float, times: float) -> int:
    """Return a length times a factor, at least 1; 0 stays 0."""
    return max(1, round(number * times)) if number else 0


def length_of(config: Config, images: int) -> recommended.Length:
    """Return the recommended length of a run."""
    return recommended.length(images, accelerated(config.backend), config.student.init == "pretrained")


def accelerated(section: BackendSection) -> bool:
    """Return whether a backend trains on an accelerator."""
    return not registry.facts("backends", section.kind, section.options, "backend.kind").cpu


def stores_outputs(config: Config) -> bool:
    """Return whether a cache is recommended: a loss reads a teacher's logits, and no features, which are large."""
    read = reads(config.losses)
    divided = config.teacher.shard or config.teacher.pipeline
    return bool(config.teacher.model and read.teacher_logits and not read.features and not divided)
