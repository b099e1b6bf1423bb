"""Read the weights of an ONNX graph under timm's names.

Exporters keep parameter names, except for the matrices of linear layers, which they
transpose: these are found by their bias. A vision transformer with transformers' names
(ViT, DeiT, DINOv2) gets timm's names. Not handled: quantized graphs, and linear layers
without a bias.
"""

from pathlib import Path

import torch
from torch import Tensor

from kd.core.errors import ModelError
from kd.models.checkpoints import KNOWN
from kd.models.fitting import renamed
from kd.models.runtimes import require


def read(config_path: str, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a graph by name; `config_path` is the config path for
    messages.
    """
    onnx = require("onnx", config_path)
    try:
        graph = onnx.load(str(file)).graph
        arrays = {
            one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer
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
    made_by = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        bias = next(
            (name for name in node.input if name.endswith(".bias") and name in tensors),
            "",
        )
        factors = [
            made_by[name]
            for name in node.input
            if name in made_by and made_by[name].op_type == "MatMul"
        ]
        for matrix in (
            name
            for one in factors
            for name in one.input
            if bias and node.op_type == "Add"
        ):
            if matrix in tensors:
                tensors[f"{bias.removesuffix('bias')}weight"] = tensors[
                    matrix
                ].T.contiguous()
    begin = next(
        (
            name.removesuffix("embeddings.cls_token")
            for name in tensors
            if "embeddings.cls_token" in name
        ),
        None,
    )
    return (
        tensors
        if begin is None
        else _as_timm({n.removeprefix(begin): t for n, t in tensors.items()})
    )


def _as_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names, width = (
        renamed(KNOWN["graph"], tensors),
        tensors["embeddings.cls_token"].shape[-1],
    )
    timms = {new: tensors[name] for name, new in names.items() if new != name}
    for query in [name for name in timms if ".attn.q." in name]:
        three = [timms.pop(query.replace(".q.", f".{part}.")) for part in "qkv"]
        timms[query.replace(".q.", ".qkv.")] = torch.cat(three)
    if (
        "pos_embed" not in timms
    ):  # if the graph resamples it, it is stored in two unnamed parts
        folded = [
            t
            for name, t in tensors.items()
            if "::" in name and t.ndim == 3 and t.shape[::2] == (1, width)
        ]
        folded.sort(key=lambda tensor: tensor.shape[1])
        timms["pos_embed"] = (
            torch.cat(folded[-2:], dim=1)
            if folded
            else tensors["embeddings.cls_token"][:, :0]
        )
    return timms
