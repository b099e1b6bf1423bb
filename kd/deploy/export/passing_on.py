"""Try a graph that passes unsure images on to a second export, for `--accept`.

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

OPTION = "--second"
SHARES = tuple(percent / 100 for percent in range(1, 101))
"""Shares of images passed on that are tried; 2,000 images show one to about a point."""
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

    def reason(self, name: str, limits: Mapping[str, float]) -> str:
        """Return why the pair is not accepted; "" if it is within the limits."""
        missed = ", ".join(missed_limits(self.values, limits))
        missed_alone = ", ".join(missed_limits(self.alone, limits)) or "nothing"
        if not missed:
            return ""
        return (
            f"{name} with the second export misses {missed}, with"
            f" {percent(self.values[PASSED_ON])} of {self.images} images passed on"
            f" (without: {missed_alone})"
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
        remedy = "Give --accept, and neither --defer nor --defer-share"
        raise ConfigError(OPTION, wrong, "", remedy)
    if task.logits != "softmax":
        wrong = "needs a student with one class per image"
        raise ConfigError(OPTION, wrong, "", f"Leave {OPTION} out")
    second = describe(folder)
    reading = data.image_size, data.crop_pct, data.bits
    if second.labels != tuple(classes) or second.output.thresholds:
        wrong = (
            f"'{folder}' does not predict the {len(classes)} classes of the student, in"
            " their order"
        )
    elif (second.size, second.crop, second.bits) != reading:
        wrong = (
            f"'{folder}' takes images of {second.size} px, cropped to {second.crop:g},"
            " not as the student's"
        )
    else:
        return second
    raise ConfigError(OPTION, wrong, "", "Name the export of this run's teacher")


def values_at(
    outputs: GraphOutputs,
    name: str,
    second_logits: Tensor,
    task: Task,
    behind: float,
    threshold: float,
) -> list[dict[str, float]]:
    """Return the values of a graph with the second export on each half of the images.

    The graph passes images below the confidence `threshold` on. The others: see
    `smallest_share`.
    """
    labelled_N = outputs.labels >= 0
    label_N = outputs.labels[labelled_N]
    eager_NC = outputs.outputs[EAGER][labelled_N]
    graph_NC = outputs.outputs[name][labelled_N].double()
    sure_N = graph_NC.softmax(1).max(1).values >= threshold
    pair_NC = torch.where(sure_N[:, None], graph_NC, second_logits[labelled_N].double())
    values = []
    for half in HALVES:
        before, after = (
            task.graph_scores(logits_NC[half], eager_NC[half], label_N[half]).score
            for logits_NC in (eager_NC, pair_NC)
        )
        drop = 100 * (before - after)
        values.append(
            {
                "drop": drop,
                "teacher-drop": drop + behind,
                "ece": 100 * calibration_error(pair_NC[half], label_N[half]),
                PASSED_ON: 1 - float(sure_N[half].double().mean()),
            }
        )
    return values


def smallest_share(
    outputs: GraphOutputs,
    name: str,
    second_logits: Tensor,
    task: Task,
    limits: Mapping[str, float],
    behind: float,
) -> CascadeTrial:
    """Return the trial of the smallest share passed on that is within the limits.

    If no share is, all images are passed on, and the trial is of a half that misses.

    Args:
        outputs: of PyTorch and the graph.
        name: the graph.
        second_logits: the second export's logits [N, C].
        task: the student's task.
        limits: by the words of `--accept`.
        behind: recorded points of the student behind its teacher.
    """
    labelled_N = outputs.labels >= 0
    labels = outputs.labels[labelled_N]
    labelled_outputs = {
        graph: outputs.outputs[graph][labelled_N] for graph in (EAGER, name)
    }
    values_at_threshold = partial(values_at, outputs, name, second_logits, task, behind)
    values_alone = values_at_threshold(0.0)
    image_counts = [len(labels[half]) for half in HALVES]
    trials: list[CascadeTrial] = []
    for share in SHARES:
        rule = defer.Rule(share=share)
        entry = defer.choose(rule, labelled_outputs, labels, {}, ())
        values = values_at_threshold(entry["threshold"])
        trials = [
            CascadeTrial(rule, *of_half)
            for of_half in zip(values, values_alone, image_counts, strict=True)
        ]
        misses = [trial for trial in trials if missed_limits(trial.values, limits)]
        if not misses:
            break
        trials = misses
    return trials[-1]
