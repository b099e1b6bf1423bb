"""Write `kd/models/shapes.txt`: the networks of timm by the sizes of their matrices, a line for each set of sizes.

    python tools/shapes.py

Networks are built on the meta device, without values: four CPU minutes. The file names the networks of the installed
timm; an older index knows fewer names, and a file of weights is then recognized by its name alone.
"""

import warnings

import timm
import torch

from kd.core.errors import KdError
from kd.models.load_classifier import built_bare
from kd.models.recognize import INDEX, signature


def line_of(name: str) -> str:
    """Return the key of a network in the index: its matrices and kernels without its classifiers."""
    with torch.device("meta"):
        network, heads = built_bare("tools", name)
    classifiers = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    named = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    left_out = {*heads, *(f"{one}.weight" for one in named)}
    kept = {key: tensor for key, tensor in network.state_dict().items() if key not in left_out}
    return f"{signature(kept)[0] % 2**64:016x}"


def main() -> None:
    """Write the index."""
    lines: dict[str, list[str]] = {}
    for name in timm.list_models():
        try:
            lines.setdefault(line_of(name), []).append(name)
        except KdError as error:
            print(f"left out: {name} ({error})")
    INDEX.write_text("".join(f"{key} {' '.join(names)}\n" for key, names in sorted(lines.items())))
    print(f"{INDEX}: {sum(map(len, lines.values()))} networks, {len(lines)} sets of sizes")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
