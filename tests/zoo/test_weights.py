"""The zoo of files of weights: forms in which people keep them; each is loaded right,
or refused in a line that helps.

A case is *right*: the teacher predicts what the network of its file predicts, in the
order of the data's classes. Or it is *refused*, and what the line says is done: with
that it is right, or it cannot be.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from kd.core.errors import ModelError
from kd.models.recognize import identify
from kd.models.spec import Spec
from kd.parts import registry
from kd.parts.tasks.single_label import build as single_label

CLASSES = ("apple", "fig", "pear", "plum", "quince")
NAME = "vit_tiny_patch16_224"
ARGS = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "img_size": 16}
Tensors = dict[str, Tensor]
Keys = dict[str, Any]


def network(
    name: str = NAME, seed: int = 0, classes: int = 5, **args: Any
) -> nn.Module:
    """Return a network all of whose values are random."""
    torch.manual_seed(seed)
    model = timm.create_model(
        name, num_classes=classes, **{**(ARGS if name == NAME else {}), **args}
    ).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.05 * (torch.rand_like(tensor) - 0.4))
    return model


def teacher(
    keys: Keys,
    size: int = 16,
    classes: tuple[str, ...] = CLASSES,
    config_path: str = "teacher",
) -> Any:
    """Return the teacher of a section."""
    task = single_label(registry.default_options("tasks", "single_label"))
    section = {
        "kind": "timm",
        "args": {},
        "checkpoint": "",
        "weights": "by_name",
        **keys,
    }
    names = {
        key: section.pop(key) for key in ("mean", "std", "classes") if key in section
    }
    kind = section.pop("kind")
    options = {
        key: tuple(value) if key != "classes" else value for key, value in names.items()
    }
    spec = Spec(
        config_path,
        section.pop("model"),
        classes=classes,
        exact_head=config_path == "teacher",
        task=task,
        **section,
    )
    model = registry.build(
        "networks",
        kind,
        registry.default_options("networks", kind, **options),
        f"{config_path}.kind",
        spec=spec,
        image_size=size,
        features=(),
    )
    return model.eval()


def same_answers(
    model: Any, expected: nn.Module, order: list[int] | None = None
) -> bool:
    """Return whether a teacher predicts like a network whose outputs are put into an
    order.
    """
    side = model.input_size or 32
    image = torch.randint(
        256,
        (3, 3, side, side),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        theirs = expected(model.normalize(image))
        ours = model(image).logits
    return torch.allclose(
        ours, theirs[:, order or [*range(theirs.shape[1])]], rtol=1e-4, atol=1e-5
    )


def refusal(keys: Keys, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        teacher(keys, **options)
    assert not re.search(r"[\n\x1b]", str(caught.value))
    return str(caught.value)


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


# ------------------------------------------------------------------------------- the
# order of the classes in a file

TURNED = [*CLASSES[1:], CLASSES[0]]
EXCHANGED = [CLASSES[1], CLASSES[0], *CLASSES[2:]]
RECORDS: dict[str, Callable[[list[str]], Keys]] = {
    "classes": lambda names: {"classes": names},
    "a tuple": lambda names: {"class_names": tuple(names)},
    "class_to_idx": lambda names: {
        "class_to_idx": {name: names.index(name) for name in CLASSES}
    },
    "idx_to_class": lambda names: {
        "idx_to_class": {names.index(name): name for name in CLASSES}
    },
    "id2label in args": lambda names: {
        "args": {"id2label": {str(names.index(name)): name for name in CLASSES}}
    },
    "in a Namespace": lambda names: {"args": argparse.Namespace(classes=names, lr=0.1)},
    "Lightning's": lambda names: {"hyper_parameters": {"class_names": names}},
    "MMPreTrain's": lambda names: {"meta": {"dataset_meta": {"classes": names}}},
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(
    "names", [TURNED, EXCHANGED], ids=["all are turned", "two are exchanged"]
)
def test_outputs_are_put_into_the_order_of_the_names_in_the_file(
    record, names, tmp_path
):
    expected = network()
    torch.save(
        {"state_dict": expected.state_dict(), **RECORDS[record](names)},
        tmp_path / "a.pth",
    )
    loaded = teacher(
        {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}
    )
    assert same_answers(loaded, expected, [names.index(name) for name in CLASSES])
    assert "order of the data's classes" in loaded.notes[0]


def test_more_than_nine_numbered_names_are_in_the_order_of_numbers(tmp_path):
    expected = network(classes=12)
    data = tuple(sorted(str(number) for number in range(12)))
    torch.save(
        {
            "model": expected.state_dict(),
            "class_to_idx": {str(n): n for n in range(12)},
        },
        tmp_path / "a.pth",
    )
    loaded = teacher(
        {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")},
        classes=data,
    )
    assert same_answers(loaded, expected, [int(name) for name in data])


def test_names_in_a_file_that_the_data_does_not_have_are_refused(tmp_path):
    torch.save(
        {"model": network().state_dict(), "classes": ["x", *CLASSES[1:]]},
        tmp_path / "a.pth",
    )
    keys = {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}
    assert "teacher.classes=FILE" in refusal(keys)
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    assert same_answers(
        teacher({**keys, "classes": str(tmp_path / "names.txt")}), network()
    )


def test_lists_beside_the_weights_that_are_no_names_play_no_part(tmp_path):
    beside = {
        "classes": [0, 1, 2],
        "class_names": {"a": [1]},
        "vocab": {},
        "class_to_idx": None,
        "state": {0: {"a": 1}},
    }
    torch.save({"model": network().state_dict(), **beside}, tmp_path / "a.pth")
    assert same_answers(
        teacher({"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}),
        network(),
    )


def test_a_head_of_another_kind_is_reordered_too(tmp_path):
    """A network with two classifiers, each a batch norm and a linear layer."""
    expected = network("levit_128s")
    torch.save({"model": expected.state_dict(), "classes": TURNED}, tmp_path / "a.pth")
    loaded = teacher(
        {"model": "levit_128s", "checkpoint": str(tmp_path / "a.pth")}, size=224
    )
    assert same_answers(loaded, expected, [TURNED.index(name) for name in CLASSES])


def test_names_in_the_file_of_a_network_of_ones_own(tmp_path):
    expected = torchvision.models.squeezenet1_1(num_classes=5).eval()
    torch.save({"model": expected.state_dict(), "classes": TURNED}, tmp_path / "a.pth")
    keys = {
        "kind": "torch",
        "model": "torchvision.models:squeezenet1_1",
        "args": {"num_classes": 5},
    }
    keys |= {"checkpoint": str(tmp_path / "a.pth"), "mean": [0.5] * 3, "std": [0.5] * 3}
    assert same_answers(
        teacher(keys, 64), expected, [TURNED.index(name) for name in CLASSES]
    )


def test_a_student_of_classes_in_another_order_begins_with_zeros(tmp_path):
    torch.save({"model": network().state_dict(), "classes": TURNED}, tmp_path / "a.pth")
    keys = {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}
    assert not teacher(keys, config_path="student").network.head.weight.any()


# ------------------------------------------------------------- twins: equal shapes in
# equal order, other arithmetic


def lukemelas(names: list[str], tensors: Mapping[str, Tensor]) -> Tensors:
    """Return tensors under the names of EfficientNet-PyTorch, whose order is timm's."""
    rules = [
        (r"^conv_stem", "_conv_stem"),
        (r"^bn1", "_bn0"),
        (r"^conv_head", "_conv_head"),
        (r"^bn2", "_bn1"),
        (r"^classifier", "_fc"),
        (r"conv_dw", "_depthwise_conv"),
        (r"conv_pwl", "_project_conv"),
        (r"conv_pw", "_expand_conv"),
        (r"se\.conv_reduce", "_se_reduce"),
        (r"se\.conv_expand", "_se_expand"),
        (r"\.bn", "._bn"),
        (r"^blocks\.(\d)\.(\d)", r"_blocks.\1\2"),
    ]
    for old, new in rules:
        names = [re.sub(old, new, name) for name in names]
    return dict(zip(names, tensors.values(), strict=True))


def test_an_efficientnet_of_tensorflow_s_padding_is_not_its_twin(tmp_path):
    expected = network("tf_efficientnet_b0")
    tensors = expected.state_dict()
    torch.save(lukemelas([*tensors], tensors), tmp_path / "mine.pth")
    keys = {"model": "efficientnet_b0", "checkpoint": str(tmp_path / "mine.pth")}
    for choice in ("by_name", "by_order"):
        text = refusal({**keys, "weights": choice}, size=64)
        assert (
            "Set teacher.model=tf_efficientnet_b0 and teacher.weights=by_order" in text
        )
    keys["model"] = "tf_efficientnet_b0"
    assert "Set teacher.weights=by_order" in refusal(keys, size=64)
    assert same_answers(teacher({**keys, "weights": "by_order"}, size=64), expected)
    assert not same_answers(
        teacher({**keys, "weights": "by_order"}, size=64),
        twin(expected, "efficientnet_b0"),
    )
    identified = identify("--teacher", tmp_path / "mine.pth", "tf_efficientnet_b0")
    assert (identified.model, identified.by_order) == ("tf_efficientnet_b0", True)


def twin(model: nn.Module, name: str) -> nn.Module:
    """Return another network with the same tensors."""
    copy = timm.create_model(name, num_classes=5).eval()
    copy.load_state_dict(
        dict(zip(copy.state_dict(), model.state_dict().values(), strict=True))
    )
    return copy


@pytest.mark.parametrize(
    ("theirs", "twins"),
    [
        ("mobilenet_v3_small", ["mobilenetv3_small_100", "tf_mobilenetv3_small_100"]),
        ("efficientnet_b0", ["tf_efficientnet_b0"]),
    ],
)
def test_a_twin_of_torchvision_s_is_refused_and_the_section_can_be_pasted(
    theirs, twins, tmp_path
):
    torch.manual_seed(0)
    expected = getattr(torchvision.models, theirs)(num_classes=5).eval()
    torch.save(
        {"arch": theirs, "state_dict": expected.state_dict()}, tmp_path / "a.pth"
    )
    for name in twins:
        text = refusal(
            {
                "model": name,
                "checkpoint": str(tmp_path / "a.pth"),
                "weights": "by_order",
            },
            size=64,
        )
        assert "names of torchvision" in text
        section = re.search(r"Write teacher: ({.*}), where N is", text)
        assert section
        keys = yaml.safe_load(section[1].replace("num_classes: N", "num_classes: 5"))
        assert same_answers(teacher(keys, size=64), expected)


def test_a_network_that_timm_lacks_is_named_as_torchvision_has_it(tmp_path):
    """`kd init` knows no name of timm for it, and pastes none."""
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=5).eval()
    path = tmp_path / "shufflenet_v2_x0_5-f707e7126e.pth"
    torch.save(
        {f"features.0.{name}": tensor for name, tensor in model.state_dict().items()},
        path,
    )
    with pytest.raises(
        ModelError,
        match=r"names of torchvision.*torchvision\.models:shufflenet_v2_x0_5",
    ):
        identify("--teacher", path)


# --------------------------------------------------------------------------------
# not the tensors themselves


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("prefix", ["", "head."])
def test_integers_without_their_scales_are_refused(dtype, prefix, tmp_path):
    model = network()
    tensors = {
        n: (100 * t).to(dtype) if n.startswith(prefix) else t
        for n, t in model.state_dict().items()
    }
    for name in ("a.pth", "a.safetensors"):
        (
            save_file(tensors, tmp_path / name)
            if name.endswith("s")
            else torch.save(tensors, tmp_path / name)
        )
        text = refusal(
            {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / name)}
        )
        assert "quantized weights" in text
        assert "integers: " in text
        assert "Give the name of the network that was trained, and its args" not in text


def test_halves_are_cast(tmp_path):
    model = network().half()
    torch.save(model.state_dict(), tmp_path / "a.pth")
    assert same_answers(
        teacher({"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}),
        model.float(),
    )


def test_empty_tensors_are_named(tmp_path):
    """ZeRO-3 leaves placeholders; one of them stands where the network has one
    number.
    """
    model = network(init_values=1e-5)
    torch.save(
        {"module": {name: torch.empty(0) for name in model.state_dict()}},
        tmp_path / "a.pth",
    )
    text = refusal(
        {
            "model": NAME,
            "args": {**ARGS, "init_values": 1e-5},
            "checkpoint": str(tmp_path / "a.pth"),
        }
    )
    assert "empty tensors" in text
    assert "zero_to_fp32.py" in text
    torch.save(model.state_dict() | {"norm.bias": torch.empty(0)}, tmp_path / "a.pth")
    text = refusal(
        {
            "model": NAME,
            "args": {**ARGS, "init_values": 1e-5},
            "checkpoint": str(tmp_path / "a.pth"),
        }
    )
    assert "empty: norm.bias" in text


# --------------------------------------------------------------------------------
# more than one network


@pytest.mark.parametrize(
    ("student", "prefix"),
    [
        ("model.", "teacher."),
        ("student_model.", "teacher_model."),
        ("module.model.", "module.teacher."),
        ("online_encoder.", "target_encoder."),
        ("net._orig_mod.", "ema_model.module."),
        ("model.", "ema."),
    ],
)
def test_a_student_beside_its_teacher_is_chosen_by_name(student, prefix, tmp_path):
    first = network()
    second = network(seed=1)
    tensors = prefixed(student, first.state_dict()) | prefixed(
        prefix, second.state_dict()
    )
    torch.save({"state_dict": tensors}, tmp_path / "a.pth")
    keys = {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}
    loaded = teacher(keys)
    assert same_answers(loaded, second)
    advice = re.search(
        r"; \['([\w.]+)'\] would fit too \(teacher\.weights: raw, or a name\)",
        loaded.notes[0],
    )
    assert advice
    assert same_answers(teacher({**keys, "weights": advice[1]}), first)
    assert same_answers(teacher({**keys, "weights": "raw"}), first)


@pytest.mark.parametrize("nested", [True, False])
def test_two_networks_of_which_none_is_averaged_are_refused_and_a_name_chooses(
    nested, tmp_path
):
    first = network().state_dict()
    second = network(seed=1).state_dict()
    flat = prefixed("model.", first) | prefixed("net.", second)
    torch.save({"model": first, "net": second} if nested else flat, tmp_path / "a.pth")
    keys = {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}
    text = refusal(keys)
    assert "several networks that fit: ['model', 'net']" in text
    assert "Set teacher.weights to its name" in text
    for name, seed in (("model", 0), ("net", 1)):
        assert same_answers(teacher({**keys, "weights": name}), network(seed=seed))


def test_several_networks_are_named_to_kd_init(tmp_path):
    first = timm.create_model("resnet10t", num_classes=5)
    second = timm.create_model("resnet10t", num_classes=5)
    torch.save(
        {"model": first.state_dict(), "net": second.state_dict()}, tmp_path / "a.pth"
    )
    with pytest.raises(
        ModelError, match=r"several networks that fit: \['model', 'net'\]"
    ):
        identify("--teacher", tmp_path / "a.pth", "resnet10t")


def test_an_adapter_beside_its_base_is_refused(tmp_path):
    torch.save(network().state_dict(), tmp_path / "pytorch_model.bin")
    assert teacher({"model": NAME, "args": ARGS, "checkpoint": str(tmp_path)})
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "merge_and_unload" in refusal(
        {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path)}
    )


def test_an_adapter_beside_its_base_of_transformers_is_refused(tmp_path):
    hub = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    config = hub.ViTConfig(
        **sizes, image_size=32, num_labels=5, id2label=dict(enumerate(CLASSES))
    )
    hub.ViTForImageClassification(config).save_pretrained(tmp_path)
    hub.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    keys = {"kind": "transformers", "model": str(tmp_path), "pretrained": True}
    assert teacher(keys, 32).classes == CLASSES
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    text = refusal(keys, size=32)
    assert text.startswith("teacher.model: ")
    assert "merge_and_unload" in text


# --------------------------------------------------------------------------------
# what its trainer wrote


@pytest.mark.parametrize("as_dictionary", [True, False])
@pytest.mark.parametrize(
    "size", [{"img_size": 32}, {"input_size": [3, 32, 32]}, {"input_size": 32}]
)
@pytest.mark.parametrize("model", [NAME, "resnet10t"])
def test_the_pixels_of_its_trainer_are_used(model, size, as_dictionary, tmp_path):
    args = (
        {key: value for key, value in ARGS.items() if key != "img_size"}
        if model == NAME
        else {}
    )
    model_of_trainer = network(
        model, **args, **({"img_size": 32} if model == NAME else {})
    )
    wrote = {"model": model, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], **size}
    wrote = wrote if as_dictionary else argparse.Namespace(**wrote)
    torch.save(
        {"arch": model, "state_dict": model_of_trainer.state_dict(), "args": wrote},
        tmp_path / "a.pth",
    )
    keys = {"model": model, "args": args, "checkpoint": str(tmp_path / "a.pth")}
    loaded = teacher(keys)
    image = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)
        for values in ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    )
    with torch.no_grad():
        expected = model_of_trainer(((image.double() / 255 - mean) / std).float())
        torch.testing.assert_close(loaded(image).logits, expected, rtol=1e-4, atol=1e-5)
    assert loaded.input_size == 32
    assert "kd uses the mean, std, input_size that its trainer wrote" in loaded.notes[0]


def test_the_configuration_goes_before_its_trainer(tmp_path):
    wrote = argparse.Namespace(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6], img_size=32)
    torch.save(
        {"state_dict": network("resnet10t").state_dict(), "args": wrote},
        tmp_path / "a.pth",
    )
    overlay = {"mean": [0.5, 0.5, 0.5], "input_size": [3, 48, 48]}
    keys = {
        "model": "resnet10t",
        "args": {"pretrained_cfg_overlay": overlay},
        "checkpoint": str(tmp_path / "a.pth"),
    }
    loaded = teacher(keys)
    assert loaded.input_size == 48
    torch.testing.assert_close(
        -loaded.shift / loaded.scale / 255, torch.full((1, 3, 1, 1), 0.5)
    )
    torch.testing.assert_close(
        1 / loaded.scale / 255, torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)
    )
    assert "kd uses the std that" in loaded.notes[0]
    torch.save(
        {"state_dict": network().state_dict(), "args": wrote}, tmp_path / "a.pth"
    )
    assert (
        teacher(
            {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}
        ).input_size
        == 16
    )


@pytest.mark.parametrize(
    "wrote",
    [
        {"mean": None, "img_size": None},
        {"mean": 0.5, "std": "imagenet"},
        {"img_size": {}},
    ],
)
def test_a_trainers_record_without_numbers_plays_no_part(wrote, tmp_path):
    torch.save(
        {"state_dict": network("resnet10t").state_dict(), "args": wrote},
        tmp_path / "a.pth",
    )
    loaded = teacher({"model": "resnet10t", "checkpoint": str(tmp_path / "a.pth")})
    plain: Any = network("resnet10t")
    assert loaded.input_size == plain.pretrained_cfg["input_size"][-1]
    assert "kd uses" not in " ".join(loaded.notes)


def test_a_student_keeps_the_size_of_the_data(tmp_path):
    args = {key: value for key, value in ARGS.items() if key != "img_size"}
    wrote = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "img_size": 32}
    torch.save(
        {"state_dict": network(img_size=32).state_dict(), "args": wrote},
        tmp_path / "a.pth",
    )
    loaded = teacher(
        {"model": NAME, "args": args, "checkpoint": str(tmp_path / "a.pth")},
        config_path="student",
    )
    assert loaded.input_size == 16
    torch.testing.assert_close(
        1 / loaded.scale / 255, torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)
    )


# --------------------------------------------------------------------------------
# its names


@dataclass(frozen=True)
class Form:
    """A form of the names of a right network's file."""

    change: Callable[[Tensors], Any]
    right: bool = False  # at once
    says: str = ""  # a pattern of the line
    then: Mapping[str, Any] = field(
        default_factory=dict
    )  # keys that make it right, as the line says
    model: str = NAME
    args: Mapping[str, Any] = field(default_factory=lambda: ARGS)
    size: int = 16


def sub(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        re.sub(old, new, name): tensor for name, tensor in tensors.items()
    }


def outside(tensors: Tensors) -> Tensors:
    """The backbone has a prefix, and its classifier does not."""
    return {
        f"head.fc.{n[5:]}" if n.startswith("head.") else f"backbone.{n}": t
        for n, t in tensors.items()
    }


def deeper(tensors: Tensors) -> Tensors:
    """A classifier of two layers."""
    first = {"head.0.weight": torch.ones(24, 24), "head.0.bias": torch.ones(24)}
    return {n.replace("head.", "head.2."): t for n, t in tensors.items()} | first


RESNET: Keys = {"model": "resnet10t", "args": {}, "size": 32}
FORMS = {
    "torch.compile inside": Form(
        sub(r"^blocks\.0\.", "blocks.0._orig_mod."), right=True
    ),
    "checkpointing": Form(
        sub(r"^(blocks\.\d)\.", r"\1._checkpoint_wrapped_module."), right=True
    ),
    "FSDP": Form(
        sub(r"^(.*\.)", r"_fsdp_wrapped_module.\1_fsdp_wrapped_module."), right=True
    ),
    "DDP of torch.compile": Form(sub("^", "module._orig_mod."), right=True),
    "Opacus": Form(sub("^", "_module."), right=True),
    "head.fc": Form(sub(r"^fc\.", "head.fc."), right=True, **RESNET),
    "dropout before fc": Form(sub(r"^fc\.", "fc.1."), right=True, **RESNET),
    "last_linear": Form(sub(r"^fc\.", "last_linear."), right=True, **RESNET),
    "head.fc of a transformer": Form(sub(r"^head\.", "head.fc."), right=True),
    "the classifier outside": Form(outside, right=True),
    "two layers": Form(
        deeper,
        says=(
            r"a classifier of other layers.*missing head: head\.bias.*unexpected:"
            r" head\.0\.bias"
        ),
    ),
    "two layers outside": Form(
        lambda tensors: {
            n if n.startswith("head") else f"backbone.{n}": t
            for n, t in deeper(tensors).items()
        },
        says=(
            r"no classifier.*4 other tensors, such as 'head\.2|classifier of other"
            r" layers"
        ),
    ),
    "unknown names": Form(
        lambda tensors: {
            f"x{i}.weight": tensor for i, tensor in enumerate(tensors.values())
        },
        says=r"Set teacher\.weights=by_order",
        then={"weights": "by_order"},
    ),
    "pycls": Form(
        sub(r"^layer(\d)\.(\d)", r"s\1.b\2.f"),
        says=r"Set teacher\.weights=by_order",
        then={"weights": "by_order"},
        **RESNET,
    ),
    "the mean of the tokens": Form(
        sub(r"^norm\.", "fc_norm."),
        says=r"fc_norm.*Add global_pool: avg to teacher\.args",
        then={"args": {**ARGS, "global_pool": "avg"}},
    ),
    "another network": Form(sub("^blocks.0", "blocks.7"), says="unexpected: blocks.7"),
}


@pytest.mark.parametrize("name", FORMS)
def test_names_of_a_right_network_are_read_or_explained(name, tmp_path):
    form = FORMS[name]
    pool = {"global_pool": "avg"} if "global_pool" in form.then.get("args", {}) else {}
    expected = network(form.model, 0, 5, **pool)
    tensors = dict(expected.state_dict())
    torch.save(
        {"model": form.change(sub(r"^fc_norm\.", "norm.")(tensors))}, tmp_path / "a.pth"
    )
    keys = {
        "model": form.model,
        "args": dict(form.args),
        "checkpoint": str(tmp_path / "a.pth"),
    }
    if not form.right:
        assert re.search(form.says, refusal(keys, size=form.size))
        keys |= form.then
    if form.right or form.then:
        assert same_answers(teacher(keys, size=form.size), expected)


def test_a_part_of_a_classifier_is_refused(tmp_path):
    tensors = {
        name: tensor
        for name, tensor in network().state_dict().items()
        if name != "head.bias"
    }
    torch.save(tensors, tmp_path / "a.pth")
    assert "missing: head.bias (1)" in refusal(
        {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.pth")}
    )


def test_safetensors_have_no_order_to_offer(tmp_path):
    tensors = {
        f"x{i}.weight": tensor
        for i, tensor in enumerate(network().state_dict().values())
    }
    save_file(tensors, tmp_path / "a.safetensors")
    text = refusal(
        {"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "a.safetensors")}
    )
    assert "Set teacher.weights=by_order" not in text
    assert "safetensors keep no order" in text


# --------------------------------------------------------------------------------
# not one whole file


def test_all_parts_are_read_wherever_one_is_named(tmp_path):
    tensors = [*network().state_dict().items()]
    for number, items in enumerate((tensors[:9], tensors[9:]), 1):
        torch.save(dict(items), tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    for place in (tmp_path, *tmp_path.iterdir()):
        assert same_answers(
            teacher({"model": NAME, "args": ARGS, "checkpoint": str(place)}), network()
        )
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    for place in (tmp_path, *tmp_path.iterdir()):
        text = refusal({"model": NAME, "args": ARGS, "checkpoint": str(place)})
        assert "one of 2 parts, of which 1 are in its folder" in text


def test_folds_of_a_cross_validation_are_no_parts(tmp_path):
    for fold in (1, 2):
        torch.save(network(seed=fold).state_dict(), tmp_path / f"fold-{fold}-of-2.pth")
    keys = {
        "model": NAME,
        "args": ARGS,
        "checkpoint": str(tmp_path / "fold-1-of-2.pth"),
    }
    assert same_answers(teacher(keys), network(seed=1))


def test_an_archive_of_numpy_is_named_and_timm_rewrites_it(tmp_path):
    """Google's weights: timm reads them, under names of JAX."""
    arrays: dict[str, Any] = {"embedding/kernel": np.zeros((1, 1))}
    np.savez(tmp_path / "w.npz", **arrays)
    text = refusal({"model": NAME, "args": ARGS, "checkpoint": str(tmp_path / "w.npz")})
    assert "an archive of numpy" in text
    assert "Could this error message" not in text
    assert f"checkpoint_path='{tmp_path / 'w.npz'}'" in text
