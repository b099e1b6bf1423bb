"""Train a configuration with many settings and find the best (`kd.sweep`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd import config
from kd.config import Config
from kd.core.errors import ConfigError, import_optional
from kd.study.sweeps.space import Space

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results of a sweep."""

    folder: Path
    """`run.folder`/NAME_sweep, which has the run folders of the trials, journal.log,
    sweep.md, best.yaml and frontier.svg.
    """
    best: Path  # the best configuration, for `kd-train`
    rows: list[dict[str, Any]]
    """One row per trial, best first: `trial`, `values`, `score` on validation images,
    and its `interval` if known. If the students differ also their costs, see
    `kd.study.sweeps.frontier.with_costs`. The last ones have `pruned`, the number of
    evaluations after which they were ended.
    """
    fresh: list[dict[str, Any]]
    """Rows for the best configuration with other seeds, also with `test`: `score` and
    `interval` on test images.
    """
    tested: dict[str, Any]
    """`score` and `interval` of the best trial on test images; {} without such."""
    text: str  # the table, and the seed's part of the best score
    study: optuna.Study


def sweep(
    settings: str | Path | Config | dict[str, Any],
    *overrides: str,
    trials: int = 0,
    sampler: str = "",
    pruner: str = "none",
    storage: str = "",
    by: str = "",
    objectives: str = "",
    jobs: int = 1,
) -> Sweep:
    """Train a configuration with many settings, like `kd-sweep`.

    The same call resumes after a kill.

    Args:
        settings: a YAML file, its contents, or a loaded Config.
        overrides: `key=value`; a list `key=a,b,c` or a range `key=uniform(LOW,HIGH)`
            varies the key.
        trials: number of trials, if a range or a sampler is named.
        sampler: a sampler of Optuna's, such as "tpe"; "": all combinations of lists, or
            "tpe" for ranges.
        pruner: a pruner of Optuna's, which ends hopeless trials, such as "median" or
            "percentile(25)".
        storage: URL of a database of Optuna's; "": a journal in the sweep's folder.
        by: key of the score that ranks the trials; "": the task's first.
        objectives: scores and costs for a Pareto front, such as "accuracy,ms,mb".
        jobs: parallel trials; each gets its share of the cores.

    Returns:
        The trials, the best configuration, and its scores.

    Raises:
        ConfigError: a key, value or option is wrong, or nothing varies.
        MissingExtra: Optuna, or a package of a sampler, is not installed.
        RunError: no trial finished, or the storage cannot be opened.
    """
    for name, count, least in (("jobs", jobs, 1), ("trials", trials, 0)):
        if not isinstance(count, int) or count < least:
            raise ConfigError(name, f"is {count!r}", f"A whole number >= {least}")
    import_optional(
        "optuna",
        "kd-sweep",
        "the package optuna is not installed",
        "pip install 'PATH/kd[sweep]'",
    )
    from kd.study.sweeps.conduct import plan_sweep, train_sweep  # imports Optuna

    if isinstance(settings, Config):
        settings = config.to_dict(settings)
    space = Space.read(settings, overrides)
    plan = plan_sweep(space, trials, sampler, pruner, by, objectives)
    return train_sweep(plan, storage, jobs)
