"""Classifiers from uint8 pixels to logits, and ensembles of them.

Each normalizes and resizes images as its network needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from kd.core.errors import ModelError
from kd.core.types import Outputs


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Hold a model's native preprocessing, its library's transform of an image."""

    library: str
    prepare: Callable[[Image.Image], Tensor]  # RGB image -> normalized pixels [3, H, W]
    keys: str  # its keys of size and crop with their values, as text for messages


class Classifier(nn.Module):
    """Wrap any module that maps normalized images [B, 3, S, S] to logits [B, C].

    All models of a run get the same uint8 pixels. Each normalizes with its own mean and
    standard deviation and, if its input size differs from the data's, resizes on the
    device (bicubic, antialiased). It implements `kd.core.contracts.TeacherModel`.
    """

    runtime = "torch"
    reads_ids = False
    preprocessing: Preprocessing | None = None  # None: the model has none
    notes: Sequence[str] = ()  # see `kd.core.contracts.HasWarnings`

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        input_size: int,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        features: Collection[str] = (),
        architecture: Any = None,
        classes: Sequence[str] = (),
    ) -> None:
        """Wrap `network`.

        With `num_classes` 0 it has no classifier, and its output [B, D] is the pooled
        features.
        """
        # `input_size` in pixels; 0: any. `mean` and `std` are per channel, for pixels
        # in 0..1. `features`: names of `Outputs.features` to return as well (timm
        # networks only). `architecture`: its arguments as JSON values, since weights
        # alone do not determine the number of heads.
        super().__init__()
        self.network = network
        self.num_classes = num_classes
        self.input_size = input_size
        self.features = tuple(sorted(features))
        self.architecture = architecture
        self.classes = tuple(classes)
        self.project: nn.Module | None = None
        """Projector of an embedding student into its teacher's space, for search in the
        teacher's index.
        """
        scales = torch.tensor([1 / (255 * s) for s in std])
        shifts = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self.register_buffer("scale", scales.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("shift", shifts.view(1, 3, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Outputs:
        return self.outputs(self.normalize(image))

    def outputs(self, pixels: Tensor) -> Outputs:
        if not self.features:
            if self.num_classes:
                return Outputs(self.network(pixels))
            return Outputs(pixels.new_zeros(len(pixels), 0))
        network: Any = self.network
        inner = network.forward_features(pixels)
        pooled_BD = network.forward_head(inner, pre_logits=True)
        features = {"pooled": pooled_BD} if "pooled" in self.features else {}
        if "tokens" in self.features:
            features["tokens"] = tokens_of(network, inner)
        if not self.num_classes:
            return Outputs(pooled_BD.new_zeros(len(pooled_BD), 0), features)
        head = network.get_classifier()
        # A network with two heads (distilled DeiT) has no single map from features to
        # logits.
        if isinstance(head, nn.Module):
            return Outputs(head(pooled_BD), features)
        return Outputs(network.forward_head(inner), features)

    def answer(self, image: Tensor) -> Tensor:
        """Return the outputs of its export for uint8 images.

        They are logits [B, C], or pooled features [B, D] of length 1.
        """
        return self.head(self.normalize(image))

    def head(self, pixels: Tensor) -> Tensor:
        """Return the same outputs for normalized images."""
        output = self.network(pixels)
        if self.num_classes:
            return output
        if self.project is not None:
            output = self.project(output)
        return F.normalize(output, dim=1)

    def normalize(self, image: Tensor) -> Tensor:
        """Return float [B, 3, S, S], normalized, in the network's dtype."""
        pixels = resized(image, self.input_size)
        pixels = torch.addcmul(self.shift, pixels, self.scale)  # type: ignore[arg-type]
        return pixels.to(next(self.network.parameters(), pixels).dtype)

    def identity(self) -> dict[str, Any]:
        input_spec = [
            self.input_size,
            *self.scale.flatten().tolist(),  # type: ignore
            *self.shift.flatten().tolist(),  # type: ignore
        ]
        return {
            "teacher": digest(self.network),
            "architecture": self.architecture,
            "input": input_spec,
        }

    @property
    def num_features(self) -> int:
        """Return the width D of the pooled features; 0 if unknown.

        It is that after `project` if there is one.
        """
        if isinstance(self.project, nn.Linear):
            return self.project.out_features
        width = getattr(
            self.network, "head_hidden_size", getattr(self.network, "num_features", 0)
        )
        return int(width) if width else 0


class Network(nn.Module):
    """Wrap a foreign module so that it returns one tensor."""

    def __init__(
        self, inner: nn.Module, change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self.change = change
        self.pick: nn.Module = nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        answer = main_output(self.inner(pixels), "model")
        return self.pick(answer if self.change is None else self.change(answer))


def resized(image: Tensor, size: int) -> Tensor:
    """Resize uint8 images [B, 3, H, W] to float32 [B, 3, S, S] in 0..255.

    The resize is bicubic and antialiased; S = 0 keeps the size.
    """
    pixels = image.to(torch.float32)
    if not size or tuple(image.shape[-2:]) == (size, size):
        return pixels
    return F.interpolate(
        pixels, size=(size, size), mode="bicubic", antialias=True
    ).clamp_(0, 255)


def main_output(answer: Any, config_path: str) -> Tensor:
    """Return the tensor in a module's output.

    It is the output, a tuple's first item, `.logits` or `.pooler_output`.
    """
    for name in ("logits", "pooler_output"):
        value = (
            answer.get(name)
            if isinstance(answer, Mapping)
            else getattr(answer, name, None)
        )
        if isinstance(value, Tensor):
            return value
    output = answer[0] if isinstance(answer, (tuple, list)) and answer else answer
    if isinstance(output, Tensor):
        return output
    wrong = f"the model returns {type(answer).__name__}"
    raise ModelError(
        config_path,
        wrong,
        "A tensor, a tuple that begins with one, or an object with .logits",
        "Wrap it",
    )


def tokens_of(network: nn.Module, inner: Tensor) -> Tensor:
    """Return the tokens [B, N, D] from a timm network's `forward_features`."""
    # For a transformer: the patch tokens, without class and register tokens. For a
    # feature map: its positions, row by row.
    if isinstance(inner, Tensor) and inner.ndim == 3:
        return inner[:, int(getattr(network, "num_prefix_tokens", 0)) :]
    if isinstance(inner, Tensor) and inner.ndim == 4:
        last = str(getattr(network, "output_fmt", "NCHW")).endswith("NHWC")
        return inner.flatten(1, 2) if last else inner.flatten(2).transpose(1, 2)
    wrong = (
        f"'{type(network).__name__}' returns no tokens and no feature map, which a loss"
        " needs"
    )
    raise ModelError(
        "losses",
        wrong,
        "Vision transformers and convolutional networks do",
        "Take a loss on pooled",
    )


@torch.no_grad()
def feature_shapes(model: Any, image_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's features by name, without B.

    They come from a forward of a black image.
    """
    if not getattr(model, "features", ()):
        return {}
    first = next(chain(model.parameters(), model.buffers()), None)
    device = getattr(first, "device", None)
    image = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=device)
    inputs: tuple[Tensor, ...] = (image,)
    if getattr(model, "reads_ids", False):
        inputs = (image, torch.zeros(1, dtype=torch.int64))
    training = model.training
    outputs = model.eval()(*inputs)
    model.train(training)
    return {name: tuple(value.shape[1:]) for name, value in outputs.features.items()}


REORDERED = "its outputs were put into the order of the data's classes"


class Pick(nn.Module):
    """Return the logits of the data's classes, in the data's order.

    A teacher may have more, or another order.
    """

    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(columns))

    def forward(self, logits: Tensor) -> Tensor:
        return logits[:, self.columns]  # type: ignore[index]


class LogitsModel(nn.Module):
    """Wrap any module from images to logits [B, C].

    It has no normalization, resizing or features.
    """

    # Float images are cast to the dtype of its weights, and its logits to float32.

    classes: Sequence[str] = ()
    notes: Sequence[str] = ()
    runtime = "torch"
    reads_ids = False

    def __init__(self, network: nn.Module, config_path: str = "model") -> None:
        super().__init__()
        self.network = network
        self.config_path = config_path

    def forward(self, image: Tensor) -> Outputs:
        dtype = image.dtype
        if image.is_floating_point():
            weights = (w for w in self.network.parameters() if w.is_floating_point())
            dtype = next(weights, image).dtype
        # A copy: a module that normalizes in place must not change the caller's data or
        # the other model's images.
        pixels = image.to(dtype, copy=True)
        return Outputs(main_output(self.network(pixels), self.config_path).float())

    def identity(self) -> dict[str, Any]:
        return {"teacher": digest(self.network)}


class Ensemble(nn.Module):
    """Average the probabilities of several classifiers.

    arXiv:1503.02531 distills such an ensemble.
    """

    # It averages probabilities, because a teacher with large logits would dominate an
    # average of logits. The average is taken at temperature 1 and softened later, so a
    # cache stores one record per image. Features are not averaged: each model's have
    # their own names in the outputs (see `Outputs.of`).

    def __init__(
        self,
        members: Sequence[Any],
        weights: Sequence[float],
        average: Callable[..., Tensor],
    ) -> None:
        """Combine K teachers of the same classes.

        Only the ratios of their `weights` (each above 0) matter.
        """
        # `average` is the task's: (logits [K, B, C], shares [K]) -> logits [B, C] of
        # the averaged probabilities.
        super().__init__()
        self.members = nn.ModuleList(members)
        self.average = average
        self.shares = [weight / sum(weights) for weight in weights]
        self.classes = members[0].classes
        runtimes = sorted({member.runtime for member in members} - {"torch"})
        self.runtime = " and ".join(runtimes) or "torch"
        self.reads_ids = any(member.reads_ids for member in members)

    def validation(self, test: bool = False) -> Ensemble:
        members = [
            member.validation(test) if member.reads_ids else member  # type: ignore[operator]
            for member in self.members
        ]
        return Ensemble(members, self.shares, self.average)

    @property
    def features(self) -> tuple[str, ...]:
        return getattr(self.members[0], "features", ())

    @property
    def network(self) -> nn.Module:
        return nn.ModuleList([member.network for member in self.members])  # type: ignore[arg-type]

    def identity(self) -> dict[str, Any]:
        members: Any = [member.identity() for member in self.members]  # type: ignore[operator]
        joined = {
            name: [member.get(name) for member in members]
            for name in dict.fromkeys(chain(*members))
        }
        if self.runtime == "torch":
            teacher = digest(self.network)
        else:
            digests = " ".join(joined["teacher"])
            teacher = hashlib.sha256(digests.encode()).hexdigest()
        return {**joined, "teacher": teacher, "shares": self.shares}

    def forward(
        self, image: Tensor, ids: Tensor | None = None, view: int = 0
    ) -> Outputs:
        outputs = [
            member(image, ids, view) if member.reads_ids else member(image)
            for member in self.members
        ]
        features = {
            f"{name}.{k}" if k else name: value
            for k, output in enumerate(outputs)
            for name, value in output.features.items()
        }
        if not outputs[0].logits.shape[1]:
            return Outputs(outputs[0].logits, features)
        logits_KBC = torch.stack([output.logits.float() for output in outputs])
        shares_K = torch.tensor(self.shares, device=image.device)
        return Outputs(self.average(logits_KBC, shares_K), features)


def digest(network: nn.Module) -> str:
    """Return a hash of the weights (names, shapes, dtypes, bits)."""
    return tensors_digest(network.state_dict())


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the `digest` of a network with these tensors."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def set_attention(module: nn.Module, fused: bool) -> int:
    """Choose torch's fused attention kernel or plain matrix products.

    Return the number of changed layers.
    """
    # timm chooses at construction. The faster kernel depends on device and shape, so it
    # is set again here (on one CPU unfused was 1.4 times faster in training).
    for layer in module.modules():
        if isinstance(getattr(layer, "fused_attn", None), bool):
            layer.fused_attn = fused  # type: ignore[assignment]
    return count_attention(module)


def count_attention(module: Any) -> int:
    """Return the number of attention layers that support both kernels."""
    return sum(
        isinstance(getattr(layer, "fused_attn", None), bool)
        for layer in module.modules()
    )


def trained_network(student: Any) -> nn.Module:
    """Return the network of a student, whose parameters have their author's names."""
    network = getattr(student, "network", student)
    return network.inner if isinstance(network, Network) else network


def layer_groups(
    network: nn.Module, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Return timm's parameter groups with rates by depth, all trainable.

    `lr_scale` is `layer_decay` to the power of a layer's depth.
    """
    from timm.optim import param_groups_layer_decay  # only for layer-wise rates

    exempt = getattr(network, "no_weight_decay", set)()
    return param_groups_layer_decay(
        network, weight_decay, exempt, layer_decay=layer_decay
    )


def head_modules(network: Any) -> list[nn.Module]:
    """Return a network's classifiers; [] if it does not declare them."""
    heads = network.get_classifier() if hasattr(network, "get_classifier") else ()
    heads = heads if isinstance(heads, (tuple, list)) else (heads,)
    return [head for head in heads if isinstance(head, nn.Module)]


def head_parameters(network: Any) -> list[nn.Parameter]:
    """Return the parameters of a network's classifiers."""
    return [
        parameter
        for module in head_modules(network)
        for parameter in module.parameters()
    ]
