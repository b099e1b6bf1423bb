"""Experiment trackers through accelerate: TensorBoard, Weights & Biases, MLflow, Trackio and what else it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kd.errors import ConfigError, MissingExtra, did_you_mean


def listeners(names: Sequence[str], project: str, folder: Path, config: dict[str, Any]) -> list[Callable[..., None]]:
    """Start trackers and return one listener each: (kind, values, step) -> None.

    Args:
        names: as accelerate calls them.
        project: name of the run.
        folder: where file-based trackers write.
        config: the resolved configuration, flattened to `section.key`.

    Raises:
        ConfigError: unknown name.
        MissingExtra: the tracker's package is not installed.
    """
    if not names:
        return []
    from accelerate import tracking

    known = {str(name): cls for name, cls in tracking.LOGGER_TYPE_TO_CLASS.items()}
    available = {str(name) for name in tracking.get_available_trackers()}
    started = []
    for name in names:
        if name not in known:
            near = did_you_mean(name, known) or "Correct the name"
            raise ConfigError("run.trackers", f"no tracker '{name}'", f"Allowed: {', '.join(sorted(known))}", near)
        if name not in available:
            remedy = "pip install 'kd[track]'" if name == "tensorboard" else f"pip install {name}"
            raise MissingExtra("run.trackers", f"'{name}' is not installed", "", remedy)
        cls = known[name]
        tracker = cls(project, logging_dir=str(folder)) if cls.requires_logging_directory else cls(project)
        if hasattr(tracker, "start"):
            tracker.start()
        tracker.store_init_configuration(config)
        started.append(tracker)

    def listen(tracker: Any) -> Callable[..., None]:
        return lambda kind, values, step: tracker.log({f"{kind}/{k}": v for k, v in values.items()}, step=step)

    return [listen(tracker) for tracker in started]
