"""Run experiment trackers through accelerate.

They are TensorBoard, Weights & Biases, MLflow, Trackio and others.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kd.core.errors import ConfigError, MissingExtra, did_you_mean, error_summary

log = logging.getLogger("kd")


class Trackers:
    """Pass every row of metrics to experiment trackers."""

    def __init__(
        self,
        names: Sequence[str],
        project: str,
        folder: Path,
        config: Mapping[str, Any],
    ) -> None:
        """Start trackers by accelerate's names; without a name nothing is imported.

        `config` is flat: `section.key`.
        """
        # running trackers by name; failed ones are removed
        self._trackers: dict[str, Any] = {}
        for name in names:
            start = partial(_start, tracker_class(name), project, folder, config)
            tracker = self._attempt(name, start)
            if tracker is not None:
                self._trackers[name] = tracker

    def log(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Pass a row on as `kind/name`."""
        row = {f"{kind}/{name}": value for name, value in values.items()}
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, partial(tracker.log, row, step=step))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.finish)

    def _attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a tracker; after any error, continue without it."""
        # its server may be down, and training is expensive
        try:
            return call()
        except Exception as error:
            self._trackers.pop(name, None)
            log.warning(
                f"run.trackers: '{name}' failed ({error_summary(error)})."
                " Training goes on without it."
            )
            return None


def tracker_class(name: str) -> Any:
    """Return the class of a tracker; ConfigError: unknown or not installed."""
    from accelerate import tracking

    trackers = {str(key): cls for key, cls in tracking.LOGGER_TYPE_TO_CLASS.items()}
    if name not in trackers:
        allowed = f"Allowed: {', '.join(sorted(trackers))}"
        remedy = did_you_mean(name, trackers) or "Correct the name"
        raise ConfigError("run.trackers", f"no tracker '{name}'", allowed, remedy)
    if name not in {str(key) for key in tracking.get_available_trackers()}:
        package = "'PATH/kd[track]'" if name == "tensorboard" else name
        wrong = f"'{name}' is not installed"
        raise MissingExtra("run.trackers", wrong, "", f"pip install {package}")
    return trackers[name]


def _start(cls: Any, project: str, folder: Path, config: Mapping[str, Any]) -> Any:
    options = {"logging_dir": str(folder)} if cls.requires_logging_directory else {}
    tracker = cls(project, **options)
    if hasattr(tracker, "start"):
        tracker.start()
    plain = {
        key: value if isinstance(value, (int, float, str, bool)) else str(value)
        for key, value in config.items()
    }
    tracker.store_init_configuration(plain)
    return tracker
