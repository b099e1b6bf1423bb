import pytest
import torch

from kd.core.types import Dims, Outputs
from kd.parts.losses import kl

DIMS = Dims(0, 0, 0)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_equals_hinton_2015(agree, temperature):
    def formula(student, teacher, batch):
        q_BC = (student.logits / temperature).softmax(dim=1)
        p_BC = (teacher.logits / temperature).softmax(dim=1)
        return temperature**2 * (p_BC * (p_BC / q_BC).log()).sum(dim=1)

    agree(kl.build(kl.Options(temperature=temperature), DIMS), formula)


def test_hard_is_the_cross_entropy_with_the_class_that_the_teacher_names(agree):
    def formula(student, teacher, batch):
        named_BC = (teacher.logits == teacher.logits.amax(dim=1, keepdim=True)).double()
        return (
            student.logits.exp().sum(dim=1)
            / (named_BC * student.logits.exp()).sum(dim=1)
        ).log()

    agree(kl.build(kl.Options(hard=True), DIMS), formula)


def test_hard_has_nothing_to_soften():
    with pytest.raises(ValueError, match=r"temperature is 2.*must be 1"):
        kl.Options(hard=True, temperature=2.0)


def test_is_zero_with_zero_gradient_when_student_equals_teacher(outputs):
    _, teacher, batch = outputs
    logits = teacher.logits.clone().requires_grad_()
    loss_B = kl.build(kl.Options(temperature=2.0), DIMS)(
        Outputs(logits), teacher, batch
    )
    loss_B.sum().backward()
    torch.testing.assert_close(loss_B, torch.zeros_like(loss_B), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-6)


def test_high_temperature_compares_centred_logits(outputs):
    # Hinton et al. 2015, equation 4: at high T the gradient is the difference of the
    # zero-mean logits over C.
    student, teacher, batch = outputs
    logits = student.logits.clone().requires_grad_()
    temperature = 3000.0
    kl.build(kl.Options(temperature=temperature), DIMS)(
        Outputs(logits), teacher, batch
    ).sum().backward()
    centred = [
        o.logits - o.logits.mean(dim=1, keepdim=True) for o in (student, teacher)
    ]
    expected_BC = (
        temperature * (centred[0] - centred[1]) / temperature / logits.shape[1]
    )
    largest = expected_BC.abs().max().item()
    # The next term of the expansion is of the order of logits / T, and float32
    # probabilities are multiplied by T.
    torch.testing.assert_close(logits.grad, expected_BC, rtol=0, atol=1e-2 * largest)
