"""The main job (teacher, student, baseline, report), and how other jobs open a run and
get its teacher.
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
from kd.core.ranks import of_rank_0
from kd.core.references import redact, written
from kd.core.scores import Trained
from kd.files.run_dir import BASELINE, BILLED, RunDir
from kd.files.storage import read_rows, write_text
from kd.jobs.check import check
from kd.jobs.distill import distill
from kd.jobs.observe import gapless_time_tables
from kd.setup.build import distributed
from kd.setup.build_teacher import META, Setting, Teachers, load_teachers
from kd.setup.data import Data, open_data
from kd.setup.recipe import (
    Recipe,
    Record,
    as_long,
    fit_folders,
    flatten,
    is_fitted,
    is_free,
    resolve,
)
from kd.setup.same_data import same_contents

POLL = 0.5  # seconds between two checks of the folder
MINE, FITTED, IN_USE = (
    0,
    1,
    2,
)  # rank 0's finding; a number, which it sends to the others
log = logging.getLogger("kd")


def train(settings: Config, before: float = 0.0, final: str = "test") -> Trained:
    """Run a configuration: fit the teacher if needed, distill, train the baseline on request, write the report.

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
            alone, title = (
                as_long(recipe.baseline, folder),
                f"{record.name} (labels only)",
            )
            folder.record(baseline=alone.path.name)
            with open_run(alone.record, setting.backend.rank) as inner:
                data = replace(setting.data, plan=alone.data).with_labels()
                unaided = replace(setting, recipe=alone, teachers=Teachers(None, data))
                result = replace(result, baseline=distill(unaided, inner, title, final))
        if setting.backend.rank == 0:
            from kd.study.report.record import record_of  # imports for the end of a run
            from kd.study.report.summary import described

            path, shown = recipe.path, shlex.quote(str(recipe.path))
            following = (
                f"Next: `kd-export {shown}` checks the student and writes what timm and"
                " onnxruntime load; "
            )
            following += (
                f"`kd-serve {shown}/export` serves it on a CPU. `kd-report {shown}`"
                " writes a page about the run."
            )
            lines = [
                f"# {record.name}",
                "",
                *described(record_of(folder, recipe)),
                following,
                "",
            ]
            result = replace(result, report=redact("\n".join(lines)))
            write_text(path / "report.md", result.report)
    return result


def record_length(recipe: Recipe, folder: RunDir, backend: Backend) -> None:
    """Record the length of labels alone before they begin: a resume continues the same
    run. All ranks must call it.
    """
    if not RunDir(folder.path / BASELINE).config_file.is_file():
        from kd.study.paying import length_alone  # imports for the end of a run
        from kd.study.report.record import record_of

        folder.record(**{BASELINE: length_alone(record_of(folder, recipe))})
    backend.barrier()


@contextmanager
def open_job(
    recipe: Recipe,
    obtain: Callable[[Recipe, Data, Backend], Teachers],
    started: float | None = None,
    fill: bool = True,
    examine: Callable[[Data], None] = lambda data: None,
    checked: bool = False,
) -> Iterator[tuple[Setting, RunDir]]:
    """Open the inputs of a job, quick failures first, and the run folder if it is
    written. All ranks must call it.

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
        data = open_data(
            recipe.data, backend, fill, check(recipe).data if checked else None
        )
        examine(data)
        data = replace(data, contents=same_contents(data.splits, backend))
        with ExitStack() as stack:
            folder = RunDir(recipe.path, backend.rank)
            if started is not None:
                folder = stack.enter_context(open_run(recipe.record, backend.rank))
                fits = fit_folders(recipe, data.fingerprint).values()
                stack.enter_context(
                    record_billable_time(folder, started, [fit.path for fit, _ in fits])
                )
            yield Setting(recipe, obtain(recipe, data, backend), backend), folder


@contextmanager
def record_billable_time(
    folder: RunDir, started: float, fits: Sequence[Path] = ()
) -> Iterator[None]:
    """Record the total time of all starts of a command, which a rented machine bills.

    A killed start counts up to its last row of machine samples or steps, in its folder
    or its fits' folders.
    """
    known, now = folder.manifest(), time.perf_counter
    before, began = (float(known.get(key, 0.0)) for key in BILLED)
    paths = (folder.path, *fits) if began else ()
    files = [
        file
        for path in paths
        for kind in ("monitor", "timeline")
        for file in path.rglob(f"{kind}_*.jsonl")
    ]
    ends = [float(row["time"]) for file in files for row in read_rows(file)[-1:]]
    before += max([0.0, *(end - began for end in ends)])
    folder.record(
        billable_seconds=round(before, 3), began=round(time.time() - now() + started, 3)
    )
    try:
        yield
    finally:
        folder.record(
            billable_seconds=round(before + now() - started, 3),
            began=0.0,
            peak_mib=round(peak_mib()),
        )


@contextmanager
def open_run(record: Record, rank: int) -> Iterator[RunDir]:
    """Open the folder of a run for this block; refuse a folder of another run, naming
    the keys that differ.
    """
    folder = RunDir(record.path, rank, record.keep)
    try:
        stored, differences = folder.stored_config(), []
        if stored not in (
            None,
            record.yaml,
        ):  # parsing takes 0.7 CPU seconds, and a waiting run is here twice a second
            from kd.setup.finished import parse  # only if the folder has another text

            old = flatten(
                config.to_dict(
                    parse(folder.config_file, stored, trust=True), values=True
                )
            )
            for key in sorted(old.keys() | record.keys.keys()):
                before, now = old.get(key), record.keys.get(key)
                if before != now and not is_free(key):
                    differences.append(f"{key} ({written(before)} -> {written(now)})")
        folder.open(record.yaml, differences)
        if rank == 0 and stored not in (None, record.yaml):
            write_text(
                folder.config_file, record.yaml
            )  # only free keys differ; reports read them
        yield folder
    finally:
        folder.close()


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
        open_job(recipe, lambda recipe, data, backend: Teachers(None, data)) as (
            setting,
            _,
        ),
    ):
        data = setting.data
        fits = fit_folders(recipe, data.fingerprint).values()
        return [fit_teacher(*fit, data, setting.backend) for fit in fits]


def obtain_teachers(recipe: Recipe, data: Data, backend: Backend) -> Teachers:
    """Load all teachers; fit those without a checkpoint first. All ranks must
    call it.
    """
    divided = recipe.teacher
    if divided.shard or divided.pipeline:
        backend.check_divided(divided.pipeline)  # refuse before minutes of fitting
    weights: dict[str, str | Path] = {}
    for config_path, (fit, target) in fit_folders(recipe, data.fingerprint).items():
        weights[config_path] = fit_teacher(fit, target, data, backend)
    if divided.shard and backend.rank != 0:
        weights = dict.fromkeys(recipe.members, META)
    teachers = load_teachers(recipe, data, weights)
    if divided.shard:
        size = getattr(teachers.model, "input_size", 0)
        first = int(of_rank_0(backend, [size])[0])
        if first != size:  # what its trainer wrote, which other ranks do not read
            wrong = f"the weights are for {first} px, which rank 0 alone knows"
            raise ModelError(
                "teacher.args",
                wrong,
                "",
                f"Set img_size or pretrained_cfg_overlay.input_size to {first}",
            )
    return teachers


def fit_teacher(recipe: Recipe, target: Path, data: Data, backend: Backend) -> Path:
    """Fit a teacher on the labels and keep its best epoch; a teacher fitted by another
    process is reused.
    """
    with ExitStack() as stack:
        folder = open_fit(
            stack, recipe.record, target, backend, recipe.backend.timeout_seconds
        )
        if folder is None:
            if backend.rank == 0:
                log.info("teacher: reusing '%s'", target)
            return target
        if backend.rank == 0:
            weights = {"scratch": "random", "pretrained": "pretrained"}[
                recipe.student.init
            ]
            log.info(
                "teacher: learning rate %g, from %s weights",
                recipe.config.optimizer.lr,
                weights,
            )
        data = _fit_data(data, recipe, backend).with_labels()
        distill(
            Setting(recipe, Teachers(None, data), backend), folder, "teacher", final=""
        )
        if backend.rank == 0:
            from kd.deploy.export.package import (
                write_folder,
            )  # imports needed only after a fit
            from kd.models.timm_folder import export_files
            from kd.setup.student import best_student

            student, provenance = best_student(folder, recipe, data.classes)
            problem_type = recipe.task.problem_type
            content, weights = export_files(
                student, data.classes, data.plan.crop_pct, problem_type
            )
            write_folder(target, content, weights, provenance)
        backend.barrier()
    return target


def _fit_data(data: Data, recipe: Recipe, backend: Backend) -> Data:
    """Return the data for a fit, with its own seed, batch size, views and
    augmentation.
    """
    own = replace(data, plan=recipe.data)
    if data.stored is not None:
        from kd.setup.open_store import keep_rules  # only where pixels are stored

        if keep_rules(own.plan) != keep_rules(
            data.plan
        ):  # with another crop the store has other pixels
            return open_data(
                replace(own.plan, folder=data.plan.folder),
                backend,
                listed=replace(own, stored=None),
            )
    return own


def open_fit(
    stack: ExitStack,
    record: Record,
    target: Path,
    backend: Backend,
    timeout_seconds: float,
) -> RunDir | None:
    """Open the run folder of a fit until `stack` ends; None if the teacher is fitted.
    All ranks must call it.

    While another process has locked the folder, wait. Ranks check together, so that no
    collective times out.
    """
    seen, since, waiting = "", time.monotonic(), False
    while True:
        outcome, folder, holder = FITTED, None, ""
        if backend.rank == 0 and not is_fitted(target):
            try:
                folder = stack.enter_context(open_run(record, 0))
                outcome = (
                    FITTED if is_fitted(target) else MINE
                )  # it may have been fitted since the first check
            except FolderInUse as error:
                outcome, holder = IN_USE, str(error.wrong)
        [outcome] = of_rank_0(backend, [outcome])
        if outcome == FITTED:
            return None
        if outcome == MINE:
            return folder or stack.enter_context(open_run(record, backend.rank))
        if backend.rank == 0:
            now = holder + _progress_stamp(record.path)
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > timeout_seconds:
                wrong = f"{holder}, and has written nothing for {timeout_seconds:g} s"
                raise RunError(
                    "teacher.fit",
                    wrong,
                    "",
                    "End that process, or raise backend.timeout_seconds",
                )
            if not waiting:
                log.info("teacher: %s; waiting for the teacher that it fits", holder)
                waiting = True
        time.sleep(POLL)


def _progress_stamp(path: Path) -> str:
    """Return sizes and times of a run folder's files: they change while the run makes
    progress.
    """
    # The monitor continues in a hanging run. No file of rows is ever removed.
    files = [*path.glob("metrics.jsonl"), *path.glob("timeline_*.jsonl")]
    return "\n".join(f"{file.name} {file.stat().st_size}" for file in sorted(files))
