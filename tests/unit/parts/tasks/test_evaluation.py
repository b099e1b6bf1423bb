"""Evaluation against the same numbers in plain NumPy, float64.

Shape legend: N images, C classes.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kd.core.errors import DataError
from kd.core.evaluation import Evaluation, Evaluator, Split
from kd.core.types import Batch, Outputs, Sample
from kd.data.loader import LocalLoader, Share, evaluation_plan
from kd.models.live_teacher import NoTeacher
from kd.parts.backends.cpu import CPU
from kd.parts.tasks.single_label import NUM_BINS, Options, build
from kd.setup import build as setup


class Table(nn.Module):
    """A model that looks its logits up: the first pixel of an image is its id."""

    def __init__(self, logits_NC: Tensor) -> None:
        super().__init__()
        self.logits_NC = logits_NC
        self.modes = []

    def forward(self, image: Tensor) -> Outputs:
        self.modes.append(self.training)
        return Outputs(self.logits_NC[image[:, 0, 0, 0].long()])


class Answers:
    """A teacher that looks its logits up by id, and counts."""

    def __init__(self, logits_NC: Tensor) -> None:
        self.logits_NC = logits_NC
        self.calls = 0

    def __call__(self, batch: Batch) -> Outputs:
        self.calls += 1
        return Outputs(self.logits_NC[batch.ids])


class Ids:
    """A dataset whose images are their ids."""

    def __init__(self, labels: Tensor, broken: frozenset[int] = frozenset()) -> None:
        self.labels = labels
        self.broken = broken
        self.classes = ()

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, id: int, view: int) -> Sample:
        label = int(self.labels[id])
        return Sample(
            torch.full((3, 1, 1), id, dtype=torch.uint8),
            label,
            label,
            1.0,
            id not in self.broken,
        )


def draw(images: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(images * classes)
    student, teacher = (
        3 * torch.randn(images, classes, generator=generator) for _ in range(2)
    )
    label = torch.where(
        torch.rand(images, generator=generator) < 0.6,
        student.argmax(1),
        torch.randint(classes, (images,), generator=generator),
    )
    return student, teacher, label


def evaluator(
    teacher, labels, batch, classes, broken=frozenset(), labelled=True
) -> Evaluator:
    loader = LocalLoader(Ids(labels, broken), Share(batch, 1, 0, 1), workers=0)
    plan = evaluation_plan(len(labels), batch)
    live = Answers(teacher) if teacher is not None else None
    return build(Options()).evaluator(
        Evaluation(CPU("fp32", 60, 1), Split(loader, plan), live, classes, labelled)
    )


def log_softmax(logits: Tensor) -> np.ndarray:
    x = logits.numpy().astype(np.float64)
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def expected_of(logits: Tensor, label: Tensor, prefix: str = "") -> dict[str, float]:
    log_prob = log_softmax(logits)
    y = label.numpy()
    order = np.argsort(-log_prob, axis=1)
    confidence = np.exp(log_prob.max(1))
    correct = order[:, 0] == y
    error = 0.0
    for bin in range(NUM_BINS):  # arXiv:1706.04599, equation 3
        inside = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1) == bin
        if inside.any():
            error += inside.mean() * abs(
                correct[inside].mean() - confidence[inside].mean()
            )
    return {
        f"{prefix}accuracy": correct.mean(),
        f"{prefix}top5": (order[:, :5] == y[:, None]).any(1).mean(),
        f"{prefix}nll": -log_prob[np.arange(len(y)), y].mean(),
        f"{prefix}ece": error,
    }


def expected_together(student: Tensor, teacher: Tensor) -> dict[str, float]:
    s = log_softmax(student)
    t = log_softmax(teacher)
    return {
        "kl": (np.exp(t) * (t - s)).sum(1).mean(),
        "agreement": (s.argmax(1) == t.argmax(1)).mean(),
    }


@pytest.mark.parametrize(("images", "classes"), [(29, 2), (30, 3), (64, 7), (200, 101)])
@pytest.mark.parametrize("batch", [1, 8, 250])
def test_all_numbers_are_those_of_the_formulas(images, classes, batch):
    student, teacher, label = draw(images, classes)
    metrics = evaluator(teacher, label, batch, classes)(Table(student))
    expected = expected_of(student, label) | expected_of(teacher, label, "teacher_")
    assert metrics == pytest.approx(
        expected | expected_together(student, teacher), rel=1e-5, abs=1e-7
    )


def test_without_a_teacher_the_students_numbers_are_those_of_the_formulas():
    student, _, label = draw(30, 3)
    assert evaluator(None, label, 8, 3)(Table(student)) == pytest.approx(
        expected_of(student, label), rel=1e-5
    )


def test_without_labels_the_teacher_is_what_is_right():
    student, teacher, label = draw(30, 3)
    evaluation = evaluator(teacher, torch.full_like(label, -1), 8, 3, labelled=False)
    right = expected_of(student, teacher.argmax(1))
    expected = expected_together(student, teacher) | {"agreement_ece": right["ece"]}
    assert evaluation(Table(student)) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert (evaluation.selection_metric, expected["agreement"]) == (
        "agreement",
        pytest.approx(right["accuracy"]),
    )


def test_another_teacher_is_scored_by_its_own_outputs():
    student, teacher, label = draw(30, 3)
    evaluation = evaluator(teacher, label, 8, 3)
    evaluation(Table(student))
    metrics = evaluation.of(Answers(student))(Table(student))
    assert metrics["agreement"] == 1
    assert metrics["teacher_accuracy"] == metrics["accuracy"]
    assert evaluation(Table(student))["agreement"] < 1


def test_unreadable_images_do_not_count():
    student, teacher, label = draw(30, 7)
    readable = torch.tensor([id not in (4, 17) for id in range(30)])
    metrics = evaluator(teacher, label, 8, 7, frozenset({4, 17}))(Table(student))
    expected = expected_of(student[readable], label[readable]) | expected_of(
        teacher[readable], label[readable], "teacher_"
    )
    assert metrics == pytest.approx(
        expected | expected_together(student[readable], teacher[readable]),
        rel=1e-5,
        abs=1e-7,
    )


@pytest.mark.parametrize(("labelled", "images"), [(True, 25), (False, 28)])
def test_the_standard_error_is_that_of_the_images_that_are_scored(labelled, images):
    """Of a share p: sqrt(p (1 - p) / images). Of 30 three have no label, and two cannot
    be decoded.
    """
    student, teacher, label = draw(30, 7)
    label[[3, 11, 29]] = -1
    evaluation = evaluator(teacher, label, 8, 7, frozenset({4, 17}), labelled)
    evaluation(Table(student))
    assert evaluation.standard_error(0.8) == pytest.approx((0.8 * 0.2 / images) ** 0.5)


def test_an_evaluation_without_a_readable_image_is_an_error():
    student, teacher, label = draw(30, 7)
    with pytest.raises(
        DataError, match=r"^data: no image of the validation split could be decoded"
    ):
        evaluator(teacher, label, 8, 7, frozenset(range(30)))(Table(student))


@pytest.mark.parametrize("labels", [0, -1])
def test_a_test_split_is_named_in_its_errors(labels, monkeypatch):
    """It was called the validation split, after a whole training."""
    student, _, label = draw(8, 7)
    evaluation = evaluator(
        None,
        torch.full_like(label, labels),
        8,
        7,
        frozenset(range(8)) if not labels else frozenset(),
    )
    setting = SimpleNamespace(
        data=SimpleNamespace(test=label), recipe=SimpleNamespace(task=build(Options()))
    )
    monkeypatch.setattr(setup, "shown_split", lambda *_: evaluation.val)
    of_test = setup.test_evaluator(
        setting, Evaluation(evaluation.backend, evaluation.val, None, 7), NoTeacher()
    )
    with pytest.raises(DataError, match=r"no image of the test split"):
        of_test(Table(student))


def test_the_teacher_is_queried_once_and_the_student_each_time():
    student, teacher, label = draw(29, 3)
    evaluation = evaluator(teacher, label, 8, 3)
    first = evaluation(Table(student))
    other_student, _, _ = draw(29, 3 * 5)
    again = evaluation(Table(other_student[:, :3]))
    assert evaluation.teacher.calls == 4
    assert {k: v for k, v in again.items() if k.startswith("teacher_")} == {
        k: v for k, v in first.items() if k.startswith("teacher_")
    }
    assert again == pytest.approx(
        expected_of(other_student[:, :3], label)
        | expected_of(teacher, label, "teacher_")
        | expected_together(other_student[:, :3], teacher),
        rel=1e-5,
    )


@pytest.mark.parametrize("training", [True, False])
def test_the_student_is_in_eval_mode_and_put_back(training):
    student, _, label = draw(29, 3)
    table = Table(student).train(training)
    evaluator(None, label, 8, 3)(table)
    assert table.modes == [False] * 4
    assert table.training is training


def test_certain_and_wrong_is_the_worst_calibration():
    label = torch.zeros(10, dtype=torch.int64)
    wrong = torch.tensor([[0.0, 50.0]]).repeat(10, 1)
    metrics = evaluator(None, label, 4, 2)(Table(wrong))
    assert (metrics["accuracy"], metrics["ece"]) == pytest.approx((0.0, 1.0))
    metrics = evaluator(None, 1 - label, 4, 2)(Table(wrong))
    assert (metrics["accuracy"], metrics["ece"]) == pytest.approx((1.0, 0.0), abs=1e-6)


def test_samples_say_which_images_are_right():
    """Without those that could not be decoded, or have no label; in the order of the
    ids.
    """
    student, teacher, label = draw(30, 7)
    label[[3, 11]] = -1
    broken = frozenset({4, 17})
    evaluation = evaluator(teacher, label, 8, 7, broken)
    row = evaluation(Table(student))
    labelled_ids = np.array([id for id in range(30) if id not in {3, 4, 11, 17}])
    readable_ids = np.array([id for id in range(30) if id not in broken])
    samples = evaluation.samples()
    for key, logits in (("accuracy", student), ("teacher_accuracy", teacher)):
        assert (
            samples[key].right.tolist()
            == (logits.argmax(1) == label)[labelled_ids].tolist()
        )
    assert (
        samples["agreement"].right.tolist()
        == (student.argmax(1) == teacher.argmax(1))[readable_ids].tolist()
    )
    assert {key: sample.value for key, sample in samples.items()} == pytest.approx(
        {key: row[key] for key in samples}
    )
    assert {*samples} == {
        "accuracy",
        "top5",
        "teacher_accuracy",
        "teacher_top5",
        "agreement",
    }
    by_other_teacher = evaluation.of(Answers(student))
    by_other_teacher(Table(student))
    assert (
        by_other_teacher.samples()["accuracy"].minus(
            by_other_teacher.samples()["teacher_accuracy"]
        )[0]
        == 0
    )


def test_samples_are_those_of_the_last_evaluation():
    student, teacher, label = draw(30, 3)
    evaluation = evaluator(teacher, label, 8, 3)
    evaluation(Table(student))
    evaluation(Table(teacher))
    assert (
        evaluation.samples()["accuracy"].value
        == evaluation.samples()["teacher_accuracy"].value
    )
