"""The frozen model: eval, no gradient, its own precision, the same answer in slices."""

import pytest
import torch

from kd.core.types import Batch
from kd.models.live_teacher import LiveTeacher, NoTeacher
from kd.models.load_classifier import load
from kd.models.spec import Spec

CLASSES = ("a", "b", "c")
CPU = torch.device("cpu")
ARGS = {
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 1,
    "num_heads": 2,
    "drop_path_rate": 0.5,
    "proj_drop_rate": 0.5,
}


def model(features=(), name: str = "vit_tiny_patch16_224", args=ARGS):
    torch.manual_seed(0)
    return load(Spec("teacher", name, args, CLASSES), 16, features)


def batch(count: int = 7) -> Batch:
    image = torch.randint(
        256,
        (count, 3, 16, 16),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )
    return Batch.of(image, torch.zeros(count, dtype=torch.int64))


def test_it_is_frozen_and_in_eval_mode():
    live = LiveTeacher(model().train(), CPU)
    assert not any(module.training for module in live.model.modules())
    assert not any(parameter.requires_grad for parameter in live.model.parameters())
    # no .train(), no DDP, no state_dict can reach it
    assert not isinstance(live, torch.nn.Module)


def test_only_a_teacher_in_stages_or_shards_is_divided():
    assert not LiveTeacher(model(), CPU).divided
    assert LiveTeacher(model(), CPU, pipeline=lambda stage: stage).divided
    assert LiveTeacher(
        model(), CPU, shard=lambda module, tensors: module.to_empty(device=CPU)
    ).divided


def test_the_model_that_was_given_is_not_changed():
    network = model().train()
    LiveTeacher(network, CPU, torch.bfloat16)
    assert network.training
    assert all(
        p.requires_grad and p.dtype == torch.float32 for p in network.parameters()
    )


def test_it_says_what_the_model_in_eval_mode_says():
    network = model(features=("pooled",))
    outputs = LiveTeacher(network, CPU)(batch())
    with torch.no_grad():
        expected = network.eval()(batch().image)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.features["pooled"], expected.features["pooled"])


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7, 100])
def test_slices_give_what_the_whole_gives(micro_batch):
    undivided = LiveTeacher(model(("pooled",)), CPU)(batch())
    sliced = LiveTeacher(model(("pooled",)), CPU, micro_batch=micro_batch)(batch())
    torch.testing.assert_close(sliced.logits, undivided.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        sliced.features["pooled"], undivided.features["pooled"], rtol=1e-5, atol=1e-6
    )


def test_outputs_can_be_used_under_autograd():
    outputs = LiveTeacher(model(("pooled",)), CPU)(batch())
    assert not outputs.logits.requires_grad
    assert not outputs.logits.is_inference()
    assert not outputs.features["pooled"].is_inference()
    weight = torch.ones(3, requires_grad=True)
    (outputs.logits * weight).sum().backward()  # autograd saves the logits for this
    torch.testing.assert_close(weight.grad, outputs.logits.sum(0))


def test_bfloat16_outputs_are_float32_and_close():
    exact = LiveTeacher(model(), CPU)(batch())
    coarse = LiveTeacher(model(), CPU, torch.bfloat16)(batch())
    assert coarse.logits.dtype == torch.float32
    torch.testing.assert_close(coarse.logits, exact.logits, rtol=0.1, atol=0.05)
    assert not torch.equal(coarse.logits, exact.logits)


def test_autocast_around_it_changes_nothing():
    live = LiveTeacher(model(), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        inside = live(batch())
    assert torch.equal(inside.logits, live(batch()).logits)


def test_no_teacher_has_nothing_to_say():
    outputs = NoTeacher()(batch())
    assert outputs.logits.shape == (7, 0)
    assert not outputs.features
