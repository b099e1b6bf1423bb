"""A run folder has config.yaml, manifest.json, metrics.jsonl and checkpoints/.

Rank 0 writes; every rank reads (several machines need a shared file system for
`run.folder`).
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from kd.core.errors import FolderInUse, RunError
from kd.core.scores import Scored
from kd.core.types import State
from kd.files import checkpoint, storage
from kd.files.json_file import object_of, read_json

# folder of the baseline inside a run folder; a given length is appended as "_STEPS"
BASELINE = "labels_only"

# in manifest.json: seconds of all starts; start time of this one, 0: ended
BILLED = ("billable_seconds", "began")


class RunDir:
    """A run has this folder; see `kd.engine.run.RunStore`."""

    def __init__(self, path: Path, rank: int = 0, keep: int = 2) -> None:
        """Name a run folder.

        The `keep` newest checkpoints and the chosen one are kept.
        """
        self.path = path
        self.rank = rank
        self.keep = keep
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def open(self, config: str, differences: Iterable[str] = ()) -> None:
        """Create or reopen the folder; rank 0 locks it.

        Without a checkpoint the run begins from scratch.
        """
        keys = list(differences)
        if keys and self._folders():
            wrong = f"'{self.path}' holds another run; it differs in {', '.join(keys)}"
            remedy = "Choose another run.name, or remove the folder"
            raise RunError("run.name", wrong, "One folder, one run", remedy)
        if self.rank != 0:  # rank 0 may be making the folder at this moment
            return
        # or a start that ended before its first file
        new = self.path.is_dir() and not self.config_file.exists()
        if new and any(
            not path.name.startswith((".", "checkpoints", "audit"))
            for path in self.path.iterdir()
        ):
            remedy = "Choose another run.name or run.folder"
            wrong = f"'{self.path}' exists and is not a run folder"
            raise RunError("run.name", wrong, "", remedy)
        if self._lock is None:
            self._create_and_lock()
        if not self._folders():
            manifest: dict[str, Any] = {}
            # files of a start that was killed before its first checkpoint
            with suppress(RunError):
                if self.stored_config() == config:
                    manifest = self.manifest()
            storage.write_text(self.config_file, config)
            storage.write_json(
                self.path / "manifest.json",
                {key: manifest[key] for key in BILLED if key in manifest},
            )

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    def stored_config(self) -> str | None:
        if not self.config_file.is_file():
            return None
        return self.config_file.read_text(encoding="utf-8", errors="replace")

    def step(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is no checkpoint."""
        steps = [int(folder.name.rpartition("_")[2]) for folder in self._folders()]
        return max(steps, default=0)

    def manifest(self) -> dict[str, Any]:
        """Return what manifest.json records; empty before the first `record`."""
        file = self.path / "manifest.json"
        if not file.is_file():
            return {}
        remedy = "Restore it, or choose another run.name"
        return read_json(file, "run.folder", remedy, _checked_facts)

    def record(self, **facts: Any) -> None:
        if self.rank == 0:
            storage.write_json(self.path / "manifest.json", self.manifest() | facts)

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        if self.rank != 0:
            return
        row = {
            "kind": kind,
            "step": state.step,
            "epoch": state.epoch,
            "images": state.images,
            "seconds": round(state.seconds, 3),
            **{name: float(value) for name, value in values.items()},
        }
        with storage.on_disk(self._metrics_file, "run.folder"):
            storage.append_rows(self._metrics_file, row)

    def baseline(self) -> "RunDir":
        """Return the folder of the latest baseline; it may not exist."""
        baseline = Path(str(self.manifest().get("baseline", BASELINE)))
        return RunDir(self.path / baseline.name)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows() if row["kind"] == kind]

    def rows(self) -> list[dict[str, Any]]:
        rows = storage.read_rows(self._metrics_file, last=None)
        for row in rows:
            if not isinstance(row.get("kind"), str) or type(row.get("step")) is not int:
                wrong = (
                    f"'{self._metrics_file}' is corrupt or was edited: a row"
                    f" {json.dumps(row)[:80]}"
                )
                raise RunError(
                    "run.folder", wrong, "Rows with kind and step", "Remove that line"
                )
        return rows

    def checkpoint(
        self, state: State, tensors: dict[str, Tensor], info: dict[str, Any], best: bool
    ) -> None:
        """Write checkpoints/step_N and remove old ones.

        It records whether it is the best so far.
        """
        with storage.on_disk(self._metrics_file, "run.folder"):
            # its rows must be on disk before the checkpoint
            if self._metrics_file.is_file():
                storage.flush(self._metrics_file)
        checkpoint.write(
            self.checkpoints / f"step_{state.step:08d}", state, tensors, info, best
        )
        try:
            best_folder = self._best()
        except RunError as error:  # the best one is unknown, so none is removed
            storage.log.warning(str(error))
        else:
            for folder in self._folders()[: -self.keep]:
                if folder != best_folder:
                    storage.remove_folder(folder)

    def restore(self) -> tuple[State, dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest checkpoint, and drop later metrics.

        The steps after it will be repeated.

        If the best checkpoint was removed by hand, `State.best` is that of the best
        remaining one.
        """
        folders = self._folders()
        if not folders:
            self._truncate_metrics(0)
            return None
        state, tensors, info = checkpoint.read(folders[-1])
        best = self._best()
        if best is not None:
            best_state, content = checkpoint.head(best)
            if not content["best"]:
                best_state = State()
            state = replace(state, best=best_state.best)
        self._truncate_metrics(state.step)
        return state, tensors, info

    def best(self) -> tuple[State, dict[str, Tensor], dict[str, Any]]:
        """Return the chosen checkpoint.

        If it was removed by hand, warn and return the newest one left.
        """
        folder = self._best()
        if folder is None:
            wrong = f"'{self.path}' has no checkpoint yet"
            raise RunError("run", wrong, "", "Train it first: `kd-train CONFIG`")
        state, content = checkpoint.head(folder)
        newest = checkpoint.head(self._folders()[-1])[0]
        if not content["best"] or state.best < newest.best:
            storage.log.warning(
                f"run: the best checkpoint of '{self.path}' is gone. '{folder.name}' is"
                " used."
            )
        return checkpoint.read(folder)

    def best_row(self) -> dict[str, Any]:
        """Return the validation row of the chosen checkpoint, or {} before it."""
        folder = self._best()
        step = checkpoint.head(folder)[0].step if folder else -1
        rows = [row for row in self.metrics("val") if row["step"] == step]
        return rows[-1] if rows else {}

    def best_weights(self) -> str:
        """Return a hash of the chosen checkpoint; empty before the first one."""
        folder = self._best()
        if folder is None:
            return ""
        checksums = json.dumps(checkpoint.head(folder)[1]["crc32"])
        return hashlib.sha256(checksums.encode()).hexdigest()

    def write_scored(self, scored: Scored) -> None:
        storage.write_json(
            self.path / "scored.json",
            {"weights": self.best_weights(), **scored.record()},
        )

    def scored(self) -> Scored | None:
        """Return the score from `write_scored`, or None.

        None: it is missing, or belongs to another checkpoint.
        """
        file = self.path / "scored.json"
        if not file.is_file():
            return None
        chosen = self.best_weights()  # "": the checkpoints were removed
        weights, scored = read_json(
            file, "run.folder", "Remove the file", _weights_and_score
        )
        return scored if chosen in (weights, "") else None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _folders(self) -> list[Path]:
        if not self.checkpoints.is_dir():
            return []
        folders = sorted(self.checkpoints.glob("step_*"))
        for folder in folders:
            if not folder.name.removeprefix("step_").isdecimal():
                raise RunError(
                    "run.folder",
                    f"'{folder}' is no checkpoint of kd",
                    "step_ and a number",
                    "Move it out of the folder",
                )
        return folders

    def _best(self) -> Path | None:
        """Return the newest checkpoint that was chosen when it was written.

        See `kd.engine.loop.evaluate`.

        If all of those were removed by hand, return the newest checkpoint; None if the
        run was never evaluated.
        """
        folders = self._folders()
        for folder in reversed(folders):
            if checkpoint.head(folder)[1]["best"]:
                return folder
        evaluated = folders and checkpoint.head(folders[-1])[0].best >= 0
        return folders[-1] if evaluated else None

    @property
    def _metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def _truncate_metrics(self, step: int) -> None:
        if self.rank == 0:
            self.rows()  # they have steps
            storage.keep_rows(self._metrics_file, lambda row: row["step"] <= step)

    def _create_and_lock(self) -> None:
        with storage.on_disk(self.path, "run.folder"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = storage.lock(self.path / ".lock", "run.name")
            except RunError as error:
                storage.log.warning(
                    f"{error} Training goes on. Start no second process for this"
                    " folder."
                )
            else:
                if self._lock is None:
                    holder = (self.path / ".lock").read_text().strip() or "unknown"
                    remedy = "Wait for it, or choose another run.name"
                    wrong = f"process {holder} is writing '{self.path}'"
                    raise FolderInUse("run.name", wrong, "", remedy)
            storage.recover(self.checkpoints, alone=True)
            storage.recover(self.path)


def _checked_facts(content: Any) -> dict[str, Any]:
    facts = object_of(content)
    object_of(facts.get("modes", {}))
    return facts


def _weights_and_score(content: Any) -> tuple[str, Scored]:
    return content.pop("weights"), Scored.read(content)


class Memory:
    """Keep the metrics of a run in memory. See `kd.engine.run.RunStore`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, kind: str, state: State, values: dict[str, float]) -> None:
        self.rows.append(
            {"kind": kind, "step": state.step, "images": state.images, **values}
        )

    def checkpoint(
        self, state: State, tensors: dict[str, Tensor], info: dict[str, Any], best: bool
    ) -> None:
        """Do nothing: the caller holds the student."""

    def restore(self) -> None:
        return None
