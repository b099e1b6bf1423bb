"""Train the trials of a sweep in several processes; resume after a kill; record each finished trial."""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kd.config.reads import build_task
from kd.core.errors import ConfigError, Interrupted, KdError, RunError
from kd.core.host import end_with
from kd.core.intervals import within
from kd.core.scores import Column, Scored
from kd.files.json_file import DAMAGE
from kd.files.run_dir import RunDir
from kd.files.storage import append_rows, flush, lock, on_disk, read_rows
from kd.setup.recipe import resolve
from kd.study.sweeps.space import Trial, prepared_alike, write_yaml

POLL = 0.5  # seconds between two checks of the trials, which take minutes
CHOOSE = "Choose one of them"
LAST_BYTES = 2**14
"""Bytes at the end of an output searched for its last line: kd's error is one line of some hundred bytes."""
log = logging.getLogger("kd")


class Processes:
    """Running commands; at the end, or when this process is killed, the remaining ones get SIGTERM."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for process, _ in self.running.values():
            process.terminate()  # only one signal: a second would end it without a checkpoint
        for process, _ in self.running.values():
            process.wait()

    def start(self, name: str, words: Sequence[str], output: Path) -> None:
        """Start `kd WORDS` under a name; its output is appended to a file."""
        with output.open("ab") as file:
            command = [sys.executable, "-m", "kd", *words]
            none, own = subprocess.DEVNULL, end_with()
            process = subprocess.Popen(command, stdin=none, stdout=file, stderr=file, preexec_fn=own)
        self.running[name] = process, output

    def ended(self) -> dict[str, str]:
        """Return the commands that ended since the last call, with the last line of output for failed ones."""
        found = {}
        for name, (process, output) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            if code in (Interrupted.exit_code, -signal.SIGTERM, -signal.SIGINT):
                raise Interrupted(f"'{name}' was stopped; the same command resumes")
            if code < 0:  # its last output is not an error
                found[name] = f"was ended by signal {-code}"
            elif code == 1:
                found[name] = f"ended with a traceback, which '{output}' has"
            elif code == 0:
                found[name] = ""
            else:
                with output.open("rb") as opened:
                    opened.seek(max(0, output.stat().st_size - LAST_BYTES))
                    lines = opened.read().decode(errors="replace").split("\n")
                said = [line.strip() for line in lines if line.strip()]
                found[name] = said[-1] if said else f"ended with exit code {code}"
        return found


def failure(line: str) -> KdError:
    """Return the error in a process's last line of output."""
    where, _, wrong = line.partition(": ")
    return KdError(where, wrong) if wrong else KdError("kd-sweep", line)


class Trials:
    """The trials of a folder, in order, and their records."""

    def __init__(self, folder: Path, trials: Sequence[Trial], by: str) -> None:
        """Read the records. `by`: the key of the deciding score; "": the selection metric."""
        self.folder, self.trials, self.by, self.failed = folder, trials, by, dict[str, str]()
        self._journal, self._by_name = folder / "journal.jsonl", {trial.name: trial for trial in trials}
        self.scores = build_task(trials[0].config.task).scores
        self._columns = {column.key: column for column in (*self.scores.own, *self.scores.pair)}
        if by and by not in self._columns:
            raise ConfigError("--by", f"is '{by}'", f"Allowed: {', '.join(self._columns)}", CHOOSE)
        self.rows = {row["trial"]: row for row in self._recorded()}

    def _recorded(self) -> list[dict[str, Any]]:
        """Return the rows of these trials, with the trials' values."""
        rows = []
        for number, row in enumerate(read_rows(self._journal, last=None), 1):
            try:
                if row["trial"] in self._by_name and row["by"] == self.by:
                    column = self._columns[row["key"]]
                    if self.by and row["key"] != self.by:
                        raise ValueError(f"key is '{row['key']}', by is '{self.by}'")
                    names = {key: row[key] for key in ("trial", "by", "key")}
                    test = {"test": _score(row["test"], column)} if "test" in row else {}
                    values = dict(self._by_name[row["trial"]].values)
                    rows.append({**names, **_score(row, column), **test, "values": values})
            except DAMAGE as error:
                wrong = f"'{self._journal}', row {number} is damaged ({type(error).__name__}: {error})"
                raise RunError("run.folder", wrong, "", "Remove that line: its trial is recorded again") from error
        if len({row["key"] for row in rows}) > 1:
            wrong = f"'{self._journal}' has rows with different scores"
            raise RunError("run.folder", wrong, "", "Remove the file: the trials are recorded again")
        return rows

    def column(self) -> Column:
        """Return the column of the deciding score, once a trial has ended."""
        return self._columns[next(iter(self.rows.values()))["key"]]

    def last_row(self, name: str) -> Mapping[str, Any]:
        """Return the final validation scores of a run in the folder; {} if there is no such run."""
        run = RunDir(self.folder / name)
        scored = run.scored()
        return run.best_row() if scored is None or scored.split == "test" else scored.row

    def train(self, jobs: int, final: bool = False) -> None:
        """Train trials without a record. `final`: also score the test images."""
        waiting = [trial for trial in self.trials if trial.name not in self.rows]
        self._prepare(waiting)
        with Processes() as processes:
            while waiting or processes.running:
                for name, line in processes.ended().items():
                    if line:
                        self.failed[name] = line
                    else:
                        self._record(self._by_name[name])
                for trial in waiting[:]:
                    if len(processes.running) < jobs and not _in_use(self.folder / trial.name):
                        waiting.remove(trial)
                        words = ["train", write_yaml(trial, self.folder), *([] if final else ["--no-test"])]
                        processes.start(trial.name, words, self.folder / f"{trial.name}.log")
                time.sleep(POLL)
        for name, line in self.failed.items():
            log.info("sweep: %s failed: %s ('%s' has all that it said)", name, line, self.folder / f"{name}.log")

    def test(self, trial: Trial) -> dict[str, Any]:
        """Score the chosen checkpoint of a finished trial on the test images; return `score` and `interval`."""
        run = RunDir(self.folder / trial.name)
        if (scored := run.scored()) is None or scored.split != "test":
            self._run("test", ["train", write_yaml(trial, self.folder)], self.folder / f"{trial.name}.log")
            scored = run.scored()
        if scored is None:
            raise RunError("run.folder", f"'{run.path}' was not scored", "", "Run the same command again")
        return _of_column(scored, self.column().key)

    def _prepare(self, waiting: Sequence[Trial]) -> None:
        """Fit each teacher and fill each cache shared by several trials, before these begin."""
        alike: dict[str, list[Trial]] = {}
        for trial in waiting:
            alike.setdefault(prepared_alike(trial), []).append(trial)
        for trials in alike.values():
            first, recipe = trials[0], resolve(trials[0].config)
            cached = bool(recipe.members) and recipe.teacher.cache.views
            job = "cache" if cached else "teach" * bool(recipe.fits)
            begun = any((self.folder / trial.name / "config.yaml").is_file() for trial in trials)
            if begun or not job or len(trials) < 2:
                continue
            log.info("sweep: kd-%s for %d trials", job, len(trials))
            self._run(job, [job, write_yaml(first, self.folder)], self.folder / "prepare.log")

    def _run(self, name: str, words: Sequence[str], output: Path) -> None:
        with Processes() as processes:
            processes.start(name, words, output)
            while not (ended := processes.ended()):
                time.sleep(POLL)
        if ended[name]:
            raise failure(ended[name])

    def _record(self, trial: Trial) -> None:
        run = RunDir(self.folder / trial.name)
        best = run.best_row()
        key = self.by or self.scores.deciding(best).key
        if key not in best:
            known = ", ".join(key for key in self._columns if key in best)
            raise ConfigError("--by", f"is '{key}', which these runs do not have", f"Allowed: {known}", CHOOSE)
        row = {"trial": trial.name, "values": dict(trial.values), "by": self.by, "key": key, "score": best[key]}
        if (scored := run.scored()) is not None:
            last = _of_column(scored, key)
            row |= {"test": last} if scored.split == "test" else last
        with on_disk(self._journal, "run.folder"):
            append_rows(self._journal, row)
            flush(self._journal)
        self.rows[trial.name] = row
        shown = ", ".join(f"{key}={text}" for key, text in trial.values.items())
        log.info("sweep: %s: %s", shown, self.column().with_title(row["score"]))


def _of_column(scored: Scored, key: str) -> dict[str, Any]:
    """Return `score`, `interval` (if known) and `data` (hash of the images) of one of several scores."""
    ends = {"interval": list(scored.samples[key].interval())} if key in scored.samples else {}
    return {"score": scored.row[key], "data": scored.data, **ends}


def _score(row: Mapping[str, Any], column: Column) -> dict[str, Any]:
    """Check the same in a row that was read; raises one of `DAMAGE` for other values."""
    score, *ends = row["score"], *row.get("interval", ())
    share = column.unit == "%"
    for number in (score, *ends):
        if type(number) not in (int, float) or not math.isfinite(number) or (share and not 0 <= score <= 1):
            raise ValueError(f"{str(number)[:40]} is no {column.title}")
    if len(ends) not in (0, 2) or not isinstance(row.get("data", ""), str):
        raise ValueError("interval or data is not what kd writes")
    known = {key: row[key] for key in ("score", "data") if key in row}
    if ends:  # earlier versions wrote ends below 0 and above 1
        known["interval"] = list(within(*ends)) if share else ends
    return known


def _in_use(folder: Path) -> bool:
    """Return whether a process that outlived a killed sweep is still writing a run folder."""
    if not (folder / ".lock").is_file():
        return False
    with lock(folder / ".lock", "run.name") or nullcontext() as held:
        return held is None
