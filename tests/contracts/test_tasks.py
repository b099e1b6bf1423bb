"""The contract `kd.core.evaluation.Task`, tested on every file in `kd/tasks`, new ones
included.

Shape legend: B images of a batch, C classes, K teachers.
"""

import json

import pytest
import torch
from torch import Tensor

from kd.core.evaluation import Task
from kd.core.scores import Scores
from kd.core.types import Batch
from kd.parts import registry

B = 6
C = 5
K = 3
NAMES = registry.names("tasks")


def build(name: str) -> Task:
    return registry.build(
        "tasks", name, registry.default_options("tasks", name), "task.kind"
    )


every_task = pytest.mark.parametrize("name", NAMES)
on_logits = pytest.mark.parametrize(
    "name", [name for name in NAMES if build(name).logits]
)


def draw(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def probabilities(task: Task, logits: Tensor) -> Tensor:
    return (
        logits.double().softmax(-1)
        if task.logits == "softmax"
        else logits.double().sigmoid()
    )


@every_task
def test_says_what_it_is(name):
    task = build(name)
    assert task.name == name
    assert task.logits in ("softmax", "sigmoid", "")
    assert task.label in ("class", "set")
    assert bool(task.problem_type) == bool(task.logits)
    needed = registry.facts(
        "losses",
        task.label_loss,
        registry.default_options("losses", task.label_loss),
        "losses",
    )
    assert needed.labels
    assert not needed.teacher
    assert not task.logits or needed.logits == task.logits


@every_task
def test_its_columns_have_keys_of_their_own_and_survive_the_manifest(name):
    scores = build(name).scores
    keys = [column.key for column in (*scores.own, *scores.pair)]
    assert len(set(keys)) == len(keys)
    assert scores.selection_metric(True) == scores.own[0]
    assert scores.selection_metric(False) == scores.pair[0]
    assert Scores.read(json.loads(json.dumps(scores.record()))) == scores


@every_task
def test_labels_of_noise_are_known_ones(name):
    task = build(name)
    label = task.no_labels(B, C)
    assert label.shape == ((B,) if task.label == "class" else (B, C))
    assert Batch.of(torch.zeros(B, 3, 1, 1), label).labelled.all()


@on_logits
def test_an_average_is_that_of_the_probabilities(name):
    task = build(name)
    logits_KBC = draw(K, B, C)
    shares_K = torch.tensor([0.5, 0.3, 0.2])
    expected_BC = (shares_K[:, None, None] * probabilities(task, logits_KBC)).sum(0)
    found_BC = probabilities(task, task.average(logits_KBC, shares_K))
    torch.testing.assert_close(found_BC, expected_BC, rtol=1e-5, atol=1e-7)


@on_logits
def test_probabilities_are_known_and_become_logits(name):
    task = build(name)
    logits_BC = draw(B, C)
    answer_BC = probabilities(task, logits_BC).float()
    assert task.are_probabilities(answer_BC)
    assert not task.are_probabilities(logits_BC)
    assert task.refuse(answer_BC) == task.refuse(logits_BC) == ""
    found_BC = probabilities(task, task.from_probabilities(answer_BC))
    torch.testing.assert_close(found_BC, answer_BC.double(), rtol=1e-4, atol=2e-6)


def test_probabilities_of_one_label_are_refused_where_an_image_has_several():
    assert "one label per image" in build("label_sets").refuse(draw(B, C).softmax(1))


@on_logits
def test_a_graph_is_scored_against_pytorch_and_the_labels(name):
    task = build(name)
    logits_BC = draw(B, C)
    answer_B = logits_BC.argmax(1)
    label = (
        answer_B.clone() if task.label == "class" else (logits_BC > 0).to(torch.int8)
    )
    same = task.graph_scores(logits_BC, logits_BC, label)
    assert (same.score, same.facts["same_top1"], same.changed) == (1.0, B, 0)
    wrong_BC = logits_BC.clone()
    wrong_BC[0] = -wrong_BC[0]
    scores = task.graph_scores(wrong_BC, logits_BC, label)
    assert (scores.facts["same_top1"], scores.changed) == (B - 1, 1)
    assert scores.score < 1
    unknown = torch.full_like(label, -1)
    assert task.graph_scores(wrong_BC, logits_BC, unknown).facts["same_top1"] == B - 1
