"""A graph that passes unsure images on to a second export, as a candidate of
`--accept`.

Every second labelled image chooses the confidence threshold of a share; the smallest
share within the limits on both halves is taken. Its values are of the half that did not
choose the threshold.

Shape legend: N images, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kd.core.errors import ConfigError
from kd.core.evaluation import Task
from kd.core.text import percent
from kd.deploy.export import defer
from kd.deploy.export.flags import ExportOptions, missed_limits
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.serve.model import Description, describe
from kd.parts.tasks.single_label import calibration_error
from kd.setup.data import DataPlan

WHERE = "--second"
SHARES = tuple(percent / 100 for percent in range(1, 101))
"""Shares of images passed on that are tried, up to all. 2,000 images know a share to
about a point.
"""
HALVES = slice(0, None, 2), slice(1, None, 2)  # the first chooses the threshold
PASSED_ON = "passed_on"


@dataclass(frozen=True, slots=True)
class SecondOutputs:
    """The second export and its graph's outputs for the compared images."""

    logits: Tensor  # [N, C]
    ms: float  # see `ms` of `--accept`; 0: not wanted
    megabytes: float


@dataclass(frozen=True, slots=True)
class CascadeTrial:
    """A graph with the second export, and alone, on the same images."""

    rule: defer.Rule
    values: dict[str, float]
    alone: dict[str, float]
    images: int

    def reason(self, name: str, wanted: Mapping[str, float]) -> str:
        """Return why the pair is not accepted; "" if it is within the limits."""
        missed = ", ".join(missed_limits(self.values, wanted))
        alone = ", ".join(missed_limits(self.alone, wanted)) or "nothing"
        passed_on = (
            f"{percent(self.values[PASSED_ON])} of {self.images} images passed on"
        )
        return (
            f"{name} with the second export misses {missed}, with {passed_on} (without:"
            f" {alone})"
            if missed
            else ""
        )


def describe_second(
    options: ExportOptions, task: Task, classes: Sequence[str], data: DataPlan
) -> Description | None:
    """Read the second export, if it is given.

    Raises:
        ConfigError: it does not predict the student's classes from the student's
            pixels, or other options exclude it.
    """
    folder = options.second
    if folder is None:
        return None
    if options.accept is None or options.defer or options.defer_share:
        wrong = "chooses the share of unsure images by the limits of --accept"
        raise ConfigError(
            WHERE, wrong, "", "Give --accept, and neither --defer nor --defer-share"
        )
    if task.logits != "softmax":
        raise ConfigError(
            WHERE, "needs a student with one class per image", "", f"Leave {WHERE} out"
        )
    second = describe(folder)
    if second.labels != tuple(classes) or second.output.thresholds:
        wrong = (
            f"'{folder}' does not predict the {len(classes)} classes of the student, in"
            " their order"
        )
        raise ConfigError(WHERE, wrong, "", "Name the export of this run's teacher")
    if (second.size, second.crop, second.bits) != (
        data.image_size,
        data.crop_pct,
        data.bits,
    ):
        wrong = (
            f"'{folder}' takes images of {second.size} px, cropped to {second.crop:g},"
            " not as the student's"
        )
        raise ConfigError(WHERE, wrong, "", "Name the export of this run's teacher")
    return second


def values_at(
    outputs: GraphOutputs,
    name: str,
    second: Tensor,
    task: Task,
    behind: float,
    threshold: float,
) -> list[dict[str, float]]:
    """Return the values of a graph with the second export at a confidence threshold, on
    each half of labelled images.

    `second`, `behind`: see `smallest_share`.
    """
    known = outputs.labels >= 0
    first, trained = (
        outputs.outputs[name][known].double(),
        outputs.outputs[EAGER][known],
    )
    label, sure = outputs.labels[known], first.softmax(1).max(1).values >= threshold
    joined = torch.where(sure[:, None], first, second[known].double())
    values = []
    for half in HALVES:
        before, after = (
            task.graph_scores(each[half], trained[half], label[half]).score
            for each in (trained, joined)
        )
        drop, ece = (
            100 * (before - after),
            100 * calibration_error(joined[half], label[half]),
        )
        passed_on = 1 - float(sure[half].double().mean())
        values.append(
            {
                "drop": drop,
                "teacher-drop": drop + behind,
                "ece": ece,
                PASSED_ON: passed_on,
            }
        )
    return values


def smallest_share(
    outputs: GraphOutputs,
    name: str,
    second: Tensor,
    task: Task,
    wanted: Mapping[str, float],
    behind: float,
) -> CascadeTrial:
    """Try the smallest share passed on that is within the limits; if none is, all
    images, on a half that misses them.

    `outputs`: of PyTorch and the graph `name`; `second`: the second export's logits [N,
    C]; `behind`: recorded points of the student behind its teacher.
    """
    known = outputs.labels >= 0
    kept = {each: outputs.outputs[each][known] for each in (EAGER, name)}
    values = partial(values_at, outputs, name, second, task, behind)
    alone, images = values(0.0), [len(outputs.labels[known][half]) for half in HALVES]
    tried, missing = list[CascadeTrial](), list[CascadeTrial]()
    for share in SHARES:
        rule = defer.Rule(share=share)
        threshold = defer.choose(rule, kept, outputs.labels[known], {}, ())["threshold"]
        tried = [
            CascadeTrial(rule, *each)
            for each in zip(values(threshold), alone, images, strict=True)
        ]
        missing = [one for one in tried if missed_limits(one.values, wanted)]
        if not missing:
            break
    return (missing or tried)[-1]
