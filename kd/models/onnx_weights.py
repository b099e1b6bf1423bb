"""Read the weights of an ONNX graph under timm's names.

Exporters keep parameter names, except for the matrices of linear layers, which they
transpose: these are found by their bias. A vision transformer with transformers' names
(ViT, DeiT, DINOv2) gets timm's names. Not handled: quantized graphs, and linear layers
without a bias.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd.core.errors import ModelError
from kd.models.checkpoints import KNOWN
from kd.models.fitting import rename_by_rules
from kd.models.runtimes import import_package


def read_graph(config_path: str, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a graph by name.

    `config_path` is the config path for messages.
    """
    onnx = import_package("onnx", config_path)
    try:
        graph = onnx.load(str(file)).graph
        arrays = {
            weight.name: onnx.numpy_helper.to_array(weight)
            for weight in graph.initializer
        }
    except Exception as error:  # protobuf and onnx have types of their own
        raise ModelError(
            config_path,
            f"'{file}' is no whole ONNX graph ({error})",
            "",
            "Export it anew",
        ) from error
    tensors = {
        name: torch.from_numpy(array.copy())
        for name, array in arrays.items()
        if array.dtype.kind == "f"
    }
    for node in graph.node:  # exporters merge equal tensors
        if node.op_type == "Identity" and node.input[0] in tensors:
            tensors[node.output[0]] = tensors[node.input[0]]
    _add_linear_weights(tensors, graph)
    for name in tensors:
        if "embeddings.cls_token" in name:
            prefix = name.removesuffix("embeddings.cls_token")
            return _as_timm_vit(
                {name.removeprefix(prefix): t for name, t in tensors.items()}
            )
    return tensors


def _add_linear_weights(tensors: dict[str, Tensor], graph: Any) -> None:
    """Name the transposed matrices of linear layers by the biases added behind them."""
    made_by = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        biases = [n for n in node.input if n.endswith(".bias") and n in tensors]
        if node.op_type != "Add" or not biases:
            continue
        weight = f"{biases[0].removesuffix('bias')}weight"
        for name in node.input:
            product = made_by.get(name)
            if product is None or product.op_type != "MatMul":
                continue
            for matrix in product.input:
                if matrix in tensors:
                    tensors[weight] = tensors[matrix].T.contiguous()


def _as_timm_vit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = rename_by_rules(KNOWN["graph"], tensors)
    class_token = tensors["embeddings.cls_token"]
    renamed = {new: tensors[name] for name, new in names.items() if new != name}
    for query in [name for name in renamed if ".attn.q." in name]:
        matrices = [
            renamed.pop(query.replace(".q.", f".{letter}.")) for letter in "qkv"
        ]
        renamed[query.replace(".q.", ".qkv.")] = torch.cat(matrices)
    # if the graph resamples it, it is stored in two unnamed parts
    if "pos_embed" not in renamed:
        folded = [
            tensor
            for name, tensor in tensors.items()
            if "::" in name
            and tensor.ndim == 3
            and tensor.shape[::2] == (1, class_token.shape[-1])
        ]
        folded.sort(key=lambda tensor: tensor.shape[1])
        folded = folded or [class_token[:, :0]]
        renamed["pos_embed"] = torch.cat(folded[-2:], dim=1)
    return renamed
