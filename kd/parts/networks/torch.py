"""Your own module: `model: module:function` builds it, `checkpoint` holds its weights
(.pth or .safetensors).

The function gets `args` and returns an nn.Module that maps normalized images [B, 3, S,
S] to logits [B, C]: a tensor, a tuple that begins with it, or an object with `.logits`
(or `.pooler_output`, where no logits are needed).
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kd.core.errors import ModelError, first_sentence
from kd.core.facts import NetworkFacts
from kd.core.types import Outputs
from kd.models.checkpoints import read_weights
from kd.models.classifier import Classifier, Network, main_output
from kd.models.examination import FAILURES, fails
from kd.models.fitting import match_state_dict
from kd.models.load_classifier import without_meta_warnings
from kd.models.spec import Spec
from kd.parts.networks import _shared as shared
from kd.parts.networks._shared import Options

facts = NetworkFacts(runs_code=True, trains=True)


class Embedder(Classifier):
    """A module without classes, whose outputs are pooled features."""

    def outputs(self, pixels: Tensor) -> Outputs:
        pooled_BD = self.network(pixels).flatten(1)
        return Outputs(pooled_BD.new_zeros(len(pooled_BD), 0), {"pooled": pooled_BD})


def build(
    options: Options, spec: Spec, image_size: int, features: Collection[str]
) -> Classifier:
    """Build the module, load its weights, and run it once."""
    shared.require_one_output(spec, features, "torch")
    function = shared.find_function(spec)
    shared.require_normalization(spec.config_path, options.mean)
    try:
        inner = function(**spec.args)
    except TypeError as error:
        wrong = f"'{spec.model}' refuses them ({first_sentence(error)})"
        raise ModelError(
            f"{spec.config_path}.args", wrong, "", "Correct them"
        ) from error
    if not isinstance(inner, nn.Module):
        wrong = f"'{spec.model}' returns {type(inner).__name__}"
        raise ModelError(
            f"{spec.config_path}.model", wrong, "A function that returns an nn.Module"
        )
    model_names: Sequence[str] = ()
    # weights must match exactly; a .pth is read_weights without running code
    if spec.checkpoint:
        weights = read_weights(f"{spec.config_path}.checkpoint", spec.checkpoint)
        if spec.exact_head:
            model_names = weights.classes or ()
        fitting = match_state_dict(weights, inner, spec.model, spec.weights)
        with without_meta_warnings():
            inner.load_state_dict(fitting.tensors)
    size = options.input_size or image_size
    arguments: dict[str, Any] = {
        "input_size": size,
        "mean": options.mean,
        "std": options.std,
        "architecture": {
            "function": spec.model,
            "args": spec.args,
            "source": _source_hash(function),
            "outputs": options.outputs,
        },
        "features": () if spec.logits else ("pooled",),
    }
    network = Network(inner.eval(), shared.to_logits(spec, options.outputs))
    if not spec.logits:
        return Embedder(network, num_classes=0, **arguments)
    answer_BC = _first_answer(spec, inner, size)
    shared.require_logits(spec, answer_BC, options.outputs)
    names, network.pick = shared.select_classes(
        spec, answer_BC.shape[1], model_names, options.classes
    )
    return Classifier(network, num_classes=len(names), classes=names, **arguments)


@torch.no_grad()
def _first_answer(spec: Spec, inner: nn.Module, size: int) -> Tensor:
    noise = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    weight = next(inner.parameters(), noise)
    try:
        output = inner(noise.to(weight.dtype))
        return main_output(output, f"{spec.config_path}.model").float()
    except FAILURES as error:
        raise fails(spec.config_path, spec.model, size, error) from error


def _source_hash(function: Any) -> str:
    """Return a hash of the module's source, on which outputs depend as on weights."""
    try:
        source = inspect.getsource(sys.modules[function.__module__])
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]
