"""`kd.sweep`: train a configuration with many settings and find the best."""

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kd import config
from kd.config import Config
from kd.core.errors import ConfigError, FolderInUse, RunError
from kd.core.host import cores
from kd.core.scores import Column
from kd.core.text import table
from kd.files.json_file import read_json
from kd.files.run_dir import RunDir
from kd.files.storage import lock, on_disk, write_json, write_text
from kd.study.sifting import work
from kd.study.sweeps import frontier
from kd.study.sweeps.space import Space, Trial, require_different, sharing, student_alike
from kd.study.sweeps.trials import Trials, failure

FRESH = 2  # number of other seeds with which the best trial is trained again
log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results of a sweep."""

    folder: Path
    """`run.folder`/NAME_sweep: run folders of the trials, journal.jsonl, sweep.md, best.yaml, frontier.svg."""
    best: Path  # the best configuration, for `kd-train`
    rows: list[dict[str, Any]]
    """One row per trial, best first: `trial`, `values`, `score` on validation images, and its `interval` if known. If
    the students differ also their costs, see `kd.study.sweeps.frontier.measured`."""
    fresh: list[dict[str, Any]]
    """Rows for the best configuration with other seeds, also with `test`: `score` and `interval` on test images."""
    tested: dict[str, Any]  # `score` and `interval` of the best trial on test images; {} without a test split
    text: str  # the table, and the seed's part of the best score


def sweep(settings: str | Path | Config | dict[str, Any], *overrides: str, by: str = "", jobs: int = 1) -> Sweep:
    """Train a configuration with many settings, like `kd-sweep`. The same call resumes after a kill.

    Args:
        settings: a YAML file, its contents, or a loaded Config.
        overrides: `key=value`; a list `key=a,b,c` varies the key.
        by: key of the deciding score; "": the task's first.
        jobs: parallel trials; each gets its share of the cores.

    Raises:
        ConfigError: a key or value is wrong, nothing varies, or no such score.
        RunError: no trial finished, or another sweep is writing the folder.
    """
    if not isinstance(jobs, int) or jobs < 1:
        raise ConfigError("jobs", f"is {jobs!r}", "A whole number >= 1")
    space = Space.read(config.to_dict(settings) if isinstance(settings, Config) else settings, overrides)
    combinations = space.combinations()
    first = space.load(combinations[0])
    name = f"{first.run.name}_sweep"
    folder = Path(first.run.folder) / name

    def made(values: Mapping[str, str], threads: int, baseline: bool = False) -> Trial:
        return space.trial(values, name, sharing(space.load(values), threads), baseline)

    sized = len({student_alike(made(values, 1)) for values in combinations}) > 1
    every = {one.name: one for one in (made(values, 1, sized) for values in combinations)}  # before writing anything
    require_different(every.values())
    Trials(folder, list(every.values()), by)
    with _held(folder):
        file = folder / "sweep.json"
        if not file.is_file():  # a resumed trial keeps the sweep's initial number of threads, so its bits do not change
            write_json(file, {"threads": max(1, cores() // jobs)})
        threads = read_json(file, "run.folder", "Remove the file", lambda content: int(content["threads"]))
        tried = Trials(folder, [made(one.values, threads, sized) for one in every.values()], by)
        log.info("sweep: %d trials in '%s', %d of them done", len(every), folder, len(every.keys() & tried.rows.keys()))
        tried.train(jobs)
        winner, column = _best(tried), tried.column()
        best, baseline = folder / "best.yaml", space.load(winner.values).run.baseline  # the user's own setting
        run = replace(winner.config.run, name=f"{first.run.name}_best", baseline=baseline)
        write_text(best, config.dump(replace(winner.config, run=run)))
        newest = max(one.config.run.seed for one in tried.trials)
        seeds = [{"run.seed": str(newest + 1 + i)} for i in range(FRESH)]
        again = Trials(folder, [made({**winner.values, **seed}, threads) for seed in seeds], by)
        again.train(jobs, final=True)
        if again.failed:
            raise failure(next(iter(again.failed.values())))
        tested = tried.test(winner) if any("test" in row for row in again.rows.values()) else {}
        rows, fresh = _ranked(tried), [again.rows[trial.name] for trial in again.trials]
        hints = f"`kd-train {best}` trains the best again; `kd-report {folder}/*/` shows all curves on one page."
        rows, reference = frontier.measured(tried, rows) if sized else (rows, {})
        notes = [frontier.write(rows, reference, column, folder)] if sized else []
        shown = _table(rows, tried, column, reference)
        text = "\n\n".join([shown, *notes, luck(rows, fresh, tested, column), hints])
        write_text(folder / "sweep.md", text + "\n")
    return Sweep(folder, best, rows, fresh, tested, text)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    with on_disk(folder, "run.folder"):
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder / ".lock", "run.name")
    if held is None:
        raise FolderInUse("run.name", f"another sweep is writing '{folder}'", "", "Wait for it, or choose another name")
    with held:
        yield


def _ranked(tried: Trials) -> list[dict[str, Any]]:
    sign = 1 if tried.column().smaller else -1
    rows = [tried.rows[one.name] for one in tried.trials if one.name in tried.rows]
    return sorted(rows, key=lambda row: sign * row["score"])


def _best(tried: Trials) -> Trial:
    if not tried.rows:
        raise failure(next(iter(tried.failed.values())))
    rows = _ranked(tried)
    if len({row.get("data") for row in rows}) > 1:
        wrong = "the trials were not all scored on the same validation images"
        remedy = f"Sweep no key that changes them; where the images have changed, remove '{tried.folder}'"
        raise RunError("data", wrong, "One validation split", remedy)
    return next(trial for trial in tried.trials if trial.name == rows[0]["trial"])


def _table(rows: Sequence[dict[str, Any]], tried: Trials, column: Column, reference: dict[str, Any]) -> str:
    """Return the table of trials; `reference`: the teacher's row, if the students differ."""
    title, found = f"{column.title} (95 %)", []
    more = frontier.cells([*rows, reference] if reference else rows, column)
    for row, cells in zip(rows, more, strict=False):
        own = {**_work(tried, row["trial"]), **cells}
        marks = ["best" * (row is rows[0]), "frontier" * row.get("frontier", False), row.get("untimed", "")]
        shown = {**frontier.named(row["values"]), title: _shown(row, column), **own}
        found.append({**shown, "": ", ".join(filter(None, marks))})
    blank = dict.fromkeys(found[0], "-")
    if reference:
        found.append({**blank, title: column.text(reference["score"]), **more[-1], "": "the teacher"})
    for one in tried.trials:
        if one.name in tried.failed:
            found.append({**blank, **frontier.named(one.values), "": f"failed: {tried.failed[one.name]}"})
    return table(found)


def _work(tried: Trials, name: str) -> dict[str, str]:
    if all(trial.config.sifter.kind == "none" for trial in tried.trials):
        return {}
    run = RunDir(tried.folder / name)
    rows = run.rows()
    epochs, train = ([row for row in rows if row["kind"] == kind] for kind in ("epoch", "train"))
    return work(epochs, train, int(run.manifest().get("images", 0)))


def _shown(found: Mapping[str, Any], column: Column) -> str:
    ends = " to ".join(column.text(end).removesuffix(" %") for end in found.get("interval", ()))
    return column.text(found["score"]) + (f" ({ends})" if ends else "")


def luck(
    rows: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]], tested: Mapping[str, Any], column: Column
) -> str:
    """Report the best trial's scores with other seeds and on test images, or that these are unknown."""
    best, count, again = rows[0]["score"], len(rows), [row["score"] for row in fresh]
    difference = (best - statistics.mean(again)) * (-1 if column.smaller else 1)
    points = f"{100 * difference:+.1f} points" if column.unit == "%" else f"{difference:+.4f} {column.unit}".rstrip()
    text = f"The best of {count} trials has {column.with_title(best)} on validation images. Trained again with "
    text += f"{len(fresh)} other seeds it has {' and '.join(column.text(score) for score in again)}: "
    text += f"the seed's part of the best score is {points}. "
    if not tested:
        return text + (
            "The images' part is not known: all of these were scored on the images that chose the best. "
            "data.test_fraction=0.3 keeps some apart."
        )
    others = " and ".join(_shown(row["test"], column) for row in fresh if "test" in row)
    return text + f"On test images, which chose nothing, the best has {_shown(tested, column)}, the others {others}."
