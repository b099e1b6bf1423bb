"""Choose numbers where a configuration leaves them to kd by the word `auto`.

They are epochs, stored views and epochs of the fit.
"""

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

    `images`: number of training images; 0: they are listed if the numbers depend on
    them.
    """
    run = config.run
    cache = config.teacher.cache
    fit = config.teacher.fit
    if AUTO not in (run.epochs, cache.views, fit.epochs) and run.times == 1:
        return config
    epochs: float = WITHOUT_EPOCHS if run.epochs == AUTO else int(run.epochs)
    views = 0 if cache.views == AUTO else int(cache.views)
    fit_epochs = 0 if fit.epochs == AUTO else int(fit.epochs)
    lengthens = run.epochs == AUTO and not run.steps
    stores = cache.views == AUTO and stores_outputs(config)
    fits = fit.epochs == AUTO and not fit.steps
    data = None
    if fits or (not images and (lengthens or stores)):
        data = open_sources(plan_of(config))
        images = len(data.train)
    if lengthens:
        epochs = length_of(config, images).epochs
    visits = epochs  # of each image
    if run.steps:
        visits = run.steps * config.data.batch_size / max(1, images)
    if stores:
        views = config.data.views or recommended.stored_views(visits)
    if fits and data is not None:
        labelled = max(1, len(data.with_labels().train))
        student = 0 if config.teacher.pretrained else visits * images
        fit_epochs = max(1, round(recommended.fit_visits(labelled, student) / labelled))
    return replace(
        config,
        run=replace(
            run,
            epochs=multiplied(epochs, run.times),
            steps=multiplied(run.steps, run.times),
            times=1.0,
        ),
        teacher=replace(
            config.teacher,
            cache=replace(cache, views=views),
            fit=replace(fit, epochs=fit_epochs),
        ),
    )


def multiplied(number: float, times: float) -> int:
    """Return a length times a factor, at least 1; 0 stays 0."""
    return max(1, round(number * times)) if number else 0


def length_of(config: Config, images: int) -> recommended.Length:
    """Return the recommended length of a run."""
    return recommended.length(
        images, accelerated(config.backend), config.student.init == "pretrained"
    )


def accelerated(section: BackendSection) -> bool:
    """Return whether a backend trains on an accelerator."""
    return not registry.facts(
        "backends", section.kind, section.options, "backend.kind"
    ).cpu


def stores_outputs(config: Config) -> bool:
    """Return whether a cache is recommended.

    It is if a loss reads a teacher's logits, and no features, which are large.
    """
    teacher = config.teacher
    if not teacher.model or teacher.shard or teacher.pipeline:
        return False
    read = reads(config.losses)
    return read.teacher_logits and not read.features
