"""Weight selection (arXiv:2311.18823): evenly spaced elements of the larger model's tensors."""

from __future__ import annotations

import pytest
import timm
import torch

from kd.errors import ModelError
from kd.models.load import select_weights


def vit(width: int, depth: int = 2, heads: int = 2, classes: int = 3, **more) -> torch.nn.Module:
    torch.manual_seed(width + depth)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        num_classes=classes,
        **more,
    )


def test_equal_sizes_are_a_copy():
    student, teacher = vit(24, depth=1), vit(24, depth=3)
    count = select_weights(student, teacher)
    assert count == sum(p.numel() for p in student.parameters())
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, teacher.state_dict()[name]), name


@pytest.mark.parametrize(("small", "large"), [(24, 48), (24, 36), (32, 40)])
def test_elements_are_evenly_spaced_along_every_dimension(small, large):
    student, teacher = vit(small), vit(large)
    select_weights(student, teacher)
    given = teacher.state_dict()
    chosen = [i * large // small for i in range(small)]
    assert torch.equal(student.state_dict()["blocks.0.norm1.weight"], given["blocks.0.norm1.weight"][chosen])
    assert torch.equal(student.state_dict()["head.weight"], given["head.weight"][:, chosen])  # classes are whole
    expected = given["blocks.1.attn.proj.weight"][chosen][:, chosen]
    assert torch.equal(student.state_dict()["blocks.1.attn.proj.weight"], expected)
    # Queries, keys and values stay apart: each third of the student's comes from the same third of the teacher's.
    qkv, of_teacher = student.state_dict()["blocks.0.attn.qkv.weight"], given["blocks.0.attn.qkv.weight"]
    for third, (mine, theirs) in enumerate(zip(qkv.chunk(3), of_teacher.chunk(3), strict=True)):
        assert torch.equal(mine, theirs[chosen][:, chosen]), third
    assert torch.equal(student.state_dict()["patch_embed.proj.weight"], given["patch_embed.proj.weight"][chosen])


def test_every_element_is_one_of_the_teachers():
    student, teacher = vit(24), vit(48)
    select_weights(student, teacher)
    given = teacher.state_dict()
    for name, tensor in student.state_dict().items():
        assert set(tensor.flatten().tolist()) <= set(given[name].flatten().tolist()), name


def test_the_teacher_is_not_changed():
    student, teacher = vit(24), vit(48)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    select_weights(student, teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize("pair", ["larger student", "another family"])
def test_models_that_do_not_fit(pair):
    teacher = vit(24) if pair == "larger student" else timm.create_model("test_resnet", num_classes=3)
    with pytest.raises(ModelError, match=r"student\.init: is 'teacher', but less than half"):
        select_weights(vit(48), teacher)


def test_a_refused_selection_changes_nothing():
    student, teacher = vit(48), vit(24)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    with pytest.raises(ModelError):
        select_weights(student, teacher)
    assert all(torch.equal(before[name], tensor) for name, tensor in student.state_dict().items())
