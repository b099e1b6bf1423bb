"""Start a small model from a larger one of its family: weight selection (arXiv:2311.18823)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kd.errors import ModelError


@torch.no_grad()
def select_weights(student: nn.Module, teacher: nn.Module) -> int:
    """Copy into the student evenly spaced elements of the teacher's tensors of the same names.

    The paper's uniform element selection, and its first-N layer selection, which follows from equal names: block i of
    the student comes from block i of the teacher. Along a dimension of size s out of t the elements i * t // s are
    taken; a fused qkv is selected within each of its thirds because 3s out of 3t keeps them apart.

    Returns:
        How many of the student's parameters were set.

    Raises:
        ModelError: the two models share no tensor name, or the student is the larger one.
    """
    source = teacher.state_dict()
    selected = 0
    for name, target in student.state_dict().items():
        given = source.get(name)
        if given is None or given.ndim != target.ndim:
            continue
        if any(small > large for small, large in zip(target.shape, given.shape, strict=True)):
            continue
        target.copy_(_evenly(given, target.shape))
        selected += target.numel()
    if selected < 0.5 * sum(tensor.numel() for tensor in student.state_dict().values()):
        raise ModelError(
            "student.init",
            "is 'teacher', but less than half of the student's weights have a larger namesake in the teacher",
            "Both must be of one family (two ViTs) and the teacher the larger one",
            "Set student.init=scratch, or choose a student of the teacher's family",
        )
    return selected


def _evenly(tensor: Tensor, shape: torch.Size) -> Tensor:
    for dim, (small, large) in enumerate(zip(shape, tensor.shape, strict=True)):
        if small != large:
            index = torch.arange(small, device=tensor.device) * large // small
            tensor = tensor.index_select(dim, index)
    return tensor
