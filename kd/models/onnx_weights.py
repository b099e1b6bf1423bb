"""Read the weights of an ONNX graph under timm's names.

Exporters keep parameter names, except for the matrices of linear layers, which they transpose: these are found by their
bias. A vision transformer with transformers' names (ViT, DeiT, DINOv2) gets timm's names. Not handled: quantized
graphs, and linear layers without a bias.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from kd.core.errors import ModelError
from kd.models.runtimes import require

NAMES = {
    r"embeddings\.cls_token": "cls_token",
    r"embeddings\.position_embeddings": "pos_embed",
    r"embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"encoder\.layer\.(\d+)\.attention\.(?:output\.dense|o_proj)": r"blocks.\1.attn.proj",
    r"encoder\.layer\.(\d+)\.(?:mlp\.fc1|intermediate\.dense)": r"blocks.\1.mlp.fc1",
    r"encoder\.layer\.(\d+)\.(?:mlp\.fc2|output\.dense)": r"blocks.\1.mlp.fc2",
    r"encoder\.layer\.(\d+)\.(?:norm1|layernorm_before)": r"blocks.\1.norm1",
    r"encoder\.layer\.(\d+)\.(?:norm2|layernorm_after)": r"blocks.\1.norm2",
    r"encoder\.layer\.(\d+)\.layer_scale(\d)\.lambda1": r"blocks.\1.ls\2.gamma",
    r"layernorm": "norm",
}
"""Names in transformers and in timm, where query, key and value are one matrix."""
QUERY = re.compile(r"encoder\.layer\.(\d+)\.attention\.(?:attention\.query|q_proj)\.(weight|bias)")
PARTS = {"query": ("query", "key", "value"), "q_proj": ("q_proj", "k_proj", "v_proj")}


def read(where: str, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a graph by name; `where` is the config path for messages."""
    onnx = require("onnx", where)
    try:
        graph = onnx.load(str(file)).graph
        arrays = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    except Exception as error:  # protobuf and onnx have types of their own
        raise ModelError(where, f"'{file}' is no whole ONNX graph ({error})", "", "Export it anew") from error
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if array.dtype.kind == "f"}
    for node in graph.node:  # exporters merge equal tensors
        if node.op_type == "Identity" and node.input[0] in tensors:
            tensors[node.output[0]] = tensors[node.input[0]]
    made_by = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        bias = next((name for name in node.input if name.endswith(".bias") and name in tensors), "")
        factors = [made_by[name] for name in node.input if name in made_by and made_by[name].op_type == "MatMul"]
        for matrix in (name for one in factors for name in one.input if bias and node.op_type == "Add"):
            if matrix in tensors:
                tensors[f"{bias.removesuffix('bias')}weight"] = tensors[matrix].T.contiguous()
    begin = next(
        (name.removesuffix("embeddings.cls_token") for name in tensors if "embeddings.cls_token" in name), None
    )
    return tensors if begin is None else _as_timm({n.removeprefix(begin): t for n, t in tensors.items()})


def _as_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found, width = dict[str, Tensor](), tensors["embeddings.cls_token"].shape[-1]
    for name, tensor in tensors.items():
        for pattern, replacement in NAMES.items():
            if match := re.fullmatch(rf"{pattern}((?:\.weight|\.bias)?)", name):
                found[match.expand(replacement) + match.group(match.lastindex or 0)] = tensor
        if match := QUERY.fullmatch(name):
            query = name.split(".")[-2]
            three = [tensors[name.replace(query, part)] for part in PARTS[query]]
            found[f"blocks.{match[1]}.attn.qkv.{match[2]}"] = torch.cat(three)
    if "pos_embed" not in found:  # if the graph resamples it, it is stored in two unnamed parts
        folded = [t for name, t in tensors.items() if "::" in name and t.ndim == 3 and t.shape[::2] == (1, width)]
        folded.sort(key=lambda tensor: tensor.shape[1])
        found["pos_embed"] = torch.cat(folded[-2:], dim=1) if folded else tensors["embeddings.cls_token"][:, :0]
    return found
