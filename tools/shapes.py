"""Write `kd/models/shapes.txt`: the networks of timm and torchvision by the sizes of their matrices.

    python tools/shapes.py

A line has a set of sizes and the networks that have it. Networks are built on the meta device, without values: five CPU
minutes. The file names the networks of the installed timm; an older index knows fewer names, and a file of weights is
then recognized by its name alone. Not found: torchvision's with more than one classifier (Inception, GoogLeNet).
"""

import warnings
from collections.abc import Mapping

import timm
import torch
import torchvision

from kd.core.errors import KdError
from kd.models.load_classifier import built_bare
from kd.models.shapes import INDEX, signature


def key_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the key of tensors in the index."""
    return f"{sum(signature(tensors).values()) % 2**64:016x}"


def line_of(name: str) -> str:
    """Return the key of a network in the index: its matrices and kernels without its classifiers."""
    with torch.device("meta"):
        network, heads = built_bare("tools", name)
    classifiers = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    named = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    left_out = {*heads, *(f"{one}.weight" for one in named)}
    kept = {key: tensor for key, tensor in network.state_dict().items() if key not in left_out}
    return key_of(kept)


def torchvision_line(name: str) -> str:
    """Return the key of a network of torchvision; its classifier is its last matrix."""
    with torch.device("cpu" if name.startswith("regnet") else "meta"):  # a RegNet computes when it is built
        tensors = torchvision.models.get_model(name).state_dict()
    last = [key for key, tensor in tensors.items() if tensor.ndim in (2, 4)][-1]
    return key_of({key: tensor for key, tensor in tensors.items() if key != last})


def main() -> None:
    """Write the index."""
    lines: dict[str, list[str]] = {}
    for name in timm.list_models():
        try:
            lines.setdefault(line_of(name), []).append(name)
        except KdError as error:
            print(f"left out: {name} ({error})")
    for name in torchvision.models.list_models(torchvision.models):
        lines.setdefault(torchvision_line(name), []).append(f"torchvision.models:{name}")
    INDEX.write_text("".join(f"{key} {' '.join(names)}\n" for key, names in sorted(lines.items())))
    print(f"{INDEX}: {sum(map(len, lines.values()))} networks, {len(lines)} sets of sizes")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
