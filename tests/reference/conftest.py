"""Compare a loss with its paper's formula, written plainly in float64 by each test.

Shape legend: B images of a batch, C classes, D feature width.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kd.core.types import Batch, Outputs

SHAPES = [(4, 2), (5, 3), (8, 101), (3, 1000)]
STUDENT_D = 6
TEACHER_D = 10
STUDENT_TOKENS = 4
TEACHER_TOKENS = 9

Formula = Callable[[Outputs, Outputs, Batch], Tensor]


def draw(shape: tuple[int, int]) -> tuple[Outputs, Outputs, Batch]:
    """Return float32 outputs of both models, and a batch with mixed labels."""
    B, C = shape
    generator = torch.Generator().manual_seed(100 * B + C)
    normal = lambda *size: 3 * torch.randn(*size, generator=generator)  # noqa: E731
    student = Outputs(normal(B, C), {"pooled": normal(B, STUDENT_D)})
    teacher = Outputs(normal(B, C), {"pooled": normal(B, TEACHER_D)})
    label, partner = torch.randint(C, (2, B), generator=generator)
    batch = batch_of(label, partner, torch.rand(B, generator=generator))
    student.features["tokens"] = normal(B, STUDENT_TOKENS, STUDENT_D)  # type: ignore[index]
    teacher.features["tokens"] = normal(B, TEACHER_TOKENS, TEACHER_D)  # type: ignore[index]
    return student, teacher, batch


def batch_of(
    label: Tensor, partner: Tensor | None = None, lam: Tensor | None = None
) -> Batch:
    """Return a batch with empty images."""
    B = len(label)
    return Batch(
        ids=torch.arange(B),
        image=torch.zeros(B, 3, 1, 1, dtype=torch.uint8),
        label=label,
        partner_label=label if partner is None else partner,
        lam=torch.ones(B) if lam is None else lam,
        weight=torch.ones(B),
    )


def leaves(outputs: Outputs, dtype: torch.dtype) -> Outputs:
    return outputs.map(lambda tensor: tensor.to(dtype, copy=True).requires_grad_())


def gradient(value: Tensor, student: Outputs) -> Tensor:
    """Return the gradients of logits and all features of each image, one behind the
    other.
    """
    gradients = torch.autograd.grad(
        value, [student.logits, *student.features.values()], materialize_grads=True
    )
    return torch.cat(
        [gradient_of_leaf.flatten(1) for gradient_of_leaf in gradients], dim=1
    ).double()


@pytest.fixture(params=SHAPES, ids=str)
def shape(request) -> tuple[int, int]:
    """[B, C], from two classes to a thousand."""
    return request.param


@pytest.fixture
def agree(shape) -> Callable[[nn.Module, Formula], None]:
    """Assert that a loss and a formula have the same value and the same gradient."""

    def check(loss: nn.Module, formula: Formula) -> None:
        student, teacher, batch = draw(shape)
        narrow = leaves(student, torch.float32)
        wide = leaves(student, torch.float64)
        found_B = loss(narrow, teacher, batch)
        expected_B = formula(wide, leaves(teacher, torch.float64), batch)
        # float32 has 24 bits (6e-8); a sum over 1,000 classes and a cancellation lose
        # accuracy to 1e-5.
        torch.testing.assert_close(found_B.double(), expected_B, rtol=1e-5, atol=1e-5)
        expected = gradient(expected_B.mean(), wide)
        # The constant is for two classes, where some losses have no gradient.
        tolerance = 1e-5 * expected.abs().max().item() + 1e-7
        torch.testing.assert_close(
            gradient(found_B.mean(), narrow), expected, rtol=0, atol=tolerance
        )

    return check


@pytest.fixture
def outputs(shape) -> tuple[Outputs, Outputs, Batch]:
    """Student outputs, teacher outputs and batch of one shape."""
    return draw(shape)
