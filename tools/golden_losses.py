"""Run the papers' official code on one fixed batch and write what it says into a golden
file.

    python tools/golden_losses.py CHECKOUTS tests/reference/golden/losses.json

CHECKOUTS holds git clones named `owner/name`; each file is read at the commit given
here and run in memory, in float64. Only numbers are kept: none of that code is part of
this repository.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

B = 6  # images
C = 5  # classes

MDISTILLER = ("megvii-research/mdistiller", "a08d46f10d6102bd6e3f258ca5ac880b020ea259")
DIST_KD = ("hunto/DIST_KD", "2418f18b1fedd7c2646a7b1b9a27d5c674c2170b")
TTM = ("zkxufo/TTM", "fe457b33a71ba27536ec04fe3d32c5b04963522f")


class Source(NamedTuple):
    """One of our losses, and the call of official code that must give its number."""

    loss: str
    options: dict[str, float]
    origin: tuple[str, str]
    path: str
    call: str
    """Evaluated inside the file at `path`, with `student`, `teacher` (logits) and
    `label` defined.
    """


SOURCES = [
    Source(
        "kl",
        {"temperature": 4.0},
        MDISTILLER,
        "mdistiller/distillers/KD.py",
        "kd_loss(student, teacher, temperature=4.0)",
    ),
    Source(
        "dkd",
        {"alpha": 1.0, "beta": 8.0, "temperature": 4.0},
        MDISTILLER,
        "mdistiller/distillers/DKD.py",
        "dkd_loss(student, teacher, label, alpha=1.0, beta=8.0, temperature=4.0)",
    ),
    Source(
        "dkd",
        {"alpha": 1.0, "beta": 0.5, "temperature": 1.0},
        MDISTILLER,
        "mdistiller/distillers/DKD.py",
        "dkd_loss(student, teacher, label, alpha=1.0, beta=0.5, temperature=1.0)",
    ),
    Source(
        "dist",
        {"beta": 1.0, "gamma": 1.0, "temperature": 1.0},
        DIST_KD,
        "segmentation/losses/dist_kd.py",
        "DIST(beta=1.0, gamma=1.0)(student, teacher)",
    ),
    Source(
        "dist",
        {"beta": 1.0, "gamma": 2.0, "temperature": 2.0},
        TTM,  # the DIST authors' own code has no temperature
        "distiller_zoo/dist.py",
        "DIST(beta=1.0, gamma=2.0, tau=2.0)(student, teacher)",
    ),
    Source(
        "wttm",
        {"gamma": 0.2},
        TTM,
        "distiller_zoo/wttm.py",
        "WTTM(l=0.2)(student, teacher)",
    ),
]

WITHOUT_OFFICIAL_CODE = {
    "ce": "cross-entropy has no official code; see test_ce.py for its formula",
    "cosine": "one line; see test_cosine.py for its formula",
    "tokens": "the paper's formula on resampled grids; see test_tokens.py",
    "cckd": "the paper's formula with one of its kernels; see test_cckd.py",
}


def load(checkouts: Path, source: Source) -> types.ModuleType:
    """Run one file of a clone as a module, with empty shells for what it imports."""
    repository, commit = source.origin
    command = [
        "git",
        "-C",
        str(checkouts / repository),
        "show",
        f"{commit}:{source.path}",
    ]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registry = types.SimpleNamespace(register_module=lambda: lambda cls: cls)
    shells = {
        "official": {"__path__": []},
        "official._base": {"Distiller": nn.Module},
        "mmcls": {},
        "mmcls.registry": {"MODELS": registry},
    }
    for name, members in shells.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(members)
    module = types.ModuleType("official.loss")
    module.__package__ = "official"
    exec(compile(code, source.path, "exec"), module.__dict__)
    return module


def main(checkouts: str, target: str) -> None:
    """Write the golden file."""
    generator = torch.Generator().manual_seed(20)
    # exact in float32, computed with in float64
    student_BC = (3 * torch.randn(B, C, generator=generator)).double()
    teacher_BC = (3 * torch.randn(B, C, generator=generator)).double()
    label_B = torch.randint(C, (B,), generator=generator)

    outputs = []
    for source in SOURCES:
        leaf_BC = student_BC.clone().requires_grad_()
        arguments = {"student": leaf_BC, "teacher": teacher_BC, "label": label_B}
        value = eval(source.call, load(Path(checkouts), source).__dict__, arguments)
        (gradient_BC,) = torch.autograd.grad(value, leaf_BC)
        repository, commit = source.origin
        outputs.append(
            {
                "loss": source.loss,
                "options": source.options,
                "repository": repository,
                "commit": commit,
                "path": source.path,
                "call": source.call,
                "value": value.item(),
                "gradient_BC": gradient_BC.tolist(),
            }
        )

    record = {
        "about": (
            "Loss and gradient by official code, in float64. Made by"
            " tools/golden_losses.py."
        ),
        "torch": torch.__version__,
        "without_official_code": WITHOUT_OFFICIAL_CODE,
        "inputs": {
            "student_BC": student_BC.tolist(),
            "teacher_BC": teacher_BC.tolist(),
            "label_B": label_B.tolist(),
        },
        "outputs": outputs,
    }
    text = json.dumps(record, indent=1)
    one_row_a_line = re.sub(
        r"\[\s+([-+.\de,\s]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text
    )
    Path(target).write_text(one_row_a_line + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
