"""Run a configuration: teacher, student, baseline, report.

Other jobs open a run and get its teacher by functions of this module.
"""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from kd import config
from kd.config import Config
from kd.core.contracts import Backend
from kd.core.errors import ConfigError, FolderInUse, ModelError, RunError
from kd.core.host import peak_mib
from kd.core.ranks import numbers_of_rank_0
from kd.core.references import redact, reference_or_value
from kd.core.scores import Trained
from kd.files.run_dir import BASELINE, BILLED, RunDir
from kd.files.storage import read_rows, write_text
from kd.jobs.check import check
from kd.jobs.distill import distill
from kd.jobs.observe import gapless_time_tables
from kd.setup.build import distributed
from kd.setup.build_teacher import META, RunContext, Teachers, load_teachers
from kd.setup.data import Data, open_data
from kd.setup.finished import needs_trust
from kd.setup.recipe import (
    Recipe,
    Record,
    fit_folders,
    flatten,
    is_fitted,
    is_resume_mutable,
    match_baseline_length,
    resolve,
)
from kd.setup.same_data import same_contents

POLL = 0.5  # seconds between two checks of the folder
# rank 0's finding on a fit: a number, which it sends to the others
MINE = 0  # it fits the teacher
FITTED = 1  # the teacher is fitted
IN_USE = 2  # another process fits it
log = logging.getLogger("kd")


def train(settings: Config, before: float = 0.0, final: str = "test") -> Trained:
    """Fit the teacher if needed, distill, train a configured baseline, report.

    The run's time begins `before` seconds ago, at the start of the command. `final`:
    "val" does not score test images.
    """
    started = time.perf_counter() - before
    recipe = resolve(settings)
    record = recipe.record
    with (
        gapless_time_tables(started),
        open_job(recipe, obtain_teachers, started, checked=True) as (setting, folder),
    ):
        result = distill(setting, folder, record.name, final)
        if recipe.baseline is not None:
            record_length(recipe, folder, setting.backend)
            baseline = match_baseline_length(recipe.baseline, folder)
            folder.record(baseline=baseline.path.name)
            with open_run(baseline.record, setting.backend.rank) as baseline_folder:
                data = replace(setting.data, plan=baseline.data).with_labels()
                labels_only = replace(
                    setting, recipe=baseline, teachers=Teachers(None, data)
                )
                title = f"{record.name} (labels only)"
                trained = distill(labels_only, baseline_folder, title, final)
                result = replace(result, baseline=trained)
        if setting.backend.rank == 0:
            from kd.study.report.record import record_of  # imports for the end of a run
            from kd.study.report.summary import summary_lines

            path = shlex.quote(str(recipe.path))
            models = {"student": recipe.student}
            trust = " --trust" if needs_trust(recipe.path, models) else ""
            lines = [
                f"# {record.name}",
                "",
                *summary_lines(record_of(folder, recipe)),
                f"Next: `kd-export {path}{trust}` checks the student and writes what"
                f" timm and onnxruntime load; `kd-serve {path}/export` serves it on a"
                " CPU."
                f" `kd-report {path}` writes a page about the run.",
                "",
            ]
            result = replace(result, report=redact("\n".join(lines)))
            write_text(recipe.path / "report.md", result.report)
    return result


def record_length(recipe: Recipe, folder: RunDir, backend: Backend) -> None:
    """Record the baseline's length before it begins, so that a resume continues it.

    All ranks must call it.
    """
    if not RunDir(folder.path / BASELINE).config_file.is_file():
        from kd.study.paying import baseline_length  # imports for the end of a run
        from kd.study.report.record import record_of

        folder.record(**{BASELINE: baseline_length(record_of(folder, recipe))})
    backend.barrier()


@contextmanager
def open_job(
    recipe: Recipe,
    obtain: Callable[[Recipe, Data, Backend], Teachers],
    started: float | None = None,
    fill: bool = True,
    examine: Callable[[Data], None] = lambda data: None,
    checked: bool = False,
) -> Iterator[tuple[RunContext, RunDir]]:
    """Open the inputs of a job, quick failures first, and a run folder to be written.

    All ranks must call it.

    Args:
        recipe: the resolved configuration.
        obtain: fits or loads its teachers; called last.
        started: start of the command by `time.perf_counter`; None: the run folder is
            neither written nor locked.
        fill: fill `data.store`; False for a job that reads each image once.
        examine: is called with the data before a teacher is loaded; may raise.
        checked: run `check` first, on every rank.
    """
    with distributed(recipe.backend) as backend:
        listed = check(recipe).data if checked else None
        data = open_data(recipe.data, backend, fill, listed)
        examine(data)
        data = replace(data, contents=same_contents(data.splits, backend))
        with ExitStack() as stack:
            folder = RunDir(recipe.path, backend.rank)
            if started is not None:
                folder = stack.enter_context(open_run(recipe.record, backend.rank))
                fits = fit_folders(recipe, data.fingerprint).values()
                paths = [fit.path for fit, _ in fits]
                stack.enter_context(record_billable_time(folder, started, paths))
            yield RunContext(recipe, obtain(recipe, data, backend), backend), folder


@contextmanager
def record_billable_time(
    folder: RunDir, started: float, fits: Sequence[Path] = ()
) -> Iterator[None]:
    """Record the total time of all starts of a command, which a rented machine bills.

    A killed start counts up to its last row of machine samples or steps, in its folder
    or its fits' folders.
    """
    recorded = folder.manifest()
    earlier, killed_start = (float(recorded.get(key, 0.0)) for key in BILLED)
    if killed_start:
        ends = [
            float(row["time"])
            for path in (folder.path, *fits)
            for pattern in ("monitor_*.jsonl", "timeline_*.jsonl")
            for file in path.rglob(pattern)
            for row in read_rows(file)[-1:]
        ]
        earlier += max([0.0, *(end - killed_start for end in ends)])
    folder.record(
        billable_seconds=round(earlier, 3),
        began=round(time.time() - time.perf_counter() + started, 3),
    )
    try:
        yield
    finally:
        folder.record(
            billable_seconds=round(earlier + time.perf_counter() - started, 3),
            began=0.0,
            peak_mib=round(peak_mib()),
        )


@contextmanager
def open_run(record: Record, rank: int) -> Iterator[RunDir]:
    """Open the folder of a run for this block; refuse one of a run with other keys."""
    folder = RunDir(record.path, rank, record.keep)
    try:
        stored = folder.stored_config()
        differences = []
        # parsing takes 0.7 CPU seconds, and a waiting run is here twice a second
        if stored is not None and stored != record.yaml:
            differences = _key_differences(folder, stored, record)
        folder.open(record.yaml, differences)
        if rank == 0 and stored not in (None, record.yaml):
            # only free keys differ; reports read them
            write_text(folder.config_file, record.yaml)
        yield folder
    finally:
        folder.close()


def _key_differences(folder: RunDir, stored: str, record: Record) -> list[str]:
    """Return the keys that make a stored configuration another run."""
    from kd.setup.finished import parse  # only if the folder has another text

    settings = parse(folder.config_file, stored, trust=True)
    old = flatten(config.to_dict(settings, values=True))
    differences = []
    for key in sorted(old.keys() | record.keys.keys()):
        before = old.get(key)
        after = record.keys.get(key)
        if before != after and not is_resume_mutable(key):
            differences.append(
                f"{key} ({reference_or_value(before)} -> {reference_or_value(after)})"
            )
    return differences


def teach(settings: Config, before: float = 0.0) -> list[Path]:
    """Fit the teachers of a configuration, or reuse fitted ones; return their folders.

    `before` as in `train`.
    """
    if not settings.teacher.fit.length:
        remedy = "Say for how long to fit the teacher, here or by teacher.fit.steps"
        raise ConfigError("teacher.fit.epochs", "is 0", "At least 1", remedy)
    started = time.perf_counter() - before
    recipe = resolve(settings)
    with (
        gapless_time_tables(started),
        open_job(recipe, lambda recipe, data, backend: Teachers(None, data)) as job,
    ):
        setting, _ = job
        data = setting.data
        fits = fit_folders(recipe, data.fingerprint).values()
        return [fit_teacher(*fit, data, setting.backend) for fit in fits]


def obtain_teachers(recipe: Recipe, data: Data, backend: Backend) -> Teachers:
    """Load all teachers; fit those without a checkpoint first.

    All ranks must call it.
    """
    section = recipe.teacher
    if section.shard or section.pipeline:
        backend.check_divided(section.pipeline)  # refuse before minutes of fitting
    weights: dict[str, str | Path] = {}
    for config_path, (fit, target) in fit_folders(recipe, data.fingerprint).items():
        weights[config_path] = fit_teacher(fit, target, data, backend)
    if section.shard and backend.rank != 0:
        weights = dict.fromkeys(recipe.members, META)
    teachers = load_teachers(recipe, data, weights)
    if section.shard:
        size = getattr(teachers.model, "input_size", 0)
        size_of_0 = int(numbers_of_rank_0(backend, [size])[0])
        if size_of_0 != size:  # what its trainer wrote, which other ranks do not read
            wrong = f"the weights are for {size_of_0} px, which rank 0 alone knows"
            remedy = f"Set img_size or pretrained_cfg_overlay.input_size to {size_of_0}"
            raise ModelError("teacher.args", wrong, "", remedy)
    return teachers


def fit_teacher(recipe: Recipe, target: Path, data: Data, backend: Backend) -> Path:
    """Fit a teacher on the labels and keep its best epoch, or reuse a fitted one."""
    with ExitStack() as stack:
        folder = open_fit(
            stack, recipe.record, target, backend, recipe.backend.timeout_seconds
        )
        if folder is None:
            if backend.rank == 0:
                log.info("teacher: reusing '%s'", target)
            return target
        if backend.rank == 0:
            init = {"scratch": "random", "pretrained": "pretrained"}[
                recipe.student.init
            ]
            log.info(
                "teacher: learning rate %g, from %s weights",
                recipe.lr,
                init,
            )
        data = _fit_data(data, recipe, backend).with_labels()
        setting = RunContext(recipe, Teachers(None, data), backend)
        distill(setting, folder, "teacher", final="")
        if backend.rank == 0:
            # imports needed only after a fit
            from kd.deploy.export.package import write_folder
            from kd.models.timm_folder import export_files
            from kd.setup.student import best_student

            student, provenance = best_student(folder, recipe, data.classes)
            content, weights = export_files(
                student, data.classes, data.plan.crop_pct, recipe.task.problem_type
            )
            write_folder(target, content, weights, provenance)
        backend.barrier()
    return target


def _fit_data(data: Data, recipe: Recipe, backend: Backend) -> Data:
    """Return the data for a fit, with its seed, batch size, views and augmentation."""
    fit_data = replace(data, plan=recipe.data)
    if data.stored is not None:
        from kd.setup.open_store import keep_rules  # only where pixels are stored

        # with another crop the store has other pixels
        if keep_rules(fit_data.plan) != keep_rules(data.plan):
            plan = replace(fit_data.plan, folder=data.plan.folder)
            return open_data(plan, backend, listed=replace(fit_data, stored=None))
    return fit_data


def open_fit(
    stack: ExitStack,
    record: Record,
    target: Path,
    backend: Backend,
    timeout_seconds: float,
) -> RunDir | None:
    """Open the run folder of a fit until `stack` ends; None if the teacher is fitted.

    While another process has locked the folder, wait. Ranks check together, so that no
    collective times out. All ranks must call it.
    """
    last_stamp = ""
    last_progress = time.monotonic()
    is_waiting = False
    while True:
        outcome = FITTED
        folder = None
        holder = ""
        if backend.rank == 0 and not is_fitted(target):
            try:
                folder = stack.enter_context(open_run(record, 0))
                # it may have been fitted since the first check
                outcome = FITTED if is_fitted(target) else MINE
            except FolderInUse as error:
                outcome = IN_USE
                holder = str(error.wrong)
        [outcome] = numbers_of_rank_0(backend, [outcome])
        if outcome == FITTED:
            return None
        if outcome == MINE:
            return folder or stack.enter_context(open_run(record, backend.rank))
        if backend.rank == 0:
            stamp = holder + _progress_stamp(record.path)
            if stamp != last_stamp:
                last_stamp = stamp
                last_progress = time.monotonic()
            if time.monotonic() - last_progress > timeout_seconds:
                wrong = f"{holder}, and has written nothing for {timeout_seconds:g} s"
                remedy = "End that process, or raise backend.timeout_seconds"
                raise RunError("teacher.fit", wrong, "", remedy)
            if not is_waiting:
                log.info("teacher: %s; waiting for the teacher that it fits", holder)
                is_waiting = True
        time.sleep(POLL)


def _progress_stamp(path: Path) -> str:
    """Return the sizes of a run folder's files, which change while the run proceeds."""
    # The monitor continues in a hanging run. No file of rows is ever removed.
    files = [*path.glob("metrics.jsonl"), *path.glob("timeline_*.jsonl")]
    return "\n".join(f"{file.name} {file.stat().st_size}" for file in sorted(files))
