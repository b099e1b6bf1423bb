"""A student whose first weights are cut from its teacher's, against one from scratch, at equal steps on CIFAR-10.

    python benchmarks/cut.py [key=value ...] --data FOLDER [--work runs/proof] [--jobs 2]

Weight selection (arXiv:2311.18823, uniform): of each axis of a weight the student takes evenly spaced entries, the same
ones wherever that axis has as many. Teacher, data, cache and options are those of `proof.py`; both arms last a quarter
of its epochs. The cut student begins with the same weights for each seed; order and views differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import proof
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(proof.ROOT))

from examples.residual import network

LENGTH = 0.25


def selected(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of the student's shapes, cut from the teacher's."""
    cut = {}
    for name, own in student.items():
        values = teacher[name]
        for axis, size in enumerate(own.shape):
            values = values.index_select(axis, torch.linspace(0, values.shape[axis] - 1, size).round().long())
        cut[name] = values.to(own.dtype).contiguous()
    return cut


def main() -> None:
    """Write the cut weights, then let `proof.py` train both arms."""
    options = proof.arguments(sys.argv[1:])
    teacher = load_file(proof.fitted(options)[0] / "model.safetensors")
    width = proof.settings(options)["student"]["args"]["width"]
    student = network(width).state_dict()
    prefix = next(name for name in teacher if name.endswith("0.0.weight")).removesuffix("0.0.weight")
    file = Path(options.work) / "cut.safetensors"
    save_file(selected({name.removeprefix(prefix): value for name, value in teacher.items()}, student), file)
    begin = ("student.init=pretrained", f"student.checkpoint={file}")
    proof.ARMS.clear()
    proof.ARMS["kl, a quarter"] = (proof.kl(2.0), proof.CACHE, LENGTH)
    proof.ARMS["kl, a quarter, cut"] = (proof.kl(2.0), (*proof.CACHE, *begin), LENGTH)
    proof.main(sys.argv[1:], "cut")


if __name__ == "__main__":
    main()
