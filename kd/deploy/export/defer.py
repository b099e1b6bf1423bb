"""Choose the confidence below which an export's prediction is unsure.

An image with a less probable prediction is passed on to a larger model or a human.
Deferral by confidence is about as good as a learned rule unless labels are noisy or the
images change (arXiv:2307.02764). Every second validation image chooses the
threshold; the others measure the share passed on and the errors among the rest. The
confidence is the exported, calibrated one.

"At most this share wrong" holds for the upper end of the 95 % interval on the choosing
images (as in arXiv:1705.08500): the measured share itself would be exceeded on half of
all new sets of images.

Shape legend: N images, C classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kd.core.errors import ConfigError, ModelError
from kd.core.evaluation import Task
from kd.core.intervals import wilson_interval
from kd.core.text import percent


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of `--defer` or `--defer-share`; both 0: no threshold."""

    # at most this share of the sure predictions is wrong, of several labels each
    wrong: float = 0.0
    share: float = 0.0  # share of unsure images

    @property
    def config_path(self) -> str:
        return "--defer-share" if self.share else "--defer"

    def check(self, task: Task, images: bool) -> None:
        """Refuse an impossible rule before minutes of work.

        `images`: whether validation images are read.
        """
        if not self.wrong and not self.share:
            return
        if self.wrong and self.share:
            raise ConfigError(
                "--defer",
                "and --defer-share are two rules for one threshold",
                "",
                "Choose one",
            )
        if not 0 < (self.wrong or self.share) < 1:
            allowed = "A share between 0 and 1, such as 0.02"
            raise ConfigError(
                self.config_path, f"is {self.wrong or self.share:g}", allowed
            )
        if not task.logits:
            wrong = "needs confidences, but an embedding model returns vectors"
            raise ConfigError(
                self.config_path,
                wrong,
                "A student with labels",
                f"Leave {self.config_path} out",
            )
        if not images:
            wrong = "is chosen on validation images, and with --no-onnx none is read"
            raise ConfigError(self.config_path, wrong, "", "Leave out --no-onnx")

    def lowest(
        self, confidence_N: np.ndarray, right_N: np.ndarray
    ) -> tuple[float, float]:
        """Return the lowest sure confidence and the smallest upper end of the interval.

        The confidence is NaN where none is sure.
        """
        order = np.argsort(-confidence_N, kind="stable")
        confidence_N = confidence_N[order]
        if self.share:
            sure_images = math.ceil((1 - self.share) * len(confidence_N))
            return (float(confidence_N[sure_images - 1]) if sure_images else 1.0), 0.0
        wrong_N = np.cumsum(~right_N[order])
        # equal confidences are sure or unsure together
        last_N = np.append(confidence_N[1:] != confidence_N[:-1], True)
        lowest = math.nan
        upper_ends = []
        for i in np.flatnonzero(last_N).tolist():
            upper_ends.append(wilson_interval(wrong_N[i] / (i + 1), i + 1)[1])
            if upper_ends[-1] <= self.wrong:
                lowest = float(confidence_N[i])
        return lowest, min(upper_ends)


def choose(
    rule: Rule,
    outputs: Mapping[str, Tensor],
    labels: Tensor,
    thresholds: Mapping[str, Mapping[str, Any]],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Return manifest.json's entry on the threshold as JSON values; {} without a rule.

    Args:
        rule: the rule that the threshold keeps.
        outputs: logits [N, C] by graph, with those of the PyTorch weights under "".
        labels: int [N], or sets [N, C]; -1 if unknown.
        thresholds: per class if an image may have several labels, else empty.
        classes: names in the order of the logits.
    """
    if not rule.wrong and not rule.share:
        return {}
    is_labelled = labels >= 0 if labels.ndim == 1 else (labels >= 0).all(1)
    if int(is_labelled.sum()) < 2:
        wrong = (
            f"{int(is_labelled.sum())} of {len(labels)} validation images have a label"
        )
        raise ModelError(
            rule.config_path,
            wrong,
            "Labels are needed to count wrong predictions",
            f"Leave {rule.config_path} out",
        )
    judge = _LabelSets(thresholds, classes) if thresholds else _SingleLabel()
    predictions = {
        name: judge.predictions(logits[is_labelled].double(), labels[is_labelled])
        for name, logits in outputs.items()
    }
    confidence, right = predictions.pop("")
    entry = judge.threshold(rule, confidence[::2], right[::2])
    entry["rule"] = {"wrong": rule.wrong} if rule.wrong else {"share": rule.share}
    entry["chosen_on"] = len(right[::2])
    entry["stated"] = {
        name: judge.stated(entry, confidence[1::2], right[1::2])
        for name, (confidence, right) in predictions.items()
    }
    return entry


def defer_lines(entry: Mapping[str, Any]) -> list[str]:
    """Return the result of `choose` as text, one line per graph."""
    lines = []
    for name, facts in entry.get("stated", {}).items():
        passed_on = f"passes {_share_text(facts, 'passed_on')} of the images on"
        if "threshold" in entry:
            effect = (
                f"sure from {entry['threshold']:.4g}: {passed_on};"
                f" {_share_text(facts, 'wrong')} of the other predictions are wrong"
            )
        else:
            by_label = facts["labels"]
            worst = max(by_label, key=lambda label: by_label[label]["wrong"])
            effect = (
                f"{passed_on}; most of its sure but wrong predictions are about"
                f" {worst}: {_share_text(by_label[worst], 'wrong')}"
            )
        images = f"{facts['images']} validation images that did not choose it"
        lines.append(f"{name}: {effect} ({images})")
    return lines


class _SingleLabel:
    """One label per image: its probability is the confidence."""

    def predictions(
        self, logits_NC: Tensor, label_N: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return confidences and whether each prediction is right, [N]."""
        best = logits_NC.softmax(1).max(1)
        return best.values.numpy(), (best.indices == label_N).numpy()

    def threshold(
        self, rule: Rule, confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        threshold, lowest_end = rule.lowest(confidence, right)
        if math.isnan(threshold):
            raise _unreached_error(rule, lowest_end, len(right), "")
        return {"threshold": threshold}

    def stated(
        self, entry: Mapping[str, Any], confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        sure = confidence >= entry["threshold"]
        return {**_passed_on_facts(sure), **_wrong_facts(sure, right)}


@dataclass(frozen=True, slots=True)
class _LabelSets:
    """Several labels per image, each as confident as its logit is far from its edge.

    The edge is the logit of the label's threshold.
    """

    thresholds: Mapping[str, Mapping[str, Any]]
    classes: Sequence[str]

    def predictions(
        self, logits_NC: Tensor, label_NC: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return [N, C]: distances, and whether each label is rightly there or not."""
        distance_NC = logits_NC - self._edges()
        return distance_NC.abs().numpy(), ((distance_NC > 0) == (label_NC > 0)).numpy()

    def _edges(self) -> Tensor:
        values = [float(self.thresholds[name]["threshold"]) for name in self.classes]
        return torch.tensor(values, dtype=torch.float64).logit(1e-6)

    def threshold(
        self, rule: Rule, confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        if rule.share:
            margin, _ = rule.lowest(confidence.min(1), np.all(right, 1))
            margins = [margin] * len(self.classes)
        else:
            by_label = [
                rule.lowest(confidence[:, i], right[:, i])
                for i in range(len(self.classes))
            ]
            margins = [margin for margin, _ in by_label]
            unreached = [i for i, margin in enumerate(margins) if math.isnan(margin)]
            if unreached:
                lowest_end = max(by_label[i][1] for i in unreached)
                names = ", ".join(self.classes[i] for i in unreached[:3])
                raise _unreached_error(rule, lowest_end, len(right), f" for {names}")
        # a little less, so that the image at the threshold stays sure
        margin_C = torch.tensor(margins, dtype=torch.float64) * (1 - 1e-9)
        low_C = (self._edges() - margin_C).sigmoid().tolist()
        high_C = (self._edges() + margin_C).sigmoid().tolist()
        rows = zip(self.classes, low_C, high_C, margin_C.tolist(), strict=True)
        return {
            "labels": {
                name: {"low": low, "high": high, "margin": margin}
                for name, low, high, margin in rows
            }
        }

    def stated(
        self, entry: Mapping[str, Any], confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        sure = confidence >= np.array(
            [entry["labels"][name]["margin"] for name in self.classes]
        )
        by_label = {
            name: _wrong_facts(sure[:, i], right[:, i])
            for i, name in enumerate(self.classes)
        }
        return {**_passed_on_facts(np.all(sure, 1)), "labels": by_label}


def _passed_on_facts(sure_N: np.ndarray) -> dict[str, Any]:
    share = 1 - float(sure_N.mean())
    return {
        "images": len(sure_N),
        "passed_on": share,
        "passed_on_interval": wilson_interval(share, len(sure_N)),
    }


def _wrong_facts(sure_N: np.ndarray, right_N: np.ndarray) -> dict[str, Any]:
    answered = int(sure_N.sum())
    share = float((~right_N[sure_N]).mean()) if answered else 0.0
    return {
        "answered": answered,
        "wrong": share,
        "wrong_interval": wilson_interval(share, answered),
    }


def _share_text(facts: Mapping[str, Any], key: str) -> str:
    low, high = facts[f"{key}_interval"]
    return f"{percent(facts[key])} ({percent(low)} to {percent(high)})"


def _unreached_error(
    rule: Rule, lowest_end: float, images: int, labels: str
) -> ModelError:
    wrong = (
        f"no confidence holds {rule.wrong:g}{labels}: of the surest predictions up to"
        f" {lowest_end:.3g} may be wrong, as far as the {images} validation images that"
        " choose it can say"
    )
    return ModelError(
        rule.config_path,
        wrong,
        "",
        "Allow more, take all images (--images 0), or --defer-share 0.1",
    )
