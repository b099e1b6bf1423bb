"""The threshold of `kd-export --defer`: chosen on one half, stated on the other; and
how answers are marked by it.
"""

import json
import math

import numpy as np
import pytest
import torch

from kd.core.errors import ConfigError, ModelError
from kd.deploy.export.defer import Rule, choose, defer_lines
from kd.deploy.serve import responses
from kd.deploy.serve.responses import bands, mark
from kd.parts.tasks import embedding, label_sets, single_label

CLASSES = ("apple", "fig", "pear")
LIMITS = {
    name: {"threshold": value}
    for name, value in zip(CLASSES, (0.3, 0.5, 0.7), strict=True)
}


def upper(wrong: int, images: int) -> float:
    """Wilson's upper end of a 95 % interval, as in his paper: the larger root of (p -
    share)^2 = z^2 p (1 - p) / n.
    """
    z = 1.959964
    share = wrong / images
    a = 1 + z * z / images
    b = -(2 * share + z * z / images)
    c = share * share
    return (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)


def drawn(
    images: int, seed: int, several: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of three classes and labels that follow their probabilities: a calibrated
    model.
    """
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((images, 3))
    if several:
        labels = rng.random((images, 3)) < 1 / (1 + np.exp(-logits))
    else:
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        labels = (rng.random((images, 1)) > shares.cumsum(1)).sum(1)
    return torch.from_numpy(logits), torch.from_numpy(labels.astype(np.int64))


def test_it_is_the_lowest_confidence_whose_upper_end_holds():
    logits, labels = drawn(1200, 0)
    chosen = choose(
        Rule(wrong=0.06), {"": logits, "model.onnx": logits}, labels, {}, CLASSES
    )
    confidence, answer = (tensor.numpy() for tensor in logits.softmax(1).max(1))
    right = answer == labels.numpy()
    candidates = []
    for threshold in confidence[::2]:
        sure = confidence[::2] >= threshold
        if upper(int((~right[::2][sure]).sum()), int(sure.sum())) <= 0.06:
            candidates.append(threshold)
    assert chosen["threshold"] == min(candidates)
    stated = chosen["stated"]["model.onnx"]
    sure = confidence[1::2] >= chosen["threshold"]
    assert (stated["images"], stated["answered"]) == (600, sure.sum())
    assert stated["passed_on"] == pytest.approx(1 - sure.mean())
    assert stated["wrong"] == pytest.approx((~right[1::2][sure]).mean())
    assert stated["wrong_interval"][1] == pytest.approx(
        upper((~right[1::2][sure]).sum(), sure.sum())
    )
    assert json.loads(json.dumps(chosen))["rule"] == {"wrong": 0.06}
    (line,) = defer_lines(chosen)
    assert f"{100 * stated['passed_on']:.1f} %" in line
    assert f"{100 * stated['wrong']:.1f} %" in line


def test_a_share_passes_that_share_on_and_equal_confidences_stay_together():
    logits, labels = drawn(2000, 1)
    chosen = choose(
        Rule(share=0.2), {"": logits, "model.onnx": logits}, labels, {}, CLASSES
    )
    confidence = logits.softmax(1).amax(1)[::2]
    assert int((confidence < chosen["threshold"]).sum()) == 200
    assert 0.15 < chosen["stated"]["model.onnx"]["passed_on"] < 0.25
    value = np.array([0.9, 0.9, 0.9, 0.5])
    right = np.array([True, True, False, True])
    assert Rule(share=0.5).lowest(value, right)[0] == 0.9
    assert math.isnan(Rule(wrong=0.1).lowest(value, right)[0])


def test_the_promise_holds_on_new_images():
    """In 60 draws the share of wrong answers on 20,000 new images exceeds what was
    promised at most three times.
    """
    exceeded = 0
    for seed in range(60):
        logits, labels = drawn(800, 100 + seed)
        chosen = choose(Rule(wrong=0.1), {"": logits}, labels, {}, CLASSES)
        logits, labels = drawn(20_000, 1000 + seed)
        best = logits.softmax(1).max(1)
        sure = best.values >= chosen["threshold"]
        exceeded += float((best.indices != labels)[sure].double().mean()) > 0.1
    assert exceeded <= 3


def test_each_of_several_labels_has_its_band():
    logits, labels = drawn(2000, 2, several=True)
    chosen = choose(
        Rule(wrong=0.08), {"": logits, "model.onnx": logits}, labels, LIMITS, CLASSES
    )
    probability = responses.independent_probabilities(logits.numpy())
    stated = chosen["stated"]["model.onnx"]
    surely = []
    for i, name in enumerate(CLASSES):
        low = chosen["labels"][name]["low"]
        high = chosen["labels"][name]["high"]
        limit = LIMITS[name]["threshold"]
        assert 0 < low < limit < high < 1
        wrong = (probability[:, i] > limit) != (labels[:, i].numpy() > 0)
        sure = (probability[:, i] <= low) | (probability[:, i] >= high)
        assert upper(int(wrong[::2][sure[::2]].sum()), int(sure[::2].sum())) <= 0.08
        assert stated["labels"][name]["wrong"] == pytest.approx(
            wrong[1::2][sure[1::2]].mean()
        )
        surely.append(sure)
    assert stated["passed_on"] == pytest.approx(1 - np.all(surely, 0)[1::2].mean())
    marked = responses.predictions(
        logits.numpy(),
        CLASSES,
        3,
        [setting["threshold"] for setting in LIMITS.values()],
        bands({"defer": chosen}, CLASSES),
    )
    assert [prediction["sure"] for prediction in marked] == np.all(surely, 0).tolist()
    for i, prediction in enumerate(marked):
        flags = {entry["label"]: entry["sure"] for entry in prediction["top"]}
        assert flags == {name: bool(surely[c][i]) for c, name in enumerate(CLASSES)}
        assert all(
            entry["sure"] == flags[entry["label"]] for entry in prediction["labels"]
        )
    assert (
        max(stated["labels"], key=lambda name: stated["labels"][name]["wrong"])
        in defer_lines(chosen)[0]
    )


def test_a_share_of_label_sets_is_of_images():
    logits, labels = drawn(2000, 3, several=True)
    chosen = choose(
        Rule(share=0.3), {"": logits, "model.onnx": logits}, labels, LIMITS, CLASSES
    )
    assert 0.25 < chosen["stated"]["model.onnx"]["passed_on"] < 0.35


def test_one_label_is_sure_from_the_threshold_on():
    predictions = [
        {"label": "fig", "top": []},
        {"label": "fig", "top": []},
        {"label": "pear", "top": []},
    ]
    shares = np.array([[0.1, 0.8, 0.1], [0.21, 0.79, 0.0], [0.05, 0.05, 0.9]])
    mark(predictions, shares, CLASSES, bands({"defer": {"threshold": 0.8}}, CLASSES))
    assert [prediction["sure"] for prediction in predictions] == [True, False, True]
    mark(predictions[:1], shares[:1], CLASSES, bands({}, CLASSES))
    assert (
        responses.write(
            responses.CSV,
            [{"top": [{"label": "fig", "score": 0.8}], "sure": True}],
            "",
            "",
        )
        == b"fig,0.8,true\n"
    )


def test_an_impossible_rule_is_a_one_line_error():
    logits, labels = drawn(60, 4)
    with pytest.raises(
        ModelError,
        match=(
            r"^--defer: no confidence holds 0.001: .* may be wrong.*--defer-share 0.1.$"
        ),
    ):
        choose(Rule(wrong=0.001), {"": logits}, labels, {}, CLASSES)
    with pytest.raises(
        ModelError, match=r"^--defer: no confidence holds 0.001 for apple, fig, pear: "
    ):
        choose(Rule(wrong=0.001), {"": logits}, (logits > 0).long(), LIMITS, CLASSES)
    with pytest.raises(
        ModelError, match=r"^--defer-share: 0 of 60 validation images have a label"
    ):
        choose(Rule(share=0.1), {"": logits}, torch.full((60,), -1), {}, CLASSES)
    single, sets, vectors = (
        module.build(module.Options())
        for module in (single_label, label_sets, embedding)
    )
    Rule().check(vectors, images=False)
    Rule(wrong=0.02).check(sets, images=True)
    for rule, task, images, word in (
        (Rule(0.02, 0.1), single, True, "Choose one"),
        (Rule(wrong=1.5), single, True, "between 0 and 1"),
        (Rule(share=-0.1), single, True, "--defer-share: is -0.1"),
        (Rule(wrong=0.02), vectors, True, "vectors"),
        (Rule(wrong=0.02), single, False, "Leave out --no-onnx"),
    ):
        with pytest.raises(ConfigError, match=word):
            rule.check(task, images)
