"""The contract `kd.core.contracts.Loss`, tested on every file in `kd/losses`, new ones
included.

Shape legend: B images of a batch, C classes, D feature width.
"""

import math
import re
import typing
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kd import config
from kd.core.errors import KdError
from kd.core.facts import LossFacts
from kd.core.types import Batch, Dims, Outputs
from kd.parts import registry

B = 6
C = 5
STUDENT_D = 8
TEACHER_D = 12
TOKENS = {STUDENT_D: 4, TEACHER_D: 9}
"""Grids of 2 x 2 and 3 x 3."""
FEATURES = {"pooled", "tokens"}

every_loss = pytest.mark.parametrize("name", registry.names("losses"))


def build(name: str, num_classes: int = C) -> nn.Module:
    torch.manual_seed(0)  # initial values of learned parameters are drawn here
    module = registry.find("losses", name, "losses")
    return module.build(module.Options(), make_dims(num_classes))


def facts(name: str) -> LossFacts:
    return registry.facts(
        "losses", name, registry.default_options("losses", name), "losses"
    )


def make_dims(num_classes: int) -> Dims:
    tokens = [(TOKENS[width], width) for width in (STUDENT_D, TEACHER_D)]
    return Dims(num_classes, STUDENT_D, TEACHER_D, *tokens)


def make_batch(name: str, num_classes: int = C) -> Batch:
    """Return mixed labels, unmixed ones for a loss that needs each image alone, or sets
    of labels.
    """
    generator = torch.Generator().manual_seed(1)
    label, partner = torch.randint(num_classes, (2, B), generator=generator)
    lam = torch.rand(B, generator=generator)
    needs = facts(name)
    if needs.unmixed:
        partner = label
        lam = torch.ones(B)
    if needs.logits == "sigmoid":
        label, partner = (
            nn.functional.one_hot(labels, num_classes).to(torch.int8)
            for labels in (label, partner)
        )
    image = torch.zeros(B, 3, 2, 2, dtype=torch.uint8)
    return Batch(
        ids=torch.arange(B),
        image=image,
        label=label,
        partner_label=partner,
        lam=lam,
        weight=torch.ones(B),
    )


def make_outputs(
    width: int, num_classes: int = C, scale: float = 3.0, seed: int = 2
) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(B, num_classes, generator=generator)
    shapes = {"pooled": (B, width), "tokens": (B, TOKENS[width], width)}
    return Outputs(
        logits,
        {
            name: scale * torch.randn(*shape, generator=generator)
            for name, shape in shapes.items()
        },
    )


def constant_outputs(width: int, num_classes: int) -> Outputs:
    return make_outputs(width, num_classes).map(torch.zeros_like)


def case(name: str) -> tuple[nn.Module, Outputs, Outputs, Batch]:
    """Return a loss, the outputs of both models and a batch."""
    return (
        build(name),
        make_outputs(STUDENT_D),
        make_outputs(TEACHER_D, seed=3),
        make_batch(name),
    )


def as_leaves(outputs: Outputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Return copies in `dtype` that require gradients."""
    return outputs.map(lambda tensor: tensor.to(dtype, copy=True).requires_grad_())


def gradients(loss: nn.Module, student: Outputs) -> list[Tensor]:
    """Return all gradients of the student's outputs and of the loss's parameters."""
    leaves = [student.logits, *student.features.values(), *loss.parameters()]
    return [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]


@every_loss
def test_options_reject_invalid_values(name):
    """In a configuration, where a bad value costs most; ranges are declared on the
    fields.
    """
    options_type = registry.options_type("losses", name, "losses")
    for key, kind in typing.get_type_hints(options_type).items():
        for value in {float: [".nan", ".inf", "-.inf"], bool: []}.get(
            kind, ["no such choice"]
        ):
            with pytest.raises(KdError, match=key):
                config.load("vit_food", [f"losses=[{{kind: {name}, {key}: {value}}}]"])


@every_loss
def test_docstring_starts_with_one_sentence_and_cites_a_source(name):
    doc = registry.find("losses", name, "losses").__doc__
    first = doc.splitlines()[0]
    assert first.endswith(".")
    assert len(first) > 30
    assert re.search(r"arXiv:\d{4}\.\d{4,5}", doc)
    assert "Not handled:" in doc


@every_loss
def test_says_what_it_reads(name):
    needs = facts(name)
    assert needs.logits in ("softmax", "sigmoid", "")
    assert needs.features <= FEATURES
    assert needs.logits or needs.features, "it would read nothing of the student"
    assert needs.teacher or needs.labels, "it would teach nothing"


@every_loss
def test_says_how_many_images_it_compares(name):
    """Only the value of a loss that compares images with one another changes when an
    image is alone.
    """
    loss, student, teacher, batch = case(name)
    alone_B = torch.cat(
        [
            loss(
                *(
                    outputs.map(lambda tensor, row=row: tensor[row : row + 1])
                    for outputs in (student, teacher)
                ),
                image,
            )
            for row, image in enumerate(
                batch.take(torch.tensor([row])) for row in range(B)
            )
        ]
    )
    equal = torch.allclose(alone_B, loss(student, teacher, batch), rtol=1e-4, atol=1e-5)
    assert equal == (facts(name).images == 1)


def test_the_fewest_images_are_those_that_teach():
    """One image fewer has no gradient of the comparison."""
    for name, options in {"cckd": {}, "dist": {"beta": 0.0}}.items():
        defaults = registry.default_options("losses", name, **options)
        loss = registry.build("losses", name, defaults, "losses", dims=make_dims(C))
        fewest = registry.facts("losses", name, defaults, "losses").images
        sizes = []
        for images in (fewest - 1, fewest):
            rows = torch.arange(images)
            student = as_leaves(make_outputs(STUDENT_D))
            teacher = make_outputs(TEACHER_D, seed=3)
            few = [
                outputs.map(lambda tensor, rows=rows: tensor[rows])
                for outputs in (student, teacher)
            ]
            loss(*few, make_batch(name).take(rows)).mean().backward()
            sizes.append(
                sum(gradient.norm().item() for gradient in gradients(loss, student))
            )
        assert sizes[0] < 1e-3 < 1e-2 < sizes[1]
    without = registry.default_options("losses", "dist", gamma=0.0)
    assert registry.facts("losses", "dist", without, "losses").images == 1


@every_loss
def test_reads_only_its_declared_inputs(name):
    loss, student, teacher, batch = case(name)
    expected_B = loss(student, teacher, batch)
    needs = facts(name)
    if not needs.teacher:
        teacher = Outputs(torch.full((B, C), math.nan))
    if not needs.labels:
        unknown = torch.full_like(batch.label, -1)
        batch = replace(batch, label=unknown, partner_label=unknown)
    student, teacher = (
        replace(
            outputs,
            features={
                name: value
                for name, value in outputs.features.items()
                if name in needs.features
            },
        )
        for outputs in (student, teacher)
    )
    if not needs.logits:
        student, teacher = (
            replace(outputs, logits=torch.zeros(B, 0)) for outputs in (student, teacher)
        )
    torch.testing.assert_close(
        loss(student, teacher, batch), expected_B, rtol=0, atol=0
    )


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gives_one_float32_value_an_image(name, dtype):
    student = as_leaves(make_outputs(STUDENT_D), dtype)
    teacher = as_leaves(make_outputs(TEACHER_D, seed=3), dtype)
    loss = build(name)
    loss_B = loss(student, teacher, make_batch(name))
    loss_B.mean().backward()
    assert loss_B.shape == (B,)
    assert loss_B.dtype == torch.float32
    assert loss_B.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(loss, student))


@every_loss
def test_computes_in_float32_from_low_precision_inputs(name):
    # The same bf16 values, as bf16 and as float32, must give the same loss: nothing is
    # computed in bf16.
    student = make_outputs(STUDENT_D)
    teacher = make_outputs(TEACHER_D, seed=3)
    student = as_leaves(student, torch.bfloat16)
    teacher = as_leaves(teacher, torch.bfloat16)
    wide = as_leaves(student), as_leaves(teacher)
    loss = build(name)
    batch = make_batch(name)
    torch.testing.assert_close(
        loss(student, teacher, batch), loss(*wide, batch), rtol=0, atol=0
    )


@every_loss
def test_stays_float32_under_autocast(name):
    loss, student, teacher, batch = case(name)
    expected_B = loss(student, teacher, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss_B = loss(student, teacher, batch)
    assert loss_B.dtype == torch.float32
    # A learned projector may use bf16 (8 bits of mantissa); logits may not.
    tolerance = (
        {"rtol": 5e-2, "atol": 5e-2} if facts(name).features else {"rtol": 0, "atol": 0}
    )
    torch.testing.assert_close(loss_B, expected_B, **tolerance)


EXTREMES = {
    "large": lambda num_classes, label: (
        make_outputs(STUDENT_D, num_classes, scale=1e4),
        make_outputs(TEACHER_D, num_classes, scale=1e4, seed=3),
    ),
    "certain and wrong teacher": lambda num_classes, label: (
        make_outputs(STUDENT_D, num_classes),
        replace(
            make_outputs(TEACHER_D),
            logits=1e4
            * nn.functional.one_hot((label + 1) % num_classes, num_classes).float(),
        ),
    ),
    "certain and right student": lambda num_classes, label: (
        replace(
            make_outputs(STUDENT_D),
            logits=1e4 * nn.functional.one_hot(label, num_classes).float(),
        ),
        make_outputs(TEACHER_D, num_classes, seed=3),
    ),
    "equal models": lambda num_classes, label: (
        make_outputs(STUDENT_D, num_classes),
        replace(
            make_outputs(TEACHER_D), logits=make_outputs(STUDENT_D, num_classes).logits
        ),
    ),
    "untrained student": lambda num_classes, label: (
        constant_outputs(STUDENT_D, num_classes),
        make_outputs(TEACHER_D, num_classes, seed=3),
    ),
    "constant logits": lambda num_classes, label: (
        constant_outputs(STUDENT_D, num_classes),
        constant_outputs(TEACHER_D, num_classes),
    ),
}


@every_loss
@pytest.mark.parametrize("num_classes", [2, 3, 1000])
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stays_finite_at_the_extremes(name, num_classes, extreme, dtype):
    if extreme == "untrained student" and dtype == torch.float16:
        dtype = (
            torch.bfloat16
        )  # gradients of `dist` are 1e7 here, beyond float16's range (documented)
    batch = make_batch(name, num_classes)
    label = batch.label if batch.label.ndim == 1 else batch.label.argmax(1)
    student, teacher = (
        as_leaves(outputs, dtype) for outputs in EXTREMES[extreme](num_classes, label)
    )
    loss = build(name, num_classes)
    loss_B = loss(student, teacher, batch)
    loss_B.mean().backward()
    assert loss_B.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(loss, student))


@every_loss
def test_gradient_reaches_the_student_only(name):
    student = as_leaves(make_outputs(STUDENT_D))
    teacher = as_leaves(make_outputs(TEACHER_D, seed=3))
    loss = build(name)
    loss(student, teacher, make_batch(name)).mean().backward()
    leaf = next(
        (student.features[name] for name in facts(name).features), student.logits
    )
    assert leaf.grad is not None
    assert (leaf.grad.flatten(1) != 0).any(dim=1).all(), "an image has no gradient"
    assert all(parameter.grad is not None for parameter in loss.parameters()), (
        "DDP waits for every parameter"
    )
    assert teacher.logits.grad is None
    assert all(value.grad is None for value in teacher.features.values())


@every_loss
def test_a_loss_on_features_returns_an_agreement(name):
    loss = build(name)
    student = make_outputs(STUDENT_D)
    teacher = make_outputs(TEACHER_D, seed=3)
    assert (
        facts(name).agreement
        == hasattr(loss, "agreement")
        == bool(facts(name).features)
    )
    assert facts(name).projects == hasattr(loss, "projected")
    if facts(name).agreement:
        agreement_B = loss.agreement(student, teacher)
        assert agreement_B.shape == (B,)
        assert (agreement_B.abs() <= 1 + 1e-6).all()


@every_loss
@pytest.mark.parametrize("num_classes", [2, C, 1000])
def test_is_never_negative(name, num_classes):
    loss = build(name, num_classes)
    batch = make_batch(name, num_classes)
    student = make_outputs(STUDENT_D, num_classes)
    teacher = make_outputs(TEACHER_D, num_classes, seed=3)
    # Where the models agree, a divergence is 0 up to rounding of either sign.
    assert (loss(student, teacher, batch) >= -1e-5).all()
    assert (
        loss(student, replace(teacher, logits=student.logits), batch) >= -1e-5
    ).all()


@every_loss
def test_follows_a_permutation_of_the_batch(name):
    loss, student, teacher, batch = case(name)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    expected_B = loss(student, teacher, batch)[order]
    shuffled = (
        values.map(lambda tensor: tensor[order]) for values in (student, teacher, batch)
    )
    torch.testing.assert_close(loss(*shuffled), expected_B)


@every_loss
def test_leaves_the_weight_to_the_criterion(name):
    loss, student, teacher, batch = case(name)
    weighted = replace(batch, weight=torch.linspace(0, 4, B))
    torch.testing.assert_close(
        loss(student, teacher, weighted), loss(student, teacher, batch), rtol=0, atol=0
    )


@every_loss
def test_the_two_labels_of_a_mixed_image_are_interchangeable(name):
    loss, student, teacher, batch = case(name)
    traded = replace(
        batch, label=batch.partner_label, partner_label=batch.label, lam=1 - batch.lam
    )
    if facts(name).unmixed:
        traded = batch = replace(
            batch, partner_label=batch.label
        )  # nothing is mixed; lam is 1
    torch.testing.assert_close(
        loss(student, teacher, traded), loss(student, teacher, batch)
    )
