"""A graph that passes unsure images on to a second export, as a candidate of `--accept`.

Every second labelled image chooses the smallest share of images to pass on within the limits; the others measure it.

Shape legend: N images, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kd.core.errors import ConfigError
from kd.core.evaluation import Task
from kd.deploy.export import defer
from kd.deploy.export.flags import ExportOptions, misses
from kd.deploy.export.parity import EAGER, GraphOutputs
from kd.deploy.serve.model import Description, describe
from kd.parts.tasks.single_label import calibration_error
from kd.setup.data import DataPlan

WHERE = "--second"
SHARES = tuple(percent / 100 for percent in range(1, 51))
"""Shares of images passed on that are tried. 2,000 images know a share to about a point; beyond half of the images the
student saves little."""
PASSED_ON = "passed_on"


@dataclass(frozen=True, slots=True)
class Second:
    """The second export and its graph's outputs for the compared images."""

    logits: Tensor  # [N, C]
    ms: float  # see `ms` of `--accept`; 0: not wanted
    megabytes: float


def describe_second(options: ExportOptions, task: Task, classes: Sequence[str], data: DataPlan) -> Description | None:
    """Read the second export, if it is given.

    Raises:
        ConfigError: it does not predict the student's classes from the student's pixels, or other options exclude it.
    """
    folder = options.second
    if folder is None:
        return None
    if options.accept is None or options.defer or options.defer_share:
        wrong = "chooses the share of unsure images by the limits of --accept"
        raise ConfigError(WHERE, wrong, "", "Give --accept, and neither --defer nor --defer-share")
    if task.logits != "softmax":
        raise ConfigError(WHERE, "needs a student with one class per image", "", f"Leave {WHERE} out")
    second = describe(folder)
    if second.labels != tuple(classes) or second.output.thresholds:
        wrong = f"'{folder}' does not predict the {len(classes)} classes of the student, in their order"
        raise ConfigError(WHERE, wrong, "", "Name the export of this run's teacher")
    if (second.size, second.crop, second.bits) != (data.image_size, data.crop_pct, data.bits):
        wrong = f"'{folder}' takes images of {second.size} px, cropped to {second.crop:g}, not as the student's"
        raise ConfigError(WHERE, wrong, "", "Name the export of this run's teacher")
    return second


def smallest_share(
    outputs: GraphOutputs, name: str, second: Tensor, task: Task, wanted: Mapping[str, float]
) -> tuple[defer.Rule, dict[str, float], list[str]]:
    """Return the smallest share passed on that is within the limits, its values on the other images, and its misses.

    `outputs`: of PyTorch and the graph `name`; `second`: the second export's logits [N, C].
    """
    known = outputs.labels >= 0
    kept = {each: outputs.outputs[each][known] for each in (EAGER, name)}
    label, second = outputs.labels[known], second[known]

    def values(threshold: float, half: slice) -> dict[str, float]:
        first = kept[name][half].double()
        sure = first.softmax(1).max(1).values >= threshold
        joined = torch.where(sure[:, None], first, second[half].double())
        every = {"": joined, "drop": kept[EAGER][half], "teacher-drop": second[half]}
        score = {word: task.graph_scores(each, every["drop"], label[half]).score for word, each in every.items()}
        lost = {word: 100 * (score[word] - score[""]) for word in ("drop", "teacher-drop")}
        return {**lost, "ece": 100 * calibration_error(joined, label[half]), PASSED_ON: 1 - float(sure.double().mean())}

    rule, threshold = defer.Rule(), 0.0
    for share in SHARES:
        rule = defer.Rule(share=share)
        threshold = defer.choose(rule, kept, label, {}, ())["threshold"]
        if not misses(values(threshold, slice(0, None, 2)), wanted):
            break
    found = values(threshold, slice(1, None, 2))
    return rule, found, misses(found, wanted)
