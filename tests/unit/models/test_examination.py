"""The examination of a network, alone: each fault is found, nothing honest is refused,
nothing is changed.
"""

import copy

import pytest
import timm
import torch
from brought import CLASSES, FAULTS, HONEST, SIDE, STUDENTS, Changed, convolution
from torch import nn

from kd.core.errors import ModelError
from kd.models.classifier import LogitsModel
from kd.models.examination import examine, require_apart, unused_parameters
from kd.models.examined import add_noise, restored


class Centred(nn.Module):
    def forward(self, logits):
        return logits - logits.mean(0)


def images(count=2, seed=0):
    return torch.randn(
        count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)
    )


def build_model(build, seed=0):
    torch.manual_seed(seed)
    return LogitsModel(build(), "student")


# final weights hide nothing behind zeros
FINAL = [(name, 0) for name in FAULTS if "behind" not in name]


@pytest.mark.parametrize(
    ("name", "trained"), [*FINAL, *((name, 4) for name in (*FAULTS, *STUDENTS))]
)
def test_a_fault_is_found(name, trained):
    build, word = (FAULTS | STUDENTS)[name]
    with pytest.raises(ModelError, match=rf"^student: .*{word}") as caught:
        examine(build_model(build), "student", images(), True, trained)
    assert "\n" not in str(caught.value)
    assert caught.value.allowed
    assert caught.value.remedy


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_network_passes_and_is_left_as_it_was(name, seed):
    model = build_model(HONEST[name], seed)
    pixels = images(seed=seed)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    untouched = pixels.clone()
    for trained in (0, 2):
        outputs = examine(model.train(), "student", pixels, True, trained)
        assert outputs["logits"].shape == (2, CLASSES)
        assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(pixels, untouched)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("seed", range(40))
def test_small_logits_of_label_sets_are_no_probabilities(seed):
    """The two logits of two images lie in 0..1 by chance; a sigmoid's stay there with
    any weights.
    """

    class Few(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3 * SIDE**2, 2)
            nn.init.normal_(self.head.weight, std=1e-4)
            nn.init.uniform_(self.head.bias, 0.2, 0.8)

        def forward(self, image):
            return self.head(image.flatten(1))

    examine(build_model(Few, seed), "student", images(), True, 2)
    with pytest.raises(ModelError, match="probabilities"):
        examine(
            build_model(lambda: nn.Sequential(Few(), nn.Sigmoid()), seed),
            "student",
            images(),
            True,
            2,
        )


def test_a_batch_norm_on_one_value_per_channel_is_refused():
    network = build_model(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(3 * SIDE**2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        )
    )
    with pytest.raises(ModelError, match=r"^student: .*batch norm.*one value"):
        examine(network, "student", images(), True, 1)
    examine(network, "student", images(), True, 2)
    examine(network, "teacher", images())  # in evaluation it has statistics
    # its maps are larger
    examine(
        build_model(lambda: convolution(nn.BatchNorm2d(8))),
        "student",
        images(),
        True,
        1,
    )


def test_not_a_number_is_refused_of_final_weights():
    """An untrained network may overflow in evaluation: its batch norm has no statistics
    yet.
    """
    network = build_model(lambda: Changed(after=lambda x: (x.abs() + 1e30) ** 2))
    with pytest.raises(ModelError, match=r"^teacher: .*NaN or infinity"):
        examine(network, "teacher", images())
    examine(network, "student", images(), True, 2)


def test_one_image_of_data_is_enough():
    examine(
        build_model(lambda: convolution(nn.BatchNorm2d(8))),
        "student",
        images(1),
        True,
        4,
    )
    with pytest.raises(ModelError, match="alone"):
        examine(build_model(FAULTS["centred over the batch"][0]), "student", images(1))


def test_a_failing_forward_is_explained():
    broken = build_model(lambda: nn.Linear(5, 3))
    with pytest.raises(RuntimeError):
        examine(broken, "student", images())
    with pytest.raises(ModelError, match=r"^here: it failed"):
        examine(
            broken,
            "student",
            images(),
            explain=lambda error: ModelError("here", "it failed"),
        )


@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning"
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamic_int8_passes_and_a_fault_in_it_does_not():
    """Its scale is that of the batch: an image alone differs by some percent."""
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIDE,
        patch_size=4,
        depth=4,
        num_classes=CLASSES,
    )
    int8 = torch.ao.quantization.quantize_dynamic(vit.eval(), {nn.Linear})
    outputs = examine(LogitsModel(int8, "teacher"), "teacher", images())
    with torch.no_grad():
        alone = int8(images()[:1])
    assert (outputs["logits"][:1] - alone).abs().max() > 1e-3 * outputs[
        "logits"
    ].abs().max()  # a float32 would fail
    with pytest.raises(ModelError, match="alone"):
        examine(
            LogitsModel(nn.Sequential(int8, Centred()), "teacher"), "teacher", images()
        )


def test_shared_memory_is_found_also_behind_other_names():
    teacher = Changed()
    student = Changed()
    other_teacher = Changed()
    require_apart(student, {"teacher": teacher}, "student")
    # another Parameter, the same memory
    student.plain[1].weight.data = teacher.plain[1].weight.data[:]
    with pytest.raises(ModelError, match=r"^student: .*plain\.1\.weight.*teacher\[1\]"):
        require_apart(
            student, {"teacher[0]": other_teacher, "teacher[1]": teacher}, "student"
        )


def test_parameters_without_a_gradient_are_named_and_nothing_moves():
    model = HONEST["an unused layer"]()
    before = copy.deepcopy(model.state_dict())
    names = unused_parameters(model, lambda: model(images()).square().mean())
    assert names == ("pooler.weight", "pooler.bias")
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    model.pooler.requires_grad_(False)
    assert unused_parameters(model, lambda: model(images()).square().mean()) == ()


def test_weights_statistics_and_modes_come_back_bit_by_bit():
    model = convolution(nn.BatchNorm2d(8), nn.Dropout(0.5))
    model[1].eval()  # frozen statistics, as some train
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    with restored(model, parameters=True):
        add_noise(model.train(), 1.0, 3)
        model(images(4))
        assert not torch.equal(model[0].weight, before["0.weight"])
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
