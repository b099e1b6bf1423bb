"""One teacher or several: each on its own to be fitted, loaded and checked, then all as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kd.config import Config
from kd.models.classifier import Classifier
from kd.models.ensemble import Ensemble, TeacherModel


def each(settings: Config) -> list[tuple[str, Config]]:
    """Return for each teacher its config path and the configuration in which it is the only one."""
    section, found = settings.teacher, []
    for i, one in enumerate([section, *section.also]):
        alone = replace(section, model=one.model, args=one.args, checkpoint=one.checkpoint, also=())
        found.append(("teacher" if i == 0 else f"teacher.also[{i - 1}]", replace(settings, teacher=alone)))
    return found


def together(settings: Config, models: Sequence[Classifier]) -> TeacherModel:
    """Return the one teacher, or several as one."""
    weights = [1.0, *(member.weight for member in settings.teacher.also)]
    return models[0] if len(models) == 1 else Ensemble(models, weights)
