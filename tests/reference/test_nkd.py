from __future__ import annotations

import pytest
import torch

from kd.losses import nkd
from kd.types import Dims, Outputs

DIMS = Dims(0, 0, 0)


@pytest.mark.parametrize(("gamma", "temperature"), [(1.5, 1.0), (3.5, 3.0), (0.0, 1.0)])
def test_equals_nkd_2023(agree, gamma, temperature):
    def formula(student, teacher, batch):
        rows = []
        for s, t, y in zip(student.logits, teacher.logits, batch.label.tolist(), strict=True):
            target = -t.softmax(dim=0)[y] * s.softmax(dim=0)[y].log()
            others = [c for c in range(len(s)) if c != y]
            q, p = (s[others] / temperature).softmax(dim=0), (t[others] / temperature).softmax(dim=0)
            rows.append(target - gamma * temperature**2 * (p * q.log()).sum())
        return torch.stack(rows)

    agree(nkd.build(nkd.Options(gamma=gamma, temperature=temperature), DIMS), formula)


def test_other_classes_have_no_gradient_when_student_equals_teacher(outputs):
    # The second term is smallest where the renormalized other classes agree, for any probability of the label.
    _, teacher, batch = outputs
    is_label_BC = torch.arange(teacher.logits.shape[1]) == batch.label[:, None]
    gradients = []
    for gamma in (0.0, 5.0):
        logits = (teacher.logits + 2 * is_label_BC).requires_grad_()
        nkd.NKD(gamma=gamma, temperature=1.0)(Outputs(logits), teacher, batch).sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-5)


def test_other_classes_do_not_see_the_labels_logit(outputs):
    student, teacher, batch = outputs
    loss, without_others = nkd.NKD(gamma=1.0, temperature=1.0), nkd.NKD(gamma=0.0, temperature=1.0)
    other_B = loss(student, teacher, batch) - without_others(student, teacher, batch)
    # For a student that is certain of the label the first term is 0; the second must not change.
    certain = Outputs(student.logits.scatter(1, batch.label[:, None], 1e4))
    torch.testing.assert_close(loss(certain, teacher, batch), other_B, rtol=1e-5, atol=1e-5)


def test_a_common_offset_of_the_logits_changes_nothing(outputs):
    student, teacher, batch = outputs
    loss = nkd.build(nkd.Options(), DIMS)
    # On a grid of 1/16, so that moving them by 8192 is exact in float32.
    near = [Outputs((16 * o.logits).round() / 16) for o in (student, teacher)]
    far = [Outputs(o.logits - 8192) for o in near]
    torch.testing.assert_close(loss(*far, batch), loss(*near, batch), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 2)], indirect=True)
def test_two_classes_have_no_other_class(outputs):
    student, teacher, batch = outputs
    without, with_others = (nkd.NKD(gamma=gamma, temperature=1.0) for gamma in (0.0, 8.0))
    torch.testing.assert_close(with_others(student, teacher, batch), without(student, teacher, batch), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"gamma": -1.0}, {"temperature": 0.0}])
def test_rejects_negative_weights_and_temperatures(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        nkd.Options(**options)
