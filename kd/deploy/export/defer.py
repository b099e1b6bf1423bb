"""The threshold on confidence below which an export's prediction is unsure, and its
measured effect.

An image with a less probable prediction is passed on to a larger model or a human.
Deferral by confidence is about as good as a learned rule unless labels are noisy or the
photographs change (arXiv:2307.02764). Every second validation image chooses the
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
    """The rule of `--defer` or `--defer-share`."""

    # at most this share of the sure predictions is wrong (for several labels: per
    # label)
    wrong: float = 0.0
    share: float = 0.0  # share of unsure images. Both 0: no threshold.

    @property
    def config_path(self) -> str:
        return "--defer-share" if self.share else "--defer"

    def check(self, task: Task, images: bool) -> None:
        """Refuse an impossible rule before minutes of work; `images`: whether
        validation images are read.
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
        """Return the lowest sure confidence (NaN: no confidence is sure), and the
        smallest upper end found.
        """
        order = np.argsort(-confidence_N, kind="stable")
        value_N, wrong_N = confidence_N[order], np.cumsum(~right_N[order])
        last_N = np.append(
            value_N[1:] != value_N[:-1], True
        )  # equal confidences are sure or unsure together
        if self.share:
            sure = math.ceil((1 - self.share) * len(value_N))
            return (float(value_N[sure - 1]) if sure else 1.0), 0.0
        upper = {
            int(i): wilson_interval(wrong_N[i] / (i + 1), int(i) + 1)[1]
            for i in np.flatnonzero(last_N)
        }
        held = [i for i, bound in upper.items() if bound <= self.wrong]
        return (float(value_N[held[-1]]) if held else math.nan), min(upper.values())


def choose(
    rule: Rule,
    outputs: Mapping[str, Tensor],
    labels: Tensor,
    thresholds: Mapping[str, Mapping[str, Any]],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Return manifest.json's entry on the threshold as JSON values; {} without a rule.

    `outputs`: logits [N, C] by graph, with the PyTorch weights' under ""; `labels`: int
    [N], or sets [N, C], -1 if unknown; `thresholds`: per class if an image may have
    several labels, else empty.
    """
    if not rule.wrong and not rule.share:
        return {}
    known = labels >= 0 if labels.ndim == 1 else (labels >= 0).all(1)
    if int(known.sum()) < 2:
        wrong = f"{int(known.sum())} of {len(labels)} validation images have a label"
        raise ModelError(
            rule.config_path,
            wrong,
            "Labels are needed to count wrong predictions",
            f"Leave {rule.config_path} out",
        )
    judge = _Labels(thresholds, classes) if thresholds else _Label()
    answered = {
        name: judge.answers(logits[known].double(), labels[known])
        for name, logits in outputs.items()
    }
    confidence, right = answered.pop("")
    found = judge.threshold(rule, confidence[::2], right[::2])
    found |= {
        "rule": {"wrong": rule.wrong} if rule.wrong else {"share": rule.share},
        "chosen_on": len(right[::2]),
    }
    found["stated"] = {
        name: judge.stated(found, *(one[1::2] for one in both))
        for name, both in answered.items()
    }
    return found


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Return the result of `choose` as text, one line per graph."""
    lines = []
    for name, one in found.get("stated", {}).items():
        text = f"passes {_share(one, 'passed_on')} of the images on; "
        if "threshold" in found:
            text = (
                f"sure from {found['threshold']:.4g}: {text}{_share(one, 'wrong')} of"
                " the other predictions are wrong"
            )
        else:
            by_label = one["labels"]
            worst = max(by_label, key=lambda label: by_label[label]["wrong"])
            text += (
                f"most of its sure but wrong predictions are about {worst}:"
                f" {_share(by_label[worst], 'wrong')}"
            )
        lines.append(
            f"{name}: {text} ({one['images']} validation images that did not choose it)"
        )
    return lines


class _Label:
    """One label per image: its probability is the confidence."""

    def answers(
        self, logits_NC: Tensor, label_N: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return confidences and whether each prediction is right, [N]."""
        best = logits_NC.softmax(1).max(1)
        return best.values.numpy(), (best.indices == label_N).numpy()

    def threshold(
        self, rule: Rule, confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        threshold, least = rule.lowest(confidence, right)
        if math.isnan(threshold):
            raise _unreached(rule, least, len(right), "")
        return {"threshold": threshold}

    def stated(
        self, found: Mapping[str, Any], confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        sure = confidence >= found["threshold"]
        return {**_passed(sure), **_wrong(sure, right)}


@dataclass(frozen=True, slots=True)
class _Labels:
    """Several labels per image: a label's confidence is the distance of its logit from
    its threshold's.
    """

    thresholds: Mapping[str, Mapping[str, Any]]
    classes: Sequence[str]

    def answers(
        self, logits_NC: Tensor, label_NC: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the distances and whether each label's presence or absence is right,
        [N, C].
        """
        distance_NC = logits_NC - self._edges()
        return distance_NC.abs().numpy(), ((distance_NC > 0) == (label_NC > 0)).numpy()

    def _edges(self) -> Tensor:
        values = [float(self.thresholds[name]["threshold"]) for name in self.classes]
        return torch.tensor(values, dtype=torch.float64).logit(1e-6)

    def threshold(
        self, rule: Rule, confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        if rule.share:
            margins = [rule.lowest(confidence.min(1), np.all(right, 1))[0]] * len(
                self.classes
            )
        else:
            each = [
                rule.lowest(confidence[:, i], right[:, i])
                for i in range(len(self.classes))
            ]
            margins = [margin for margin, _ in each]
            if without := [i for i, margin in enumerate(margins) if math.isnan(margin)]:
                least = max(each[i][1] for i in without)
                raise _unreached(
                    rule,
                    least,
                    len(right),
                    f" for {', '.join(self.classes[i] for i in without[:3])}",
                )
        margin_C = torch.tensor(margins, dtype=torch.float64) * (
            1 - 1e-9
        )  # the image at the threshold stays sure
        low, high = (
            (self._edges() + sign * margin_C).sigmoid().tolist() for sign in (-1, 1)
        )
        rows = zip(self.classes, low, high, margin_C.tolist(), strict=True)
        return {
            "labels": {
                name: {"low": below, "high": above, "margin": m}
                for name, below, above, m in rows
            }
        }

    def stated(
        self, found: Mapping[str, Any], confidence: np.ndarray, right: np.ndarray
    ) -> dict[str, Any]:
        sure = confidence >= np.array(
            [found["labels"][name]["margin"] for name in self.classes]
        )
        each = {
            name: _wrong(sure[:, i], right[:, i]) for i, name in enumerate(self.classes)
        }
        return {**_passed(np.all(sure, 1)), "labels": each}


def _passed(sure_N: np.ndarray) -> dict[str, Any]:
    share = 1 - float(sure_N.mean())
    return {
        "images": len(sure_N),
        "passed_on": share,
        "passed_on_interval": wilson_interval(share, len(sure_N)),
    }


def _wrong(sure_N: np.ndarray, right_N: np.ndarray) -> dict[str, Any]:
    answered, share = (
        int(sure_N.sum()),
        (float((~right_N[sure_N]).mean()) if sure_N.any() else 0.0),
    )
    return {
        "answered": answered,
        "wrong": share,
        "wrong_interval": wilson_interval(share, answered),
    }


def _share(one: Mapping[str, Any], key: str) -> str:
    low, high = one[f"{key}_interval"]
    return f"{percent(one[key])} ({percent(low)} to {percent(high)})"


def _unreached(rule: Rule, least: float, images: int, whom: str) -> ModelError:
    wrong = (
        f"no confidence holds {rule.wrong:g}{whom}: of the surest predictions up to"
        f" {least:.3g} may be wrong, as far as the {images} validation images that"
        " choose it can say"
    )
    return ModelError(
        rule.config_path,
        wrong,
        "",
        "Allow more, take all images (--images 0), or --defer-share 0.1",
    )
