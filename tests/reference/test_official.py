"""Compare losses with values of the papers' official code; `golden/losses.json` names
its source.
"""

import json
from pathlib import Path

import pytest
import torch

from kd.core.types import Batch, Dims, Outputs
from kd.parts import registry

GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())


@pytest.mark.parametrize(
    "row", GOLDEN["outputs"], ids=lambda row: f"{row['loss']}-{row['repository']}"
)
def test_equals_the_official_code(row):
    inputs = {name: torch.tensor(rows) for name, rows in GOLDEN["inputs"].items()}
    student_BC = inputs["student_BC"].requires_grad_()
    label_B = inputs["label_B"]
    one_B = torch.ones(len(label_B))
    image = torch.zeros(len(label_B), 3, 1, 1, dtype=torch.uint8)
    batch = Batch(
        ids=label_B,
        image=image,
        label=label_B,
        partner_label=label_B,
        lam=one_B,
        weight=one_B,
    )

    module = registry.find("losses", row["loss"], "losses")
    loss = module.build(
        module.Options(**row["options"]), Dims(student_BC.shape[1], 0, 0)
    )
    value = loss(Outputs(student_BC), Outputs(inputs["teacher_BC"]), batch).mean()
    (gradient_BC,) = torch.autograd.grad(value, student_BC)

    # The official code ran in float64, ours in float32 on the same numbers: only
    # rounding may differ.
    assert value.item() == pytest.approx(row["value"], rel=2e-6)
    torch.testing.assert_close(
        gradient_BC, torch.tensor(row["gradient_BC"]), rtol=1e-4, atol=1e-6
    )
